"""The whole transformer, slow and explicit: float64, Python loops over batch, token and head.

It reads the spec and the weights and shares no code with `mod_models`. Every formula of docs/models.md is written
here a second time, for one token and one head at a time, as a reference for batched models.

Vectors are numpy arrays of float64; `x[t]` is the residual stream of token t of one row.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from loop_experts import ACTIVATIONS, mixture, noise, silu

Weights = Mapping[str, np.ndarray]
Site = int | str
ROUTER_ACTIVATIONS: dict[str, Callable[[float], float]] = {
    "silu": silu, "relu": lambda x: max(0.0, x), "tanh": math.tanh,
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
}  # fmt: skip


@dataclass
class RowTrace:
    """Results of one row: logits of its real tokens, and for each routing site the selected tokens and the scores of
    the tokens it was given; the number of tokens without a slot, and the margin of the closest choice.
    """

    logits: list[np.ndarray] = field(default_factory=list)
    chosen: dict[Site, list[int]] = field(default_factory=dict)
    scores: dict[Site, dict[int, float]] = field(default_factory=dict)
    overflow: int = 0
    margin: float = math.inf


@dataclass
class Row:
    """State of one row in the model. `here` lists the tokens that have not left it, `open` those that the next router
    can select, `count` is the number of tokens that a graph counts there, real or not, and `w` has the weights of the
    current layer.
    """

    spec: dict
    ids: list[int]
    x: list[np.ndarray]
    here: list[int]
    open: list[int]
    count: int
    training: bool
    w: Weights = field(default_factory=dict)
    layer: int = 0
    trace: RowTrace = field(default_factory=RowTrace)


def reference(
    spec: dict, weights: Weights, ids: list[list[int]], lengths: list[int], *, training: bool = False
) -> list[RowTrace]:
    """Runs each row separately. k comes from the padded length, as in a static graph; pads have no effect."""
    weights = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
    return [_row(spec, weights, row[:n], len(row), training) for row, n in zip(ids, lengths, strict=True)]


def _row(spec: dict, weights: Weights, ids: list[int], padded: int, training: bool) -> RowTrace:
    x = [spec["embedding_scale"] * weights["embedding.weight"][token] for token in ids]
    row = Row(spec, ids, x, list(range(len(ids))), list(range(len(ids))), padded, training)
    routed = _layers(spec["routing"], spec["n_layers"])
    together = spec["routing"]["blocks_per_router"] if routed else 1
    for layer in range(spec["n_layers"]):
        _enter(row, layer, weights)
        if layer in routed:
            k = _capacity(spec["routing"], routed.index(layer), padded)
            if together > 1:
                _routed_blocks(row, k, weights, together)
            else:
                _routed_block(row, k)
        elif not any(first < layer < first + together for first in routed):
            _unrouted(row, "attention")
            _unrouted(row, "mlp")
    head = weights["embedding.weight"] if spec["tie_embeddings"] else weights["head.weight"]
    for token in row.x:
        row.trace.logits.append(head @ _rms_norm(token, weights["norm.weight"], spec["norm_eps"]))
    return row.trace


def _enter(row: Row, layer: int, weights: Weights) -> None:
    row.layer = layer
    row.w = {n.split(".", 2)[2]: value for n, value in weights.items() if n.startswith(f"layers.{layer}.")}


def _layers(declared: dict | None, n_layers: int) -> list[int]:
    if declared is None:
        return []
    layers = declared["layers"]
    if isinstance(layers, dict):
        return [
            i
            for i in range(layers["skip_first"], n_layers - layers["skip_last"])
            if i >= layers["offset"] and (i - layers["offset"]) % layers["every"] == 0
        ]
    return list(layers)


def _capacity(routing: dict, routed_index: int, seq: int) -> int:
    capacity = routing["capacity"]
    if isinstance(capacity, list | tuple):
        capacity = capacity[routed_index]
    return {
        "floor": lambda: math.floor(capacity * seq),
        "floor_min1": lambda: max(1, math.floor(capacity * seq)),
        "strict_floor": lambda: max(2, math.floor(capacity * seq)) - 1,
        "ceil": lambda: math.ceil(capacity * seq),
        "absolute": lambda: seq if capacity > seq else int(capacity),
    }[routing["capacity_rule"]]()


def _unrouted(row: Row, part: str) -> None:
    """Runs this part of the block for every token in `row.here`."""
    deltas = _deltas(row, part, row.here, [row.x[t] for t in row.here], row.here, row.count)
    for i, t in enumerate(row.here):
        row.x[t] = row.x[t] + deltas[i]


def _routed_block(row: Row, k: int) -> None:
    routing, given = row.spec["routing"], {t: row.x[t] for t in row.here}
    if routing["parts"] == "block":
        _routed_part(row, k, row.layer, ("attention", "mlp"), given)
    else:
        for part in ("attention", "mlp"):
            if routing["parts"] == "separate":
                _routed_part(row, k, f"{row.layer}.{part}", (part,), given)
            elif routing["parts"] == part:
                _routed_part(row, k, row.layer, (part,), given)
            else:
                _unrouted(row, part)
    if routing["selection"] == "exit":
        # A token that was not chosen keeps its present value to the end.
        row.here, row.count = row.trace.chosen[row.layer], k


def _routed_blocks(row: Row, k: int, weights: Weights, together: int) -> None:
    """One router, the selected tokens in several blocks one after the other, and one sum at the end."""
    routing, first = row.spec["routing"], row.layer
    if k == 0:
        return
    weigh, decide = _scores(row, first, ("attention", "mlp"), {})
    chosen = _select(row, first, decide, k)
    positions = chosen if routing["positions"] == "original" else list(range(len(chosen)))
    before = [row.x[t] for t in chosen]
    result = before
    for layer in range(first, first + together):
        _enter(row, layer, weights)
        result = [x + a for x, a in zip(result, _attention(row.spec, row.w, result, positions), strict=True)]
        result = [x + _mlp(row.spec, row.w, x) for x in result]
    for i, t in enumerate(chosen):
        g = _gate(routing, weigh[t], [weigh[other] for other in chosen])
        delta = result[i] - before[i]
        row.x[t] = _combine(routing["combine"], before[i], np.zeros_like(delta), delta, g)


def _routed_part(row: Row, k: int, site: Site, parts: tuple[str, ...], block_input: dict[int, np.ndarray]) -> None:
    routing = row.spec["routing"]
    gates_skipped = routing["skipped_result"] == "scaled" or (
        routing["skipped_result"] == "adapter" and routing["adapter_gate"] == "rest"
    )
    if k == 0 and not gates_skipped:
        for t in row.here:
            row.x[t] = _skipped(row, row.x[t], 1.0)
        return
    weigh, decide = _scores(row, site, parts, block_input)
    chosen: list[int] = []
    if k:
        chosen = _select(row, site, decide, k)
    before = [row.x[t] for t in chosen]
    positions = chosen if routing["positions"] == "original" else list(range(len(chosen)))
    a = m = None
    if "attention" in parts and routing["skipped_keys_values"] == "kept":
        every = _attention(row.spec, row.w, [row.x[t] for t in row.here], row.here)
        a = [every[row.here.index(t)] for t in chosen]
    elif "attention" in parts:
        a = _deltas(row, "attention", chosen, before, positions, k)
    if "mlp" in parts:
        m = _deltas(row, "mlp", chosen, before if a is None else [x + y for x, y in zip(before, a, strict=True)], [], k)
    for t in row.here:
        if t not in chosen:
            row.x[t] = _skipped(row, row.x[t], _gate(routing, weigh[t], []) if gates_skipped else 1.0)
    for i, t in enumerate(chosen):
        g = _gate(routing, weigh[t], [weigh[other] for other in chosen])
        zero = np.zeros_like(before[i])
        row.x[t] = _combine(routing["combine"], before[i], zero if a is None else a[i], zero if m is None else m[i], g)


def _scores(
    row: Row, site: Site, parts: tuple[str, ...], block_input: dict[int, np.ndarray]
) -> tuple[dict[int, float], dict[int, float]]:
    """Scores of the router, which weigh, and the scores that decide."""
    routing = row.spec["routing"]
    second = site == f"{row.layer}.mlp"
    norm = "mlp_norm.weight" if parts == ("mlp",) else "attention_norm.weight"
    seen = {t: row.x[t] for t in row.here}
    if routing["router_stream"] == "block":
        norm, seen = "attention_norm.weight", block_input
    if routing["router_input"] == "normed":
        seen = {t: _rms_norm(x, row.w[norm], row.spec["norm_eps"]) for t, x in seen.items()}
    drawn = dict(enumerate(noise(routing["noise_seed"], str(site), row.ids)))
    weigh = drawn
    if routing["router"] != "noise":
        name = "mlp_router" if second else "router"
        act = ROUTER_ACTIVATIONS[routing["router_activation"]]
        weigh = {t: _score(row.spec, routing["router"], row.w, name, x, act) for t, x in seen.items()}
    decide = weigh
    if routing["selection"] == "predictor" and not row.training:
        name = "mlp_predictor" if second else "predictor"
        decide = {t: _score(row.spec, "mlp", row.w, name, x) for t, x in seen.items()}
    elif routing["selection"] == "random":
        decide = drawn
    decide = {t: math.inf if t < routing["always_first"] else score for t, score in decide.items()}
    return weigh, decide


def _skipped(row: Row, x: np.ndarray, g: float) -> np.ndarray:
    """The value of a token after a part that skips it."""
    routing, w = row.spec["routing"], row.w
    if routing["skipped_result"] == "identity":
        return x
    if routing["skipped_result"] == "scaled":
        return g * x
    normed = _rms_norm(x, w["mlp_norm.weight"], row.spec["norm_eps"])
    act = ACTIVATIONS[row.spec["activation"]]
    inner = normed
    if routing["adapter"] == "bottleneck":
        inner = np.array([act(value) for value in w["adapter.up_proj.weight"] @ normed])
    elif routing["adapter"] == "gated":
        gate, up = w["adapter.gate_proj.weight"] @ normed, w["adapter.up_proj.weight"] @ normed
        inner = np.array([act(value) * other for value, other in zip(gate, up, strict=True)])
    share = 1 - g if routing["adapter_gate"] == "rest" else 1.0
    return x + share * (w["adapter.down_proj.weight"] @ inner)


def _select(row: Row, site: Site, scores: dict[int, float], k: int) -> list[int]:
    """Tokens that run, in sequence order; the trace gets them and the scores of the tokens that could."""
    nested = row.spec["routing"]["candidates"] == "previous"
    candidates = row.open if nested else row.here
    row.trace.scores[site] = {t: scores[t] for t in candidates}
    chosen = row.trace.chosen[site] = _selected(row, candidates, scores, k)
    row.open = chosen
    return chosen


def _selected(row: Row, candidates: list[int], scores: dict[int, float], k: int) -> list[int]:
    trace, selection = row.trace, row.spec["routing"]["selection"]
    if selection == "threshold" or (selection == "predictor" and not row.training):
        chosen: list[int] = []
        for t in candidates:
            trace.margin = min(trace.margin, abs(scores[t]))
            if scores[t] > 0 and len(chosen) < k:
                chosen.append(t)
            elif scores[t] > 0:
                trace.overflow += 1
        return chosen
    # Tokens are ranked by score, the earlier first among equals, and then put back into sequence order.
    ranked = sorted(candidates, key=lambda t: (-scores[t], t))
    # Noise is the same number in every precision.
    if k < len(ranked) and selection != "random" and row.spec["routing"]["router"] != "noise":
        trace.margin = min(trace.margin, scores[ranked[k - 1]] - scores[ranked[k]])
    return sorted(ranked[:k])


def _deltas(
    row: Row, part: str, tokens: list[int], x: list[np.ndarray], positions: list[int], count: int
) -> list[np.ndarray]:
    """Updates that a part of the block adds to these tokens, whose values are x."""
    if part == "attention":
        return _attention(row.spec, row.w, x, positions)
    experts = row.spec["experts"]
    if row.layer not in _layers(experts, row.spec["n_layers"]):
        return [_mlp(row.spec, row.w, token) for token in x]
    normed = [_rms_norm(token, row.w["mlp_norm.weight"], row.spec["norm_eps"]) for token in x]
    fixed = experts["fixed_places"]
    fixed_here = fixed[_layers(experts, row.spec["n_layers"]).index(row.layer)] if fixed else None
    found = mixture(experts, row.w, normed, count, ACTIVATIONS[row.spec["activation"]], fixed_here)
    row.trace.margin = min(row.trace.margin, found.margin)
    for e, chosen in enumerate(found.chosen):
        site = f"{row.layer}.expert{e}"
        row.trace.chosen[site] = [tokens[i] for i in chosen]
        row.trace.scores[site] = dict(zip(tokens, found.scores[e], strict=True))
    row.trace.overflow += found.overflow
    return found.deltas


def _score(
    spec: dict, form: str, w: Weights, name: str, x: np.ndarray, activation: Callable[[float], float] = silu
) -> float:
    """Score of a token from a router or a predictor."""
    if form in ("mlp", "norm_mlp"):
        hidden = np.array(
            [float(row @ x) + b for row, b in zip(w[f"{name}.hidden.weight"], w[f"{name}.hidden.bias"], strict=True)]
        )
        if form == "norm_mlp":
            hidden = _rms_norm(hidden, w[f"{name}.norm.weight"], spec["norm_eps"])
        active = np.array([activation(float(value)) for value in hidden])
        return float(w[f"{name}.projection.weight"][0] @ active) + float(w[f"{name}.projection.bias"][0])
    score = float(w[f"{name}.projection.weight"][0] @ x)
    return score + float(w[f"{name}.projection.bias"][0]) if form == "linear_bias" else score


def _gate(routing: dict, score: float, chosen_scores: list[float]) -> float:
    a, b = routing["gate_scale"], routing["gate_shift"]
    return {
        "identity": lambda: score,
        "sigmoid": lambda: 1 / (1 + math.exp(-score)),
        "scaled_sigmoid": lambda: a / (1 + math.exp(-score)),
        "sigmoid_affine": lambda: a / (1 + math.exp(-score)) + b,
        "tanh_affine": lambda: a * math.tanh(score) + b,
        "softmax_selected": lambda: math.exp(score) / sum(math.exp(other) for other in chosen_scores),
        "ones": lambda: 1.0,
    }[routing["gate"]]()


def _combine(name: str, x: np.ndarray, a: np.ndarray, m: np.ndarray, g: float) -> np.ndarray:
    block = x + a + m
    return {
        "paper": x + g * (block - x),
        "replace": g * block,
        "double_residual": x + g * block,
        "replace_ungated": block,
        "ffn_gated": x + a + g * m,
        "double_residual_ffn_gated": x + x + a + g * m,
    }[name]


def _attention(spec: dict, w: Weights, x: list[np.ndarray], positions: list[int]) -> list[np.ndarray]:
    """Updates that attention adds to each token; token i sees tokens 0..i of those given."""
    width, heads_per_kv = spec["d_head"], spec["n_heads"] // spec["n_kv_heads"]
    normed = [_rms_norm(token, w["attention_norm.weight"], spec["norm_eps"]) for token in x]
    out = []
    for i in range(len(x)):
        heads = []
        for head in range(spec["n_heads"]):
            rows = slice(head * width, (head + 1) * width)
            group = head // heads_per_kv
            kv_rows = slice(group * width, (group + 1) * width)
            query = _rotate(spec, _head(spec, w, "q", rows, normed[i]), positions[i])
            logits, values = [], []
            for j in range(i + 1):
                key = _rotate(spec, _head(spec, w, "k", kv_rows, normed[j]), positions[j])
                logits.append(float(query @ key) / math.sqrt(width))
                values.append(_linear(w, "attention.v_proj", normed[j], kv_rows))
            top = max(logits)
            share = [math.exp(logit - top) for logit in logits]
            heads.append(sum(s / sum(share) * v for s, v in zip(share, values, strict=True)))
        out.append(_linear(w, "attention.o_proj", np.concatenate(heads)))
    return out


def _linear(w: Weights, name: str, x: np.ndarray, rows: slice = slice(None)) -> np.ndarray:
    """Some rows of a projection, with the bias if there is one."""
    product = w[f"{name}.weight"][rows] @ x
    return product + w[f"{name}.bias"][rows] if f"{name}.bias" in w else product


def _head(spec: dict, w: Weights, which: str, rows: slice, x: np.ndarray) -> np.ndarray:
    """Query or key before its rotation."""
    head = _linear(w, f"attention.{which}_proj", x, rows)
    if spec["qk_norm"] == "none":
        return head
    return _rms_norm(head, w[f"attention.{which}_norm.weight"], spec["norm_eps"])


def _rotate(spec: dict, head: np.ndarray, position: int) -> np.ndarray:
    half = len(head) // 2
    rotated = np.empty_like(head)
    for pair in range(half):
        angle = position * _frequency(spec, pair)
        a, b = head[pair], head[pair + half]
        rotated[pair] = a * math.cos(angle) - b * math.sin(angle)
        rotated[pair + half] = a * math.sin(angle) + b * math.cos(angle)
    return rotated


def _frequency(spec: dict, pair: int) -> float:
    """Angle by which a pair rotates from one position to the next."""
    plain = 1 / spec["rope_theta"] ** (2 * pair / spec["d_head"])
    scaling = spec["rope_scaling"]
    if scaling is None:
        return plain
    if scaling["kind"] == "linear":
        return plain / scaling["factor"]
    wavelength, before = 2 * math.pi / plain, scaling["original_positions"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if wavelength < before / high:
        return plain
    if wavelength > before / low:
        return plain / scaling["factor"]
    smooth = (before / wavelength - low) / (high - low)
    return (1 - smooth) * plain / scaling["factor"] + smooth * plain


def _mlp(spec: dict, w: Weights, x: np.ndarray) -> np.ndarray:
    normed = _rms_norm(x, w["mlp_norm.weight"], spec["norm_eps"])
    gate, up = _linear(w, "mlp.gate_proj", normed), _linear(w, "mlp.up_proj", normed)
    act = ACTIVATIONS[spec["activation"]]
    return _linear(w, "mlp.down_proj", np.array([act(g) * u for g, u in zip(gate, up, strict=True)]))


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / math.sqrt(sum(value * value for value in x) / len(x) + eps) * weight

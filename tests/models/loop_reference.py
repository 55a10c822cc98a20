"""The whole transformer, slowly and in the open: float64, Python loops over batch, token and head.

It reads the spec and the weights and shares no code with `mod_models`: every formula of docs/semantics.md is written
out here a second time, for one token and one head at a time, so that a batched model has something to be compared with.

Vectors are numpy arrays of float64; `x[t]` is the residual stream of token t of one row.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

Weights = Mapping[str, np.ndarray]


@dataclass
class RowTrace:
    """One row: logits of its real tokens, each routed layer's choice, and how clear the closest choice was."""

    logits: list[np.ndarray] = field(default_factory=list)
    chosen: dict[int, list[int]] = field(default_factory=dict)
    margin: float = math.inf


def reference(spec: dict, weights: Weights, ids: list[list[int]], lengths: list[int]) -> list[RowTrace]:
    """Runs each row by itself. k comes from the padded length, as in a static graph; pads take part in nothing."""
    weights = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
    rows = []
    for row, length in zip(ids, lengths, strict=True):
        rows.append(_row(spec, weights, row[:length], len(row)))
    return rows


def _row(spec: dict, weights: Weights, ids: list[int], padded: int) -> RowTrace:
    trace = RowTrace()
    x = [weights["embedding.weight"][token] for token in ids]
    routed = _routed_layers(spec)
    for layer in range(spec["n_layers"]):
        w = {name.split(".", 2)[2]: value for name, value in weights.items() if name.startswith(f"layers.{layer}.")}
        if layer in routed:
            k = _capacity(spec["routing"], routed.index(layer), padded)
            if k > 0:
                x = _routed_block(spec, w, x, k, layer, trace)
        else:
            positions = list(range(len(x)))
            attention = _attention(spec, w, x, positions)
            x = [x[t] + attention[t] + _mlp(spec, w, x[t] + attention[t]) for t in positions]
    head = weights["embedding.weight"] if spec["tie_embeddings"] else weights["head.weight"]
    for token in x:
        trace.logits.append(head @ _rms_norm(token, weights["norm.weight"], spec["norm_eps"]))
    return trace


def _routed_layers(spec: dict) -> list[int]:
    if spec["routing"] is None:
        return []
    layers = spec["routing"]["layers"]
    if isinstance(layers, dict):
        return [
            i
            for i in range(spec["n_layers"])
            if i >= layers["offset"] and (i - layers["offset"]) % layers["every"] == 0
        ]
    return list(layers)


def _capacity(routing: dict, routed_index: int, seq: int) -> int:
    capacity = routing["capacity"]
    if isinstance(capacity, list | tuple):
        capacity = capacity[routed_index]
    rule = routing["capacity_rule"]
    if rule == "floor":
        return math.floor(capacity * seq)
    if rule == "floor_min1":
        return max(1, math.floor(capacity * seq))
    if rule == "ceil":
        return math.ceil(capacity * seq)
    assert rule == "absolute"
    return seq if capacity > seq else int(capacity)


def _routed_block(spec: dict, w: Weights, x: list[np.ndarray], k: int, layer: int, trace: RowTrace) -> list[np.ndarray]:
    routing = spec["routing"]
    scores = []
    for token in x:
        seen = token
        if routing["router_input"] == "normed":
            seen = _rms_norm(token, w["attention_norm.weight"], spec["norm_eps"])
        scores.append(_score(routing, w, seen))

    # The best first; of equal scores the earlier token first. Then back into the order of the sequence.
    ranked = sorted(range(len(x)), key=lambda t: (-scores[t], t))
    chosen = sorted(ranked[:k])
    if k < len(x):
        trace.margin = min(trace.margin, scores[ranked[k - 1]] - scores[ranked[k]])
    trace.chosen[layer] = chosen

    inside = [x[t] for t in chosen]
    positions = chosen if routing["positions"] == "original" else list(range(len(chosen)))
    attention = _attention(spec, w, inside, positions)
    new = list(x)
    for i, t in enumerate(chosen):
        a = attention[i]
        m = _mlp(spec, w, x[t] + a)
        g = _gate(routing, scores[t], [scores[other] for other in chosen])
        new[t] = _combine(routing["combine"], x[t], a, m, g)
    return new


def _score(routing: dict, w: Weights, x: np.ndarray) -> float:
    if routing["router"] == "mlp":
        hidden = [
            _silu(float(row @ x) + b) for row, b in zip(w["router.hidden.weight"], w["router.hidden.bias"], strict=True)
        ]
        return float(w["router.projection.weight"][0] @ np.array(hidden)) + float(w["router.projection.bias"][0])
    score = float(w["router.projection.weight"][0] @ x)
    return score + float(w["router.projection.bias"][0]) if routing["router"] == "linear_bias" else score


def _gate(routing: dict, score: float, chosen_scores: list[float]) -> float:
    a, b = routing["gate_scale"], routing["gate_shift"]
    match routing["gate"]:
        case "identity":
            return score
        case "sigmoid":
            return 1 / (1 + math.exp(-score))
        case "scaled_sigmoid":
            return a / (1 + math.exp(-score))
        case "tanh_affine":
            return a * math.tanh(score) + b
        case "softmax_selected":
            return math.exp(score) / sum(math.exp(other) for other in chosen_scores)
        case "ones":
            return 1.0
    raise AssertionError(routing["gate"])


def _combine(name: str, x: np.ndarray, a: np.ndarray, m: np.ndarray, g: float) -> np.ndarray:
    block = x + a + m
    match name:
        case "paper":
            return x + g * (block - x)
        case "replace":
            return g * block
        case "double_residual":
            return x + g * block
        case "replace_ungated":
            return block
        case "ffn_gated":
            return x + a + g * m
    raise AssertionError(name)


def _attention(spec: dict, w: Weights, x: list[np.ndarray], positions: list[int]) -> list[np.ndarray]:
    """What attention adds to each token; token i sees tokens 0..i of those given."""
    width, heads_per_kv = spec["d_head"], spec["n_heads"] // spec["n_kv_heads"]
    normed = [_rms_norm(token, w["attention_norm.weight"], spec["norm_eps"]) for token in x]
    out = []
    for i in range(len(x)):
        heads = []
        for head in range(spec["n_heads"]):
            rows = slice(head * width, (head + 1) * width)
            group = head // heads_per_kv
            kv_rows = slice(group * width, (group + 1) * width)
            query = _rotate(w["attention.q_proj.weight"][rows] @ normed[i], positions[i], spec["rope_theta"])
            logits, values = [], []
            for j in range(i + 1):
                key = _rotate(w["attention.k_proj.weight"][kv_rows] @ normed[j], positions[j], spec["rope_theta"])
                logits.append(float(query @ key) / math.sqrt(width))
                values.append(w["attention.v_proj.weight"][kv_rows] @ normed[j])
            top = max(logits)
            share = [math.exp(logit - top) for logit in logits]
            heads.append(sum(s / sum(share) * v for s, v in zip(share, values, strict=True)))
        out.append(w["attention.o_proj.weight"] @ np.concatenate(heads))
    return out


def _rotate(head: np.ndarray, position: int, theta: float) -> np.ndarray:
    half = len(head) // 2
    rotated = np.empty_like(head)
    for pair in range(half):
        angle = position / theta ** (2 * pair / len(head))
        a, b = head[pair], head[pair + half]
        rotated[pair] = a * math.cos(angle) - b * math.sin(angle)
        rotated[pair + half] = a * math.sin(angle) + b * math.cos(angle)
    return rotated


def _mlp(spec: dict, w: Weights, x: np.ndarray) -> np.ndarray:
    normed = _rms_norm(x, w["mlp_norm.weight"], spec["norm_eps"])
    gate, up = w["mlp.gate_proj.weight"] @ normed, w["mlp.up_proj.weight"] @ normed
    return w["mlp.down_proj.weight"] @ np.array([_silu(g) * u for g, u in zip(gate, up, strict=True)])


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / math.sqrt(sum(value * value for value in x) / len(x) + eps) * weight


def _silu(value: float) -> float:
    return value / (1 + math.exp(-value))

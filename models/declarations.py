"""Declarations of a spec about layers, routing and experts: plain data whose defaults are the published forms.

The checks of each declaration are here too; each problem names the field, the expected value and the actual value. A
spec is read before anything is built, so this module and `spec.py` do not import torch.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

LEARNED_ROUTERS = ("linear", "linear_bias", "mlp", "norm_mlp")
MLP_ROUTERS = ("mlp", "norm_mlp")
"""Routers with a hidden layer, `router_hidden` wide."""
ROUTERS = (*LEARNED_ROUTERS, "noise")
ROUTER_INPUTS = ("raw", "normed")
ROUTER_STREAMS = ("part", "block")
ROUTER_ACTIVATIONS = ("silu", "relu", "gelu", "tanh")
GATES = ("identity", "sigmoid", "scaled_sigmoid", "sigmoid_affine", "tanh_affine", "softmax_selected", "ones")
COMBINES = ("paper", "replace", "double_residual", "replace_ungated", "ffn_gated", "double_residual_ffn_gated")
FFN_GATED = ("ffn_gated", "double_residual_ffn_gated")
"""Combine rules that weigh only the MLP."""
SELECTIONS = ("topk", "threshold", "predictor", "random", "exit")
CAUSAL_SELECTIONS = ("threshold", "predictor")
"""Selections that decide about a token without looking at later tokens."""
CANDIDATES = ("all", "previous")
PARTS = ("block", "attention", "mlp", "separate")
POSITIONS = ("original", "compact")
KEYS_VALUES = ("absent", "kept")
RESULTS = ("identity", "scaled", "adapter")
"""What a routed part leaves of a token that it skips."""
ADAPTERS = ("linear", "bottleneck", "gated")
WIDE_ADAPTERS = ("bottleneck", "gated")
"""Adapters with a hidden layer, `adapter_hidden` wide."""
ADAPTER_GATES = ("ones", "rest")
CHOICES = ("token", "expert")
ATTENTION_BIASES: dict[str, str] = {"none": "", "qkv": "qkv", "all": "qkvo"}
"""Name -> which of the projections q, k, v and o have a bias."""
QK_NORMS = ("none", "head")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
ROPE_SCALINGS = ("linear", "llama3")


def tokens_of(capacity: float, seq: int) -> int:
    """Returns k, the number of tokens that a routed block selects: floor(`capacity` * `seq`), but at least 1.

    The product is computed in float64, as in published code: 0.29 of 100 tokens are 28, not 29.
    """
    return max(1, int(capacity * seq))


CAPACITY_RULES: dict[str, Callable[[float, int], int]] = {
    "floor": lambda capacity, seq: int(capacity * seq),
    "floor_min1": tokens_of,
    "strict_floor": lambda capacity, seq: max(1, int(capacity * seq) - 1),
    "ceil": lambda capacity, seq: math.ceil(capacity * seq),
    "absolute": lambda capacity, seq: min(int(capacity), seq),
}
"""Name -> (capacity, S) -> k, the number of tokens that a routed layer selects out of S; k is at most S."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary angles after training, so that a model reads longer texts.

    The angle of a pair per position is f = theta ** (-2 * pair / d_head), and its wavelength is w = 2 pi / f.

    Attributes:
        kind: `linear`, f / factor for every pair; `llama3`, f if w < original_positions / high_freq_factor,
            f / factor if w > original_positions / low_freq_factor, and between these limits the mixture
            (1 - s) * f / factor + s * f with s = (original_positions / w - low) / (high - low), as in Llama 3.1.
        factor: how many times longer the texts become.
        low_freq_factor: `low` above, only for `llama3`.
        high_freq_factor: `high` above, only for `llama3`.
        original_positions: tokens of the longest row before scaling, only for `llama3`.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryNth:
    """Layers offset, offset + every, ..., except the model's first `skip_first` and last `skip_last` layers."""

    every: int = 2
    offset: int = 1
    skip_first: int = 0
    skip_last: int = 0

    def of(self, n_layers: int) -> tuple[int, ...]:
        """The layers of this pattern, ascending."""
        chosen = range(self.offset, n_layers, self.every)
        return tuple(layer for layer in chosen if self.skip_first <= layer < n_layers - self.skip_last)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSpec:
    """Routing of blocks; the defaults are the paper's (arXiv 2404.02258, section 3).

    Attributes:
        layers: the blocks with a router, as a pattern or an explicit ascending list.
        blocks_per_router: how many consecutive blocks a router decides about, its own first: the tokens that it selects
            run all of them, and meet the others again after the last (Mixture-of-Recursions, arXiv 2507.10524).
        parts: the routed part of a block: the whole `block`; only its `attention` or only its `mlp`, while the other
            part runs on every token; or `separate`, both parts with one router each.
        router: `linear` (D -> 1), `linear_bias`, `mlp` (D -> router_hidden -> 1 with an activation), `norm_mlp` (`mlp`
            with an RMSNorm before the activation), or `noise`, Gaussian noise instead of a score for selection and gate
            (the paper's control, stochastic routing).
        router_input: `raw` residual stream, or `normed` by the norm of the part of the block that reads this stream.
        router_stream: the stream that the router reads: what the routed `part` gets, or what the `block` gets. They
            differ for the MLP, which gets the stream after attention.
        router_hidden: width of the hidden layer of the `mlp` and `norm_mlp` routers.
        router_activation: activation of that layer: `silu`, `relu`, `gelu` (error function), `tanh`.
        gate: the weight g as a function of the router's score l: `identity` l; `sigmoid`; `scaled_sigmoid`
            a * sigmoid(l); `sigmoid_affine` a * sigmoid(l) + b; `tanh_affine` a * tanh(l) + b; `softmax_selected`
            softmax over the scores of the selected tokens; `ones` 1.
        gate_scale: a, for the three gates that use it.
        gate_shift: b, for the two gates that use it.
        combine: the new value of a selected token x, with attention delta A, MLP delta M (on x + A), and
            Block = x + A + M: `paper` x + g (A + M); `replace` g * Block; `double_residual` x + g * Block;
            `replace_ungated` Block; `ffn_gated` x + A + g M; `double_residual_ffn_gated` x + (x + A + g M). If only one
            part is routed, the delta of the other part is left out. If a router decides about several blocks, Block is
            the result of all of them, and `paper` is x + g (Block - x).
        skipped_keys_values: whether routed attention sees the keys and values of skipped tokens: `absent`, as in the
            paper; `kept`, every token has a key and a value, and a selected token sees those of all tokens up to its
            own (FlexiDepth, arXiv 2503.23798).
        skipped_result: the new value of a skipped token x: `identity` x; `scaled` g x, with its own gate g (p-MoD,
            arXiv 2412.04449); `adapter` x + h adapter(norm(x)), with the norm of the MLP.
        adapter: the layer that skipped tokens run instead: `linear` (D -> D), `bottleneck` (D -> adapter_hidden -> D),
            or `gated`, an MLP as in the block, adapter_hidden wide. All but `linear` have the spec's
            activation; none has a bias.
        adapter_hidden: width of the hidden layer of the `bottleneck` and `gated` adapters.
        adapter_gate: h: `ones` 1; `rest` 1 - g.
        selection: `topk`, the k largest scores of the row's real tokens, ties to the earlier token (expert choice);
            `threshold`, the first k tokens of a row whose score is above 0 (token choice: later ones overflow);
            `predictor`, like `threshold` with the auxiliary predictor's output, but top-k during training; `random`,
            the k largest of Gaussian noise, gated by the router (a control in which only the choice is not learned);
            `exit`, top-k among the remaining tokens; a token that is not selected also skips all later blocks.
        candidates: the tokens that a router selects from: `all` tokens of the row; `previous`, only those that ran in
            the routed blocks of the router before it, which itself selects from all if it is the first one.
        always_first: how many tokens at the start of each row always run; they get slots before other tokens.
        noise_seed: seed of the noise for the router `noise` and the selection `random`.
        capacity_rule: name in CAPACITY_RULES.
        capacity: share of the tokens in (0, 1], or a number of tokens for `absolute`; a tuple has one entry for each
            routed layer.
        positions: RoPE positions inside a routed block: `original` in the sequence, or `compact` 0..k-1.
        predictor_hidden: width of the auxiliary causal predictor (paper, section 3.5); 0 for no predictor.
    """

    layers: EveryNth | tuple[int, ...] = EveryNth()
    blocks_per_router: int = 1
    parts: str = "block"
    router: str = "linear"
    router_input: str = "raw"
    router_stream: str = "part"
    router_hidden: int = 0
    router_activation: str = "silu"
    gate: str = "identity"
    gate_scale: float = 1.0
    gate_shift: float = 0.0
    combine: str = "paper"
    skipped_keys_values: str = "absent"
    skipped_result: str = "identity"
    adapter: str = "linear"
    adapter_hidden: int = 0
    adapter_gate: str = "ones"
    selection: str = "topk"
    candidates: str = "all"
    always_first: int = 0
    noise_seed: int = 0
    capacity_rule: str = "floor_min1"
    capacity: float | tuple[float, ...] = 0.125
    positions: str = "original"
    predictor_hidden: int = 0

    @property
    def draws(self) -> bool:
        """Whether noise selects or gates tokens."""
        return self.router == "noise" or self.selection == "random"

    @property
    def gates_skipped(self) -> bool:
        """Whether the new value of a skipped token depends on its gate."""
        return self.skipped_result == "scaled" or (self.skipped_result == "adapter" and self.adapter_gate == "rest")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts instead of the MLP; with no-op experts an integrated MoDE (arXiv 2404.02258, 4.3).

    Attributes:
        layers: the blocks that have experts.
        n_experts: number of experts, each a gated MLP of width d_ff with the spec's activation, without biases.
        choice: `token`, each token goes to its `top_k` most probable experts; the slots of an expert fill in the order
            of the row, and later tokens are dropped (Fedus et al., arXiv 2101.03961); `expert`, each expert takes the
            tokens for which its probability is largest (Zhou et al., arXiv 2202.09368).
        top_k: number of experts of a token, for `token` choice; if above 1, their weights are normalized to sum to 1.
        capacity_factor: slots of an expert, as a multiple of top_k * T / n_experts, the fair share of T tokens.
        fixed_places: slots of an expert instead of that share, one number for each layer with experts. Like the
            capacity rule `absolute`, they do not grow with the row, and are at most T. Empty for the share.
        noop_experts: number of additional experts that do nothing; a token that chooses only such experts is skipped.
    """

    layers: EveryNth | tuple[int, ...] = EveryNth(every=1, offset=0)
    n_experts: int = 8
    choice: str = "token"
    top_k: int = 1
    capacity_factor: float = 1.25
    fixed_places: tuple[int, ...] = ()
    noop_experts: int = 0

    def slots(self, tokens: int) -> int:
        """Slots of each expert for this number of tokens by `capacity_factor`, from 1 to `tokens`."""
        share = self.capacity_factor * self.top_k * tokens / self.n_experts
        return min(tokens, max(1, math.ceil(share)))


def declared_layers(declared: RoutingSpec | ExpertsSpec, n_layers: int) -> tuple[int, ...]:
    """The layers that routing or experts are declared for, ascending."""
    return declared.layers.of(n_layers) if isinstance(declared.layers, EveryNth) else declared.layers


LIMITS = {
    "vocab_size": 2**24, "d_model": 2**20, "n_layers": 2**10, "n_heads": 2**12, "n_kv_heads": 2**12, "d_head": 2**12,
    "d_ff": 2**20, "max_positions": 2**24, "router_hidden": 2**20, "predictor_hidden": 2**20, "adapter_hidden": 2**20,
    "noise_seed": 2**31,
    "always_first": 2**24, "blocks_per_router": 2**10,
    "n_experts": 2**10, "noop_experts": 2**10, "top_k": 2**5, "fixed_places": 2**24,
    "original_positions": 2**24,
}  # fmt: skip
"""The largest value of each size, far above any model: a damaged or hostile file must not cost hours or all memory."""

LARGEST_NUMBER = 3e38
"""The largest number in a spec, because every number is used in float32 arithmetic."""
LARGEST_FACTOR = 2**10


class SpecError(ValueError):
    """The spec cannot be built; the error carries all problems, not only the first."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


def rope_scaling_problems(scaling: RopeScaling) -> list[str]:
    """Returns the problems of a scaling."""
    where, factors = "spec.rope_scaling", ("factor", "low_freq_factor", "high_freq_factor")
    problems = name_problems(where, scaling, {"kind": ROPE_SCALINGS})
    problems += positive_problems(where, scaling, *factors)
    problems += size_problems(where, scaling, "original_positions", least=1)
    if not problems and scaling.low_freq_factor >= scaling.high_freq_factor:
        problems.append(
            f"{where}.low_freq_factor: expected less than high_freq_factor {scaling.high_freq_factor}, got "
            f"{scaling.low_freq_factor}"
        )
    return problems


def routing_problems(routing: RoutingSpec, n_layers: int) -> list[str]:
    """Returns the problems of the routing of a model with this number of layers."""
    tables = {
        "parts": PARTS, "router": ROUTERS, "router_input": ROUTER_INPUTS, "gate": GATES, "combine": COMBINES,
        "selection": SELECTIONS, "capacity_rule": tuple(CAPACITY_RULES), "positions": POSITIONS,
        "router_stream": ROUTER_STREAMS, "router_activation": ROUTER_ACTIVATIONS, "skipped_keys_values": KEYS_VALUES,
        "skipped_result": RESULTS, "adapter": ADAPTERS, "adapter_gate": ADAPTER_GATES, "candidates": CANDIDATES,
    }  # fmt: skip
    problems = name_problems("spec.routing", routing, tables)
    problems += size_problems("spec.routing", routing, "blocks_per_router", least=1)
    sizes = ("router_hidden", "predictor_hidden", "adapter_hidden", "always_first", "noise_seed")
    problems += size_problems("spec.routing", routing, *sizes, least=0)
    for name in ("gate_scale", "gate_shift"):
        if not _is_number(getattr(routing, name)):
            problems.append(f"spec.routing.{name}: expected a number, got {shown(getattr(routing, name))}")
    if routing.router in MLP_ROUTERS and routing.router_hidden == 0:
        problems.append(f"spec.routing.router_hidden: the {routing.router} router needs a width of at least 1, got 0")
    problems += _layer_problems("spec.routing.layers", routing.layers, n_layers, "routed; use routing=null")
    if problems:
        return problems
    layers = declared_layers(routing, n_layers)
    # A schedule is compared with other declarations only after it is known to consist of numbers.
    return (
        _group_problems(routing, layers, n_layers)
        or _capacity_problems(routing, len(layers))
        or _combination_problems(routing)
    )


def _group_problems(routing: RoutingSpec, layers: Sequence[int], n_layers: int) -> list[str]:
    """Returns the problems of a router that decides about several blocks."""
    size, where = routing.blocks_per_router, "spec.routing.blocks_per_router"
    if size == 1:
        return []
    for layer, following in zip(layers, (*layers[1:], n_layers), strict=True):
        if layer + size > following:
            ending = "the model has no more" if following == n_layers else f"block {following} has the next router"
            return [f"{where}: {size} blocks from block {layer} on are too many, because {ending}"]
    plain = {"parts": "block", "skipped_keys_values": "absent", "skipped_result": "identity"}
    problems = [
        f"{where}: a token that a router skips for {size} blocks is absent from all of them; expected {name}={value}, "
        f"got {getattr(routing, name)}"
        for name, value in plain.items()
        if getattr(routing, name) != value
    ]
    if routing.combine in FFN_GATED:
        problems.append(f"{where}: {routing.combine} weighs the MLP of one block; declare another combine rule")
    if routing.selection == "exit":
        problems.append(f"{where}: a token that exits skips all later blocks anyway; expected 1, got {size}")
    return problems


def _combination_problems(routing: RoutingSpec) -> list[str]:
    """Declarations that are valid alone but not together."""
    problems = []
    if routing.selection == "predictor" and routing.predictor_hidden == 0:
        problems.append(
            "spec.routing.selection: predictor decides by an auxiliary predictor and predictor_hidden is 0, so there "
            "are no weights for one; give predictor_hidden and train with it, or declare threshold or topk"
        )
    if routing.router == "noise" and (routing.selection != "topk" or routing.predictor_hidden):
        problems.append(
            f"spec.routing.router: noise replaces the router, and a predictor can learn nothing from it; expected "
            f"selection=topk and predictor_hidden=0, got {routing.selection} and {routing.predictor_hidden}"
        )
    if routing.selection == "random" and routing.predictor_hidden:
        problems.append(
            f"spec.routing.predictor_hidden: no predictor can learn what noise chooses; expected 0 with "
            f"selection=random, got {routing.predictor_hidden}"
        )
    if routing.parts in ("attention", "separate") and routing.combine in FFN_GATED:
        problems.append(
            f"spec.routing.combine: {routing.combine} weighs the MLP, and with parts={routing.parts} attention is "
            "routed by itself, without a weight; declare paper"
        )
    if routing.candidates == "previous":
        problems += _candidates_problems(routing)
    if routing.selection == "exit":
        problems += _exit_problems(routing)
    return problems + _skipped_problems(routing)


def _candidates_problems(routing: RoutingSpec) -> list[str]:
    """Returns the problems of routers that select from the tokens of the router before."""
    problems = []
    if routing.selection == "exit":
        problems.append("spec.routing.candidates: with selection=exit a router is only given the tokens that are left; "
                        "expected all")  # fmt: skip
    if routing.parts == "separate":
        problems.append("spec.routing.candidates: with parts=separate, a layer has two routers; expected all")
    return problems + _rising_problems(routing, "a router cannot select more tokens than the router before it ran")


def _skipped_problems(routing: RoutingSpec) -> list[str]:
    """Returns the problems of the declarations about skipped tokens."""
    problems = []
    keeps_keys, result = routing.skipped_keys_values == "kept", routing.skipped_result
    if routing.selection == "exit" and (keeps_keys or result != "identity"):
        problems.append(
            "spec.routing.selection: a token that exits leaves nothing in later blocks; expected "
            f"skipped_keys_values=absent and skipped_result=identity, got {routing.skipped_keys_values} and {result}"
        )
    if keeps_keys and routing.parts == "mlp":
        problems.append(
            "spec.routing.skipped_keys_values: with parts=mlp attention is not routed and skips no token; expected "
            "absent"
        )
    if keeps_keys and routing.positions != "original":
        problems.append(
            "spec.routing.positions: if skipped tokens keep their keys, all keys have the positions of the sequence; "
            "expected original"
        )
    if result == "adapter" and routing.parts not in ("block", "mlp"):
        problems.append(
            "spec.routing.skipped_result: an adapter is used instead of the MLP; expected parts=block or parts=mlp, "
            f"got {routing.parts}"
        )
    if result == "adapter" and routing.adapter in WIDE_ADAPTERS and routing.adapter_hidden == 0:
        problems.append(
            f"spec.routing.adapter_hidden: the {routing.adapter} adapter needs a width of at least 1, got 0"
        )
    if routing.gates_skipped and routing.gate == "softmax_selected":
        problems.append(
            "spec.routing.gate: softmax_selected is a share of the selected tokens, so a skipped token has none; "
            f"expected another gate with skipped_result={result}"
        )
    return problems


def _exit_problems(routing: RoutingSpec) -> list[str]:
    problems = []
    if routing.parts != "block":
        problems.append(
            f"spec.routing.parts: a token that exits skips whole blocks; expected block, got {routing.parts}"
        )
    if routing.positions != "original":
        problems.append("spec.routing.positions: exit keeps the positions of the sequence; expected original")
    if routing.capacity_rule == "floor":
        problems.append(
            "spec.routing.capacity_rule: floor can leave no token at all in the model; declare floor_min1 or ceil"
        )
    return problems + _rising_problems(routing, "tokens that exit never come back")


def _rising_problems(routing: RoutingSpec, why: str) -> list[str]:
    """Returns a problem if a capacity is larger than the one before it."""
    capacity = routing.capacity if isinstance(routing.capacity, tuple) else (routing.capacity,)
    if list(capacity) == sorted(capacity, reverse=True):
        return []
    return [f"spec.routing.capacity: {why}, so the schedule must not rise, got {shown(list(capacity))}"]


def experts_problems(experts: ExpertsSpec, n_layers: int) -> list[str]:
    """Returns the problems of the experts of a model with this number of layers."""
    where = "spec.experts"
    problems = name_problems(where, experts, {"choice": CHOICES})
    if experts.n_experts == 0 and experts.noop_experts:
        problems.append(
            f"{where}.n_experts: no-op experts stand beside real ones, and there are none; give n_experts, or route "
            "the block (spec.routing) instead"
        )
    else:
        problems += size_problems(where, experts, "n_experts", least=1)
    problems += size_problems(where, experts, "noop_experts", least=0)
    problems += size_problems(where, experts, "top_k", least=1)
    factor = experts.capacity_factor
    if not _is_number(factor) or not 0 < factor <= LARGEST_FACTOR:
        problems.append(f"{where}.capacity_factor: expected a number above 0, at most {LARGEST_FACTOR}, got "
                        f"{shown(factor)}")  # fmt: skip
    problems += _layer_problems(f"{where}.layers", experts.layers, n_layers, "with experts; use experts=null")
    if problems:
        return problems
    problems += _slots_problems(experts, len(declared_layers(experts, n_layers)))
    if experts.choice == "expert" and experts.top_k != 1:
        problems.append(
            f"{where}.top_k: with expert choice the experts take tokens, not tokens experts; leave it at 1 and say how "
            f"many with capacity_factor, got {experts.top_k}"
        )
    if experts.choice == "token" and experts.top_k >= experts.n_experts + experts.noop_experts:
        problems.append(
            f"{where}.top_k: {experts.top_k} of {experts.n_experts + experts.noop_experts} experts leaves nothing to "
            "choose; lower it, or give more experts"
        )
    return problems


def _slots_problems(experts: ExpertsSpec, n_layers: int) -> list[str]:
    where, slots = "spec.experts.fixed_places", experts.fixed_places
    if not isinstance(slots, tuple):
        return [f"{where}: expected a list of numbers, got {shown(slots)}"]
    if slots and len(slots) != n_layers:
        return [f"{where}: {len(slots)} entries for {n_layers} layers with experts"]
    return [problem for slot in slots for problem in _size_problems("spec.experts", "fixed_places", slot, least=1)]


def name_problems(where: str, declared: object, tables: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns a problem for each field of `tables` (field -> known names) that is not one of its names."""
    values = {name: getattr(declared, name) for name in tables}
    return [
        f"{where}.{name}: unknown variant {shown(value)}; known: {', '.join(tables[name])}"
        for name, value in values.items()
        if not isinstance(value, str) or value not in tables[name]
    ]


def positive_problems(where: str, declared: object, *names: str) -> list[str]:
    """Returns a problem for each of these fields that is not a number above 0."""
    values = {name: getattr(declared, name) for name in names}
    return [
        f"{where}.{name}: expected a number above 0, got {shown(value)}"
        for name, value in values.items()
        if not _is_number(value) or value <= 0
    ]


def size_problems(where: str, declared: object, *names: str, least: int) -> list[str]:
    """Returns a problem for each of these fields that is not a whole number from `least` to its limit."""
    return [problem for name in names for problem in _size_problems(where, name, getattr(declared, name), least)]


def _size_problems(where: str, name: str, value: object, least: int) -> list[str]:
    if type(value) is int and least <= value <= LIMITS[name]:
        return []
    return [f"{where}.{name}: expected a whole number from {least} to {LIMITS[name]}, got {shown(value)}"]


def _layer_problems(where: str, layers: object, n_layers: int, none: str) -> list[str]:
    if isinstance(layers, EveryNth):
        return _pattern_problems(where, layers, n_layers, none)
    if not isinstance(layers, tuple) or not layers or any(type(layer) is not int for layer in layers):
        return [f"{where}: expected {{every, offset}} or a list of layer numbers, got {shown(layers)}"]
    if any(not 0 <= layer < n_layers for layer in layers) or list(layers) != sorted(set(layers)):
        return [f"{where}: expected ascending numbers from 0 to {n_layers - 1}, each once, got {shown(layers)}"]
    return []


def _pattern_problems(where: str, layers: EveryNth, n_layers: int, none: str) -> list[str]:
    every, offset = layers.every, layers.offset
    if type(every) is not int or type(offset) is not int or every < 1 or offset < 0:
        actual = f"every={shown(every)}, offset={shown(offset)}"
        return [f"{where}: every must be a whole number of at least 1 and offset of at least 0, got {actual}"]
    first, last = layers.skip_first, layers.skip_last
    if type(first) is not int or type(last) is not int or first < 0 or last < 0:
        actual = f"{shown(first)} and {shown(last)}"
        return [f"{where}: skip_first and skip_last must be whole numbers of at least 0, got {actual}"]
    if layers.of(n_layers):
        return []
    skipped = f", without the first {shown(first)} and the last {shown(last)}," if first or last else ""
    return [f"{where}: offset {shown(offset)}{skipped} leaves none of the {n_layers} layers {none}"]


def _capacity_problems(routing: RoutingSpec, n_routed: int) -> list[str]:
    where, capacity = "spec.routing.capacity", routing.capacity
    if isinstance(capacity, tuple) and len(capacity) != n_routed:
        return [f"{where}: the schedule has {len(capacity)} entries for {n_routed} routed layers"]
    values = capacity if isinstance(capacity, tuple) else (capacity,)
    absolute = routing.capacity_rule == "absolute"
    for value in values:
        if not _is_number(value):
            return [f"{where}: expected a number or a list of numbers, got {shown(capacity)}"]
        if absolute and (value != int(value) or value < 1):
            return [f"{where}: the absolute rule takes a whole number of tokens of at least 1, got {value!r}"]
        if not absolute and not 0 < value <= 1:
            return [f"{where}: expected a share in (0, 1], got {value!r}"]
    return []


def _is_number(value: object) -> TypeGuard[int | float]:
    # NaN fails the comparison. bool is a subclass of int, but is not a number here.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_NUMBER


class _Shown(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 64 else "a whole number beyond 64 bits"


def shown(value: object) -> str:
    """Formats a value for an error message, shortened, because it may come from an untrusted file."""
    short = _Shown()
    short.maxlevel, short.maxstring, short.maxother = 2, 60, 60
    return short.repr(value)

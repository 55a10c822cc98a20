"""Checks of a spec. Each problem names the field, the expected value and the actual value."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeGuard

from mod_models.declarations import (
    ACTIVATIONS,
    ATTENTION_BIASES,
    CAPACITY_RULES,
    CHOICES,
    COMBINES,
    FFN_GATED,
    GATES,
    MLP_ROUTERS,
    PARTS,
    POSITIONS,
    QK_NORMS,
    ROPE_SCALINGS,
    ROUTER_INPUTS,
    ROUTERS,
    SELECTIONS,
    EveryNth,
    ExpertsSpec,
    RopeScaling,
    RoutingSpec,
)

if TYPE_CHECKING:
    from mod_models.spec import ModelSpec

LIMITS = {
    "vocab_size": 2**24, "d_model": 2**20, "n_layers": 2**10, "n_heads": 2**12, "n_kv_heads": 2**12, "d_head": 2**12,
    "d_ff": 2**20, "max_positions": 2**24, "router_hidden": 2**20, "predictor_hidden": 2**20, "noise_seed": 2**31,
    "always_first": 2**24,
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


def problems_of(spec: ModelSpec) -> list[str]:
    """Returns the problems of a spec; empty if the spec can be built."""
    sizes = ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_head", "d_ff", "max_positions")
    problems = [problem for name in sizes for problem in _size_problems("spec", name, getattr(spec, name), least=1)]
    problems += [problem for name in POSITIVE for problem in _positive("spec", name, getattr(spec, name))]
    for name in ("mlp_bias", "tie_embeddings"):
        if type(getattr(spec, name)) is not bool:
            problems.append(f"spec.{name}: expected true or false, got {shown(getattr(spec, name))}")
    problems += _name_problems("spec", spec, NAMES)
    for name, kind, article in TABLES:
        table = getattr(spec, name)
        if table is not None and not isinstance(table, kind):
            problems.append(f"spec.{name}: expected {article} {kind.__name__} or None, got {type(table).__name__}")
    if problems:
        return problems
    if spec.n_heads % spec.n_kv_heads:
        problems.append(f"spec.n_kv_heads: {spec.n_kv_heads} does not divide n_heads {spec.n_heads}")
    if spec.d_head % 2:
        problems.append(f"spec.d_head: RoPE rotates pairs, so it must be even, got {spec.d_head}")
    problems += _rope_scaling_problems(spec.rope_scaling) if spec.rope_scaling else []
    problems += _routing_problems(spec.routing, spec) if spec.routing else []
    return problems + (_experts_problems(spec.experts, spec) if spec.experts else [])


POSITIVE = ("rope_theta", "norm_eps", "embedding_scale")
NAMES = {"attention_bias": tuple(ATTENTION_BIASES), "qk_norm": QK_NORMS, "activation": ACTIVATIONS}
TABLES = (("rope_scaling", RopeScaling, "a"), ("routing", RoutingSpec, "a"), ("experts", ExpertsSpec, "an"))


def _rope_scaling_problems(scaling: RopeScaling) -> list[str]:
    where, factors = "spec.rope_scaling", ("factor", "low_freq_factor", "high_freq_factor")
    problems = _name_problems(where, scaling, {"kind": ROPE_SCALINGS})
    problems += [problem for name in factors for problem in _positive(where, name, getattr(scaling, name))]
    problems += _size_problems(where, "original_positions", scaling.original_positions, least=1)
    if not problems and scaling.low_freq_factor >= scaling.high_freq_factor:
        problems.append(
            f"{where}.low_freq_factor: expected less than high_freq_factor {scaling.high_freq_factor}, got "
            f"{scaling.low_freq_factor}"
        )
    return problems


def _positive(where: str, name: str, value: object) -> list[str]:
    if _is_number(value) and value > 0:
        return []
    return [f"{where}.{name}: expected a number above 0, got {shown(value)}"]


def _routing_problems(routing: RoutingSpec, spec: ModelSpec) -> list[str]:
    tables = {
        "parts": PARTS, "router": ROUTERS, "router_input": ROUTER_INPUTS, "gate": GATES, "combine": COMBINES,
        "selection": SELECTIONS, "capacity_rule": tuple(CAPACITY_RULES), "positions": POSITIONS,
    }  # fmt: skip
    problems = _name_problems("spec.routing", routing, tables)
    for name in ("router_hidden", "predictor_hidden", "always_first", "noise_seed"):
        problems += _size_problems("spec.routing", name, getattr(routing, name), least=0)
    for name in ("gate_scale", "gate_shift"):
        if not _is_number(getattr(routing, name)):
            problems.append(f"spec.routing.{name}: expected a number, got {shown(getattr(routing, name))}")
    if routing.router in MLP_ROUTERS and routing.router_hidden == 0:
        problems.append(f"spec.routing.router_hidden: the {routing.router} router needs a width of at least 1, got 0")
    problems += _layer_problems("spec.routing.layers", routing.layers, spec.n_layers, "routed; use routing=null")
    if problems:
        return problems
    # A schedule is compared with other declarations only after it is known to consist of numbers.
    return _capacity_problems(routing, len(spec.routed_layers)) or _combination_problems(routing)


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
    if routing.selection == "exit":
        problems += _exit_problems(routing)
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
    capacity = routing.capacity if isinstance(routing.capacity, tuple) else (routing.capacity,)
    if list(capacity) != sorted(capacity, reverse=True):
        problems.append(
            f"spec.routing.capacity: tokens that exit never come back, so the schedule must not rise, got "
            f"{shown(list(capacity))}"
        )
    return problems


def _experts_problems(experts: ExpertsSpec, spec: ModelSpec) -> list[str]:
    where = "spec.experts"
    problems = _name_problems(where, experts, {"choice": CHOICES})
    if experts.n_experts == 0 and experts.noop_experts:
        problems.append(
            f"{where}.n_experts: no-op experts stand beside real ones, and there are none; give n_experts, or route "
            "the block (spec.routing) instead"
        )
    else:
        problems += _size_problems(where, "n_experts", experts.n_experts, least=1)
    problems += _size_problems(where, "noop_experts", experts.noop_experts, least=0)
    problems += _size_problems(where, "top_k", experts.top_k, least=1)
    factor = experts.capacity_factor
    if not _is_number(factor) or not 0 < factor <= LARGEST_FACTOR:
        problems.append(f"{where}.capacity_factor: expected a number above 0, at most {LARGEST_FACTOR}, got "
                        f"{shown(factor)}")  # fmt: skip
    problems += _layer_problems(f"{where}.layers", experts.layers, spec.n_layers, "with experts; use experts=null")
    if problems:
        return problems
    problems += _slots_problems(experts, len(spec.expert_layers))
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


def _name_problems(where: str, declared: object, tables: Mapping[str, Sequence[str]]) -> list[str]:
    values = {name: getattr(declared, name) for name in tables}
    return [
        f"{where}.{name}: unknown variant {shown(value)}; known: {', '.join(tables[name])}"
        for name, value in values.items()
        if not isinstance(value, str) or value not in tables[name]
    ]


def _size_problems(where: str, name: str, value: object, least: int) -> list[str]:
    if type(value) is not int or not least <= value <= LIMITS[name]:
        return [f"{where}.{name}: expected a whole number from {least} to {LIMITS[name]}, got {shown(value)}"]
    return []


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
        got = f"every={shown(every)}, offset={shown(offset)}"
        return [f"{where}: every must be a whole number of at least 1 and offset of at least 0, got {got}"]
    first, last = layers.skip_first, layers.skip_last
    if type(first) is not int or type(last) is not int or first < 0 or last < 0:
        got = f"{shown(first)} and {shown(last)}"
        return [f"{where}: skip_first and skip_last must be whole numbers of at least 0, got {got}"]
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

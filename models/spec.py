"""The spec: everything about a model that is not a weight, as plain data.

Routing semantics are five declarations (router, gate, combine, selection with its capacity, positions) and the list of
routed layers. Every declaration is a name that `routing.py` looks up in a table, so a published model is one point in
this space and an exporter never has to guess. This module imports no torch: a spec can be read anywhere.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["CAPACITY_RULES", "EveryNth", "ModelSpec", "RoutingSpec", "SpecError"]

ROUTERS = ("linear", "linear_bias", "mlp")
ROUTER_INPUTS = ("raw", "normed")
GATES = ("identity", "sigmoid", "scaled_sigmoid", "tanh_affine", "softmax_selected", "ones")
COMBINES = ("paper", "replace", "double_residual", "replace_ungated", "ffn_gated")
SELECTIONS = ("topk",)
POSITIONS = ("original", "compact")

CAPACITY_RULES: dict[str, Callable[[float, int], int]] = {
    # c * S in float64 and then truncated, as the published code does it: 0.29 * 100 is 28, not 29.
    "floor": lambda capacity, seq: int(capacity * seq),
    "floor_min1": lambda capacity, seq: max(1, int(capacity * seq)),
    "ceil": lambda capacity, seq: math.ceil(capacity * seq),
    "absolute": lambda capacity, seq: min(int(capacity), seq),
}
"""How many tokens k a routed layer takes out of S: name -> (capacity, S) -> k, at most S."""

LIMITS = {
    "vocab_size": 2**24, "d_model": 2**20, "n_layers": 2**10, "n_heads": 2**12, "n_kv_heads": 2**12, "d_head": 2**12,
    "d_ff": 2**20, "max_positions": 2**24, "router_hidden": 2**20, "predictor_hidden": 2**20,
}  # fmt: skip
"""The largest value of each size, far above any model: a damaged or hostile file must not cost hours or all memory."""

LARGEST_NUMBER = 3e38
"""Every number of a spec ends up in float32 arithmetic."""


class SpecError(ValueError):
    """A spec that cannot be built. Carries every problem found, not only the first."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryNth:
    """Routes layers offset, offset + every, offset + 2 * every, ..."""

    every: int = 2
    offset: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSpec:
    """What a routed block does; the defaults are the paper's (arXiv 2404.02258, section 3).

    Attributes:
        layers: which blocks route, a pattern or an explicit ascending list.
        router: `linear` (D -> 1), `linear_bias`, or `mlp` (D -> router_hidden -> 1 with SiLU).
        router_input: `raw` residual stream, or `normed` by the block's own input norm.
        router_hidden: width of the hidden layer of the `mlp` router.
        gate: from the router's score l to the weight g: `identity` l; `sigmoid`; `scaled_sigmoid` a * sigmoid(l);
            `tanh_affine` a * tanh(l) + b; `softmax_selected` softmax over the k chosen scores; `ones`.
        gate_scale: a, for the two gates that have one.
        gate_shift: b, for `tanh_affine`.
        combine: with x a selected token, A its attention delta, M its MLP delta (on x + A), Block = x + A + M:
            `paper` x + g (A + M); `replace` g * Block; `double_residual` x + g * Block; `replace_ungated` Block;
            `ffn_gated` x + A + g M. A token that is not selected stays x.
        selection: `topk`, the k largest scores of the row's real tokens, ties to the earlier token.
        capacity_rule: name in CAPACITY_RULES.
        capacity: share of the tokens in (0, 1], or a number of tokens for `absolute`; a tuple is a per-layer
            schedule with one entry for each routed layer.
        positions: RoPE positions inside a routed block: `original` in the sequence, or `compact` 0..k-1.
        predictor_hidden: width of the auxiliary causal predictor (paper, section 3.5); 0 when there is none.
    """

    layers: EveryNth | tuple[int, ...] = EveryNth()
    router: str = "linear"
    router_input: str = "raw"
    router_hidden: int = 0
    gate: str = "identity"
    gate_scale: float = 1.0
    gate_shift: float = 0.0
    combine: str = "paper"
    selection: str = "topk"
    capacity_rule: str = "floor_min1"
    capacity: float | tuple[float, ...] = 0.125
    positions: str = "original"
    predictor_hidden: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer in the Llama manner; `routing=None` is the dense transformer."""

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_ff: int
    max_positions: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    routing: RoutingSpec | None = None

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise SpecError(problems)

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """The routed blocks, ascending; empty for a dense model."""
        if self.routing is None:
            return ()
        layers = self.routing.layers
        return tuple(range(layers.offset, self.n_layers, layers.every)) if isinstance(layers, EveryNth) else layers

    def k_by_layer(self, seq: int) -> dict[int, int]:
        """Tokens taken by each routed layer from a row of `seq` positions: the constants of that bucket's graph."""
        if self.routing is None:
            return {}
        rule, capacity, layers = CAPACITY_RULES[self.routing.capacity_rule], self.routing.capacity, self.routed_layers
        schedule = capacity if isinstance(capacity, tuple) else (capacity,) * len(layers)
        return {layer: rule(share, seq) for layer, share in zip(layers, schedule, strict=True)}

    @property
    def capacity(self) -> float | None:
        """The capacity of every routed layer; None where a schedule gives them different ones, and if it is dense."""
        if self.routing is None:
            return None
        capacity = self.routing.capacity
        given = set(capacity) if isinstance(capacity, tuple) else {capacity}
        return given.pop() if len(given) == 1 else None

    def with_capacity(self, capacity: float) -> ModelSpec:
        """This capacity in every routed layer, in place of a per-layer schedule too; every other declaration stays.

        Raises:
            SpecError: a dense model, or not a capacity of the model's rule.
        """
        if self.routing is None:
            raise SpecError(["spec.routing: null, so there is no routed layer whose capacity could be changed"])
        return dataclasses.replace(self, routing=dataclasses.replace(self.routing, capacity=capacity))

    def dense(self) -> ModelSpec:
        """The dense twin: the same sizes, every token through every block."""
        return dataclasses.replace(self, routing=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data as JSON has it, lists where a spec has tuples; the inverse of `from_dict`."""
        data = dataclasses.asdict(self)
        if data["routing"] is not None:
            listed = {name: list(value) for name, value in data["routing"].items() if isinstance(value, tuple)}
            data["routing"] = {**data["routing"], **listed}
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelSpec:
        """Builds a spec from plain data.

        Raises:
            SpecError: no table at all, unknown or missing fields (with the nearest name), or values that cannot be
                built. Nothing else, whatever the types of the values.
        """
        if not isinstance(data, Mapping):
            raise SpecError([f"spec: expected a table, got {type(data).__name__}"])
        problems = _unknown(cls, data, "spec") + _missing(cls, data, "spec")
        routing = data.get("routing")
        if routing is not None and not isinstance(routing, Mapping):
            problems.append(f"spec.routing: expected a table, got {type(routing).__name__}")
        elif routing is not None:
            problems += _unknown(RoutingSpec, routing, "spec.routing")
            layers = routing.get("layers")
            if isinstance(layers, Mapping):
                problems += _unknown(EveryNth, layers, "spec.routing.layers")
        if problems:
            raise SpecError(problems)
        return cls(**{**data, "routing": None if routing is None else _routing_from_dict(routing)})


def _routing_from_dict(data: Mapping[str, Any]) -> RoutingSpec:
    values = dict(data)
    layers, capacity = values.get("layers"), values.get("capacity")
    if isinstance(layers, Mapping):
        values["layers"] = EveryNth(**layers)
    elif isinstance(layers, list):
        values["layers"] = tuple(layers)
    if isinstance(capacity, list):
        values["capacity"] = tuple(capacity)
    return RoutingSpec(**values)


def _unknown(cls: type, data: Mapping[str, Any], where: str) -> list[str]:
    known = [field.name for field in dataclasses.fields(cls)]
    problems = []
    for name in data:
        if name not in known:
            near = difflib.get_close_matches(name[:80], known, n=1) if isinstance(name, str) else []
            hint = f", did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
            path = name if isinstance(name, str) and name.isidentifier() and len(name) <= 60 else shown(name)
            problems.append(f"{where}.{path}: unknown field{hint}")
    return problems


def _missing(cls: type, data: Mapping[str, Any], where: str) -> list[str]:
    required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
    return [f"{where}.{name}: missing" for name in required if name not in data]


def _problems(spec: ModelSpec) -> list[str]:
    sizes = ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_head", "d_ff", "max_positions")
    problems = [problem for name in sizes for problem in _size_problems("spec", name, getattr(spec, name), least=1)]
    for name in ("rope_theta", "norm_eps"):
        value = getattr(spec, name)
        if not _is_number(value) or value <= 0:
            problems.append(f"spec.{name}: expected a number above 0, got {shown(value)}")
    if type(spec.tie_embeddings) is not bool:
        problems.append(f"spec.tie_embeddings: expected true or false, got {shown(spec.tie_embeddings)}")
    if spec.routing is not None and not isinstance(spec.routing, RoutingSpec):
        problems.append(f"spec.routing: expected a RoutingSpec or None, got {type(spec.routing).__name__}")
    if problems:
        return problems
    if spec.n_heads % spec.n_kv_heads:
        problems.append(f"spec.n_kv_heads: {spec.n_kv_heads} does not divide n_heads {spec.n_heads}")
    if spec.d_head % 2:
        problems.append(f"spec.d_head: RoPE rotates pairs, so it must be even, got {spec.d_head}")
    return problems + (_routing_problems(spec.routing, spec) if spec.routing else [])


def _routing_problems(routing: RoutingSpec, spec: ModelSpec) -> list[str]:
    problems = []
    tables = {
        "router": ROUTERS, "router_input": ROUTER_INPUTS, "gate": GATES, "combine": COMBINES,
        "selection": SELECTIONS, "capacity_rule": tuple(CAPACITY_RULES), "positions": POSITIONS,
    }  # fmt: skip
    for name, table in tables.items():
        value = getattr(routing, name)
        if not isinstance(value, str) or value not in table:
            problems.append(f"spec.routing.{name}: unknown variant {shown(value)}; known: {', '.join(table)}")
    for name in ("router_hidden", "predictor_hidden"):
        problems += _size_problems("spec.routing", name, getattr(routing, name), least=0)
    for name in ("gate_scale", "gate_shift"):
        if not _is_number(getattr(routing, name)):
            problems.append(f"spec.routing.{name}: expected a number, got {shown(getattr(routing, name))}")
    if routing.router == "mlp" and routing.router_hidden == 0:
        problems.append("spec.routing.router_hidden: the mlp router needs a width of at least 1, got 0")
    problems += _layer_problems(routing.layers, spec.n_layers)
    return problems if problems else _capacity_problems(routing, len(spec.routed_layers))


def _size_problems(where: str, name: str, value: object, least: int) -> list[str]:
    if type(value) is not int or not least <= value <= LIMITS[name]:
        return [f"{where}.{name}: expected a whole number from {least} to {LIMITS[name]}, got {shown(value)}"]
    return []


def _layer_problems(layers: object, n_layers: int) -> list[str]:
    where = "spec.routing.layers"
    if isinstance(layers, EveryNth):
        every, offset = layers.every, layers.offset
        if type(every) is not int or type(offset) is not int or every < 1 or offset < 0:
            got = f"every={shown(every)}, offset={shown(offset)}"
            return [f"{where}: every must be a whole number of at least 1 and offset of at least 0, got {got}"]
        if offset >= n_layers:
            return [f"{where}: offset {shown(offset)} leaves none of the {n_layers} layers routed; use routing=null"]
        return []
    if not isinstance(layers, tuple) or not layers or any(type(layer) is not int for layer in layers):
        return [f"{where}: expected {{every, offset}} or a list of layer numbers, got {shown(layers)}"]
    if any(not 0 <= layer < n_layers for layer in layers) or list(layers) != sorted(set(layers)):
        return [f"{where}: expected ascending numbers from 0 to {n_layers - 1}, each once, got {shown(layers)}"]
    return []


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


def _is_number(value: object) -> bool:
    # NaN compares false here, and bool is an int that nobody means as a number.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_NUMBER


class _Shown(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 64 else "a whole number beyond 64 bits"


def shown(value: object) -> str:
    """A value for an error message. Cut short, because it comes from a file that anybody may have written."""
    short = _Shown()
    short.maxlevel, short.maxstring, short.maxother = 2, 60, 60
    return short.repr(value)

"""The spec: everything about a model that is not a weight, as plain data.

Routing semantics are declarations (router, gate, combine, selection with its capacity, positions, which part of which
layers), and so are experts. Every declaration is a name that a table of `routing.py`, `selection.py` or `experts.py`
knows, so a published model is one point in this space and an exporter never has to guess. This module imports no torch:
a spec can be read anywhere.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mod_models.declarations import (
    CAPACITY_RULES,
    CAUSAL_SELECTIONS,
    EveryNth,
    ExpertsSpec,
    RopeScaling,
    RoutingSpec,
)
from mod_models.spec_checks import SpecError, problems_of, shown

__all__ = [
    "CAPACITY_RULES",
    "EveryNth",
    "ExpertsSpec",
    "LayerTokens",
    "ModelSpec",
    "RopeScaling",
    "RoutingSpec",
    "Site",
    "SpecError",
    "expert_site",
    "is_expert",
    "layer_of",
    "shown",
]

Site = int | str
"""A routing site: the number of the layer, or "3.mlp", "3.expert0" where a layer has several sites."""


def expert_site(layer: int, expert: int) -> Site:
    """The routing site of an expert."""
    return f"{layer}.expert{expert}"


def is_expert(site: Site) -> bool:
    """Whether the site is an expert, and not a block or a part of one that the other tokens skip."""
    return ".expert" in str(site)


def layer_of(site: Site) -> int:
    """The layer that the site belongs to."""
    return int(str(site).partition(".")[0])


class LayerTokens(NamedTuple):
    """Tokens of a row that the routers of a layer score, that its attention sees, and that its MLP or experts see."""

    scored: int
    attended: int
    transformed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer in the Llama manner; without `routing` and `experts` the dense transformer.

    Attributes:
        vocab_size: token ids.
        d_model: width of the residual stream.
        n_layers: blocks.
        n_heads: query heads.
        n_kv_heads: key/value heads; divides n_heads.
        d_head: width of a head, which need not be d_model / n_heads.
        d_ff: width of the MLP, or of each expert.
        max_positions: tokens of the longest row.
        rope_theta: base of the rotary angles.
        rope_scaling: how they were stretched; None where they were not.
        norm_eps: of every RMSNorm.
        attention_bias: which projections have a bias: `none`, `qkv` (queries, keys, values), `all` (outputs too).
        qk_norm: what queries and keys go through before they are rotated: `none`, or `head`, an RMSNorm over each
            head with a weight for queries and one for keys.
        activation: of the gated MLP, and of experts: `silu`, `gelu` (by the error function), `gelu_tanh`.
        mlp_bias: whether the three projections of an MLP have a bias; experts have none.
        embedding_scale: what embeddings are multiplied by where they enter the stream, and not in a tied head.
        tie_embeddings: whether the head is the embedding.
        routing: Mixture-of-Depths; None for a model in which every token goes through every block.
        experts: experts in place of MLPs; None for none.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_ff: int
    max_positions: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    attention_bias: str = "none"
    qk_norm: str = "none"
    activation: str = "silu"
    mlp_bias: bool = False
    embedding_scale: float = 1.0
    tie_embeddings: bool = True
    routing: RoutingSpec | None = None
    experts: ExpertsSpec | None = None

    def __post_init__(self) -> None:
        problems = problems_of(self)
        if problems:
            raise SpecError(problems)

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """The routed blocks, ascending; empty for a model in which every token goes through every block."""
        return () if self.routing is None else _numbers(self.routing.layers, self.n_layers)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The blocks that have experts instead of an MLP, ascending."""
        return () if self.experts is None else _numbers(self.experts.layers, self.n_layers)

    @property
    def looks_ahead(self) -> tuple[str, ...]:
        """The declarations that let a token's logits depend on later tokens; empty for a causal model."""
        found = []
        if self.routing is not None and self.routing.selection not in CAUSAL_SELECTIONS:
            found.append(f"routing.selection={self.routing.selection}")
        if self.routing is not None and self.routing.gate == "softmax_selected":
            # A softmax over all selected tokens of the row; without a gate it is not used.
            found += [] if self.routing.combine == "replace_ungated" else ["routing.gate=softmax_selected"]
        if self.experts is not None and self.experts.choice == "expert":
            found.append("experts.choice=expert")
        return tuple(found)

    def k_of_layer(self, seq: int) -> dict[int, int]:
        """Tokens of a row of `seq` positions that each routed layer selects."""
        if self.routing is None:
            return {}
        rule, capacity, layers = CAPACITY_RULES[self.routing.capacity_rule], self.routing.capacity, self.routed_layers
        schedule = capacity if isinstance(capacity, tuple) else (capacity,) * len(layers)
        return {layer: rule(share, seq) for layer, share in zip(layers, schedule, strict=True)}

    def tokens_of_layer(self, seq: int) -> tuple[LayerTokens, ...]:
        """Tokens of a row of `seq` positions that each layer is given. A token that exits is given to no later one."""
        slots_of, found, left = self.k_of_layer(seq), [], seq
        for layer in range(self.n_layers):
            k = slots_of.get(layer)
            if k is None or self.routing is None:
                found.append(LayerTokens(0, left, left))
                continue
            parts = self.routing.parts
            # A block that selects no token does not run its router.
            scored = left if k else 0
            found.append(LayerTokens(scored, left if parts == "mlp" else k, left if parts == "attention" else k))
            left = k if self.routing.selection == "exit" else left
        return tuple(found)

    def k_by_layer(self, seq: int) -> dict[Site, int]:
        """Tokens of a row of `seq` positions that each routing site selects: the constants of that bucket's graph.

        Experts come after the routing of their layer, and those of a layer that selects no token are left out.
        """
        slots_of = self.k_of_layer(seq)
        found: dict[Site, int] = {}
        apart = self.routing is not None and self.routing.parts == "separate"
        for layer, given in enumerate(self.tokens_of_layer(seq)):
            if layer in slots_of:
                names = [f"{layer}.attention", f"{layer}.mlp"] if apart else [layer]
                found |= dict.fromkeys(names, slots_of[layer])
            if layer in self.expert_layers and given.transformed and self.experts is not None:
                slots = self.expert_slots(layer, given.transformed)
                found |= {expert_site(layer, e): slots for e in range(self.experts.n_experts)}
        return found

    def expert_slots(self, layer: int, tokens: int) -> int:
        """The slots of each expert of a layer whose experts are given `tokens` tokens."""
        assert self.experts is not None
        if not self.experts.fixed_places:
            return self.experts.slots(tokens)
        return min(tokens, self.experts.fixed_places[self.expert_layers.index(layer)])

    @property
    def capacity(self) -> float | None:
        """The capacity of every routed layer; None where a schedule gives them different ones, and if none routes."""
        if self.routing is None:
            return None
        capacity = self.routing.capacity
        given = set(capacity) if isinstance(capacity, tuple) else {capacity}
        return given.pop() if len(given) == 1 else None

    def with_capacity(self, capacity: float) -> ModelSpec:
        """This capacity in every routed layer, instead of a per-layer schedule too; every other declaration stays.

        Raises:
            SpecError: a model without routed layers, or not a capacity of the model's rule.
        """
        if self.routing is None:
            raise SpecError(["spec.routing: null, so there is no routed layer whose capacity could be changed"])
        return dataclasses.replace(self, routing=dataclasses.replace(self.routing, capacity=capacity))

    def dense(self) -> ModelSpec:
        """The dense baseline: the same sizes and the same experts, every token through every block."""
        return dataclasses.replace(self, routing=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data as JSON has it, lists where a spec has tuples; the inverse of `from_dict`."""
        data = dataclasses.asdict(self)
        for part in TABLES:
            if data[part] is not None:
                data[part] |= {name: list(value) for name, value in data[part].items() if isinstance(value, tuple)}
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
        for part, kind in TABLES.items():
            problems += _table_problems(kind, data.get(part), f"spec.{part}")
        if problems:
            raise SpecError(problems)
        tables = {part: data.get(part) for part in TABLES}
        return cls(
            **{**data, **{part: None if one is None else TABLES[part](**_values(one)) for part, one in tables.items()}}
        )


TABLES: dict[str, type[RoutingSpec] | type[ExpertsSpec] | type[RopeScaling]] = {
    "rope_scaling": RopeScaling,
    "routing": RoutingSpec,
    "experts": ExpertsSpec,
}
"""The fields of a spec that are tables in plain data."""


def _numbers(layers: EveryNth | tuple[int, ...], n_layers: int) -> tuple[int, ...]:
    return layers.of(n_layers) if isinstance(layers, EveryNth) else layers


def _values(data: Mapping[str, Any]) -> dict[str, Any]:
    """With a pattern of layers and tuples where plain data has a table and lists."""
    values = dict(data)
    for name in ("layers", "capacity", "fixed_places"):
        if isinstance(values.get(name), list):
            values[name] = tuple(values[name])
    if isinstance(values.get("layers"), Mapping):
        values["layers"] = EveryNth(**values["layers"])
    return values


def _table_problems(kind: type, table: object, where: str) -> list[str]:
    if table is None:
        return []
    if not isinstance(table, Mapping):
        return [f"{where}: expected a table, got {type(table).__name__}"]
    layers = table.get("layers")
    inside = _unknown(EveryNth, layers, f"{where}.layers") if isinstance(layers, Mapping) else []
    return _unknown(kind, table, where) + _missing(kind, table, where) + inside


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

"""The spec: everything about a model except its weights, as plain data.

Routing semantics (router, gate, combine, selection with its capacity, positions, routed parts and layers) and experts
are declarations. Every declared name is one of those in `declarations.py`, so a published model is one combination of
names, and an exporter never has to guess. This module does not import torch, so a spec can be read anywhere.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mod_models.declarations import (
    ACTIVATIONS,
    ATTENTION_BIASES,
    CAPACITY_RULES,
    CAUSAL_SELECTIONS,
    QK_NORMS,
    EveryNth,
    ExpertsSpec,
    RopeScaling,
    RoutingSpec,
    SpecError,
    declared_layers,
    experts_problems,
    name_problems,
    positive_problems,
    rope_scaling_problems,
    routing_problems,
    shown,
    size_problems,
)

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
"""A routing site: the number of the layer, or "3.mlp", "3.expert0" if a layer has several sites."""


def expert_site(layer: int, expert: int) -> Site:
    """Returns the routing site of an expert."""
    return f"{layer}.expert{expert}"


def is_expert(site: Site) -> bool:
    """Returns whether the site is an expert. Any other site is a block, or a part of one, that skips tokens."""
    return ".expert" in str(site)


def layer_of(site: Site) -> int:
    """Returns the layer that the site belongs to."""
    return int(str(site).partition(".")[0])


class LayerTokens(NamedTuple):
    """Numbers of tokens of a row in a layer.

    Attributes:
        scored: tokens that its routers score.
        attending: tokens with a query in its attention.
        attended: tokens with a key and a value in its attention.
        transformed: tokens that its MLP or experts get.
        replaced: tokens that its adapter gets: every token, although selected tokens do not use the result.
    """

    scored: int
    attending: int
    attended: int
    transformed: int
    replaced: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer of the Llama type; without `routing` and `experts` it is dense.

    Attributes:
        vocab_size: number of token ids.
        d_model: width of the residual stream.
        n_layers: number of blocks.
        n_heads: number of query heads.
        n_kv_heads: number of key/value heads; divides n_heads.
        d_head: width of a head, which need not be d_model / n_heads.
        d_ff: width of the MLP, or of each expert.
        max_positions: tokens of the longest row.
        rope_theta: base of the rotary angles.
        rope_scaling: scaling of the rotary angles; None for no scaling.
        norm_eps: epsilon of every RMSNorm.
        attention_bias: projections that have a bias: `none`, `qkv` (queries, keys, values), `all` (outputs too).
        qk_norm: norm of queries and keys before they are rotated: `none`, or `head`, an RMSNorm over each head with one
            weight for queries and one for keys.
        activation: activation of the gated MLP and of experts: `silu`, `gelu` (error function), `gelu_tanh`.
        mlp_bias: whether the three projections of an MLP have a bias; experts have none.
        embedding_scale: factor of embeddings when they enter the stream; a tied head does not use it.
        tie_embeddings: whether the head is the embedding.
        routing: Mixture-of-Depths routing; None if every token runs every block.
        experts: experts in place of MLPs; None for no experts.
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
        problems = _problems_of(self)
        if problems:
            raise SpecError(problems)

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """The blocks with a router, ascending; empty if every token runs every block."""
        return () if self.routing is None else declared_layers(self.routing, self.n_layers)

    @property
    def router_of_layer(self) -> dict[int, int]:
        """Routed block -> the block whose router decides about it: itself, unless a router decides about several."""
        blocks = 1 if self.routing is None else self.routing.blocks_per_router
        return {layer: first for first in self.routed_layers for layer in range(first, first + blocks)}

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The blocks that have experts instead of an MLP, ascending."""
        return () if self.experts is None else declared_layers(self.experts, self.n_layers)

    @property
    def looks_ahead(self) -> tuple[str, ...]:
        """The declarations that make a token's logits depend on later tokens; empty for a causal model."""
        declarations = []
        if self.routing is not None and self.routing.selection not in CAUSAL_SELECTIONS:
            declarations.append(f"routing.selection={self.routing.selection}")
        if self.routing is not None and self.routing.gate == "softmax_selected":
            # The softmax is over all selected tokens of the row. A combine rule without a gate does not use it.
            declarations += [] if self.routing.combine == "replace_ungated" else ["routing.gate=softmax_selected"]
        if self.experts is not None and self.experts.choice == "expert":
            declarations.append("experts.choice=expert")
        return tuple(declarations)

    def k_of_layer(self, seq: int) -> dict[int, int]:
        """Returns layer with a router -> number of tokens that it selects in a row of `seq` positions."""
        if self.routing is None:
            return {}
        rule, capacity, layers = CAPACITY_RULES[self.routing.capacity_rule], self.routing.capacity, self.routed_layers
        schedule = capacity if isinstance(capacity, tuple) else (capacity,) * len(layers)
        return {layer: rule(share, seq) for layer, share in zip(layers, schedule, strict=True)}

    def tokens_of_layer(self, seq: int) -> tuple[LayerTokens, ...]:
        """Returns each layer's numbers of tokens in a row of `seq` positions. No later layer gets tokens that exit."""
        slots_of, router_of, counts, left = self.k_of_layer(seq), self.router_of_layer, [], seq
        for layer in range(self.n_layers):
            k = slots_of.get(router_of.get(layer, layer))
            if k is None or self.routing is None:
                counts.append(LayerTokens(0, left, left, left))
                continue
            if layer not in slots_of:
                counts.append(LayerTokens(0, k, k, k))
                continue
            parts = self.routing.parts
            attending = left if parts == "mlp" else k
            counts.append(
                LayerTokens(
                    # A block that selects no token only runs its router if the result of skipped tokens needs a gate.
                    scored=left if k or self.routing.gates_skipped else 0,
                    attending=attending,
                    attended=left if k and self.routing.skipped_keys_values == "kept" else attending,
                    transformed=left if parts == "attention" else k,
                    replaced=left if self.routing.skipped_result == "adapter" else 0,
                )
            )
            left = k if self.routing.selection == "exit" else left
        return tuple(counts)

    def k_by_layer(self, seq: int) -> dict[Site, int]:
        """Returns routing site -> tokens that it selects in a row of `seq` positions, constants in that bucket's graph.

        Experts come after the routing of their layer. Experts whose layer passes them no token are left out.
        """
        slots_of = self.k_of_layer(seq)
        k_of_site: dict[Site, int] = {}
        apart = self.routing is not None and self.routing.parts == "separate"
        for layer, tokens in enumerate(self.tokens_of_layer(seq)):
            if layer in slots_of:
                names = [f"{layer}.attention", f"{layer}.mlp"] if apart else [layer]
                k_of_site |= dict.fromkeys(names, slots_of[layer])
            if layer in self.expert_layers and tokens.transformed and self.experts is not None:
                slots = self.expert_slots(layer, tokens.transformed)
                k_of_site |= {expert_site(layer, e): slots for e in range(self.experts.n_experts)}
        return k_of_site

    def expert_slots(self, layer: int, tokens: int) -> int:
        """Returns the slots of each expert of a layer if its experts get `tokens` tokens."""
        assert self.experts is not None
        if not self.experts.fixed_places:
            return self.experts.slots(tokens)
        return min(tokens, self.experts.fixed_places[self.expert_layers.index(layer)])

    @property
    def capacity(self) -> float | None:
        """The capacity of every routed layer; None if layers have different capacities or none routes."""
        if self.routing is None:
            return None
        capacity = self.routing.capacity
        values = set(capacity) if isinstance(capacity, tuple) else {capacity}
        return values.pop() if len(values) == 1 else None

    def with_capacity(self, capacity: float) -> ModelSpec:
        """Returns this spec with one capacity for every routed layer, which also replaces a per-layer schedule.

        Raises:
            SpecError: the model has no routed layers, or its capacity rule does not allow this capacity.
        """
        if self.routing is None:
            raise SpecError(["spec.routing: null, so there is no routed layer whose capacity could be changed"])
        return dataclasses.replace(self, routing=dataclasses.replace(self.routing, capacity=capacity))

    def dense(self) -> ModelSpec:
        """Returns the dense baseline: the same sizes and experts; every token runs every block."""
        return dataclasses.replace(self, routing=None)

    def to_dict(self) -> dict[str, Any]:
        """Converts the spec to plain data for JSON, with lists instead of tuples; the inverse of `from_dict`."""
        data = dataclasses.asdict(self)
        for part in TABLES:
            if data[part] is not None:
                data[part] |= {name: list(value) for name, value in data[part].items() if isinstance(value, tuple)}
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelSpec:
        """Builds a spec from plain data.

        Raises:
            SpecError: the data is not a table, fields are unknown (with the nearest name) or missing, or values are not
                valid. No other error is raised, even for values of wrong types.
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
            **{**data, **{part: None if raw is None else TABLES[part](**_values(raw)) for part, raw in tables.items()}}
        )


TABLES: dict[str, type[RoutingSpec] | type[ExpertsSpec] | type[RopeScaling]] = {
    "rope_scaling": RopeScaling,
    "routing": RoutingSpec,
    "experts": ExpertsSpec,
}
"""The fields of a spec that are tables in plain data."""


def _problems_of(spec: ModelSpec) -> list[str]:
    sizes = ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_head", "d_ff", "max_positions")
    problems = size_problems("spec", spec, *sizes, least=1)
    problems += positive_problems("spec", spec, "rope_theta", "norm_eps", "embedding_scale")
    for name in ("mlp_bias", "tie_embeddings"):
        if type(getattr(spec, name)) is not bool:
            problems.append(f"spec.{name}: expected true or false, got {shown(getattr(spec, name))}")
    names = {"attention_bias": tuple(ATTENTION_BIASES), "qk_norm": QK_NORMS, "activation": ACTIVATIONS}
    problems += name_problems("spec", spec, names)
    for name, kind in TABLES.items():
        table = getattr(spec, name)
        if table is not None and not isinstance(table, kind):
            article = "an" if kind is ExpertsSpec else "a"
            problems.append(f"spec.{name}: expected {article} {kind.__name__} or None, got {type(table).__name__}")
    if problems:
        return problems
    if spec.n_heads % spec.n_kv_heads:
        problems.append(f"spec.n_kv_heads: {spec.n_kv_heads} does not divide n_heads {spec.n_heads}")
    if spec.d_head % 2:
        problems.append(f"spec.d_head: RoPE rotates pairs, so it must be even, got {spec.d_head}")
    problems += rope_scaling_problems(spec.rope_scaling) if spec.rope_scaling else []
    problems += routing_problems(spec.routing, spec.n_layers) if spec.routing else []
    problems += experts_problems(spec.experts, spec.n_layers) if spec.experts else []
    if not problems and spec.routing is not None and spec.routing.blocks_per_router > 1:
        inside = sorted(set(spec.expert_layers) & set(spec.router_of_layer))
        if inside:
            problems.append(
                f"spec.routing.blocks_per_router: a router decides about one block if it has experts, as block "
                f"{inside[0]} has; expected 1, got {spec.routing.blocks_per_router}"
            )
    return problems


def _values(data: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a table of layers to an EveryNth, and lists to tuples."""
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

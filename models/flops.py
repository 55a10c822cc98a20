"""What a model costs by arithmetic on its spec: FLOPs, weights, keys and values, layer by layer and part by part.

Counted are matrix products, two FLOPs for each multiply-add, as `torch.utils.flop_counter` counts the eager model and
`mod_export.measure.cost` the exported graph. For a batch of B rows of S positions, in a layer whose attention sees A
tokens of a row and whose MLP sees M (S each where nothing is routed, k in a routed part):

    attention_projections  2 B A D E (2 H + 2 G)    queries and outputs of H heads, keys and values of G, E wide
    attention              4 B H E A^2              scores and their product with values, the full square
    mlp                    6 B M D F                gate, up and down
    experts                6 B N C D F              instead of it: N experts of C slots each, empty ones included
    routing                2 B T D                  a linear router that scores the T tokens it is given
                           nothing                  noise instead of a router
                           2 B T (D h + h)          an MLP router, or the predictor where that decides
                           2 B M D (N + no-ops)     the router of experts
    head                   2 B S D V                outside of the layers; the logits of every token

Attention counts as the full square although it is causal, because that is what both counters say; `needed_flops` leaves
out the 2 B H E A (A - 1) that the mask hides. A router counts wherever the eager model runs it. An exported graph lacks
it where nothing reads its score: where a predictor or noise decides and the gate is `ones`, or nothing is gated.

Shape legend: B batch, S positions, D model width, H query heads, G key/value heads, E head width, F MLP width,
V vocabulary, h hidden width of a router.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from mod_models.spec import ExpertsSpec, LayerTokens, ModelSpec, RoutingSpec, Site, layer_of
from mod_models.transformer import Transformer

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """One row of the table: a layer, or `embedding` or `head`, at one batch and sequence.

    Attributes:
        name: the number of the layer, `embedding`, or `head`, which the final norm belongs to.
        routed: what is routed and by which selection, for a person to read; empty where every token runs.
        selected: tokens of a row that each routing site of this layer selects, in the order of decision.
        flops: by part, of all matrix products; a part that the layer does not have is absent.
        needed_flops: all of them without the scores that the causal mask hides.
        weight_bytes: its weights, routers and predictors included. A head that is the embedding has none of its own.
            Tables that follow from the spec (rotary angles, noise) are no weights.
        kv_bytes: keys and values of the tokens that its attention sees.
    """

    name: str
    routed: str = ""
    selected: Mapping[Site, int] = field(default_factory=dict)
    flops: Mapping[str, int]
    needed_flops: int
    weight_bytes: int
    kv_bytes: int = 0


def layer_costs(spec: ModelSpec, batch: int, seq: int) -> tuple[LayerCost, ...]:
    """The embedding, every layer in order, and the head, for `batch` rows of `seq` positions."""
    weights = _weight_bytes(spec)
    head = 2 * batch * seq * spec.vocab_size * spec.d_model
    layers = (_layer(spec, layer, given, batch, seq) for layer, given in enumerate(spec.tokens_of_layer(seq)))
    return (
        LayerCost(name="embedding", flops={}, needed_flops=0, weight_bytes=weights["embedding"]),
        *layers,
        LayerCost(name="head", flops={"head": head}, needed_flops=head, weight_bytes=weights["head"]),
    )


@cache
def _weight_bytes(spec: ModelSpec) -> Counter[str]:
    """Float32 bytes of each row of the table, as the model has them."""
    with torch.device("meta"):
        # One position: no weight depends on their number, and the RoPE tables are real even on the meta device.
        state = Transformer(replace(spec, max_positions=1)).state_dict()
    found: Counter[str] = Counter()
    for name, tensor in state.items():
        part, _, rest = name.partition(".")
        row = {"layers": rest.partition(".")[0], "embedding": part}.get(part, "head")
        found[row] += tensor.numel() * FLOAT32_BYTES
    return found


def _layer(spec: ModelSpec, layer: int, given: LayerTokens, batch: int, seq: int) -> LayerCost:
    routing = spec.routing if layer in spec.routed_layers else None
    experts = spec.experts if layer in spec.expert_layers else None
    D, H, G, E = spec.d_model, spec.n_heads, spec.n_kv_heads, spec.d_head
    A, M = given.attended, given.transformed
    flops = {}
    if routing is not None or experts is not None:
        scored = batch * given.scored * (_scoring(D, routing) if routing else 0)
        flops["routing"] = 2 * (scored + (batch * M * D * (experts.n_experts + experts.noop_experts) if experts else 0))
    flops["attention_projections"] = 2 * batch * A * D * E * (2 * H + 2 * G)
    flops["attention"] = 4 * batch * H * E * A * A
    if experts is None:
        flops["mlp"] = 6 * batch * M * D * spec.d_ff
    else:
        slots = experts.n_experts * spec.expert_slots(layer, M) if M else 0
        flops["experts"] = 6 * batch * slots * D * spec.d_ff
    return LayerCost(
        name=str(layer),
        routed=", ".join(filter(None, [_routing_label(routing), _experts_label(experts)])),
        selected={site: k for site, k in spec.k_by_layer(seq).items() if layer_of(site) == layer},
        flops=flops,
        needed_flops=sum(flops.values()) - 2 * batch * H * E * A * (A - 1),
        weight_bytes=_weight_bytes(spec)[str(layer)],
        kv_bytes=2 * batch * G * E * A * FLOAT32_BYTES,
    )


def _scoring(d_model: int, routing: RoutingSpec) -> int:
    """Multiply-adds for one token, of the routers of all parts and of the predictors where they decide."""
    by_mlp = d_model + 1
    hidden = by_mlp * routing.router_hidden
    router = {"mlp": hidden, "norm_mlp": hidden, "noise": 0}.get(routing.router, d_model)
    predictor = by_mlp * routing.predictor_hidden if routing.selection == "predictor" else 0
    return (2 if routing.parts == "separate" else 1) * (router + predictor)


def _routing_label(routing: RoutingSpec | None) -> str:
    if routing is None:
        return ""
    part = {"block": "block", "attention": "attention", "mlp": "MLP", "separate": "attention and MLP"}[routing.parts]
    return f"{part} by {routing.selection}"


def _experts_label(experts: ExpertsSpec | None) -> str:
    if experts is None:
        return ""
    noops = f" + {experts.noop_experts} no-op" if experts.noop_experts else ""
    each = f", {experts.top_k} each" if experts.top_k > 1 else ""
    return f"{experts.n_experts} experts{noops} by {experts.choice}{each}"

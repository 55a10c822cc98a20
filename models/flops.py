"""Costs of a model, calculated from its spec: FLOPs, weights, keys and values of each layer and each part.

Only matrix products count, two FLOPs for each multiply-add, like `torch.utils.flop_counter` on the eager model and
`mod_export.measure.cost` on the exported graph. The table is for a batch of B rows of S positions, in a layer in which
A tokens of a row have a query, K have a key, and M run the MLP. Each of these numbers is k if its part is routed, else
S; but K is S if skipped tokens keep their keys and values.

    attention_projections  4 B D E (H A + G K)      queries and outputs of H heads, keys and values of G, E wide
    attention              4 B H E A K              scores and their product with values, hidden ones included
    mlp                    6 B M D F                gate, up and down
    adapter                2 B S D D                linear; it runs for every token: which skip depends on the data
                           4 B S D F'               bottleneck, F' wide
                           6 B S D F'               gated
    experts                6 B N C D F              in place of mlp: N experts of C slots each, empty slots included
    routing                2 B T D                  a linear router that scores T tokens
                           nothing                  noise instead of a router
                           2 B T (D h + h)          an MLP router, or a predictor that decides
                           2 B M D (N + no-ops)     the router of experts
    head                   2 B S D V                outside of the layers; the logits of every token

Attention counts as the full rectangle although it is causal, as in both counters. `needed_flops` leaves out the
2 B H E A (K - 1) that the mask hides if selected tokens are spread evenly over the row. A router counts if the eager
model runs it. An exported graph lacks a router whose score is not used, because a predictor or noise decides and
the gate is `ones` or the combine rule has no gate.

Shape legend: B batch, S positions, D model width, H query heads, G key/value heads, E head width, F MLP width,
V vocabulary, h hidden width of a router.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from mod_models.spec import ExpertsSpec, LayerTokens, ModelSpec, RoutingSpec, Site, layer_of
from mod_models.transformer import weight_shapes

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """Cost of a layer, of the embedding or of the head, at one batch size and sequence length.

    Attributes:
        name: the number of the layer, `embedding`, or `head` (with the final norm).
        routed: the routed parts and their selection, for people to read; empty if every token runs.
        selected: routing site of this layer -> tokens of a row that it selects, in the order of decision.
        flops: part -> FLOPs of its matrix products; only parts that the layer has.
        needed_flops: the sum of `flops` without the scores that the causal mask hides.
        weight_bytes: bytes of its weights, routers and predictors included; a tied head only has those of the norm.
            Tables that follow from the spec (rotary angles, noise) do not count.
        kv_bytes: bytes of the keys and values in its attention.
    """

    name: str
    routed: str = ""
    selected: Mapping[Site, int] = field(default_factory=dict)
    flops: Mapping[str, int]
    needed_flops: int
    weight_bytes: int
    kv_bytes: int = 0


def layer_costs(spec: ModelSpec, batch: int, seq: int) -> tuple[LayerCost, ...]:
    """Costs of the embedding, of every layer in order, and of the head, for `batch` rows of `seq` positions."""
    weights = _weight_bytes(spec)
    head = 2 * batch * seq * spec.vocab_size * spec.d_model
    layers = (_layer(spec, layer, tokens, batch, seq) for layer, tokens in enumerate(spec.tokens_of_layer(seq)))
    return (
        LayerCost(name="embedding", flops={}, needed_flops=0, weight_bytes=weights["embedding"]),
        *layers,
        LayerCost(name="head", flops={"head": head}, needed_flops=head, weight_bytes=weights["head"]),
    )


@cache
def _weight_bytes(spec: ModelSpec) -> Counter[str]:
    """Float32 bytes of the weights of each layer, of `embedding` and of `head`, from the model's state_dict."""
    bytes_of_row: Counter[str] = Counter()
    for name, shape in weight_shapes(spec).items():
        part, _, rest = name.partition(".")
        row = {"layers": rest.partition(".")[0], "embedding": part}.get(part, "head")
        bytes_of_row[row] += shape.numel() * FLOAT32_BYTES
    return bytes_of_row


def _layer(spec: ModelSpec, layer: int, tokens: LayerTokens, batch: int, seq: int) -> LayerCost:
    routing = spec.routing if layer in spec.router_of_layer else None
    experts = spec.experts if layer in spec.expert_layers else None
    D, H, G, E = spec.d_model, spec.n_heads, spec.n_kv_heads, spec.d_head
    A, K, M = tokens.attending, tokens.attended, tokens.transformed
    flops = {}
    if layer in spec.routed_layers or experts is not None:
        scored = batch * tokens.scored * (_scoring(D, routing) if routing else 0)
        flops["routing"] = 2 * (scored + (batch * M * D * (experts.n_experts + experts.noop_experts) if experts else 0))
    flops["attention_projections"] = 4 * batch * D * E * (H * A + G * K)
    flops["attention"] = 4 * batch * H * E * A * K
    if experts is None:
        flops["mlp"] = 6 * batch * M * D * spec.d_ff
    else:
        slots = experts.n_experts * spec.expert_slots(layer, M) if M else 0
        flops["experts"] = 6 * batch * slots * D * spec.d_ff
    if routing is not None and tokens.replaced:
        wide = {"linear": 2 * D, "bottleneck": 4 * routing.adapter_hidden, "gated": 6 * routing.adapter_hidden}
        flops["adapter"] = batch * tokens.replaced * D * wide[routing.adapter]
    return LayerCost(
        name=str(layer),
        routed=", ".join(filter(None, [_routing_label(routing, layer, spec), _experts_label(experts)])),
        selected={site: k for site, k in spec.k_by_layer(seq).items() if layer_of(site) == layer},
        flops=flops,
        needed_flops=sum(flops.values()) - 2 * batch * H * E * A * max(0, K - 1),
        weight_bytes=_weight_bytes(spec)[str(layer)],
        kv_bytes=2 * batch * G * E * K * FLOAT32_BYTES,
    )


def _scoring(d_model: int, routing: RoutingSpec) -> int:
    """Multiply-adds for one token of all routers of the layer, and of its predictors if they decide."""
    by_mlp = d_model + 1
    hidden = by_mlp * routing.router_hidden
    router = {"mlp": hidden, "norm_mlp": hidden, "noise": 0}.get(routing.router, d_model)
    predictor = by_mlp * routing.predictor_hidden if routing.selection == "predictor" else 0
    return (2 if routing.parts == "separate" else 1) * (router + predictor)


def _routing_label(routing: RoutingSpec | None, layer: int, spec: ModelSpec) -> str:
    if routing is None:
        return ""
    if layer not in spec.routed_layers:
        return f"with block {spec.router_of_layer[layer]}"
    part = {"block": "block", "attention": "attention", "mlp": "MLP", "separate": "attention and MLP"}[routing.parts]
    return f"{part} by {routing.selection}"


def _experts_label(experts: ExpertsSpec | None) -> str:
    if experts is None:
        return ""
    noops = f" + {experts.noop_experts} no-op" if experts.noop_experts else ""
    each = f", {experts.top_k} each" if experts.top_k > 1 else ""
    return f"{experts.n_experts} experts{noops} by {experts.choice}{each}"

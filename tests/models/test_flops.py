"""The formula compared with PyTorch's own counter on the eager module: equal for every kind of model."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny_models import make_spec
from torch.utils.flop_counter import FlopCounterMode
from variants import VARIANTS, experts

from mod_models.flops import LayerCost, layer_costs
from mod_models.spec import EveryNth, ExpertsSpec, ModelSpec, RoutingSpec
from mod_models.transformer import Transformer

SHAPES = ((1, 1), (3, 7))
MIDDLE = ModelSpec(
    vocab_size=8192, d_model=512, n_layers=12, n_heads=8, n_kv_heads=4, d_head=64, d_ff=1408, max_positions=2048,
    routing=RoutingSpec(),
)  # fmt: skip
LARGER = {
    "dense": MIDDLE.dense(),
    "routed": MIDDLE,
    "staged MoDE": dataclasses.replace(MIDDLE, experts=ExpertsSpec(top_k=2)),
    "apart, MLP routers": dataclasses.replace(
        MIDDLE, n_kv_heads=8, tie_embeddings=False,
        routing=RoutingSpec(
            parts="separate", router="mlp", router_hidden=32, selection="predictor", predictor_hidden=64
        ),
    ),
}  # fmt: skip
MORE = {
    **VARIANTS,
    "MLP router": make_spec(router="mlp"),
    "MLP router with a norm": make_spec(router="norm_mlp", parts="separate", always_first=1),
    "strictly above": make_spec(capacity_rule="strict_floor", capacity=0.5),
    "no slot": make_spec(capacity=0.01),
    "no slot, MLP": make_spec(parts="mlp", capacity=0.01, experts=experts()),
    "gate that ignores the score": make_spec(selection="predictor", predictor_hidden=3, gate="ones"),
    "untied, every head its own keys": make_spec(tie_embeddings=False, n_kv_heads=4),
    "predictor that does not decide": make_spec(predictor_hidden=3),
    "bias": make_spec(router="linear_bias"),
    "no slot, scaled": make_spec(capacity=0.01, skipped_result="scaled"),
    "no slot, adapter": make_spec(capacity=0.01, skipped_result="adapter", skipped_keys_values="kept"),
    "no slot, weighted adapter": make_spec(
        capacity=0.01, skipped_result="adapter", adapter_gate="rest", gate="sigmoid", parts="mlp"
    ),
}


def flops_by_torch(spec: ModelSpec, batch: int, seq: int, outputs: str = "logits") -> int:
    """FLOPs of the eager module, without values. Attention uses the math kernel, whose products have counting rules. It
    repeats keys and values of grouped queries, which costs no product.
    """
    with torch.device("meta"):
        module = Transformer(spec, outputs)
    module = module.to("meta").eval().requires_grad_(False)
    ids_BS = torch.zeros((batch, seq), dtype=torch.int64, device="meta")
    lengths_B = torch.full((batch,), seq, device="meta")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        module(ids_BS, lengths_B)
    total: int = counter.get_total_flops()
    return total


def total(costs: tuple[LayerCost, ...]) -> int:
    return sum(sum(cost.flops.values()) for cost in costs)


@pytest.mark.fast(*(f"{name}-3-7" for name in MORE), "dense-1-1", "topk-1-1", "staged MoDE-1-1", "no slot, adapter-1-1")
@pytest.mark.parametrize(("batch", "seq"), SHAPES)
@pytest.mark.parametrize("spec", MORE.values(), ids=MORE)
def test_torch_counts_the_same(spec: ModelSpec, batch: int, seq: int) -> None:
    assert total(layer_costs(spec, batch, seq)) == flops_by_torch(spec, batch, seq)


@pytest.mark.parametrize("spec", LARGER.values(), ids=LARGER)
def test_torch_counts_the_same_of_a_size_that_is_used(spec: ModelSpec) -> None:
    assert total(layer_costs(spec, 3, 515)) == flops_by_torch(spec, 3, 515)


@pytest.mark.parametrize("name", LARGER)
def test_weights_are_those_of_the_module(name: str) -> None:
    spec = LARGER[name]
    with torch.device("meta"):
        state = Transformer(spec).state_dict()
    costs = {cost.name: cost.weight_bytes for cost in layer_costs(spec, 1, 8)}
    assert sum(costs.values()) == sum(4 * tensor.numel() for tensor in state.values())
    assert costs["1"] == sum(4 * tensor.numel() for name, tensor in state.items() if name.startswith("layers.1."))


@pytest.mark.parametrize("spec", [*VARIANTS.values(), make_spec(n_layers=12, layers=(1, 10, 11))])
def test_every_routing_site_is_in_one_row(spec: ModelSpec) -> None:
    """Layer 10 is not taken for layer 1."""
    selected = [item for cost in layer_costs(spec, 1, 16) for item in cost.selected.items()]
    assert selected == list(spec.k_by_layer(16).items())


def test_keys_and_values_are_of_the_tokens_that_attention_sees() -> None:
    costs = {cost.name: cost.kv_bytes for cost in layer_costs(MIDDLE, 2, 1024)}
    assert costs["0"] == 2 * 2 * 1024 * 4 * 64 * 4
    assert costs["1"] == costs["0"] // 8
    assert costs["head"] == costs["embedding"] == 0
    # A token that exits is missing in all later layers.
    spec = make_spec(selection="exit", capacity_rule="ceil", capacity=(0.5,), layers=(1,), n_layers=3)
    costs = {cost.name: cost.kv_bytes for cost in layer_costs(spec, 1, 16)}
    assert [costs[name] // costs["2"] for name in "012"] == [2, 1, 1]


def test_what_the_mask_hides_is_not_needed() -> None:
    (first,) = (cost for cost in layer_costs(MIDDLE, 1, 512) if cost.name == "0")
    scores = 8 * 512 * 511 // 2
    assert sum(first.flops.values()) - first.needed_flops == 4 * 64 * scores


def test_rows_say_what_is_routed() -> None:
    both = make_spec(parts="separate", selection="predictor", predictor_hidden=2, layers=(0,))
    named = {cost.name: cost.routed for cost in layer_costs(both, 1, 8)}
    assert named == {"embedding": "", "0": "attention and MLP by predictor", "1": "", "2": "", "head": ""}
    together = [cost.routed for cost in layer_costs(make_spec(layers=(1,), blocks_per_router=2), 1, 8)]
    assert together == ["", "", "block by topk", "with block 1", ""]
    spec = make_spec(layers=(0,), experts=experts(noop_experts=2, top_k=2, layers=EveryNth(every=1, offset=0)))
    named = {cost.name: cost.routed for cost in layer_costs(spec, 1, 8)}
    assert named["0"] == "block by topk, 4 experts + 2 no-op by token, 2 each"
    assert named["1"] == "4 experts + 2 no-op by token, 2 each"
    assert [layer_costs(make_spec(parts=part), 1, 8)[1].routed for part in ("attention", "mlp")] == [
        "attention by topk", "MLP by topk",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["dense", "routed"])
def test_the_last_layer_computes_the_last_token(name: str) -> None:
    """If only the logits of each row's last token are asked for: one query, one row of the MLP, and one of the head."""
    spec, batch, seq = LARGER[name], 2, 64
    layer, head = layer_costs(spec, batch, seq)[-2:]
    (tokens,) = spec.tokens_of_layer(seq)[-1:]
    queries = 4 * batch * spec.d_model * spec.n_heads * spec.d_head * (tokens.attending - 1)
    saved = queries + layer.flops["attention"] * (tokens.attending - 1) // tokens.attending
    saved += layer.flops["mlp"] * (tokens.transformed - 1) // tokens.transformed
    saved += head.flops["head"] * (seq - 1) // seq
    assert flops_by_torch(spec, batch, seq, "last") == flops_by_torch(spec, batch, seq) - saved


def test_the_last_layer_with_experts_computes_every_token() -> None:
    spec = LARGER["staged MoDE"]
    head = 2 * 2 * 63 * spec.d_model * spec.vocab_size
    assert flops_by_torch(spec, 2, 64, "last") == flops_by_torch(spec, 2, 64) - head

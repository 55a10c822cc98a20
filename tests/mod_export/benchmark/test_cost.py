"""The cost model against a formula written from the spec, against PyTorch's own counter, and rule by rule."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from tiny_models import make_spec
from torch.utils.flop_counter import FlopCounterMode
from variants import VARIANTS

from mod_export.benchmark.cost import PARTS, cost_row
from mod_export.benchmark.products import NO_RULE, needed_scores
from mod_export.errors import GraphError
from mod_export.export.capture import captured_module
from mod_export.export.onnx_export import INPUTS, onnx_from_captured
from mod_export.export.passes import PORTABLE, run_passes
from mod_export.export.weights import WeightsFile, bind_weights, state_of, write_weights
from mod_export.results.cost import CostRow
from mod_export.types import Bucket
from mod_models.flops import layer_costs
from mod_models.spec import EveryNth, ModelSpec, RoutingSpec
from mod_models.transformer import Transformer

BUCKET = Bucket(2, 24)
BUCKET_OF_TINY = Bucket(2, 13)
KINDS = (
    "early exit with experts", "routed apart by predictors", "random", "attention routed", "experts, two of a token",
    "staged MoDE, expert choice", "integrated MoDE",
)  # fmt: skip
"""Those whose products differ, the first two in `make test`; the others are held against PyTorch's counter in
tests/models/test_flops.py.
"""
SPEC = ModelSpec(
    vocab_size=48, d_model=32, n_layers=3, n_heads=4, n_kv_heads=4, d_head=8, d_ff=56, max_positions=32,
    routing=RoutingSpec(capacity=0.25),
)  # fmt: skip
SPECS = {
    "dense": SPEC.dense(),
    "paper": SPEC,
    "grouped queries": dataclasses.replace(SPEC, n_kv_heads=2),
    "mlp router, schedule": dataclasses.replace(
        SPEC,
        routing=RoutingSpec(layers=EveryNth(every=2, offset=0), router="mlp", router_hidden=12, capacity=(0.5, 0.1)),
    ),
    "absolute": dataclasses.replace(
        SPEC, routing=RoutingSpec(capacity_rule="absolute", capacity=5.0, router="linear_bias")
    ),
}


def formula(spec: ModelSpec, bucket: Bucket) -> dict[str, int]:
    """FLOPs from the spec alone: two for each multiply-add, attention as the full square."""
    B, S, D = bucket.batch, bucket.seq, spec.d_model
    H, G, E, F = spec.n_heads, spec.n_kv_heads, spec.d_head, spec.d_ff
    parts = dict.fromkeys(PARTS, 0)
    k_by_layer = spec.k_by_layer(S)
    for layer in range(spec.n_layers):
        T = k_by_layer.get(layer, S)
        parts["attention_projections"] += 2 * B * T * D * (2 * H * E + 2 * G * E)
        parts["attention"] += 4 * B * H * T * T * E
        parts["mlp"] += 6 * B * T * D * F
        if layer in k_by_layer:
            assert spec.routing is not None
            hidden = spec.routing.router_hidden
            parts["routing"] += 2 * B * S * (D * hidden + hidden if spec.routing.router == "mlp" else D)
    parts["head"] = 2 * B * S * D * spec.vocab_size
    return parts


def transformer(spec: ModelSpec) -> Transformer:
    model = Transformer(spec)
    model.init_weights(torch.Generator().manual_seed(0))
    return model.eval().requires_grad_(False)


def portable_graph(spec: ModelSpec, bucket: Bucket, folder: Path) -> ir.Model:
    module = transformer(spec)
    state = state_of(module)
    model = onnx_from_captured(captured_module(module, bucket, "test"), state, INPUTS, ["logits"])
    run_passes(model, PORTABLE, "float32")
    path = folder / "weights-float32.data"
    write_weights(path, state, "float32")
    bind_weights(model, [WeightsFile.open(path)], folder)
    return model


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_real_graph_costs_what_formula_and_torch_say(spec: ModelSpec, tmp_path: Path) -> None:
    row = cost_row(portable_graph(spec, BUCKET, tmp_path), "mod" if spec.routing else "dense", BUCKET)
    expected = formula(spec, BUCKET)
    assert row.flops_by_part == expected
    assert row.flops == sum(expected.values()) == flops_by_torch(spec)
    tokens = [spec.k_by_layer(BUCKET.seq).get(layer, BUCKET.seq) for layer in range(spec.n_layers)]
    hidden = sum(4 * BUCKET.batch * spec.n_heads * spec.d_head * T * (T - 1) // 2 for T in tokens)
    assert row.needed_flops == row.flops - hidden
    assert row.kv_bytes == sum(2 * 4 * BUCKET.batch * spec.n_kv_heads * T * spec.d_head for T in tokens)
    assert row.weight_bytes == sum(tensor.numel() * 4 for tensor in state_of(transformer(spec)).values())


@pytest.mark.parametrize(
    "spec",
    [pytest.param(VARIANTS[kind], marks=pytest.mark.slow if kind in KINDS[2:] else [], id=kind) for kind in KINDS],
)
def test_graphs_of_every_kind_cost_what_the_models_formula_says(spec: ModelSpec, tmp_path: Path) -> None:
    bucket = BUCKET_OF_TINY
    row = cost_row(portable_graph(spec, bucket, tmp_path), "mod", bucket)
    costs = layer_costs(spec, bucket.batch, bucket.seq)
    by_part = Counter[str]()
    for cost in costs:
        by_part.update(cost.flops)
    assert row.flops_by_part == dict.fromkeys(PARTS, 0) | by_part
    assert row.needed_flops == sum(cost.needed_flops for cost in costs)
    assert row.kv_bytes == sum(cost.kv_bytes for cost in costs)
    buffers = sum(buffer.nbytes for buffer in transformer(spec).buffers())
    assert row.weight_bytes == sum(cost.weight_bytes for cost in costs) + buffers


def test_a_router_whose_score_nobody_reads_is_in_no_graph(tmp_path: Path) -> None:
    spec = make_spec(selection="predictor", predictor_hidden=3, gate="ones", layers=(1,))
    row = cost_row(portable_graph(spec, BUCKET_OF_TINY, tmp_path), "mod", BUCKET_OF_TINY)
    (layer,) = (cost for cost in layer_costs(spec, 2, 13) if cost.routed)
    D, S, B, h = spec.d_model, 13, 2, 3
    assert layer.flops["routing"] == 2 * B * S * (D + D * h + h)
    assert row.flops_by_part["routing"] == layer.flops["routing"] - 2 * B * S * D


def flops_by_torch(spec: ModelSpec) -> int:
    """PyTorch's counter on the eager model: attention through the math kernel, whose products have counting rules; the
    fused CPU kernel has none and would count as nothing. The math kernel repeats K and V for grouped queries, which
    costs no product."""
    ids_BS = torch.zeros((BUCKET.batch, BUCKET.seq), dtype=torch.int64)
    with (
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        transformer(spec)(ids_BS, torch.full((BUCKET.batch,), BUCKET.seq))
    total: int = counter.get_total_flops()
    return total


def test_the_tied_and_the_untied_head_cost_the_same(tmp_path: Path) -> None:
    tied = cost_row(portable_graph(SPEC, BUCKET, tmp_path), "mod", BUCKET)
    untied_spec = dataclasses.replace(SPEC, tie_embeddings=False)
    untied = cost_row(portable_graph(untied_spec, BUCKET, tmp_path), "mod", BUCKET)
    assert tied.flops_by_part == untied.flops_by_part
    assert untied.weight_bytes - tied.weight_bytes == 4 * SPEC.vocab_size * SPEC.d_model


def parsed(text: str, **initializers: tuple[int, ...]) -> ir.Model:
    """A graph in ONNX's own text form, with float32 initializers, after shape inference."""
    header = '<ir_version: 10, opset_import: ["" : 23, "vendor" : 1]>'
    proto = onnx.parser.parse_model(f"{header} {text}")
    for name, shape in initializers.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), name))
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def cost(text: str, **initializers: tuple[int, ...]) -> CostRow:
    return cost_row(parsed(text, **initializers), "mod", Bucket(1, 4))


def nonzero(row: CostRow) -> dict[str, int]:
    return {part: flops for part, flops in row.flops_by_part.items() if flops}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("layers.3.attention.q_proj.weight", "attention_projections"),
        ("model.layers.3.self_attn.o_proj.weight", "attention_projections"),
        ("layers.3.mlp.up_proj.weight", "mlp"),
        ("layers.3.experts.up_proj", "experts"),
        ("layers.3.mlp.experts.5.up_proj.weight", "experts"),
        ("layers.3.experts.router.projection.weight", "routing"),
        ("layers.3.mlp.router.weight", "routing"),
        ("layers.3.router.projection.weight", "routing"),
        ("layers.3.predictor.hidden.weight", "routing"),
        ("layers.3.mlp_router.projection.weight", "routing"),
        ("layers.3.mlp_predictor.hidden.weight", "routing"),
        ("head.weight", "head"),
        ("embedding.weight", "head"),
        ("attention_norm.weight", "other"),
    ],
)
def test_a_product_belongs_to_the_part_its_weight_is_named_after(name: str, part: str) -> None:
    text = "g (float[2,4,8] x) => (float[2,4,3] y) { w = Transpose <perm=[1,0]> (stored) y = MatMul(x, w) }"
    model = parsed(text, stored=(3, 8))
    model.graph.initializers["stored"].name = name
    assert nonzero(cost_row(model, "mod", Bucket(1, 4))) == {part: 2 * 2 * 4 * 8 * 3}


@pytest.mark.parametrize(
    ("left", "right", "flops"),
    [
        ((5, 7), (7, 3), 2 * 5 * 7 * 3),
        ((2, 5, 7), (7, 3), 2 * 2 * 5 * 7 * 3),
        ((4, 1, 5, 7), (3, 7, 2), 2 * (4 * 3) * 5 * 7 * 2),
        ((7,), (7, 3), 2 * 7 * 3),
        ((5, 7), (7,), 2 * 5 * 7),
        ((7,), (7,), 2 * 7),
    ],
)
def test_matmul_counts_as_numpy_broadcasts(left: tuple[int, ...], right: tuple[int, ...], flops: int) -> None:
    shape = np.matmul(np.ones(left), np.ones(right)).shape
    text = f"g (float{list(left)} x) => (float{list(shape)} y) {{ y = MatMul(x, w) }}"
    row = cost(text.replace("float[] ", "float "), w=right)
    assert row.flops == flops


@pytest.mark.parametrize(("trans_a", "trans_b"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_gemm_counts_its_product_and_no_bias(trans_a: int, trans_b: int) -> None:
    left, right = ((7, 5) if trans_a else (5, 7)), ((3, 7) if trans_b else (7, 3))
    text = f"g (float{list(left)} x) => (float[5,3] y) {{ y = Gemm<transA={trans_a}, transB={trans_b}>(x, w, b) }}"
    assert cost(text, w=right, b=(3,)).flops == 2 * 5 * 7 * 3


def test_attention_counts_the_full_square_of_every_query_head() -> None:
    text = """g (float[2,6,5,8] q, float[2,3,7,8] k, float[2,3,7,4] v) => (float[2,6,5,4] y)
    { y = Attention<is_causal=1>(q, k, v) }"""
    row = cost(text)
    assert nonzero(row) == {"attention": 2 * 2 * 6 * 5 * 7 * (8 + 4)}
    assert row.kv_bytes == 4 * 2 * 3 * 7 * (8 + 4)


def test_attention_over_flat_heads_and_a_past_counts_all_keys() -> None:
    flat = """g (float[2,5,48] q, float[2,7,24] k, float[2,7,12] v) => (float[2,5,24] y)
    { y = Attention<q_num_heads=6, kv_num_heads=3>(q, k, v) }"""
    assert nonzero(cost(flat)) == {"attention": 2 * 2 * 6 * 5 * 7 * (8 + 4)}
    past = """g (float[2,6,1,8] q, float[2,3,1,8] k, float[2,3,1,8] v, float[2,3,9,8] pk, float[2,3,9,8] pv)
    => (float[2,6,1,8] y, float[2,3,10,8] nk, float[2,3,10,8] nv) { y, nk, nv = Attention(q, k, v, , pk, pv) }"""
    row = cost(past)
    assert nonzero(row) == {"attention": 4 * 2 * 6 * 1 * 10 * 8}
    assert row.kv_bytes == 4 * 2 * 3 * 10 * (8 + 8)


def test_decomposed_attention_counts_as_attention() -> None:
    text = """g (float[2,4,5,8] q, float[2,4,5,8] k, float[2,4,5,8] v) => (float[2,4,5,8] y)
    { t = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, t) p = Softmax(s) y = MatMul(p, v) }"""
    row = cost(text)
    assert nonzero(row) == {"attention": 4 * 2 * 4 * 5 * 5 * 8}
    assert row.kv_bytes == 2 * 4 * 2 * 4 * 5 * 8


def test_activations_are_what_follows_from_the_inputs() -> None:
    text = """g (float[2,4,8] x) => (float[2,4,3] y)
    { w = Transpose<perm=[1,0]>(stored) p = MatMul(x, w) h = Cast<to=10>(p) y = Cast<to=1>(h) }"""
    row = cost(text, stored=(3, 8))
    assert row.activation_bytes == 24 * (4 + 2 + 4)
    assert row.weight_bytes == 0


def test_an_output_that_nobody_asked_for_costs_nothing() -> None:
    text = """g (float[2,8] x) => (int64[2,3] i) { k = Constant<value_ints=[3]>() , i = TopK(x, k) }"""
    model = parsed(text.replace(") , i", ") none, i"))
    next(node for node in model.graph if node.op_type == "TopK").outputs[0].name = ""
    assert cost_row(model, "mod", Bucket(1, 4)).activation_bytes == 6 * 8


def test_a_tensor_stored_once_is_counted_once(tmp_path: Path) -> None:
    model = parsed(
        "g (float[2,8] x) => (float[2,3] y) { p = MatMul(x, a) q = MatMul(x, b) y = Add(p, q) }", a=(8, 3), b=(8, 3)
    )
    for value in model.graph.initializers.values():
        value.const_value = ir.ExternalTensor(
            "w.data", 64, 96, ir.DataType.FLOAT, shape=ir.Shape((8, 3)), name=str(value.name), base_dir=tmp_path
        )
    assert cost_row(model, "mod", Bucket(1, 4)).weight_bytes == 96


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ('y = Einsum<equation="ij,jk->ik">(x, w)', "Einsum"),
        ("y = vendor.FusedMatMul(x, w)", "vendor.FusedMatMul"),
    ],
)
def test_a_product_without_a_rule_is_refused(body: str, name: str) -> None:
    with pytest.raises(GraphError, match=rf"mod b1s4: node .*: FLOPs of {name} cannot be counted; only MatMul"):
        cost(f"g (float[5,7] x) => (float[5,3] y) {{ {body} }}", w=(7, 3))


def test_what_is_refused_exists() -> None:
    assert {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""} >= NO_RULE


def test_a_weight_is_found_behind_anything_that_is_folded() -> None:
    text = "g (float[2,8] x) => (float[2,3] y) { c = Clip(stored, , high) w = Transpose(c) y = MatMul(x, w) }"
    model = parsed(text, stored=(3, 8), high=())
    model.graph.initializers["stored"].name = "layers.0.mlp.up_proj.weight"
    assert nonzero(cost_row(model, "mod", Bucket(1, 4))) == {"mlp": 2 * 2 * 8 * 3}


def test_an_unknown_shape_is_refused_by_name() -> None:
    with pytest.raises(GraphError, match=r"mod b1s4: the shape of value x must be known and static .* got \[n,7\]"):
        cost("g (float[n,7] x) => (float[n,3] y) { y = MatMul(x, w) }", w=(7, 3))
    model = parsed("g (float[5,7] x) => (float[5,3] y) { h = Relu(x) y = MatMul(h, w) }", w=(7, 3))
    next(iter(model.graph)).outputs[0].shape = None
    with pytest.raises(
        GraphError, match=r"the shape of value h must be known and static .* got none; export with fixed"
    ):
        cost_row(model, "mod", Bucket(1, 4))


def test_an_unknown_dtype_is_refused_by_name() -> None:
    model = parsed("g (float[5,7] x) => (float[5,7] y) { h = Relu(x) y = Relu(h) }")
    next(iter(model.graph)).outputs[0].type = None
    with pytest.raises(GraphError, match="dense b1s4: the dtype of value h must be known to count its bytes"):
        cost_row(model, "dense", Bucket(1, 4))


@pytest.mark.parametrize(
    ("inputs", "attributes", "scores"),
    [
        ("q, k, v", "is_causal = 1", 2 * (1 + 2 + 3 + 4)),
        ("q, k, v", "is_causal = 0", 2 * 4 * 4),
        ("q, k, v, , pk, pv", "is_causal = 1", 2 * (4 + 5 + 6 + 7)),
    ],
    ids=["causal", "not causal", "causal after three others"],
)
def test_scores_that_a_mask_hides_are_not_needed(inputs: str, attributes: str, scores: int) -> None:
    model = parsed(
        f"""g (float[1,2,4,8] q, float[1,1,4,8] k, float[1,1,4,8] v, float[1,1,3,8] pk, float[1,1,3,8] pv)
        => (float[1,2,4,8] y) {{ y = Attention <{attributes}> ({inputs}) }}"""
    )
    (node,) = [node for node in model.graph if node.op_type == "Attention"]
    assert needed_scores(node, "g") == scores

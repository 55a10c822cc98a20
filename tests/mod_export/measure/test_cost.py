"""FLOPs and bytes: those of real graphs compared with the formula of their spec, and those of each rule."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import small_graphs
import tiny_models
import torch
from small_graphs import portable_graph
from torch.utils.flop_counter import FlopCounterMode
from variants import VARIANTS

from mod_export.errors import GraphError
from mod_export.measure.cost import attention_sizes, cost_row, flops_of, work_of_graph
from mod_export.measure.parts import PARTS, parts_of_nodes
from mod_export.measure.products import NO_RULE, OPERANDS
from mod_export.rows.cost import CostRow, Work
from mod_export.types import Bucket
from mod_models.flops import layer_costs
from mod_models.spec import ExpertsSpec, ModelSpec
from mod_models.transformer import Transformer

BUCKET = Bucket(2, 32)
ROUTED = small_graphs.make_spec(gate="sigmoid")
SPECS = {
    "routed, grouped queries": ROUTED,
    "dense": ROUTED.dense(),
    "experts": dataclasses.replace(
        small_graphs.make_spec(), routing=None, experts=ExpertsSpec(n_experts=2, choice="token", layers=(0,))
    ),
}
MORE = {
    "MLP router, absolute capacity, untied": dataclasses.replace(
        small_graphs.make_spec(router="mlp", router_hidden=12, capacity_rule="absolute", capacity=5.0),
        tie_embeddings=False,
    ),
    **{
        kind: VARIANTS[kind]
        for kind in (
            "early exit with experts", "routed apart by predictors", "experts, two of a token",
            "staged MoDE, expert choice", "integrated MoDE",
        )
    },
}  # fmt: skip
"""Kinds whose products differ."""


@pytest.mark.parametrize(
    "spec",
    [
        *(pytest.param(spec, id=kind) for kind, spec in SPECS.items()),
        *(pytest.param(spec, id=kind, marks=pytest.mark.slow) for kind, spec in MORE.items()),
    ],
)
def test_a_real_graph_costs_what_the_formula_of_its_spec_says(spec: ModelSpec) -> None:
    """tests/models/test_flops.py compares the formula with PyTorch's own counter."""
    bucket = BUCKET if spec.max_positions >= BUCKET.seq else Bucket(2, 13)
    row = cost_row(portable_graph(spec, bucket.batch, bucket.seq), "mod", bucket)
    costs = layer_costs(spec, bucket.batch, bucket.seq)
    by_part = Counter[str]()
    for layer in costs:
        by_part.update(layer.flops)
    assert row.flops_by_part == dict.fromkeys(PARTS, 0) | by_part
    assert row.flops == by_part.total()
    assert row.needed_flops == sum(layer.needed_flops for layer in costs)
    assert row.kv_bytes == sum(layer.kv_bytes for layer in costs)


def test_weights_are_counted_as_they_are_stored(built: Path, tiny_spec: ModelSpec) -> None:
    model = ir.load(built / "graphs" / "mod-b1s64.onnx")
    weights = sum(layer.weight_bytes for layer in layer_costs(tiny_spec, 1, 64))
    buffers = sum(buffer.nbytes for buffer in Transformer(tiny_spec).buffers())
    assert cost_row(model, "mod", Bucket(1, 64)).weight_bytes == weights + buffers


@pytest.mark.slow
def test_a_router_whose_score_nobody_reads_is_in_no_graph() -> None:
    spec = tiny_models.make_spec(selection="predictor", predictor_hidden=3, gate="ones", layers=(1,))
    row = cost_row(portable_graph(spec, 2, 13), "mod", Bucket(2, 13))
    (layer,) = (part for part in layer_costs(spec, 2, 13) if part.routed)
    assert row.flops_by_part["routing"] == layer.flops["routing"] - 2 * 2 * 13 * spec.d_model


def parsed(text: str, **initializers: tuple[int, ...]) -> ir.Model:
    """Parses a graph in ONNX's text form, with float32 initializers, and infers shapes."""
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


@pytest.mark.parametrize(
    ("text", "scores", "needed", "widths", "keys"),
    [
        ("g (float[2,6,5,8] q, float[2,3,7,8] k, float[2,3,7,4] v) => (float[2,6,5,4] y) "
         "{ y = Attention<is_causal=1>(q, k, v) }",
         2 * 6 * 5 * 7, 2 * 6 * (1 + 2 + 3 + 4 + 5), 8 + 4, 2 * 3 * 7),
        ("g (float[2,5,48] q, float[2,7,24] k, float[2,7,12] v) => (float[2,5,24] y) "
         "{ y = Attention<q_num_heads=6, kv_num_heads=3>(q, k, v) }",
         2 * 6 * 5 * 7, 2 * 6 * 5 * 7, 8 + 4, 2 * 3 * 7),
        ("g (float[2,6,2,8] q, float[2,3,2,8] k, float[2,3,2,8] v, float[2,3,9,8] pk, float[2,3,9,8] pv) => "
         "(float[2,6,2,8] y, float[2,3,11,8] nk, float[2,3,11,8] nv) "
         "{ y, nk, nv = Attention<is_causal=1>(q, k, v, , pk, pv) }",
         2 * 6 * 2 * 11, 2 * 6 * (10 + 11), 8 + 8, 2 * 3 * 11),
        ("g (float[2,4,5,8] q, float[2,4,5,8] k, float[2,4,5,8] v) => (float[2,4,5,8] y) "
         "{ t = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, t) p = Softmax(s) y = MatMul(p, v) }",
         2 * 4 * 5 * 5, 2 * 4 * 5 * 5, 8 + 8, 2 * 4 * 5),
    ],
    ids=["causal, several queries of a head", "flat heads", "causal after a past", "written out"],
)  # fmt: skip
def test_attention(text: str, scores: int, needed: int, widths: int, keys: int) -> None:
    row = cost(text)
    assert nonzero(row) == {"attention": 2 * scores * widths}
    assert row.needed_flops == 2 * needed * widths
    assert row.kv_bytes == 4 * keys * widths


def test_what_is_stored_and_computed_is_counted_once(tmp_path: Path) -> None:
    text = """g (float[2,4,8] x) => (float[2,4,3] y)
    { w = Transpose<perm=[1,0]>(stored) p = MatMul(x, w) h = Cast<to=10>(p) y = Cast<to=1>(h) }"""
    row = cost(text, stored=(3, 8))
    assert (row.activation_bytes, row.weight_bytes) == (24 * (4 + 2 + 4), 0)
    model = parsed(
        "g (float[2,8] x) => (float[2,3] y) { p = MatMul(x, a) q = MatMul(x, b) y = Add(p, q) }", a=(8, 3), b=(8, 3)
    )
    for value in model.graph.initializers.values():
        value.const_value = ir.ExternalTensor(
            "w.data", 64, 96, ir.DataType.FLOAT, shape=ir.Shape((8, 3)), name=str(value.name), base_dir=tmp_path
        )
    assert cost_row(model, "mod", Bucket(1, 4)).weight_bytes == 96
    # An unused output costs nothing.
    model = parsed("g (float[2,8] x) => (int64[2,3] i) { k = Constant<value_ints=[3]>() none, i = TopK(x, k) }")
    next(node for node in model.graph if node.op_type == "TopK").outputs[0].name = ""
    assert cost_row(model, "mod", Bucket(1, 4)).activation_bytes == 6 * 8


LOOP = """y = Loop(n, , h) <body = b (int64 i, bool c, float[5,3] s) => (bool k, float[5,3] t)
    { k = Identity(c) t = Add(s, outer) }>"""
PLAIN = 2 * 5 * 7 * 3
"""FLOPs of the one product that is counted."""


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ("y = vendor.FusedMatMul(h, v)", "vendor.FusedMatMul"),
        (f"n = Constant<value_ints=[4]>() outer = Relu(h) {LOOP}", "Loop"),
        ("s = SplitToSequence<axis=0>(h) y = ConcatFromSequence<axis=0>(s)", "SplitToSequence"),
    ],
)
def test_what_has_no_rule_is_named_and_counts_nothing(body: str, name: str) -> None:
    model = parsed(f"g (float[5,7] x) => (float[5,3] y) {{ h = MatMul(x, w) {body} }}", w=(7, 3), v=(3, 3))
    row = cost_row(model, "mod", Bucket(1, 4))
    assert row.flops == PLAIN
    assert row.not_counted[name] == 1
    assert row.not_counted.keys() <= {name, "ConcatFromSequence"}  # One node makes a sequence, the other reads it.
    found = work_of_graph(model, "mod b1s4", whole_scores=False)
    assert {(item.flops, item.bytes) for item in found if not item.counted} == {(0, 0)}
    assert sum(len(item.nodes) for item in found if not item.counted) == sum(row.not_counted.values())
    assert sum(item.flops for item in found) == PLAIN
    assert flops_of(found) is None


def test_the_operators_that_are_named_in_the_rules_exist() -> None:
    standard = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    assert standard >= NO_RULE
    assert {name for domain, name in OPERANDS if not domain} <= standard


def counted_by_torch(run: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij,jk->ik", [(5, 7), (7, 3)]),
        ("ij , jk", [(5, 7), (7, 3)]),
        ("bhqd,bhkd->bhqk", [(2, 3, 5, 8), (2, 3, 7, 8)]),
        ("...ij,...jk->...ik", [(4, 1, 5, 7), (3, 7, 2)]),
        ("btd,dhe->bthe", [(2, 5, 8), (8, 3, 4)]),
        ("ij,jk->k", [(5, 7), (7, 3)]),
        ("ij,jk,kl->il", [(5, 7), (7, 3), (3, 4)]),
        ("bij,bij->b", [(2, 5, 7), (2, 5, 7)]),
    ],
)
def test_einsum_counts_what_torch_counts(equation: str, shapes: list[tuple[int, ...]]) -> None:
    arrays = [torch.ones(shape) for shape in shapes]
    result = list(torch.einsum(equation, *arrays).shape)
    names = [f"x{index}" for index in range(len(shapes))]
    inputs = ", ".join(f"float{list(shape)} {name}" for name, shape in zip(names, shapes, strict=True))
    text = f'g ({inputs}) => (float{result} y) {{ y = Einsum<equation="{equation}">({", ".join(names)}) }}'
    row = cost(text)
    assert row.not_counted == {}
    assert nonzero(row) == {"attention": counted_by_torch(lambda: torch.einsum(equation, *arrays))}


@pytest.mark.parametrize(("equation", "shapes"), [("ij->ji", [(5, 7)]), ("ii->i", [(5, 5)]), ("i,j->ij", [(5,), (7,)])])
def test_an_einsum_that_sums_nothing_of_two_is_no_product(equation: str, shapes: list[tuple[int, ...]]) -> None:
    inputs = ", ".join(f"float{list(shape)} x{index}" for index, shape in enumerate(shapes))
    names = ", ".join(f"x{index}" for index in range(len(shapes)))
    shape = list(np.einsum(equation, *map(np.ones, shapes)).shape)
    row = cost(f'g ({inputs}) => (float{shape} y) {{ y = Einsum<equation="{equation}">({names}) }}')
    assert (row.flops, row.not_counted) == (0, {})


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_count_what_torch_counts(transposed: bool, groups: int) -> None:
    make = torch.nn.ConvTranspose1d if transposed else torch.nn.Conv1d
    layer = make(4, 6, kernel_size=3, stride=2, groups=groups, bias=False)
    x = torch.ones(2, 4, 9)
    name, shape = type(layer).__name__.removesuffix("1d"), list(layer(x).shape)
    body = f"y = {name}<strides=[2], group={groups}>(x, w)"
    row = cost(f"g (float[2,4,9] x) => (float{shape} y) {{ {body} }}", w=tuple(layer.weight.shape))
    assert row.flops == counted_by_torch(lambda: layer(x))


@pytest.mark.parametrize(("kind", "gates"), [("RNN", 1), ("GRU", 3), ("LSTM", 4)])
def test_recurrent_layers_count_both_products_of_every_step(kind: str, gates: int) -> None:
    S, B, E, H = 5, 2, 7, 3
    text = f"""g (float[{S},{B},{E}] x) => (float[{S},2,{B},{H}] y)
    {{ y = {kind}<hidden_size={H}, direction="bidirectional">(x, w, r) }}"""
    model = parsed(text, w=(2, gates * H, E), r=(2, gates * H, H))
    for name in "wr":
        model.graph.initializers[name].name = f"layers.0.mlp.{name}"
    layer = getattr(torch.nn, kind)(E, H, bidirectional=True, bias=False)
    in_both_directions = sum(weight.numel() for weight in layer.parameters())
    assert nonzero(cost_row(model, "mod", Bucket(1, 4))) == {"mlp": 2 * S * B * in_both_directions}


@pytest.mark.parametrize(
    ("body", "flops"),
    [
        ("y = ConvInteger(x, w)", 2 * (2 * 6 * 7) * (4 * 3)),
        ("y = QLinearConv(x, s, z, w, s, z, s, z)", 2 * (2 * 6 * 7) * (4 * 3)),
    ],
)
def test_products_of_whole_numbers_count_as_others_do(body: str, flops: int) -> None:
    result = "int32" if "ConvInteger" in body else "uint8"
    model = parsed(f"g (uint8[2,4,9] x, uint8[6,4,3] w, float s, uint8 z) => ({result}[2,6,7] y) {{ {body} }}")
    assert cost_row(model, "mod", Bucket(1, 4)).flops == flops


def test_a_product_of_weights_alone_is_no_work() -> None:
    """An adapter that is merged, x (W + B A): a runtime computes B A once, while it loads the graph."""
    text = """g (float[2,3] x) => (float[2,4] y)
    <float[3,4] w = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, float[3,1] b = {0, 0, 0}, float[1,4] a = {0, 0, 0, 0}>
    { c = MatMul(b, a) s = Add(w, c) y = MatMul(x, s) }"""
    row = cost_row(parsed(text), "mod", BUCKET)
    assert (row.flops, row.needed_flops, row.not_counted) == (2 * 2 * 3 * 4, 2 * 2 * 3 * 4, {})
    assert row.activation_bytes == 4 * 2 * 4
    assert work(text) == [(row.flops, 4 * (2 * 3 + 3 * 4 + 2 * 4))]


def test_a_weight_is_found_behind_anything_that_is_folded() -> None:
    text = "g (float[2,8] x) => (float[2,3] y) { c = Clip(stored, , high) w = Transpose(c) y = MatMul(x, w) }"
    model = parsed(text, stored=(3, 8), high=())
    model.graph.initializers["stored"].name = "layers.0.mlp.up_proj.weight"
    assert nonzero(cost_row(model, "mod", Bucket(1, 4))) == {"mlp": 2 * 2 * 8 * 3}


def test_what_has_no_known_shape_or_dtype_is_not_counted() -> None:
    text = "g (float[5,7] x) => (float[5,7] y) { h = Relu(x) y = Relu(h) }"
    shapeless, untyped = parsed(text), parsed(text)
    next(iter(shapeless.graph)).outputs[0].shape = None
    next(iter(untyped.graph)).outputs[0].type = None
    symbolic = parsed("g (float[n,7] x) => (float[n,3] y) { y = MatMul(x, w) }", w=(7, 3))
    for model, missing in ((symbolic, {"MatMul": 1}), (shapeless, {"Relu": 1}), (untyped, {"Relu": 1})):
        assert cost_row(model, "mod", Bucket(1, 4)).not_counted == missing
    assert flops_of(work_of_graph(symbolic, "test", whole_scores=False)) is None


@pytest.mark.parametrize("found", [r"\[2,4,n,8\]", "none"])
def test_attention_of_unknown_size_is_refused_by_name(found: str) -> None:
    model = parsed("g (float[2,4,5,8] q, float[2,4,n,8] k) => (float[2,4,5,8] y) { y = Attention(q, k, k) }")
    (node,) = model.graph
    if found == "none":
        model.graph.inputs[1].shape = None
    with pytest.raises(GraphError, match=rf"^mod b1s4: the shape and dtype of value k must be known .* got {found};"):
        attention_sizes(node, "mod b1s4")


def work(text: str, *, whole_scores: bool = False) -> list[tuple[int, int]]:
    return [(item.flops, item.bytes) for item in work_of_graph(parsed(text), "test", whole_scores=whole_scores)]


@pytest.mark.parametrize("whole_scores", [False, True])
@pytest.mark.parametrize("spec", [ROUTED, ROUTED.dense()], ids=["mod", "dense"])
def test_all_work_is_counted_once(spec: ModelSpec, whole_scores: bool) -> None:
    model = portable_graph(spec, 2, 32)
    found = work_of_graph(model, "test", whole_scores=whole_scores)
    cost = cost_row(model, "mod", BUCKET)
    by_part = Counter[str]()
    for item in found:
        by_part[item.part] += item.flops * len(item.nodes)
    hidden = 0 if whole_scores else cost.flops - cost.needed_flops
    expected = {**cost.flops_by_part, "attention": cost.flops_by_part["attention"] - hidden}
    assert {part: by_part[part] for part in expected} == expected
    assert by_part.total() == flops_of(found) == cost.flops - hidden
    part_of_node = {name: item.part for item in found for name in item.nodes}
    assert part_of_node == {node.name: part for node, part in parts_of_nodes(model.graph).items()}


def test_equal_work_stands_together() -> None:
    model = parsed("g (float[2,3] x) => (float[2,3] y) { h = Exp(x) y = Exp(h) }")
    for name, node in zip(("first", "second"), model.graph, strict=True):
        node.name = name
    assert work_of_graph(model, "test", whole_scores=False) == (
        Work(part="elementwise", flops=0, bytes=2 * 24, nodes=("first", "second")),
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("g (float[2,3] x, float[3] b) => (float[2,3] y) { y = Add(x, b) }", 24 + 12 + 24),
        ("g (float[2,3] x) => (float[2,3] y) { y = Mul(x, x) }", 24 + 24),
        ("g (float[2,3] x) => (float16[2,3] y) { y = Cast<to=10>(x) }", 24 + 12),
        ("g (float[2,3] x) => (float[3,2] y) <int64[2] a = {3, 2}> { y = Reshape(x, a) }", 0),
        ("g (float[100,3] x, int64[2] i) => (float[2,3] y) { y = Gather(x, i) }", 2 * 24 + 16),
        ("g (float[100,3] x) => (float[2,3] y) <int64[1] b = {0}, int64[1] e = {2}> { y = Slice(x, b, e) }",
         2 * 24 + 8 + 8),
        ("g (float[1,3] x) => (float[2,3] y) <int64[2] a = {2, 3}> { y = Expand(x, a) }", 24),
        ("g (float[9,3] x, int64[2,1] i, float[2,3] u) => (float[9,3] y) { y = ScatterND(x, i, u) }",
         108 + 16 + 24 + 108),
        ("g (float[2,4] x) => (float[2,2] y, float[2,2] z) { y, z = Split<axis=1, num_outputs=2>(x) }", 32 + 32),
        ("g (float[2,4] x) => (int64[2,2] i) <int64[1] k = {2}> { v, i = TopK(x, k) }", 32 + 8 + 16 + 32),
        ("g (float[2,4] x) => (int64[2,2] i) <int64[1] k = {2}> { , i = TopK(x, k) }", 32 + 8 + 32),
    ],
)  # fmt: skip
def test_bytes(text: str, size: int) -> None:
    assert work(text) == [(0, size)]


def test_a_product_reads_both_sides_and_writes_the_result() -> None:
    text = "g (float[2,5,7] x, float[7,3] w) => (float[2,5,3] y) { y = MatMul(x, w) }"
    assert work(text) == [(2 * 2 * 5 * 7 * 3, 4 * (2 * 5 * 7 + 7 * 3 + 2 * 5 * 3))]


ATTENTION = """g (float[2,6,5,8] q, float[2,3,7,8] k, float[2,3,7,4] v) => (float[2,6,5,4] y)
{ y = Attention(q, k, v) }"""
SCORES = 2 * 6 * 5 * 7
FLOPS = 2 * SCORES * (8 + 4)
QUERY, KEY, VALUE, RESULT = 4 * 2 * 6 * 5 * 8, 4 * 2 * 3 * 7 * 8, 4 * 2 * 3 * 7 * 4, 4 * 2 * 6 * 5 * 4


def test_attention_that_holds_its_scores_passes_them_through_memory() -> None:
    assert work(ATTENTION) == [(FLOPS, QUERY + KEY + VALUE + RESULT)]
    scores = 4 * SCORES
    assert work(ATTENTION, whole_scores=True) == [
        (FLOPS // 2, QUERY + KEY + scores),
        (0, 2 * scores),
        (FLOPS // 2, scores + VALUE + RESULT),
    ]

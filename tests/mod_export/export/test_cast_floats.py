"""A 16-bit graph routes by float32 scores, returns float32, and is as close as its dtype allows."""

import itertools
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from observing import observed
from small_graphs import TENSORRT, make_model, make_spec, parsed, portable_graph, run
from variants import VARIANTS

from mod_export.errors import LimitError
from mod_export.export.passes.cast_floats import CastFloats, narrowed_initializers
from mod_export.export.passes.select_topk import SelectTopk
from mod_export.export.passes.threshold_selection import ThresholdSelection
from mod_export.types import DTYPES
from mod_models.spec import ModelSpec

FLOAT, FLOAT16, BFLOAT16 = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16
BOOL = ir.DataType.BOOL
NARROW = {"float16": FLOAT16, "bfloat16": BFLOAT16}
SPECS = {
    "linear, identity": {},
    "bias, normed, tanh": {"router": "linear_bias", "router_input": "normed", "gate": "tanh_affine", "gate_scale": 0.7},
    "mlp, softmax": {"router": "mlp", "router_hidden": 8, "gate": "softmax_selected"},
    "sigmoid, replace": {"gate": "scaled_sigmoid", "gate_scale": 1.3, "combine": "replace"},
    "ones, compact": {"gate": "ones", "positions": "compact"},
}


def cast(spec: ModelSpec, dtype: str) -> ir.Model:
    model = portable_graph(spec, 2, 16)
    SelectTopk().run(model, TENSORRT, dtype)
    assert CastFloats().run(model, TENSORRT, dtype) > 0
    assert CastFloats().ensures(model, TENSORRT, dtype) == []
    return model


def upstream(node: ir.Node) -> set[ir.Node]:
    """Everything that a node draws on, up to the first Cast."""
    found = {node}
    frontier = [node]
    while frontier:
        for producer in frontier.pop().predecessors():
            if producer not in found and producer.op_type != "Cast":
                found.add(producer)
                frontier.append(producer)
    return found


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("routing", SPECS.values(), ids=SPECS.keys())
def test_scores_stay_float32_and_the_blocks_do_not(routing: dict, dtype: str) -> None:
    model = cast(make_spec(**routing), dtype)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    for node in model.graph:
        if node.op_type == "TopK" and node.inputs[0].dtype != ir.DataType.INT64:
            scoring = upstream(node)
            assert {"MatMul", "TopK"} <= {item.op_type for item in scoring}
            assert {v.dtype for item in scoring for v in item.outputs} <= {FLOAT, ir.DataType.INT64, ir.DataType.BOOL}
        if node.op_type in ("Attention", "ScatterND", "Split"):
            assert node.outputs[0].dtype == NARROW[dtype]
    # Every float32 product belongs to a router.
    wide = [node for node in model.graph if node.op_type == "MatMul" and node.outputs[0].dtype == FLOAT]
    assert len(wide) == (2 if routing.get("router") == "mlp" else 1)


DECIDED = [name for name, spec in VARIANTS.items() if not spec.looks_ahead and spec.k_by_layer(16)]
"""Kinds in which tokens choose: a comparison decides, or the router of experts, which a softmax reads too."""
FAST = ("routed apart by predictors", "staged MoDE, threshold", "experts, expert choice")


@pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in DECIDED if name not in FAST)]
)
def test_where_tokens_choose_scores_are_compared_in_float32(name: str) -> None:
    spec = VARIANTS[name]
    model = cast(spec, "float16")
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    comparisons = [node for node in model.graph if node.op_type == "Greater" and node.outputs[0].dtype == BOOL]
    assert all(value.dtype == FLOAT for node in comparisons for value in node.inputs)
    depth = [site for site, k in spec.k_by_layer(16).items() if k and ".expert" not in str(site)]
    assert len(comparisons) == (len(depth) if spec.routing else 0)
    selection = spec.routing.selection if spec.routing else None
    deciding = "predictor." if selection == "predictor" else "router."
    routers = [v for n, v in model.graph.initializers.items() if deciding in n or ".experts.router." in n]
    assert routers
    assert {value.dtype for value in routers} == {FLOAT}


def test_a_narrow_comparison_that_decides_is_seen() -> None:
    model = cast(VARIANTS["threshold"], "float16")
    compared = next(node for node in model.graph if node.op_type == "Greater")
    for value in compared.inputs:
        value.dtype = FLOAT16
    problems = CastFloats().ensures(model, TENSORRT, "float16")
    assert any("compares scores in FLOAT16" in problem for problem in problems)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_inputs_and_outputs_keep_their_dtypes_and_names(dtype: str) -> None:
    model = cast(make_spec(), dtype)
    assert [(v.name, v.dtype) for v in model.graph.inputs] == [
        ("input_ids", ir.DataType.INT64),
        ("lengths", ir.DataType.INT64),
    ]
    assert [(v.name, v.dtype) for v in model.graph.outputs] == [("logits", FLOAT), ("routed_1", ir.DataType.INT64)]


@pytest.mark.parametrize("routing", SPECS.values(), ids=SPECS.keys())
def test_float16_gives_nearly_the_same_logits(routing: dict) -> None:
    spec = make_spec(**routing)
    module = make_model(spec)
    ids, lengths = torch.randint(0, 40, (2, 16)), torch.tensor([16, 3])
    logits, routed = run(cast(spec, "float16"), {"input_ids": ids.numpy(), "lengths": lengths.numpy()})
    with torch.no_grad():
        reference, selections = observed(module, ids, lengths)
    np.testing.assert_array_equal(routed, selections[1].index_BK.numpy())
    assert logits.dtype == np.float32
    scale = reference.abs().max().item()
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(logits[row, :length], reference[row, :length].numpy(), atol=0.01 * scale)


def test_weights_are_narrowed_but_for_the_routers() -> None:
    spec = make_spec(router="mlp", router_hidden=8)
    model = cast(spec, "bfloat16")
    narrowed = set(narrowed_initializers(model))
    names = set(make_model(spec).state_dict()) | {"rope_cos", "rope_sin"}
    assert names - narrowed == {name for name in names if ".router." in name}
    for name in names:
        value = model.graph.initializers[name]
        assert value.dtype == value.const_value.dtype == (FLOAT if ".router." in name else BFLOAT16)


def test_a_weight_without_data_only_changes_its_dtype() -> None:
    """Weights are bound to a file after the passes."""
    model = portable_graph(make_spec(), 2, 16)
    for name, value in model.graph.initializers.items():
        if name.endswith("weight"):
            value.const_value = None
    CastFloats().run(model, TENSORRT, "float16")
    embedding = model.graph.initializers["embedding.weight"]
    assert (embedding.dtype, embedding.const_value) == (FLOAT16, None)


def test_a_weight_in_a_file_is_not_held_in_memory_but_checked(tmp_path: Path) -> None:
    (tmp_path / "w.data").write_bytes(np.array([0.5, 70_000.0], np.float32).tobytes())

    def graph(offset: int) -> ir.Model:
        model = parsed("g (float[1] x) => (float[1] y) <float[1] w = {0.0}> { y = Add (x, w) }")
        model.graph.initializers["w"].const_value = ir.ExternalTensor(
            "w.data", offset, 4, FLOAT, shape=ir.Shape([1]), name="w", base_dir=tmp_path
        )
        return model

    model = graph(0)
    CastFloats().run(model, TENSORRT, "float16")
    assert isinstance(model.graph.initializers["w"].const_value, ir.LazyTensor)
    assert run(model, {"x": np.ones(1, np.float32)})[0] == 1.5
    with pytest.raises(LimitError, match=r"^w: contains 70000, beyond"):
        CastFloats().run(graph(4), TENSORRT, "float16")


def test_order_with_threshold_selection_does_not_matter() -> None:
    limit = TENSORRT.__class__(name="small", max_opset=23, topk_limit=3)
    ids, lengths = torch.randint(0, 40, (2, 16)), torch.tensor([16, 3])
    results = []
    for passes in itertools.permutations([ThresholdSelection(), CastFloats()]):
        model = portable_graph(make_spec(), 2, 16)
        SelectTopk().run(model, limit, "float16")
        for one in passes:
            assert one.run(model, limit, "float16") > 0
            assert one.ensures(model, limit, "float16") == []
        results.append(run(model, {"input_ids": ids.numpy(), "lengths": lengths.numpy()}))
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


def test_numbers_made_from_integers_stay_float32() -> None:
    """Rotary angles of far positions: 2,049 has no exact float16, and neither has 2,049 / 10,000 ** 0.5 by far."""
    model = parsed(
        """g (int64[1,3] position, float16[1,3,2] unused, float[1,3,2] x) => (float[1,3,2] y)
        <float[2] inverse = {1.0, 0.01}, int64[1] last = {-1}> {
            real = Cast <to = 1> (position)
            wide = Unsqueeze (real, last)
            angle = Mul (wide, inverse)
            turn = Cos (angle)
            h = Neg (x)
            y = Mul (h, turn)
        }"""
    )
    CastFloats().run(model, TENSORRT, "float16")
    assert CastFloats().ensures(model, TENSORRT, "float16") == []
    types = {node.op_type: node.outputs[0].dtype for node in model.graph}
    assert types["Cos"] == FLOAT
    assert types["Neg"] == FLOAT16
    position = np.array([[2049, 2051, 16_001]])
    x = np.ones((1, 3, 2), np.float32)
    y = run(model, {"position": position, "unused": x.astype(np.float16), "x": x})[0]
    expected = -np.cos(position[..., None] * np.array([1.0, 0.01]))
    np.testing.assert_allclose(y, expected, atol=2e-3)


def test_a_number_that_both_sides_use_stays_exact_on_the_float32_side() -> None:
    model = parsed(
        """g (float[1,4] x) => (float[1,2] y, int64[1,2] positions) <float tenth = {0.1}, int64[1] k = {2}> {
            scores = Mul (x, tenth)
            values, positions = TopK (scores, k)
            a = Neg (x)
            h = Add (a, tenth)
            y = GatherElements <axis = 1> (h, positions)
        }"""
    )
    CastFloats().run(model, TENSORRT, "float16")
    assert model.graph.initializers["tenth"].const_value.numpy() == np.float32(0.1)
    assert model.graph.initializers["tenth/float16"].const_value.numpy() == np.float16(0.1)
    assert CastFloats().ensures(model, TENSORRT, "float16") == []


def test_a_weight_that_both_sides_use_is_stored_once() -> None:
    """The block's norm, whose weight a router on normed input uses too."""
    model = parsed(
        """g (float[1,4,2] x) => (float[1,4,2] y, int64[1,2] positions)
        <float[2] w = {0.1, 0.2}, int64[1] last = {-1}, int64[1] k = {2}, float[2,1] r = {1.0, 2.0}> {
            n = RMSNormalization (x, w)
            wide = MatMul (n, r)
            scores = Squeeze (wide, last)
            values, positions = TopK (scores, k)
            h = Neg (x)
            y = RMSNormalization (h, w)
        }"""
    )
    CastFloats().run(model, TENSORRT, "float16")
    assert narrowed_initializers(model) == ("w",)
    assert CastFloats().ensures(model, TENSORRT, "float16") == []
    run(model, {"x": np.ones((1, 4, 2), np.float32)})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_masks_keep_their_meaning(dtype: str) -> None:
    """-inf stays -inf; the usual finite floors stay finite, or a row without any real token would become NaN."""
    model = parsed(
        """g (bool[1,2] real, float[1,2] x) => (float[1,2] a, float[1,2] b)
        <float low = {-inf}, float floor = {-3.4028234663852886e38}> {
            h = Neg (x)
            a = Where (real, h, low)
            b = Where (real, h, floor)
        }"""
    )
    CastFloats().run(model, TENSORRT, dtype)
    low, floor = (model.graph.initializers[name].const_value.numpy() for name in ("low", "floor"))
    assert low == -np.inf
    assert floor == ml_dtypes.finfo(floor.dtype).min


def test_constants_inside_the_graph_are_cast_too() -> None:
    model = parsed(
        """g (float[2] x, bool[2] flag) => (float[2] y, float[2] z) <int64[1] size = {2}> {
            one = Constant <value = float {1.5}> ()
            two = Constant <value_float = 2.5> ()
            ones = ConstantOfShape <value = float[1] {0.5}> (size)
            zeros = ConstantOfShape (size)
            a = Add (x, one)
            b = Mul (a, two)
            c = Add (b, ones)
            d = Cast <to = 1> (flag)
            e = Add (c, zeros)
            y = Add (e, d)
            z = Neg (x)
        }"""
    )
    CastFloats().run(model, TENSORRT, "float16")
    assert CastFloats().ensures(model, TENSORRT, "float16") == []
    y, z = run(model, {"x": np.array([1, 2], np.float32), "flag": np.array([True, False])})
    np.testing.assert_array_equal(y, np.array([7.75, 9.25], np.float32))
    np.testing.assert_array_equal(z, np.array([-1, -2], np.float32))


def test_a_score_that_is_an_output_stays_float32() -> None:
    model = parsed(
        """g (float[1,4,2] x, float[1,4,2] z) => (float[1,4] scores, int64[1,2] positions, float[1,4,2] y)
        <int64[1] k = {2}, int64[1] last = {-1}, float[2,1] r = {1.0, 2.0}> {
            h = Neg (x)
            wide = MatMul (h, r)
            scores = Squeeze (wide, last)
            values, positions = TopK (scores, k)
            y = Add (h, z)
        }"""
    )
    CastFloats().run(model, TENSORRT, "float16")
    assert [node.op_type for node in model.graph if node.outputs[0].name == "scores"] == ["Squeeze"]
    assert CastFloats().ensures(model, TENSORRT, "float16") == []


def test_applies_to_16_bit() -> None:
    assert [dtype for dtype in DTYPES if CastFloats().applies(TENSORRT, dtype)] == ["float16", "bfloat16"]


def test_says_what_is_left() -> None:
    model = parsed(
        """g (float16[1,4] scores, float[1,4] x, float[1] keys_0) => (float16[1,2] values, int64[1,2] positions)
        <int64[1] k = {2}> {
            values, positions = TopK (scores, k)
        }"""
    )
    mixed = ir.node("Add", list(model.graph.inputs)[:2], name="sum")
    mixed.outputs[0].dtype = FLOAT16
    model.graph.append(mixed)
    assert CastFloats().ensures(model, TENSORRT, "float16") == [
        "input keys_0 is FLOAT",
        "output values is FLOAT16",
        "TopK compares scores in FLOAT16",
        "sum mixes float32 and FLOAT16",
    ]

"""A 16-bit graph routes by float32 scores, returns float32, and is as exact as its dtype allows, in branches too."""

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from observing import observed
from onnx.reference import ReferenceEvaluator
from rotary_angles import FORMS, turned
from small_graphs import TENSORRT, feeds, make_model, make_spec, narrowed, parsed, portable_graph, run, session
from variants import VARIANTS

from mod_export.errors import GraphError, LimitError
from mod_export.graph.capture import captured
from mod_export.graph.onnx_export import onnx_from_captured
from mod_export.graph.rewrites.cast_floats import CastFloats
from mod_export.graph.rewrites.topk import SelectTopk
from mod_export.graph.weights import state_of
from mod_models.declarations import MLP_ROUTERS
from mod_models.spec import ModelSpec

FLOAT, FLOAT16, BFLOAT16 = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16
BOOL = ir.DataType.BOOL
NARROW = {"float16": FLOAT16, "bfloat16": BFLOAT16}
SPECS = {
    "linear, identity": {},
    "bias, normed, tanh": {"router": "linear_bias", "router_input": "normed", "gate": "tanh_affine", "gate_scale": 0.7},
    "mlp, softmax": {"router": "mlp", "router_hidden": 8, "gate": "softmax_selected"},
    "normed mlp, affine": {
        "router": "norm_mlp",
        "router_hidden": 8,
        "gate": "sigmoid_affine",
        "gate_shift": 0.3,
        "always_first": 2,
    },
    "sigmoid, replace": {"gate": "scaled_sigmoid", "gate_scale": 1.3, "combine": "replace"},
    "ones, compact": {"gate": "ones", "positions": "compact"},
}


def cast(spec: ModelSpec, dtype: str) -> ir.Model:
    model = portable_graph(spec)
    SelectTopk().run(model, TENSORRT, dtype)
    assert CastFloats().run(model, TENSORRT, dtype) > 0
    assert CastFloats().ensures(model, TENSORRT, dtype) == []
    return model


def upstream(node: ir.Node) -> set[ir.Node]:
    """The node and all nodes that it depends on, up to the first Cast."""
    nodes = {node}
    frontier = [node]
    while frontier:
        for producer in frontier.pop().predecessors():
            if producer not in nodes and producer.op_type != "Cast":
                nodes.add(producer)
                frontier.append(producer)
    return nodes


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("linear, identity", "float16"),
        ("mlp, softmax", "bfloat16"),
        *(pytest.param(name, "float16", marks=pytest.mark.slow) for name in list(SPECS)[1:]),
    ],
)
def test_scores_stay_float32_and_the_blocks_do_not(name: str, dtype: str) -> None:
    spec = make_spec(**SPECS[name])
    model = cast(spec, dtype)
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
    assert len(wide) == (2 if spec.routing.router in MLP_ROUTERS else 1)
    names = set(make_model(spec).state_dict()) | {"rope_cos", "rope_sin"}
    for weight, value in model.graph.initializers.items():
        if weight in names:
            assert value.dtype == value.const_value.dtype == (FLOAT if ".router." in weight else NARROW[dtype])
    assert {value.dtype for value in model.graph.inputs} == {ir.DataType.INT64}
    assert [(v.name, v.dtype) for v in model.graph.outputs] == [("logits", FLOAT), ("routed_1", ir.DataType.INT64)]
    if dtype == "bfloat16":  # ONNX Runtime has no CPU kernels for it.
        return
    inputs = {name: torch.from_numpy(array) for name, array in feeds().items()}
    logits, routed = run(model, feeds())
    with torch.no_grad():
        reference, selections = observed(make_model(spec), *inputs.values())
    np.testing.assert_array_equal(routed, selections[1].index_BK.numpy())
    for row, length in enumerate(inputs["lengths"]):
        scale = reference.abs().max().item()
        np.testing.assert_allclose(logits[row, :length], reference[row, :length].numpy(), atol=0.01 * scale)


DECIDED = ("predictor", "routed apart by predictors", "experts, two of a token", "integrated MoDE")


@pytest.mark.parametrize(
    "name", ["staged MoDE, threshold", *(pytest.param(name, marks=pytest.mark.slow) for name in DECIDED)]
)
def test_where_tokens_choose_scores_are_compared_in_float32(name: str) -> None:
    """Scores feed a comparison, or they come from a router of experts, where a softmax reads them too."""
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


def test_a_weight_without_data_only_changes_its_dtype() -> None:
    """Weights are bound to a file after the rewrites."""
    model = portable_graph(make_spec())
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


# Rotary angles of far positions: float16 represents neither 2,049 nor 2,049 / 10,000 ** 0.5 exactly.
ANGLES = """g (int64[1,3] position, float16[1,3,2] unused, float[1,3,2] x) => (float[1,3,2] y)
<float[2] inverse = {1.0, 0.01}, int64[1] last = {-1}> {
    real = Cast <to = 1> (position)
    wide = Unsqueeze (real, last)
    angle = Mul (wide, inverse)
    turn = Cos (angle)
    h = Neg (x)
    y = Mul (h, turn)
}"""
# A norm weight that the block and a router on normed input share; it is stored once.
NORM = """g (float[1,4,2] x) => (float[1,4,2] y, int64[1,2] positions)
<float[2] w = {0.1, 0.2}, int64[1] last = {-1}, int64[1] k = {2}, float[2,1] r = {1.0, 2.0}> {
    n = RMSNormalization (x, w)
    wide = MatMul (n, r)
    scores = Squeeze (wide, last)
    values, positions = TopK (scores, k)
    h = Neg (x)
    y = RMSNormalization (h, w)
}"""
OUTPUT = """g (float[1,4,2] x, float[1,4,2] z) => (float[1,4] scores, int64[1,2] positions, float[1,4,2] y)
<int64[1] k = {2}, int64[1] last = {-1}, float[2,1] r = {1.0, 2.0}> {
    h = Neg (x)
    wide = MatMul (h, r)
    scores = Squeeze (wide, last)
    values, positions = TopK (scores, k)
    y = Add (h, z)
}"""
# A score that is compared and that also weighs a product, like the gate of the model's own routers.
GATE = """g (float[1,4] x) => (float[1,4] y, bool[1] ran) <float[4,1] r = {1.0, 2.0, 3.0, 4.0}, float zero = {0.0},
int64[1] last = {-1}> {
    h = Neg (x)
    score = MatMul (h, r)
    flat = Squeeze (score, last)
    ran = Greater (flat, zero)
    gated = Mul (h, score)
    y = Add (x, gated)
}"""


@pytest.mark.parametrize(
    ("text", "wide", "narrow"),
    [
        (ANGLES, {"real", "wide", "angle", "turn", "inverse", "y"}, {"h", "y/inner"}),
        (NORM, {"wide", "scores", "r"}, {"w", "h"}),
        (OUTPUT, {"wide", "scores", "r"}, {"h", "y/inner"}),
        (GATE, {"score", "flat", "r", "zero"}, {"gated"}),
    ],
    ids=["from integers", "a weight of both sides", "a score that is an output", "a score that weighs"],
)
def test_what_stays_float32(text: str, wide: set[str], narrow: set[str]) -> None:
    model = narrowed(text)
    session(model)
    graph = model.graph
    values = [*graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    dtypes = {value.name: value.dtype for value in values}
    assert {name: dtypes[name] for name in wide} == dict.fromkeys(wide, FLOAT)
    assert {name: dtypes[name] for name in narrow} == dict.fromkeys(narrow, FLOAT16)
    assert "scores/inner" not in dtypes


def test_numbers_made_from_integers_stay_exact() -> None:
    position = np.array([[2049, 2051, 16_001]])
    x = np.ones((1, 3, 2), np.float32)
    y = run(narrowed(ANGLES), {"position": position, "unused": x.astype(np.float16), "x": x})[0]
    np.testing.assert_allclose(y, -np.cos(position[..., None] * np.array([1.0, 0.01])), atol=2e-3)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("given", [False, True], ids=["counted", "given"])
def test_angles_of_positions_are_exact(form: str, *, given: bool) -> None:
    """Positions may be constants, and frequencies may be moved; the weights of a block stay in 16 bits."""
    module, inputs = turned(form, given=given)
    state, names = state_of(module), ["x", "position"][: len(inputs)]
    model = onnx_from_captured(captured(module, inputs, "turned"), state, names, ["turned", "mixed"])
    for name, value in model.graph.initializers.items():
        if value.const_value is None:
            value.const_value = ir.tensor(state[name].detach().numpy(), name=name)
    CastFloats().run(model, TENSORRT, "bfloat16")
    assert CastFloats().ensures(model, TENSORRT, "bfloat16") == []
    (block,) = [node for node in model.graph if node.op_type == "MatMul" and node.inputs[0].shape[-1] == 16]
    assert {value.dtype for value in (*block.inputs, *block.outputs)} == {BFLOAT16}
    assert model.graph.initializers["block.weight"].dtype == BFLOAT16
    y = in_reference(model, dict(zip(names, (each.numpy() for each in inputs), strict=True)))[0]
    np.testing.assert_allclose(y, module(*inputs)[0].detach(), atol=4e-3)


def in_reference(model: ir.Model, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs of kernels that round every result; ONNX Runtime's for the CPU compute most of them in float32."""
    return ReferenceEvaluator(ir.to_proto(model)).run(None, inputs)  # type: ignore[return-value]  # No graph returns lists.


INDICES = {
    "division": "d = Div (number, three) f = Floor (d)",
    "rounding": "d = Mul (number, third) f = Round (d)",
    "upper bounds": "d = Sqrt (number) e = Mul (d, three) f = Ceil (e)",
    "remainders": "f = Mod <fmod = 1> (number, many)",
    "running sums": "o = Div (number, more) s = Sign (o) f = CumSum (s, last)",
    "running counts": "b = Cast <to = 1> (real) f = CumSum (b, last)",
    "counts": "b = Cast <to = 1> (real) w = Unsqueeze (b, axis) f = ReduceSum <keepdims = 0> (w, last_axis)",
    "extremes": "f = ReduceMax (number, last_axis)",
    "repeated": "f = Tile (number, twice)",
    "the largest": "i = ArgMax <axis = 1> (number) f = Cast <to = 1> (i)",
    "comparisons": "b = Less (number, bound) f = Cast <to = 1> (b)",
    "constants": "o = ConstantOfShape <value = float[1] {1.0}> (size) c = CumSum (o, last) f = Mul (c, three)",
}
"""Texts that compute whole numbers `f` in floats, from integers or booleans."""


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", INDICES)
def test_integers_computed_in_floats_stay_exact(name: str, dtype: str) -> None:
    text = f"""g (int64[1,3000] position, bool[1,3000] real) => (int64[N,M] y)
    <float three = {{3.0}}, float third = {{0.3333333}}, float many = {{2900.0}}, float more = {{5000.0}},
    float bound = {{2501.5}}, int64 last = {{1}}, int64[1] last_axis = {{-1}}, int64[1] axis = {{0}},
    int64[2] twice = {{1, 2}}, int64[2] size = {{1, 3000}}> {{
        number = Cast <to = 1> (position) {INDICES[name]} y = Cast <to = 7> (f)
    }}"""
    model = parsed(text)
    inputs = {"position": np.arange(1, 3001)[None], "real": np.arange(3000)[None] > 98}
    expected = in_reference(model, inputs)[0]
    CastFloats().run(model, TENSORRT, dtype)
    assert CastFloats().ensures(model, TENSORRT, dtype) == []
    np.testing.assert_array_equal(in_reference(model, inputs)[0], expected)


def test_a_number_that_both_sides_use_stays_exact_on_the_float32_side() -> None:
    model = narrowed(
        """g (float[1,4] x) => (float[1,2] y, int64[1,2] positions) <float tenth = {0.1}, int64[1] k = {2}> {
            scores = Mul (x, tenth)
            values, positions = TopK (scores, k)
            a = Neg (x)
            h = Add (a, tenth)
            y = GatherElements <axis = 1> (h, positions)
        }"""
    )
    assert model.graph.initializers["tenth"].const_value.numpy() == np.float32(0.1)
    assert [model.graph.initializers[name].dtype for name in ("tenth", "tenth/float16")] == [FLOAT, FLOAT16]
    assert model.graph.initializers["tenth/float16"].const_value.numpy() == np.float16(0.1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_masks_keep_their_meaning(dtype: str) -> None:
    """-inf stays -inf; the usual finite floors stay finite, because a row without real tokens would become NaN."""
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_mask_from_integers_stays_finite(dtype: str) -> None:
    """Such masks are computed in float32, whose lowest number is beyond the range of 16 bits."""
    model = parsed(
        """g (int64[1,2] real, float[1,2] x) => (float[1,2] y)
        <float one = {1.0}, float floor = {-3.4028234663852886e38}> {
            live = Cast <to = 1> (real)
            hidden = Sub (one, live)
            mask = Mul (hidden, floor)
            h = Neg (x)
            score = Add (h, mask)
            y = Softmax (score)
        }"""
    )
    CastFloats().run(model, TENSORRT, dtype)
    x = np.zeros((1, 2), np.float32)
    for real, weights in (([[0, 0]], [[0.5, 0.5]]), ([[1, 0]], [[1, 0]])):
        np.testing.assert_array_equal(in_reference(model, {"real": np.array(real), "x": x})[0], weights)


def test_weights_that_are_only_moved_stay_narrow_and_arithmetic_on_them_is_exact() -> None:
    model = narrowed(
        """g (float[2,2] x) => (float[2,2] y, float[2,2] z)
        <float[2,2] w = {1,2,3,4}, float[2] n = {1,2}, float[2] one = {1,1}> {
            t = Transpose (w)
            y = MatMul (x, t)
            scale = Add (n, one)
            z = Mul (x, scale)
        }"""
    )
    values = [*model.graph.initializers.values(), *(value for node in model.graph for value in node.outputs)]
    dtypes = {value.name: value.dtype for value in values}
    assert [dtypes[name] for name in ("w", "t", "y/inner", "z/inner")] == [FLOAT16] * 4
    assert [dtypes[name] for name in ("n", "one", "scale")] == [FLOAT] * 3


def test_norms_of_one_type_where_the_dialect_computes_them_in_float32_anyway() -> None:
    """Only norms over the last dimension with constant weights, because such kernels take no others."""

    def stashes(*, one_type: bool) -> list[int]:
        model = parsed(
            """g (float[2,3,4] x, float[4] given) => (float[2,3,4] a, float[2,3,4] b, float[2,3,4] c, float[2,3,4] d)
            <float[4] w = {1,2,3,4}, float[3,4] m = {1,2,3,4,5,6,7,8,9,10,11,12}> {
                a = RMSNormalization (x, w)
                b = RMSNormalization <axis = 2, stash_type = 1> (x, w)
                c = RMSNormalization <axis = 1> (x, m)
                d = RMSNormalization (x, given)
            }"""
        )
        CastFloats().run(model, replace(TENSORRT, one_type_norms=one_type), "bfloat16")
        return [node.attributes.get_int("stash_type", 1) for node in model.graph if node.op_type == "RMSNormalization"]

    assert stashes(one_type=False) == [1, 1, 1, 1]
    assert stashes(one_type=True) == [16, 16, 1, 1]


def test_constants_inside_the_graph_are_cast_too() -> None:
    model = narrowed(
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
    y, z = run(model, {"x": np.array([1, 2], np.float32), "flag": np.array([True, False])})
    np.testing.assert_array_equal(y, np.array([7.75, 9.25], np.float32))
    np.testing.assert_array_equal(z, np.array([-1, -2], np.float32))


def test_says_what_is_left() -> None:
    model = parsed(
        """g (float16[1,4] scores, float[1,4] x, float[1] keys_0) =>
        (float16[1,2] values, int64[1,2] positions, bool[1,4] ran) <int64[1] k = {2}, int64[1] last = {-1}> {
            values, positions = TopK (scores, k)
            ran = Greater (scores, scores)
            norm = ReduceL2 (scores, last)
        }"""
    )
    mixed = ir.node("Add", list(model.graph.inputs)[:2], name="sum")
    mixed.outputs[0].dtype = FLOAT16
    model.graph.append(mixed)
    assert CastFloats().ensures(model, TENSORRT, "float16") == [
        "input keys_0 is FLOAT",
        "output values is FLOAT16",
        "TopK compares scores in FLOAT16",
        "Greater compares scores in FLOAT16",
        "ReduceL2 sums squares in FLOAT16",
        "sum mixes float32 and FLOAT16",
    ]


BRANCHES = """g (bool flag, int64[2] count, float[2] x, float[2] keys_0) =>
(float[2] y, float[2] z, float[2] keys_row_0)
<float[2] w = {0.5, 3.0}, int64[1] size = {2}> {
    h = Mul (x, w)
    y, z, keys_row_0 = If (flag) <
        then_branch = a () => (float[2] p, float[2] p2, float[2] p3)
            { p = Mul (h, w) wide = Cast <to = 1> (count) p2 = Neg (wide) p3 = Add (keys_0, h) },
        else_branch = b () => (float[2] q, float[2] q2, float[2] q3)
            { q = Abs (h) q2 = Mul (h, w) q3 = ConstantOfShape (size) }>
}"""


def test_branches_are_cast_as_what_stands_around_them() -> None:
    """A value from an integer stays float32, and so does the same output of the other branch."""
    model = parsed(BRANCHES)
    inputs = {
        "x": np.array([1, -2], np.float32),
        "count": np.array([2049, 1]),
        "keys_0": np.array([7, 8], np.float32),
    }
    expected = {flag: run(model, {**inputs, "flag": np.array(flag)}) for flag in (True, False)}
    assert CastFloats().run(model, TENSORRT, "float16") == 6
    assert CastFloats().ensures(model, TENSORRT, "float16") == []
    assert CastFloats().run(model, TENSORRT, "float16") == 0
    (condition,) = [node for node in model.graph if node.op_type == "If"]
    assert [value.dtype for value in condition.outputs] == [FLOAT16, FLOAT, FLOAT16]
    for name in ("then_branch", "else_branch"):
        outputs = condition.attributes[name].as_graph().outputs
        assert [value.dtype for value in outputs] == [FLOAT16, FLOAT, FLOAT16]
    inputs["keys_0"] = inputs["keys_0"].astype(np.float16)
    for flag, wanted in expected.items():
        arrays = run(model, {**inputs, "flag": np.array(flag)})
        assert [array.dtype for array in arrays] == [np.float32, np.float32, np.float16]
        for cast_array, array_wanted in zip(arrays, wanted, strict=True):
            np.testing.assert_array_equal(cast_array, array_wanted)


def test_what_is_cast_in_a_branch_is_not_used_outside() -> None:
    model = parsed(
        """g (bool flag, float[2] x, float[2,1] r) => (float[1] y, bool[1] wanted) <float zero = {0.0}> {
            h = Neg (x)
            y = If (flag) <
                then_branch = a () => (float[1] p) { a1 = MatMul (x, r) p = Abs (a1) },
                else_branch = b () => (float[1] q) { b1 = MatMul (h, r) q = Neg (b1) }>
            score = MatMul (h, r)
            wanted = Greater (score, zero)
        }"""
    )
    inputs = {"flag": np.array(True), "x": np.array([1, 2], np.float32), "r": np.array([[1], [2]], np.float32)}
    expected = run(model, inputs)
    CastFloats().run(model, TENSORRT, "float16")
    assert CastFloats().ensures(model, TENSORRT, "float16") == []
    casts = [node.inputs[0].name for node in model.graph.all_nodes() if node.op_type == "Cast"]
    # x is cast for h and the first branch, r for each branch, and h back to float32 for `wanted`.
    assert sorted(casts) == ["h", "r", "r", "x", "y/inner"]
    for output, wanted in zip(run(model, inputs), expected, strict=True):
        np.testing.assert_array_equal(output, wanted)


LOOP = """g (int64 n, bool go, float[2] x) => (float[2] y) {
    y = Loop (n, go, x) <body = b (int64 i, bool on, float[2] h) => (bool still, float[2] k)
    { still = Identity (on) k = Neg (h) }>
}"""
LARGE = "g (float[2] x) => (float[2] y) <float[2] w = {1.0, 70000.0}> { y = Add (x, w) }"


def test_what_cannot_be_cast_is_refused() -> None:
    untyped = parsed("g (float[2] x) => (float[2] y) { a = Neg (x) y = Abs (a) }")
    untyped.graph[0].outputs[0].type = None
    for model, error, message in (
        (parsed(LOOP), GraphError, "^Loop: Loop contains a graph, which cannot be cast .* without loops"),
        (untyped, GraphError, "^Neg: the type of a is unknown, so whether to cast it is unknown; run"),
        (parsed(LARGE), LimitError, "^w: contains 70000, beyond the largest float16 number 65504; build .* bfloat16"),
    ):
        with pytest.raises(error, match=message):
            CastFloats().run(model, TENSORRT, "float16")
    CastFloats().run(parsed(LARGE), TENSORRT, "bfloat16")


def test_tokens_that_go_on_alone_are_no_scores() -> None:
    """A value that only the router and the gather read is computed in 16 bits, because other tokens are dropped."""
    model = parsed(
        """g (float[1, 8, 4] x, float[4, 4] w, float[4, 1] r, float[4, 4] v) => (float[1, 2, 4] y)
        <int64[1] k = {2}, int64[2] rows = {1, 8}, int64[1] last = {2}, int64[3] wide = {1, 2, 4}> {
            before = MatMul(x, w)
            logit = MatMul(before, r)
            score = Reshape(logit, rows)
            value, index = TopK(score, k)
            column = Unsqueeze(index, last)
            place = Expand(column, wide)
            chosen = GatherElements <axis = 1> (before, place)
            y = MatMul(chosen, v)
        }"""
    )
    assert CastFloats().run(model, TENSORRT, "float16") > 0
    made = {node.outputs[0].name: node.outputs[0].dtype for node in model.graph if node.op_type == "MatMul"}
    assert (made["before"], made["logit"]) == (FLOAT16, FLOAT)
    assert FLOAT not in {node.outputs[0].dtype for node in model.graph if node.op_type == "GatherElements"}

"""Casting where a graph branches, and what the pass refuses."""

import numpy as np
import onnx_ir as ir
import pytest
from small_graphs import TENSORRT, parsed, run

from mod_export.errors import GraphError, LimitError
from mod_export.export.passes.cast_floats import CastFloats

FLOAT, FLOAT16 = ir.DataType.FLOAT, ir.DataType.FLOAT16
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


def test_refuses_a_weight_beyond_the_range() -> None:
    text = "g (float[2] x) => (float[2] y) <float[2] w = {1.0, 70000.0}> { y = Add (x, w) }"
    with pytest.raises(
        LimitError, match=r"^w: contains 70000, beyond the largest float16 number 65504; build .* bfloat16"
    ):
        CastFloats().run(parsed(text), TENSORRT, "float16")
    CastFloats().run(parsed(text), TENSORRT, "bfloat16")


def test_branches_are_cast_as_what_stands_around_them() -> None:
    """What comes from an integer stays float32, and with it what the other branch hands out in its place."""
    model = parsed(BRANCHES)
    feeds = {
        "x": np.array([1, -2], np.float32),
        "count": np.array([2049, 1]),
        "keys_0": np.array([7, 8], np.float32),
    }
    expected = {flag: run(model, {**feeds, "flag": np.array(flag)}) for flag in (True, False)}
    assert CastFloats().run(model, TENSORRT, "float16") == 6
    assert CastFloats().ensures(model, TENSORRT, "float16") == []
    assert CastFloats().run(model, TENSORRT, "float16") == 0
    (condition,) = [node for node in model.graph if node.op_type == "If"]
    assert [value.dtype for value in condition.outputs] == [FLOAT16, FLOAT, FLOAT16]
    for name in ("then_branch", "else_branch"):
        outputs = condition.attributes[name].as_graph().outputs
        assert [value.dtype for value in outputs] == [FLOAT16, FLOAT, FLOAT16]
    feeds["keys_0"] = feeds["keys_0"].astype(np.float16)
    for flag, wanted in expected.items():
        found = run(model, {**feeds, "flag": np.array(flag)})
        assert [array.dtype for array in found] == [np.float32, np.float32, np.float16]
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one, other)


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
    feeds = {"flag": np.array(True), "x": np.array([1, 2], np.float32), "r": np.array([[1], [2]], np.float32)}
    expected = run(model, feeds)
    CastFloats().run(model, TENSORRT, "float16")
    assert CastFloats().ensures(model, TENSORRT, "float16") == []
    casts = [node.inputs[0].name for node in model.graph.all_nodes() if node.op_type == "Cast"]
    # x for h and the first branch, r for each of the branches, and the float32 h for `wanted` again.
    assert sorted(casts) == ["h", "r", "r", "x", "y/inner"]
    for found, wanted in zip(run(model, feeds), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_score_that_also_weighs_something_is_compared_as_it_was_computed() -> None:
    """The gate of the model's own routers: used by a comparison, and by a product."""
    model = parsed(
        """g (float[1,4] x) => (float[1,4] y, bool[1] ran) <float[4,1] r = {1.0, 2.0, 3.0, 4.0}, float zero = {0.0},
        int64[1] last = {-1}> {
            h = Neg (x)
            score = MatMul (h, r)
            flat = Squeeze (score, last)
            ran = Greater (flat, zero)
            gated = Mul (h, score)
            y = Add (x, gated)
        }"""
    )
    CastFloats().run(model, TENSORRT, "float16")
    assert CastFloats().ensures(model, TENSORRT, "float16") == []
    types = {node.op_type: node.outputs[0].dtype for node in model.graph}
    assert (types["MatMul"], types["Squeeze"], types["Mul"]) == (FLOAT, FLOAT, FLOAT16)
    assert model.graph.initializers["r"].dtype == FLOAT


def test_refuses_loops() -> None:
    model = parsed(
        """g (int64 n, bool go, float[2] x) => (float[2] y) {
            y = Loop (n, go, x) <body = b (int64 i, bool on, float[2] h) => (bool still, float[2] k)
            { still = Identity (on) k = Neg (h) }>
        }"""
    )
    with pytest.raises(GraphError, match=r"^Loop: Loop contains a graph, which cannot be cast .* without loops"):
        CastFloats().run(model, TENSORRT, "float16")


def test_refuses_values_without_a_type() -> None:
    model = parsed("g (float[2] x) => (float[2] y) { a = Neg (x) y = Abs (a) }")
    model.graph[0].outputs[0].type = None
    with pytest.raises(GraphError, match=r"^Neg: the type of a is unknown, so whether to cast it is unknown; run"):
        CastFloats().run(model, TENSORRT, "float16")

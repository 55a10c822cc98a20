"""Weights are multiplied as they are stored, and no runtime has a transposed copy to make."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest
from small_graphs import make_spec, parsed, portable_graph, run

from mod_export.engines.ort import OrtCpu
from mod_export.export.passes.stored_weights import StoredWeights, transposed_weight

WEIGHT = "<float[6,4] w = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24}>"


def product(body: str, types: str = "float[1,3,4] x) => (float[1,3,6] y") -> ir.Model:
    return parsed(f"g ({types}) {WEIGHT} {{ {body} }}")


def test_no_transpose_of_a_weight_is_left() -> None:
    model = portable_graph(make_spec(), 2, 16)
    before = Counter(node.op_type for node in model.graph)
    rewrites = StoredWeights().run(model, OrtCpu.dialect, "float32")
    after = Counter(node.op_type for node in model.graph)
    assert after["FusedMatMul"] == rewrites == before["MatMul"] - after["MatMul"]
    assert model.opset_imports["com.microsoft"] == 1
    assert list(StoredWeights().ensures(model, OrtCpu.dialect, "float32")) == []
    assert {name for name in model.graph.initializers if name.endswith("weight")} == {
        name for name in portable_graph(make_spec(), 2, 16).graph.initializers if name.endswith("weight")
    }


def test_the_product_is_the_same() -> None:
    model = product("t = Transpose <perm: ints = [1,0]> (w) y = MatMul (x, t)")
    x = {"x": np.random.default_rng(0).standard_normal((1, 3, 4), np.float32)}
    (expected,) = run(product("t = Transpose <perm: ints = [1,0]> (w) y = MatMul (x, t)"), x)
    assert StoredWeights().run(model, OrtCpu.dialect, "float32") == 1
    (found,) = run(model, x)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "body",
    [
        "t = Identity (w) u = Transpose <perm: ints = [1,0]> (t) y = MatMul (x, u)",
        "t = Transpose <perm: ints = [1,0]> (w) y = Add (x, t)",
    ],
)
def test_anything_else_is_left(body: str) -> None:
    types = "float[1,3,4] x) => (float[1,3,6] y" if "MatMul" in body else "float[1,4,6] x) => (float[1,4,6] y"
    model = product(body, types)
    assert [transposed_weight(node) for node in model.graph] == [None] * len(list(model.graph))
    assert StoredWeights().run(model, OrtCpu.dialect, "float32") == 0
    assert "com.microsoft" not in model.opset_imports


BRANCHES = f"""g (bool flag, float[1,3,4] x) => (float[1,3,6] y) {WEIGHT} {{
y = If (flag) <
then_branch = a () => (float[1,3,6] p) {{ t = Transpose <perm: ints = [1,0]> (w) p = MatMul (x, t) }},
else_branch = b () => (float[1,3,6] q) {{
    n = Neg (x) u = Transpose <perm: ints = [1,0]> (w) m = MatMul (n, u) q = Abs (m) }}> }}"""


def test_products_in_branches_are_the_same() -> None:
    """Their weights are those of the whole graph, which no branch copies."""
    model = parsed(BRANCHES)
    feeds = [
        {"flag": np.array(flag), "x": np.random.default_rng(0).standard_normal((1, 3, 4), np.float32)}
        for flag in (True, False)
    ]
    expected = [run(parsed(BRANCHES), one)[0] for one in feeds]
    assert StoredWeights().run(model, OrtCpu.dialect, "float32") == 2
    assert list(StoredWeights().ensures(model, OrtCpu.dialect, "float32")) == []
    kinds = Counter(node.op_type for node in model.graph.all_nodes())
    assert kinds == {"If": 1, "FusedMatMul": 2, "Neg": 1, "Abs": 1, "Transpose": kinds["Transpose"]}
    for one, other in zip(feeds, expected, strict=True):
        (found,) = run(model, one)
        np.testing.assert_array_equal(found, other)


def test_a_copy_that_is_left_in_a_branch_is_named() -> None:
    (first, second) = StoredWeights().ensures(parsed(BRANCHES), OrtCpu.dialect, "float32")
    assert first == second == "MatMul multiplies by a copy of w"

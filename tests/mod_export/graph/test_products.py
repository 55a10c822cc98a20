"""Products read weights as they are stored, without a transpose."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from onnx_ir.passes import common
from small_graphs import make_spec, parsed, portable_graph, run

from mod_export.engines.ort import OrtCpu
from mod_export.graph.rewrites.products import StoredWeights

WEIGHT = "<float[6,4] w = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24}>"


def test_no_transpose_of_a_weight_is_left() -> None:
    model = portable_graph(make_spec())
    before = Counter(node.op_type for node in model.graph)
    rewrites = StoredWeights().run(model, OrtCpu.limits, "float32")
    after = Counter(node.op_type for node in model.graph)
    assert after["FusedMatMul"] == rewrites == before["MatMul"] - after["MatMul"]
    assert model.opset_imports["com.microsoft"] == 1
    assert list(StoredWeights().ensures(model, OrtCpu.limits, "float32")) == []
    assert {name for name in model.graph.initializers if name.endswith("weight")} == {
        name for name in portable_graph(make_spec()).graph.initializers if name.endswith("weight")
    }


@pytest.mark.parametrize(
    ("types", "body"),
    [
        ("float[1,3,4] x) => (float[1,3,6] y", "i = Identity (w) t = Transpose (i) y = MatMul (x, t)"),
        ("float[1,4,6] x) => (float[1,4,6] y", "t = Transpose (w) y = Add (x, t)"),
        ("float[3,4] x, float[6] c) => (float[3,6] y", "y = Gemm <transB = 1> (x, w, c)"),
        ("float[3,4] x) => (float[3,6] y", "y = Gemm <transB = 1, alpha = 0.5> (x, w)"),
        ("float[4,3] x) => (float[3,6] y", "y = Gemm <transA = 1, transB = 1> (x, w)"),
        ("float[3,6] x) => (float[3,4] y", "y = Gemm (x, w)"),
        ("float[3,4] x, float[6,4] v) => (float[3,6] y", "y = Gemm <transB = 1> (x, v)"),
    ],
)
def test_anything_else_is_left(types: str, body: str) -> None:
    model = parsed(f"g ({types}) {WEIGHT} {{ {body} }}")
    assert StoredWeights().run(model, OrtCpu.limits, "float32") == 0
    assert "com.microsoft" not in model.opset_imports


def test_products_of_integers_are_left() -> None:
    """FusedMatMul takes floats only."""
    model = parsed("""g (int64[3,2] x) => (int64[3,2] y) <int64[2,2] w = {1,2,3,4}> {
        t = Transpose (w) y = MatMul (x, t)
    }""")
    assert StoredWeights().run(model, OrtCpu.limits, "float32") == 0
    assert list(StoredWeights().ensures(model, OrtCpu.limits, "float32")) == []
    np.testing.assert_array_equal(run(model, {"x": np.ones((3, 2), np.int64)})[0], [[3, 7]] * 3)


def test_rows_without_a_batch_are_multiplied_by_the_same_operator() -> None:
    """The head of a prompt's last token is one: sessions share packed weights among operators of one type."""
    text = f"g (float[3,4] x) => (float[3,6] y) {WEIGHT} {{ y = Gemm <transB = 1> (x, w) }}"
    model, feeds = parsed(text), {"x": np.random.default_rng(0).standard_normal((3, 4), np.float32)}
    assert list(StoredWeights().ensures(model, OrtCpu.limits, "float32")) == ["Gemm packs a copy of w"]
    assert StoredWeights().run(model, OrtCpu.limits, "float32") == 1
    assert list(StoredWeights().ensures(model, OrtCpu.limits, "float32")) == []
    assert [node.op_type for node in model.graph] == ["FusedMatMul"]
    np.testing.assert_array_equal(run(model, feeds)[0], run(parsed(text), feeds)[0])


def test_a_product_of_a_product_reads_what_replaced_it() -> None:
    """Of two projections without a norm between them, the second is found before the first one is replaced."""
    text = """g (float[3,4] x) => (float[3,4] y) <float[4,4] w = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}> {
        a = Gemm <transB = 1> (x, w) t = Transpose (w) y = MatMul (a, t)
    }"""
    model, feeds = parsed(text), {"x": np.random.default_rng(0).standard_normal((3, 4), np.float32)}
    assert StoredWeights().run(model, OrtCpu.limits, "float32") == 2
    common.RemoveUnusedNodesPass()(model)
    np.testing.assert_allclose(run(model, feeds)[0], run(parsed(text), feeds)[0], rtol=1e-6)


BRANCHES = f"""g (bool flag, float[1,3,4] x) => (float[1,3,6] y) {WEIGHT} {{
y = If (flag) <
then_branch = a () => (float[1,3,6] p) {{ t = Transpose <perm: ints = [1,0]> (w) p = MatMul (x, t) }},
else_branch = b () => (float[1,3,6] q) {{
    n = Neg (x) u = Transpose <perm: ints = [1,0]> (w) m = MatMul (n, u) q = Abs (m) }}> }}"""


def test_products_in_branches_are_the_same() -> None:
    """Their weights belong to the outer graph, and no branch copies them."""
    model = parsed(BRANCHES)
    feeds = [
        {"flag": np.array(flag), "x": np.random.default_rng(0).standard_normal((1, 3, 4), np.float32)}
        for flag in (True, False)
    ]
    expected = [run(parsed(BRANCHES), inputs)[0] for inputs in feeds]
    left = ["MatMul packs a copy of w"] * 2
    assert list(StoredWeights().ensures(model, OrtCpu.limits, "float32")) == left
    assert StoredWeights().run(model, OrtCpu.limits, "float32") == 2
    assert list(StoredWeights().ensures(model, OrtCpu.limits, "float32")) == []
    kinds = Counter(node.op_type for node in model.graph.all_nodes())
    assert kinds == {"If": 1, "FusedMatMul": 2, "Neg": 1, "Abs": 1, "Transpose": kinds["Transpose"]}
    for inputs, reference in zip(feeds, expected, strict=True):
        (output,) = run(model, inputs)
        np.testing.assert_array_equal(output, reference)

"""Weights are multiplied as they are stored; which products become whole numbers, and what they compute then."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from small_graphs import make_model, make_spec, parsed, portable_graph, run

from mod_export.engines.ort import OrtCpu
from mod_export.engines.ort_session import CPU, session_from_onnx
from mod_export.export.passes import run_passes
from mod_export.export.passes.products import QuantizeWeights, StoredWeights, quantizable_weights
from mod_export.export.weights import WeightsFile, bind_weights, state_of, write_weights
from mod_export.types import QUANTIZED, QuantizedDType
from mod_models.spec import ModelSpec, RoutingSpec

WEIGHT = "<float[6,4] w = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24}>"


def test_no_transpose_of_a_weight_is_left() -> None:
    model = portable_graph(make_spec())
    before = Counter(node.op_type for node in model.graph)
    rewrites = StoredWeights().run(model, OrtCpu.dialect, "float32")
    after = Counter(node.op_type for node in model.graph)
    assert after["FusedMatMul"] == rewrites == before["MatMul"] - after["MatMul"]
    assert model.opset_imports["com.microsoft"] == 1
    assert list(StoredWeights().ensures(model, OrtCpu.dialect, "float32")) == []
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
    assert StoredWeights().run(model, OrtCpu.dialect, "float32") == 0
    assert "com.microsoft" not in model.opset_imports


def test_rows_without_a_batch_are_multiplied_by_the_same_operator() -> None:
    """As the head of a prompt's last token is: sessions share packed weights among operators of one type."""
    text = f"g (float[3,4] x) => (float[3,6] y) {WEIGHT} {{ y = Gemm <transB = 1> (x, w) }}"
    model, feeds = parsed(text), {"x": np.random.default_rng(0).standard_normal((3, 4), np.float32)}
    assert list(StoredWeights().ensures(model, OrtCpu.dialect, "float32")) == ["Gemm packs a copy of w"]
    assert StoredWeights().run(model, OrtCpu.dialect, "float32") == 1
    assert list(StoredWeights().ensures(model, OrtCpu.dialect, "float32")) == []
    assert [node.op_type for node in model.graph] == ["FusedMatMul"]
    np.testing.assert_array_equal(run(model, feeds)[0], run(parsed(text), feeds)[0])


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
    left = ["MatMul packs a copy of w"] * 2
    assert list(StoredWeights().ensures(model, OrtCpu.dialect, "float32")) == left
    assert StoredWeights().run(model, OrtCpu.dialect, "float32") == 2
    assert list(StoredWeights().ensures(model, OrtCpu.dialect, "float32")) == []
    kinds = Counter(node.op_type for node in model.graph.all_nodes())
    assert kinds == {"If": 1, "FusedMatMul": 2, "Neg": 1, "Abs": 1, "Transpose": kinds["Transpose"]}
    for one, other in zip(feeds, expected, strict=True):
        (found,) = run(model, one)
        np.testing.assert_array_equal(found, other)


SPEC = ModelSpec(
    vocab_size=40, d_model=64, n_layers=2, n_heads=2, n_kv_heads=1, d_head=32, d_ff=96, max_positions=64,
    routing=RoutingSpec(capacity=0.25),
)  # fmt: skip
PROJECTIONS = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj")
GATED = ("mlp.gate_proj", "mlp.up_proj")
INT8 = {f"layers.{layer}.{name}.weight" for layer in (0, 1) for name in (*PROJECTIONS, *GATED)}
INT4 = INT8 | {f"layers.{layer}.mlp.down_proj.weight" for layer in (0, 1)}


def logits(dtype: QuantizedDType | None, folder: Path) -> np.ndarray:
    """Of the dense model: with a router, another token may be taken."""
    model = portable_graph(SPEC.dense(), 1, 16)
    kind = dtype or "float32"
    quantized = quantizable_weights(model, dtype) if dtype else ()
    run_passes(model, OrtCpu.dialect, kind)
    write_weights(folder / "w.data", state_of(make_model(SPEC.dense())), kind, quantized)
    bind_weights(model, [WeightsFile.open(folder / "w.data")], folder)
    (folder / "g.onnx").write_bytes(ir.to_proto(model).SerializeToString())
    session = session_from_onnx(folder / "g.onnx", folder, [CPU], 1, {})
    ids_BS = np.arange(16)[None]
    found: np.ndarray = session.run(["logits"], {"input_ids": ids_BS, "lengths": np.array([16])})[0]
    return found


@pytest.mark.parametrize(
    ("dtype", "expected", "operators"),
    # q, k and v read one value, gate and up another, o a third: each is rounded once.
    [("int8", INT8, {"MatMulInteger": len(INT8), "DynamicQuantizeLinear": 2 * 3}), ("int4", INT4, {"MatMulNBits": 14})],
)
def test_router_head_and_gated_products_stay_float32_and_all_others_are_replaced(
    dtype: QuantizedDType, expected: set[str], operators: dict[str, int]
) -> None:
    model = portable_graph(SPEC, 1, 16)
    assert quantizable_weights(model, dtype) == expected
    assert QuantizeWeights().run(model, OrtCpu.dialect, dtype) == len(expected)
    assert operators.items() <= Counter(node.op_type for node in model.graph).items()
    assert {name for name in model.graph.initializers if name.endswith(f".{dtype}")} == {
        f"{name}.{dtype}" for name in expected
    }
    assert model.opset_imports.get("com.microsoft") == (1 if dtype == "int4" else None)


@pytest.mark.parametrize(("dtype", "most"), [("int8", 0.1), ("int4", 0.8)])
def test_logits_are_near(dtype: QuantizedDType, most: float, tmp_path: Path) -> None:
    for name in ("float32", dtype):
        (tmp_path / name).mkdir()
    expected, found = logits(None, tmp_path / "float32"), logits(dtype, tmp_path / dtype)
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert 0 < error < most
    sizes = [(tmp_path / name / "w.data").stat().st_size for name in (dtype, "float32")]
    assert sizes[0] < 0.7 * sizes[1]


def with_weight(size: int, body: str, result: str) -> ir.Model:
    """A graph over x float (1, 4, size) and the transpose t of a weight w of `size` squared."""
    model = parsed(
        f"g (float[1,4,{size}] x, float[{size},{size}] w) => (float[{result}] y) "
        f"{{ t = Transpose <perm: ints = [1,0]> (w) z = MatMul (x, t) {body} }}"
    )
    weight = model.graph.inputs.pop()
    weight.const_value = ir.tensor(np.ones((size, size), np.float32), name="w")
    model.graph.register_initializer(weight)
    return model


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize(("size", "expected"), [(16, set()), (32, {"w"})])
def test_small_products_are_left_alone(size: int, expected: set[str], dtype: QuantizedDType) -> None:
    model = with_weight(size, "y = Relu (z)", f"1,4,{size}")
    assert quantizable_weights(model, dtype) == expected
    assert len(list(QuantizeWeights().ensures(model, OrtCpu.dialect, dtype))) == len(expected)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("axis = Constant <value_ints: ints = [0]> () y = Squeeze (z, axis)", set()),
        ("axis = Constant <value_ints: ints = [0]> () a = Squeeze (z, axis) y = Relu (a)", {"w"}),
    ],
)
def test_what_the_graph_returns_is_a_head(body: str, expected: set[str]) -> None:
    assert quantizable_weights(with_weight(64, body, "4,64"), "int8") == expected


@pytest.mark.parametrize(
    ("product", "expected"),
    [("a = Relu (x) b = Sigmoid (x) m = Mul (a, b)", set()), ("m = Mul (x, x)", {"w"})],
)
def test_the_product_of_two_computed_values_is_not_rounded(product: str, expected: set[str]) -> None:
    model = with_weight(64, f"{product} v = MatMul (m, t) y = Relu (v)", "1,4,64")
    first, second = (node for node in model.graph if node.op_type == "MatMul")
    assert quantizable_weights(model, "int4") == {"w"}
    QuantizeWeights().run(model, OrtCpu.dialect, "int8")
    assert first.graph is None
    assert (second.graph is None) == bool(expected)

"""Which products become whole numbers, of whole rows and where text is written, and what they compute then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from small_graphs import make_model, parsed, portable_graph

from mod_export.engines.ort import OrtCpu
from mod_export.engines.ort_session import CPU, session_from_onnx
from mod_export.export.passes import run_passes
from mod_export.export.passes.quantize_weights import QuantizeWeights, stored_forms
from mod_export.export.weights import BELOW, Form, WeightsFile, bind_weights, forms_of, state_of, write_weights
from mod_export.types import QUANTIZED, QuantizedDType
from mod_models.spec import ModelSpec, RoutingSpec

APART = replace(OrtCpu.dialect, apart=True)
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
    run_passes(model, OrtCpu.dialect, kind)
    forms = forms_of(model.graph.initializers)
    write_weights(folder / "w.data", state_of(make_model(SPEC.dense())), kind, forms if dtype else {})
    bind_weights(model, [WeightsFile.open(folder / "w.data")], folder)
    (folder / "g.onnx").write_bytes(ir.to_proto(model).SerializeToString())
    session = session_from_onnx(folder / "g.onnx", folder, [CPU], 1, {})
    ids_BS = np.arange(16)[None]
    found: np.ndarray = session.run(["logits"], {"input_ids": ids_BS, "lengths": np.array([16])})[0]
    return found


@pytest.mark.parametrize(
    ("dtype", "expected", "operators"),
    # q, k and v read one value, gate and up another, o a third: each is rounded once. In blocks they are one product.
    [
        ("int8", INT8, {"MatMulInteger": len(INT8), "DynamicQuantizeLinear": 2 * 3}),
        ("int4", INT4, {"MatMulNBits": 8}),
    ],
)
def test_router_head_and_gated_products_stay_float32_and_all_others_are_replaced(
    dtype: QuantizedDType, expected: set[str], operators: dict[str, int]
) -> None:
    model = portable_graph(SPEC, 1, 16)
    assert QuantizeWeights().run(model, OrtCpu.dialect, dtype) == len(expected)
    assert operators.items() <= Counter(node.op_type for node in model.graph).items()
    names = [name.removesuffix(f".{dtype}") for name in model.graph.initializers if name.endswith(f".{dtype}")]
    stored = {part for name in names for part in name.split(BELOW)}
    assert stored == expected
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


def rounded(model: ir.Model, dtype: QuantizedDType) -> set[str]:
    """Weights that a graph of whole rows would read as whole numbers."""
    forms = stored_forms(model.clone(), OrtCpu.dialect, dtype)
    return {name for name, some in forms.items() if some == {dtype}}


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
    assert rounded(model, dtype) == expected
    assert len(list(QuantizeWeights().ensures(model, OrtCpu.dialect, dtype))) == len(expected)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("axis = Constant <value_ints: ints = [0]> () y = Squeeze (z, axis)", set()),
        ("axis = Constant <value_ints: ints = [0]> () a = Squeeze (z, axis) y = Relu (a)", {"w"}),
    ],
)
def test_what_the_graph_returns_is_a_head(body: str, expected: set[str]) -> None:
    assert rounded(with_weight(64, body, "4,64"), "int8") == expected


@pytest.mark.parametrize(
    ("product", "expected"),
    [("a = Relu (x) b = Sigmoid (x) m = Mul (a, b)", set()), ("m = Mul (x, x)", {"w"})],
)
def test_the_product_of_two_computed_values_is_not_rounded(product: str, expected: set[str]) -> None:
    model = with_weight(64, f"{product} v = MatMul (m, t) y = Relu (v)", "1,4,64")
    first, second = (node for node in model.graph if node.op_type == "MatMul")
    assert rounded(model, "int4") == {"w"}
    QuantizeWeights().run(model, OrtCpu.dialect, "int8")
    assert first.graph is None
    assert (second.graph is None) == bool(expected)


STEP = """g (int64[2] ids, bool flag, float[64,64] w, float[64,64] v) => (float[2,64] logits) {
x = Gather (w, ids)
y = If (flag) <
then_branch = a () => (float[2,64] p) { t = Transpose <perm: ints = [1,0]> (v) p = MatMul (x, t) },
else_branch = b () => (float[2,64] q) { q = Identity (x) }>
u = Transpose <perm: ints = [1,0]> (w) logits = MatMul (y, u) }"""
"""A step with a tied head, and a product in a condition."""


def step_of_text(
    dtype: QuantizedDType | None, folder: Path
) -> tuple[ir.Model, Callable[[list[int], bool], np.ndarray]]:
    """The graph in the form that writes text, and what it computes of two ids."""
    model = parsed(STEP)
    weights = {name: torch.randn(64, 64, generator=torch.Generator().manual_seed(n)) / 8 for n, name in enumerate("wv")}
    for value in model.graph.inputs[2:]:
        model.graph.inputs.remove(value)
        model.graph.initializers.add(value)
    run_passes(model, APART, dtype or "float32")
    write_weights(folder / "w.data", weights, dtype or "float32", forms_of(model.graph.initializers) if dtype else {})
    bind_weights(model, [WeightsFile.open(folder / "w.data")], folder)
    (folder / "g.onnx").write_bytes(ir.to_proto(model).SerializeToString())
    session = session_from_onnx(folder / "g.onnx", folder, [CPU], 1, {})
    return model, lambda ids, flag: session.run(["logits"], {"ids": np.array(ids), "flag": np.array(flag)})[0]


@pytest.mark.parametrize(("dtype", "most", "forms"), [("int8", 0.03, "int8_blocks"), ("int4", 0.3, "int4")])
def test_where_text_is_written_head_table_and_branches_are_in_blocks(
    dtype: QuantizedDType, most: float, forms: Form, tmp_path: Path
) -> None:
    for name in ("float32", dtype):
        (tmp_path / name).mkdir()
    model, found = step_of_text(dtype, tmp_path / dtype)
    _, expected = step_of_text(None, tmp_path / "float32")
    # One table for lookup and head, in eight bits: no later layer averages the errors of the head.
    assert forms_of(WeightsFile.open(tmp_path / dtype / "w.data").entries) == {"w": {"int8_blocks"}, "v": {forms}}
    bits = {node.attributes.get_int("bits") for node in model.graph.all_nodes() if node.op_type == "MatMulNBits"}
    assert bits == {8, 8 if dtype == "int8" else 4}
    assert {node.attributes.get_int("accuracy_level") for node in model.graph.all_nodes() if node.domain} == {4}
    for flag in (True, False):
        wanted = expected([3, 60], flag)
        error = np.abs(found([3, 60], flag) - wanted).max() / np.abs(wanted).max()
        assert 0 < error < (most if flag else 0.03)


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_row_does_not_depend_on_the_row_beside_it(dtype: QuantizedDType, tmp_path: Path) -> None:
    _, found = step_of_text(dtype, tmp_path)
    alone = found([3, 3], True)[0]
    for other in range(0, 64, 7):
        np.testing.assert_array_equal(found([3, other], True)[0], alone)

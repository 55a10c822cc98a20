"""Which products are quantized, for whole rows and for text generation, and what they then compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from graph_folders import unbound_graph
from small_graphs import make_model, parsed, portable_graph
from step_graphs import prefill_graph_of

from mod_export.engines.openvino import OpenVino
from mod_export.engines.ort import OrtCpu
from mod_export.engines.ort_session import CPU, session_from_onnx
from mod_export.graph.rewrites import apply_rewrites, products, stored_forms
from mod_export.graph.rewrites.products import QuantizeWeights
from mod_export.graph.weights import BELOW, Form, WeightsFile, bind_weights, forms_of, state_of, write_weights
from mod_export.types import QUANTIZED, Bucket, QuantizedDType, TargetLimits
from mod_models.spec import ModelSpec, RoutingSpec

SPEC = ModelSpec(
    vocab_size=40, d_model=64, n_layers=2, n_heads=2, n_kv_heads=1, d_head=32, d_ff=96, max_positions=64,
    routing=RoutingSpec(capacity=0.25),
)  # fmt: skip
PROJECTIONS = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj")
INT8 = {f"layers.{layer}.{name}.weight" for layer in (0, 1) for name in (*PROJECTIONS, "mlp.gate_proj", "mlp.up_proj")}
GATED = {f"layers.{layer}.mlp.down_proj.weight" for layer in (0, 1)}
HEAD = {"embedding.weight"}
ROWS = 32
"""Tokens of the only row of a graph: just enough to count as many rows, for products outside of routed layers."""


def logits(dtype: QuantizedDType | None, folder: Path, ids_BS: np.ndarray) -> np.ndarray:
    """Logits of the dense model, because a router might select other tokens."""
    model = portable_graph(SPEC.dense(), 1, ROWS)
    kind = dtype or "float32"
    apply_rewrites(model, OrtCpu.limits, kind)
    forms = forms_of(model.graph.initializers)
    write_weights(folder / "w.data", state_of(make_model(SPEC.dense())), kind, forms if dtype else {})
    bind_weights(model, [WeightsFile.open(folder / "w.data")], folder)
    (folder / "g.onnx").write_bytes(ir.to_proto(model).SerializeToString())
    session = session_from_onnx(folder / "g.onnx", folder, [CPU], 1, {})
    result: np.ndarray = session.run(["logits"], {"input_ids": ids_BS, "lengths": np.array([ROWS])})[0]
    return result


def stored(limits: TargetLimits, dtype: QuantizedDType, spec: ModelSpec, rows: int) -> dict[Form, set[str]]:
    """The weights that a graph reads in each form."""
    weights: dict[Form, set[str]] = {}
    for name, forms in stored_forms(portable_graph(spec, 1, rows), limits, dtype).items():
        for form in forms - {"float"}:
            weights.setdefault(form, set()).update(name.split(BELOW))
    return weights


def test_products_of_many_rows_are_of_whole_columns_but_those_that_need_blocks() -> None:
    assert stored(OrtCpu.limits, "int8", SPEC.dense(), ROWS) == {
        "int8": INT8,
        "int8_blocks64": GATED,
        "int8_blocks": HEAD,
    }
    assert stored(OrtCpu.limits, "int8", SPEC.dense(), ROWS - 1) == {"int8_blocks64": INT8 | GATED, "int8_blocks": HEAD}
    assert stored(OrtCpu.limits, "int4", SPEC.dense(), ROWS) == {"int4": INT8 | GATED, "int8_blocks64": HEAD}
    # A routed layer has fewer rows.
    second = {name for name in INT8 if name.startswith("layers.1.")}
    assert stored(OrtCpu.limits, "int8", SPEC, ROWS) == {
        "int8": INT8 - second,
        "int8_blocks64": second | GATED,
        "int8_blocks": HEAD,
    }


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_prompts_that_continue_a_text_read_what_is_stored(dtype: QuantizedDType) -> None:
    """Their attention is in branches, where fewer products read the same rows than in the portable graph."""
    routing = RoutingSpec(capacity=0.25, predictor_hidden=8, layers=(1,))
    spec = replace(SPEC, d_model=128, d_head=64, d_ff=192, routing=routing)
    model = prefill_graph_of(spec, ROWS)
    forms = stored_forms(model.clone(), OrtCpu.limits, dtype)
    assert apply_rewrites(model, OrtCpu.limits, dtype)["continued_attention"] > 0
    read = forms_of(model.graph.initializers)
    assert {form for some in read.values() for form in some} - {"float"}
    assert {name: some for name, some in read.items() if not some <= forms.get(name, set())} == {}


def test_rows_are_rounded_once_and_products_in_blocks_are_one() -> None:
    model = portable_graph(SPEC.dense(), 1, ROWS)
    # The lookup in the table that the head reads is one more.
    assert QuantizeWeights().run(model, OrtCpu.limits, "int8") == len(INT8 | GATED | HEAD) + 1
    counts = Counter(node.op_type for node in model.graph)
    # q, k and v read one value, gate and up another, o a third.
    assert (counts["MatMulIntegerToFloat"], counts["QuantizeLinear"], counts["MatMulNBits"]) == (12, 6, 3)
    assert model.opset_imports["com.microsoft"] == 1
    model = portable_graph(SPEC.dense(), 1, ROWS)
    assert QuantizeWeights().run(model, OrtCpu.limits, "int4") == len(INT8 | GATED | HEAD) + 1
    assert Counter(node.op_type for node in model.graph)["MatMulNBits"] == 2 * 4 + 1


@pytest.mark.parametrize(("dtype", "most"), [("int8", 0.1), ("int4", 0.8)])
def test_logits_are_near_and_no_token_depends_on_a_later_one(
    dtype: QuantizedDType, most: float, tmp_path: Path
) -> None:
    for name in ("float32", dtype):
        (tmp_path / name).mkdir()
    ids_BS = np.arange(ROWS)[None]
    expected, quantized = logits(None, tmp_path / "float32", ids_BS), logits(dtype, tmp_path / dtype, ids_BS)
    error = np.abs(quantized - expected).max() / np.abs(expected).max()
    assert 0 < error < most
    sizes = [(tmp_path / name / "w.data").stat().st_size for name in (dtype, "float32")]
    assert sizes[0] < 0.4 * sizes[1]
    ids_BS[:, 20:] = 7
    np.testing.assert_array_equal(logits(dtype, tmp_path / dtype, ids_BS)[:, :20], quantized[:, :20])


ROUNDED_BY_THE_ENGINE = {
    "int8": {"DequantizeLinear": len(INT8 | GATED | HEAD), "MatMulNBits": 0},
    "int4": {"DequantizeLinear": 1, "MatMulNBits": 8},
}
"""In int4, only the head has a DequantizeLinear."""


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_where_the_engine_rounds_activations_all_but_the_router_are_whole_numbers_beside_bfloat16(
    dtype: QuantizedDType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = unbound_graph(SPEC, Bucket(1, ROWS))
    apply_rewrites(model, OpenVino.limits, dtype)
    counts = Counter(node.op_type for node in model.graph)
    assert {name: counts[name] for name in ROUNDED_BY_THE_ENGINE[dtype]} == ROUNDED_BY_THE_ENGINE[dtype]
    assert counts["QuantizeLinear"] == counts["MatMulIntegerToFloat"] == 0
    for node in model.graph:
        if node.op_type in ("DequantizeLinear", "MatMulNBits", "Softmax", "RMSNormalization"):
            assert node.outputs[0].dtype == ir.DataType.BFLOAT16
        if node.op_type == "Gather" and node.inputs[0] is model.graph.initializers["embedding.weight"]:
            assert node.outputs[0].dtype == ir.DataType.FLOAT  # Its rows are cast, not the table.
    # A file of quantized weights keeps its floats in float32, so a graph that reads them casts them.
    weights = state_of(make_model(SPEC))
    held = {name: value.dtype for name, value in model.graph.initializers.items() if name.rpartition(".")[0] in weights}
    held |= {name: value.dtype for name, value in model.graph.initializers.items() if name in weights}
    assert set(held.values()) == {ir.DataType.FLOAT, ir.DataType.UINT8, ir.DataType.INT8} - (
        {ir.DataType.UINT8} if dtype == "int8" else set()
    )
    # Where all products have few rows, as in a step, weights are in blocks; the lookup reads the table as it is stored.
    assert stored(OpenVino.limits, "int8", SPEC, ROWS - 1) == {"int8_blocks64": INT8 | GATED, "int8_blocks": HEAD}
    with monkeypatch.context() as patch:
        patch.setattr(products, "LARGE", 1)
        assert stored(OpenVino.limits, "int8", SPEC, ROWS - 1) == {"int8": INT8 | GATED | HEAD}
    compared = [node.inputs[0] for node in model.graph if node.op_type == "TopK"]
    assert ir.DataType.FLOAT in (dtypes := {value and value.dtype for value in compared})
    assert ir.DataType.BFLOAT16 not in dtypes


def rounded(model: ir.Model, dtype: QuantizedDType) -> set[str]:
    """Weights that are stored as `dtype` only, not in blocks of eight bits for a head or another product."""
    forms = stored_forms(model.clone(), OrtCpu.limits, dtype)
    return {name for name, some in forms.items() if some == {dtype}}


def with_weight(size: int, body: str, result: str) -> ir.Model:
    """A graph of z = x t and `body`, with x float (1, 32, size) and the transpose t of a weight w (size, size)."""
    model = parsed(
        f"g (float[1,32,{size}] x, float[{size},{size}] w) => (float[{result}] y) "
        f"{{ t = Transpose <perm: ints = [1,0]> (w) z = MatMul (x, t) {body} }}"
    )
    weight = model.graph.inputs.pop()
    weight.const_value = ir.tensor(np.ones((size, size), np.float32), name="w")
    model.graph.register_initializer(weight)
    return model


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize(("size", "expected"), [(16, set()), (32, {"w"})])
def test_small_products_are_left_alone(size: int, expected: set[str], dtype: QuantizedDType) -> None:
    model = with_weight(size, "y = Relu (z)", f"1,32,{size}")
    assert rounded(model, dtype) == expected
    assert len(list(QuantizeWeights().ensures(model, OrtCpu.limits, dtype))) == len(expected)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("axis = Constant <value_ints: ints = [0]> () y = Squeeze (z, axis)", set()),
        ("axis = Constant <value_ints: ints = [0]> () a = Squeeze (z, axis) y = Relu (a)", {"w"}),
    ],
)
def test_what_the_graph_returns_is_a_head(body: str, expected: set[str]) -> None:
    assert rounded(with_weight(64, body, "32,64"), "int8") == expected


@pytest.mark.parametrize(
    ("product", "expected"),
    [("a = Relu (x) b = Sigmoid (x) m = Mul (a, b)", set()), ("m = Mul (x, x)", {"w"})],
)
def test_the_product_of_two_computed_values_is_rounded_in_blocks(product: str, expected: set[str]) -> None:
    model = with_weight(64, f"{product} v = MatMul (m, t) y = Relu (v)", "1,32,64")
    assert rounded(model, "int4") == {"w"}
    assert rounded(model, "int8") == expected
    assert stored_forms(model, OrtCpu.limits, "int8")["w"] == ({"int8"} if expected else {"int8_blocks64"})


STEP = """g (int64[2] ids, bool flag, float[64,64] w, float[64,64] v) => (float[2,64] logits) {
x = Gather (w, ids)
y = If (flag) <
then_branch = a () => (float[2,64] p) { t = Transpose <perm: ints = [1,0]> (v) p = MatMul (x, t) },
else_branch = b () => (float[2,64] q) { q = Identity (x) }>
u = Transpose <perm: ints = [1,0]> (w) logits = MatMul (y, u) }"""
"""A step with a tied head, and a product in a branch."""


def step_of_text(
    dtype: QuantizedDType | None, folder: Path
) -> tuple[ir.Model, Callable[[list[int], bool], np.ndarray]]:
    """The rewritten graph of `STEP`, and a function that runs it on two ids and a flag."""
    model = parsed(STEP)
    weights = {name: torch.randn(64, 64, generator=torch.Generator().manual_seed(n)) / 8 for n, name in enumerate("wv")}
    for value in model.graph.inputs[2:]:
        model.graph.inputs.remove(value)
        model.graph.initializers.add(value)
    apply_rewrites(model, OrtCpu.limits, dtype or "float32")
    write_weights(folder / "w.data", weights, dtype or "float32", forms_of(model.graph.initializers) if dtype else {})
    bind_weights(model, [WeightsFile.open(folder / "w.data")], folder)
    (folder / "g.onnx").write_bytes(ir.to_proto(model).SerializeToString())
    session = session_from_onnx(folder / "g.onnx", folder, [CPU], 1, {})
    return model, lambda ids, flag: session.run(["logits"], {"ids": np.array(ids), "flag": np.array(flag)})[0]


@pytest.mark.parametrize(
    ("dtype", "most", "head", "branch"),
    [("int8", 0.03, "int8_blocks", "int8_blocks64"), ("int4", 0.3, "int8_blocks64", "int4")],
)
def test_where_text_is_written_head_table_and_branches_are_in_blocks(
    dtype: QuantizedDType, most: float, head: Form, branch: Form, tmp_path: Path
) -> None:
    for name in ("float32", dtype):
        (tmp_path / name).mkdir()
    model, run_quantized = step_of_text(dtype, tmp_path / dtype)
    _, run_float = step_of_text(None, tmp_path / "float32")
    # Lookup and head share one table in eight bits, because no later layer averages the errors of the head.
    assert forms_of(WeightsFile.open(tmp_path / dtype / "w.data").entries) == {"w": {head}, "v": {branch}}
    bits = {node.attributes.get_int("bits") for node in model.graph.all_nodes() if node.op_type == "MatMulNBits"}
    assert bits == {8, 8 if dtype == "int8" else 4}
    assert {node.attributes.get_int("accuracy_level") for node in model.graph.all_nodes() if node.domain} == {4}
    for flag in (True, False):
        wanted = run_float([3, 60], flag)
        error = np.abs(run_quantized([3, 60], flag) - wanted).max() / np.abs(wanted).max()
        assert 0 < error < (most if flag else 0.03)


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_row_does_not_depend_on_the_row_beside_it(dtype: QuantizedDType, tmp_path: Path) -> None:
    _, run_step = step_of_text(dtype, tmp_path)
    alone = run_step([3, 3], True)[0]
    for other in range(0, 64, 7):
        np.testing.assert_array_equal(run_step([3, other], True)[0], alone)

"""Graphs written by hand are ONNX: checked by onnx, and run."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from mod_export.benchmark.microbenchmarks import one_operator


def run(graph: bytes, x: np.ndarray) -> np.ndarray:
    import onnxruntime as ort

    onnx.checker.check_model(onnx.load_from_string(graph), full_check=True)
    (result,) = ort.InferenceSession(graph, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    return np.asarray(result)


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_a_product_with_constant_weights(rows: int) -> None:
    x = np.arange(rows * 130, dtype=np.float32).reshape(rows, 130)
    result = run(one_operator("MatMul", x.shape, (130, 3), (rows, 3)), x)
    np.testing.assert_allclose(result, x @ np.ones((130, 3), np.float32))


def test_an_operator_without_weights() -> None:
    x = np.arange(1000, dtype=np.float32)
    np.testing.assert_array_equal(run(one_operator("Neg", x.shape, None, x.shape), x), -x)

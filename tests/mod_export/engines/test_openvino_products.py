"""Products with bfloat16 weights: which ones a model has, and whether OpenVINO computes them right here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mod_export.engines import openvino as target
from mod_export.engines import openvino_products
from mod_export.engines.openvino_products import ProductShape

if TYPE_CHECKING:
    import openvino

with_bfloat16 = pytest.mark.skipif(
    "BF16" not in target._capabilities(), reason="this processor has no instructions for bfloat16"
)


@with_bfloat16
@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_is_tried_in_bfloat16(transposed: bool) -> None:
    product, options = ProductShape(24, 40, 56, transposed), target._options("bfloat16", 1, target.GROUP)
    weight_KN = np.ones((40, 56), np.float32)
    compiled = openvino_products.compiled_product(target._core(), product, weight_KN, options)
    kernels = [node.get_rt_info() for node in compiled.get_runtime_model().get_ordered_ops()]
    ran = {(str(about["layerType"].value), str(about["runtimePrecision"].value)) for about in kernels}
    assert ("FullyConnected", "bf16") in ran
    rows_MK = np.eye(24, 40, dtype=np.float32)
    np.testing.assert_array_equal(openvino_products.multiplied(compiled, rows_MK), np.ones((24, 56)))
    assert openvino_products.wrong_products(target._core(), [product], options) == []


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0])
def test_a_product_without_any_value_is_wrong(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino_products, "multiplied", lambda compiled, rows_MK: np.full((24, 56), value))
    options = target._options("float32", 1, target.GROUP)
    (described,) = openvino_products.wrong_products(target._core(), [ProductShape(24, 40, 56, True)], options)
    assert described.startswith("24x40 by 40x56 transposed (off by ")


def model_of(first: Sequence[int], second: np.ndarray, *, turned: bool = False, branch: bool = False) -> openvino.Model:
    """A bfloat16 product of an input and a weight, if wanted in both branches of an If."""
    import openvino
    from openvino import opset13 as operators

    def product(rows: openvino.Node) -> openvino.Node:
        weight = operators.convert(operators.constant(second), "bf16")
        return operators.matmul(operators.convert(rows, "bf16"), weight, False, turned)

    rows = operators.parameter(list(first), openvino.Type.f32)
    if not branch:
        return openvino.Model([product(rows)], [rows])
    condition, bodies = operators.parameter([1], openvino.Type.boolean), []
    chosen = operators.if_op(condition)
    for place in (chosen.set_then_body, chosen.set_else_body):
        inner = operators.parameter(list(first), openvino.Type.f32)
        bodies.append((inner, operators.result(product(inner))))
        place(openvino.Model([bodies[-1][1]], [inner]))
    (inside, result), (other_inside, other_result) = bodies
    chosen.set_input(rows.output(0), inside, other_inside)
    return openvino.Model([chosen.set_output(result, other_result)], [condition, rows])


@pytest.mark.parametrize("branch", [False, True])
def test_the_products_of_a_model(branch: bool) -> None:
    def found(
        first: Sequence[int], shape: Sequence[int], dtype: type = np.float32, turned: bool = False
    ) -> list[ProductShape]:
        return openvino_products.products_of(model_of(first, np.ones(shape, dtype), turned=turned, branch=branch))

    assert found([2, 3, 8], [8, 5]) == [ProductShape(6, 8, 5, transposed=False)]
    assert found([2, 3, 8], [5, 8], turned=True) == [ProductShape(6, 8, 5, transposed=True)]
    assert found([4000, 8], [8, 20000]) == [ProductShape(1024, 8, 16384, transposed=False)]
    assert found([-1, 8], [8, 5]) == found([8], [8, 5]) == found([2, 8], [8]) == found([2, 3, 8], [2, 8, 5]) == []
    assert found([2, 3, 8], [8, 5], np.int8) == []

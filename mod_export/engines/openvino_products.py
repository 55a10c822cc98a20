"""Checks that OpenVINO multiplies by bfloat16 weights correctly on this processor.

OpenVINO 2026.4.0 returned wrong bfloat16 products of some shapes on a Zen 5 processor
(https://github.com/openvinotoolkit/openvino/issues/38256). Parity finds that where an engine is built and judged. A
build without evidence is not judged, and a folder that is opened on another processor is not judged again, so the
products of an engine are tried when it is built and when it is moved. Attention is left out: OpenVINO makes one kernel
of it, which a single product would not show. So are weights of whole numbers, which other kernels multiply.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import openvino

MOST_ROWS, MOST_COLUMNS = 1024, 16384
"""A larger product, such as that of a head, is tried with this many rows and columns, which bounds memory and time."""
COMPARED_ROWS = 8
LARGEST_ERROR = 0.05
"""Largest root mean square of the error, relative to that of the product. Rounding each element to bfloat16 gives at
most 0.002. The best wrong product in the report had a cosine of 0.65 with the right one: an error of at least 0.76.
"""
HIDES_CONSTANT = ("Convert", "Transpose", "Reshape")


@dataclass(frozen=True, slots=True)
class ProductShape:
    """A product of bfloat16 activations and a bfloat16 weight.

    Attributes:
        rows: number of rows of the activations, those of all texts together.
        depth: length of a row.
        columns: number of columns of the weight.
        transposed: whether the weight is stored as (columns, depth).
    """

    rows: int
    depth: int
    columns: int
    transposed: bool

    def __str__(self) -> str:
        return f"{self.rows}x{self.depth} by {self.depth}x{self.columns}" + (" transposed" if self.transposed else "")


def products_of(model: openvino.Model) -> list[ProductShape]:
    """Returns the different products with bfloat16 weights in a model, in the order of the graph."""
    return list(dict.fromkeys(product for body in bodies_of(model) for _, product in weight_products(body)))


def bodies_of(model: openvino.Model) -> Iterator[openvino.Model]:
    """Yields a model and the branches of its conditions."""
    yield model
    for node in model.get_ordered_ops():
        if node.get_type_name() == "If":
            for branch in range(2):
                yield from bodies_of(node.get_function(branch))


def weight_products(body: openvino.Model) -> Iterator[tuple[openvino.Node, ProductShape]]:
    """Yields every product with a bfloat16 weight in a model, outside of its conditions, with its shape."""
    for node in body.get_ordered_ops():
        if node.get_type_name() == "MatMul" and (product := _product(node)) is not None:
            yield node, product


def _product(node: openvino.Node) -> ProductShape | None:
    """Returns the shape of a product of bfloat16 rows and a bfloat16 weight with two axes, all of known sizes; None for
    any other node.
    """
    shapes = [value.get_partial_shape() for value in node.input_values()]
    about = node.get_attributes()
    known = all(shape.is_static for shape in shapes) and not about["transpose_a"]
    narrow = all(value.get_element_type().get_type_name() == "bf16" for value in node.input_values())
    if not (known and narrow and _is_weight(node.input_value(1).get_node())):
        return None
    first, second = (tuple(shape.to_shape()) for shape in shapes)
    if len(first) < 2 or len(second) != 2 or 0 in (*first, *second):
        return None
    columns = second[0] if about["transpose_b"] else second[1]
    rows = math.prod(first[:-1])
    return ProductShape(min(rows, MOST_ROWS), first[-1], min(columns, MOST_COLUMNS), about["transpose_b"])


def _is_weight(node: openvino.Node) -> bool:
    while node.get_type_name() in HIDES_CONSTANT:
        node = node.input_value(0).get_node()
    return bool(node.get_type_name() == "Constant") and not node.get_element_type().is_integral()


def wrong_products(core: openvino.Core, products: Iterable[ProductShape], options: Mapping[str, Any]) -> list[str]:
    """Multiplies factors that bfloat16 holds exactly, and describes every product that OpenVINO gets wrong.

    Args:
        core: OpenVINO's runtime.
        products: the products to try.
        options: options for compiling, as an engine has them.

    Raises:
        RuntimeError: OpenVINO cannot compile or run a product.
    """
    described = []
    for product in products:
        random = np.random.default_rng(0)
        # Eighths from -1 to 1 have few enough bits.
        rows_MK, weight_KN = (
            random.integers(-8, 9, shape, dtype=np.int8).astype(np.float32) / 8
            for shape in ((product.rows, product.depth), (product.depth, product.columns))
        )
        result_MN = multiplied(compiled_product(core, product, weight_KN, options), rows_MK)
        compared_rows = np.linspace(0, product.rows - 1, min(product.rows, COMPARED_ROWS)).astype(int)
        expected_CN = rows_MK[compared_rows] @ weight_KN
        # A product that is zero by chance has no error to compare with.
        scale = float(np.sqrt(np.mean(expected_CN**2))) or 1.0
        error = float(np.sqrt(np.mean((result_MN[compared_rows] - expected_CN) ** 2))) / scale
        if not error <= LARGEST_ERROR:
            described.append(f"{product} (off by {error:.0%})")
    return described


def compiled_product(
    core: openvino.Core, product: ProductShape, weight_KN: np.ndarray, options: Mapping[str, Any]
) -> openvino.CompiledModel:
    """Compiles a product with a bfloat16 weight. Its input and output are float32 (rows, depth) and (rows, columns)."""
    import openvino
    from openvino import opset13 as operators

    rows_MK = operators.parameter([product.rows, product.depth], openvino.Type.f32)
    stored = weight_KN.T.copy() if product.transposed else weight_KN
    weight = operators.convert(operators.constant(stored, openvino.Type.f32), "bf16")
    result = operators.matmul(operators.convert(rows_MK, "bf16"), weight, False, product.transposed)
    model = openvino.Model([operators.convert(result, "f32")], [rows_MK])
    return core.compile_model(model, "CPU", dict(options))


def multiplied(compiled: openvino.CompiledModel, rows_MK: np.ndarray) -> np.ndarray:
    """Returns the product as OpenVINO computes it."""
    result: np.ndarray = compiled([rows_MK])[0]
    return result

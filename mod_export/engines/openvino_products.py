"""Checks that OpenVINO multiplies bfloat16 matrices correctly on this processor.

OpenVINO 2026.4.0 returned wrong bfloat16 products of some shapes on a Zen 5 processor
(https://github.com/openvinotoolkit/openvino/issues/38256). Parity finds that where an engine is built and judged. A
folder that is opened on another processor is not judged again, so the products of its engines are tried there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import openvino

MOST_COLUMNS = 16384
"""A product with more columns, such as that of a head, is tried with this many, which bounds memory and time."""
COMPARED_ROWS = 8
LARGEST_ERROR = 0.05
"""Largest root mean square of the error, relative to that of the product. Rounding each element to bfloat16 is at most
0.002 off, and products whose cosine is 0.65, the best of the report, are 0.76 off at least.
"""
HIDES_CONSTANT = ("Convert", "Transpose", "Reshape")


@dataclass(frozen=True, slots=True)
class Product:
    """A product of two bfloat16 matrices, or of stacks of them.

    Attributes:
        first: shape of the first factor.
        second: shape of the second factor.
        transposed: whether the first and the second factor are transposed.
        stored: whether the second factor is a weight.
    """

    first: tuple[int, ...]
    second: tuple[int, ...]
    transposed: tuple[bool, bool]
    stored: bool

    def __str__(self) -> str:
        both = zip((self.first, self.second), self.transposed, strict=True)
        return " by ".join("x".join(map(str, shape)) + (" transposed" if turned else "") for shape, turned in both)


def product_from_json(about: Mapping[str, Any]) -> Product:
    """Reads what `dataclasses.asdict` makes of a product."""
    first, second, transposed = (tuple(about[name]) for name in ("first", "second", "transposed"))
    return Product(first, second, transposed, about["stored"])


def products_of(model: openvino.Model) -> list[Product]:
    """Returns the different bfloat16 products of a model, in the order of the graph."""
    return list(dict.fromkeys(map(_product, _narrow_products(model))))


def _narrow_products(model: openvino.Model) -> Iterator[openvino.Node]:
    for node in model.get_ordered_ops():
        if node.get_type_name() == "MatMul":
            if all(value.get_element_type().get_type_name() == "bf16" for value in node.input_values()):
                yield node
        elif node.get_type_name() == "If":
            for branch in range(2):
                yield from _narrow_products(node.get_function(branch))


def _product(node: openvino.Node) -> Product:
    first, second = (tuple(value.get_shape()) for value in node.input_values())
    about = node.get_attributes()
    factor = node.input_value(1).get_node()
    while factor.get_type_name() in HIDES_CONSTANT:
        factor = factor.input_value(0).get_node()
    columns = -2 if about["transpose_b"] else -1
    shape = list(second)
    shape[columns] = min(shape[columns], MOST_COLUMNS)
    stored = factor.get_type_name() == "Constant"
    return Product(first, tuple(shape), (about["transpose_a"], about["transpose_b"]), stored)


def wrong_products(core: openvino.Core, products: Iterable[Product], options: Mapping[str, Any]) -> list[str]:
    """Multiplies factors that bfloat16 holds exactly, and describes every product that OpenVINO gets wrong.

    Args:
        core: OpenVINO's runtime.
        products: the products to try.
        options: options for compiling, as an engine has them.
    """
    described = []
    for product in products:
        # Eighths from -1 to 1 have few enough bits.
        random = np.random.default_rng(0)
        first, second = (
            random.integers(-8, 9, shape).astype(np.float32) / 8 for shape in (product.first, product.second)
        )
        result = multiplied(core, product, first, second, options)
        rows, columns = (
            factor.swapaxes(-1, -2) if turned else factor
            for factor, turned in zip((first, second), product.transposed, strict=True)
        )
        some = np.linspace(0, rows.shape[-2] - 1, min(rows.shape[-2], COMPARED_ROWS)).astype(int)
        expected = rows[..., some, :] @ columns
        error = float(np.sqrt(np.mean((result[..., some, :] - expected) ** 2) / np.mean(expected**2)))
        if not error <= LARGEST_ERROR:
            described.append(f"{product} (off by {error:.0%})")
    return described


def multiplied(
    core: openvino.Core, product: Product, first: np.ndarray, second: np.ndarray, options: Mapping[str, Any]
) -> np.ndarray:
    """Returns the product of two float32 arrays as OpenVINO computes it in bfloat16, in float32."""
    import openvino
    from openvino import opset13 as operators

    inputs = [operators.parameter(list(first.shape), openvino.Type.f32)]
    if product.stored:
        factor = operators.constant(second, openvino.Type.f32)
    else:
        factor = operators.parameter(list(second.shape), openvino.Type.f32)
        inputs.append(factor)
    narrow = [operators.convert(value, "bf16") for value in (inputs[0], factor)]
    output = operators.convert(operators.matmul(*narrow, *product.transposed), "f32")
    compiled = core.compile_model(openvino.Model([output], inputs), "CPU", dict(options))
    result: np.ndarray = compiled([first] if product.stored else [first, second])[0]
    return result

"""Products with 8-bit or 4-bit weights, where they do not cost accuracy.

int8: activations are rounded to 8 bits too, with one scale for the whole tensor that is computed at run time, and the
product is computed in integers. int4: weights are stored in blocks of 32 with one scale each, and unpacked into floats
when they are used; this saves memory, not arithmetic.

Shape legend: K the summed dimension, N columns of the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import onnx_ir as ir

from mod_export.export.nodes import NodeWriter, is_standard, label_of, require_static_shape
from mod_export.export.passes.cast_floats import float32_island
from mod_export.export.passes.stored_weights import MICROSOFT, transposed_weight
from mod_export.export.quantize import BLOCK, quantized_tensors
from mod_export.types import QUANTIZED, Dialect, DType

__all__ = ["QuantizeWeights", "quantizable_weights"]

FLOAT, INT32, UINT8 = ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.UINT8
VIEWS = ("Reshape", "Squeeze", "Transpose", "Unsqueeze")
SMALLEST = 32
"""Columns or summed elements below which a product gains nothing: a router's projection has one column."""


class _Product(NamedTuple):
    """x (..., K) times the transpose of a weight (N, K)."""

    node: ir.Node
    x: ir.Value
    weight: ir.Value


class QuantizeWeights:
    """Replaces MatMul with a weight by DynamicQuantizeLinear and MatMulInteger, or by MatMulNBits.

    Three kinds of product stay float32. The router's, because a selection compares scores (`cast_floats` has the same
    rule). The head's, because no later layer averages its errors. And for int8 those that read the product of two
    activations, such as SwiGLU's, whose few large elements would use up the range of a shared scale (docs/numerics.md
    has the figures).
    """

    name: ClassVar[str] = "quantize_weights"

    def applies(self, dialect: Dialect, dtype: DType) -> bool:
        return dtype in QUANTIZED

    def run(self, model: ir.Model, dialect: Dialect, dtype: DType) -> int:
        found = list(_products(model.graph, dtype))
        rounded: dict[ir.Value, Sequence[ir.Value]] = {}
        for product in found:
            if dtype == "int8":
                _rewrite_int8(model.graph, product, rounded)
            else:
                _rewrite_int4(model.graph, product)
        if found and dtype == "int4":
            model.opset_imports[MICROSOFT] = 1
        return len(found)

    def ensures(self, model: ir.Model, dialect: Dialect, dtype: DType) -> Sequence[str]:
        return [f"{label_of(product.node)} multiplies by a float32 weight" for product in _products(model.graph, dtype)]


def quantizable_weights(model: ir.Model, dtype: DType) -> frozenset[str]:
    """Names of the weights that this pass would replace in a graph."""
    return frozenset(str(product.weight.name) for product in _products(model.graph, dtype))


def _products(graph: ir.Graph, dtype: DType) -> Iterator[_Product]:
    island = float32_island(graph)
    for node in list(graph):
        weight = None if node in island else transposed_weight(node)
        x = node.inputs[0] if weight is not None else None
        if weight is None or x is None or weight.dtype != FLOAT or _is_head(node):
            continue
        if min(require_static_shape(weight, node)) < SMALLEST or (dtype == "int8" and _is_gated(x)):
            continue
        yield _Product(node, x, weight)


def _is_head(node: ir.Node) -> bool:
    """Whether a product is an output of the graph, directly or through a change of shape."""
    value = node.outputs[0]
    while not value.is_graph_output():
        users = [use.node for use in value.uses()]
        if len(users) != 1 or not is_standard(users[0], *VIEWS):
            return False
        value = users[0].outputs[0]
    return True


def _is_gated(x: ir.Value) -> bool:
    """Whether a value is the product of two computed ones."""
    producer = x.producer()
    while producer is not None and is_standard(producer, *VIEWS):
        x = producer.inputs[0] or x
        producer = x.producer()
    if producer is None or not is_standard(producer, "Mul"):
        return False
    return all(value is not None and value.producer() is not None for value in producer.inputs)


def _rewrite_int8(graph: ir.Graph, product: _Product, rounded: dict[ir.Value, Sequence[ir.Value]]) -> None:
    node, x, weight = product
    writer = NodeWriter(graph, node, "int8")
    result = node.outputs[0].shape
    if x not in rounded:
        rounded[x] = writer.ops("DynamicQuantizeLinear", [x], [(UINT8, x.shape), (FLOAT, ()), (UINT8, ())])
    x_int, x_scale, x_zero = rounded[x]
    w_int, w_scale = _weights(graph, weight, "int8")
    summed = writer.op("MatMulInteger", [x_int, w_int, x_zero], INT32, result)
    scale = writer.op("Mul", [x_scale, w_scale], FLOAT, w_scale.shape)
    writer.replace(writer.op("Mul", [writer.op("Cast", [summed], FLOAT, result, {"to": FLOAT}), scale], FLOAT, result))


def _rewrite_int4(graph: ir.Graph, product: _Product) -> None:
    node, x, weight = product
    N, K = require_static_shape(weight, node)
    writer = NodeWriter(graph, node, "int4")
    # Level 4 allows the kernel to round activations to 8 bits, block by block; other levels are many times slower.
    attributes = {"K": K, "N": N, "bits": 4, "block_size": BLOCK, "accuracy_level": 4}
    inputs = [x, *_weights(graph, weight, "int4")]
    writer.replace(writer.op("MatMulNBits", inputs, FLOAT, node.outputs[0].shape, attributes, domain=MICROSOFT))


def _weights(graph: ir.Graph, weight: ir.Value, dtype: DType) -> list[ir.Value]:
    """The initializers that replace the weight; they get their values from the weights file of this dtype."""
    assert weight.shape is not None
    made = []
    for name, (kind, shape) in quantized_tensors(str(weight.name), weight.shape.numpy(), dtype).items():
        if name not in graph.initializers:
            graph.initializers.add(ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(shape)))
        made.append(graph.initializers[name])
    return made

"""Products with weights as they are stored: in floats without a transposed copy, or as numbers of 8 or 4 bits.

PyTorch stores a linear layer's weight as (out, in), and ONNX MatMul wants (in, out), so an export transposes every
weight, and a runtime computes the transposed copies while loading: the whole model once more in memory. ONNX Runtime's
FusedMatMul reads a weight as it is stored, so the weight stays in the file that all buckets map.

int8: activations are rounded to 8 bits too, with one scale for the whole tensor that is computed at run time, and the
product is computed in integers. int4: weights are stored in blocks of 32 with one scale each, and unpacked into floats
when they are used; this saves memory, not arithmetic.

Shape legend: K the summed dimension, N columns of the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import onnx_ir as ir

from mod_export.export.nodes import NodeWriter, is_standard, label_of, made_by, only_reader, static_shape
from mod_export.export.passes.cast_floats import float32_island
from mod_export.export.weights import BLOCK, ONNX_TYPES, quantized_tensors
from mod_export.types import QUANTIZED, Dialect, DType

MICROSOFT = "com.microsoft"
FLOAT = ir.DataType.FLOAT
VIEWS = ("Reshape", "Squeeze", "Transpose", "Unsqueeze")
SMALLEST = 32
"""Columns or summed elements below which a product gains nothing: a router's projection has one column."""


class _Product(NamedTuple):
    """x (..., K) times the transpose of a weight (N, K)."""

    node: ir.Node
    x: ir.Value
    weight: ir.Value
    sizes: tuple[int, int]


def _product(node: ir.Node) -> _Product | None:
    """The product that a node computes; None where it is none, or not by a transposed weight."""
    if not is_standard(node, "MatMul"):
        return None
    x, right = node.inputs
    transpose = made_by(right, "Transpose")
    if x is None or transpose is None:
        return None
    weight, shape = transpose.inputs[0], static_shape(right)
    # (0, 1), the permutation that changes nothing, is excluded; no exporter writes it.
    swapped = list(transpose.attributes.get_ints("perm", [1, 0])) == [1, 0]
    if weight is None or not weight.is_initializer() or shape is None or len(shape) != 2 or not swapped:
        return None
    return _Product(node, x, weight, (shape[1], shape[0]))


def _stored_gemm(node: ir.Node) -> _Product | None:
    """The product that a Gemm without a bias computes of rows and a stored weight; None where a node is no such."""
    if not is_standard(node, "Gemm") or any(value is not None for value in node.inputs[2:]):
        return None
    x, weight = node.inputs[:2]
    given = (node.attributes.get_float("alpha", 1.0), node.attributes.get_int("transA", 0))
    if x is None or weight is None or not weight.is_initializer() or given != (1.0, 0):
        return None
    shape = static_shape(weight)
    if shape is None or node.attributes.get_int("transB", 0) != 1:
        return None
    return _Product(node, x, weight, (shape[0], shape[1]))


class StoredWeights:
    """Replaces MatMul with a transposed weight by com.microsoft::FusedMatMul, which transposes while it packs.

    So too a Gemm that does the same for rows without a batch, as the head of a prompt's last token is exported: ONNX
    Runtime's sessions share packed weights among operators of one type only.
    """

    name: ClassVar[str] = "stored_weights"

    def applies(self, dialect: Dialect, dtype: DType) -> bool:
        return dialect.stored_weights

    def run(self, model: ir.Model, dialect: Dialect, dtype: DType) -> int:
        found = _float_products(model)
        for node, x, weight, _ in found:
            assert isinstance(node.graph, ir.Graph)
            writer = NodeWriter(node.graph, node, "stored")
            writer.replace(writer.op("FusedMatMul", x, weight, domain=MICROSOFT, like=node.outputs[0], transB=1))
            model.opset_imports[MICROSOFT] = 1
        return len(found)

    def ensures(self, model: ir.Model, dialect: Dialect, dtype: DType) -> Sequence[str]:
        return [f"{label_of(one.node)} packs a copy of {one.weight.name}" for one in _float_products(model)]


def _float_products(model: ir.Model) -> list[_Product]:
    """Those in branches as well, which use the weights of the whole graph."""
    candidates = (_product(node) or _stored_gemm(node) for node in model.graph.all_nodes())
    return [found for found in candidates if found is not None]


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
        found = list(_quantizable(model.graph, dtype))
        rounded: dict[ir.Value, Sequence[ir.Value]] = {}
        for product in found:
            if dtype == "int8":
                _rewrite_int8(model.graph, product, rounded)
            else:
                _rewrite_int4(model.graph, product)
                model.opset_imports[MICROSOFT] = 1
        return len(found)

    def ensures(self, model: ir.Model, dialect: Dialect, dtype: DType) -> Sequence[str]:
        return [f"{label_of(one.node)} multiplies by a float32 weight" for one in _quantizable(model.graph, dtype)]


def quantizable_weights(model: ir.Model, dtype: DType) -> frozenset[str]:
    """Names of the weights that `QuantizeWeights` would replace in a graph."""
    return frozenset(str(product.weight.name) for product in _quantizable(model.graph, dtype))


def _quantizable(graph: ir.Graph, dtype: DType) -> Iterator[_Product]:
    island = float32_island(graph)
    for node in list(graph):
        product = None if node in island else _product(node)
        if product is None or product.weight.dtype != FLOAT or _is_head(node):
            continue
        if min(product.sizes) >= SMALLEST and not (dtype == "int8" and _is_gated(product.x)):
            yield product


def _is_head(node: ir.Node) -> bool:
    """Whether a product is an output of the graph, directly or through a change of shape."""
    value = node.outputs[0]
    while not value.is_graph_output():
        user = only_reader(value)
        if user is None or not is_standard(user, *VIEWS):
            return False
        value = user.outputs[0]
    return True


def _is_gated(x: ir.Value) -> bool:
    """Whether a value is the product of two computed ones."""
    while (view := made_by(x, *VIEWS)) is not None and view.inputs[0] is not None:
        x = view.inputs[0]
    product = made_by(x, "Mul")
    return product is not None and all(value is not None and value.producer() is not None for value in product.inputs)


def _rewrite_int8(graph: ir.Graph, product: _Product, rounded: dict[ir.Value, Sequence[ir.Value]]) -> None:
    node, x, weight, sizes = product
    writer = NodeWriter(graph, node, "int8")
    if x not in rounded:
        rounded[x] = writer.ops("DynamicQuantizeLinear", 3, x)
    x_int, x_scale, x_zero = rounded[x]
    w_int, w_scale = _weights(graph, weight, sizes, "int8")
    summed = writer.op("MatMulInteger", x_int, w_int, x_zero)
    scale = writer.op("Mul", x_scale, w_scale)
    writer.replace(writer.op("Mul", writer.op("Cast", summed, to=FLOAT), scale))


def _rewrite_int4(graph: ir.Graph, product: _Product) -> None:
    node, x, weight, (N, K) = product
    writer = NodeWriter(graph, node, "int4")
    # Level 4 allows the kernel to round activations to 8 bits, block by block; other levels are many times slower.
    attributes = {"K": K, "N": N, "bits": 4, "block_size": BLOCK, "accuracy_level": 4}
    inputs = [x, *_weights(graph, weight, (N, K), "int4")]
    writer.replace(writer.op("MatMulNBits", *inputs, domain=MICROSOFT, like=node.outputs[0], **attributes))


def _weights(graph: ir.Graph, weight: ir.Value, sizes: tuple[int, int], dtype: DType) -> list[ir.Value]:
    """The initializers that replace the weight; they get their values from the weights file of this dtype."""
    made = []
    for name, (kind, shape) in quantized_tensors(str(weight.name), sizes, dtype).items():
        if name not in graph.initializers:
            tensor_type = ir.TensorType(ir.DataType[ONNX_TYPES[kind]])
            graph.initializers.add(ir.Value(name=name, type=tensor_type, shape=ir.Shape(shape)))
        made.append(graph.initializers[name])
    return made

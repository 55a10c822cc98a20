"""Multiplies by float weights as they are stored, without a transposed copy.

PyTorch stores a linear layer's weight as (out, in), and ONNX MatMul wants (in, out), so an export transposes every
weight, and a runtime computes the transposed copies while loading: the whole model is in memory twice. ONNX Runtime's
FusedMatMul reads a weight as it is stored, so the weight stays in the file that all buckets map.

Shape legend: K the summed dimension, N columns of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import onnx_ir as ir

from mod_export.graph.nodes import NodeWriter, graph_around, is_standard, label_of, made_by, static_shape
from mod_export.types import DType, TargetLimits

MICROSOFT = "com.microsoft"


class Product(NamedTuple):
    """x (..., K) times the transpose of a weight (N, K)."""

    node: ir.Node
    x: ir.Value
    weight: ir.Value
    sizes: tuple[int, int]


def product_of(node: ir.Node) -> Product | None:
    """The product that a node computes; None if it computes no product with a transposed weight."""
    if not is_standard(node, "MatMul"):
        return _stored_gemm(node)
    x, right = node.inputs
    transpose = made_by(right, "Transpose")
    if x is None or transpose is None:
        return None
    weight, shape = transpose.inputs[0], static_shape(right)
    # (0, 1), the permutation that changes nothing, is excluded; no exporter writes it.
    swapped = list(transpose.attributes.get_ints("perm", [1, 0])) == [1, 0]
    if weight is None or not weight.is_initializer() or shape is None or len(shape) != 2 or not swapped:
        return None
    return Product(node, x, weight, (shape[1], shape[0]))


def _stored_gemm(node: ir.Node) -> Product | None:
    """The product of rows and a stored weight that a Gemm without a bias computes; None for any other node."""
    if not is_standard(node, "Gemm") or any(value is not None for value in node.inputs[2:]):
        return None
    x, weight = node.inputs[:2]
    attributes = (node.attributes.get_float("alpha", 1.0), node.attributes.get_int("transA", 0))
    if x is None or weight is None or not weight.is_initializer() or attributes != (1.0, 0):
        return None
    shape = static_shape(weight)
    if shape is None or node.attributes.get_int("transB", 0) != 1:
        return None
    return Product(node, x, weight, (shape[0], shape[1]))


class StoredWeights:
    """Replaces MatMul with a transposed weight by com.microsoft::FusedMatMul, which transposes while it packs.

    It also replaces a Gemm that does the same for rows without a batch, such as the head of a prompt's last token,
    because ONNX Runtime's sessions share packed weights only among operators of one type.
    """

    name: ClassVar[str] = "stored_weights"

    def applies(self, limits: TargetLimits, dtype: DType) -> bool:
        return limits.stored_weights

    def run(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> int:
        products = _float_products(model)
        for node, x, weight, _ in products:
            writer = NodeWriter(graph_around(node), node, "stored")
            writer.replace(writer.op("FusedMatMul", x, weight, domain=MICROSOFT, like=node.outputs[0], transB=1))
            model.opset_imports[MICROSOFT] = 1
        return len(products)

    def ensures(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> Sequence[str]:
        return [f"{label_of(product.node)} packs a copy of {product.weight.name}" for product in _float_products(model)]


def _float_products(model: ir.Model) -> list[Product]:
    """The products with transposed weights, also in branches, which use the weights of the whole graph."""
    return [product for product in map(product_of, model.graph.all_nodes()) if product is not None]

"""Products that read weights as they are stored, (N, K), instead of a transposed copy of each.

PyTorch stores a linear layer's weight as (out, in), and ONNX MatMul wants (in, out), so an export transposes every
weight, and a runtime computes the transposed copies while loading: the whole model once more in memory. ONNX Runtime's
FusedMatMul takes a weight as it is stored, so the weight stays in the file that all buckets map.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import onnx_ir as ir

from mod_export.export.nodes import NodeWriter, is_standard, label_of, static_shape
from mod_export.types import Dialect, DType

__all__ = ["StoredWeights", "transposed_weight"]

MICROSOFT = "com.microsoft"


class StoredWeights:
    """Replaces MatMul with a transposed weight by com.microsoft::FusedMatMul, which transposes while it packs."""

    name: ClassVar[str] = "stored_weights"

    def applies(self, dialect: Dialect, dtype: DType) -> bool:
        return dialect.stored_weights

    def run(self, model: ir.Model, dialect: Dialect, dtype: DType) -> int:
        found = list(_products(model.graph))
        for node, weight in found:
            y = node.outputs[0]
            assert isinstance(node.graph, ir.Graph)
            writer = NodeWriter(node.graph, node, "stored")
            assert y.dtype is not None
            writer.replace(
                writer.op("FusedMatMul", [node.inputs[0], weight], y.dtype, y.shape, {"transB": 1}, domain=MICROSOFT)
            )
        if found:
            model.opset_imports[MICROSOFT] = 1
        return len(found)

    def ensures(self, model: ir.Model, dialect: Dialect, dtype: DType) -> Sequence[str]:
        return [f"{label_of(node)} multiplies by a copy of {weight.name}" for node, weight in _products(model.graph)]


def transposed_weight(node: ir.Node) -> ir.Value | None:
    """The weight (N, K) of a MatMul by its transpose; None for any other node."""
    right = node.inputs[1] if is_standard(node, "MatMul") else None
    transpose = right.producer() if right is not None else None
    if right is None or transpose is None or not is_standard(transpose, "Transpose"):
        return None
    weight, shape = transpose.inputs[0], static_shape(right)
    # (0, 1), the permutation that changes nothing, is excluded; no exporter writes it.
    swapped = list(transpose.attributes.get_ints("perm", [1, 0])) == [1, 0]
    if weight is None or not weight.is_initializer() or shape is None or len(shape) != 2 or not swapped:
        return None
    return weight


def _products(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Value]]:
    for node in graph.all_nodes():  # Including branches, which use the weights of the whole graph.
        weight = transposed_weight(node)
        if weight is not None:
            yield node, weight

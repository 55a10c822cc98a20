"""Turns a full sort, of which the first k are kept, into one TopK.

The reference selects by a stable descending sort, the only selection in PyTorch that specifies the order of ties.
Exported unchanged, it would sort all S scores. ONNX TopK specifies the same order of ties (the lower index first), so
TopK(k = S) followed by a slice of the first k indices equals TopK(k).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from mod_export.export.nodes import NodeWriter, constant_array, is_standard, label_of
from mod_export.types import Dialect, DType

__all__ = ["SelectTopk"]


class SelectTopk:
    """Reduces k of a TopK over a whole axis to the k that is kept."""

    name: ClassVar[str] = "select_topk"

    def applies(self, dialect: Dialect, dtype: DType) -> bool:
        return True

    def run(self, model: ir.Model, dialect: Dialect, dtype: DType) -> int:
        return sum(_narrow(model, node) for node in list(model.graph) if _is_full_sort(node))

    def ensures(self, model: ir.Model, dialect: Dialect, dtype: DType) -> Sequence[str]:
        return [
            f"{label_of(node)} still sorts a whole axis of which {kept[1]} are kept"
            for node in model.graph
            if _is_full_sort(node) and (kept := _kept(node)) is not None
        ]


def _axis(node: ir.Node) -> int:
    """The axis counted from the end, so that it compares across ranks."""
    axis = node.attributes.get_int("axis", -1)
    shape = node.inputs[0].shape if node.inputs[0] is not None else None
    return axis - len(shape) if axis >= 0 and shape is not None else axis


def _constant(value: ir.Value | None) -> list[int] | None:
    array = constant_array(value)
    return None if array is None else [int(item) for item in array.reshape(-1)]


def _is_full_sort(node: ir.Node) -> bool:
    if not is_standard(node, "TopK") or not node.attributes.get_int("sorted", 1):
        return False
    scores, k = node.inputs[0], _constant(node.inputs[1])
    if scores is None or scores.shape is None or k is None:
        return False
    size = scores.shape[_axis(node)]
    return isinstance(size, int) and k == [size]


def _kept(node: ir.Node) -> tuple[ir.Node, int] | None:
    """The only use of the sort: a slice [0:k] of its indices along the sorted axis, with k below the axis' size."""
    values, indices = node.outputs
    uses = list(indices.uses())
    if values.uses() or len(uses) != 1 or values.is_graph_output() or indices.is_graph_output():
        return None
    cut = uses[0].node
    if not is_standard(cut, "Slice") or len(cut.inputs) < 4 or indices.shape is None:
        return None
    starts, ends, axes = (_constant(value) for value in cut.inputs[1:4])
    steps = _constant(cut.inputs[4]) if len(cut.inputs) > 4 else [1]
    rank, axis = len(indices.shape), _axis(node)
    if starts != [0] or steps != [1] or ends is None or len(ends) != 1 or axes not in ([axis], [axis + rank]):
        return None
    size = indices.shape[axis]
    return (cut, ends[0]) if isinstance(size, int) and 0 < ends[0] < size else None


def _narrow(model: ir.Model, node: ir.Node) -> int:
    kept = _kept(node)
    if kept is None:
        return 0
    cut, k = kept
    writer = NodeWriter(model.graph, node, "narrow")
    node.replace_input_with(1, writer.constant(f"topk_{k}", np.array([k], np.int64)))
    values, indices = node.outputs
    values.shape = indices.shape = cut.outputs[0].shape
    ir.convenience.replace_all_uses_with(cut.outputs[0], indices, replace_graph_outputs=True)
    model.graph.remove(cut, safe=True)
    return 1

"""Scatters that reduce, as gather, arithmetic and a plain scatter.

`x.scatter_add(...)` and `index_add` write x + update where the update goes. With unique targets that is the same as
reading the old values, adding, and writing the sums back, which every target can do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import onnx_ir as ir

from mod_export.artifacts import Dialect, DType
from mod_export.errors import LimitError
from mod_export.graph.nodes import NodeWriter, is_standard, require_static_shape
from mod_export.graph.places import place_of
from mod_export.graph.positions import has_unique_targets

__all__ = ["PlainScatter", "reduction_of"]

ARITHMETIC = {"add": "Add", "mul": "Mul", "max": "Max", "min": "Min"}
GATHERS = {"ScatterND": "GatherND", "ScatterElements": "GatherElements"}


class PlainScatter:
    """Rewrites scatters with a reduction; each place is written once, because the targets are proven unique.

    Runs before `threshold_selection`, since the proof starts from TopK.
    """

    name: ClassVar[str] = "plain_scatter"

    def applies(self, dialect: Dialect, dtype: DType) -> bool:
        return not dialect.scatter_reduction

    def run(self, model: ir.Model, dialect: Dialect, dtype: DType) -> int:
        """Rewrites every reducing scatter.

        Raises:
            LimitError: a scatter whose targets are not provably unique.
        """
        reducing = [node for node in model.graph if reduction_of(node) != "none"]
        for node in reducing:
            if not has_unique_targets(node):
                raise LimitError(
                    f"{place_of(node)}: {node.op_type} with reduction {reduction_of(node)!r} cannot run on "
                    f"{dialect.name}, and its indices {_name(node)} are not provably unique, so that gather, "
                    f"{ARITHMETIC[reduction_of(node)]} and a plain scatter could give another result; write back with "
                    "index_put(accumulate=False) at the positions of one top-k, or build another target"
                )
        for node in reducing:
            _rewrite(model.graph, node)
        return len(reducing)

    def ensures(self, model: ir.Model, dialect: Dialect, dtype: DType) -> Sequence[str]:
        return [
            f"{place_of(node)} still scatters with reduction {reduction_of(node)!r}"
            for node in model.graph
            if reduction_of(node) != "none"
        ]


def reduction_of(node: ir.Node) -> str:
    """The reduction of a scatter; `none` for plain scatters and for all other nodes."""
    return node.attributes.get_string("reduction", "none") if is_standard(node, *GATHERS) else "none"


def _name(node: ir.Node) -> str:
    value = node.inputs[1]
    return "of no name" if value is None else repr(value.name)


def _rewrite(graph: ir.Graph, node: ir.Node) -> None:
    data, indices, updates = node.inputs[:3]
    assert data is not None
    assert data.dtype is not None
    shape = require_static_shape(updates, node)
    writer = NodeWriter(graph, node, "plain")
    axis = node.attributes.get("axis")
    attributes = {} if axis is None else {"axis": axis.as_int()}
    held = writer.op(GATHERS[node.op_type], [data, indices], data.dtype, shape, attributes)
    node.replace_input_with(2, writer.op(ARITHMETIC[reduction_of(node)], [held, updates], data.dtype, shape))
    del node.attributes["reduction"]

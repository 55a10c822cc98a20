"""What passes and checks ask of a graph, and how passes put nodes into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from mod_export.errors import GraphError
from mod_export.graph.places import place_of

__all__ = ["NodeWriter", "constant_array", "is_standard", "late_zero", "require_static_shape", "static_shape"]


def is_standard(node: ir.Node, *op_types: str) -> bool:
    """Whether the node is one of these standard ONNX operators."""
    return node.domain in ("", "ai.onnx") and node.op_type in op_types


def constant_array(value: ir.Value | None) -> np.ndarray | None:
    """The value of a constant or initializer; None for anything computed, absent or without data."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def static_shape(value: ir.Value | None) -> tuple[int, ...] | None:
    """The shape, or None where it or one of its dimensions is unknown."""
    if value is None or value.shape is None or not value.shape.is_static():
        return None
    return value.shape.numpy()


def require_static_shape(value: ir.Value | None, node: ir.Node) -> tuple[int, ...]:
    """The shape of an input or output of `node`.

    Raises:
        GraphError: it is unknown or dynamic.
    """
    shape = static_shape(value)
    if shape is None:
        what = "an absent input" if value is None else f"{value.name} of shape {value.shape}"
        raise GraphError(
            f"{place_of(node)}: {node.op_type} has {what}, expected a static shape; export with fixed sizes and run "
            "shape inference"
        )
    return shape


class NodeWriter:
    """Puts typed nodes before `anchor`, carrying its metadata, so that messages about them still name the layer."""

    def __init__(self, graph: ir.Graph, anchor: ir.Node, purpose: str) -> None:
        self._graph = graph
        self._anchor = anchor
        self._prefix = f"{anchor.name or anchor.op_type}/{purpose}"
        self._count = 0

    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        dtype: ir.DataType,
        shape: Sequence[int] | ir.Shape | None,
        attributes: Mapping[str, Any] | None = None,
        *,
        domain: str = "",
    ) -> ir.Value:
        """One node with one output of this dtype and shape."""
        return self.ops(op_type, inputs, [(dtype, shape)], attributes, domain=domain)[0]

    def ops(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[tuple[ir.DataType, Sequence[int] | ir.Shape | None]],
        attributes: Mapping[str, Any] | None = None,
        *,
        domain: str = "",
    ) -> Sequence[ir.Value]:
        """One node with several outputs, each (dtype, shape)."""
        name = f"{self._prefix}_{op_type}_{self._count}"
        self._count += 1
        values = [
            ir.Value(name=f"{name}_{i}", type=ir.TensorType(dtype), shape=None if shape is None else ir.Shape(shape))
            for i, (dtype, shape) in enumerate(outputs)
        ]
        node = ir.Node(
            domain, op_type, inputs, ir.convenience.convert_attributes(attributes or {}), outputs=values, name=name
        )
        node.metadata_props.update(self._anchor.metadata_props)
        self._graph.insert_before(self._anchor, node)
        return values

    def replace(self, value: ir.Value) -> None:
        """Puts a value in the place of the anchor's only output, under the same name, and removes the anchor."""
        old = self._anchor.outputs[0]
        name = old.name
        ir.convenience.replace_all_uses_with(old, value, replace_graph_outputs=True)
        self._graph.remove(self._anchor, safe=True)
        value.name = name

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        """An initializer, shared by all places that ask for this name; `name` must say all of its content."""
        name = f"constant/{name}"  # A slash, because no exporter's names have one.
        known = self._graph.initializers.get(name)
        if known is not None:
            held = constant_array(known)
            assert held is not None, name
            assert held.dtype == array.dtype, name
            assert np.array_equal(held, array), name
            return known
        tensor = ir.tensor(array, name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
        self._graph.register_initializer(value)
        return value


def late_zero(writer: NodeWriter, value: ir.Value, dtype: ir.DataType, shape: Sequence[int]) -> ir.Value:
    """An integer 0 that is only there after a float value is.

    It is abs(x) < 0 of one number, which is false whatever that is, NaN too, but nothing that a builder looks into.

    Args:
        writer: puts the nodes.
        value: float, of known rank.
        dtype: an integer.
        shape: of the zero, ones only.
    """
    assert value.shape is not None
    assert value.dtype is not None
    rank, kind = len(value.shape), value.dtype
    ones = (1,) * rank
    start = writer.constant(f"start_{rank}", np.zeros(rank, np.int64))
    one = writer.op("Slice", [value, start, writer.constant(f"end_{rank}", np.ones(rank, np.int64))], kind, ones)
    zero = writer.constant(f"zero_{kind.name}", np.array(0, kind.numpy()))
    never = writer.op("Less", [writer.op("Abs", [one], kind, ones), zero], ir.DataType.BOOL, ones)
    nought = writer.op("Cast", [never], dtype, ones, {"to": dtype})
    wanted = writer.constant(f"shape_{'x'.join(map(str, shape))}", np.array(shape, np.int64))
    return writer.op("Reshape", [nought, wanted], dtype, shape)

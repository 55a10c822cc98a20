"""Rewrites a scatter with a reduction as gather, arithmetic and a plain scatter.

`x.scatter_add(...)` and `index_add` write x + update at given positions. Where every position occurs once, that equals
reading the old values, adding, and writing the sums back, which every target can do.

The proof that every position occurs once follows the indices back to the selections they come from. TopK gives unique
positions in each row, and that is all a proof can start from: which positions they are is only known when the graph
runs. So every index is held as a constant plus an unknown position, `offset + draw[slot]`, where the slots of one draw
are different numbers in [0, span). Reshaping, concatenating and adding constants keep that form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from mod_export.errors import LimitError
from mod_export.export.nodes import (
    NodeWriter,
    constant_array,
    is_standard,
    label_of,
    require_static_shape,
    static_shape,
)
from mod_export.types import Dialect, DType

__all__ = ["PlainScatter", "has_unique_targets", "reduction_of"]

ARITHMETIC = {"add": "Add", "mul": "Mul", "max": "Max", "min": "Min"}
GATHERS = {"ScatterND": "GatherND", "ScatterElements": "GatherElements"}
CONSTANT = -1
SAME_ORDER = ("Reshape", "Unsqueeze", "Squeeze", "Flatten", "Identity", "Cast")


class PlainScatter:
    """Rewrites scatters with a reduction whose positions are proven to be unique, so each is written once.

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
                    f"{label_of(node)}: {node.op_type} with reduction {reduction_of(node)!r} cannot run on "
                    f"{dialect.name}, and its indices {_name(node)} are not provably unique, so that gather, "
                    f"{ARITHMETIC[reduction_of(node)]} and a plain scatter could give another result; write back with "
                    "index_put(accumulate=False) at the positions of one top-k, or build another target"
                )
        for node in reducing:
            _rewrite(model.graph, node)
        return len(reducing)

    def ensures(self, model: ir.Model, dialect: Dialect, dtype: DType) -> Sequence[str]:
        return [
            f"{label_of(node)} still scatters with reduction {reduction_of(node)!r}"
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
    old = writer.op(GATHERS[node.op_type], [data, indices], data.dtype, shape, attributes)
    node.replace_input_with(2, writer.op(ARITHMETIC[reduction_of(node)], [old, updates], data.dtype, shape))
    del node.attributes["reduction"]


@dataclass(frozen=True, slots=True)
class _Index:
    """int64 arrays of the value's shape. `draw` is CONSTANT where the index is `offset` alone; `span` is then 1."""

    draw: np.ndarray
    slot: np.ndarray
    offset: np.ndarray
    span: np.ndarray

    def each(self, change: Callable[[np.ndarray], np.ndarray]) -> _Index:
        return _Index(change(self.draw), change(self.slot), change(self.offset), change(self.span))


def has_unique_targets(node: ir.Node) -> bool:
    """Whether no two updates of a ScatterND or ScatterElements can hit the same place, whatever the inputs are.

    False also where that cannot be proven.
    """
    found = _Tracer().index(node.inputs[1])
    if found is None:
        return False
    if node.op_type == "ScatterND":
        return _distinct(found.each(lambda a: a.reshape(-1, a.shape[-1])))
    axis = node.attributes.get_int("axis", 0)
    # Along a broadcast axis every place repeats the first, so one of them stands for all.
    strides = zip(*(a.strides for a in (found.draw, found.slot, found.offset, found.span)), strict=True)
    once = tuple(
        slice(0, 1) if not any(stride) and i != axis % found.draw.ndim else slice(None)
        for i, stride in enumerate(strides)
    )
    lines = found.each(lambda a: np.moveaxis(a[once], axis, -1).reshape(-1, a.shape[axis]))
    # mypy infers no type of a lambda with a default.
    return all(_distinct(lines.each(lambda a, i=i: a[i, :, None])) for i in range(len(lines.draw)))  # type: ignore[misc]  # mypy infers no lambda with a default.


class _Tracer:
    """Follows indices upwards; numbers the draws it meets."""

    def __init__(self) -> None:
        self._known: dict[ir.Value, _Index | None] = {}
        self._draws = 0

    def index(self, value: ir.Value | None) -> _Index | None:
        """What is known of an integer value; None if nothing."""
        if value is None:
            return None
        if value not in self._known:
            self._known[value] = self._trace(value)
        return self._known[value]

    def _trace(self, value: ir.Value) -> _Index | None:
        array, shape, node = constant_array(value), static_shape(value), value.producer()
        if array is not None:
            return _constant(array) if np.issubdtype(array.dtype, np.integer) else None
        if node is None or shape is None:
            return None
        if is_standard(node, "TopK"):
            return self._selected(node, value, shape)
        inputs = [self.index(item) for item in node.inputs[:1]]
        if is_standard(node, "Add", "Concat"):
            inputs = [self.index(item) for item in node.inputs]
        if None in inputs:
            return None
        return _follow(node, [item for item in inputs if item is not None], shape)

    def _selected(self, node: ir.Node, value: ir.Value, shape: tuple[int, ...]) -> _Index | None:
        """TopK: its indices are a new draw for each row, its values a part of the draw that they are taken from."""
        axis = node.attributes.get_int("axis", -1) % len(shape)
        source = static_shape(node.inputs[0])
        if source is None:
            return None
        offset = np.zeros(shape, np.int64)
        span = np.full(shape, source[axis], np.int64)
        if value is node.outputs[0]:
            taken = self.index(node.inputs[0])
            if taken is None or not _one_draw_each(taken, axis):
                return None
            first = taken.each(lambda a: np.broadcast_to(a.take([0], axis), shape))
            offset, span = first.offset, first.span
        rows = np.array([1 if i == axis else size for i, size in enumerate(shape)])
        draw = self._draws + np.arange(rows.prod(), dtype=np.int64).reshape(rows)
        self._draws += int(rows.prod())
        slot = np.arange(shape[axis], dtype=np.int64).reshape([-1 if i == axis else 1 for i in range(len(shape))])
        return _Index(np.broadcast_to(draw, shape), np.broadcast_to(slot, shape), offset, span)


def _constant(array: np.ndarray) -> _Index:
    offset = array.astype(np.int64)
    return _Index(np.full_like(offset, CONSTANT), np.zeros_like(offset), offset, np.ones_like(offset))


def _one_draw_each(index: _Index, axis: int) -> bool:
    """Whether each line along the axis holds different slots of one draw at one offset."""
    slots = np.sort(index.slot, axis=axis)
    same = all((a == a.take([0], axis)).all() for a in (index.draw, index.offset))
    return bool(same and (index.draw != CONSTANT).all() and (np.diff(slots, axis=axis) != 0).all())


def _follow(node: ir.Node, inputs: list[_Index], shape: tuple[int, ...]) -> _Index | None:
    first = inputs[0]
    if is_standard(node, *SAME_ORDER):
        return first.each(lambda a: a.reshape(shape))
    if is_standard(node, "Expand"):
        return first.each(lambda a: np.broadcast_to(a, shape))
    if is_standard(node, "Transpose"):
        perm = node.attributes.get_ints("perm", tuple(reversed(range(len(shape)))))
        return first.each(lambda a: a.transpose(perm))
    if is_standard(node, "Concat"):
        axis = node.attributes.get_int("axis")
        parts = zip(*((i.draw, i.slot, i.offset, i.span) for i in inputs), strict=True)
        return _Index(*(np.concatenate(arrays, axis) for arrays in parts))
    return _sum(first, inputs[1], shape) if is_standard(node, "Add") else None


def _sum(a: _Index, b: _Index, shape: tuple[int, ...]) -> _Index | None:
    """The sum of two, at most one of which is unknown at each place."""
    a, b = (item.each(lambda array: np.broadcast_to(array, shape)) for item in (a, b))
    if ((a.draw != CONSTANT) & (b.draw != CONSTANT)).any():
        return None
    known = a.draw == CONSTANT
    draw, slot, span = (np.where(known, y, x) for x, y in ((a.draw, b.draw), (a.slot, b.slot), (a.span, b.span)))
    return _Index(draw, slot, a.offset + b.offset, span)


def _distinct(tuples: _Index) -> bool:
    """Whether the N index tuples (N, q) are pairwise different.

    Tuples differ if in some column their ranges do not meet. Those whose ranges meet in every column differ if in one
    of the columns they are different slots of the same draw at the same offset.
    """
    if (tuples.offset < 0).any():
        return False  # Negative indices count from the end and may meet any other.
    ranges = np.stack([_range_number(tuples.offset[:, c], tuples.span[:, c]) for c in range(tuples.draw.shape[1])], 1)
    _, group = np.unique(ranges, axis=0, return_inverse=True)
    group = group.reshape(-1)
    size = np.bincount(group)
    proven = size == 1
    for c in range(tuples.draw.shape[1]):
        draw, slot, offset = tuples.draw[:, c], tuples.slot[:, c], tuples.offset[:, c]
        draws = np.unique(np.stack([group, draw, offset], 1), axis=0)
        slots = np.unique(np.stack([group, slot], 1), axis=0)
        one_draw = np.bincount(draws[:, 0], minlength=len(size)) == 1
        unknown = np.bincount(group, draw == CONSTANT, minlength=len(size)) == 0
        proven |= one_draw & unknown & (np.bincount(slots[:, 0], minlength=len(size)) == size)
    return bool(proven.all())


def _range_number(offset: np.ndarray, span: np.ndarray) -> np.ndarray:
    """Numbers the clusters of overlapping ranges [offset, offset + span)."""
    order = np.argsort(offset, kind="stable")
    end = np.maximum.accumulate((offset + span)[order])
    starts_new = np.concatenate([[False], offset[order][1:] >= end[:-1]])
    number = np.empty(len(offset), np.int64)
    number[order] = np.cumsum(starts_new)
    return number

"""Rewrites a scatter with a reduction as gather, arithmetic and a plain scatter.

`x.scatter_add(...)` and `index_add` write x + update at given positions. If every position occurs once, that equals
reading the old values, adding, and writing the sums back, which every target can do.

The proof that every position occurs once follows the indices back to the constants and selections that they come from.
What a selection returns is only known when the graph runs, but a TopK is known to return unique positions in each row.
So every index is represented as a constant plus an unknown position, `offset + draw[slot]`. A draw is one unknown
selection, whose slots hold different numbers in [0, span). Reshaping, slicing, concatenating and adding constants keep
that form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from mod_export.errors import LimitError
from mod_export.graph.nodes import NodeWriter, constant_array, graph_around, is_standard, label_of, static_shape
from mod_export.types import DType, TargetLimits

ARITHMETIC = {"add": "Add", "mul": "Mul", "max": "Max", "min": "Min"}
GATHERS = {"ScatterND": "GatherND", "ScatterElements": "GatherElements"}
CONSTANT = -1
INDEX = np.dtype([(name, np.int64) for name in ("draw", "slot", "offset", "span")])
"""The dtype of an index. `draw` is CONSTANT if the index is `offset` alone; `span` is then 1."""
SAME_ORDER = ("Reshape", "Unsqueeze", "Squeeze", "Flatten", "Identity", "Cast")


class PlainScatter:
    """Rewrites scatters with a reduction whose positions are proven to be unique, so that each is written once.

    It runs before `threshold_selection`, which replaces a TopK that the proof needs.
    """

    name: ClassVar[str] = "plain_scatter"

    def applies(self, limits: TargetLimits, dtype: DType) -> bool:
        return not limits.scatter_reduction

    def run(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> int:
        """Rewrites every reducing scatter.

        Raises:
            LimitError: the targets of a scatter are not provably unique.
        """
        reducing = _reducing(model)
        for node in reducing:
            if not has_unique_targets(node):
                indices = node.inputs[1]
                raise LimitError(
                    f"{label_of(node)}: {node.op_type} with reduction {_reduction(node)!r} cannot run on "
                    f"{limits.name}, and its indices {indices and indices.name!r} are not provably unique, so "
                    f"that gather, {ARITHMETIC[_reduction(node)]} and a plain scatter could give another result; write "
                    "back with index_put(accumulate=False) at the positions of one top-k, or build another target"
                )
        for node in reducing:
            _rewrite(node)
        return len(reducing)

    def ensures(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> Sequence[str]:
        return [f"{label_of(node)} still scatters with reduction {_reduction(node)!r}" for node in _reducing(model)]


def _reducing(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph.all_nodes() if is_standard(node, *GATHERS) and _reduction(node) != "none"]


def _reduction(scatter: ir.Node) -> str:
    return scatter.attributes.get_string("reduction", "none")


def _rewrite(node: ir.Node) -> None:
    data, indices, updates = node.inputs[:3]
    writer = NodeWriter(graph_around(node), node, "plain")
    axis = {name: value.value for name, value in node.attributes.items() if name == "axis"}
    old = writer.op(GATHERS[node.op_type], data, indices, **axis)
    node.replace_input_with(2, writer.op(ARITHMETIC[_reduction(node)], old, updates))
    del node.attributes["reduction"]


def has_unique_targets(node: ir.Node) -> bool:
    """Whether no two updates of a ScatterND or ScatterElements can hit the same element, for any inputs.

    False if that cannot be proven.
    """
    index = _Tracer().index(node.inputs[1])
    if index is None or not index.size:
        return index is not None
    if node.op_type == "ScatterND":
        return _distinct(index.reshape(-1, index.shape[-1]))
    axis = node.attributes.get_int("axis", 0)
    # Along a broadcast axis every element repeats the first, so checking the first is enough.
    once = tuple(
        slice(0, 1) if not stride and i != axis % index.ndim else slice(None) for i, stride in enumerate(index.strides)
    )
    return _distinct_lines(index[once], axis)


class _Tracer:
    """Follows indices to their sources, and numbers the draws. Indices are INDEX arrays in the shape of their value."""

    def __init__(self) -> None:
        self._known: dict[ir.Value, np.ndarray | None] = {}
        self._draws = 0

    def index(self, value: ir.Value | None) -> np.ndarray | None:
        """Returns the indices in an integer value; None if nothing is known about them."""
        if value is None:
            return None
        if value not in self._known:
            self._known[value] = self._trace(value)
        return self._known[value]

    def _trace(self, value: ir.Value) -> np.ndarray | None:
        array, shape, node = constant_array(value), static_shape(value), value.producer()
        if array is not None:
            return _index(array.shape, offset=array) if np.issubdtype(array.dtype, np.integer) else None
        if node is None or shape is None:
            return None
        if is_standard(node, "TopK"):
            return self._selected(node, value, shape)
        if is_standard(node, "GatherElements"):
            return self._looked_up(node, shape)
        read = node.inputs if is_standard(node, "Add", "Concat") else node.inputs[:1]
        inputs = [index for item in read if (index := self.index(item)) is not None]
        return _follow(node, inputs, shape) if len(inputs) == len(read) else None

    def _selected(self, node: ir.Node, value: ir.Value, shape: tuple[int, ...]) -> np.ndarray | None:
        """Returns a new draw for each row of a TopK. Its indices are positions on the axis, its values are inputs."""
        axis = node.attributes.get_int("axis", -1) % len(shape)
        source = static_shape(node.inputs[0])
        if source is None:
            return None
        offset, span = np.array(0), np.array(source[axis])
        if value is node.outputs[0]:
            sorted_index = self.index(node.inputs[0])
            if sorted_index is None or not _distinct_lines(sorted_index, axis):
                return None
            offset, span = _range_of_lines(sorted_index, axis)
        return self._drawn(shape, axis, offset, span)

    def _looked_up(self, node: ir.Node, shape: tuple[int, ...]) -> np.ndarray | None:
        """Returns a new draw for each line of a GatherElements if no line of its table or indices repeats a number."""
        axis = node.attributes.get_int("axis", 0) % len(shape)
        table, index = self.index(node.inputs[0]), self.index(node.inputs[1])
        if table is None or index is None or not _distinct_lines(table, axis) or not _distinct_lines(index, axis):
            return None
        offset, span = _range_of_lines(table, axis)
        slices = [slice(None) if i == axis else slice(size) for i, size in enumerate(shape)]
        return self._drawn(shape, axis, offset[tuple(slices)], span[tuple(slices)])

    def _drawn(self, shape: tuple[int, ...], axis: int, offset: np.ndarray, span: np.ndarray) -> np.ndarray:
        """Returns a new draw for each line along the axis."""
        rows = [1 if i == axis else size for i, size in enumerate(shape)]
        draw = self._draws + np.arange(math.prod(rows)).reshape(rows)
        self._draws += math.prod(rows)
        slot = np.arange(shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(shape))])
        return _index(shape, draw=draw, slot=slot, offset=offset, span=span)


def _index(shape: tuple[int, ...], **fields: np.ndarray) -> np.ndarray:
    result = np.zeros(shape, INDEX)
    result["draw"], result["span"] = CONSTANT, 1
    for name, field in fields.items():
        result[name] = field
    return result


def _distinct_lines(index: np.ndarray, axis: int) -> bool:
    """Whether the indices of each line along the axis differ from each other."""
    lines = np.moveaxis(index, axis, -1).reshape(-1, index.shape[axis])
    return all(_distinct(line[:, None]) for line in lines)


def _range_of_lines(index: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (offset, span) of a range that contains every index of a line, with one element along the axis."""
    first = index["offset"].min(axis, keepdims=True)
    return first, (index["offset"] + index["span"]).max(axis, keepdims=True) - first


def _follow(node: ir.Node, inputs: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray | None:
    first = inputs[0]
    if is_standard(node, *SAME_ORDER):
        return first.reshape(shape)
    if is_standard(node, "Expand"):
        return np.broadcast_to(first, shape)
    if is_standard(node, "Tile"):
        # Copies along a dimension of one element are those of Expand, so only one of them is checked later.
        copies = all(size in (1, new) for size, new in zip(first.shape, shape, strict=True))
        repeats = constant_array(node.inputs[1])
        return np.broadcast_to(first, shape) if copies else None if repeats is None else np.tile(first, repeats)
    if is_standard(node, "Transpose"):
        return first.transpose(node.attributes.get_ints("perm", tuple(reversed(range(len(shape))))))
    if is_standard(node, "Concat"):
        return np.concatenate(inputs, node.attributes.get_int("axis"))
    if is_standard(node, "Slice"):
        return _sliced(node, first, shape)
    if is_standard(node, "Gather"):
        part = constant_array(node.inputs[1])
        return None if part is None else first.take(part, node.attributes.get_int("axis", 0)).reshape(shape)
    return _sum(first, inputs[1], shape) if is_standard(node, "Add") else None


def _sliced(node: ir.Node, index: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    """Returns a slice of indices, such as the last k of a whole sort. With positive steps, bounds are as in Python."""
    bounds = [None if value is None else constant_array(value) for value in node.inputs[1:]]
    if len(bounds) < 2 or any(array is None for array in bounds):
        return None
    starts, ends, *axes_and_steps = (array.tolist() for array in bounds if array is not None)
    axes = axes_and_steps[0] if axes_and_steps else range(len(starts))
    steps = axes_and_steps[1] if len(axes_and_steps) > 1 else [1] * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps) or min(steps, default=1) < 1:
        return None
    parts = dict(zip(axes, map(slice, starts, ends, steps), strict=True))
    result = index[tuple(parts.get(axis, parts.get(axis - index.ndim, slice(None))) for axis in range(index.ndim))]
    return result if result.shape == shape else None


def _sum(a: np.ndarray, b: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    """Returns the sum of two indices; None if both are unknown at some element."""
    a, b = (np.broadcast_to(item, shape) for item in (a, b))
    if ((a["draw"] != CONSTANT) & (b["draw"] != CONSTANT)).any():
        return None
    total = np.where(a["draw"] == CONSTANT, b, a)
    total["offset"] = a["offset"] + b["offset"]
    return total


def _distinct(tuples: np.ndarray) -> bool:
    """Whether the N index tuples (N, q) are pairwise different.

    Tuples differ if their ranges do not overlap in some column. Tuples whose ranges overlap in every column differ if
    they are different slots of the same draw at the same offset in one of the columns.
    """
    if (tuples["offset"] < 0).any():
        return False  # Negative indices count from the end and may meet any other.
    columns = list(tuples.T)
    ranges = np.stack([_range_number(column["offset"], column["span"]) for column in columns], 1)
    _, group = np.unique(ranges, axis=0, return_inverse=True)
    group = group.reshape(-1)
    size = np.bincount(group)
    proven = size == 1
    for column in columns:
        draws = np.unique(np.stack([group, column["draw"], column["offset"]], 1), axis=0)
        slots = np.unique(np.stack([group, column["slot"]], 1), axis=0)
        one_draw = np.bincount(draws[:, 0], minlength=len(size)) == 1
        unknown = np.bincount(group, column["draw"] == CONSTANT, minlength=len(size)) == 0
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

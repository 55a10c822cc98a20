"""Selects the k best tokens by one TopK of k if a target can take it, and otherwise by a threshold or by rounds.

The reference selects by a stable descending sort, the only selection in PyTorch that specifies the order of ties.
Exported unchanged, it would sort all S scores. ONNX TopK specifies the same order of ties (the lower index first), so
TopK(k = S) followed by a slice of the first k indices equals TopK(k).

With ties to the earlier token, the k largest scores are all scores above tau, the k-th largest value, and as many of
the first scores equal to tau as are still missing. tau is a value, not a position, so several rounds of TopK can find
it, even without a specified order of ties: each round selects at most the limit and hides what it selected.

If the order of the scores matters, as for a model whose selected tokens stay in that order, the selection is the
concatenation of all rounds.

Shape legend: S tokens in a row, k selected, `...` any leading dimensions (the batch).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import ml_dtypes
import numpy as np
import onnx_ir as ir

from mod_export.graph.nodes import (
    NodeWriter,
    constant_array,
    is_standard,
    is_used,
    label_of,
    made_by,
    only_reader,
    require_static_shape,
    substitute,
)
from mod_export.types import DType, TargetLimits

FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE})
INT32, INT64 = ir.DataType.INT32, ir.DataType.INT64


class SelectTopk:
    """Reduces the k of a TopK over a whole axis to the number of indices that are used."""

    name: ClassVar[str] = "select_topk"

    def applies(self, limits: TargetLimits, dtype: DType) -> bool:
        return True

    def run(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> int:
        sorts = list(_full_sorts(model))
        for sort, cut, k in sorts:
            writer = NodeWriter(model.graph, sort, "narrow")
            sort.replace_input_with(1, writer.constant(np.array([k])))
            kept = cut.outputs[0]
            for value in sort.outputs:
                value.shape = None if kept.shape is None else kept.shape.copy()
            # A graph output has to keep its name.
            name = kept.name if kept.is_graph_output() else sort.outputs[1].name
            ir.convenience.replace_all_uses_with(kept, sort.outputs[1], replace_graph_outputs=True)
            model.graph.remove(cut, safe=True)
            sort.outputs[1].name = name
        return len(sorts)

    def ensures(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> Sequence[str]:
        return [f"{label_of(sort)} still sorts a whole axis of which {k} are kept" for sort, _, k in _full_sorts(model)]


def _full_sorts(model: ir.Model) -> Iterator[tuple[ir.Node, ir.Node, int]]:
    """Yields (sort, slice, k) of each TopK over a whole axis if only a slice [0:k] of its indices is used."""
    for node in model.graph:
        if not is_standard(node, "TopK") or not node.attributes.get_int("sorted", 1) or is_used(node.outputs[0]):
            continue
        cut, axis, rank = only_reader(node.outputs[1]), _axis(node), len(node.outputs[1].shape or ())
        size = node.inputs[0].shape[axis] if node.inputs[0] is not None and node.inputs[0].shape else None
        if cut is None or not is_standard(cut, "Slice") or not isinstance(size, int) or _integers(node, 1) != [size]:
            continue
        starts, ends, axes, steps = (_integers(cut, number) for number in range(1, 5))
        along = axes in ([axis], [axis + rank])
        if starts == [0] and steps in (None, [1]) and along and ends is not None and 0 < ends[0] < size:
            yield node, cut, ends[0]


def _axis(node: ir.Node) -> int:
    """The axis of a TopK counted from the end, so that it compares across ranks."""
    axis = node.attributes.get_int("axis", -1)
    shape = node.inputs[0].shape if node.inputs[0] is not None else None
    return axis - len(shape) if axis >= 0 and shape is not None else axis


def _integers(node: ir.Node, number: int) -> list[int] | None:
    """The numbers of a constant input; None if it is absent or computed."""
    array = constant_array(node.inputs[number]) if number < len(node.inputs) else None
    return None if array is None else [int(item) for item in array.reshape(-1)]


class _Selection(NamedTuple):
    """`best` selects the k largest of the scores (..., S); `ascend` puts their positions into ascending order."""

    best: ir.Node
    ascend: ir.Node
    scores: ir.Value
    shape: tuple[int, ...]
    k: int


class ThresholdSelection:
    """Replaces a selection whose k exceeds the target's limit by threshold and compaction, and any other such TopK by
    rounds.

    The result is exact, also on ties. In rows with fewer than k finite scores, tau is -inf, and the earliest tokens
    with score -inf (the padding) fill the row. All counts are int32, because floats are exact only up to a limit.
    """

    name: ClassVar[str] = "threshold_selection"

    def applies(self, limits: TargetLimits, dtype: DType) -> bool:
        return limits.topk_limit is not None

    def run(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> int:
        """Rewrites every TopK above the limit.

        Raises:
            GraphError: the length of such a TopK is unknown.
        """
        large = [node for node, _ in _too_large(model, limits)]
        selections = [_selection(node) for node in large if _ascends(node)]
        alone = set(large).difference(*({item.best, item.ascend} for item in selections))
        for selection in selections:
            _select_by_threshold(model.graph, selection, limits)
        for node in large:
            if node in alone:
                _select_by_rounds(model.graph, node, limits)
        return len(selections) + len(alone)

    def ensures(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> Sequence[str]:
        limit = limits.topk_limit
        return [f"{label_of(node)} still takes {k} of TopK's at most {limit}" for node, k in _too_large(model, limits)]


def _too_large(model: ir.Model, limits: TargetLimits) -> list[tuple[ir.Node, int]]:
    """(node, k) of every TopK with a constant k above the limit."""
    sizes = [(node, _integers(node, 1)) for node in model.graph if is_standard(node, "TopK")]
    return [(node, k[0]) for node, k in sizes if k is not None and k[0] > (limits.topk_limit or 0)]


def _ascends(node: ir.Node) -> bool:
    """Whether a TopK is the second one of a selection: it puts the indices of the first one into ascending order.

    The first one selects the largest scores of the last axis, and nothing else reads its results.
    """
    indices = node.inputs[0]
    best = made_by(indices, "TopK")
    if best is None or indices is None or indices is not best.outputs[1]:
        return False
    directions = best.attributes.get_int("largest", 1), node.attributes.get_int("largest", 1)
    is_alone = only_reader(indices) is node and not is_used(best.outputs[0]) and not is_used(node.outputs[1])
    fits = _axis(best) == _axis(node) == -1 and _integers(best, 1) == _integers(node, 1)
    return directions == (1, 0) and is_alone and fits and best.inputs[0] is not None and best.inputs[0].dtype in FLOATS


def _selection(ascend: ir.Node) -> _Selection:
    best = made_by(ascend.inputs[0], "TopK")
    assert best is not None
    scores, k = best.inputs[0], _integers(best, 1)
    assert scores is not None
    assert k is not None
    return _Selection(best, ascend, scores, require_static_shape(scores, best), k[0])


def _select_by_rounds(graph: ir.Graph, node: ir.Node, limits: TargetLimits) -> None:
    """Replaces a TopK by rounds that each select the next best: together they give the same values and indices.

    The scores that a round selected are replaced by the worst number of the dtype. A score that is the worst number
    itself, such as minus infinity, counts as the next one, so that no round selects its token again.
    """
    original, limit, k = node.inputs[0], limits.topk_limit or 0, _integers(node, 1)
    shape = list(require_static_shape(original, node))
    assert original is not None
    assert original.dtype is not None
    assert k is not None
    axis, largest = _axis(node), node.attributes.get_int("largest", 1)
    writer = NodeWriter(graph, node, "rounds")
    number = original.dtype.numpy()
    if original.dtype in FLOATS:
        bound = float(ml_dtypes.finfo(number).max)  # type: ignore[no-untyped-call]  # It has no annotations.
        edge = -bound if largest else bound
        scores = writer.op("Max" if largest else "Min", original, np.array(edge, number))
        hidden = np.array([-math.inf if largest else math.inf], number)
    else:
        worst = np.iinfo(number).min if largest else np.iinfo(number).max
        next_worst = worst + 1 if largest else worst - 1
        scores = writer.op("Max" if largest else "Min", original, np.array(next_worst, number))
        hidden = np.array([worst], number)
    parts, left = [], k[0]
    while left > 0:
        size = min(left, limit)
        _, indices = writer.ops("TopK", 2, scores, [size], axis=axis, largest=largest, sorted=1)
        parts.append(indices)
        left -= size
        if left:
            shape[axis] = size
            scores = writer.op("ScatterElements", scores, indices, writer.op("Expand", hidden, shape), axis=axis)
    index = writer.op("Concat", *parts, axis=axis)
    if is_used(node.outputs[0]):
        substitute(node.outputs[0], writer.op("GatherElements", original, index, axis=axis))
    substitute(node.outputs[1], index, node)


def _select_by_threshold(graph: ir.Graph, selection: _Selection, limits: TargetLimits) -> None:
    writer = NodeWriter(graph, selection.ascend, "threshold")
    tau = _kth_largest(writer, selection, limits.topk_limit or 0)
    positions = _ascending_positions(writer, selection, _selected(writer, selection, tau))
    substitute(selection.ascend.outputs[0], positions, selection.ascend, selection.best)


def _kth_largest(writer: NodeWriter, selection: _Selection, limit: int) -> ir.Value:
    """The k-th largest score tau (..., 1), counted from the nearer end, so that as few rounds as possible are needed.

    The scores that a round selected are replaced by -inf (or +inf). A score that has this value itself may then be
    counted again, which changes nothing: tau is that value in either case.
    """
    scores, (*rows, S), k = selection.scores, selection.shape, selection.k
    assert scores.dtype is not None
    largest = k <= S - k + 1
    left = k if largest else S - k + 1
    hidden = np.array([-math.inf if largest else math.inf], scores.dtype.numpy())
    while left > limit:
        _, indices = writer.ops("TopK", 2, scores, [limit], axis=-1, largest=int(largest), sorted=1)
        hidden_rows = writer.op("Expand", hidden, [*rows, limit])
        scores = writer.op("ScatterElements", scores, indices, hidden_rows, axis=-1)
        left -= limit
    values, _ = writer.ops("TopK", 2, scores, [left], axis=-1, largest=int(largest), sorted=1)
    return writer.op("Slice", values, [left - 1], [left], [-1])


def _selected(writer: NodeWriter, selection: _Selection, tau: ir.Value) -> ir.Value:
    """Bool (..., S): true for scores above tau, and for the first k - count(above) scores equal to it."""
    above = writer.op("Greater", selection.scores, tau)
    equal = writer.op("Equal", selection.scores, tau)
    above_count = writer.op("ReduceSum", writer.op("Cast", above, to=INT32), [-1], keepdims=1)
    missing = writer.op("Sub", np.array([selection.k], np.int32), above_count)
    is_early = writer.op("LessOrEqual", _running_count(writer, equal), missing)
    return writer.op("Or", above, writer.op("And", equal, is_early))


def _ascending_positions(writer: NodeWriter, selection: _Selection, selected: ir.Value) -> ir.Value:
    """int64 (..., k): the positions of the selected tokens, in ascending order.

    Every token is written to an index of its own, selected tokens by rank from 0 and the others after them. They are a
    permutation for all scores, NaN included: TensorRT does not define two writes to one index.
    """
    S = selection.shape[-1]
    rank = _running_count(writer, selected)
    count = writer.op("Slice", rank, [S - 1], [S], [-1])
    rank_selected = writer.op("Sub", rank, np.array([1], np.int32))
    position = np.arange(S, dtype=np.int32)
    slot_other = writer.op("Add", writer.op("Sub", position, rank), count)
    slot = writer.op("Cast", writer.op("Where", selected, rank_selected, slot_other), to=INT64)
    by_position = writer.op("Expand", position, selection.shape)
    by_slot = writer.op("ScatterElements", by_position, slot, by_position, axis=-1)
    return writer.op("Cast", writer.op("Slice", by_slot, [0], [selection.k], [-1]), to=INT64)


def _running_count(writer: NodeWriter, flags: ir.Value) -> ir.Value:
    """int32 (..., S): the number of flags that are set up to and including each token."""
    return writer.op("CumSum", writer.op("Cast", flags, to=INT32), np.array(-1))

"""Rewrites TopK for targets that limit its k or are slow on long axes.

The reference selects by a stable descending sort, the only selection in PyTorch that specifies the order of ties.
Exported unchanged, it would sort all S scores. ONNX TopK specifies the same order of ties (the lower index first), so
TopK(k = S) followed by a slice of the first k indices equals TopK(k): `SelectTopk`.

`ThresholdSelection` serves targets whose TopK is limited to a small k. Let tau be the k-th largest score. With ties to
the earlier token, the selection is every score above tau and, of the scores equal to tau, the earliest ones until there
are k. tau is a value, not a position, so several rounds of TopK can find it, even without a specified order of ties:
each round selects at most the limit and hides what it selected. If the order of the scores matters, as for a model
whose selected tokens stay in that order, the selection is the concatenation of all rounds.

`GroupedTopk` splits a TopK over a long axis into a TopK of groups and a TopK of the groups' winners. TensorRT reads the
positions of one axis more or less sequentially, so the time of a TopK depends on the length of the axis and not on k.
It reads groups in parallel (ultralytics/ultralytics#25666 and #25755). Each of the k best is one of the k best of its
group, so the k best of all winners are the k best. Ties keep their order: groups are in the order of the axis, and TopK
returns the winners of a group in its own order, so of equal winners the earlier position comes first, and TopK prefers
it. If a runtime's TopK does not define the order of ties, the order is undefined both before and after this rewrite.
All groups have one length, except a shorter one at the end of the axis. If the shorter group were padded, TopK could
return positions beyond the axis for scores that are NaN.

Shape legend: S tokens in a row, or positions of the axis, k selected, N groups of G positions, R positions left, `...`
any other dimensions (the batch).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple

import ml_dtypes
import numpy as np
import onnx_ir as ir

from mod_export.graph.nodes import (
    NodeWriter,
    constant_integers,
    constant_number,
    is_standard,
    is_used,
    label_of,
    made_by,
    only_reader,
    require_static_shape,
    static_shape,
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
            selected = cut.outputs[0]
            for value in sort.outputs:
                value.shape = None if selected.shape is None else selected.shape.copy()
            # A graph output has to keep its name.
            name = selected.name if selected.is_graph_output() else sort.outputs[1].name
            ir.convenience.replace_all_uses_with(selected, sort.outputs[1], replace_graph_outputs=True)
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
        if cut is None or not is_standard(cut, "Slice"):
            continue
        if not isinstance(size, int) or constant_integers(node, 1) != [size]:
            continue
        starts, ends, axes, steps = (constant_integers(cut, number) for number in range(1, 5))
        along = axes in ([axis], [axis + rank])
        if starts == [0] and steps in (None, [1]) and along and ends is not None and 0 < ends[0] < size:
            yield node, cut, ends[0]


def _axis(node: ir.Node) -> int:
    """The axis of a TopK counted from the end, so that it compares across ranks."""
    axis = node.attributes.get_int("axis", -1)
    shape = node.inputs[0].shape if node.inputs[0] is not None else None
    return axis - len(shape) if axis >= 0 and shape is not None else axis


class _Selection(NamedTuple):
    """`best` selects the k largest of the scores (..., S); `ascend` puts their positions into ascending order."""

    best: ir.Node
    ascend: ir.Node
    scores: ir.Value
    shape: tuple[int, ...]
    k: int


class ThresholdSelection:
    """Replaces each TopK whose k exceeds the target's limit: selections by threshold and compaction, others by rounds.

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
        selections = [selection for node in large if (selection := _selection(node)) is not None]
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
    sizes = [(node, constant_integers(node, 1)) for node in model.graph if is_standard(node, "TopK")]
    return [(node, k[0]) for node, k in sizes if k is not None and k[0] > (limits.topk_limit or 0)]


def _selection(node: ir.Node) -> _Selection | None:
    """The selection whose second TopK is `node`, which puts the indices of the first one into ascending order; None for
    any other TopK. The first one selects the largest scores of the last axis, and nothing else reads its results.
    """
    indices, k = node.inputs[0], constant_integers(node, 1)
    best = made_by(indices, "TopK")
    if best is None or indices is None or indices is not best.outputs[1]:
        return None
    scores = best.inputs[0]
    directions = best.attributes.get_int("largest", 1), node.attributes.get_int("largest", 1)
    is_alone = only_reader(indices) is node and not is_used(best.outputs[0]) and not is_used(node.outputs[1])
    fits = _axis(best) == _axis(node) == -1 and constant_integers(best, 1) == k
    if k is None or scores is None or scores.dtype not in FLOATS or not (directions == (1, 0) and is_alone and fits):
        return None
    return _Selection(best, node, scores, require_static_shape(scores, best), k[0])


def _select_by_rounds(graph: ir.Graph, node: ir.Node, limits: TargetLimits) -> None:
    """Replaces a TopK by rounds that each select the next best: together they give the same values and indices.

    The scores that a round selected are replaced by the worst number of the dtype. So a score that is this number
    itself, such as minus infinity, is first raised to the number next to it; otherwise a round could select its token
    again.
    """
    original, limit, k = node.inputs[0], limits.topk_limit or 0, constant_integers(node, 1)
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

    Every token is written to an index of its own, selected tokens by rank from 0 and the others after them. The indices
    are a permutation for all scores, even NaN, because TensorRT does not define two writes to one index.
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


# Groups

LAUNCH = 1024
"""Number of positions whose reading takes as long as the start of another TopK, about 2 us. A shorter last group costs
this much more, because it needs a TopK of its own.
"""


class Long(NamedTuple):
    """A TopK that is faster in groups, with its input's shape, its axis counted from the front, its k, and G."""

    node: ir.Node
    shape: tuple[int, ...]
    axis: int
    k: int
    group: int


class GroupedTopk:
    """Selects in groups first if that saves at least `limits.topk_saving` sequential positions."""

    name: ClassVar[str] = "grouped_topk"

    def applies(self, limits: TargetLimits, dtype: DType) -> bool:
        return limits.topk_saving is not None

    def run(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> int:
        count = 0
        # Groups of a very long axis, and their winners, may be long enough to be split again.
        while long_axes := list(_long(model, limits)):
            for topk in long_axes:
                write_groups(model.graph, topk)
            count += len(long_axes)
        return count

    def ensures(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> Sequence[str]:
        return [
            f"{label_of(topk.node)} still looks at an axis of {topk.shape[topk.axis]}" for topk in _long(model, limits)
        ]


@cache
def group_length(S: int, k: int) -> int:
    """Returns the G with the fewest sequential positions, about the root of S x k. Of several such lengths it is the
    longest, which makes the fewest groups.
    """
    return min(range(S, 0, -1), key=lambda G: _one_after_the_other(S, k, G))


def _one_after_the_other(S: int, k: int, G: int) -> int:
    """The number of sequential positions: those of a group, of the shorter last group, and of all winners."""
    N, R = divmod(S, G)
    left = LAUNCH + R if R else 0
    return S if G == S else G + left + N * min(k, G) + min(k, R)


def _long(model: ir.Model, limits: TargetLimits) -> Iterator[Long]:
    assert limits.topk_saving is not None
    for node in model.graph:
        shape = static_shape(node.inputs[0]) if is_standard(node, "TopK") else None
        k = None if shape is None else constant_number(node.inputs[1])
        if shape is None or k is None:
            continue
        axis = node.attributes.get_int("axis", -1) % len(shape)
        S, most = shape[axis], int(k)
        if S - most < limits.topk_saving:
            continue
        G = group_length(S, most)
        if S - _one_after_the_other(S, most, G) >= limits.topk_saving:
            yield Long(node, shape, axis, most, G)


def write_groups(graph: ir.Graph, topk: Long) -> None:
    """Replaces a TopK by a TopK of each group and a TopK of all winners."""
    scores = topk.node.inputs[0]
    assert scores is not None
    writer = NodeWriter(graph, topk.node, "groups")
    S, G = topk.shape[topk.axis], topk.group
    whole = S - S % G
    parts = [_winners(writer, topk, scores, 0, whole, G)]
    if whole < S:
        parts.append(_winners(writer, topk, scores, whole, S, S - whole))
    values, positions = (
        part[0] if len(part) == 1 else writer.op("Concat", *part, axis=topk.axis) for part in zip(*parts, strict=True)
    )
    order: dict[str, Any] = {name: topk.node.attributes.get_int(name, 1) for name in ("largest", "sorted")}
    best, chosen = writer.ops("TopK", 2, values, [topk.k], axis=topk.axis, **order)
    index = writer.op("GatherElements", positions, chosen, axis=topk.axis)
    if is_used(topk.node.outputs[0]):
        substitute(topk.node.outputs[0], best)
    substitute(topk.node.outputs[1], index, topk.node)


def _winners(
    writer: NodeWriter, topk: Long, scores: ir.Value, begin: int, end: int, G: int
) -> tuple[ir.Value, ir.Value]:
    """The winners' scores of the groups in [begin, end), and their positions in the axis: (..., N * min(k, G), ...)."""
    axis, N, group_winners = topk.axis, (end - begin) // G, min(topk.k, G)
    before, after = topk.shape[:axis], topk.shape[axis + 1 :]
    if end - begin < topk.shape[axis]:
        scores = writer.op("Slice", scores, [begin], [end], [axis])
    grouped = writer.op("Reshape", scores, [*before, N, G, *after])
    largest = topk.node.attributes.get_int("largest", 1)
    values, inside = writer.ops("TopK", 2, grouped, [group_winners], axis=axis + 1, largest=largest, sorted=1)
    first = (begin + G * np.arange(N)).reshape(N, 1, *(1 for _ in after))
    positions = writer.op("Add", inside, first)
    flat = [*before, N * group_winners, *after]
    return writer.op("Reshape", values, flat), writer.op("Reshape", positions, flat)

"""Selects more tokens than a target's TopK can: by a threshold, then a compaction by rank.

The k largest scores, ties to the earlier token, are all scores above tau, the k-th largest value, and as many of the
first scores equal to tau as are still missing. tau is a value, not a position, so several rounds of TopK can find it,
even without a specified order of ties: each round takes at most the limit and hides what it took.

Shape legend: S tokens in a row, k selected, `...` any leading dimensions (the batch).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import onnx_ir as ir

from mod_export.errors import LimitError
from mod_export.export.nodes import NodeWriter, constant_array, is_standard, label_of, require_static_shape
from mod_export.types import Dialect, DType

__all__ = ["ThresholdSelection"]

FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE})
INT32, INT64, BOOL = ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL


class _Selection(NamedTuple):
    """`take` selects the k largest of the scores (..., S); `ascend` puts their positions into ascending order."""

    take: ir.Node
    ascend: ir.Node
    scores: ir.Value
    shape: tuple[int, ...]
    k: int


class ThresholdSelection:
    """Replaces a selection whose k exceeds the dialect's TopK by threshold and compaction, exact also on ties.

    Rows with fewer than k finite scores keep their meaning: tau is then -inf, and the earliest of the tokens with score
    -inf (the padding) fill the row. All counts are int32, because floats are exact only up to a limit.
    """

    name: ClassVar[str] = "threshold_selection"

    def applies(self, dialect: Dialect, dtype: DType) -> bool:
        return dialect.topk_limit is not None

    def run(self, model: ir.Model, dialect: Dialect, dtype: DType) -> int:
        """Rewrites every selection above the limit.

        Raises:
            LimitError: a TopK above the limit that is not a selection of positions.
        """
        limit = dialect.topk_limit
        assert limit is not None
        selections = []
        for node in model.graph:
            k = _k_of(node)
            if k is not None and k > limit and not _ascends_selection(node):
                selections.append(_selection(node, k, dialect.name, limit))
        for selection in selections:
            _rewrite(model.graph, selection, limit)
        return len(selections)

    def ensures(self, model: ir.Model, dialect: Dialect, dtype: DType) -> Sequence[str]:
        limit = dialect.topk_limit
        assert limit is not None
        return [
            f"{label_of(node)} still takes {k} of TopK's at most {limit}"
            for node in model.graph
            if (k := _k_of(node)) is not None and k > limit
        ]


def _k_of(node: ir.Node) -> int | None:
    if not is_standard(node, "TopK"):
        return None
    k = constant_array(node.inputs[1])
    return None if k is None else int(k.item())


def _is_on_last_axis(node: ir.Node) -> bool:
    shape = None if node.inputs[0] is None else node.inputs[0].shape
    return shape is not None and node.attributes.get_int("axis", -1) in (-1, len(shape) - 1)


def _is_used(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()


def _ascends_selection(node: ir.Node) -> bool:
    """Whether `node` is the second TopK of a selection: the smallest of all the indices that the first one took.

    The first takes the largest scores of the last axis, and nothing else uses what it returns.
    """
    indices = node.inputs[0] if is_standard(node, "TopK") else None
    take = None if indices is None else indices.producer()
    if indices is None or take is None or not is_standard(take, "TopK") or indices is not take.outputs[1]:
        return False
    takes_largest = take.attributes.get_int("largest", 1) and not node.attributes.get_int("largest", 1)
    is_alone = not (_is_used(take.outputs[0]) or _is_used(node.outputs[1]) or indices.is_graph_output())
    fits = _is_on_last_axis(take) and _is_on_last_axis(node) and _k_of(take) == _k_of(node)
    return bool(takes_largest and is_alone and fits and take.inputs[0] is not None and take.inputs[0].dtype in FLOATS)


def _selection(node: ir.Node, k: int, target: str, limit: int) -> _Selection:
    uses = list(node.outputs[1].uses()) if len(node.outputs) == 2 else []
    if len(uses) != 1 or not _ascends_selection(uses[0].node):
        raise LimitError(
            f"{label_of(node)}: TopK takes K = {k}, but {target} takes at most {limit}, and only a selection (the "
            "positions of the K largest scores of the last axis, put into ascending order and used for nothing else) "
            f"can be rewritten; lower the capacity or the sequence length so that K <= {limit}, or build another target"
        )
    assert node.inputs[0] is not None
    return _Selection(node, uses[0].node, node.inputs[0], require_static_shape(node.inputs[0], node), k)


def _rewrite(graph: ir.Graph, selection: _Selection, limit: int) -> None:
    writer = NodeWriter(graph, selection.ascend, "threshold")
    tau = _kth_largest(writer, selection, limit)
    selected = _selected(writer, selection, tau)
    positions = _ascending_positions(writer, selection, selected)
    old = selection.ascend.outputs[0]
    name = old.name
    ir.convenience.replace_all_uses_with(old, positions, replace_graph_outputs=True)
    graph.remove([selection.ascend, selection.take], safe=True)
    positions.name = name


def _kth_largest(writer: NodeWriter, selection: _Selection, limit: int) -> ir.Value:
    """The k-th largest score tau (..., 1), counted from the nearer end, so that as few rounds as possible are needed.

    What a round took is replaced by -inf (or +inf). A score that has this value itself may then be counted again, which
    changes nothing: tau is that value in either case.
    """
    scores, (*rows, S), k = selection.scores, selection.shape, selection.k
    largest = k <= S - k + 1
    left = k if largest else S - k + 1
    hidden = np.array(-math.inf if largest else math.inf, _numpy_type(scores))
    assert scores.dtype is not None
    while True:
        taken = min(left, limit)
        values, indices = writer.ops(
            "TopK",
            [scores, writer.constant(f"topk_{taken}", np.array([taken], np.int64))],
            [(scores.dtype, (*rows, taken)), (INT64, (*rows, taken))],
            {"axis": -1, "largest": int(largest), "sorted": 1},
        )
        left -= taken
        if left == 0:
            return _slice_last_axis(writer, values, (*rows, taken), taken - 1, taken)
        hidden_rows = writer.op(
            "Expand",
            [
                writer.constant(f"hidden_{'low' if largest else 'high'}_{hidden.dtype}", hidden.reshape(1)),
                writer.constant(f"shape_{'x'.join(map(str, (*rows, taken)))}", np.array((*rows, taken), np.int64)),
            ],
            scores.dtype,
            (*rows, taken),
        )
        scores = writer.op("ScatterElements", [scores, indices, hidden_rows], scores.dtype, (*rows, S), {"axis": -1})
        assert scores.dtype is not None


def _selected(writer: NodeWriter, selection: _Selection, tau: ir.Value) -> ir.Value:
    """Bool (..., S): above tau, or among the first k - count(above) that equal it."""
    scores, shape, k = selection.scores, selection.shape, selection.k
    above = writer.op("Greater", [scores, tau], BOOL, shape)
    equal = writer.op("Equal", [scores, tau], BOOL, shape)
    above_count = writer.op(
        "ReduceSum",
        [
            writer.op("Cast", [above], INT32, shape, {"to": INT32}),
            writer.constant("axes_last", np.array([-1], np.int64)),
        ],
        INT32,
        (*shape[:-1], 1),
        {"keepdims": 1},
    )
    wanted = writer.constant(f"k_{k}", np.array([k], np.int32))
    missing = writer.op("Sub", [wanted, above_count], INT32, (*shape[:-1], 1))
    is_early = writer.op("LessOrEqual", [_running_count(writer, equal, shape), missing], BOOL, shape)
    ties = writer.op("And", [equal, is_early], BOOL, shape)
    return writer.op("Or", [above, ties], BOOL, shape)


def _ascending_positions(writer: NodeWriter, selection: _Selection, selected: ir.Value) -> ir.Value:
    """int64 (..., k): the positions of the selected tokens.

    Every token is written to an index of its own, selected tokens by rank from 0 and the others after them. It has to
    be a permutation, because TensorRT does not define two writes to one index. It is one for all scores, NaN included.
    """
    (*rows, S), k = selection.shape, selection.k
    shape = selection.shape
    rank = _running_count(writer, selected, shape)
    count = _slice_last_axis(writer, rank, shape, S - 1, S)
    one = writer.constant("one_i32", np.array([1], np.int32))
    rank_selected = writer.op("Sub", [rank, one], INT32, shape)
    position = writer.constant(f"positions_{S}", np.arange(S, dtype=np.int32))
    rank_other = writer.op("Sub", [position, rank], INT32, shape)
    slot_other = writer.op("Add", [rank_other, count], INT32, shape)
    slot = writer.op("Where", [selected, rank_selected, slot_other], INT32, shape)
    slot = writer.op("Cast", [slot], INT64, shape, {"to": INT64})
    by_position = writer.op(
        "Expand",
        [position, writer.constant(f"shape_{'x'.join(map(str, shape))}", np.array(shape, np.int64))],
        INT32,
        shape,
    )
    by_slot = writer.op("ScatterElements", [by_position, slot, by_position], INT32, shape, {"axis": -1})
    positions = _slice_last_axis(writer, by_slot, shape, 0, k)
    return writer.op("Cast", [positions], INT64, (*rows, k), {"to": INT64})


def _running_count(writer: NodeWriter, flags: ir.Value, shape: tuple[int, ...]) -> ir.Value:
    """int32 (..., S): how many flags are set up to and including each token."""
    numbers = writer.op("Cast", [flags], INT32, shape, {"to": INT32})
    axis = writer.constant("last_axis", np.array(-1, np.int64))
    return writer.op("CumSum", [numbers, axis], INT32, shape)


def _slice_last_axis(writer: NodeWriter, value: ir.Value, shape: tuple[int, ...], start: int, end: int) -> ir.Value:
    assert value.dtype is not None
    return writer.op(
        "Slice",
        [
            value,
            writer.constant(f"index_{start}", np.array([start], np.int64)),
            writer.constant(f"index_{end}", np.array([end], np.int64)),
            writer.constant("axes_last", np.array([-1], np.int64)),
        ],
        value.dtype,
        (*shape[:-1], end - start),
    )


def _numpy_type(value: ir.Value) -> np.dtype:
    assert value.dtype is not None
    return np.dtype(value.dtype.numpy())

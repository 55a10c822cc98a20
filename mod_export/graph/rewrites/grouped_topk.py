"""Splits a TopK over a long axis into a TopK of groups and a TopK of the groups' winners.

TensorRT reads the positions of one axis more or less sequentially, so the time of a TopK depends on the length of the
axis and not on k. It reads groups in parallel (ultralytics/ultralytics#25666 and #25755). Each of the k best is one of
the k best of its group, so the k best of all winners are the k best.

Ties keep their order. Groups are in the order of the axis, and TopK returns the winners of a group in its own order. So
of equal winners the earlier position comes first, and TopK prefers it. If a runtime's TopK has no order of ties, there
is none before and none after.

All groups have one length, except a shorter one at the end of the axis. If that one were padded, it could return
positions beyond the axis for scores that are NaN.

Shape legend: S positions of the axis, k selected, N groups of G positions, R positions left, `...` other dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import ClassVar, NamedTuple

import numpy as np
import onnx_ir as ir

from mod_export.graph.nodes import NodeWriter, constant_array, is_standard, is_used, label_of, static_shape, substitute
from mod_export.types import DType, TargetLimits

LAUNCH = 1024
"""Positions that take as long as starting another TopK, about 2 us: the cost of a group of another length."""


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
    """The G with the fewest sequential positions, about the root of S x k; of several, the longest, which makes the
    fewest groups.
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
        k = None if shape is None else constant_array(node.inputs[1])
        if shape is None or k is None:
            continue
        axis = node.attributes.get_int("axis", -1) % len(shape)
        S, most = shape[axis], int(k.item())
        if S - most < limits.topk_saving:
            continue
        G = group_length(S, most)
        if S - _one_after_the_other(S, most, G) >= limits.topk_saving:
            yield Long(node, shape, axis, most, G)


def write_groups(graph: ir.Graph, one: Long) -> None:
    """Replaces a TopK by a TopK of each group and a TopK of all winners."""
    scores = one.node.inputs[0]
    assert scores is not None
    writer = NodeWriter(graph, one.node, "groups")
    S, G = one.shape[one.axis], one.group
    whole = S - S % G
    parts = [_winners(writer, one, scores, 0, whole, G)]
    if whole < S:
        parts.append(_winners(writer, one, scores, whole, S, S - whole))
    values, positions = (
        part[0] if len(part) == 1 else writer.op("Concat", *part, axis=one.axis) for part in zip(*parts, strict=True)
    )
    order = {name: one.node.attributes.get_int(name, 1) for name in ("largest", "sorted")}
    best, chosen = writer.ops("TopK", 2, values, [one.k], axis=one.axis, **order)
    index = writer.op("GatherElements", positions, chosen, axis=one.axis)
    if is_used(one.node.outputs[0]):
        substitute(one.node.outputs[0], best)
    substitute(one.node.outputs[1], index, one.node)


def _winners(writer: NodeWriter, one: Long, given: ir.Value, begin: int, end: int, G: int) -> tuple[ir.Value, ir.Value]:
    """The winners' scores of the groups in [begin, end), and their positions in the axis: (..., N * min(k, G), ...)."""
    axis, N, kept = one.axis, (end - begin) // G, min(one.k, G)
    before, after = one.shape[:axis], one.shape[axis + 1 :]
    if end - begin < one.shape[axis]:
        given = writer.op("Slice", given, [begin], [end], [axis])
    grouped = writer.op("Reshape", given, [*before, N, G, *after])
    largest = one.node.attributes.get_int("largest", 1)
    values, inside = writer.ops("TopK", 2, grouped, [kept], axis=axis + 1, largest=largest, sorted=1)
    first = (begin + G * np.arange(N)).reshape(N, 1, *(1 for _ in after))
    positions = writer.op("Add", inside, first)
    flat = [*before, N * kept, *after]
    return writer.op("Reshape", values, flat), writer.op("Reshape", positions, flat)

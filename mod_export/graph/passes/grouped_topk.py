"""TopK of a long axis in groups, and then of the groups' winners.

TensorRT looks at the positions of one axis more or less one after the other, so that the time of a TopK follows the
length of the axis and not k, and groups are looked at beside each other (ultralytics/ultralytics#25666 and #25755).
One of the k best is one of the k best of its group, so the k best of all winners are the k best.

Ties keep their order. Groups stand in the order of the axis, and the winners of a group in the order in which TopK
gives them: of equal winners the earlier position comes first, which TopK prefers. On a runtime whose TopK has no order
of ties, there is none before and none after.

Groups have one length. What is left at the end of the axis is a shorter group of its own: a group that is filled up
could give positions beyond the axis where scores are no numbers.

Shape legend: S positions of the axis, k selected, N groups of G positions, R positions left, `...` other dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import ClassVar, NamedTuple

import numpy as np
import onnx_ir as ir

from mod_export.graph.nodes import NodeWriter, constant_array, is_standard, is_used, label_of, static_shape, substitute
from mod_export.types import Dialect, DType

LAUNCH = 1024
"""Positions that take as long as starting one more TopK, about 2 us: what a group of another length costs."""


class Long(NamedTuple):
    """A TopK that groups make shorter: its input's shape, its axis counted from the front, its k, and G."""

    node: ir.Node
    shape: tuple[int, ...]
    axis: int
    k: int
    group: int


class GroupedTopk:
    """Selects in groups first where that spares at least `dialect.topk_saving` positions one after the other."""

    name: ClassVar[str] = "grouped_topk"

    def applies(self, dialect: Dialect, dtype: DType) -> bool:
        return dialect.topk_saving is not None

    def run(self, model: ir.Model, dialect: Dialect, dtype: DType) -> int:
        count = 0
        # Groups of a very long axis, and their winners, can be long themselves.
        while found := list(_long(model, dialect)):
            for one in found:
                write_groups(model.graph, one)
            count += len(found)
        return count

    def ensures(self, model: ir.Model, dialect: Dialect, dtype: DType) -> Sequence[str]:
        return [
            f"{label_of(one.node)} still looks at an axis of {one.shape[one.axis]}" for one in _long(model, dialect)
        ]


@cache
def group_length(S: int, k: int) -> int:
    """The G with which the fewest positions are looked at one after the other, about the root of S x k. Of several the
    longest, which makes the fewest groups.
    """
    return min(range(S, 0, -1), key=lambda G: _one_after_the_other(S, k, G))


def _one_after_the_other(S: int, k: int, G: int) -> int:
    """Positions of a group, of what is left, and of all winners."""
    N, R = divmod(S, G)
    left = LAUNCH + R if R else 0
    return S if G == S else G + left + N * min(k, G) + min(k, R)


def _long(model: ir.Model, dialect: Dialect) -> Iterator[Long]:
    assert dialect.topk_saving is not None
    for node in model.graph:
        shape = static_shape(node.inputs[0]) if is_standard(node, "TopK") else None
        k = None if shape is None else constant_array(node.inputs[1])
        if shape is None or k is None:
            continue
        axis = node.attributes.get_int("axis", -1) % len(shape)
        S, most = shape[axis], int(k.item())
        if S - most < dialect.topk_saving:
            continue
        G = group_length(S, most)
        if S - _one_after_the_other(S, most, G) >= dialect.topk_saving:
            yield Long(node, shape, axis, most, G)


def write_groups(graph: ir.Graph, one: Long) -> None:
    """Replaces a TopK by one of each group and one of all winners."""
    given = one.node.inputs[0]
    assert given is not None
    writer = NodeWriter(graph, one.node, "groups")
    S, G = one.shape[one.axis], one.group
    whole = S - S % G
    parts = [_winners(writer, one, given, 0, whole, G)]
    if whole < S:
        parts.append(_winners(writer, one, given, whole, S, S - whole))
    values, positions = (
        some[0] if len(some) == 1 else writer.op("Concat", *some, axis=one.axis) for some in zip(*parts, strict=True)
    )
    order = {name: one.node.attributes.get_int(name, 1) for name in ("largest", "sorted")}
    best, chosen = writer.ops("TopK", 2, values, [one.k], axis=one.axis, **order)
    index = writer.op("GatherElements", positions, chosen, axis=one.axis)
    if is_used(one.node.outputs[0]):
        substitute(one.node.outputs[0], best)
    substitute(one.node.outputs[1], index, one.node)


def _winners(writer: NodeWriter, one: Long, given: ir.Value, begin: int, end: int, G: int) -> tuple[ir.Value, ir.Value]:
    """(..., N * min(k, G), ...): the winners' scores of the groups in [begin, end), and their positions in the axis."""
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

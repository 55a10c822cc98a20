"""Splits causal attention into blocks of queries that each read the keys up to their end, which skips hidden scores.

The operator computes all T * T scores and discards half of them. A block of b queries that ends at token e needs b * e
scores, so T / b blocks need T * (T + b) / 2. Only the triangle at the end of each block still needs a mask.

Shape legend: B batch, H query heads, G key/value heads, T tokens, E head width, b queries of a block, e keys of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from mod_export.graph.nodes import (
    NodeWriter,
    graph_around,
    is_standard,
    label_of,
    late_zero,
    require_static_shape,
    static_shape,
)
from mod_export.types import DType, TargetLimits

Masks = dict[tuple[int, int], ir.Value]
"""(T, e) -> the mask of the block that ends at key e."""
SHARED_MASK_BYTES = 2**24
"""Masks up to this size are shared by all layers. Larger ones are computed in each layer and freed again."""
LEAVES_A_KEY = "leaves every query a key"
"""The key in `meta` of a mask in which every query sees a key, so that no query needs special treatment."""


class QueryBlocks:
    """Splits causal Attention over T tokens into Attentions over blocks of the size that the target prefers for T."""

    name: ClassVar[str] = "query_blocks"

    def applies(self, limits: TargetLimits, dtype: DType) -> bool:
        return bool(limits.query_blocks)

    def run(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> int:
        attentions = _unsplit(model, limits)
        # A value of one branch is not visible in another.
        shared: defaultdict[ir.Graph, Masks] = defaultdict(dict)
        for node, block in attentions:
            _split(node, block, shared[graph_around(node)], late=limits.late_masks)
        return len(attentions)

    def ensures(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> Sequence[str]:
        return [f"{label_of(node)} still computes scores that its mask hides" for node, _ in _unsplit(model, limits)]


def splittable_tokens(node: ir.Node) -> int | None:
    """T of a causal self-attention without mask or cache; None for any other node.

    Heads are a dimension, (B, heads, T, E), or side by side, (B, T, heads * E).
    """
    if not is_standard(node, "Attention") or not node.attributes.get_int("is_causal", 0):
        return None
    if any(value is not None for value in node.inputs[3:]) or any(value.uses() for value in node.outputs[1:]):
        return None
    shapes = [static_shape(value) for value in node.inputs[:3]]
    if any(shape is None or len(shape) not in (3, 4) for shape in shapes):
        return None
    tokens = {shape[-2] for shape in shapes if shape is not None}
    return tokens.pop() if len(tokens) == 1 else None


def _unsplit(model: ir.Model, limits: TargetLimits) -> list[tuple[ir.Node, int]]:
    """(node, queries of a block) of every Attention that must be split."""
    block_of = dict(limits.query_blocks)
    tokens = [(node, splittable_tokens(node)) for node in model.graph.all_nodes()]
    return [(node, block_of[T]) for node, T in tokens if T is not None and block_of.get(T, T) < T]


def _split(node: ir.Node, block: int, shared: Masks, *, late: bool) -> None:
    q, k, v = node.inputs[:3]
    T = require_static_shape(q, node)[-2]
    assert q is not None
    assert q.dtype is not None
    writer = NodeWriter(graph_around(node), node, "blocks")
    kept = {name: value.value for name, value in node.attributes.items() if name != "is_causal"}
    large = T * (T + block) // 2 * q.dtype.itemsize > SHARED_MASK_BYTES
    masks = {} if large else shared
    band = None
    parts = []
    for start, end in pairwise([*range(0, T, block), T]):
        queries = _cut(writer, q, start, end, axis=-2)
        keys, values = (_cut(writer, value, 0, end, axis=-2) for value in (k, v))
        if (T, end) not in masks:
            band = _band(writer, q, T, block, hide=late or large) if band is None else band
            # The last rows of the band, shifted until its triangle ends where the block's keys end.
            rows = _cut(writer, band, block - (end - start), block, axis=0)
            masks[T, end] = _cut(writer, rows, T - end, T, axis=1)
            masks[T, end].meta[LEAVES_A_KEY] = True
        parts.append(writer.op("Attention", queries, keys, values, masks[T, end], **kept))
    writer.replace(writer.op("Concat", *parts, axis=-2))


def _band(writer: NodeWriter, q: ir.Value, T: int, block: int, *, hide: bool) -> ir.Value:
    """The mask that is added to the scores, (b, T): 0 where key <= T - b + query, else minus infinity.

    It compares two short ranges, which a runtime does once while loading. With `hide` the ranges depend on the data, so
    that the mask is computed when it is needed, and not kept.
    """
    assert q.dtype is not None
    query, key = np.arange(T - block, T)[:, None], np.arange(T)[None, :]
    late = writer.op("Add", query, late_zero(writer, q, ir.DataType.INT64, (1, 1))) if hide else query
    zero, hidden = (np.array(number, q.dtype.numpy()) for number in (0, -np.inf))
    return writer.op("Where", writer.op("GreaterOrEqual", late, key), zero, hidden)


def _cut(writer: NodeWriter, value: ir.Value | None, start: int, end: int, *, axis: int) -> ir.Value:
    """The slice [start, end) along one axis, or the value itself if that is the whole axis."""
    assert value is not None
    shape = static_shape(value)
    assert shape is not None
    return value if (start, end) == (0, shape[axis]) else writer.op("Slice", value, [start], [end], [axis])

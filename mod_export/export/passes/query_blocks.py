"""Causal attention in blocks of queries, each against the keys up to its end, so that hidden scores are not computed.

The operator computes all T * T scores and discards half of them. A block of b queries that ends at token e needs b * e
scores, so T / b blocks need T * (T + b) / 2. Only the triangle at the end of each block still needs a mask.

Shape legend: B batch, H query heads, G key/value heads, T tokens, E head width, b queries of a block, e keys of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from mod_export.export.nodes import NodeWriter, is_standard, label_of, require_static_shape, static_shape
from mod_export.types import Dialect, DType

__all__ = ["QueryBlocks", "splittable_tokens"]

SHARED_MASK_BYTES = 2**24
"""Masks up to this size are constants that all layers share. Larger ones are computed in each layer and freed again."""
INT64 = ir.DataType.INT64


class QueryBlocks:
    """Splits causal Attention over T tokens into Attentions over blocks of the size that the dialect has for T."""

    name: ClassVar[str] = "query_blocks"

    def applies(self, dialect: Dialect, dtype: DType) -> bool:
        return bool(dialect.query_blocks)

    def run(self, model: ir.Model, dialect: Dialect, dtype: DType) -> int:
        found = _unsplit(model, dialect)
        shared: dict[tuple[int, int], ir.Value] = {}
        for node, block in found:
            _split(model.graph, node, block, shared)
        return len(found)

    def ensures(self, model: ir.Model, dialect: Dialect, dtype: DType) -> Sequence[str]:
        return [f"{label_of(node)} still computes scores that its mask hides" for node, _ in _unsplit(model, dialect)]


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
    tokens = {shape[-2 if len(shape) == 4 else 1] for shape in shapes if shape is not None}
    return tokens.pop() if len(tokens) == 1 else None


def _unsplit(model: ir.Model, dialect: Dialect) -> list[tuple[ir.Node, int]]:
    """(node, queries of a block) of every Attention that has to be split."""
    block_of = dict(dialect.query_blocks)
    tokens = [(node, splittable_tokens(node)) for node in model.graph]
    return [(node, block_of[T]) for node, T in tokens if T is not None and block_of.get(T, T) < T]


def _split(graph: ir.Graph, node: ir.Node, block: int, shared: dict[tuple[int, int], ir.Value]) -> None:
    q, k, v = node.inputs[:3]
    whole = require_static_shape(node.outputs[0], node)
    axis = len(whole) - 2  # Of the tokens: (B, heads, T, E), or (B, T, heads * E).
    T = whole[axis]
    assert q is not None
    assert q.dtype is not None
    writer = NodeWriter(graph, node, "blocks")
    kept = {name: value.value for name, value in node.attributes.items() if name != "is_causal"}
    large = T * (T + block) // 2 * q.dtype.itemsize > SHARED_MASK_BYTES
    masks = {} if large else shared
    band = None
    parts = []
    for start, end in pairwise([*range(0, T, block), T]):
        queries = _cut(writer, q, start, end, axis=axis)
        keys, values = (_cut(writer, value, 0, end, axis=axis) for value in (k, v))
        if (T, end) not in masks:
            band = _band(writer, q, T, block, hide=large) if band is None else band
            # The last rows of the band, shifted until its triangle ends where the block's keys end.
            rows = _cut(writer, band, block - (end - start), block, axis=0)
            masks[T, end] = _cut(writer, rows, T - end, T, axis=1)
        mask = masks[T, end]
        shape = (*whole[:axis], end - start, *whole[axis + 1 :])
        parts.append(writer.op("Attention", [queries, keys, values, mask], q.dtype, shape, kept))
    writer.replace(writer.op("Concat", parts, q.dtype, whole, {"axis": axis}))


def _band(writer: NodeWriter, q: ir.Value, T: int, block: int, *, hide: bool) -> ir.Value:
    """What is added to the scores, (b, T): 0 where key <= T - b + query, else minus infinity.

    A comparison of two short ranges, which a runtime computes once while loading. With `hide` the ranges depend on the
    data, by adding abs(q) < 0 of one number, which is never true: then the result is computed when it is needed, and
    neither kept nor shared between layers.
    """
    assert q.dtype is not None
    query = writer.constant(f"band_query_{T}_{block}", np.arange(T - block, T, dtype=np.int64)[:, None])
    key = writer.constant(f"band_key_{T}", np.arange(T, dtype=np.int64)[None, :])
    if hide:
        query = writer.op("Add", [query, _late_zero(writer, q)], INT64, (block, 1))
    visible = writer.op("GreaterOrEqual", [query, key], ir.DataType.BOOL, (block, T))
    zero = writer.constant(f"visible_{q.dtype.name}", np.array(0, q.dtype.numpy()))
    hidden = writer.constant(f"hidden_{q.dtype.name}", np.array(-np.inf, q.dtype.numpy()))
    return writer.op("Where", [visible, zero, hidden], q.dtype, (block, T))


def _late_zero(writer: NodeWriter, q: ir.Value) -> ir.Value:
    """An int64 0 of shape (1, 1) that constant folding cannot recognise."""
    assert q.dtype is not None
    rank = len(static_shape(q) or ())
    ones = (1,) * rank
    start, end = (writer.constant(f"corner_{rank}_{size}", np.full(rank, size, np.int64)) for size in (0, 1))
    one = writer.op("Slice", [q, start, end], q.dtype, ones)
    zero = writer.constant(f"visible_{q.dtype.name}", np.array(0, q.dtype.numpy()))
    never = writer.op("Less", [writer.op("Abs", [one], q.dtype, ones), zero], ir.DataType.BOOL, ones)
    number = writer.op("Cast", [never], INT64, ones, {"to": INT64})
    return writer.op("Reshape", [number, writer.constant("shape_1_1", np.array([1, 1], np.int64))], INT64, (1, 1))


def _cut(writer: NodeWriter, value: ir.Value | None, start: int, end: int, *, axis: int) -> ir.Value:
    """[start, end) along one axis; the value itself where that is the whole axis."""
    assert value is not None
    assert value.dtype is not None
    shape = static_shape(value)
    assert shape is not None
    if (start, end) == (0, shape[axis]):
        return value
    bounds = [writer.constant(f"at_{at}", np.array([at], np.int64)) for at in (start, end, axis)]
    sizes = (*shape[:axis], end - start, *shape[axis + 1 :])
    return writer.op("Slice", [value, *bounds], value.dtype, sizes)

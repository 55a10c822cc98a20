"""The rotation of queries and keys as one operator.

In primitive operators, RoPE (Su et al., arXiv 2104.09864) is a split, four products, a sum, a difference and a
concatenation, and each of them reads and writes the whole tensor. ONNX has one operator for it since opset 23, which
takes cosines and sines (B, T, E / 2) of the tokens at hand.

Shape legend: B batch, H heads, T tokens, E head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import onnx_ir as ir

from mod_export.export.nodes import NodeWriter, is_standard, label_of, static_shape
from mod_export.types import Dialect, DType

__all__ = ["RotaryEmbedding"]

FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class _Rotation(NamedTuple):
    """concat(a * cos - b * sin, b * cos + a * sin) of the halves a and b of x (B, H, T, E)."""

    node: ir.Node
    x: ir.Value
    cos: ir.Value
    sin: ir.Value


class RotaryEmbedding:
    """Replaces a rotation in primitive operators, of two halves, by the operator RotaryEmbedding (not interleaved)."""

    name: ClassVar[str] = "rotary_embedding"

    def applies(self, dialect: Dialect, dtype: DType) -> bool:
        return dialect.rotary_embedding

    def run(self, model: ir.Model, dialect: Dialect, dtype: DType) -> int:
        found = _rotations(model)
        tables: dict[ir.Value, ir.Value] = {}
        for rotation in found:
            _rewrite(model.graph, rotation, tables)
        return len(found)

    def ensures(self, model: ir.Model, dialect: Dialect, dtype: DType) -> Sequence[str]:
        return [f"{label_of(rotation.node)} still rotates in primitive operators" for rotation in _rotations(model)]


def _rotations(model: ir.Model) -> list[_Rotation]:
    if (model.opset_imports.get("") or 0) < 23:
        return []
    return [rotation for node in model.graph if (rotation := _rotation(node)) is not None]


def _rotation(node: ir.Node) -> _Rotation | None:
    """The rotation that ends in this concatenation; None where there is none."""
    shape = static_shape(node.outputs[0])
    if not is_standard(node, "Concat") or shape is None or len(shape) != 4 or len(node.inputs) != 2:
        return None
    if node.attributes.get_int("axis", 0) not in (-1, 3) or node.outputs[0].dtype not in FLOATS:
        return None
    difference, total = (_made_by(value, op) for value, op in zip(node.inputs, ("Sub", "Add"), strict=True))
    if difference is None or total is None:
        return None
    (a_cos, b_sin), (b_cos, a_sin) = (_factors(one) for one in (difference, total))
    if not all((a_cos, b_sin, b_cos, a_sin)):
        return None
    (a, cos), (b, sin) = a_cos, b_sin
    if set(b_cos) != {b, cos} or set(a_sin) != {a, sin}:
        return None
    split = a.producer()
    if split is None or not is_standard(split, "Split") or list(split.outputs) != [a, b] or split.inputs[0] is None:
        return None
    halves = static_shape(a)
    if halves != static_shape(b) or static_shape(split.inputs[0]) != shape or halves is None:
        return None
    if any(_table_shape(value, shape) is None for value in (cos, sin)):
        return None
    return _Rotation(node, split.inputs[0], cos, sin)


def _made_by(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = value.producer() if value is not None else None
    return node if node is not None and is_standard(node, op_type) else None


def _factors(node: ir.Node) -> list[tuple[ir.Value, ...]]:
    """The factors of both terms, the half first; an empty tuple for a term that is not a product."""
    return [_halved(_made_by(value, "Mul")) for value in node.inputs]


def _halved(product: ir.Node | None) -> tuple[ir.Value, ...]:
    if product is None:
        return ()
    factors = [value for value in product.inputs if value is not None]
    halves = [value for value in factors if _made_by(value, "Split") is not None]
    rest = [value for value in factors if value not in halves]
    return (halves[0], rest[0]) if len(halves) == len(rest) == 1 else ()


def _table_shape(value: ir.Value, whole: tuple[int, ...]) -> tuple[int, ...] | None:
    """Shape of cosines that are the same for all heads, (T, E / 2) or (B, 1, T, E / 2); None for any other."""
    B, _, T, E = whole
    shape = static_shape(value)
    return shape if shape in ((T, E // 2), (B, 1, T, E // 2), (1, 1, T, E // 2)) else None


def _rewrite(graph: ir.Graph, rotation: _Rotation, tables: dict[ir.Value, ir.Value]) -> None:
    node, x, cos, sin = rotation
    y = node.outputs[0]
    assert y.dtype is not None
    writer = NodeWriter(graph, node, "rotary")
    flat = []
    for value in (cos, sin):
        if value not in tables:
            tables[value] = _table(writer, value, static_shape(x) or ())
        flat.append(tables[value])
    writer.replace(writer.op("RotaryEmbedding", [x, *flat], y.dtype, y.shape))


def _table(writer: NodeWriter, value: ir.Value, whole: tuple[int, ...]) -> ir.Value:
    """Cosines or sines as (B, T, E / 2)."""
    B, _, T, E = whole
    assert value.dtype is not None
    rows = B if (static_shape(value) or ())[:1] == (B,) and len(static_shape(value) or ()) == 4 else 1
    shape = (rows, T, E // 2)
    flat = writer.op("Reshape", [value, _sizes(writer, shape)], value.dtype, shape)
    if rows == B:
        return flat
    return writer.op("Expand", [flat, _sizes(writer, (B, T, E // 2))], value.dtype, (B, T, E // 2))


def _sizes(writer: NodeWriter, shape: tuple[int, ...]) -> ir.Value:
    return writer.constant(f"shape_{'_'.join(map(str, shape))}", np.array(shape, np.int64))

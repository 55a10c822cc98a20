"""Attention and the rotation of queries and keys in the form that is fast on a CPU: one operator each, no transposes.

In primitive operators, RoPE (Su et al., arXiv 2104.09864) is a split, four products, a sum, a difference and a
concatenation, and each of them reads and writes the whole tensor. PyTorch's attention wants (B, heads, T, E), so an
export transposes queries, keys, values and the result. ONNX has one operator for the rotation since opset 23, which
reads cosines and sines (B, T, E / 2) of the tokens at hand. It and Attention also read the heads side by side, (B, T,
heads * E), the layout of the projections, with their number as an attribute; blocks of queries and keys are then
contiguous rows.

Shape legend: B batch, H heads, T tokens, E head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import onnx_ir as ir
from onnxscript.rewriter import pattern

from mod_export.export.nodes import (
    NodeWriter,
    is_standard,
    label_of,
    made_by,
    only_reader,
    require_static_shape,
    static_shape,
    substitute,
)
from mod_export.types import Dialect, DType

SWAPPED = [0, 2, 1, 3]
FIRST_OPSET = 23
"""Of the operator RotaryEmbedding."""
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class RotaryEmbedding:
    """Replaces a rotation in primitive operators, of two halves, by the operator RotaryEmbedding (not interleaved)."""

    name: ClassVar[str] = "rotary_embedding"

    def applies(self, dialect: Dialect, dtype: DType) -> bool:
        return dialect.rotary_embedding

    def run(self, model: ir.Model, dialect: Dialect, dtype: DType) -> int:
        found = list(_rotations(model))
        tables: dict[ir.Value, ir.Value] = {}
        for node, x, raw in found:
            writer = NodeWriter(model.graph, node, "rotary")
            tables |= {value: _table(writer, value, x) for value in raw if value not in tables}
            writer.replace(writer.op("RotaryEmbedding", x, *(tables[value] for value in raw), like=x))
        return len(found)

    def ensures(self, model: ir.Model, dialect: Dialect, dtype: DType) -> Sequence[str]:
        return [f"{label_of(node)} still rotates in primitive operators" for node, *_ in _rotations(model)]


def _written_out(op: Any, x: Any, cos: Any, sin: Any) -> Any:
    """concat(a * cos - b * sin, b * cos + a * sin) of the halves a and b of x."""

    def either(operator: Any, one: Any, other: Any) -> Any:
        return pattern.OrValue([operator(one, other), operator(other, one)])

    a, b = op.Split(x, _allow_other_inputs=True, _outputs=2)
    difference = op.Sub(either(op.Mul, a, cos), either(op.Mul, b, sin))
    return op.Concat(difference, either(op.Add, either(op.Mul, b, cos), either(op.Mul, a, sin)))


WRITTEN_OUT = pattern.Pattern(_written_out)


def _rotations(model: ir.Model) -> Iterator[tuple[ir.Node, ir.Value, list[ir.Value]]]:
    """(node, x, cosines and sines) of each rotation of x (B, H, T, E) that ends in `node`."""
    for node in model.graph if model.opset_imports.get("", 0) >= FIRST_OPSET else ():
        if not is_standard(node, "Concat") or node.outputs[0].dtype not in FLOATS:
            continue
        match = WRITTEN_OUT.match(model, model.graph, node, check_nodes_are_removable=False)
        shape = static_shape(node.outputs[0])
        if not match or shape is None or len(shape) != 4 or node.attributes.get_int("axis", 0) not in (-1, 3):
            continue
        x, *tables = (match.bindings[name] for name in ("x", "cos", "sin"))
        B, _, T, E = shape
        fitting = ((T, E // 2), (B, 1, T, E // 2), (1, 1, T, E // 2))  # The same for all heads.
        if static_shape(x) == shape and all(static_shape(table) in fitting for table in tables):
            yield node, x, tables


def _table(writer: NodeWriter, value: ir.Value, x: ir.Value) -> ir.Value:
    """Cosines or sines as (B, T, E / 2)."""
    B, _, T, E = static_shape(x) or (0, 0, 0, 0)
    rows = (static_shape(value) or ())[:-3] or (1,)
    flat = writer.op("Reshape", value, [*rows, T, E // 2])
    return flat if rows == (B,) else writer.op("Expand", flat, [B, T, E // 2])


class _Heads(NamedTuple):
    """The source (B, T, heads * E) of an input (B, heads, T, E), and the rotation in between if there is one."""

    flat: ir.Value
    heads: int
    rotation: ir.Node | None


class FlatHeads:
    """Gives Attention and RotaryEmbedding (B, T, heads * E) where their inputs are transposed from it."""

    name: ClassVar[str] = "flat_heads"

    def applies(self, dialect: Dialect, dtype: DType) -> bool:
        return dialect.flat_heads

    def run(self, model: ir.Model, dialect: Dialect, dtype: DType) -> int:
        found = list(_attentions(model))
        for node, inputs, result in found:
            # Where the attention is, all its inputs are computed.
            writer = NodeWriter(model.graph, node, "flat")
            attributes = {name: value.value for name, value in node.attributes.items()}
            attributes |= {"q_num_heads": inputs[0].heads, "kv_num_heads": inputs[1].heads}
            read, y = [_rotated(writer, one) for one in inputs], result[0].outputs[0]
            substitute(y, writer.op("Attention", *read, like=y, **attributes), *result, node)
        return len(found)

    def ensures(self, model: ir.Model, dialect: Dialect, dtype: DType) -> Sequence[str]:
        return [f"{label_of(node)} still gets transposed heads" for node, *_ in _attentions(model)]


def _attentions(model: ir.Model) -> Iterator[tuple[ir.Node, list[_Heads], tuple[ir.Node, ir.Node]]]:
    """(attention, its query, key and value, `_result` of what it returns)."""
    for node in model.graph:
        if not is_standard(node, "Attention") or any(value is not None for value in node.inputs[3:]):
            continue
        inputs, result = [_heads(value) for value in node.inputs[:3]], _result(node.outputs[0])
        found = [one for one in inputs if one is not None]
        if len(found) == 3 and result is not None and not any(value.uses() for value in node.outputs[1:]):
            yield node, found, result


def _heads(value: ir.Value | None) -> _Heads | None:
    rotation = made_by(value, "RotaryEmbedding")
    transpose = made_by(value if rotation is None else rotation.inputs[0], "Transpose")
    reshape = made_by(transpose.inputs[0], "Reshape") if transpose is not None and _swaps(transpose) else None
    flat = None if reshape is None else reshape.inputs[0]
    if reshape is None or flat is None or not _side_by_side(flat, reshape.outputs[0]):
        return None
    return _Heads(flat, require_static_shape(reshape.outputs[0], reshape)[2], rotation)


def _result(value: ir.Value) -> tuple[ir.Node, ir.Node] | None:
    """(Reshape to (B, T, heads * E), Transpose before it), where nothing else reads the attention's output."""
    transpose = only_reader(value)
    if transpose is None or not is_standard(transpose, "Transpose") or not _swaps(transpose):
        return None
    reshape = only_reader(transpose.outputs[0])
    if reshape is None or not is_standard(reshape, "Reshape"):
        return None
    return (reshape, transpose) if _side_by_side(reshape.outputs[0], transpose.outputs[0]) else None


def _swaps(transpose: ir.Node) -> bool:
    return list(transpose.attributes.get_ints("perm", [])) == SWAPPED


def _side_by_side(flat: ir.Value, split: ir.Value) -> bool:
    """Whether the shapes are (B, T, heads * E) and (B, T, heads, E)."""
    sizes = static_shape(split)
    return sizes is not None and len(sizes) == 4 and static_shape(flat) == (*sizes[:2], sizes[2] * sizes[3])


def _rotated(writer: NodeWriter, heads: _Heads) -> ir.Value:
    flat, rotation = heads.flat, heads.rotation
    if rotation is None:
        return flat
    return writer.op("RotaryEmbedding", flat, *rotation.inputs[1:], like=flat, num_heads=heads.heads)

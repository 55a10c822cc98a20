"""Attention on (B, T, heads * E), the layout of the projections, without transposes to (B, heads, T, E) and back.

PyTorch's attention wants (B, heads, T, E), so an export transposes queries, keys, values and the result. The ONNX
operators Attention and RotaryEmbedding (opset 23) also take the heads side by side, with their number as an attribute.
Blocks of queries and keys are then contiguous rows.

Shape legend: B batch, T tokens, E head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import onnx_ir as ir

from mod_export.export.nodes import NodeWriter, is_standard, label_of, static_shape
from mod_export.types import Dialect, DType

__all__ = ["FlatHeads"]

SWAPPED = [0, 2, 1, 3]


class _Heads(NamedTuple):
    """The source (B, T, heads * E) of an input (B, heads, T, E), and the rotation in between if there is one."""

    flat: ir.Value
    heads: int
    rotation: ir.Node | None


class _Attention(NamedTuple):
    node: ir.Node
    q: _Heads
    k: _Heads
    v: _Heads
    result: ir.Node
    """The Reshape that puts the heads side by side again."""


class FlatHeads:
    """Gives Attention and RotaryEmbedding (B, T, heads * E) where their inputs are transposed from it."""

    name: ClassVar[str] = "flat_heads"

    def applies(self, dialect: Dialect, dtype: DType) -> bool:
        return dialect.flat_heads

    def run(self, model: ir.Model, dialect: Dialect, dtype: DType) -> int:
        found = _attentions(model)
        for attention in found:
            _rewrite(model.graph, attention)
        return len(found)

    def ensures(self, model: ir.Model, dialect: Dialect, dtype: DType) -> Sequence[str]:
        return [f"{label_of(attention.node)} still gets transposed heads" for attention in _attentions(model)]


def _attentions(model: ir.Model) -> list[_Attention]:
    return [found for node in model.graph if (found := _attention(node)) is not None]


def _attention(node: ir.Node) -> _Attention | None:
    if not is_standard(node, "Attention") or any(value is not None for value in node.inputs[3:]):
        return None
    if any(value.uses() for value in node.outputs[1:]):
        return None
    read = [_heads(value) for value in node.inputs[:3]]
    result = _result(node.outputs[0])
    q, k, v = read
    if q is None or k is None or v is None or result is None:
        return None
    return _Attention(node, q, k, v, result)


def _heads(value: ir.Value | None) -> _Heads | None:
    rotation = value.producer() if value is not None else None
    if rotation is not None and is_standard(rotation, "RotaryEmbedding"):
        value = rotation.inputs[0]
    else:
        rotation = None
    transpose = value.producer() if value is not None else None
    reshape = _source(transpose, "Transpose")
    flat = reshape.inputs[0] if reshape is not None and is_standard(reshape, "Reshape") else None
    shape, split = static_shape(flat), static_shape(reshape.outputs[0]) if reshape is not None else None
    if transpose is None or not _swaps(transpose) or shape is None or split is None:
        return None
    if flat is None or len(shape) != 3 or len(split) != 4 or shape != (*split[:2], split[2] * split[3]):
        return None
    return _Heads(flat, split[2], rotation)


def _result(value: ir.Value) -> ir.Node | None:
    """The Reshape to (B, T, heads * E) after a Transpose, if nothing else reads the attention's output."""
    transpose = _only_user(value)
    if transpose is None or not is_standard(transpose, "Transpose") or not _swaps(transpose):
        return None
    reshape = _only_user(transpose.outputs[0])
    if reshape is None or not is_standard(reshape, "Reshape"):
        return None
    shape, split = static_shape(reshape.outputs[0]), static_shape(transpose.outputs[0])
    is_flat = shape is not None and split is not None and shape == (*split[:2], split[2] * split[3])
    return reshape if is_flat else None


def _only_user(value: ir.Value) -> ir.Node | None:
    users = [use.node for use in value.uses()]
    return users[0] if len(users) == 1 and not value.is_graph_output() else None


def _source(node: ir.Node | None, op_type: str) -> ir.Node | None:
    value = node.inputs[0] if node is not None and is_standard(node, op_type) else None
    return value.producer() if value is not None else None


def _swaps(transpose: ir.Node) -> bool:
    return list(transpose.attributes.get_ints("perm", [])) == SWAPPED


def _rewrite(graph: ir.Graph, attention: _Attention) -> None:
    node, y = attention.node, attention.result.outputs[0]
    # In the attention's position, where all its inputs are computed.
    writer = NodeWriter(graph, node, "flat")
    inputs = [_rotated(writer, one) for one in (attention.q, attention.k, attention.v)]
    attributes = {name: value.value for name, value in node.attributes.items()}
    attributes |= {"q_num_heads": attention.q.heads, "kv_num_heads": attention.k.heads}
    assert y.dtype is not None
    flat = writer.op("Attention", inputs, y.dtype, y.shape, attributes)
    name = y.name
    ir.convenience.replace_all_uses_with(y, flat, replace_graph_outputs=True)
    graph.remove([attention.result, *_path(attention.result, node)], safe=True)
    flat.name = name


def _path(result: ir.Node, node: ir.Node) -> list[ir.Node]:
    transpose = result.inputs[0].producer() if result.inputs[0] is not None else None
    assert transpose is not None
    return [transpose, node]


def _rotated(writer: NodeWriter, heads: _Heads) -> ir.Value:
    flat, rotation = heads.flat, heads.rotation
    if rotation is None:
        return flat
    assert flat.dtype is not None
    inputs = [flat, *rotation.inputs[1:]]
    return writer.op("RotaryEmbedding", inputs, flat.dtype, flat.shape, {"num_heads": heads.heads})

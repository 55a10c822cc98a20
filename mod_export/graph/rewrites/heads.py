"""Writes attention and the rotation of queries and keys in faster forms: one operator, no transposes.

In primitive operators, RoPE (Su et al., arXiv 2104.09864) is a split, four products, a sum, a difference and a
concatenation, and each of them reads and writes the whole tensor. PyTorch's attention takes (B, heads, T, E), so an
export transposes queries, keys, values and the result. Since opset 23, ONNX has an operator for the rotation, which
reads cosines and sines (B, T, E / 2) of the current tokens. Like Attention, it can also read heads side by side, (B, T,
heads * E), the layout of the projections, with the number of heads as an attribute. Blocks of queries and keys are then
contiguous rows.

Shape legend: B batch, H heads, T tokens, E head width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import pattern

from mod_export.graph.nodes import (
    NodeWriter,
    attributes_of,
    before_transpose,
    constant_array,
    constant_integers,
    constant_number,
    graph_around,
    is_standard,
    label_of,
    made_by,
    nodes_from_opset,
    only_reader,
    require_static_shape,
    static_shape,
    substitute,
)
from mod_export.types import DType, TargetLimits

SWAPPED = [0, 2, 1, 3]
ROW_BY_ROW = (
    "Cos", "Sin", "Cast", "Identity", "Unsqueeze", "Reshape", "Expand", "Slice", "Gather", "GatherND", "GatherElements",
    "Transpose",
)  # fmt: skip
FIRST_OPSET = 23
"""The first opset with the operator RotaryEmbedding."""
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class RotaryEmbedding:
    """Replaces a rotation of two halves in primitive operators by the operator RotaryEmbedding (not interleaved).

    It also replaces the form of transformers, x * cos + rotate_half(x) * sin, whose tables have every column twice.
    """

    name: ClassVar[str] = "rotary_embedding"

    def applies(self, limits: TargetLimits, dtype: DType) -> bool:
        return limits.rotary_embedding

    def run(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> int:
        rotations = list(_rotations(model))
        tables: dict[tuple[ir.Graph, ir.Value], ir.Value] = {}
        for node, x, raw in rotations:
            graph = graph_around(node)
            writer = NodeWriter(graph, node, "rotary")
            # A value of one branch is not visible in another.
            tables |= {(graph, value): _table(writer, value, x) for value in raw if (graph, value) not in tables}
            writer.replace(writer.op("RotaryEmbedding", x, *(tables[graph, value] for value in raw), like=x))
        return len(rotations)

    def ensures(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> Sequence[str]:
        return [f"{label_of(node)} still rotates in primitive operators" for node, *_ in _rotations(model)]


def _written_out(op: Any, x: Any, cos: Any, sin: Any) -> Any:
    """concat(a * cos - b * sin, b * cos + a * sin) of the halves a and b of x."""

    def either(operator: Any, a: Any, b: Any) -> Any:
        return pattern.OrValue([operator(a, b), operator(b, a)])

    a, b = op.Split(x, _allow_other_inputs=True, _outputs=2)
    difference = op.Sub(either(op.Mul, a, cos), either(op.Mul, b, sin))
    return op.Concat(difference, either(op.Add, either(op.Mul, b, cos), either(op.Mul, a, sin)))


WRITTEN_OUT = pattern.Pattern(_written_out)


def _rotations(model: ir.Model) -> Iterator[tuple[ir.Node, ir.Value, list[ir.Value]]]:
    """Yields (node, x, cosines and sines) of each rotation of x (B, H, T, E) that ends in `node`."""
    for node in list(nodes_from_opset(model, FIRST_OPSET)):
        shape = static_shape(node.outputs[0])
        if node.outputs[0].dtype not in FLOATS or shape is None or len(shape) != 4:
            continue
        parts = _of_halves(model, node) if is_standard(node, "Concat") else _with_rotate_half(node, shape[-1])
        if parts is None:
            continue
        x, *tables = parts
        B, _, T, E = shape
        width = E // 2 if is_standard(node, "Concat") else E
        fitting = ((T, width), (B, 1, T, width), (1, 1, T, width))  # Tables must be the same for all heads.
        if static_shape(x) == shape and all(static_shape(table) in fitting for table in tables):
            yield node, x, tables


def _of_halves(model: ir.Model, node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    match = WRITTEN_OUT.match(model, graph_around(node), node, check_nodes_are_removable=False)
    if not match or node.attributes.get_int("axis", 0) not in (-1, 3):
        return None
    x, cos, sin = (match.bindings[name] for name in ("x", "cos", "sin"))
    return x, cos, sin


def _with_rotate_half(node: ir.Node, width: int) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    """(x, cos, sin) of a node that is x * cos + concat(-b, a) * sin, where a and b are the halves of x, and the halves
    of cos and sin are equal.
    """
    products = [made_by(value, "Mul") for value in node.inputs] if is_standard(node, "Add") else []
    for straight, turned in (products, products[::-1]) if len(products) == 2 else ():
        if straight is None or turned is None:
            continue
        for n in (0, 1):
            x, sin = _source_of_rotated_halves(turned.inputs[n], width), turned.inputs[1 - n]
            if x is None or x not in straight.inputs:
                continue
            cos = straight.inputs[1 - straight.inputs.index(x)]
            if cos is not None and sin is not None and _has_equal_halves(cos) and _has_equal_halves(sin):
                return x, cos, sin
    return None


def _source_of_rotated_halves(value: ir.Value | None, width: int) -> ir.Value | None:
    """x, if a value is concat(-b, a) of the halves a and b of x."""
    concat = made_by(value, "Concat")
    if concat is None or len(concat.inputs) != 2 or concat.attributes.get_int("axis", 0) not in (-1, 3):
        return None
    negative = made_by(concat.inputs[0], "Neg")
    second = None if negative is None else _half(negative.inputs[0], width, 1)
    return second if second is not None and second is _half(concat.inputs[1], width, 0) else None


def _half(value: ir.Value | None, width: int, number: int) -> ir.Value | None:
    """x, if a value is the first (0) or second (1) half of x."""
    node = None if value is None else value.producer()
    shape = None if node is None else static_shape(node.inputs[0])
    if node is None or value is None or shape is None or shape[-1] != width or width % 2:
        return None
    if static_shape(value) != (*shape[:-1], width // 2):
        return None
    if is_standard(node, "Split"):
        last = node.attributes.get_int("axis", 0) in (-1, len(shape) - 1)
        return node.inputs[0] if last and node.outputs.index(value) == number else None
    if not is_standard(node, "Slice"):
        return None
    start, axis, step = (constant_integers(node, index) for index in (1, 3, 4))
    if len(node.inputs) > 4 and step != [1]:
        return None  # A slice of every second entry is as long as a half.
    last = axis in ([-1], [len(shape) - 1])
    return node.inputs[0] if last and start == [number * width // 2] else None


def _has_equal_halves(value: ir.Value | None) -> bool:
    """Whether both halves of the last dimension are equal for any inputs."""
    array, shape = constant_array(value), static_shape(value)
    node = None if value is None else value.producer()
    if array is not None:
        return array.ndim > 0 and all((half == array[..., : half.shape[-1]]).all() for half in np.split(array, 2, -1))
    if node is None or shape is None:
        return False
    if is_standard(node, "Concat"):
        a, *others = node.inputs
        return others == [a] and node.attributes.get_int("axis", 0) in (-1, len(shape) - 1)
    source = static_shape(node.inputs[0])
    if source is None or source[-1:] != shape[-1:]:
        return False
    if is_standard(node, "Mul"):
        return constant_number(node.inputs[1]) is not None and _has_equal_halves(node.inputs[0])
    # These operators keep rows as they are, or compute each element by itself.
    return is_standard(node, *ROW_BY_ROW) and _has_equal_halves(node.inputs[0]) and _reads_whole_rows(node, len(source))


def _reads_whole_rows(node: ir.Node, rank: int) -> bool:
    if is_standard(node, "GatherElements"):
        # All elements of a row must have the same index.
        index = made_by(node.inputs[1], "Expand")
        sizes = None if index is None else static_shape(index.inputs[0])
        return sizes is not None and sizes[-1:] == (1,) and node.attributes.get_int("axis", 0) not in (-1, rank - 1)
    if is_standard(node, "Gather"):
        return node.attributes.get_int("axis", 0) not in (-1, rank - 1)
    if is_standard(node, "Transpose"):
        return node.attributes.get_ints("perm", [0])[-1] == rank - 1
    return True


def _table(writer: NodeWriter, value: ir.Value, x: ir.Value) -> ir.Value:
    """Brings cosines or sines to (B, T, E / 2)."""
    B, _, T, E = static_shape(x) or (0, 0, 0, 0)
    rows = (static_shape(value) or ())[:-3] or (1,)
    if (static_shape(value) or ())[-1:] == (E,):
        value = writer.op("Slice", value, [0], [E // 2], [-1])
    flat = writer.op("Reshape", value, [*rows, T, E // 2])
    return flat if rows == (B,) else writer.op("Expand", flat, [B, T, E // 2])


class Heads(NamedTuple):
    """The source of an input (B, heads, T, E): `heads` * E columns of `flat` (B, T, columns) from `first` on; or a
    `flat` (B, T, heads, E), such as after a norm of each head. `rotation` is the node in between, if there is one.
    """

    flat: ir.Value
    first: int
    heads: int
    rotation: ir.Node | None


class FlatHeads:
    """Lets Attention and RotaryEmbedding read (B, T, heads * E) if their inputs are transposed from it, or from a part
    of a wider tensor: one product often makes queries, keys and values.
    """

    name: ClassVar[str] = "flat_heads"

    def applies(self, limits: TargetLimits, dtype: DType) -> bool:
        return limits.flat_heads

    def run(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> int:
        attentions = list(_attentions(model))
        for node, inputs, result in attentions:
            # At the attention, all its inputs have been computed.
            writer = NodeWriter(graph_around(node), node, "flat")
            attributes = attributes_of(node) | {"q_num_heads": inputs[0].heads, "kv_num_heads": inputs[1].heads}
            widths = [require_static_shape(value, node)[-1] for value in node.inputs[:3]]
            read = [flat_heads(writer, source, width) for source, width in zip(inputs, widths, strict=True)]
            y = result[0].outputs[0]
            substitute(y, writer.op("Attention", *read, like=y, **attributes), *result, node)
        return len(attentions)

    def ensures(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> Sequence[str]:
        return [f"{label_of(node)} still gets transposed heads" for node, *_ in _attentions(model)]


def _attentions(model: ir.Model) -> Iterator[tuple[ir.Node, list[Heads], tuple[ir.Node, ir.Node]]]:
    """Yields (attention, sources of its query, key and value, `_result` of its output)."""
    for node in model.graph.all_nodes():
        if not is_standard(node, "Attention") or any(value is not None for value in node.inputs[3:]):
            continue
        inputs, result = [heads_of(value) for value in node.inputs[:3]], _result(node.outputs[0])
        sources = [source for source in inputs if source is not None]
        if len(sources) == 3 and result is not None and not any(value.uses() for value in node.outputs[1:]):
            yield node, sources, result


def heads_of(value: ir.Value | None) -> Heads | None:
    """The source of an input (B, heads, T, E) of attention; None if it is computed in another way."""
    rotation = made_by(value, "RotaryEmbedding")
    value = value if rotation is None else rotation.inputs[0]
    split, number = before_transpose(value, SWAPPED), None
    if split is None and (part := _source_of_element(value, 0)) is not None:
        # As in timm: queries, keys and values become the first dimension.
        split, number = before_transpose(part[0], [2, 0, 3, 1, 4]), part[1]
    elif (part := _source_of_element(split, 2)) is not None:
        split, number = part
    reshape, sizes = made_by(split, "Reshape"), static_shape(split)
    if split is None or sizes is None or len(sizes) != (4 if number is None else 5):
        return None
    *_, heads, width = sizes
    flat = None if reshape is None else reshape.inputs[0]
    if flat is not None and _side_by_side(flat, sizes):
        return Heads(flat, (number or 0) * heads * width, heads, rotation)
    return Heads(split, 0, heads, rotation) if number is None else None


def _source_of_element(value: ir.Value | None, axis: int) -> tuple[ir.Value, int] | None:
    """(source, n) if a value is the n-th element of its source along `axis`, and does not have that dimension."""
    node = made_by(value, "Gather", "Squeeze")
    if node is None:
        return None
    if node.op_type == "Squeeze":
        dropped, node = constant_integers(node, 1), made_by(node.inputs[0], "Slice")
        # The slice has one element, because its dimension can be dropped.
        if node is None or dropped != [axis] or constant_integers(node, 3) != [axis]:
            return None
    elif node.attributes.get_int("axis", 0) != axis:
        return None
    number, source = constant_array(node.inputs[1]), node.inputs[0]
    if source is None or number is None or number.size != 1 or (node.op_type == "Gather" and number.ndim):
        return None
    return (source, int(number.item())) if number.item() >= 0 else None


def _result(value: ir.Value) -> tuple[ir.Node, ir.Node] | None:
    """(Reshape to (B, T, heads * E), Transpose before it), if nothing else reads the attention's output."""
    transpose = only_reader(value)
    if transpose is None or before_transpose(transpose.outputs[0], SWAPPED) is None:
        return None
    reshape = only_reader(transpose.outputs[0])
    if reshape is None or not is_standard(reshape, "Reshape"):
        return None
    sizes = static_shape(transpose.outputs[0])
    if sizes is None or len(sizes) != 4 or not _side_by_side(reshape.outputs[0], sizes):
        return None
    return reshape, transpose


def _side_by_side(flat: ir.Value, sizes: tuple[int, ...]) -> bool:
    """Whether `flat` is (B, T, columns) for sizes (B, T, heads, E) or (B, T, parts, heads, E)."""
    return static_shape(flat) == (*sizes[:2], math.prod(sizes[2:]))


def side_by_side(writer: NodeWriter, value: ir.Value) -> ir.Value:
    """Writes (B, heads, T, E) as (B, T, heads * E), read from its source if nothing but a rotation is in between."""
    B, heads, T, E = static_shape(value) or (0, 0, 0, 0)
    source = heads_of(value)
    if source is not None:
        return flat_heads(writer, source, E)
    swapped = value if T == 1 else writer.op("Transpose", value, perm=SWAPPED)
    return writer.op("Reshape", swapped, [B, T, heads * E])


def flat_heads(writer: NodeWriter, source: Heads, width: int) -> ir.Value:
    """Writes an input of attention as (B, T, heads * `width`), with its rotation."""
    flat, rotation, columns = source.flat, source.rotation, source.heads * width
    B, T, *rest = static_shape(flat) or (0, 0)
    if len(rest) > 1:
        flat = writer.op("Reshape", flat, [B, T, columns])
    elif rest != [columns]:
        flat = writer.op("Slice", flat, [source.first], [source.first + columns], [2])
    if rotation is None:
        return flat
    return writer.op("RotaryEmbedding", flat, *rotation.inputs[1:], like=flat, num_heads=source.heads)

"""Writes Attention in primitive operators if a target has no kernel for the single operator.

TensorRT takes the ONNX Attention operator only if it has a dedicated kernel, and it has none for float32. OpenVINO
copies keys and values for every query head that shares them, and transposes the copies, before its attention kernel. In
the form that is written here, the same kernel reads them as they are.

Shape legend: B batch, H query heads, G key/value heads (H a multiple of G, R = H / G), T tokens of the queries, U of
the keys and values, E head width, F that of the values.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import onnx_ir as ir

from mod_export.errors import GraphError
from mod_export.graph.nodes import (
    NodeWriter,
    constant_array,
    graph_around,
    is_standard,
    is_used,
    label_of,
    late_zero,
    require_static_shape,
    static_shape,
)
from mod_export.graph.rewrites.query_blocks import LEAVES_A_KEY
from mod_export.types import DType, TargetLimits

INT32, BOOL = ir.DataType.INT32, ir.DataType.BOOL
MASK = 3
"""The index of the mask among the inputs."""
Masks = dict[tuple[int, int], ir.Value]
"""(T, U) -> bool (T, U), true where a query sees a key."""
KNOWN_ATTRIBUTES = frozenset({"is_causal", "scale", "softcap", "qk_matmul_output_mode"})


class DecomposeAttention:
    """Replaces Attention by MatMul, mask, Softmax, MatMul, the order that fusions of TensorRT and OpenVINO look for.

    The queries are scaled before the product, as these fusions expect. Grouped queries get an axis of their own, along
    which keys and values are broadcast without a copy. For targets with `grouped_rows` they become more rows instead,
    (B, G, R * T, E), because OpenVINO's fusion takes four dimensions, and masks repeat their rows. The causal mask
    compares two short ranges at run time: a stored mask of T * U would be larger than the weights. All attentions over
    the same lengths share the comparison. A query that sees no key gives zeros, as it does in the operator.
    """

    name: ClassVar[str] = "decompose_attention"

    def applies(self, limits: TargetLimits, dtype: DType) -> bool:
        return dtype not in limits.attention_dtypes or limits.attention_widths is not None

    def run(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> int:
        """Rewrites every Attention that the target has no kernel for.

        Raises:
            GraphError: an Attention with a cache, a soft cap or another feature that cannot be rewritten.
        """
        attentions = [(node, _sizes(node)) for node in _unwanted(model, limits, dtype)]
        # A value of one branch is not visible in another.
        shared: defaultdict[ir.Graph, _Shared] = defaultdict(lambda: _Shared({}, {}, limits.grouped_rows))
        for node, sizes in attentions:
            _rewrite(node, sizes, shared[graph_around(node)])
        return len(attentions)

    def ensures(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> Sequence[str]:
        return [f"{label_of(node)} is still one Attention" for node in _unwanted(model, limits, dtype)]


def _unwanted(model: ir.Model, limits: TargetLimits, dtype: DType) -> list[ir.Node]:
    """The Attentions that the target has no kernel for, because of their dtype, the widths of a head, or two masks."""
    attentions = [node for node in model.graph.all_nodes() if is_standard(node, "Attention")]
    if dtype not in limits.attention_dtypes:
        return attentions
    assert limits.attention_widths is not None  # Otherwise this rewrite does not apply.
    narrowest, widest = limits.attention_widths
    widths = [{require_static_shape(value, node)[-1] for value in node.inputs[:3]} for node in attentions]
    return [
        node
        for node, (width, *others) in zip(attentions, widths, strict=True)
        if others or not narrowest <= width <= widest or (_mask(node) is not None and _is_causal(node))
    ]


def _mask(node: ir.Node) -> ir.Value | None:
    return node.inputs[MASK] if len(node.inputs) > MASK else None


def _is_causal(node: ir.Node) -> bool:
    return bool(node.attributes.get_int("is_causal", 0))


class _Sizes(NamedTuple):
    B: int
    H: int
    G: int
    T: int
    U: int
    E: int
    F: int


def _sizes(node: ir.Node) -> _Sizes:
    """The sizes of q (B, H, T, E), k (B, G, U, E), v (B, G, U, F)."""
    problems = [f"input {i} ({value.name})" for i, value in enumerate(node.inputs) if i > MASK and value is not None]
    problems += [f"output {i} ({value.name})" for i, value in enumerate(node.outputs) if i > 0 and is_used(value)]
    problems += [f"attribute {name}" for name in node.attributes if name not in KNOWN_ATTRIBUTES]
    softcap = node.attributes.get_float("softcap", 0.0)
    if softcap:
        problems.append(f"softcap {softcap}")
    if problems:
        raise GraphError(
            f"{label_of(node)}: Attention with {', '.join(problems)} cannot be put into primitive operators; expected "
            "query, key and value and at most a mask, is_causal and scale"
        )
    shapes = [require_static_shape(value, node) for value in node.inputs[:3]]
    if any(len(shape) != 4 for shape in shapes):
        raise GraphError(f"{label_of(node)}: Attention on shapes {shapes}, expected (batch, heads, tokens, width) each")
    (B, H, T, E), (_, G, U, _), (*_, F) = shapes
    if shapes[1:] != [(B, G, U, E), (B, G, U, F)] or H % G:
        raise GraphError(
            f"{label_of(node)}: Attention with query {shapes[0]}, key {shapes[1]} and value {shapes[2]}: the batch, "
            "the width of query and key, or the lengths of key and value differ, or the number of heads is no multiple "
            "of the keys'"
        )
    return _Sizes(B, H, G, T, U, E, F)


class _Shared(NamedTuple):
    """Values that several attentions of one graph share.

    Attributes:
        visible: (T, U) -> bool (T, U), true where a query sees a key.
        rows: (mask, R, T) -> the mask with the rows of the R heads that share keys one after the other.
        grouped_rows: `grouped_rows` of the target's limits.
    """

    visible: Masks
    rows: dict[tuple[ir.Value, int, int], ir.Value]
    grouped_rows: bool


def _rewrite(node: ir.Node, sizes: _Sizes, shared: _Shared) -> None:
    (B, H, G, T, U, E, F), (q, k, v), visible = sizes, node.inputs[:3], shared.visible
    assert q is not None
    assert q.dtype is not None
    number = q.dtype.numpy()
    writer = NodeWriter(graph_around(node), node, "decomposed")
    if _is_causal(node) and (T, U) not in visible:
        visible[T, U] = _causal(writer, T, U, q)
    bias, hidden = _bias(writer, node, sizes, shared)
    q = writer.op("Mul", q, np.array(node.attributes.get_float("scale", 1 / math.sqrt(E)), number))
    k = writer.op("Transpose", k, perm=[0, 1, 3, 2])
    if G != H and shared.grouped_rows:
        q = writer.op("Reshape", q, [B, G, H // G * T, E])
    elif G != H:
        q = writer.op("Reshape", q, [B, G, H // G, T, E])
        k = writer.op("Reshape", k, [B, G, 1, E, U])
        v = writer.op("Reshape", v, [B, G, 1, U, F])
    weight = writer.op("MatMul", q, k)
    if bias is not None:
        weight = writer.op("Add", weight, bias)
    elif _is_causal(node):
        seen = _grouped(writer, visible[T, U], sizes, shared)
        weight = writer.op("Where", seen, weight, np.array(-math.inf, number))
    y = writer.op("MatMul", writer.op("Softmax", weight, axis=-1), v)
    if hidden is not None:
        y = writer.op("Where", hidden, np.array(0, number), y)
    writer.replace(y if G == H else writer.op("Reshape", y, [B, H, T, F]))


def _bias(writer: NodeWriter, node: ir.Node, sizes: _Sizes, shared: _Shared) -> tuple[ir.Value | None, ir.Value | None]:
    """(bias, hidden): the numbers that a mask adds to the scores, in a shape that broadcasts to theirs; and the queries
    that see no key, bool (..., 1), to whose scores it adds nothing.
    """
    source, q = _mask(node), node.inputs[0]
    if source is None:
        return None, None
    assert q is not None
    assert q.dtype is not None
    zero, never = (np.array(number, q.dtype.numpy()) for number in (0, -math.inf))
    mask = _grouped(writer, source, sizes, shared)
    fixed = constant_array(source)
    if mask.dtype == BOOL:
        mask = writer.op("Where", mask, zero, never)
    if _is_causal(node):
        causal = _grouped(writer, shared.visible[sizes.T, sizes.U], sizes, shared)
        mask = writer.op("Where", causal, mask, never)
    elif source.meta.get(LEAVES_A_KEY) or (fixed is not None and _leaves_a_key(fixed)):
        return mask, None
    # Integers are reduced, because OpenVINO's maximum of a row of minus infinities is the lowest finite number.
    unseen = writer.op("Cast", writer.op("Equal", mask, never), to=INT32)
    hidden = writer.op("Cast", writer.op("ReduceMin", unseen, [-1], keepdims=1), to=BOOL)
    return writer.op("Where", hidden, zero, mask), hidden


def _leaves_a_key(mask: np.ndarray) -> bool:
    """Whether every query sees a key."""
    return bool((mask if mask.dtype == bool else mask > -math.inf).any(-1).all())


def _grouped(writer: NodeWriter, mask: ir.Value, sizes: _Sizes, shared: _Shared) -> ir.Value:
    """Reshapes a mask that broadcasts to (B, H, T, U) so that it broadcasts to the scores: if heads share keys, these
    are (B, G, R, T, U), or (B, G, R * T, U) with `grouped_rows`.
    """
    G, R = sizes.G, sizes.H // sizes.G
    shape = static_shape(mask)
    assert shape is not None
    b, h, t, u = (1,) * (4 - len(shape)) + shape
    if R == 1 or (len(shape) == 2 and not shared.grouped_rows):
        return mask
    if not shared.grouped_rows:
        return writer.op("Reshape", mask, [b, *((1, 1) if h == 1 else (G, R)), t, u])
    key = (mask, R, sizes.T)
    if key not in shared.rows:
        heads = R if h == 1 else G * R
        whole = writer.op("Expand", writer.op("Reshape", mask, [b, h, t, u]), [b, heads, sizes.T, u])
        shared.rows[key] = writer.op("Reshape", whole, [b, heads // R, R * sizes.T, u])
    return shared.rows[key]


def _causal(writer: NodeWriter, T: int, U: int, q: ir.Value) -> ir.Value:
    """Bool (T, U): whether the query of a row may see the key of a column.

    An engine builder would compute a comparison of constants in advance and store the T * U result for every layer,
    26 MB each at 5,120 tokens. So the numbers of the queries are made to depend on the data.
    """
    query = np.arange(T, dtype=np.int32)[:, None]
    late = writer.op("Add", query, late_zero(writer, q, INT32, (1, 1)))
    return writer.op("GreaterOrEqual", late, np.arange(U, dtype=np.int32)[None, :])

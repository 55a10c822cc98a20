"""Attention in primitive operators, where a target has no kernel for the single operator.

TensorRT takes the ONNX Attention operator only where it has a dedicated kernel, and it has none for float32.

Shape legend: B batch, H query heads, G key/value heads (H a multiple of G, R = H / G), T tokens, E head width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from mod_export.errors import GraphError
from mod_export.export.nodes import NodeWriter, is_standard, is_used, label_of, late_zero, require_static_shape
from mod_export.types import Dialect, DType

INT32 = ir.DataType.INT32
KNOWN_ATTRIBUTES = frozenset({"is_causal", "scale", "softcap", "qk_matmul_output_mode"})


class DecomposeAttention:
    """Replaces Attention by MatMul, mask, Softmax, MatMul, the order that TensorRT's fusion looks for.

    The queries are scaled before the product, as that fusion expects. Grouped queries get an axis of their own, along
    which keys and values are broadcast without a copy. The causal mask compares two short ranges at run time: a stored
    mask of T * T would be larger than the weights. All attentions over the same T share the comparison.
    """

    name: ClassVar[str] = "decompose_attention"

    def applies(self, dialect: Dialect, dtype: DType) -> bool:
        return dtype not in dialect.attention_dtypes or dialect.attention_widths is not None

    def run(self, model: ir.Model, dialect: Dialect, dtype: DType) -> int:
        """Rewrites every Attention that the dialect has no kernel for.

        Raises:
            GraphError: an Attention with a mask, a cache, a soft cap or another feature that this pass cannot rewrite.
        """
        found = [(node, _sizes(node)) for node in _unwanted(model, dialect, dtype)]
        visible: dict[int, ir.Value] = {}
        for node, sizes in found:
            _rewrite(model.graph, node, sizes, visible)
        return len(found)

    def ensures(self, model: ir.Model, dialect: Dialect, dtype: DType) -> Sequence[str]:
        return [f"{label_of(node)} is still one Attention" for node in _unwanted(model, dialect, dtype)]


def _unwanted(model: ir.Model, dialect: Dialect, dtype: DType) -> list[ir.Node]:
    """Attention operators for which the dialect has no kernel, by dtype or by the width of a head."""
    found = [node for node in model.graph if is_standard(node, "Attention")]
    if dtype not in dialect.attention_dtypes:
        return found
    assert dialect.attention_widths is not None  # Otherwise this pass does not apply.
    narrowest, widest = dialect.attention_widths
    return [node for node in found if not narrowest <= require_static_shape(node.inputs[0], node)[-1] <= widest]


def _sizes(node: ir.Node) -> tuple[int, int, int, int, int]:
    """(B, H, G, T, E) of a causal or full self-attention: q (B, H, T, E), k (B, G, T, E), v (B, G, T, E)."""
    problems = [f"input {i} ({value.name})" for i, value in enumerate(node.inputs) if i > 2 and value is not None]
    problems += [f"output {i} ({value.name})" for i, value in enumerate(node.outputs) if i > 0 and is_used(value)]
    problems += [f"attribute {name}" for name in node.attributes if name not in KNOWN_ATTRIBUTES]
    softcap = node.attributes.get_float("softcap", 0.0)
    if softcap:
        problems.append(f"softcap {softcap}")
    if problems:
        raise GraphError(
            f"{label_of(node)}: Attention with {', '.join(problems)} cannot be put into primitive operators; expected "
            "query, key and value and at most is_causal and scale"
        )
    shapes = [require_static_shape(value, node) for value in node.inputs[:3]]
    if any(len(shape) != 4 for shape in shapes):
        raise GraphError(f"{label_of(node)}: Attention on shapes {shapes}, expected (batch, heads, tokens, width) each")
    (B, H, T, E), (_, G, _, _), _ = shapes
    if shapes[1:] != [(B, G, T, E)] * 2 or H % G:
        raise GraphError(
            f"{label_of(node)}: Attention with query {shapes[0]}, key {shapes[1]} and value {shapes[2]} is no "
            "self-attention over equal lengths and widths, with a number of heads that is a multiple of the keys'"
        )
    return B, H, G, T, E


def _rewrite(
    graph: ir.Graph, node: ir.Node, sizes: tuple[int, int, int, int, int], visible: dict[int, ir.Value]
) -> None:
    (B, H, G, T, E), (q, k, v) = sizes, node.inputs[:3]
    assert q is not None
    assert q.dtype is not None
    number = q.dtype.numpy()
    writer = NodeWriter(graph, node, "decomposed")
    if node.attributes.get_int("is_causal", 0) and T not in visible:
        visible[T] = _causal(writer, T, q)
    q = writer.op("Mul", q, np.array(node.attributes.get_float("scale", 1 / math.sqrt(E)), number))
    k = writer.op("Transpose", k, perm=[0, 1, 3, 2])
    if G != H:
        q = writer.op("Reshape", q, [B, G, H // G, T, E])
        k = writer.op("Reshape", k, [B, G, 1, E, T])
        v = writer.op("Reshape", v, [B, G, 1, T, E])
    weight = writer.op("MatMul", q, k)
    if node.attributes.get_int("is_causal", 0):
        weight = writer.op("Where", visible[T], weight, np.array(-math.inf, number))
    y = writer.op("MatMul", writer.op("Softmax", weight, axis=-1), v)
    writer.replace(y if G == H else writer.op("Reshape", y, [B, H, T, E]))


def _causal(writer: NodeWriter, T: int, q: ir.Value) -> ir.Value:
    """Bool (T, T): whether the query of this row may see the key of this column.

    A builder would compute a comparison of constants in advance and store the T * T result for every layer: 26 MB each
    at 5,120 tokens. So the numbers of the queries are made to depend on the data.
    """
    token = np.arange(T, dtype=np.int32)
    query = writer.op("Add", token[:, None], late_zero(writer, q, INT32, (1, 1)))
    return writer.op("GreaterOrEqual", query, token[None, :])

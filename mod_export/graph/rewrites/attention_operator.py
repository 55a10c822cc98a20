"""Replaces attention in primitive operators by the operator Attention, and a causal mask by the attribute `is_causal`.

softmax(q k^T * scale + mask) v of user code reads and writes all T * T scores several times, and later rewrites improve
causal attention (blocks of queries without the hidden half, no stored mask) only in the form of the operator.

Shape legend: B batch, H heads, T tokens of the queries, U of the keys, E head width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from typing import Any, ClassVar, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from mod_export.graph.nodes import (
    NodeWriter,
    constant_array,
    graph_around,
    is_standard,
    label_of,
    made_by,
    only_reader,
    static_shape,
)
from mod_export.types import DType, TargetLimits

FIRST_OPSET = 23
"""The first opset with the operator Attention."""
MASK = 3
"""The index of the operator's mask among its inputs."""
Known = dict[ir.Value, np.ndarray | None]
"""Value -> its array if it is a fixed mask, else None; a cache of `_fixed`."""
MASK_NODES, MASK_SIZE = 24, 2**26
"""The largest computation of a mask that is followed: number of operators, and elements of each result."""
MASK_MAKERS = (
    "Add", "And", "Cast", "ConstantOfShape", "Equal", "Expand", "Greater", "GreaterOrEqual", "Identity", "Less",
    "LessOrEqual", "Mul", "Not", "Or", "Range", "Reshape", "Slice", "Squeeze", "Sub", "Transpose", "Trilu", "Unsqueeze",
    "Where",
)  # fmt: skip
HIDDEN = float(np.finfo(np.float32).min) / 2
"""A mask that adds less than this hides a key: beside other scores, the exp of its score is 0."""
LARGE = 1e9
"""A score below minus this counts as minus infinity: no score that a model computes comes near it."""


class AttentionOperator:
    """Replaces MatMul, Softmax, MatMul by Attention, and the causal mask of an Attention by `is_causal`.

    A mask in primitive operators is only taken if it is a constant that leaves every query a key: if it hides all keys,
    the operator gives zeros, and the model NaN.
    """

    name: ClassVar[str] = "attention_operator"

    def applies(self, limits: TargetLimits, dtype: DType) -> bool:
        # Blocks of queries keep their own masks. The portable graph went through this rewrite before it had blocks.
        return not limits.query_blocks

    def run(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> int:
        known: Known = {}
        count = 0
        for old in _written_out(model, known):
            # Each attention is replaced at once, because the next one may read its result.
            count += 1
            writer = NodeWriter(graph_around(old.node), old.node, "operator")
            keys = _turned(writer, old.keys)
            mask = writer.op("Not", old.mask.value) if old.mask and old.mask.hides else old.mask and old.mask.value
            writer.replace(
                writer.op("Attention", old.query, keys, old.values, mask, like=old.node.outputs[0], scale=old.scale)
            )
        causal = _causal(model, known)
        for node in causal:
            node.replace_input_with(MASK, None)
            node.attributes["is_causal"] = ir.AttrInt64("is_causal", 1)
        return count + len(causal)

    def ensures(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> Sequence[str]:
        known: Known = {}
        return [
            *(f"{label_of(attention.node)} still writes attention out" for attention in _written_out(model, known)),
            *(f"{label_of(node)} still has a mask that is causal" for node in _causal(model, known)),
        ]


class _Mask(NamedTuple):
    """A mask: floats that are added to scores, or booleans, true where a query sees a key (does not, with `hides`)."""

    value: ir.Value
    hides: bool = False


class _Attention(NamedTuple):
    """Query (B, H, T, E), keys (B, H, E, U), values (B, H, U, F), the mask, the scale, and the last node."""

    query: ir.Value
    keys: ir.Value
    values: ir.Value
    mask: _Mask | None
    scale: float
    node: ir.Node


def _written_out(model: ir.Model, known: Known) -> Iterator[_Attention]:
    for node in model.graph.all_nodes() if model.opset_imports.get("", 0) >= FIRST_OPSET else ():
        softmax = made_by(node.inputs[0], "Softmax") if is_standard(node, "MatMul") else None
        if softmax is None or only_reader(softmax.outputs[0]) is not node:
            continue
        if softmax.attributes.get_int("axis", -1) not in (-1, 3):
            continue
        parts = _scores(softmax.inputs[0], known)
        if parts is None:
            continue
        (query, keys, scale, mask), values = parts, node.inputs[1]
        shapes = [static_shape(value) for value in (query, keys, values)]
        if values is None or any(shape is None or len(shape) != 4 for shape in shapes):
            continue
        (B, H, T, _), (*rows, _, U), last = (shape for shape in shapes if shape is not None)
        if rows == [B, H] and last[:3] == (B, H, U) and _leaves_a_key(mask, (B, H, T, U), known):
            yield _Attention(query, keys, values, mask, scale, node)


def _scores(value: ir.Value | None, known: Known) -> tuple[ir.Value, ir.Value, float, _Mask | None] | None:
    """(query, keys, scale, mask) of a value that is query @ keys, with an optional factor and an optional mask."""
    scale, mask, reader = 1.0, None, made_by(value, "Add", "Where")
    if reader is not None:
        masked = _added(reader, known) if reader.op_type == "Add" else _chosen(reader, known)
        if masked is None or only_reader(masked[0]) is not reader:
            return None
        value, mask = masked
    if (scaled := made_by(value, "Mul", "Div")) is not None:
        number = constant_array(scaled.inputs[1])
        value = scaled.inputs[0]
        if number is None or number.size != 1 or value is None or only_reader(value) is not scaled:
            return None
        scale = float(number.item()) if scaled.op_type == "Mul" else 1 / float(number.item())
    product = made_by(value, "MatMul")
    if product is None or value is None or only_reader(value) is None or not scale > 0:
        return None
    query, keys = product.inputs
    return None if query is None or keys is None else (query, keys, scale, mask)


def _turned(writer: NodeWriter, keys: ir.Value) -> ir.Value:
    """Keys (B, H, E, U) as (B, H, U, E); a Transpose of the model itself is undone or merged."""
    node, order = made_by(keys, "Transpose"), [0, 1, 3, 2]
    if node is None or node.inputs[0] is None or "perm" not in node.attributes:
        return writer.op("Transpose", keys, perm=order)
    before = node.attributes.get_ints("perm")
    order = [before[n] for n in order]
    return node.inputs[0] if order == [0, 1, 2, 3] else writer.op("Transpose", node.inputs[0], perm=order)


def _added(node: ir.Node, known: Known) -> tuple[ir.Value, _Mask] | None:
    """(scores, mask) of an Add."""
    a, b = node.inputs
    scores, mask = (b, a) if _fixed(a, known) is not None else (a, b)
    return None if scores is None or mask is None else (scores, _Mask(mask))


def _chosen(node: ir.Node, known: Known) -> tuple[ir.Value, _Mask] | None:
    """(scores, mask) of a Where that keeps each score or replaces it by a number that hides its key."""
    condition, *either = node.inputs
    for hides, (low, scores) in ((True, either), (False, either[::-1])):
        number = _fixed(low, known)
        if number is not None and number.size == 1 and number.item() <= -LARGE and scores is not None:
            return None if condition is None else (scores, _Mask(condition, hides))
    return None


def _leaves_a_key(mask: _Mask | None, shape: tuple[int, int, int, int], known: Known) -> bool:
    """Whether a mask is a constant that fits Attention and leaves every query a key; true without a mask."""
    if mask is None:
        return True
    array, (B, H, T, U) = _fixed(mask.value, known), shape
    if array is None or array.ndim > 4:
        return False
    sizes = (1,) * (4 - array.ndim) + array.shape
    fits = sizes[0] in (1, B) and sizes[1] in (1, H) and sizes[2:] == (T, U)
    seen = array != mask.hides if array.dtype == bool else array > HIDDEN
    return fits and bool(seen.any(-1).all())


def _causal(model: ir.Model, known: Known) -> list[ir.Node]:
    """The Attentions whose only mask is a constant that hides exactly the later keys from each query."""
    return [
        node
        for node in model.graph.all_nodes()
        if is_standard(node, "Attention")
        and len(node.inputs) > MASK
        and not any(value is not None for value in node.inputs[MASK + 1 :])
        and not node.attributes.get_int("is_causal", 0)
        and _is_causal(_fixed(node.inputs[MASK], known))
    ]


def _is_causal(mask: np.ndarray | None) -> bool:
    if mask is None or mask.ndim < 2 or mask.shape[-1] != mask.shape[-2]:
        return False
    seen = np.tril(np.ones(mask.shape[-2:], dtype=bool))
    if mask.dtype == bool:
        return bool((mask == seen).all())
    return bool((mask[..., seen] == 0).all() and (mask[..., ~seen] < HIDDEN).all())


def _fixed(value: ir.Value | None, known: Known) -> np.ndarray | None:
    """The array of a mask that depends on no input and no weight, such as one that `torch.triu` makes when the model
    runs; None for any other value.
    """
    if value is None or (constant := constant_array(value)) is not None:
        return None if value is None else constant
    if value not in known:
        known[value] = _computed(value)
    return known[value]


def _producer(value: ir.Value | None) -> ir.Node | None:
    return None if value is None else value.producer()


def _computed(value: ir.Value) -> np.ndarray | None:
    nodes: list[ir.Node] = []
    constants: dict[str, np.ndarray] = {}
    waiting, seen = [value], {value}
    while waiting:
        current = waiting.pop()
        node, array, shape = current.producer(), constant_array(current), static_shape(current)
        if array is not None:
            constants[str(current.name)] = array
            continue
        # Subgraphs, and operators that give another result each time, make no masks.
        if node is None or shape is None or math.prod(shape) > MASK_SIZE or not is_standard(node, *MASK_MAKERS):
            return None
        nodes += [node] if node not in nodes else []
        if len(nodes) > MASK_NODES:
            return None
        new = [source for source in node.inputs if source is not None and source not in seen]
        seen.update(new)
        waiting += new
    # Not in the order of a graph: nodes in a branch of an If can read what is computed around it.
    order = TopologicalSorter({node: [one for one in map(_producer, node.inputs) if one in nodes] for node in nodes})
    graph = onnx.helper.make_graph(
        [ir.to_proto(node) for node in order.static_order()],
        "mask",
        [],
        [onnx.helper.make_empty_tensor_value_info(str(value.name))],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opset = onnx.helper.make_opsetid("", FIRST_OPSET)
    outputs: Any = ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=[opset])).run(None, {})
    return np.asarray(outputs[0])

"""Makes the attention of a prefill read only about as much of its cache as is in use.

A graph has fixed shapes, so tokens attend to all slots of a cache, and a mask hides those that are not in use. While
the first part of a prompt is read, no slot is in use, and during the second part few are. So conditions are put around
the attention, which choose between several lengths of the cache: none, a quarter, a half, or all of it. This rewrite is
for targets without an operator that reads a part of a cache (`continued_attention.py`).

Shape legend: B = 1 row of text, T tokens, L slots, n of them that are read, U = n + T keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from mod_export.graph.nodes import NodeWriter, attributes_of, graph_around, require_static_shape, static_shape
from mod_export.graph.rewrites.attention import LEAVES_A_KEY
from mod_export.graph.rewrites.continued_attention import KEYS, MASK, QUERY, VALUES, Continued, continued_layers
from mod_export.types import DType, TargetLimits

LEAST = 4
"""A cache of fewer than this many times T slots is read as a whole."""


class CacheInUse:
    """Puts conditions around the attentions of a prefill to long caches. Attentions in branches stay as they are."""

    name: ClassVar[str] = "cache_in_use"

    def applies(self, limits: TargetLimits, dtype: DType) -> bool:
        return limits.cache_in_use

    def run(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> int:
        attentions = _attentions(model)
        conditions: dict[tuple[ir.Value, int], ir.Value] = {}
        masks: dict[tuple[ir.Value, int], ir.Value] = {}
        for attention in attentions:
            _choose(attention, conditions, masks)
        return len(attentions)

    def ensures(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> Sequence[str]:
        return []


def _attentions(model: ir.Model) -> list[Continued]:
    attentions = [attention for layer in continued_layers(model.graph, 1) for attention in layer.attentions]
    return [
        attention
        for attention in attentions
        if attention.node.graph is model.graph and _slots(attention) >= LEAST * _sizes(attention)[2]
    ]


def _sizes(attention: Continued) -> tuple[int, ...]:
    """The sizes of the query, (1, H, T, E)."""
    return require_static_shape(attention.node.inputs[QUERY], attention.node)


def _slots(attention: Continued) -> int:
    return require_static_shape(attention.caches[0], attention.node)[2]


def _choose(
    attention: Continued,
    conditions: dict[tuple[ir.Value, int], ir.Value],
    masks: dict[tuple[ir.Value, int], ir.Value],
) -> None:
    """Replaces an attention by a chain of conditions. Attentions with the same mask share conditions and masks."""
    node, L = attention.node, _slots(attention)
    writer = NodeWriter(graph_around(node), node, "in_use")
    mask = node.inputs[MASK]
    assert mask is not None
    lengths = (0, L // 4, L // 2)
    for n in lengths:
        if (mask, n) not in conditions:
            fits = writer.op("LessOrEqual", attention.used, np.array(n))
            conditions[mask, n] = writer.op("Reshape", fits, np.zeros(0, np.int64))
    for n in (*lengths, L):
        if (mask, n) not in masks:
            masks[mask, n] = _mask(writer, mask, n, L)
    condition: ir.Node | None = None
    for n in reversed(lengths):
        longer_branch = _branch(attention, L, masks[mask, L]) if condition is None else _graph(attention, condition)
        shorter_branch = _branch(attention, n, masks[mask, n])
        condition = _either(attention, conditions[mask, n], shorter_branch, longer_branch)
    assert condition is not None
    graph_around(node).insert_before(node, condition)
    writer.replace(condition.outputs[0])


def _mask(writer: NodeWriter, mask: ir.Value, n: int, L: int) -> ir.Value:
    """Writes what is added to the scores of T tokens and n slots, float32 (1, 1, T, n + T)."""
    _, _, _, U = static_shape(mask) or (0, 0, 0, 0)
    visible = mask
    if n < L:
        own = writer.op("Slice", mask, [L], [U], [3])
        visible = own if n == 0 else writer.op("Concat", writer.op("Slice", mask, [0], [n], [3]), own, axis=3)
    added = writer.op("Where", visible, np.array(0, np.float32), np.array(-math.inf, np.float32))
    added.meta[LEAVES_A_KEY] = True
    return added


def _branch(attention: Continued, n: int, mask: ir.Value) -> ir.Graph:
    """Returns a graph of the attention of the tokens to the first n slots and to their own keys."""
    old = attention.node
    inputs = [old.inputs[QUERY], *attention.pair, mask]
    node = ir.Node("", "Attention", inputs, name=f"{old.name}/first_{n}")
    for name, value in attributes_of(old).items():
        node.attributes[name] = ir.convenience.convert_attribute(name, value)
    node.metadata_props.update(old.metadata_props)
    graph = _graph(attention, _typed(attention, node))
    writer = NodeWriter(graph, node, "cache")
    for index, cache, own in zip((KEYS, VALUES), attention.caches, attention.pair, strict=True):
        if n == _slots(attention):
            node.replace_input_with(index, writer.op("Concat", cache, own, axis=2))
        elif n:
            node.replace_input_with(index, writer.op("Concat", writer.op("Slice", cache, [0], [n], [2]), own, axis=2))
    return graph


def _either(attention: Continued, condition: ir.Value, few: ir.Graph, more: ir.Graph) -> ir.Node:
    """A node that runs one of two graphs."""
    branches = [ir.AttrGraph("then_branch", few), ir.AttrGraph("else_branch", more)]
    return _typed(attention, ir.Node("", "If", [condition], branches, name=f"{few[0].name}/or_more"))


def _graph(attention: Continued, node: ir.Node) -> ir.Graph:
    """A branch of one node."""
    opsets = dict(graph_around(attention.node).opset_imports)
    return ir.Graph([], node.outputs, nodes=[node], opset_imports=opsets, name=f"{node.name}_branch")


def _typed(attention: Continued, node: ir.Node) -> ir.Node:
    """Gives the only output of a node the type of the attention's output."""
    old, (output,) = attention.node.outputs[0], node.outputs
    output.name, output.type = f"{node.name}_y", old.type
    output.shape = None if old.shape is None else old.shape.copy()
    return node

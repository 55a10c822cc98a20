"""Lets attention over a cache rotate queries and keys itself, and read them and the values from one product.

After `cached_attention`, a step's attention is one node that attends and two nodes that rotate, each of a few hundred
numbers, so that starting nodes and waiting threads take a part of the time. ONNX Runtime's GroupQueryAttention rotates
by tables that it indexes with the positions. If one product makes queries, keys and values (`quantize_weights`), it
reads them from the result of that product.

Source: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.GroupQueryAttention

Shape legend: B rows of text, P positions of a table, E head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import onnx_ir as ir

from mod_export.graph.nodes import NodeWriter, made_by, require_static_shape, static_shape
from mod_export.graph.rewrites.products import MICROSOFT
from mod_export.types import DType, TargetLimits

QUERY, KEY, VALUE, KEY_CACHE, TOTAL = 0, 1, 2, 3, 6
"""The indices of the operator's inputs."""
ATTRIBUTES = ("interleaved", "rotary_embedding_dim")
"""The attributes of RotaryEmbedding besides the number of heads."""
WIDTHS = 16
"""The operator only rotates heads whose width is a multiple of this."""
VIEWS = ("Reshape", "Unsqueeze", "Squeeze")


class _Rotation(NamedTuple):
    """The rotation of queries and keys: tables (P, E / 2), int64 positions of B elements, and if it is interleaved."""

    cos: ir.Value
    sin: ir.Value
    positions: ir.Value
    interleaved: int


class PackedAttention:
    """Moves RotaryEmbedding into GroupQueryAttention, and a Split into queries, keys and values likewise.

    A rotation of only a part of a head, or by computed tables, stays as it is.
    """

    name: ClassVar[str] = "packed_attention"

    def applies(self, limits: TargetLimits, dtype: DType) -> bool:
        return limits.cached_attention

    def run(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> int:
        attentions = [(node, rotation) for node in model.graph.all_nodes() if (rotation := _rotation(node)) is not None]
        shared: dict[tuple[ir.Graph, ir.Value], ir.Value] = {}
        for node, rotation in attentions:
            _rotate_inside(node, rotation, shared)
        return len(attentions)

    def ensures(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> Sequence[str]:
        return []


def _rotation(node: ir.Node) -> _Rotation | None:
    if node.domain != MICROSOFT or node.op_type != "GroupQueryAttention":
        return None
    query, key = (made_by(node.inputs[number], "RotaryEmbedding") for number in (QUERY, KEY))
    cache = static_shape(node.inputs[KEY_CACHE])
    if query is None or key is None or cache is None or list(query.inputs[1:]) != list(key.inputs[1:]):
        return None
    interleaved, partial = ({one.attributes.get_int(name, 0) for one in (query, key)} for name in ATTRIBUTES)
    cos, sin = (_looked_up(value, cache) for value in query.inputs[1:3])
    if len(query.inputs) != 3 or len(interleaved) > 1 or partial != {0} or cache[3] % WIDTHS:
        return None
    if cos is None or sin is None or cos[1] is not sin[1]:
        return None
    return _Rotation(cos[0], sin[0], cos[1], *interleaved)


def _looked_up(value: ir.Value | None, cache: tuple[int, ...]) -> tuple[ir.Value, ir.Value] | None:
    """(table, positions), if a value is a table's row for the one token of each row of text."""
    while (view := made_by(value, *VIEWS)) is not None:
        value = view.inputs[0]
    gather = made_by(value, "Gather")
    if gather is None or gather.attributes.get_int("axis", 0) != 0:
        return None
    table, positions = gather.inputs
    while (view := made_by(positions, *VIEWS)) is not None:
        positions = view.inputs[0]
    rows, shape = static_shape(positions), static_shape(table)
    B, _, _, E = cache
    if table is None or positions is None or not table.is_initializer() or rows is None or int(np.prod(rows)) != B:
        return None
    return (table, positions) if shape is not None and len(shape) == 2 and shape[1] == E // 2 else None


def _rotate_inside(node: ir.Node, rotation: _Rotation, shared: dict[tuple[ir.Graph, ir.Value], ir.Value]) -> None:
    """Moves a rotation into its attention. `shared` holds tables and positions of earlier attentions of the graph."""
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    writer = NodeWriter(graph, node, "packed")
    B, _, slots, _ = require_static_shape(node.inputs[KEY_CACHE], node)
    query, key = (made_by(node.inputs[number], "RotaryEmbedding") for number in (QUERY, KEY))
    assert query is not None
    assert key is not None
    parts = [query.inputs[0], key.inputs[0], node.inputs[VALUE]]
    split = made_by(parts[0], "Split")
    if split is not None and list(split.outputs) == parts:
        parts = [split.inputs[0], None, None]
    if (graph, rotation.positions) not in shared:
        shared[graph, rotation.positions] = writer.op("Reshape", rotation.positions, [B, 1])
    for table in (rotation.cos, rotation.sin):
        P, columns = require_static_shape(table, node)
        missing = slots - P
        if (graph, table) not in shared:
            # The operator needs a table row for every slot, also for the last one, which has no position.
            none = np.zeros((missing, columns), np.float32) if missing > 0 else None
            shared[graph, table] = table if none is None else writer.op("Concat", table, none, axis=0)
    results = writer.many(
        "GroupQueryAttention",
        list(node.outputs),
        *parts,
        *node.inputs[KEY_CACHE : TOTAL + 1],
        *(shared[graph, value] for value in (rotation.cos, rotation.sin, rotation.positions)),
        domain=MICROSOFT,
        **{name: attribute.value for name, attribute in node.attributes.items()},
        do_rotary=1,
        rotary_interleaved=rotation.interleaved,
    )
    for old, new in zip(node.outputs, results, strict=True):
        new.name, old.name = old.name, None
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    graph.remove(node, safe=True)

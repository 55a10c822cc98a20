"""A step that writes what it has to remember into its cache itself, where the cache lies.

A step hands out one key and one value row for each layer, and the owner of the cache writes them into their slots.
Where cache and engine are on a device, that would be a round trip for every token. ONNX TensorScatter (opset 24) is
such a write; TensorRT makes it a layer whose input and output are one piece of memory.

Shape legend: B rows of text, G key/value heads, L slots, E head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import onnx_ir as ir

from mod_export.artifacts import Dialect, DType
from mod_export.errors import GraphError
from mod_export.graph.cache_ports import LOGITS, SLOTS, cache_of_row, layer_of_cache, present_of
from mod_export.graph.nodes import NodeWriter, late_zero, static_shape

__all__ = ["CacheInPlace"]

OPSET = 24
"""The first with TensorScatter."""
BOOL, INT64 = ir.DataType.BOOL, ir.DataType.INT64
SEQUENCE = -2
"""The axis of slots, the only one that TensorRT takes."""


class _Write(NamedTuple):
    """One row and the cache that it belongs to; `shape` is (B, G, L, E)."""

    place: int
    row: ir.Value
    cache: ir.Value
    slots: ir.Value
    logits: ir.Value
    shape: tuple[int, int, int, int]


class _Target(NamedTuple):
    """Where the rows of one layer go: their slots, and (B, 1, 1, 1) which of them are new."""

    slot_B: ir.Value
    kept_B111: ir.Value


class CacheInPlace:
    """Replaces each output `keys_row_<layer>` by `present_keys_<layer>`, the cache with that row in its slot.

    A write takes place in every step, whether or not there is something to remember. Where there is not, the last slot
    gets what it holds: it may be in use, when all places of a row are taken. Where there is, the slot is one that
    attention has hidden from this token. So neither write changes a number that the step reads, in whatever order an
    engine reads and writes the same memory.

    The writes still wait for the logits, because TensorRT-RTX 1.7.1 otherwise ties the write of a key to the kernel
    that makes it, which is before the last read. It finds "uses before defs" then, or dies (docs/LOG.md).
    """

    name: ClassVar[str] = "cache_in_place"

    def applies(self, dialect: Dialect, dtype: DType) -> bool:
        return dialect.cache_update

    def run(self, model: ir.Model, dialect: Dialect, dtype: DType) -> int:
        """Rewrites every row that a step hands out.

        Raises:
            GraphError: rows without a cache and slots to write them to.
        """
        graph = model.graph
        writes = [_write(graph, index, cache) for index, cache in _rows(graph)]
        if not writes:
            return 0
        nought = late_zero(_writer(graph, writes[0], "wait"), writes[0].logits, INT64, (1,))
        targets: dict[int, _Target] = {}
        for write in writes:
            layer = layer_of_cache(str(write.cache.name))
            if layer not in targets:
                targets[layer] = _target(_writer(graph, write, "target"), write, layer, nought)
            _rewrite(graph, write, targets[layer])
        graph.sort()
        graph.opset_imports[""] = max(OPSET, graph.opset_imports.get("", 0))
        return len(writes)

    def ensures(self, model: ir.Model, dialect: Dialect, dtype: DType) -> Sequence[str]:
        return [f"output {model.graph.outputs[index].name} is for another to write" for index, _ in _rows(model.graph)]


def _rows(graph: ir.Graph) -> list[tuple[int, str]]:
    """Number of each output that is a row, and the name of its cache."""
    named = [(index, cache_of_row(value.name)) for index, value in enumerate(graph.outputs)]
    return [(index, cache) for index, cache in named if cache is not None]


def _write(graph: ir.Graph, place: int, name: str) -> _Write:
    row = graph.outputs[place]
    cache = next((value for value in graph.inputs if value.name == name), None)
    slots, logits = (next((value for value in graph.outputs if value.name == one), None) for one in (SLOTS, LOGITS))
    shapes = [static_shape(value) for value in (row, cache, slots, logits)]
    if cache is not None and slots is not None and logits is not None and row.producer() is not None:
        match shapes:
            case ((B, G, E), (_, _, L, _), (_, layers), (_, V)):
                if shapes[1:] == [(B, G, L, E), (B, layers), (B, V)] and layer_of_cache(name) < layers:
                    return _Write(place, row, cache, slots, logits, (B, G, L, E))
    raise GraphError(
        f"{row.name}: is a row of no cache: row {shapes[0]}, input {name} {shapes[1]}, outputs {SLOTS} {shapes[2]} and "
        f"{LOGITS} {shapes[3]}; expected (B, G, E), (B, G, L, E), (B, layers) and (B, V), computed and of fixed sizes"
    )


def _writer(graph: ir.Graph, write: _Write, purpose: str) -> NodeWriter:
    producer = write.row.producer()
    assert producer is not None
    return NodeWriter(graph, producer, f"{write.cache.name}_{purpose}")


def _rewrite(graph: ir.Graph, write: _Write, target: _Target) -> None:
    B, G, L, E = write.shape
    name, dtype, writer = str(write.cache.name), write.row.dtype, _writer(graph, write, "write")
    assert dtype is not None
    axis = writer.constant("axis_2", np.array([2]))
    start, end = writer.constant(f"from_{L - 1}", np.array([L - 1])), writer.constant(f"to_{L}", np.array([L]))
    new_BG1E = writer.op("Unsqueeze", [write.row, axis], dtype, (B, G, 1, E))
    old_BG1E = writer.op("Slice", [write.cache, start, end, axis], dtype, (B, G, 1, E))
    update_BG1E = writer.op("Where", [target.kept_B111, new_BG1E, old_BG1E], dtype, (B, G, 1, E))
    inputs = [write.cache, update_BG1E, target.slot_B]
    present = writer.op("TensorScatter", inputs, dtype, write.shape, {"axis": SEQUENCE})
    present.name = present_of(name)
    graph.outputs[write.place] = present


def _target(writer: NodeWriter, write: _Write, layer: int, nought: ir.Value) -> _Target:
    B, _, L, _ = write.shape
    column = writer.constant(f"column_{layer}", np.array(layer))
    slot_B = writer.op("Gather", [write.slots, column], INT64, (B,), {"axis": 1})
    kept_B = writer.op("GreaterOrEqual", [slot_B, nought], BOOL, (B,))
    shape = writer.constant(f"shape_{B}x1x1x1", np.array([B, 1, 1, 1]))
    kept_B111 = writer.op("Reshape", [kept_B, shape], BOOL, (B, 1, 1, 1))
    last = writer.constant(f"slot_{L - 1}", np.array(L - 1))
    return _Target(writer.op("Where", [kept_B, slot_B, last], INT64, (B,)), kept_B111)

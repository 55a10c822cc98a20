"""Makes a decode step update its cache in place.

A step returns one key row and one value row for each layer, and the owner of the cache writes them into their slots.
Where cache and engine are on a device, that would be a round trip for every token. ONNX TensorScatter (opset 24) is
such a write; TensorRT makes it a layer whose input and output share their memory.

Passes know a cache by the names of inputs and outputs alone: `keys_<layer>` and `values_<layer>` (B, G, L, E) as inputs
of a step and outputs of a prefill, `keys_row_<layer>` and `values_row_<layer>` (B, G, E) as outputs of a step, and
`present_keys_<layer>` and `present_values_<layer>` as outputs of a step that updates its cache itself.

Shape legend: B rows of text, G key/value heads, L slots, E head width.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import onnx_ir as ir

from mod_export.errors import GraphError
from mod_export.export.nodes import NodeWriter, late_zero, static_shape
from mod_export.types import Dialect, DType

__all__ = ["LOGITS", "SLOTS", "CacheInPlace", "cache_of_row", "is_cache", "layer_of_cache", "present_of"]

OPSET = 24
"""The first opset with TensorScatter."""
SEQUENCE = -2
"""The axis of slots, the only one that TensorRT accepts."""
LOGITS = "logits"
"""Output (B, V), that every read of a cache leads to."""
SLOTS = "slots"
"""Output int64 (B, layers) of a step: where the rows belong, -1 where there is nothing to remember."""

_CACHE = re.compile(r"(?:present_)?(?:keys|values)(?:_row)?_(\d+)")
_ROW = re.compile(r"(keys|values)_row_(\d+)")


class _Write(NamedTuple):
    """Output `number`, a row, and the cache that it belongs to; `shape` is (B, G, L, E)."""

    number: int
    row: ir.Value
    cache: ir.Value
    slots: ir.Value
    logits: ir.Value
    shape: tuple[int, int, int, int]


class CacheInPlace:
    """Replaces each output `keys_row_<layer>` by `present_keys_<layer>`, the cache with that row in its slot.

    Every step writes, whether or not the token is kept. Where it is not kept, the last slot is written with its own
    content, since it may be in use. Where it is kept, its slot is hidden from the token by attention's mask. So neither
    write changes a number that the step reads, in whatever order an engine reads and writes the same memory.

    The writes still wait for the logits, because TensorRT-RTX 1.7.1 otherwise joins the write of a key with the kernel
    that computes it, which runs before the last read. It then reports "uses before defs", or crashes (docs/LOG.md).
    """

    name: ClassVar[str] = "cache_in_place"

    def applies(self, dialect: Dialect, dtype: DType) -> bool:
        return dialect.cache_update

    def run(self, model: ir.Model, dialect: Dialect, dtype: DType) -> int:
        """Rewrites every row that a step returns.

        Raises:
            GraphError: rows without a cache, or without slots to write them to.
        """
        graph = model.graph
        writes = [_write(graph, index, cache) for index, cache in _rows(graph)]
        if not writes:
            return 0
        graph.opset_imports[""] = max(OPSET, graph.opset_imports.get("", 0))
        zero = late_zero(_writer(graph, writes[0], "wait"), writes[0].logits, ir.DataType.INT64, (1,))
        slots: dict[int, tuple[ir.Value, ir.Value]] = {}
        for write in writes:
            layer = layer_of_cache(str(write.cache.name))
            if layer not in slots:
                slots[layer] = _slot(_writer(graph, write, "slot"), write, layer, zero)
            graph.outputs[write.number] = _present(_writer(graph, write, "write"), write, *slots[layer])
        graph.sort()
        return len(writes)

    def ensures(self, model: ir.Model, dialect: Dialect, dtype: DType) -> Sequence[str]:
        return [
            f"output {model.graph.outputs[index].name} is left for the caller to write"
            for index, _ in _rows(model.graph)
        ]


def _rows(graph: ir.Graph) -> list[tuple[int, str]]:
    """(number, name of its cache) of each output that is a row."""
    named = [(index, cache_of_row(value.name)) for index, value in enumerate(graph.outputs)]
    return [(index, cache) for index, cache in named if cache is not None]


def _write(graph: ir.Graph, number: int, name: str) -> _Write:
    row = graph.outputs[number]
    cache = next((value for value in graph.inputs if value.name == name), None)
    slots, logits = (next((value for value in graph.outputs if value.name == one), None) for one in (SLOTS, LOGITS))
    shapes = [static_shape(value) for value in (row, cache, slots, logits)]
    if cache is not None and slots is not None and logits is not None and row.producer() is not None:
        match shapes:
            case ((B, G, E), (_, _, L, _), (_, layers), (_, V)):
                if shapes[1:] == [(B, G, L, E), (B, layers), (B, V)] and layer_of_cache(name) < layers:
                    return _Write(number, row, cache, slots, logits, (B, G, L, E))
    raise GraphError(
        f"{row.name}: no cache fits this row: row {shapes[0]}, input {name} {shapes[1]}, outputs {SLOTS} {shapes[2]} "
        f"and {LOGITS} {shapes[3]}; expected (B, G, E), (B, G, L, E), (B, layers) and (B, V), "
        "computed and of fixed sizes"
    )


def _writer(graph: ir.Graph, write: _Write, purpose: str) -> NodeWriter:
    producer = write.row.producer()
    assert producer is not None
    return NodeWriter(graph, producer, f"{write.cache.name}_{purpose}")


def _slot(writer: NodeWriter, write: _Write, layer: int, zero: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The slots (B,) that rows of one layer are written to, and (B, 1, 1, 1) which of the rows are to be kept."""
    B, _, L, _ = write.shape
    slot_B = writer.op("Gather", write.slots, np.array(layer), axis=1)
    kept_B = writer.op("GreaterOrEqual", slot_B, zero)
    return writer.op("Where", kept_B, slot_B, np.array(L - 1)), writer.op("Reshape", kept_B, [B, 1, 1, 1])


def _present(writer: NodeWriter, write: _Write, slot_B: ir.Value, kept_B111: ir.Value) -> ir.Value:
    L = write.shape[2]
    new_BG1E = writer.op("Unsqueeze", write.row, [2])
    old_BG1E = writer.op("Slice", write.cache, [L - 1], [L], [2])
    update_BG1E = writer.op("Where", kept_B111, new_BG1E, old_BG1E)
    present = writer.op("TensorScatter", write.cache, update_BG1E, slot_B, axis=SEQUENCE)
    present.name = present_of(str(write.cache.name))
    return present


def is_cache(name: str | None) -> bool:
    """Whether an input or output holds keys or values, whole or one row of them."""
    return name is not None and _CACHE.fullmatch(name) is not None


def cache_of_row(name: str | None) -> str | None:
    """`keys_3` of `keys_row_3`; None for anything but a row."""
    match = None if name is None else _ROW.fullmatch(name)
    return f"{match[1]}_{match[2]}" if match else None


def present_of(cache: str) -> str:
    """What the updated form of a cache is called."""
    return f"present_{cache}"


def layer_of_cache(cache: str) -> int:
    """The layer, which is also the column of `slots`."""
    return int(cache.rpartition("_")[2])

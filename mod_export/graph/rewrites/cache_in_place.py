"""Makes a decode step update its cache in place.

A step returns one key row and one value row for each layer, and the owner of the cache writes them into their slots. If
cache and engine are on a device, that takes a round trip for every token. ONNX TensorScatter (opset 24) is such a write
in the graph; TensorRT runs it as a layer whose input and output share their memory.

Rewrites recognize a cache by the names of inputs and outputs: `keys_<layer>` and `values_<layer>` (B, G, L, E) as
inputs of a step and outputs of a prefill, `keys_row_<layer>` and `values_row_<layer>` (B, G, E) as outputs of a step,
and `present_keys_<layer>` and `present_values_<layer>` as outputs of a step that updates its cache itself.

Shape legend: B rows of text, G key/value heads, L slots, E head width.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import onnx_ir as ir

from mod_export.errors import GraphError
from mod_export.graph.nodes import NodeWriter, late_zero, static_shape
from mod_export.types import DType, TargetLimits

OPSET = 24
"""The first opset with TensorScatter."""
SEQUENCE = -2
"""The axis of slots, the only one that TensorRT accepts."""
LOGITS = "logits"
"""The name of the output (B, V), which depends on every read of a cache."""
SLOTS = "slots"
"""The name of a step's output int64 (B, layers): the slots of its rows, or -1 for a row that is not kept."""

_CACHE = re.compile(r"(?:present_)?(?:keys|values)(?:_row)?_(\d+)")
_ROW = re.compile(r"(keys|values)_row_(\d+)")


class _Write(NamedTuple):
    """A row, which is output `number` of a step, and the cache (B, G, L, E) of `layer` that it belongs to."""

    number: int
    row: ir.Value
    cache: ir.Value
    layer: int
    slots: ir.Value
    logits: ir.Value
    sizes: tuple[int, int]
    """B and L."""

    def writer(self, purpose: str) -> NodeWriter:
        producer = self.row.producer()
        assert producer is not None
        assert isinstance(producer.graph, ir.Graph)
        return NodeWriter(producer.graph, producer, f"{self.cache.name}_{purpose}")


class CacheInPlace:
    """Replaces each output `keys_row_<layer>` by `present_keys_<layer>`, the cache with that row in its slot.

    Every step writes, whether or not the token is kept. If it is not kept, the last slot is written with its own
    content, since it may be in use. If it is kept, attention's mask hides its slot from the token. So neither write
    changes a number that the step reads, in any order in which an engine reads and writes the same memory.

    The writes still wait for the logits, because TensorRT-RTX 1.7.1 otherwise fuses the write of a key with the kernel
    that computes it, which runs before the last read. It then reports "uses before defs", or crashes (docs/LOG.md).
    """

    name: ClassVar[str] = "cache_in_place"

    def applies(self, limits: TargetLimits, dtype: DType) -> bool:
        return limits.cache_update

    def run(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> int:
        """Rewrites every row that a step returns.

        Raises:
            GraphError: a row has no cache, or no slots to write it to.
        """
        graph = model.graph
        writes = [_write(graph, *row) for row in _rows(graph)]
        if not writes:
            return 0
        graph.opset_imports[""] = max(OPSET, graph.opset_imports.get("", 0))
        zero = late_zero(writes[0].writer("wait"), writes[0].logits, ir.DataType.INT64, (1,))
        slots: dict[int, tuple[ir.Value, ir.Value]] = {}
        for write in writes:
            if write.layer not in slots:
                slots[write.layer] = _slot(write, zero)
            graph.outputs[write.number] = _present(write, *slots[write.layer])
        graph.sort()
        return len(writes)

    def ensures(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> Sequence[str]:
        return [f"output {row.string} is left for the caller to write" for _, row in _rows(model.graph)]


def _rows(graph: ir.Graph) -> list[tuple[int, re.Match[str]]]:
    """(number, match of the name) of each output that is a row."""
    named = [(number, _ROW.fullmatch(value.name or "")) for number, value in enumerate(graph.outputs)]
    return [(number, match) for number, match in named if match]


def _write(graph: ir.Graph, number: int, found: re.Match[str]) -> _Write:
    row, name, layer = graph.outputs[number], f"{found[1]}_{found[2]}", int(found[2])
    cache = next((value for value in graph.inputs if value.name == name), None)
    slots, logits = (next((value for value in graph.outputs if value.name == key), None) for key in (SLOTS, LOGITS))
    shapes = [static_shape(value) for value in (row, cache, slots, logits)]
    if cache is not None and slots is not None and logits is not None and row.producer() is not None:
        match shapes:
            case ((B, G, E), (_, _, L, _), (_, layers), (_, V)):
                if shapes[1:] == [(B, G, L, E), (B, layers), (B, V)] and layer < layers:
                    return _Write(number, row, cache, layer, slots, logits, (B, L))
    raise GraphError(
        f"{row.name}: no cache fits this row: row {shapes[0]}, input {name} {shapes[1]}, outputs {SLOTS} {shapes[2]} "
        f"and {LOGITS} {shapes[3]}; expected (B, G, E), (B, G, L, E), (B, layers) and (B, V), "
        "computed and of fixed sizes"
    )


def _slot(write: _Write, zero: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The slots (B,) that the rows of one layer are written to, and whether each row is kept, (B, 1, 1, 1)."""
    writer, (B, L) = write.writer("slot"), write.sizes
    slot_B = writer.op("Gather", write.slots, np.array(write.layer), axis=1)
    kept_B = writer.op("GreaterOrEqual", slot_B, zero)
    return writer.op("Where", kept_B, slot_B, np.array(L - 1)), writer.op("Reshape", kept_B, [B, 1, 1, 1])


def _present(write: _Write, slot_B: ir.Value, kept_B111: ir.Value) -> ir.Value:
    writer, (_, L) = write.writer("write"), write.sizes
    new_BG1E = writer.op("Unsqueeze", write.row, [2])
    old_BG1E = writer.op("Slice", write.cache, [L - 1], [L], [2])
    update_BG1E = writer.op("Where", kept_B111, new_BG1E, old_BG1E)
    present = writer.op("TensorScatter", write.cache, update_BG1E, slot_B, axis=SEQUENCE)
    present.name = f"present_{write.cache.name}"
    return present


def is_cache(name: str | None) -> bool:
    """Whether an input or output of this name holds keys or values, either a whole cache or one row."""
    return name is not None and _CACHE.fullmatch(name) is not None

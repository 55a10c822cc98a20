"""Makes a decode step update its cache in place, and attend to it with one operator.

A step returns one key row and one value row for each layer, and the owner of the cache writes them into their slots. If
cache and engine are on a device, that takes a round trip for every token. `CacheInPlace` writes ONNX TensorScatter
(opset 24), which is such a write in the graph; TensorRT runs it as a layer whose input and output share their memory.

In primitive operators the attention of a step is some twenty nodes, most of which move or reshape a few numbers, and it
reads every slot of the cache, used or not. `CachedAttention` replaces it by com.microsoft::GroupQueryAttention, which
reads the slots in use, adds the token's own key and value to them, and writes both into the cache, in place if the
cache's input and output share their memory. It writes a key and a value for every row, also for rows that keep none,
and reads all slots up to the written one. So a row that keeps nothing writes to its first free slot, which the next
token that it keeps overwrites. In a layer that runs every token, rows without a token have no number of slots in use.
One at position IDLE may hold a text, so it writes to an extra slot at the end of the cache, and reads all others. One
at position VACANT holds nothing, and writes to its first slot.

Then a step's attention is one node that attends and two nodes that rotate, each of a few hundred numbers, so that
starting the nodes and synchronising threads takes a share of the time. `PackedAttention` lets the operator rotate by
tables that it indexes with the positions, and read queries, keys and values from one product that makes them
(`quantize_weights`).

Rewrites recognize a cache by the names of inputs and outputs: `keys_<layer>` and `values_<layer>` (B, G, L, E) as
inputs, `keys_row_<layer>` and `values_row_<layer>` (B, G, E) as outputs of a step, `keys_rows_<layer>` and
`values_rows_<layer>` (B, G, T, E) as outputs of a prefill, and `present_keys_<layer>` and `present_values_<layer>` as
outputs of an engine that updates its cache itself.

Source: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.GroupQueryAttention

Shape legend: B rows of text, H query heads, G key/value heads, M = H / G, L slots, E head width, P positions of a
table. In names of tensors, 1 is a dimension of one token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import onnx_ir as ir

from mod_export.errors import GraphError
from mod_export.graph.nodes import (
    MICROSOFT,
    NodeWriter,
    attributes_of,
    before_transpose,
    before_views,
    branches_of,
    constant_array,
    constant_number,
    graph_around,
    is_standard,
    label_of,
    late_zero,
    made_by,
    only_reader,
    require_static_shape,
    static_shape,
    substitute,
)
from mod_export.graph.rewrites.heads import side_by_side
from mod_export.types import IDLE, DType, TargetLimits

LOGITS = "logits"
"""The name of the output (B, V), which depends on every read of a cache."""
SLOTS = "slots"
"""The name of a step's output int64 (B, layers): the slots of its rows, or -1 for a row that is not kept."""

_CACHE = re.compile(r"(?:present_)?(?:keys|values)(?:_rows?)?_(\d+)")
_ROW = re.compile(r"(keys|values)_row_(\d+)")


def is_cache(name: str | None) -> bool:
    """Whether an input or output of this name holds keys or values, either a whole cache or rows for it."""
    return name is not None and _CACHE.fullmatch(name) is not None


# Writes in the graph

OPSET = 24
"""The first opset with TensorScatter."""
SEQUENCE = -2
"""The axis of slots, the only one that TensorRT accepts."""


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
        return NodeWriter(graph_around(producer), producer, f"{self.cache.name}_{purpose}")


class CacheInPlace:
    """Replaces each output `keys_row_<layer>` by `present_keys_<layer>`, the cache with that row in its slot.

    Every step writes, whether or not the token is kept. If it is not kept, the write copies the last slot onto itself,
    because that slot may be in use. If it is kept, attention's mask hides its slot from the token. So neither write
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


def _write(graph: ir.Graph, number: int, name_match: re.Match[str]) -> _Write:
    row, name, layer = graph.outputs[number], f"{name_match[1]}_{name_match[2]}", int(name_match[2])
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


# One operator that attends and writes

TURNED = [0, 1, 3, 2]
WIDTHS, ROTATED_WIDTHS = 8, 16
"""The operator only takes heads whose width is a multiple of the first, and only rotates multiples of the second."""
PARTS = ("keys", "values")


class _CachedAttention(NamedTuple):
    """The attention of one layer: its graph, the nodes from the scores on, and what they read.

    Attributes:
        layer: the number of the layer.
        graph: the main graph, or a branch.
        result: the node that joins the heads to (B, 1, H * E).
        query: the rotated query, (B, H, 1, E).
        key: the rotated key, (B, G, 1, E).
        value: the value, (B, G, 1, E).
        caches: keys and values (B, G, L, E), inputs of the main graph.
        scale: the factor of the scores.
        slot: int64 (B,), the slot of the token, or -1 for a row that keeps nothing.
        outputs: indices of the main graph's outputs that are the new key and value.
    """

    layer: int
    graph: ir.Graph
    result: ir.Node
    query: ir.Value
    key: ir.Value
    value: ir.Value
    caches: tuple[ir.Value, ir.Value]
    scale: float
    slot: ir.Value
    outputs: tuple[int, int]


class CachedAttention:
    """Replaces a step's attention over its cache by one operator, and the outputs `keys_row_<layer>` and
    `values_row_<layer>` by `present_keys_<layer>` and `present_values_<layer>`, which must share the caches' memory.

    A layer in which only some rows of a step can run stays as it is. If attention is behind a condition and every
    token keeps its key and value, the operator also writes them where nothing attends.
    """

    name: ClassVar[str] = "cached_attention"

    def applies(self, limits: TargetLimits, dtype: DType) -> bool:
        return limits.cached_attention

    def run(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> int:
        graph = model.graph
        owners = {branch: node for node in graph.all_nodes() for branch in branches_of(node)}
        attentions = _attentions(graph)
        slots: dict[ir.Value, ir.Value] = {}
        for attention in attentions:
            if attention.slot not in slots:
                slots[attention.slot] = _written_slot(graph, attention, owners)
            _attend_in_place(graph, attention, slots[attention.slot], owners)
        if attentions:
            model.opset_imports[MICROSOFT] = 1
            graph.sort()
        return len(attentions)

    def ensures(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> Sequence[str]:
        return [f"{label_of(layer.result)} attends in primitive operators" for layer in _attentions(model.graph)]


def _attentions(graph: ir.Graph) -> list[_CachedAttention]:
    inputs = {value.name: value for value in graph.inputs}
    outputs = {value.name: number for number, value in enumerate(graph.outputs)}
    columns = _slots_by_layer(graph)
    attentions = []
    for layer, slot in enumerate(columns):
        caches = [inputs.get(f"{part}_{layer}") for part in PARTS]
        numbers = [outputs.get(f"{part}_row_{layer}") for part in PARTS]
        match caches, numbers:
            case [ir.Value() as keys, ir.Value() as values], [int() as first, int() as second]:
                attention = _attention(layer, keys, values, slot, (first, second))
                if attention is not None:
                    attentions.append(attention)
    return attentions


def _slots_by_layer(graph: ir.Graph) -> list[ir.Value]:
    """The slots of each layer, int64 (B,), which a step returns as the columns of one output."""
    output = next((value for value in graph.outputs if value.name == SLOTS), None)
    concat = made_by(output, "Concat")
    columns = [output] if concat is None else concat.inputs
    slots = []
    for column in columns:
        view = made_by(column, "Unsqueeze", "Reshape")
        if view is None or view.inputs[0] is None:
            return []
        slots.append(view.inputs[0])
    return slots


def _attention(
    layer: int, keys: ir.Value, values: ir.Value, slot: ir.Value, outputs: tuple[int, int]
) -> _CachedAttention | None:
    """The attention that reads a cache; None unless it has the form of a step in which all rows can run."""
    product = only_reader(keys)
    weighted = only_reader(values)
    shape = static_shape(keys)
    if product is None or weighted is None or shape is None or len(shape) != 4 or shape[3] % WIDTHS:
        return None
    joined = made_by(_softmaxed(weighted.inputs[0]), "Concat") if is_standard(weighted, "MatMul") else None
    if joined is None or len(joined.inputs) != 2:
        return None
    biased, query = made_by(joined.inputs[0], "Add"), _query(product.inputs[1])
    own_product = made_by(before_transpose(joined.inputs[1], TURNED), "MatMul")
    if biased is None or query is None or own_product is None or own_product.inputs[1] is not product.inputs[1]:
        return None
    if made_by(before_transpose(biased.inputs[0], TURNED), "MatMul") is not product or product.inputs[0] is not keys:
        return None
    total, value = _total(weighted, joined.outputs[0])
    result = None if total is None else only_reader(total)
    key, count = own_product.inputs[0], _count(biased.inputs[1])
    if result is None or value is None or key is None or count is None or _slots_of_kept_rows(slot) is not count:
        return None
    heads, graph = static_shape(query[0]), graph_around(result)
    expected = None if heads is None else (shape[0], 1, heads[1] * shape[3])
    if not is_standard(result, "Reshape") or expected is None or static_shape(result.outputs[0]) != expected:
        return None
    return _CachedAttention(layer, graph, result, query[0], key, value, (keys, values), query[1], slot, outputs)


def _softmaxed(value: ir.Value | None) -> ir.Value | None:
    """The scores whose softmax a value is a part of."""
    part = made_by(value, "Slice", "Split")
    softmax = None if part is None else made_by(part.inputs[0], "Softmax")
    return None if softmax is None else softmax.inputs[0]


def _query(value: ir.Value | None) -> tuple[ir.Value, float] | None:
    """(query (B, H, 1, E), its factor), if a value is their product as (B, G, E, M)."""
    reshape = made_by(before_transpose(value, TURNED), "Reshape")
    scaled = None if reshape is None else made_by(reshape.inputs[0], "Mul")
    factor = None if scaled is None else constant_number(scaled.inputs[1])
    if scaled is None or factor is None or scaled.inputs[0] is None:
        return None
    shape = static_shape(scaled.inputs[0])
    return (scaled.inputs[0], float(factor)) if shape is not None and len(shape) == 4 else None


def _total(weighted: ir.Node, scores: ir.Value) -> tuple[ir.Value | None, ir.Value | None]:
    """(attention's result, the token's own value), if the result is the sum of a cached part and this value's part."""
    added = only_reader(weighted.outputs[0])
    if added is None or not is_standard(added, "Add"):
        return None, None
    own_part = next((value for value in added.inputs if value is not weighted.outputs[0]), None)
    product = made_by(own_part, "Mul")
    if product is None or _softmaxed(product.inputs[0]) is not scores:
        return None, None
    return added.outputs[0], product.inputs[1]


def _count(bias: ir.Value | None) -> ir.Value | None:
    """The number of slots in use, int64 (B,), if a bias hides the others."""
    chosen = made_by(before_views(bias, "Unsqueeze", "Reshape"), "Where")
    if chosen is None:
        return None
    seen, hidden = (constant_array(value) for value in chosen.inputs[1:])
    if seen is None or hidden is None or seen.any() or not np.isneginf(hidden).all():
        return None
    return slots_in_use(chosen.inputs[0])


def slots_in_use(mark_BL: ir.Value | None) -> ir.Value | None:
    """The number of slots in use, int64 (B,), if `mark_BL` is true for exactly that many first slots."""
    less = made_by(mark_BL, "Less")
    column = None if less is None else made_by(less.inputs[1], "Unsqueeze", "Reshape")
    if less is None or column is None or less.inputs[0] is None or not less.inputs[0].is_initializer():
        return None
    numbers = constant_array(less.inputs[0])
    # The positions may be a buffer without a value here; then they are not checked.
    if numbers is not None and not np.array_equal(numbers.ravel(), np.arange(numbers.size)):
        return None
    return column.inputs[0]


def _slots_of_kept_rows(slot: ir.Value) -> ir.Value | None:
    """The slots of rows that keep their token, if the other rows have -1."""
    chosen = made_by(slot, "Where")
    other_slot = None if chosen is None else constant_array(chosen.inputs[2])
    if chosen is None or other_slot is None or not (other_slot == -1).all():
        return None
    return chosen.inputs[1]


def _written_slot(graph: ir.Graph, attention: _CachedAttention, owners: dict[ir.Graph, ir.Node]) -> ir.Value:
    """The slot that each row writes to, int32 (B,), which is also the last one that it reads."""
    anchor = attention.result
    while anchor.graph is not graph:
        anchor = owners[graph_around(anchor)]
    shape, used_B = static_shape(attention.caches[0]), _slots_of_kept_rows(attention.slot)
    assert shape is not None
    assert used_B is not None
    writer = NodeWriter(graph, anchor, "slot")
    clamped = made_by(used_B, "Clip", "Max")
    if clamped is not None and clamped.inputs[0] in graph.inputs:
        holds_text_B = writer.op("Equal", clamped.inputs[0], np.array(IDLE))
        used_B = writer.op("Where", holds_text_B, np.array(shape[2]), used_B)
    elif (column := made_by(used_B, "Gather")) is None or column.inputs[0] not in graph.inputs:
        # Neither positions nor counts: what a row that keeps nothing holds is not known.
        kept_B = writer.op("GreaterOrEqual", attention.slot, np.array(0))
        used_B = writer.op("Where", kept_B, attention.slot, np.array(shape[2]))
    return writer.op("Cast", used_B, to=ir.DataType.INT32)


def _attend_in_place(
    graph: ir.Graph, attention: _CachedAttention, slot_B: ir.Value, owners: dict[ir.Graph, ir.Node]
) -> None:
    B, G, L, E = static_shape(attention.caches[0]) or (0, 0, 0, 0)
    heads = static_shape(attention.query)
    assert heads is not None
    H = heads[1]
    for cache in attention.caches:
        cache.shape = ir.Shape((B, G, L + 1, E))
    writer = NodeWriter(attention.graph, attention.result, "cached")
    flat = [side_by_side(writer, value) for value in (attention.query, attention.key, attention.value)]
    attributes: dict[str, int | float] = {"num_heads": H, "kv_num_heads": G}
    if np.float32(attention.scale) != np.float32(E**-0.5):
        attributes["scale"] = attention.scale
    rest = (*attention.caches, slot_B, np.array(L + 1, np.int32))
    y, *present = writer.ops(
        "GroupQueryAttention",
        [attention.result.outputs[0], *attention.caches],
        *flat,
        *rest,
        domain=MICROSOFT,
        **attributes,
    )
    substitute(attention.result.outputs[0], y, attention.result)
    outside: Sequence[ir.Value] = present
    if attention.graph is not graph:
        owner = owners[attention.graph]
        rows = [graph.outputs[number] for number in attention.outputs]
        if rows[0].producer() is owner:
            pairs = zip(rows, present, attention.caches, strict=True)
            outside = [_returned(row, attention.graph, value, cache, owner) for row, value, cache in pairs]
        else:
            outside = _written_in_each_branch(attention, present, rest, owner)
    for part, number, value in zip(PARTS, attention.outputs, outside, strict=True):
        value.name = f"present_{part}_{attention.layer}"
        graph.outputs[number] = value


def _written_in_each_branch(
    attention: _CachedAttention, present: Sequence[ir.Value], rest: Sequence[ir.Value | np.ndarray], owner: ir.Node
) -> Sequence[ir.Value]:
    """Makes both branches of an If that does not compute the new row return the updated caches. In the branch without
    attention, the operator only writes the row: there the key also serves as the query, because it has the fewest
    heads that a query can have, and nothing reads the result.
    """
    _, G, _, _ = static_shape(attention.caches[0]) or (0, 0, 0, 0)
    first = len(owner.outputs)
    owner.resize_outputs(first + len(present))
    for branch in branches_of(owner):
        values = present
        if branch is not attention.graph:
            anchor = branch.outputs[0].producer()
            assert anchor is not None
            writer = NodeWriter(branch, anchor, "kept")
            key, value = (side_by_side(writer, each) for each in (attention.key, attention.value))
            heads = {"num_heads": G, "kv_num_heads": G}
            like = [key, *attention.caches]
            _, *values = writer.ops("GroupQueryAttention", like, key, key, value, *rest, domain=MICROSOFT, **heads)
        branch.outputs.extend(values)
    outside = owner.outputs[first:]
    for value, cache in zip(outside, attention.caches, strict=True):
        value.type, value.shape = cache.type, cache.shape
    return outside


def _returned(row: ir.Value, branch: ir.Graph, present: ir.Value, cache: ir.Value, owner: ir.Node) -> ir.Value:
    """Makes an If return a cache in place of one of its rows; its other branch returns the cache as it is."""
    index = list(owner.outputs).index(row)
    for sibling in branches_of(owner):
        if sibling is branch:
            sibling.outputs[index] = present
            continue
        name = f"{cache.name}_kept"
        identity = ir.node("Identity", [cache], name=name)
        identity.outputs[0].name, identity.outputs[0].type, identity.outputs[0].shape = name, cache.type, cache.shape
        sibling.append(identity)
        sibling.outputs[index] = identity.outputs[0]
    row.shape = cache.shape
    return row


# The operator rotates

QUERY, KEY, VALUE, KEY_CACHE, TOTAL = 0, 1, 2, 3, 6
"""The indices of the operator's inputs."""
ATTRIBUTES = ("interleaved", "rotary_embedding_dim")
"""The attributes of RotaryEmbedding besides the number of heads."""
VIEWS = ("Reshape", "Unsqueeze", "Squeeze")


class _Rotation(NamedTuple):
    """The rotation of queries and keys: tables (P, E / 2), int64 positions of B elements, whether it interleaves."""

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
    if query is None or key is None or cache is None or len(query.inputs) != 3 or len(key.inputs) != 3:
        return None
    interleaved, partial = ({rotary.attributes.get_int(name, 0) for rotary in (query, key)} for name in ATTRIBUTES)
    # Where a condition is around the query only, both read the same tables through different nodes.
    cos, sin = (_looked_up(value, cache) for value in query.inputs[1:])
    if [cos, sin] != [_looked_up(value, cache) for value in key.inputs[1:]]:
        return None
    if len(interleaved) > 1 or partial != {0} or cache[3] % ROTATED_WIDTHS:
        return None
    if cos is None or sin is None or cos[1] is not sin[1]:
        return None
    return _Rotation(cos[0], sin[0], cos[1], *interleaved)


def _looked_up(value: ir.Value | None, cache: tuple[int, ...]) -> tuple[ir.Value, ir.Value] | None:
    """(table, positions), if a value is a table's row for the one token of each row of text."""
    gather = made_by(before_views(value, *VIEWS), "Gather")
    if gather is None or gather.attributes.get_int("axis", 0) != 0:
        return None
    table, positions = gather.inputs[0], before_views(gather.inputs[1], *VIEWS)
    rows, shape = static_shape(positions), static_shape(table)
    B, _, _, E = cache
    if table is None or positions is None or not table.is_initializer() or rows is None or int(np.prod(rows)) != B:
        return None
    return (table, positions) if shape is not None and len(shape) == 2 and shape[1] == E // 2 else None


def _rotate_inside(node: ir.Node, rotation: _Rotation, shared: dict[tuple[ir.Graph, ir.Value], ir.Value]) -> None:
    """Moves a rotation into its attention. `shared` holds tables and positions of earlier attentions of the graph."""
    graph = graph_around(node)
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
            padding = np.zeros((missing, columns), np.float32) if missing > 0 else None
            shared[graph, table] = table if padding is None else writer.op("Concat", table, padding, axis=0)
    results = writer.ops(
        "GroupQueryAttention",
        list(node.outputs),
        *parts,
        *node.inputs[KEY_CACHE : TOTAL + 1],
        *(shared[graph, value] for value in (rotation.cos, rotation.sin, rotation.positions)),
        domain=MICROSOFT,
        **attributes_of(node),
        do_rotary=1,
        rotary_interleaved=rotation.interleaved,
    )
    for old, new in zip(node.outputs, results, strict=True):
        substitute(old, new)
    graph.remove(node, safe=True)

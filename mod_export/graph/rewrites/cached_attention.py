"""Replaces attention of one token over a cache by com.microsoft::GroupQueryAttention, which writes the cache too.

In primitive operators the attention of a step is some twenty nodes, most of which move or reshape a few numbers, and it
reads every slot of the cache, used or not. ONNX Runtime's operator reads the slots in use, adds the token's own key and
value to them, and writes both into the cache, in place if the cache's input and output share their memory.

It writes a key and a value for every row, also for rows that keep none. So a cache has one slot more than tokens: such
rows write to this last slot, and no row that has a token reads it.

Shape legend: B rows of text, H query heads, G key/value heads, M = H / G, L slots, E head width. `_1` is the one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import onnx_ir as ir

from mod_export.graph.nodes import (
    NodeWriter,
    branches_of,
    constant_array,
    is_standard,
    label_of,
    made_by,
    only_reader,
    static_shape,
    substitute,
)
from mod_export.graph.rewrites.cache_in_place import SLOTS
from mod_export.graph.rewrites.heads import flat_heads, heads_of
from mod_export.graph.rewrites.products import MICROSOFT
from mod_export.types import DType, TargetLimits

TURNED = [0, 1, 3, 2]
WIDTHS = 8
"""The operator only takes heads whose width is a multiple of this."""
PARTS = ("keys", "values")


class _Attention(NamedTuple):
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
    """Replaces the attention of a step over a cache, and its outputs `keys_row_<layer>` and `values_row_<layer>` by
    `present_keys_<layer>` and `present_values_<layer>`, which must have the addresses of the caches.

    A layer in which some rows have no slot in the step stays as it is.
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
                slots[attention.slot] = _seen(graph, attention, owners)
            _rewrite(graph, attention, slots[attention.slot], owners)
        if attentions:
            model.opset_imports[MICROSOFT] = 1
            graph.sort()
        return len(attentions)

    def ensures(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> Sequence[str]:
        return [f"{label_of(layer.result)} attends in primitive operators" for layer in _attentions(model.graph)]


def _attentions(graph: ir.Graph) -> list[_Attention]:
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
    if concat is None:
        columns: Sequence[ir.Value | None] = [output]
    else:
        columns = concat.inputs
    slots = []
    for column in columns:
        view = made_by(column, "Unsqueeze", "Reshape")
        if view is None or view.inputs[0] is None:
            return []
        slots.append(view.inputs[0])
    return slots


def _attention(
    layer: int, keys: ir.Value, values: ir.Value, slot: ir.Value, outputs: tuple[int, int]
) -> _Attention | None:
    """The attention that reads a cache; None unless it has the form of a step whose rows all have a slot."""
    product = only_reader(keys)
    weighted = only_reader(values)
    shape = static_shape(keys)
    if product is None or weighted is None or shape is None or len(shape) != 4 or shape[3] % WIDTHS:
        return None
    scores, own_scores = _two_of(made_by(_softmaxed(weighted), "Concat"))
    biased = made_by(scores, "Add")
    query = _query(product.inputs[1])
    own_product = made_by(_turned(own_scores), "MatMul")
    if biased is None or query is None or own_product is None or own_product.inputs[1] is not product.inputs[1]:
        return None
    if made_by(_turned(biased.inputs[0]), "MatMul") is not product or product.inputs[0] is not keys:
        return None
    total, value = _total(weighted, scores_of=made_by(_softmaxed(weighted), "Concat"))
    result = None if total is None else only_reader(total)
    key, count = own_product.inputs[0], _count(biased.inputs[1])
    if result is None or value is None or key is None or count is None or _kept(slot) is not count:
        return None
    heads = static_shape(query[0])
    graph = result.graph
    assert isinstance(graph, ir.Graph)
    expected = None if heads is None else (shape[0], 1, heads[1] * shape[3])
    if not is_standard(result, "Reshape") or expected is None or static_shape(result.outputs[0]) != expected:
        return None
    return _Attention(layer, graph, result, query[0], key, value, (keys, values), query[1], slot, outputs)


def _softmaxed(weighted: ir.Node) -> ir.Value | None:
    """The scores whose softmax is partly read by a product with the cached values."""
    part = made_by(weighted.inputs[0], "Slice", "Split") if is_standard(weighted, "MatMul") else None
    softmax = None if part is None else made_by(part.inputs[0], "Softmax")
    return None if softmax is None else softmax.inputs[0]


def _two_of(node: ir.Node | None) -> tuple[ir.Value | None, ir.Value | None]:
    if node is None or len(node.inputs) != 2:
        return None, None
    return node.inputs[0], node.inputs[1]


def _turned(value: ir.Value | None) -> ir.Value | None:
    """x, if a value is x with its last two dimensions swapped."""
    transpose = made_by(value, "Transpose")
    swaps = transpose is not None and list(transpose.attributes.get_ints("perm", [])) == TURNED
    return transpose.inputs[0] if transpose is not None and swaps else None


def _query(value: ir.Value | None) -> tuple[ir.Value, float] | None:
    """(query (B, H, 1, E), its factor), if a value is their product as (B, G, E, M)."""
    reshape = made_by(_turned(value), "Reshape")
    scaled = None if reshape is None else made_by(reshape.inputs[0], "Mul")
    factor = None if scaled is None else constant_array(scaled.inputs[1])
    if scaled is None or factor is None or factor.size != 1 or scaled.inputs[0] is None:
        return None
    shape = static_shape(scaled.inputs[0])
    return (scaled.inputs[0], float(factor.item())) if shape is not None and len(shape) == 4 else None


def _total(weighted: ir.Node, scores_of: ir.Node | None) -> tuple[ir.Value | None, ir.Value | None]:
    """(attention's result, the token's own value), if the result is the sum of a cached part and this value's part."""
    added = only_reader(weighted.outputs[0])
    if added is None or not is_standard(added, "Add") or scores_of is None:
        return None, None
    other = next((value for value in added.inputs if value is not weighted.outputs[0]), None)
    product = made_by(other, "Mul")
    part = None if product is None else made_by(product.inputs[0], "Slice", "Split")
    softmax = None if part is None else made_by(part.inputs[0], "Softmax")
    if product is None or softmax is None or softmax.inputs[0] is not scores_of.outputs[0]:
        return None, None
    return added.outputs[0], product.inputs[1]


def _count(bias: ir.Value | None) -> ir.Value | None:
    """The number of slots in use, int64 (B,), if a bias hides the others."""
    while (view := made_by(bias, "Unsqueeze", "Reshape")) is not None:
        bias = view.inputs[0]
    chosen = made_by(bias, "Where")
    if chosen is None:
        return None
    seen, hidden = (constant_array(value) for value in chosen.inputs[1:])
    less = made_by(chosen.inputs[0], "Less")
    column = None if less is None else made_by(less.inputs[1], "Unsqueeze", "Reshape")
    if seen is None or hidden is None or seen.any() or not np.isneginf(hidden).all() or less is None or column is None:
        return None
    numbers = constant_array(less.inputs[0])
    # The positions may be a buffer without a value here; then they are not checked.
    if numbers is not None and not np.array_equal(numbers.ravel(), np.arange(numbers.size)):
        return None
    return column.inputs[0]


def _kept(slot: ir.Value) -> ir.Value | None:
    """The slots of rows that keep their token, if the other rows have -1."""
    chosen = made_by(slot, "Where")
    none = None if chosen is None else constant_array(chosen.inputs[2])
    if chosen is None or none is None or not (none == -1).all():
        return None
    return chosen.inputs[1]


def _seen(graph: ir.Graph, one: _Attention, owners: dict[ir.Graph, ir.Node]) -> ir.Value:
    """The slot that each row writes to, int32 (B,): the last one if the row keeps nothing."""
    anchor = one.result
    while anchor.graph is not graph:
        assert isinstance(anchor.graph, ir.Graph)
        anchor = owners[anchor.graph]
    shape = static_shape(one.caches[0])
    assert shape is not None
    writer = NodeWriter(graph, anchor, "slot")
    kept_B = writer.op("GreaterOrEqual", one.slot, np.array(0))
    slot_B = writer.op("Where", kept_B, one.slot, np.array(shape[2]))
    return writer.op("Cast", slot_B, to=ir.DataType.INT32)


def _rewrite(graph: ir.Graph, one: _Attention, slot_B: ir.Value, owners: dict[ir.Graph, ir.Node]) -> None:
    B, G, L, E = static_shape(one.caches[0]) or (0, 0, 0, 0)
    heads = static_shape(one.query)
    assert heads is not None
    H = heads[1]
    for cache in one.caches:
        cache.shape = ir.Shape((B, G, L + 1, E))
    writer = NodeWriter(one.graph, one.result, "cached")
    flat = [_flat(writer, value, E) for value in (one.query, one.key, one.value)]
    attributes: dict[str, int | float] = {"num_heads": H, "kv_num_heads": G}
    if np.float32(one.scale) != np.float32(E**-0.5):
        attributes["scale"] = one.scale
    y, *present = writer.many(
        "GroupQueryAttention",
        [one.result.outputs[0], *one.caches],
        *flat,
        *one.caches,
        slot_B,
        np.array(L + 1, np.int32),
        domain=MICROSOFT,
        **attributes,
    )
    substitute(one.result.outputs[0], y, one.result)
    for part, number, value, cache in zip(PARTS, one.outputs, present, one.caches, strict=True):
        name = f"present_{part}_{one.layer}"
        outside = _returned(graph.outputs[number], one.graph, value, cache, owners) if one.graph is not graph else value
        outside.name = name
        graph.outputs[number] = outside


def _flat(writer: NodeWriter, value: ir.Value, width: int) -> ir.Value:
    """(B, heads, 1, E) as (B, 1, heads * E), read from its source if nothing but a rotation is in between."""
    source = heads_of(value)
    if source is not None:
        return flat_heads(writer, source, width)
    B, heads, _, E = static_shape(value) or (0, 0, 0, 0)
    return writer.op("Reshape", value, [B, 1, heads * E])


def _returned(
    row: ir.Value, branch: ir.Graph, present: ir.Value, cache: ir.Value, owners: dict[ir.Graph, ir.Node]
) -> ir.Value:
    """Makes an If return a cache in place of one of its rows; its other branch returns the cache as it is."""
    owner = owners[branch]
    index = list(owner.outputs).index(row)
    for other in branches_of(owner):
        if other is branch:
            other.outputs[index] = present
            continue
        name = f"{cache.name}_kept"
        identity = ir.node("Identity", [cache], name=name)
        identity.outputs[0].name, identity.outputs[0].type, identity.outputs[0].shape = name, cache.type, cache.shape
        other.append(identity)
        other.outputs[index] = identity.outputs[0]
    row.shape = cache.shape
    return row

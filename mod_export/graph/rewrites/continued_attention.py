"""Makes a prefill attend to its cache, and update it, with one operator.

In standard operators, the tokens of a part attend to a copy of the cache with their own keys behind it, and a mask
hides the slots that are not in use, whose scores are computed all the same. com.microsoft::GroupQueryAttention reads
the slots in use only, and writes the keys and values of the part behind them, in place if the cache's input and output
share their memory. It writes those of padding and of empty slots too, for which the cache has room (`cache_layout`).
No token reads them, because the next part begins at the first slot that is not in use.

Source: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.GroupQueryAttention

Shape legend: B = 1 row of text, T tokens, H query heads, G key/value heads, L slots, U = L + T keys, E head width.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import onnx_ir as ir

from mod_export.graph.nodes import (
    MICROSOFT,
    NodeWriter,
    before_transpose,
    before_views,
    branches_of,
    constant_array,
    graph_around,
    is_standard,
    label_of,
    made_by,
    only_reader,
    static_shape,
    substitute,
)
from mod_export.graph.rewrites.cached_attention import PARTS, WIDTHS, slots_in_use
from mod_export.graph.rewrites.heads import SWAPPED, side_by_side
from mod_export.types import DType, TargetLimits

ROWS = re.compile(r"keys_rows_(\d+)")
QUERY, KEYS, VALUES, MASK = range(4)
"""The indices of the inputs of Attention."""


class Continued(NamedTuple):
    """An attention of all T tokens of a part to a cache and to each other.

    Attributes:
        node: the Attention.
        result: the node that joins the heads to (1, T, H * E).
        caches: keys and values (1, G, L, E), inputs of the graph.
        pair: own keys and values (1, G, T, E).
        used: int64 (1,), the number of slots in use.
    """

    node: ir.Node
    result: ir.Node
    caches: tuple[ir.Value, ir.Value]
    pair: tuple[ir.Value, ir.Value]
    used: ir.Value


class Layer(NamedTuple):
    """A layer of a prefill whose attentions, one in each branch if it has branches, all continue the cache.

    Attributes:
        number: the number of the layer.
        caches: keys and values (1, G, L, E), inputs of the graph.
        outputs: indices of the graph's outputs that are the new keys and values.
        attentions: its attentions.
    """

    number: int
    caches: tuple[ir.Value, ir.Value]
    outputs: tuple[int, int]
    attentions: Sequence[Continued]


class ContinuedAttention:
    """Replaces a prefill's attention to its cache by one operator, and the outputs `keys_rows_<layer>` and
    `values_rows_<layer>` by `present_keys_<layer>` and `present_values_<layer>`, which must share the caches' memory.

    A layer in which only some tokens have a query stays as it is: one whose skipped tokens keep their keys, and the
    last one.
    """

    name: ClassVar[str] = "continued_attention"

    def applies(self, limits: TargetLimits, dtype: DType) -> bool:
        return limits.cached_attention

    def run(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> int:
        layers = list(continued_layers(model.graph))
        for layer in layers:
            _continue_in_place(model.graph, layer)
        if layers:
            model.opset_imports[MICROSOFT] = 1
        return sum(len(layer.attentions) for layer in layers)

    def ensures(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> Sequence[str]:
        left = [attention.node for layer in continued_layers(model.graph) for attention in layer.attentions]
        return [f"{label_of(node)} copies its cache" for node in left]


def continued_layers(graph: ir.Graph, width: int = WIDTHS) -> Iterator[Layer]:
    """Finds the layers of a prefill whose head width is a multiple of `width`."""
    inputs = {value.name: value for value in graph.inputs}
    outputs = {value.name: number for number, value in enumerate(graph.outputs)}
    for name in outputs:
        match = ROWS.fullmatch(name or "")
        if match is None:
            continue
        number = int(match[1])
        keys, values = (inputs.get(f"{part}_{number}") for part in PARTS)
        shape = static_shape(keys)
        if keys is None or values is None or shape is None or len(shape) != 4 or shape[0] != 1 or shape[3] % width:
            continue
        attentions = [_continued(use.node, (keys, values)) for use in keys.uses()]
        if not attentions or len({*values.uses()}) != len(attentions) or None in attentions:
            continue
        first, second = (outputs[f"{part}_rows_{number}"] for part in PARTS)
        yield Layer(
            number, (keys, values), (first, second), [attention for attention in attentions if attention is not None]
        )


def _continued(joined: ir.Node, caches: tuple[ir.Value, ir.Value]) -> Continued | None:
    """The attention whose keys a node joins; None unless every token has a query and a key, and the mask is causal."""
    node = only_reader(joined.outputs[0]) if is_standard(joined, "Concat") else None
    if node is None or not is_standard(node, "Attention") or len(node.inputs) <= MASK:
        return None
    keys, values = (made_by(node.inputs[index], "Concat") for index in (KEYS, VALUES))
    if keys is not joined or values is None or keys.inputs[0] is not caches[0] or values.inputs[0] is not caches[1]:
        return None
    own_keys, own_values = keys.inputs[1], values.inputs[1]
    count, result = _count(node.inputs[MASK]), _result(node)
    query, key = static_shape(node.inputs[QUERY]), static_shape(own_keys)
    if own_keys is None or own_values is None or count is None or result is None or query is None or key is None:
        return None
    return Continued(node, result, caches, (own_keys, own_values), count) if query[2] == key[2] else None


def _result(node: ir.Node) -> ir.Node | None:
    """The node that joins the heads of an attention, if nothing else reads its result."""
    swapped = only_reader(node.outputs[0])
    if swapped is None or before_transpose(swapped.outputs[0], SWAPPED) is None:
        return None
    result, sizes = only_reader(swapped.outputs[0]), static_shape(node.outputs[0])
    if result is None or not is_standard(result, "Reshape") or sizes is None:
        return None
    B, H, T, E = sizes
    return result if static_shape(result.outputs[0]) == (B, T, H * E) else None


def _count(mask: ir.Value | None) -> ir.Value | None:
    """The number of slots in use, int64 (1,), if a mask shows exactly these slots and, of the keys behind the slots,
    each token's own key and those before it.
    """
    joined = made_by(before_views(mask, "Unsqueeze", "Reshape"), "Concat")
    if joined is None or len(joined.inputs) != 2:
        return None
    own_BTT = constant_array(joined.inputs[1])
    if own_BTT is None or own_BTT.ndim != 3 or not (own_BTT == np.tri(*own_BTT.shape[1:], dtype=np.bool_)).all():
        return None
    return slots_in_use(before_views(joined.inputs[0], "Expand", "Unsqueeze", "Reshape"))


def _continue_in_place(graph: ir.Graph, layer: Layer) -> None:
    """Replaces the attentions of a layer, and makes the graph return the caches that they write."""
    presents = {graph_around(attention.node): _attend(attention, layer) for attention in layer.attentions}
    for index, (part, number) in enumerate(zip(PARTS, layer.outputs, strict=True)):
        old = graph.outputs[number]
        owner = old.producer()
        if graph in presents:
            new = presents[graph][index]
        else:
            assert owner is not None
            place = list(owner.outputs).index(old)
            for branch in branches_of(owner):
                branch.outputs[place] = presents[branch][index]
            new = old
            new.shape = layer.caches[index].shape
        new.name = f"present_{part}_{layer.number}"
        graph.outputs[number] = new


def _attend(attention: Continued, layer: Layer) -> Sequence[ir.Value]:
    """Writes the operator in place of an attention, and returns the caches that it has written."""
    node = attention.node
    writer = NodeWriter(graph_around(node), node, "continued")
    _, G, L, E = static_shape(layer.caches[0]) or (0, 0, 0, 0)
    _, H, T, _ = static_shape(node.inputs[QUERY]) or (0, 0, 0, 0)
    query, swapped, result = node.inputs[QUERY], only_reader(node.outputs[0]), attention.result
    assert query is not None
    assert swapped is not None
    flat = [side_by_side(writer, value) for value in (query, *attention.pair)]
    last = writer.op("Cast", writer.op("Add", attention.used, np.array(T - 1)), to=ir.DataType.INT32)
    attributes: dict[str, int | float] = {"num_heads": H, "kv_num_heads": G}
    scale = node.attributes.get_float("scale", 0.0)
    if scale and np.float32(scale) != np.float32(E**-0.5):
        attributes["scale"] = scale
    y_BTF, *present = writer.ops(
        "GroupQueryAttention",
        [result.outputs[0], *layer.caches],
        *flat,
        *layer.caches,
        last,
        np.array(L, np.int32),
        domain=MICROSOFT,
        **attributes,
    )
    substitute(result.outputs[0], y_BTF, result, swapped, node)
    return present

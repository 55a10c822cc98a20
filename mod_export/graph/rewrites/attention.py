"""Rewrites attention: as one operator, as blocks of queries, or as primitive operators.

`AttentionOperator` comes first, because the others need the operator. Written out in user code,
softmax(q k^T * scale + mask) v reads and writes all T * T scores several times. Only the operator with the attribute
`is_causal` can do without a stored mask and the hidden half of the scores.

`QueryBlocks` splits causal attention into blocks of queries, each of which reads the keys up to its end. The operator
computes all T * T scores and discards half of them. A block of b queries that ends at token e needs b * e scores, so
T / b blocks need T * (T + b) / 2. Only the triangle at the end of each block still needs a mask.

`DecomposeAttention` serves targets without a kernel for the single operator. TensorRT takes the ONNX Attention operator
only if it has a dedicated kernel, and it has none for float32, nor for some shapes. OpenVINO copies keys and values for
every query head that shares them, and transposes the copies, before its attention kernel. In the form that is written
here, the same kernel reads them as they are.

Shape legend: B batch, H query heads, G key/value heads (H a multiple of G, R = H / G), T tokens of the queries, U of
the keys and values, E head width, F that of the values, b queries and e keys of a block.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from mod_export.errors import GraphError
from mod_export.graph.nodes import (
    NodeWriter,
    attributes_of,
    before_views,
    constant_array,
    constant_number,
    graph_around,
    input_of,
    is_standard,
    is_used,
    label_of,
    late_zero,
    made_by,
    nodes_from_opset,
    only_reader,
    require_static_shape,
    static_shape,
)
from mod_export.types import DType, TargetLimits

FIRST_OPSET = 23
"""The first opset with the operator Attention."""
MASK = 3
"""The index of the operator's mask among its inputs."""
INT32, BOOL = ir.DataType.INT32, ir.DataType.BOOL
Masks = dict[tuple[int, int], ir.Value]
"""(T, U) -> the mask of T queries over U keys; in blocks, (T, e) -> the mask of the block that ends at key e."""


# The operator in place of primitive operators

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

    A mask in primitive operators is only accepted if it is a constant in which every query sees at least one key. If a
    query sees no key, the operator returns zeros for it, and the model returns NaN.
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
            keys = _transposed_keys(writer, old.keys)
            mask = writer.op("Not", old.mask.value) if old.mask and old.mask.hides else old.mask and old.mask.value
            writer.replace(
                writer.op("Attention", old.query, keys, old.values, mask, like=old.node.outputs[0], scale=old.scale)
            )
        causal = _with_causal_mask(model, known)
        for node in causal:
            node.replace_input_with(MASK, None)
            node.attributes["is_causal"] = ir.AttrInt64("is_causal", 1)
        return count + len(causal)

    def ensures(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> Sequence[str]:
        known: Known = {}
        return [
            *(f"{label_of(attention.node)} still writes attention out" for attention in _written_out(model, known)),
            *(f"{label_of(node)} still has a mask that is causal" for node in _with_causal_mask(model, known)),
        ]


class _Mask(NamedTuple):
    """A mask: floats that are added to scores, or booleans, true where a query sees a key (with `hides`, where it does
    not).
    """

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
    for node in nodes_from_opset(model, FIRST_OPSET):
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
        masked = _masked_by_add(reader, known) if reader.op_type == "Add" else _masked_by_where(reader, known)
        if masked is None or only_reader(masked[0]) is not reader:
            return None
        value, mask = masked
    if (scaled := made_by(value, "Mul", "Div")) is not None:
        number, value = constant_number(scaled.inputs[1]), scaled.inputs[0]
        if number is None or value is None or only_reader(value) is not scaled:
            return None
        scale = float(number) if scaled.op_type == "Mul" else 1 / float(number)
    product = made_by(value, "MatMul")
    if product is None or value is None or only_reader(value) is None or not scale > 0:
        return None
    query, keys = product.inputs
    return None if query is None or keys is None else (query, keys, scale, mask)


def _transposed_keys(writer: NodeWriter, keys: ir.Value) -> ir.Value:
    """Keys (B, H, E, U) as (B, H, U, E); a Transpose of the model itself is undone or merged."""
    node, order = made_by(keys, "Transpose"), [0, 1, 3, 2]
    if node is None or node.inputs[0] is None or "perm" not in node.attributes:
        return writer.op("Transpose", keys, perm=order)
    before = node.attributes.get_ints("perm")
    order = [before[n] for n in order]
    return node.inputs[0] if order == [0, 1, 2, 3] else writer.op("Transpose", node.inputs[0], perm=order)


def _masked_by_add(node: ir.Node, known: Known) -> tuple[ir.Value, _Mask] | None:
    """(scores, mask) of an Add."""
    a, b = node.inputs
    scores, mask = (b, a) if _fixed(a, known) is not None else (a, b)
    return None if scores is None or mask is None else (scores, _Mask(mask))


def _masked_by_where(node: ir.Node, known: Known) -> tuple[ir.Value, _Mask] | None:
    """(scores, mask) of a Where that keeps each score or replaces it by a number that hides its key."""
    condition, *either = node.inputs
    for hides, (low, scores) in ((True, either), (False, either[::-1])):
        number = _fixed(low, known)
        if number is not None and number.size == 1 and number.item() <= -LARGE and scores is not None:
            return None if condition is None else (scores, _Mask(condition, hides))
    return None


def _leaves_a_key(mask: _Mask | None, shape: tuple[int, int, int, int], known: Known) -> bool:
    """Whether a mask is a constant that fits Attention and shows every query a key; true if there is no mask."""
    if mask is None:
        return True
    array, (B, H, T, U) = _fixed(mask.value, known), shape
    if array is None or array.ndim > 4:
        return False
    sizes = (1,) * (4 - array.ndim) + array.shape
    fits = sizes[0] in (1, B) and sizes[1] in (1, H) and sizes[2:] == (T, U)
    return fits and _every_query_sees(array != mask.hides if array.dtype == bool else array, HIDDEN)


def _every_query_sees(mask: np.ndarray, hidden: float) -> bool:
    """Whether every query sees a key. The mask is bool, or consists of floats that hide a key if they are at most
    `hidden`.
    """
    return bool((mask if mask.dtype == bool else mask > hidden).any(-1).all())


def _with_causal_mask(model: ir.Model, known: Known) -> list[ir.Node]:
    """The Attentions whose only mask is a constant that hides exactly the later keys from each query."""
    return [
        node
        for node in _attentions(model)
        if not any(value is not None for value in node.inputs[MASK + 1 :])
        and not _is_causal(node)
        and _hides_later_keys(_fixed(input_of(node, MASK), known))
    ]


def _attentions(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph.all_nodes() if is_standard(node, "Attention")]


def _is_causal(node: ir.Node) -> bool:
    return bool(node.attributes.get_int("is_causal", 0))


def _hides_later_keys(mask: np.ndarray | None) -> bool:
    if mask is None or mask.ndim < 2 or mask.shape[-1] != mask.shape[-2]:
        return False
    visible = np.tril(np.ones(mask.shape[-2:], dtype=bool))
    if mask.dtype == bool:
        return bool((mask == visible).all())
    return bool((mask[..., visible] == 0).all() and (mask[..., ~visible] < HIDDEN).all())


def _fixed(value: ir.Value | None, known: Known) -> np.ndarray | None:
    """The array of a mask that depends on no input and no weight, such as one that `torch.triu` makes when the model
    runs; None for any other value.
    """
    if value is None or (constant := constant_array(value)) is not None:
        return None if value is None else constant
    if value not in known:
        known[value] = _computed(value)
    return known[value]


def _computed(value: ir.Value) -> np.ndarray | None:
    """The array of a value that follows from constants alone; None for other values, or if it takes too many nodes."""
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
    # The order of one graph is not enough: nodes in a branch of an If can read values that are computed outside of it.
    order = TopologicalSorter({node: [source for source in node.predecessors() if source in nodes] for node in nodes})
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


# Blocks of queries

SHARED_MASK_BYTES = 2**24
"""Masks up to this size are shared by all layers. Larger ones are computed in each layer and freed again."""
LEAVES_A_KEY = "leaves every query a key"
"""Entry in the `meta` of a mask that shows every query at least one key, so that no query needs special treatment."""


class QueryBlocks:
    """Splits causal Attention over T tokens into Attentions over blocks of the size that the target prefers for T."""

    name: ClassVar[str] = "query_blocks"

    def applies(self, limits: TargetLimits, dtype: DType) -> bool:
        return bool(limits.query_blocks)

    def run(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> int:
        attentions = _unsplit(model, limits)
        # A value of one branch is not visible in another.
        shared: defaultdict[ir.Graph, Masks] = defaultdict(dict)
        for node, block in attentions:
            _split(node, block, shared[graph_around(node)], late=limits.late_masks)
        return len(attentions)

    def ensures(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> Sequence[str]:
        return [f"{label_of(node)} still computes scores that its mask hides" for node, _ in _unsplit(model, limits)]


def splittable_tokens(node: ir.Node) -> int | None:
    """T of a causal self-attention without mask or cache; None for any other node.

    Heads are a dimension, (B, heads, T, E), or side by side, (B, T, heads * E).
    """
    if not is_standard(node, "Attention") or not _is_causal(node):
        return None
    if any(value is not None for value in node.inputs[3:]) or any(value.uses() for value in node.outputs[1:]):
        return None
    shapes = [static_shape(value) for value in node.inputs[:3]]
    if any(shape is None or len(shape) not in (3, 4) for shape in shapes):
        return None
    tokens = {shape[-2] for shape in shapes if shape is not None}
    return tokens.pop() if len(tokens) == 1 else None


def _unsplit(model: ir.Model, limits: TargetLimits) -> list[tuple[ir.Node, int]]:
    """(node, queries of a block) of every Attention that must be split."""
    block_of = dict(limits.query_blocks)
    tokens = [(node, splittable_tokens(node)) for node in model.graph.all_nodes()]
    return [(node, block_of[T]) for node, T in tokens if T is not None and block_of.get(T, T) < T]


def _split(node: ir.Node, block: int, shared: Masks, *, late: bool) -> None:
    q, k, v = node.inputs[:3]
    T = require_static_shape(q, node)[-2]
    assert q is not None
    assert q.dtype is not None
    writer = NodeWriter(graph_around(node), node, "blocks")
    attributes = {name: value for name, value in attributes_of(node).items() if name != "is_causal"}
    large = T * (T + block) // 2 * q.dtype.itemsize > SHARED_MASK_BYTES
    masks = {} if large else shared
    band = None
    parts = []
    for start, end in pairwise([*range(0, T, block), T]):
        queries = _cut(writer, q, start, end, axis=-2)
        keys, values = (_cut(writer, value, 0, end, axis=-2) for value in (k, v))
        if (T, end) not in masks:
            band = _band(writer, q, T, block, hide=late or large) if band is None else band
            # The last rows of the band, shifted until its triangle ends where the block's keys end.
            rows = _cut(writer, band, block - (end - start), block, axis=0)
            masks[T, end] = _cut(writer, rows, T - end, T, axis=1)
            masks[T, end].meta[LEAVES_A_KEY] = True
        parts.append(writer.op("Attention", queries, keys, values, masks[T, end], **attributes))
    writer.replace(writer.op("Concat", *parts, axis=-2))


def _band(writer: NodeWriter, q: ir.Value, T: int, block: int, *, hide: bool) -> ir.Value:
    """The mask that is added to the scores, (b, T): 0 where key <= T - b + query, else minus infinity.

    A runtime computes it once while loading. With `hide` it is computed when it is needed, and not kept.
    """
    assert q.dtype is not None
    zero, hidden = (np.array(number, q.dtype.numpy()) for number in (0, -np.inf))
    return writer.op("Where", _visible_keys(writer, np.arange(T - block, T), T, q if hide else None), zero, hidden)


def _visible_keys(writer: NodeWriter, queries: np.ndarray, keys: int, hide_behind: ir.Value | None) -> ir.Value:
    """Bool (queries, keys): whether a key stands at or before a query, by comparing two short ranges of one dtype.

    An engine builder would compute a comparison of constants in advance and store the result for every layer, 26 MB
    each at 5,120 tokens. With `hide_behind`, the numbers of the queries are made to depend on that value.
    """
    query: ir.Value | np.ndarray = queries[:, None]
    if hide_behind is not None:
        zero = late_zero(writer, hide_behind, ir.DataType.from_numpy(queries.dtype), (1, 1))
        query = writer.op("Add", query, zero)
    return writer.op("GreaterOrEqual", query, np.arange(keys, dtype=queries.dtype)[None, :])


def _cut(writer: NodeWriter, value: ir.Value | None, start: int, end: int, *, axis: int) -> ir.Value:
    """The slice [start, end) along one axis, or the value itself if that is the whole axis."""
    assert value is not None
    shape = static_shape(value)
    assert shape is not None
    return value if (start, end) == (0, shape[axis]) else writer.op("Slice", value, [start], [end], [axis])


# Primitive operators in place of the operator

KNOWN_ATTRIBUTES = frozenset({"is_causal", "scale", "softcap", "qk_matmul_output_mode"})


class DecomposeAttention:
    """Replaces Attention by MatMul, mask, Softmax, MatMul, the order that fusions of TensorRT and OpenVINO look for.

    The queries are scaled before the product, as these fusions expect. Grouped queries get an axis of their own, along
    which keys and values are broadcast without a copy. For targets with `grouped_rows` they become more rows instead,
    (B, G, R * T, E), because OpenVINO's fusion takes four dimensions, and masks repeat their rows. The causal mask
    compares two short ranges at run time: a stored mask of T * U would be larger than the weights. All attentions over
    the same lengths share the comparison. A query that sees no key gives zeros, as it does in the operator.
    """

    name: ClassVar[str] = "decompose_attention"

    def applies(self, limits: TargetLimits, dtype: DType) -> bool:
        return dtype not in limits.attention_dtypes or limits.attention_kernels is not None

    def run(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> int:
        """Rewrites every Attention that the target has no kernel for.

        Raises:
            GraphError: an Attention with a cache, a soft cap or another feature that cannot be rewritten.
        """
        attentions = [(node, _sizes(node)) for node in _unwanted(model, limits, dtype)]
        # A value of one branch is not visible in another.
        shared: defaultdict[ir.Graph, _Shared] = defaultdict(lambda: _Shared({}, {}, {}, limits.grouped_rows))
        for node, sizes in attentions:
            _rewrite(node, sizes, shared[graph_around(node)])
        return len(attentions)

    def ensures(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> Sequence[str]:
        return [f"{label_of(node)} is still one Attention" for node in _unwanted(model, limits, dtype)]


def _unwanted(model: ir.Model, limits: TargetLimits, dtype: DType) -> list[ir.Node]:
    """Returns the Attentions without a kernel on the target, because of dtype, shape, or a mask with `is_causal`."""
    attentions = _attentions(model)
    if dtype not in limits.attention_dtypes:
        return attentions
    kernels = limits.attention_kernels
    assert kernels is not None  # Otherwise this rewrite does not apply.
    shapes = [[require_static_shape(value, node) for value in node.inputs[:3]] for node in attentions]
    return [
        node
        for node, (query, *keys_values) in zip(attentions, shapes, strict=True)
        if any(shape[-1] != query[-1] for shape in keys_values)
        or kernels.problem(query)
        or (input_of(node, MASK) is not None and _is_causal(node))
    ]


class _Sizes(NamedTuple):
    B: int
    H: int
    G: int
    T: int
    U: int
    E: int
    F: int


def _sizes(node: ir.Node) -> _Sizes:
    """The sizes of q (B, H, T, E), k (B, G, U, E), v (B, G, U, F)."""
    problems = [f"input {i} ({value.name})" for i, value in enumerate(node.inputs) if i > MASK and value is not None]
    problems += [f"output {i} ({value.name})" for i, value in enumerate(node.outputs) if i > 0 and is_used(value)]
    problems += [f"attribute {name}" for name in node.attributes if name not in KNOWN_ATTRIBUTES]
    softcap = node.attributes.get_float("softcap", 0.0)
    if softcap:
        problems.append(f"softcap {softcap}")
    if problems:
        raise GraphError(
            f"{label_of(node)}: Attention with {', '.join(problems)} cannot be put into primitive operators; expected "
            "query, key and value and at most a mask, is_causal and scale"
        )
    shapes = [require_static_shape(value, node) for value in node.inputs[:3]]
    if any(len(shape) != 4 for shape in shapes):
        raise GraphError(f"{label_of(node)}: Attention on shapes {shapes}, expected (batch, heads, tokens, width) each")
    (B, H, T, E), (_, G, U, _), (*_, F) = shapes
    if shapes[1:] != [(B, G, U, E), (B, G, U, F)] or H % G:
        raise GraphError(
            f"{label_of(node)}: Attention with query {shapes[0]}, key {shapes[1]} and value {shapes[2]}: the batch, "
            "the width of query and key, or the lengths of key and value differ, or the number of heads is no multiple "
            "of the keys'"
        )
    return _Sizes(B, H, G, T, U, E, F)


class _Shared(NamedTuple):
    """Values that several attentions of one graph share.

    Attributes:
        visible: (T, U) -> bool (T, U), true where a query sees a key.
        rows: (mask, R, T) -> the mask, with the rows of the R heads that share keys stacked.
        biases: (mask, R, T, dtype) -> the numbers that a mask adds to scores of this dtype, in the shape of `rows`.
        grouped_rows: `grouped_rows` of the target's limits.
    """

    visible: Masks
    rows: dict[tuple[ir.Value, int, int], ir.Value]
    biases: dict[tuple[ir.Value, int, int, ir.DataType], ir.Value]
    grouped_rows: bool


def _rewrite(node: ir.Node, sizes: _Sizes, shared: _Shared) -> None:
    (B, H, G, T, U, E, F), (q, k, v), visible = sizes, node.inputs[:3], shared.visible
    assert q is not None
    assert q.dtype is not None
    number = q.dtype.numpy()
    writer = NodeWriter(graph_around(node), node, "decomposed")
    if _is_causal(node) and (T, U) not in visible:
        visible[T, U] = _visible_keys(writer, np.arange(T, dtype=np.int32), U, q)
    bias, hidden = _bias(writer, node, sizes, shared)
    q = writer.op("Mul", q, np.array(node.attributes.get_float("scale", 1 / math.sqrt(E)), number))
    k = writer.op("Transpose", k, perm=[0, 1, 3, 2])
    if G != H and shared.grouped_rows:
        q = writer.op("Reshape", q, [B, G, H // G * T, E])
    elif G != H:
        q = writer.op("Reshape", q, [B, G, H // G, T, E])
        k = writer.op("Reshape", k, [B, G, 1, E, U])
        v = writer.op("Reshape", v, [B, G, 1, U, F])
    weight = writer.op("MatMul", q, k)
    if bias is not None:
        weight = writer.op("Add", weight, bias)
    elif _is_causal(node):
        seen = _grouped(writer, visible[T, U], sizes, shared)
        weight = writer.op("Where", seen, weight, np.array(-math.inf, number))
    y = writer.op("MatMul", writer.op("Softmax", weight, axis=-1), v)
    if hidden is not None:
        y = writer.op("Where", hidden, np.array(0, number), y)
    writer.replace(y if G == H else writer.op("Reshape", y, [B, H, T, F]))


def _bias(writer: NodeWriter, node: ir.Node, sizes: _Sizes, shared: _Shared) -> tuple[ir.Value | None, ir.Value | None]:
    """(bias, hidden): the numbers that a mask adds to the scores, in a shape that broadcasts to theirs; and the queries
    that see no key, bool (..., 1), to whose scores it adds nothing.
    """
    source, q = input_of(node, MASK), node.inputs[0]
    if source is None:
        return None, None
    assert q is not None
    assert q.dtype is not None
    zero, never = (np.array(number, q.dtype.numpy()) for number in (0, -math.inf))
    key = (source, sizes.H // sizes.G, sizes.T, q.dtype)
    if key not in shared.biases:
        rows = _grouped(writer, source, sizes, shared)
        shared.biases[key] = writer.op("Where", rows, zero, never) if rows.dtype == BOOL else rows
    mask = shared.biases[key]
    if _is_causal(node):
        causal = _grouped(writer, shared.visible[sizes.T, sizes.U], sizes, shared)
        mask = writer.op("Where", causal, mask, never)
    elif _shows_a_key(source):
        return mask, None
    # Integers are reduced, because OpenVINO's maximum of a row of minus infinities is the lowest finite number.
    unseen = writer.op("Cast", writer.op("Equal", mask, never), to=INT32)
    hidden = writer.op("Cast", writer.op("ReduceMin", unseen, [-1], keepdims=1), to=BOOL)
    return writer.op("Where", hidden, zero, mask), hidden


def _shows_a_key(mask: ir.Value) -> bool:
    """Whether every query surely sees a key, because it sees one in the whole mask or in a constant part of it."""
    joined = made_by(before_views(mask, "Unsqueeze"), "Concat")
    parts = [mask]
    if joined is not None:
        rank, axis = len(static_shape(joined.outputs[0]) or ()), joined.attributes.get_int("axis", 0)
        parts += [part for part in joined.inputs if part is not None] if axis in (-1, rank - 1) else []
    fixed = [array for part in parts if (array := constant_array(part)) is not None]
    return bool(mask.meta.get(LEAVES_A_KEY)) or any(_every_query_sees(array, -math.inf) for array in fixed)


def _grouped(writer: NodeWriter, mask: ir.Value, sizes: _Sizes, shared: _Shared) -> ir.Value:
    """Reshapes a mask that broadcasts to (B, H, T, U) so that it broadcasts to the scores: if heads share keys, these
    are (B, G, R, T, U), or (B, G, R * T, U) with `grouped_rows`.
    """
    G, R = sizes.G, sizes.H // sizes.G
    shape = static_shape(mask)
    assert shape is not None
    b, h, t, u = (1,) * (4 - len(shape)) + shape
    if R == 1 or (len(shape) == 2 and not shared.grouped_rows):
        return mask
    if not shared.grouped_rows:
        return writer.op("Reshape", mask, [b, *((1, 1) if h == 1 else (G, R)), t, u])
    key = (mask, R, sizes.T)
    if key not in shared.rows:
        heads = R if h == 1 else G * R
        whole = writer.op("Expand", writer.op("Reshape", mask, [b, h, t, u]), [b, heads, sizes.T, u])
        shared.rows[key] = writer.op("Reshape", whole, [b, heads // R, R * sizes.T, u])
    return shared.rows[key]

"""The cost of a graph: FLOPs and bytes, counted from the static ONNX graph that is deployed, in total and node by node.

**FLOPs** are those of matrix products (`products`). Norms, activations, rotations, softmax, top-k, gathers and scatters
have none: they are bound by memory, not by arithmetic. Nodes without a rule (operators of vendors, and those that hold
graphs, such as Loop) and nodes without a static shape count as nothing and are named. The totals are then too low, and
nothing may be predicted from them. In the totals, attention counts as the full square of queries and keys even if it is
causal, because that is what the portable graph says and what `torch.utils.flop_counter` reports; `needed_flops` leaves
out the scores that the mask hides.

**The bytes** of a node are those that must pass between memory and processor: its inputs, weights included, and its
outputs, each value once. Constants that a runtime folds while loading cost nothing. Some operators have kernels that
move less or more than that:

    views (Reshape, Squeeze ...)    move nothing
    Gather, GatherElements, Slice   read only the data that they gather
    Expand                          only writes its result
    Attention                       counts as a product, a softmax and a product, as ONNX defines it: the first writes
                                    the scores, the second reads and writes them, and the third reads them. For engines
                                    that never hold all scores it is one product over queries, keys and values, without
                                    the half of the scores that a causal mask hides.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Set
from typing import TYPE_CHECKING, NamedTuple, cast

from mod_export.errors import GraphError
from mod_export.measure.parts import PARTS, VIEWS, constants_of, part_of_product, parts_of_nodes
from mod_export.measure.products import flops_of_product, is_countable, is_product, operands_of, operator_of
from mod_export.rows.cost import CostRow, Work
from mod_export.types import Bucket, ModelKind

if TYPE_CHECKING:
    import onnx_ir as ir

GATHERS = frozenset({"Gather", "GatherElements", "GatherND", "Slice"})


def cost_row(model: ir.Model, kind: ModelKind, bucket: Bucket) -> CostRow:
    """Counts the cost of a graph whose shapes are static and stored in it, as ONNX shape inference leaves them.

    A node that cannot be counted adds nothing to the numbers, and its operator is named in `not_counted`.
    """
    where = f"{kind} {bucket.name}"
    constants = constants_of(model.graph)
    flops_by_part = dict.fromkeys(PARTS, 0)
    kv_bytes = hidden = activation_bytes = 0
    not_counted = Counter[str]()
    for node in model.graph:
        cost = _cost_of(node, constants, where)
        if cost is None:
            not_counted[operator_of(node)] += 1
            continue
        flops_by_part[cost.part] += cost.flops
        hidden += cost.hidden
        kv_bytes += cost.kv_bytes
        activation_bytes += cost.activation_bytes
    return CostRow(
        model=kind,
        bucket=bucket.name,
        flops=sum(flops_by_part.values()),
        flops_by_part=flops_by_part,
        needed_flops=sum(flops_by_part.values()) - hidden,
        weight_bytes=_stored(model.graph),
        activation_bytes=activation_bytes,
        kv_bytes=kv_bytes,
        not_counted=dict(sorted(not_counted.items())),
    )


class _NodeCost(NamedTuple):
    """Cost of a node: its FLOPs count for `part`, and `hidden` are the FLOPs of scores that a causal mask hides."""

    part: str
    flops: int
    hidden: int
    kv_bytes: int
    activation_bytes: int


def _cost_of(node: ir.Node, constants: Set[ir.Value], where: str) -> _NodeCost | None:
    """Counts the cost of one node; None if there is no rule for it, or if a shape that the rule needs is not known."""
    # An optional output that is not used has an empty name.
    computed = [value for value in node.outputs if value.name and value not in constants]
    if not computed:
        return _NodeCost("other", 0, 0, 0, 0)  # A runtime folds it away while loading.
    if not is_countable(node):
        return None
    try:
        size = sum(bytes_of_value(value, where) for value in computed)
        if is_attention(node):
            sizes = attention_sizes(node, where)
            flops, hidden = (2 * scores * sizes.widths for scores in (sizes.scores, sizes.scores - sizes.needed))
            # Keys and values, and those of the past if there are any.
            read = (*node.inputs[1:3], *node.inputs[4:6])
            kv_bytes = sum(bytes_of_value(value, where) for value in read if value is not None)
            return _NodeCost("attention", flops, hidden, kv_bytes, size)
        if is_product(node):
            part = part_of_product(node, constants)
            flops = flops_of_product(node, lambda value: _shape(value, where))
            kv_bytes = bytes_of_value(operands_of(node)[1], where) if part == "attention" else 0
            return _NodeCost(part, flops, 0, kv_bytes, size)
    except GraphError:
        return None
    return _NodeCost("other", 0, 0, 0, size)


def is_attention(node: ir.Node) -> bool:
    """Says whether a node is attention as one operator."""
    return operator_of(node) == "Attention"


def _stored(graph: ir.Graph) -> int:
    # Imported here, because build folders are also benchmarked and reported on where no ONNX tools are installed.
    import onnx_ir as ir

    stored = {
        (str(tensor.path), tensor.offset): tensor.nbytes
        for tensor in (value.const_value for value in graph.initializers.values())
        if isinstance(tensor, ir.ExternalTensor)
    }
    return sum(stored.values())


def flops_of(work: Iterable[Work]) -> int | None:
    """Returns the FLOPs of one run of a graph; None if some of its work was not counted."""
    listed = list(work)
    return sum(item.flops * len(item.nodes) for item in listed) if all(item.counted for item in listed) else None


def work_of_graph(model: ir.Model, where: str, *, whole_scores: bool) -> tuple[Work, ...]:
    """Counts the work in a graph whose shapes are static and stored in it, as ONNX shape inference leaves them.

    Args:
        model: the graph as it is deployed.
        where: the name of the graph in messages.
        whole_scores: whether the engine holds all scores of an attention in memory (`TargetLimits.whole_scores`).

    Returns:
        Groups of nodes with equal work, in the order of the graph. Nodes that cannot be counted have 0 FLOPs and bytes.
    """
    nodes: dict[tuple[str, int, int, int, bool], list[str]] = defaultdict(list)
    for node, part in parts_of_nodes(model.graph).items():
        phases = _phases_of(node, where, whole_scores)
        for phase, (flops, size) in enumerate(phases or [(0, 0)]):
            nodes[part, flops, size, phase, phases is not None].append(node.name or "")
    return tuple(
        Work(part=part, flops=flops, bytes=size, nodes=tuple(names), counted=counted)
        for (part, flops, size, _, counted), names in nodes.items()
    )


def _phases_of(node: ir.Node, where: str, whole_scores: bool) -> list[tuple[int, int]] | None:
    """Returns (FLOPs, bytes) of the successive phases of a node; None if they cannot be counted."""
    if not is_countable(node):
        return None
    try:
        if is_attention(node):
            return list(_attention_phases(node, where, whole_scores))
        flops = flops_of_product(node, lambda value: _shape(value, where)) if is_product(node) else 0
        return [(flops, _traffic(node, where))]
    except GraphError:
        return None


def _attention_phases(node: ir.Node, where: str, whole_scores: bool) -> Iterator[tuple[int, int]]:
    sizes = attention_sizes(node, where)
    traffic = _traffic(node, where)
    if not whole_scores:
        yield 2 * sizes.needed * sizes.widths, traffic
        return
    flops = 2 * sizes.scores * sizes.widths
    query = _input(node, 0)
    assert query.dtype is not None, f"{node.name}: the traffic of its inputs has been counted"
    scores = sizes.scores * query.dtype.bitwidth // 8
    values = bytes_of_value(_input(node, 2), where) + bytes_of_value(node.outputs[0], where)
    second = flops // 2
    yield flops - second, traffic - values + scores
    yield 0, 2 * scores
    yield second, values + scores


def _traffic(node: ir.Node, where: str) -> int:
    written = sum(bytes_of_value(value, where) for value in node.outputs if value.name)
    if node.op_type in VIEWS:
        return 0
    if node.op_type == "Expand":
        return written
    read = [value for value in dict.fromkeys(node.inputs) if value is not None and value.name]
    if node.op_type in GATHERS:
        return 2 * written + sum(bytes_of_value(value, where) for value in read[1:])
    return written + sum(bytes_of_value(value, where) for value in read)


class AttentionSizes(NamedTuple):
    """Sizes of an Attention node. FLOPs are 2 x scores x widths: queries x keys and scores x values of all heads."""

    scores: int
    """B H Tq Tk, with the keys of the past."""
    needed: int
    """Scores that a causal mask does not hide: for T queries and T keys, T (T + 1) / 2 of T T in each head of a row."""
    widths: int
    """Width of a query's head plus that of a value's head."""


def attention_sizes(node: ir.Node, where: str) -> AttentionSizes:
    """Returns the sizes of an Attention node (ONNX opset 23), which takes (B, heads, T, E), or (B, T, heads * E) with
    the numbers of heads as attributes. Under a causal mask, query i sees the keys up to its own and those of the past.
    A mask given as a tensor hides nothing here, because its values are not read.

    Raises:
        GraphError: a shape is unknown.
    """
    query, key, value = (_shape(_input(node, index), where) for index in range(3))
    if len(query) == 4:
        batch, heads, num_queries, width = query
        num_keys, value_width = key[2], value[3]
    else:
        batch, num_queries, hidden = query
        heads, kv_heads = (node.attributes[name].as_int() for name in ("q_num_heads", "kv_num_heads"))
        width, num_keys, value_width = hidden // heads, key[1], value[2] // kv_heads
    past_value = node.inputs[4] if len(node.inputs) > 4 else None
    past = 0 if past_value is None else _shape(past_value, where)[2]
    num_keys += past
    visible = num_queries * num_keys
    if node.attributes.get_int("is_causal", 0):
        visible = sum(min(num_keys, past + query + 1) for query in range(num_queries))
    rows = batch * heads
    return AttentionSizes(rows * num_queries * num_keys, rows * visible, width + value_width)


def _input(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None, f"{node.name}: onnx.checker lets no graph through whose required input {index} is missing"
    return value


def _shape(value: ir.Value, where: str) -> tuple[int, ...]:
    shape = value.shape if value.shape is not None else getattr(value.const_value, "shape", None)
    if shape is None or not all(isinstance(size, int) for size in shape):
        raise _unknown(value, where, "none" if shape is None else str(shape))
    return cast("tuple[int, ...]", tuple(shape))


def bytes_of_value(value: ir.Value, where: str) -> int:
    """Returns the bytes of a value; raises GraphError, with `where` in its message, if shape or dtype is unknown."""
    if value.dtype is None:
        raise _unknown(value, where, "no dtype")
    return math.ceil(math.prod(_shape(value, where)) * value.dtype.bitwidth / 8)


def _unknown(value: ir.Value, where: str, actual: str) -> GraphError:
    return GraphError(
        f"{where}: the shape and dtype of value {value.name} must be known and static to count its cost, got {actual}; "
        "export with fixed shapes and store ONNX shape inference in the graph"
    )


# Products of matrices

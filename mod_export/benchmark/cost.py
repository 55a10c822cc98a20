"""What a graph costs: FLOPs and bytes, counted from the static ONNX graph that is deployed, in total and node by node.

Counted are the multiplications of matrix products, two FLOPs for each multiply-add, exactly. Norms, activations,
rotations, softmax, top-k, gathers and scatters are not counted: they are bound by memory, not by arithmetic. In the
totals, attention counts as the full square of queries and keys even where it is causal, because that is what the
portable graph says and what `torch.utils.flop_counter` reports; `needed_flops` leaves out what the mask hides.
`model_parts` says which part of the model each product belongs to.

The bytes of a node are those that must pass between memory and processor: its inputs, weights included, and its
outputs, each value once. Constants that a runtime folds while loading cost nothing. Exceptions, because kernels do less
or more than that:

    views (Reshape, Squeeze ...)    nothing is moved
    Gather, GatherElements, Slice   of the data only what is gathered is read
    Expand                          only the result is written
    Attention                       a product, a softmax and a product, as ONNX defines it: the scores are written by
                                    the first, read and written by the second and read by the third. For engines that
                                    never hold all scores it is one product over queries, keys and values, without
                                    the half of the scores that a causal mask hides.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from mod_export.benchmark.model_parts import PARTS, VIEWS, constants_of, is_product, part_of_product, parts_of_nodes
from mod_export.errors import GraphError
from mod_export.results.cost import CostRow, Work
from mod_export.types import Bucket, ModelKind

if TYPE_CHECKING:
    import onnx_ir as ir

NO_RULE = frozenset(
    {
        "CausalConvWithState", "ConvInteger", "ConvTranspose", "DeformConv", "Einsum", "GRU", "If", "LSTM",
        "LinearAttention", "Loop", "QLinearConv", "QLinearMatMul", "RNN", "Scan", "SequenceMap",
    }
)  # fmt: skip
"""Standard operators that multiply matrices, or hold graphs, and have no rule here. Skipping one would be a lie."""
GATHERS = frozenset({"Gather", "GatherElements", "GatherND", "Slice"})


def cost_row(model: ir.Model, kind: ModelKind, bucket: Bucket) -> CostRow:
    """Counts a graph whose shapes are all static and stored in it, as ONNX shape inference leaves them.

    Raises:
        GraphError: a needed shape or dtype is unknown, or a node multiplies matrices in a way that has no rule here.
    """
    where = f"{kind} {bucket.name}"
    constants = constants_of(model.graph)
    flops_by_part = dict.fromkeys(PARTS, 0)
    kv_bytes = hidden = 0
    for node in model.graph:
        _check_countable(node, where)
        if node.op_type == "Attention":
            sizes = attention_sizes(node, where)
            flops_by_part["attention"] += 2 * sizes.scores * sizes.widths
            hidden += 2 * (sizes.scores - sizes.needed) * sizes.widths
            kv_bytes += sum(_bytes(value, where) for value in _keys_and_values(node))
        elif is_product(node):
            part = part_of_product(node, constants)
            flops_by_part[part] += _flops(node, where)
            kv_bytes += _bytes(_input(node, 1), where) if part == "attention" else 0
    # An optional output that is not used has an empty name.
    computed = (value for node in model.graph for value in node.outputs if value.name)
    return CostRow(
        model=kind,
        bucket=bucket.name,
        flops=sum(flops_by_part.values()),
        flops_by_part=flops_by_part,
        needed_flops=sum(flops_by_part.values()) - hidden,
        weight_bytes=_stored(model.graph),
        activation_bytes=sum(_bytes(value, where) for value in computed if value not in constants),
        kv_bytes=kv_bytes,
    )


def _keys_and_values(node: ir.Node) -> list[ir.Value]:
    """K and V of an Attention node, and the past ones where there are some."""
    wanted = [*node.inputs[1:3], *node.inputs[4:6]]
    return [value for value in wanted if value is not None]


def _stored(graph: ir.Graph) -> int:
    # A build folder is benchmarked and reported on where no ONNX tools are installed, with rows counted elsewhere.
    import onnx_ir as ir

    stored = {
        (str(tensor.path), tensor.offset): tensor.nbytes
        for tensor in (value.const_value for value in graph.initializers.values())
        if isinstance(tensor, ir.ExternalTensor)
    }
    return sum(stored.values())


def flops_of(work: Iterable[Work]) -> int:
    """FLOPs of one run of the graph that was counted."""
    return sum(one.flops * len(one.nodes) for one in work)


def work_of_graph(model: ir.Model, where: str, *, whole_scores: bool) -> tuple[Work, ...]:
    """Counts a graph whose shapes are all static and stored in it, as ONNX shape inference leaves them.

    Args:
        model: the graph as it is deployed.
        where: what messages call it.
        whole_scores: whether the engine holds all scores of an attention in memory (`Dialect.whole_scores`).

    Returns:
        Nodes of equal work together, in the order of the graph.

    Raises:
        GraphError: a needed shape or dtype is unknown, or a node multiplies matrices in a way that has no rule.
    """
    nodes: dict[tuple[str, int, int, int], list[str]] = defaultdict(list)
    for node, part in parts_of_nodes(model.graph).items():
        _check_countable(node, where)
        for phase, (flops, size) in enumerate(_phases(node, where, whole_scores)):
            nodes[part, flops, size, phase].append(node.name or "")
    return tuple(
        Work(part=part, flops=flops, bytes=size, nodes=tuple(names)) for (part, flops, size, _), names in nodes.items()
    )


def _phases(node: ir.Node, where: str, whole_scores: bool) -> Iterator[tuple[int, int]]:
    """(FLOPs, bytes) of what a node does, one after the other."""
    if node.op_type == "Attention":
        yield from _attention_phases(node, where, whole_scores)
    else:
        flops = _flops(node, where) if is_product(node) else 0
        yield flops, _traffic(node, where)


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
    values = _bytes(_input(node, 2), where) + _bytes(node.outputs[0], where)
    second = flops // 2
    yield flops - second, traffic - values + scores
    yield 0, 2 * scores
    yield second, values + scores


def _traffic(node: ir.Node, where: str) -> int:
    written = sum(_bytes(value, where) for value in node.outputs if value.name)
    if node.op_type in VIEWS:
        return 0
    if node.op_type == "Expand":
        return written
    read = [value for value in dict.fromkeys(node.inputs) if value is not None and value.name]
    if node.op_type in GATHERS:
        return 2 * written + sum(_bytes(value, where) for value in read[1:])
    return written + sum(_bytes(value, where) for value in read)


def _check_countable(node: ir.Node, where: str) -> None:
    if is_product(node):
        return
    if node.domain not in ("", "ai.onnx") or node.op_type in NO_RULE:
        name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        raise GraphError(
            f"{where}: node {node.name}: FLOPs of {name} cannot be counted; only MatMul, Gemm, Conv and Attention of "
            "standard ONNX have a rule, and what mod-export puts in their place. Count the portable graph, or express "
            "the product as MatMul"
        )


def _flops(node: ir.Node, where: str) -> int:
    """Of one of PRODUCTS: 2 M N K for every matrix of the broadcast batch (ONNX MatMul follows numpy.matmul), and of a
    convolution as many for each output as its filter has weights.

    Operations on whole numbers count as those on floats do.
    """
    left, right = _shape(_input(node, 0), where), _shape(_input(node, 1), where)
    if node.op_type == "MatMulNBits":  # Its weights are packed; the sizes are attributes.
        return 2 * math.prod(left) * node.attributes["N"].as_int()
    if node.op_type == "FusedMatMul" and node.attributes.get_int("transB", 0) == 1:
        right = (*right[:-2], right[-1], right[-2])
    if node.op_type == "Conv":  # Its filters are (outputs, inputs of a group, *kernel).
        return 2 * math.prod(_shape(node.outputs[0], where)) * math.prod(right[1:])
    if node.op_type == "Gemm":
        rows, inner = reversed(left) if node.attributes.get_int("transA", 0) else left
        columns = right[0] if node.attributes.get_int("transB", 0) else right[1]
        return 2 * rows * columns * inner
    rows, inner = (1, left[0]) if len(left) == 1 else left[-2:]
    columns = 1 if len(right) == 1 else right[-1]
    return 2 * math.prod(np.broadcast_shapes(left[:-2], right[:-2])) * rows * columns * inner


class AttentionSizes(NamedTuple):
    """FLOPs are 2 x scores x widths: queries times keys and scores times values, of every query head."""

    scores: int
    """B H Tq Tk, the keys of the past included."""
    needed: int
    """Those that a causal mask does not hide: for T queries of T keys T (T + 1) / 2 of T T."""
    widths: int
    """Of a query's head plus a value's."""


def attention_sizes(node: ir.Node, where: str) -> AttentionSizes:
    """Of an Attention node (ONNX opset 23), which takes (B, heads, T, E), or (B, T, heads * E) with the number of heads
    as attributes. Query i sees the keys up to its own, and those of the past. A mask given as a tensor hides nothing
    here, because its values are not looked at.
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
    seen = num_queries * num_keys
    if node.attributes.get_int("is_causal", 0):
        seen = sum(min(num_keys, past + query + 1) for query in range(num_queries))
    rows = batch * heads
    return AttentionSizes(rows * num_queries * num_keys, rows * seen, width + value_width)


def _input(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None, f"{node.name}: onnx.checker lets no graph through whose required input {index} is missing"
    return value


def _shape(value: ir.Value, where: str) -> tuple[int, ...]:
    shape = value.shape if value.shape is not None else getattr(value.const_value, "shape", None)
    if shape is None or not all(isinstance(size, int) for size in shape):
        found = "none" if shape is None else str(shape)
        raise GraphError(
            f"{where}: the shape of value {value.name} must be known and static to count its cost, got {found}; "
            "export with fixed shapes and store ONNX shape inference in the graph"
        )
    return cast("tuple[int, ...]", tuple(shape))


def _bytes(value: ir.Value, where: str) -> int:
    if value.dtype is None:
        raise GraphError(
            f"{where}: the dtype of value {value.name} must be known to count its bytes; "
            "store ONNX shape inference in the graph"
        )
    return math.ceil(math.prod(_shape(value, where)) * value.dtype.bitwidth / 8)

"""What a graph costs: FLOPs and bytes, counted from the static ONNX graph that is deployed, in total and node by node.

Counted are the multiplications of matrix products, two FLOPs for each multiply-add, exactly. Norms, activations,
rotations, softmax, top-k, gathers and scatters are not counted: they are bound by memory, not by arithmetic. In the
totals, attention counts as the full square of queries and keys even where it is causal, because that is what the
portable graph says and what `torch.utils.flop_counter` reports; `needed_flops` leaves out what the mask hides.
`products` says which part of the model each product belongs to.

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

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from mod_export.benchmark.model_parts import VIEWS, parts_of_nodes
from mod_export.benchmark.products import (
    PARTS,
    attention_sizes,
    bytes_of,
    check_countable,
    constants_of,
    input_of,
    is_product,
    needed_scores,
    part_of_product,
    product_flops,
)
from mod_export.results.cost import CostRow, Work
from mod_export.types import Bucket, ModelKind

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["PARTS", "cost_row", "flops_of", "work_of_graph"]


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
        check_countable(node, where)
        if node.op_type == "Attention":
            scores, widths = attention_sizes(node, where)
            flops_by_part["attention"] += 2 * scores * widths
            hidden += 2 * (scores - needed_scores(node, where)) * widths
            kv_bytes += sum(bytes_of(value, where) for value in _keys_and_values(node))
        elif is_product(node):
            part = part_of_product(node, constants)
            flops_by_part[part] += product_flops(node, where)
            kv_bytes += bytes_of(input_of(node, 1), where) if part == "attention" else 0
    return CostRow(
        model=kind,
        bucket=bucket.name,
        flops=sum(flops_by_part.values()),
        flops_by_part=flops_by_part,
        needed_flops=sum(flops_by_part.values()) - hidden,
        weight_bytes=_weight_bytes(model.graph),
        activation_bytes=sum(bytes_of(value, where) for value in _computed(model.graph) if value not in constants),
        kv_bytes=kv_bytes,
    )


def _computed(graph: ir.Graph) -> Iterator[ir.Value]:
    # An optional output that is not used has an empty name.
    return (value for node in graph for value in node.outputs if value.name)


def _keys_and_values(node: ir.Node) -> list[ir.Value]:
    """K and V of an Attention node, and the past ones where there are some."""
    wanted = [*node.inputs[1:3], *node.inputs[4:6]]
    return [value for value in wanted if value is not None]


def _weight_bytes(graph: ir.Graph) -> int:
    # A build folder is benchmarked and reported on where no ONNX tools are installed, with rows counted elsewhere.
    import onnx_ir as ir

    stored = {
        (str(tensor.path), tensor.offset): tensor.nbytes
        for tensor in (value.const_value for value in graph.initializers.values())
        if isinstance(tensor, ir.ExternalTensor)
    }
    return sum(stored.values())


GATHERS = frozenset({"Gather", "GatherElements", "GatherND", "Slice"})


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
        check_countable(node, where)
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
        flops = product_flops(node, where) if is_product(node) else 0
        yield flops, _traffic(node, where)


def _attention_phases(node: ir.Node, where: str, whole_scores: bool) -> Iterator[tuple[int, int]]:
    num_scores, widths = attention_sizes(node, where)
    traffic = _traffic(node, where)
    if not whole_scores:
        yield 2 * needed_scores(node, where) * widths, traffic
        return
    flops = 2 * num_scores * widths
    query = input_of(node, 0)
    assert query.dtype is not None, f"{node.name}: the traffic of its inputs has been counted"
    scores = num_scores * query.dtype.bitwidth // 8
    values = bytes_of(input_of(node, 2), where) + bytes_of(node.outputs[0], where)
    second = flops // 2
    yield flops - second, traffic - values + scores
    yield 0, 2 * scores
    yield second, values + scores


def _traffic(node: ir.Node, where: str) -> int:
    written = sum(bytes_of(value, where) for value in node.outputs if value.name)
    if node.op_type in VIEWS:
        return 0
    if node.op_type == "Expand":
        return written
    read = [value for value in dict.fromkeys(node.inputs) if value is not None and value.name]
    if node.op_type in GATHERS:
        return 2 * written + sum(bytes_of(value, where) for value in read[1:])
    return written + sum(bytes_of(value, where) for value in read)

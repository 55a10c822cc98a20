"""The work that a graph asks of a machine, node by node: FLOPs, and bytes that must pass between memory and processor.

The bytes of a node are those of its inputs, weights included, and of its outputs, each value once. Constants that a
runtime folds while loading cost nothing. Exceptions, because kernels do less or more than that:

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
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mod_export.measure.node_parts import VIEWS, parts_of_nodes
from mod_export.measure.products import (
    attention_sizes,
    bytes_of,
    check_countable,
    input_of,
    is_product,
    needed_scores,
    product_flops,
)

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["Work", "flops_of", "work_of_graph"]

GATHERS = frozenset({"Gather", "GatherElements", "GatherND", "Slice"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What each of some nodes asks for.

    Attributes:
        part: of the model, one of `node_parts.NODE_PARTS`.
        flops: of one node.
        bytes: of one node, read and written.
        nodes: the names of the nodes. An attention whose scores pass through memory is in several pieces of work.
    """

    part: str
    flops: int
    bytes: int
    nodes: tuple[str, ...]


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

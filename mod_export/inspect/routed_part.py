"""Finds how scores weigh the results of a routing site in a captured program, and the FLOPs of its selected tokens.

Shape legend: B rows, T tokens that a site can select from, K slots.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from mod_export.graph.probing import Known, is_pointwise, is_product, moves
from mod_export.graph.program_nodes import argument_of, behind, shape_of
from mod_export.graph.routing_sites import Marked
from mod_export.graph.token_flow import Flow, flows_of, nodes_of
from mod_export.graph.token_places import Selection
from mod_export.marker import MARKER, REORDERED

ATEN = torch.ops.aten
SOFTMAX = {ATEN.softmax.int, ATEN._softmax.default}
FUNCTIONS = {ATEN.sigmoid.default: "sigmoid", ATEN.tanh.default: "tanh", ATEN.relu.default: "relu"}
SCALES = {ATEN.mul.Tensor, ATEN.div.Tensor, ATEN.add.Tensor, ATEN.mul.Scalar, ATEN.add.Scalar}
WEIGHTED = {
    ATEN.einsum.default, ATEN.mul.Tensor, ATEN.mul_.Tensor, ATEN.addcmul.default, ATEN.addcmul_.default,
    ATEN.lerp.Tensor, ATEN.lerp_.Tensor,
}  # fmt: skip
"""Operators, besides matrix products, that can multiply scores with results."""
NO_GATE = "none found"


def gates_and_flops(program: ExportedProgram, flops: Mapping[fx.Node, int]) -> list[tuple[str, float]]:
    """Returns (gate, share of all FLOPs spent on selected tokens) for every site, in the order of `routing_sites`.

    The gate says how the router's score weighs the results: the score itself, a function of it, or `none found`.
    """
    total = max(1, sum(flops.values()))
    markers = [node for node in program.graph.nodes if node.op == "call_function" and node.target is MARKER]
    marked = {node: _selection(node) for node in markers}
    flows, known = flows_of(program, [item for item in marked.values() if item is not None])
    by_marker = {flow.selection.node: flow for flow in flows}
    results = []
    for node in markers:
        flow = by_marker.get(node)
        if flow is None or not flow.reads:
            results += [(NO_GATE, 0.0)] * len(_marked(node).sites)
            continue
        results.append((_gate(flow, known), sum(flops.get(item, 0) for item in nodes_of(flow.pairs)) / total))
    return results


def _marked(marker: fx.Node) -> Marked:
    arguments: Any = marker.args
    return Marked(*arguments)


def _selection(marker: fx.Node) -> Selection | None:
    """Selection of a marker; None if its indices are unused, or not of shape (rows, slots)."""
    index = next((use for use in marker.users if use.target is operator.getitem and use.args[1] == 0), None)
    if index is None or len(shape_of(index)) != 2:
        return None
    scores = _marked(marker).scores
    order = next((use for node in _shapes_of(index) for use in node.users if use.target is REORDERED), None)
    if order is not None:
        dim: Any = order.args[2]
        return Selection(node=marker, scores=scores, dim=dim, indices=order, values=[], largest=True, is_order=True)
    return Selection(node=marker, scores=scores, dim=1, indices=index, values=[], largest=True)


def _shapes_of(node: fx.Node) -> list[fx.Node]:
    """Returns the node, and all nodes that only change its shape."""
    nodes = [node]
    for current in nodes:  # The loop appends to this list.
        nodes += [use for use in current.users if use.target in (ATEN.t.default, ATEN.reshape.default)]
    return nodes


def _gate(flow: Flow, known: Known) -> str:
    one_hot = {form for form in known.forms(flow.selection.indices) if _is_floating(known.value(form))}
    results = set(flow.tokens) | one_hot | nodes_of(flow.pairs)
    for read in flow.scores:
        if not read.source.meta["val"].dtype.is_floating_point:
            continue
        after = _until_product(read.node, results - behind(read.node), known)
        if after is not None:
            return ", ".join([*_before(read.source, flow.selection), *after]) or "the score itself"
    return NO_GATE


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _until_product(value: fx.Node, results: set[fx.Node], known: Known) -> list[str] | None:
    """Functions applied to the selected scores until they multiply results; None if they never multiply any."""
    waiting: list[tuple[fx.Node, list[str]]] = [(value, [])]
    seen = {value}
    for node, names in waiting:  # The loop appends to this list.
        for use in node.users:
            others = [operand for operand in use.all_input_nodes if operand is not node]
            if (use.target in WEIGHTED or is_product(use)) and any(operand in results for operand in others):
                return names
            name = _function(use, "the selected tokens")
            reordered = not is_pointwise(use) and bool(others) and all(known.behind(operand) for operand in others)
            if use not in seen and (name is not None or reordered or moves(use) or _scales(use, others)):
                seen.add(use)
                waiting.append((use, [*names, name] if name else names))
    return None


def _before(source: fx.Node, selection: Selection) -> list[str]:
    """Functions at the end of the router, in the order in which they run."""
    names: list[str] = []
    node: Any = source
    while isinstance(node, fx.Node) and node.op == "call_function":
        over = None
        if node.target in SOFTMAX:
            along = shape_of(node)[argument_of(node, "dim")]
            over = "the row" if along == selection.tokens else "the router's outputs"
        name = _function(node, over or "")
        if name is not None:
            names.insert(0, name)
        elif not moves(node) and not _scales(node, node.all_input_nodes[1:]):
            break
        node = node.args[0] if node.args else None
    return names


def _function(node: fx.Node, over: str) -> str | None:
    target: Any = node.target
    return f"softmax over {over}" if target in SOFTMAX else FUNCTIONS.get(target)


def _scales(node: fx.Node, others: list[fx.Node]) -> bool:
    """Whether a node only multiplies or divides by a number, or adds one."""
    return node.target in SCALES and not others

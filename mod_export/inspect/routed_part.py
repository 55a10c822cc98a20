"""What a captured program does with the tokens of a routing site: how scores weigh the results, and what it computes.

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
"""What multiplies scores with results, beside products of matrices."""
NO_GATE = "none found"


def gates_and_flops(program: ExportedProgram, flops: Mapping[fx.Node, int]) -> list[tuple[str, float]]:
    """(gate, share of all FLOPs that the selected tokens take) of every site, in the order of `routing_sites`.

    The gate is how the router's score weighs the results: the score itself, a function of it, or `none found`.
    """
    total = max(1, sum(flops.values()))
    markers = [node for node in program.graph.nodes if node.op == "call_function" and node.target is MARKER]
    marked = {node: _selection(node) for node in markers}
    flows, known = flows_of(program, [one for one in marked.values() if one is not None])
    by_marker = {flow.selection.node: flow for flow in flows}
    found = []
    for node in markers:
        flow = by_marker.get(node)
        if flow is None or not flow.reads:
            found += [(NO_GATE, 0.0)] * len(_marked(node).sites)
            continue
        found.append((_gate(flow, known), sum(flops.get(one, 0) for one in nodes_of(flow.pairs)) / total))
    return found


def _marked(marker: fx.Node) -> Marked:
    arguments: Any = marker.args
    return Marked(*arguments)


def _selection(marker: fx.Node) -> Selection | None:
    """Of a marker of one site whose indices are used."""
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
    """A node, and what only gives it another shape."""
    found = [node]
    for one in found:  # Which grows meanwhile.
        found += [use for use in one.users if use.target in (ATEN.t.default, ATEN.reshape.default)]
    return found


def _gate(flow: Flow, known: Known) -> str:
    one_hot = {one for one in known.forms(flow.selection.indices) if _is_floating(known.value(one))}
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
    """The functions of the selected scores up to where they are multiplied with results; None where they never are."""
    waiting: list[tuple[fx.Node, list[str]]] = [(value, [])]
    seen = {value}
    for node, names in waiting:  # Which grows meanwhile.
        for use in node.users:
            others = [one for one in use.all_input_nodes if one is not node]
            if (use.target in WEIGHTED or is_product(use)) and any(one in results for one in others):
                return names
            name = _function(use, "the selected tokens")
            reordered = not is_pointwise(use) and bool(others) and all(known.behind(one) for one in others)
            if use not in seen and (name is not None or reordered or moves(use) or _scales(use, others)):
                seen.add(use)
                waiting.append((use, [*names, name] if name else names))
    return None


def _before(source: fx.Node, selection: Selection) -> list[str]:
    """The functions that a router ends in."""
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
    """Whether it multiplies by a number, or adds one."""
    return node.target in SCALES and not others

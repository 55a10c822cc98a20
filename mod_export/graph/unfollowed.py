"""Describes the selections of a program that are not routing sites: where their indices go, and in which line.

A selection that cannot be followed may still select tokens, so saying that there is nothing to select would be wrong.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from mod_export.graph.find_sites import ARGSORTS, SELECTS, judged_selections
from mod_export.graph.probing import is_pointwise, tensor_of
from mod_export.graph.program_nodes import argument_of, behind, shape_of
from mod_export.graph.refusals import place_of
from mod_export.graph.token_flow import Flow

NO_SELECTION = "the model has no top-k and no sort of scores"


def unfollowed_selections(program: ExportedProgram) -> list[str]:
    """Returns a sentence for each top-k and each sort of scores that is not a routing site. Equal sentences are merged.

    A top-k that selects experts or words is included: the sentence says where its indices go, not what it is for.

    Args:
        program: a captured program without markers.
    """
    sites, other_flows = judged_selections(program)
    flows = {flow.selection.node: flow for flow in other_flows}
    site_nodes = {site.selection.node for site in sites}
    selecting = [node for node in _selecting(program.graph) if node not in site_nodes]
    counts = Counter(_said(node, flows.get(node)) for node in selecting)
    counts.update(f"{_named(node)}, which are whole numbers" for node in _of_whole_numbers(program.graph, selecting))
    return [f"{text} ({count} times)" if count > 1 else text for text, count in counts.items()] or [NO_SELECTION]


def _selecting(graph: fx.Graph) -> Iterator[fx.Node]:
    for node in graph.nodes:
        scores: Any = node.args[0] if node.args else None
        if node.op == "call_function" and node.target in SELECTS and scores.meta["val"].dtype.is_floating_point:
            yield node


def _of_whole_numbers(graph: fx.Graph, selecting: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """Selections by integers or truth values, such as a sort of a threshold mask, but not sorts of selected indices."""
    ordered = {user for node in selecting for user in behind(node)}
    for node in graph.nodes:
        if node.op == "call_function" and node.target in SELECTS and node not in ordered and _has_indices(node):
            scores: Any = node.args[0]
            if not scores.meta["val"].dtype.is_floating_point:
                yield node


def _has_indices(node: fx.Node) -> bool:
    if node.target in ARGSORTS:
        return bool(node.users)
    return any(use.target is operator.getitem and use.args[1] == 1 and use.users for use in node.users)


def _named(node: fx.Node) -> str:
    scores: Any = node.args[0]
    shape = shape_of(scores)
    if node.target is not torch.ops.aten.topk.default:
        return f"a sort of {list(shape)} scores{_at(node)}"
    total = shape[argument_of(node, "dim")] if shape else 1
    return f"a top-k of {argument_of(node, 'k')} of {total} in {list(shape)} scores{_at(node)}"


def _at(node: fx.Node) -> str:
    return place_of(node).partition("\n")[0]


def _said(node: fx.Node, flow: Flow | None) -> str:
    name = _named(node)
    if not _has_indices(node):
        return f"{name}, of which no indices are used"
    if flow is None:
        return f"{name}, which is changed in place"
    if not flow.selection.is_of_tokens:
        return f"{name}, which is no choice of tokens for each row"
    if flow.reads and flow.puts:
        return f"{name}, by which tokens change places and run all alike"
    if flow.reads:
        read = flow.reads[0].node
        return f"{name}, whose indices read at {_operator(read)}, and nothing is put back at the same places"
    if flow.unknown:
        first = flow.unknown[0]
        value = tensor_of(first)
        all_tokens = flow.selection.rows * flow.selection.tokens
        runs = is_pointwise(first) and value is not None and value.numel() >= all_tokens
        return f"{name}, whose indices go to {_operator(first)}, which {'runs for all' if runs else 'is not followed'}"
    if flow.scores:
        return f"{name}, whose indices read no more than one number for each ({_operator(flow.scores[0].node)})"
    return f"{name}, whose indices read no tokens"


def _operator(node: fx.Node) -> str:
    name = str(getattr(node.target, "_overloadpacket", getattr(node.target, "__name__", node.target)))
    return f"{name}{_at(node)}"

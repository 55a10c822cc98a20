"""What a captured program does with the tokens of a routing site: how scores weigh the results, and what it computes.

Shape legend: B rows, T tokens that a site can select from, K slots.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from mod_export.export.index_uses import (
    GATHERS,
    PRODUCTS,
    SHAPES,
    Selection,
    Uses,
    behind,
    behind_inputs,
    is_index,
    uses_of,
)
from mod_export.export.program_nodes import argument_of, shape_of
from mod_export.export.routing_sites import Marked
from mod_export.export.token_flow import tokens_behind
from mod_export.marker import MARKER

ATEN = torch.ops.aten
SOFTMAX = {ATEN.softmax.int, ATEN._softmax.default}
FUNCTIONS = {ATEN.sigmoid.default: "sigmoid", ATEN.tanh.default: "tanh", ATEN.relu.default: "relu"}
SCALES = {ATEN.mul.Tensor, ATEN.div.Tensor, ATEN.add.Tensor, ATEN.mul.Scalar, ATEN.add.Scalar}
WEIGHTED = PRODUCTS | {
    ATEN.mul.Tensor, ATEN.mul_.Tensor, ATEN.addcmul.default, ATEN.addcmul_.default,
    ATEN.lerp.Tensor, ATEN.lerp_.Tensor,
}  # fmt: skip
"""What multiplies scores with results, in one operation with other things or alone."""
NO_GATE = "none found"


def gates_and_flops(program: ExportedProgram, flops: Mapping[fx.Node, int]) -> list[tuple[str, float]]:
    """(gate, share of all FLOPs that the selected tokens take) of every site, in the order of `routing_sites`.

    The gate is how the router's score weighs the results: the score itself, a function of it, or `none found`.
    """
    data, total = behind_inputs(program), max(1, sum(flops.values()))
    found = []
    for node in program.graph.nodes:
        if node.op != "call_function" or node.target is not MARKER:
            continue
        marked = Marked(*node.args)
        index = next((use for use in node.users if use.target is operator.getitem and use.args[1] == 0), None)
        selection = uses = None
        if index is not None and len(shape_of(index)) == 2:
            selection = Selection(node=node, scores=marked.scores, dim=1, indices=index, values=[], largest=True)
            uses = uses_of(selection, data)
        if selection is None or uses is None:
            found += [(NO_GATE, 0.0)] * len(marked.sites)
            continue
        found.append((_gate(selection, uses), sum(flops.get(one, 0) for one in _routed(uses)) / total))
    return found


def _routed(uses: Uses) -> set[fx.Node]:
    """What is computed of the tokens that were read, until results are put back."""
    nodes = set[fx.Node]()
    for gather, scatter in uses.pairs:
        nodes |= behind(gather) - (set() if scatter is None else behind(scatter))
    return nodes


def _gate(selection: Selection, uses: Uses) -> str:
    results = set(tokens_behind(selection, uses)) | {form.node for form in uses.forms if form.kind == "one_hot"}
    results |= _routed(uses)
    for form in uses.forms:
        for use in form.node.users:
            if use.target not in GATHERS or form.kind != "index" or not is_index(form.node, use):
                continue
            source: Any = use.args[0]
            features = math.prod(shape_of(source)) > selection.rows * selection.tokens
            if features or not source.meta["val"].dtype.is_floating_point:
                continue
            after = _until_product(use, results - behind(use))
            if after is not None:
                return ", ".join([*_before(source, selection), *after]) or "the score itself"
    return NO_GATE


def _until_product(value: fx.Node, results: set[fx.Node]) -> list[str] | None:
    """The functions of the selected scores up to where they are multiplied with results; None where they never are."""
    waiting: list[tuple[fx.Node, list[str]]] = [(value, [])]
    seen = {value}
    for node, names in waiting:  # Which grows meanwhile.
        for use in node.users:
            others = [one for one in use.all_input_nodes if one is not node]
            if use.target in WEIGHTED and any(one in results for one in others):
                return names
            name = _function(use, "the selected tokens")
            reordered = use.target is ATEN.gather.default and use.args[0] is node
            if use not in seen and (name is not None or reordered or use.target in SHAPES or _scales(use, others)):
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
        elif node.target not in SHAPES and not _scales(node, node.all_input_nodes[1:]):
            break
        node = node.args[0] if node.args else None
    return names


def _function(node: fx.Node, over: str) -> str | None:
    target: Any = node.target
    return f"softmax over {over}" if target in SOFTMAX else FUNCTIONS.get(target)


def _scales(node: fx.Node, others: list[fx.Node]) -> bool:
    """Whether it multiplies by a number, or adds one."""
    return node.target in SCALES and not others

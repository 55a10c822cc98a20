"""Describes a program of `torch.export.save` as text: inputs, outputs, FLOPs, and of each routing site its k, its
share of the FLOPs, and the order in which its tokens run.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.utils.flop_counter import FlopCounterMode

from mod_export.errors import CheckpointError
from mod_export.graph.capture import with_found_sites
from mod_export.graph.find_sites import unfollowed_selections
from mod_export.graph.program_nodes import shape_of
from mod_export.graph.sites import Marked, routing_sites
from mod_export.graph.token_flow import Selector, flows_of, nodes_of
from mod_export.marker import MARKER, REORDERED
from mod_export.model.plain_programs import input_nodes
from mod_export.model.pt2 import read_program
from mod_export.report.tables import table_lines
from mod_export.types import BY_POSITION, BY_SCORE

ATEN = torch.ops.aten
ORDERS = {
    BY_POSITION: "order of position",
    BY_SCORE: "order of score: not causal among the selected tokens",
    "rank": "order of position",
    "first_come": "order of position",
}
NO_SITES = (
    "no routing site was found. Mark a selection of another form: index, _ = mod_export.mark_selection(index, scores). "
    "A mask over results that all tokens compute saves nothing"
)


def describe_program(path: Path) -> str:
    """Describes a .pt2 file.

    Raises:
        CheckpointError: it is not a program with fixed sizes, it could run code, or it cannot be described.
    """
    loaded = read_program(path)
    try:
        return _described(path.name, with_found_sites(loaded))
    except Exception as error:  # A file from a user may hold any graph.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path}: a program that cannot be described ({reason})") from error


def _described(name: str, program: ExportedProgram) -> str:
    weights = program.state_dict
    count = sum(tensor.numel() for tensor in weights.values())
    flops = _flops(program)
    lines = [
        f"{name}  {len(weights)} weights, {count:,} parameters",
        *(f"in   {node.name} {_type(node)}" for node in input_nodes(program)),
        *(f"out  {_type(node)}" for node in program.graph.output_node().args[0]),
        flops if isinstance(flops, str) else f"{sum(flops.values()):,} FLOPs of matrix products",
        "",
        *_site_lines(program, {} if isinstance(flops, str) else flops),
    ]
    return "\n".join(lines) + "\n"


def _site_lines(program: ExportedProgram, flops: Mapping[fx.Node, int]) -> list[str]:
    sites = routing_sites(program)
    if not sites:
        return [NO_SITES, *(f"seen: {selection}" for selection in unfollowed_selections(program))]
    rows = [
        [str(site.name), str(site.k), f"{share:.1%}", ORDERS[site.rule]]
        for site, share in zip(sites, _shares_of_flops(program, flops), strict=True)
    ]
    return table_lines(["routing site", "k", "of the FLOPs", "selected tokens run in"], rows)


def _shares_of_flops(program: ExportedProgram, flops: Mapping[fx.Node, int]) -> list[float]:
    """Returns for each site the share of all FLOPs that its selected tokens take, in the order of `routing_sites`."""
    total = max(1, sum(flops.values()))
    markers = [node for node in program.graph.nodes if node.op == "call_function" and node.target is MARKER]
    selectors = [selector for node in markers if (selector := _selector(node)) is not None]
    flows, _ = flows_of(program, selectors)
    by_marker = {flow.selector.node: flow for flow in flows}
    shares: list[float] = []
    for node in markers:
        flow = by_marker.get(node)
        if flow is None or not flow.reads:
            shares += [0.0] * len(_marked(node).sites)
        else:
            shares.append(sum(flops.get(item, 0) for item in nodes_of(flow.pairs)) / total)
    return shares


def _marked(marker: fx.Node) -> Marked:
    arguments: Any = marker.args
    return Marked(*arguments)


def _selector(marker: fx.Node) -> Selector | None:
    """Selection of a marker; None if its indices are unused, or not of shape (rows, slots)."""
    index = next((use for use in marker.users if use.target is operator.getitem and use.args[1] == 0), None)
    if index is None or len(shape_of(index)) != 2:
        return None
    scores = _marked(marker).scores
    order = next((use for node in _shapes_of(index) for use in node.users if use.target is REORDERED), None)
    if order is not None:
        dim: Any = order.args[2]
        return Selector(node=marker, scores=scores, dim=dim, indices=order, values=[], largest=True, is_order=True)
    return Selector(node=marker, scores=scores, dim=1, indices=index, values=[], largest=True)


def _shapes_of(node: fx.Node) -> list[fx.Node]:
    """Returns the node, and all nodes that only change its shape."""
    nodes = [node]
    for current in nodes:  # The loop appends to this list.
        nodes += [use for use in current.users if use.target in (ATEN.t.default, ATEN.reshape.default)]
    return nodes


def _type(node: Any) -> str:
    """Dtype and shape of an input or output, or its value if it is not a tensor but a constant of the program."""
    value = node.meta["val"] if isinstance(node, fx.Node) else node
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _flops(program: ExportedProgram) -> dict[fx.Node, int] | str:
    """FLOPs of each matrix product, two per multiply-add (`torch.utils.flop_counter`); or why they were not counted."""
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    mode = detect_fake_mode([node.meta.get("val") for node in program.graph.nodes])
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), mode or contextlib.nullcontext(), counter:
            counting = _Counting(program.graph_module, counter)
            counting.run(*[node.meta["val"] for node in nodes], enable_io_processing=False)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        return f"FLOPs not counted: {str(error).splitlines()[0]}"
    return counting.flops


class _Counting(fx.Interpreter):
    """Runs a program and records how many FLOPs each node adds to a counter."""

    def __init__(self, module: fx.GraphModule, counter: FlopCounterMode) -> None:
        super().__init__(module)
        self._counter = counter
        self.flops: dict[fx.Node, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        before = self._counter.get_total_flops()
        result = super().run_node(n)
        self.flops[n] = self._counter.get_total_flops() - before
        return result

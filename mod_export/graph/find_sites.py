"""Finds the routing sites of a captured program whose model does not mark them.

A site is a top-k, or a sort of which k entries are kept, whose indices gather the tokens that run. Results are put back
at the same indices, or the selected tokens go on alone (pruning). A mask by which the results of all tokens are kept or
dropped saves nothing and is no site. Where indices and tokens go is followed in `token_flow.py`.

A marker is set right behind the selection, so that whatever the program makes of the indices (an order by position,
flat indices, one-hot rows) is made of the marked ones. The values that a top-k returns beside its indices are gathered
from the scores at the marked indices instead, which gives the same bits.

Shape legend: B rows, T tokens that a site can select from, K slots.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count as count_up
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from mod_export.graph.probing import Known
from mod_export.graph.program_nodes import add_node, argument_of, behind, module_path, shape_of
from mod_export.graph.token_flow import Flow, flows_of
from mod_export.graph.token_places import Selection
from mod_export.marker import MARKER, REORDERED
from mod_export.types import BY_POSITION, BY_SCORE

ATEN = torch.ops.aten
SORTS = {ATEN.sort.default, ATEN.sort.stable}
ARGSORTS = {ATEN.argsort.default, ATEN.argsort.stable}
SELECTS = SORTS | ARGSORTS | {ATEN.topk.default}
OUTERMOST = "model"
"""As `module_path` calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSite:
    """A selection that is a site.

    Attributes:
        selection: of k tokens; `indices` may not be a node yet where `order` is given.
        flow: what becomes of its tokens.
        order: of a sort of which several parts are used, which of its T indices are the selected ones.
        outer: the site among whose selected tokens it selects; None where it selects from the whole row.
        table: the node of the positions of these tokens, in the numbering of `outer`, or of the row if `of_row`.
    """

    selection: Selection
    flow: Flow
    order: slice | None = None
    outer: FoundSite | None = None
    table: fx.Node | None = None
    of_row: bool = False


def found_sites(program: ExportedProgram) -> list[FoundSite]:
    """Every site of a program without markers, in the order in which it decides."""
    return judged_selections(program)[0]


def judged_selections(program: ExportedProgram) -> tuple[list[FoundSite], list[Flow]]:
    """The sites of a program without markers, and what it does with what other selections give."""
    rows = _rows_of_inputs(program)
    flows, known = flows_of(program, list(selections(program.graph)))
    found: list[FoundSite] = []
    others: list[Flow] = []
    for flow in flows:
        order = None
        if flow.selection.is_order:
            order = _part_that_runs(flow)
            is_site = order is not None and bool(flow.puts)
        else:
            is_site = bool(flow.reads) and (bool(flow.puts) or _go_on_alone(flow, rows))
        if is_site:
            found.append(_in_the_row(flow, order, found, known))
        else:
            others.append(flow)
    return found, others


def _part_that_runs(flow: Flow) -> slice | None:
    """Which end of a whole order is computed with, if only one is: the other tokens are just put back beside it."""
    order_T = flow.index_BK[:1].flatten().tolist()
    parts = [one for one in flow.sets_computed() if len(one) < len(order_T)]
    if len(parts) != 1:
        return None
    k = len(parts[0])
    ends = [slice(0, k), slice(len(order_T) - k, len(order_T))]
    return next((end for end in ends if set(order_T[end]) == parts[0]), None)


def mark_found_sites(program: ExportedProgram) -> None:
    """Marks every site that is found, and names it after the module that selects, gathers and puts back."""
    found = found_sites(program)
    paths = [_path(one) for one in found]
    counts = Counter(paths)
    names = {path for path, count in counts.items() if count == 1}
    marker = _Marker(program.graph)
    for one, path in zip(found, paths, strict=True):
        numbered = (f"{path}.{number}" for number in count_up())
        name = path if counts[path] == 1 else next(name for name in numbered if name not in names)
        names.add(name)
        marker.mark(one, name)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


def _rows_of_inputs(program: ExportedProgram) -> set[int]:
    """The sizes that can be a number of rows: of the first two dimensions of inputs."""
    specs = zip(program.graph.nodes, program.graph_signature.input_specs, strict=False)
    own = [node.meta.get("val") for node, spec in specs if spec.kind is InputKind.USER_INPUT]
    return {size for one in own if isinstance(one, torch.Tensor) for size in one.shape[:2]}


def _go_on_alone(flow: Flow, rows: set[int]) -> bool:
    """Whether the selected tokens are what later operations run on: the others have been pruned."""
    return flow.selection.rows in rows and any(len(one) == flow.selection.k for one in flow.sets_computed())


def _in_the_row(flow: Flow, order: slice | None, before: Sequence[FoundSite], known: Known) -> FoundSite:
    """With the site among whose selected tokens it selects, and what says which these are."""
    found = FoundSite(selection=flow.selection, flow=flow, order=order)
    if flow.is_from is None:
        return found
    inner, own_BT = flow.is_from
    outer = next((one for one in before if one.flow is inner), None)
    if outer is None:
        return found
    row_BT = inner.positions_BT
    row_BT = own_BT if row_BT is None else row_BT.gather(1, own_BT)
    for table_BT, of_row in ((row_BT, True), (own_BT, False)):
        for node in known.forms(inner.selection.indices):
            value = known.value(node)
            if not isinstance(value, torch.Tensor) or value.dtype != torch.int64 or value.numel() != own_BT.numel():
                continue
            if torch.equal(flow.selection.by_row(value.reshape(-1)), table_BT):
                return replace(found, outer=outer, table=node, of_row=of_row)
    return found


def selections(graph: fx.Graph) -> Iterator[Selection]:
    """Every top-k and every sort of scores."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in SELECTS:
            continue
        scores = node.args[0]
        if not scores.meta["val"].dtype.is_floating_point:
            continue  # Indices that are brought into order select nothing.
        dim = argument_of(node, "dim") % max(1, len(shape_of(scores)))
        values, indices = ([], [node]) if node.target in ARGSORTS else _items(node)
        if node.target is ATEN.topk.default:
            largest = bool(argument_of(node, "largest"))
            yield from (
                Selection(node=node, scores=scores, dim=dim, indices=one, values=values, largest=largest)
                for one in indices
            )
            continue
        if any(_is_changed(one) for one in (*values, *indices)):
            continue  # Parts of a sort share its memory, which a marker would divide.
        kept = _only_part(indices)
        start = None if kept is None else _kept_from(kept, dim)
        descending = bool(argument_of(node, "descending"))
        if kept is not None and start is not None:
            same = [use for one in values for use in one.users if use.args[1:] == kept.args[1:]]
            largest = descending == (start == 0)
            yield Selection(node=node, scores=scores, dim=dim, indices=kept, values=same, largest=largest)
        else:
            yield from (
                Selection(
                    node=node, scores=scores, dim=dim, indices=one, values=values, largest=descending, is_order=True
                )
                for one in indices
            )


def _only_part(indices: Sequence[fx.Node]) -> fx.Node | None:
    """What is used of the indices of a sort, if it is one part of them, however often a program takes it."""
    parts = [use for one in indices for use in one.users]
    if not parts or any((one.target, one.args[1:]) != (parts[0].target, parts[0].args[1:]) for one in parts):
        return None
    for other in parts[1:]:
        other.replace_all_uses_with(parts[0])
    return parts[0]


def _items(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The nodes that take the values, and those that take the indices, of what returns both."""
    users = [use for use in node.users if use.target is operator.getitem]
    return [use for use in users if use.args[1] == 0], [use for use in users if use.args[1] == 1]


def _kept_from(node: fx.Node, dim: int) -> int | None:
    """Where the entries begin that are kept of something sorted; None unless some at one end are, and not all."""
    if node.target is not ATEN.slice.Tensor:
        return None
    source: Any = node.args[0]
    total, kept = shape_of(source)[dim], shape_of(node)[dim]
    start = argument_of(node, "start") or 0
    start = start + total if start < 0 else start
    along = argument_of(node, "dim") % len(shape_of(source)) == dim and argument_of(node, "step") == 1
    return start if along and kept < total and start in (0, total - kept) else None


def _is_changed(node: fx.Node) -> bool:
    """Whether a value, or a part of it, is changed in place."""
    return any(_writes_to(use, node) or (use.target is ATEN.slice.Tensor and _is_changed(use)) for use in node.users)


def _writes_to(use: fx.Node, node: fx.Node) -> bool:
    """Not where it only reads, as `out[rows, index] = y` reads the index."""
    schema = getattr(use.target, "_schema", None)
    arguments = () if schema is None else schema.arguments
    return any(
        one.alias_info is not None and one.alias_info.is_write and argument_of(use, one.name) is node
        for one in arguments
    )


def _path(site: FoundSite) -> str:
    """Of the innermost module that selects, gathers and puts back; where that is the whole model, of the one that runs
    the selected tokens.
    """
    read, put = site.flow.pairs[0]
    path = _shared_path([site.selection.node, read, put or read])
    if path != OUTERMOST or put is None:
        return path
    after = behind(put)
    computed = [node for node in site.flow.computing() if node not in after]
    return _shared_path(computed) if computed else path


def _shared_path(nodes: Sequence[fx.Node]) -> str:
    """The innermost module that all of them belong to."""
    parts = [module_path(node).split(".") for node in nodes]
    shared = 0
    while all(len(part) > shared for part in parts) and len({part[shared] for part in parts}) == 1:
        shared += 1
    return (".".join(parts[0][:shared]) or OUTERMOST).replace(",", "_")


class _Marker:
    """Sets markers, and gives everything behind the selections what these return."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._marked: dict[fx.Node, fx.Node] = {}
        self._positions: dict[fx.Node, fx.Node] = {}

    def mark(self, site: FoundSite, name: str) -> None:
        """Sets the marker, on (B, K) and (B, T)."""
        one, graph = site.selection, self._graph
        users, value_users = list(one.indices.users), [(value, use) for value in one.values for use in value.users]
        largest = one.largest if site.order is None else one.largest == (site.order.start == 0)
        # Right behind the selection, so before whatever uses it.
        with graph.inserting_before(one.node.next):
            whole = own = self._again(one, one.indices)
            if site.order is not None:
                own = self._add(one, ATEN.slice.Tensor, whole, one.dim, site.order.start, site.order.stop)
            index = self._rows(one, own, shape_of(own)[one.dim])
            scores = self._rows(one, one.scores, one.tokens)
            scores = scores if largest else self._add(one, ATEN.neg.default, scores)
            live = self._add(one, ATEN.ge.Scalar, index, 0)
            # Masks are -inf, or the smallest number that there is.
            lowest = torch.finfo(scores.meta["val"].dtype).min
            available = self._add(one, ATEN.gt.Scalar, scores, lowest / 2)
            positions = self._positions_of(site)
            rule = BY_POSITION if site.flow.in_order else BY_SCORE
            marked = self._add(one, MARKER, index, live, scores, available, positions, name, rule)
            index = self._as_before(one, self._add(one, operator.getitem, marked, 0), own)
            if site.order is not None:
                index = self._add(one, REORDERED, whole, index, one.dim, site.order.start == 0)
            values = self._add(one, ATEN.gather.default, one.scores, one.dim, index)
        for use in users:
            use.replace_input_with(one.indices, index)
        for value, use in value_users:
            use.replace_input_with(value, values)
        self._marked[one.indices] = index
        if positions is not None:
            self._positions[one.indices] = positions

    def _add(self, one: Selection, target: Any, *args: Any) -> fx.Node:
        return add_node(self._graph, one.node, target, *args)

    def _again(self, one: Selection, node: fx.Node) -> fx.Node:
        return node if node is one.node else self._graph.node_copy(node, lambda before: self._again(one, before))

    def _rows(self, one: Selection, node: fx.Node, size: int) -> fx.Node:
        """As (B, size)."""
        if one.rows == 1 or not one.is_tokens_first:
            return self._add(one, ATEN.reshape.default, node, [one.rows, size])
        return self._add(one, ATEN.t.default, self._add(one, ATEN.reshape.default, node, [size, one.rows]))

    def _as_before(self, one: Selection, index: fx.Node, before: fx.Node) -> fx.Node:
        """(B, K) as the selection returned it."""
        turned = one.rows > 1 and one.is_tokens_first
        index = self._add(one, ATEN.t.default, index) if turned else index
        return self._add(one, ATEN.reshape.default, index, list(shape_of(before)))

    def _positions_of(self, site: FoundSite) -> fx.Node | None:
        """(B, T): where in the whole row the tokens stand that are selected from."""
        if site.outer is None or site.table is None:
            return None
        table = self._marked.get(site.table, site.table)
        positions = self._rows(site.selection, table, site.selection.tokens)
        before = None if site.of_row else self._positions.get(site.outer.selection.indices)
        return positions if before is None else self._add(site.selection, ATEN.gather.default, before, 1, positions)

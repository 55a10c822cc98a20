"""Finds the routing sites of a captured program whose model does not mark them.

A site is a top-k, or a sort that keeps k entries, whose indices gather the tokens that run. Either the results are put
back at the same indices, or only the selected tokens continue (pruning). A mask that keeps or drops the results of all
tokens saves nothing and is not a site. `token_flow.py` follows indices and tokens through the program.

A marker is inserted right after the selection, so everything that the program derives from the indices (an order by
position, flat indices, one-hot rows) is derived from the marked indices. A top-k also returns values; they are replaced
by a gather from the scores at the marked indices, which gives the same bits.

A selection that cannot be followed may still select tokens, so saying that there is nothing to select would be wrong.
`unfollowed_selections` describes the selections that are not sites: where their indices go, and in which line.

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

from mod_export.graph.probing import Known, arguments_of, is_pointwise, is_written, tensor_of
from mod_export.graph.program_nodes import add_node, argument_of, behind, module_path, shape_of
from mod_export.graph.refusals import place_of
from mod_export.graph.token_flow import Flow, Selector, flows_of
from mod_export.marker import MARKER, REORDERED
from mod_export.types import BY_POSITION, BY_SCORE

ATEN = torch.ops.aten
SORTS = {ATEN.sort.default, ATEN.sort.stable}
ARGSORTS = {ATEN.argsort.default, ATEN.argsort.stable}
SELECTS = SORTS | ARGSORTS | {ATEN.topk.default}
OUTERMOST = "model"
"""The name that `module_path` gives to the outermost module."""
NO_SELECTION = "the model has no top-k and no sort of scores"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSite:
    """A selection that is a site.

    Attributes:
        flow: what the program does with its tokens; if `order` is given, `flow.selector.indices` holds all T indices.
        order: the slice of the T sorted indices that is selected; None unless several parts of a sort are used.
        outer: the site whose selected tokens it selects from; None if it selects from the whole row.
        table: the node that says where those tokens are: as positions in the row if `of_row`, else as numbers among the
            tokens of `outer`.
    """

    flow: Flow
    order: slice | None = None
    outer: FoundSite | None = None
    table: fx.Node | None = None
    of_row: bool = False


def judged_selections(program: ExportedProgram) -> tuple[list[FoundSite], list[Flow]]:
    """The sites of a program without markers, in the order in which it selects, and the flows of other selections."""
    rows = _rows_of_inputs(program)
    flows, known = flows_of(program, list(selectors(program.graph)))
    sites: list[FoundSite] = []
    other_flows: list[Flow] = []
    for flow in flows:
        order = None
        if flow.selector.is_order:
            order = _part_that_runs(flow)
            is_site = order is not None and bool(flow.puts)
        else:
            is_site = bool(flow.reads) and (bool(flow.puts) or _go_on_alone(flow, rows))
        if is_site:
            sites.append(_in_the_row(flow, order, sites, known))
        else:
            other_flows.append(flow)
    return sites, other_flows


def _part_that_runs(flow: Flow) -> slice | None:
    """The first or last part of a complete order, if products run on its tokens alone; else None."""
    order_T = flow.index_BK[:1].flatten().tolist()
    parts = [tokens for tokens in flow.sets_computed() if len(tokens) < len(order_T)]
    if len(parts) != 1:
        return None
    k = len(parts[0])
    ends = [slice(0, k), slice(len(order_T) - k, len(order_T))]
    return next((end for end in ends if set(order_T[end]) == parts[0]), None)


def mark_found_sites(program: ExportedProgram) -> None:
    """Marks every site that it finds, and names it after the module that selects, gathers and puts back."""
    sites, _ = judged_selections(program)
    paths = [_path(site) for site in sites]
    counts = Counter(paths)
    names = {path for path, count in counts.items() if count == 1}
    marker = _Marker(program.graph)
    for site, path in zip(sites, paths, strict=True):
        numbered = (f"{path}.{number}" for number in count_up())
        name = path if counts[path] == 1 else next(name for name in numbered if name not in names)
        names.add(name)
        marker.mark(site, name)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


def _rows_of_inputs(program: ExportedProgram) -> set[int]:
    """The sizes of the first two dimensions of inputs: each of them can be the number of rows."""
    specs = zip(program.graph.nodes, program.graph_signature.input_specs, strict=False)
    values = [node.meta.get("val") for node, spec in specs if spec.kind is InputKind.USER_INPUT]
    return {size for value in values if isinstance(value, torch.Tensor) for size in value.shape[:2]}


def _go_on_alone(flow: Flow, rows: set[int]) -> bool:
    """Whether later products run on the selected tokens alone, so that the others have been pruned."""
    return flow.selector.rows in rows and any(len(tokens) == flow.selector.k for tokens in flow.sets_computed())


def _in_the_row(flow: Flow, order: slice | None, before: Sequence[FoundSite], known: Known) -> FoundSite:
    """Makes the site of a flow, with the outer site that it selects from and the node of its tokens' positions."""
    site = FoundSite(flow=flow, order=order)
    if flow.is_from is None:
        return site
    inner, own_BT = flow.is_from
    outer = next((earlier for earlier in before if earlier.flow is inner), None)
    if outer is None:
        return site
    row_BT = flow.tables[-1]
    assert row_BT is not None
    for table_BT, of_row in ((row_BT, True), (own_BT, False)):
        for node in known.forms(inner.selector.indices):
            value = known.value(node)
            if not isinstance(value, torch.Tensor) or value.dtype != torch.int64 or value.numel() != own_BT.numel():
                continue
            if torch.equal(flow.selector.by_row(value.reshape(-1)), table_BT):
                return replace(site, outer=outer, table=node, of_row=of_row)
    return site


def selectors(graph: fx.Graph) -> Iterator[Selector]:
    """Yields every top-k and every sort of floating-point scores."""
    for node in _selecting(graph, of_floats=True):  # Sorting indices selects nothing.
        scores: Any = node.args[0]
        dim = argument_of(node, "dim") % max(1, len(shape_of(scores)))
        values, indices = _results(node)
        if node.target is ATEN.topk.default:
            largest = bool(argument_of(node, "largest"))
            yield from (
                Selector(node=node, scores=scores, dim=dim, indices=item, values=values, largest=largest)
                for item in indices
            )
            continue
        if any(_is_changed(item) for item in (*values, *indices)):
            continue  # The parts of a sort share memory. With a marker, they would miss each other's writes.
        part = _only_part(indices)
        start = None if part is None else _kept_from(part, dim)
        descending = bool(argument_of(node, "descending"))
        if part is not None and start is not None:
            kept_values = [use for item in values for use in item.users if use.args[1:] == part.args[1:]]
            largest = descending == (start == 0)
            yield Selector(node=node, scores=scores, dim=dim, indices=part, values=kept_values, largest=largest)
        else:
            yield from (
                Selector(
                    node=node, scores=scores, dim=dim, indices=item, values=values, largest=descending, is_order=True
                )
                for item in indices
            )


def _only_part(indices: Sequence[fx.Node]) -> fx.Node | None:
    """The only part of a sort's indices that is used, or None. Other nodes that take this part are replaced by it."""
    parts = [use for node in indices for use in node.users]
    if not parts or any((node.target, node.args[1:]) != (parts[0].target, parts[0].args[1:]) for node in parts):
        return None
    for duplicate in parts[1:]:
        duplicate.replace_all_uses_with(parts[0])
    return parts[0]


def _selecting(graph: fx.Graph, *, of_floats: bool) -> Iterator[fx.Node]:
    """Yields every top-k and every sort, of floating-point scores or of anything else."""
    for node in graph.nodes:
        scores: Any = node.args[0] if node.args else None
        if node.op != "call_function" or node.target not in SELECTS:
            continue
        if scores.meta["val"].dtype.is_floating_point == of_floats:
            yield node


def _results(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The nodes of the values, and those of the indices, that a top-k or sort returns."""
    if node.target in ARGSORTS:
        return [], [node]
    users = [use for use in node.users if use.target is operator.getitem]
    return [use for use in users if use.args[1] == 0], [use for use in users if use.args[1] == 1]


def _kept_from(node: fx.Node, dim: int) -> int | None:
    """The start of a slice that keeps one end of a sorted tensor; None for any other node."""
    if node.target is not ATEN.slice.Tensor:
        return None
    source: Any = node.args[0]
    total, length = shape_of(source)[dim], shape_of(node)[dim]
    start = argument_of(node, "start") or 0
    start = start + total if start < 0 else start
    along = argument_of(node, "dim") % len(shape_of(source)) == dim and argument_of(node, "step") == 1
    return start if along and length < total and start in (0, total - length) else None


def _is_changed(node: fx.Node) -> bool:
    """Whether a value or a slice of it is changed in place."""
    return any(_writes_to(use, node) or (use.target is ATEN.slice.Tensor and _is_changed(use)) for use in node.users)


def _writes_to(use: fx.Node, node: fx.Node) -> bool:
    """Whether `use` changes `node` in place. `out[rows, index] = y` only reads the index."""
    return any(is_written(argument) and argument_of(use, argument.name) is node for argument in arguments_of(use))


def _path(site: FoundSite) -> str:
    """Path of the innermost module that holds selection, gather and scatter; if that is the whole model, of the module
    that runs the selected tokens.
    """
    read, put = site.flow.pairs[0]
    path = _shared_path([site.flow.selector.node, read, put or read])
    if path != OUTERMOST or put is None:
        return path
    after = behind(put)
    computed = [node for node in site.flow.computing() if node not in after]
    return _shared_path(computed) if computed else path


def _shared_path(nodes: Sequence[fx.Node]) -> str:
    """Path of the innermost module that contains all of the nodes."""
    parts = [module_path(node).split(".") for node in nodes]
    shared = 0
    while all(len(part) > shared for part in parts) and len({part[shared] for part in parts}) == 1:
        shared += 1
    return (".".join(parts[0][:shared]) or OUTERMOST).replace(",", "_")


class _Marker:
    """Inserts markers, and makes the readers of each selection read what its marker returns."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._marked: dict[fx.Node, fx.Node] = {}
        self._positions: dict[fx.Node, fx.Node] = {}

    def mark(self, site: FoundSite, name: str) -> None:
        """Inserts the marker of a site, with indices (B, K) and scores (B, T)."""
        selector, graph = site.flow.selector, self._graph
        users = list(selector.indices.users)
        value_users = [(value, use) for value in selector.values for use in value.users]
        largest = selector.largest if site.order is None else selector.largest == (site.order.start == 0)
        # Right after the selection, and so before all of its readers.
        with graph.inserting_before(selector.node.next):
            full_order = selected = self._again(selector, selector.indices)
            if site.order is not None:
                selected = self._add(
                    selector, ATEN.slice.Tensor, full_order, selector.dim, site.order.start, site.order.stop
                )
            index = self._rows(selector, selected, shape_of(selected)[selector.dim])
            scores = self._rows(selector, selector.scores, selector.tokens)
            scores = scores if largest else self._add(selector, ATEN.neg.default, scores)
            live = self._add(selector, ATEN.ge.Scalar, index, 0)
            # Masked scores are -inf or the lowest number of the dtype.
            lowest = torch.finfo(scores.meta["val"].dtype).min
            available = self._add(selector, ATEN.gt.Scalar, scores, lowest / 2)
            positions = self._positions_of(site)
            rule = BY_POSITION if site.flow.in_order else BY_SCORE
            marked = self._add(selector, MARKER, index, live, scores, available, positions, name, rule)
            index = self._as_before(selector, self._add(selector, operator.getitem, marked, 0), selected)
            if site.order is not None:
                index = self._add(selector, REORDERED, full_order, index, selector.dim, site.order.start == 0)
            values = self._add(selector, ATEN.gather.default, selector.scores, selector.dim, index)
        for use in users:
            use.replace_input_with(selector.indices, index)
        for value, use in value_users:
            use.replace_input_with(value, values)
        self._marked[selector.indices] = index
        if positions is not None:
            self._positions[selector.indices] = positions

    def _add(self, selector: Selector, target: Any, *args: Any) -> fx.Node:
        return add_node(self._graph, selector.node, target, *args)

    def _again(self, selector: Selector, node: fx.Node) -> fx.Node:
        return node if node is selector.node else self._graph.node_copy(node, lambda arg: self._again(selector, arg))

    def _rows(self, selector: Selector, node: fx.Node, size: int) -> fx.Node:
        """Reshapes a node to (B, size)."""
        if selector.rows == 1 or not selector.is_tokens_first:
            return self._add(selector, ATEN.reshape.default, node, [selector.rows, size])
        return self._add(
            selector, ATEN.t.default, self._add(selector, ATEN.reshape.default, node, [size, selector.rows])
        )

    def _as_before(self, selector: Selector, index: fx.Node, before: fx.Node) -> fx.Node:
        """Reshapes indices (B, K) to the shape that the selection returned."""
        turned = selector.rows > 1 and selector.is_tokens_first
        index = self._add(selector, ATEN.t.default, index) if turned else index
        return self._add(selector, ATEN.reshape.default, index, list(shape_of(before)))

    def _positions_of(self, site: FoundSite) -> fx.Node | None:
        """The node of the row positions (B, T) that the site selects from; None if it selects from the whole row."""
        if site.outer is None or site.table is None:
            return None
        table = self._marked.get(site.table, site.table)
        positions = self._rows(site.flow.selector, table, site.flow.selector.tokens)
        before = None if site.of_row else self._positions.get(site.outer.flow.selector.indices)
        return positions if before is None else self._add(site.flow.selector, ATEN.gather.default, before, 1, positions)


# Selections that are not sites


def unfollowed_selections(program: ExportedProgram) -> list[str]:
    """Returns a sentence for each top-k and each sort of scores that is not a routing site. Equal sentences are merged.

    A top-k that selects experts or words is included: the sentence says where its indices go, not what it is for.

    Args:
        program: a captured program without markers.
    """
    sites, other_flows = judged_selections(program)
    flows = {flow.selector.node: flow for flow in other_flows}
    site_nodes = {site.flow.selector.node for site in sites}
    selecting = [node for node in _selecting(program.graph, of_floats=True) if node not in site_nodes]
    counts = Counter(_description(node, flows.get(node)) for node in selecting)
    # Selections by integers or truth values, such as a sort of a threshold mask, but not sorts of selected indices.
    ordered = {user for node in selecting for user in behind(node)}
    by_integers = [node for node in _selecting(program.graph, of_floats=False) if node not in ordered]
    counts.update(f"{_named(node)}, which are whole numbers" for node in by_integers if _has_indices(node))
    return [f"{text} ({count} times)" if count > 1 else text for text, count in counts.items()] or [NO_SELECTION]


def _has_indices(node: fx.Node) -> bool:
    return any(item.users for item in _results(node)[1])


def _named(node: fx.Node) -> str:
    scores: Any = node.args[0]
    shape = shape_of(scores)
    if node.target is not ATEN.topk.default:
        return f"a sort of {list(shape)} scores{_at(node)}"
    total = shape[argument_of(node, "dim")] if shape else 1
    return f"a top-k of {argument_of(node, 'k')} of {total} in {list(shape)} scores{_at(node)}"


def _at(node: fx.Node) -> str:
    return place_of(node).partition("\n")[0]


def _description(node: fx.Node, flow: Flow | None) -> str:
    name = _named(node)
    if not _has_indices(node):
        return f"{name}, of which no indices are used"
    if flow is None:
        return f"{name}, which is changed in place"
    if not flow.selector.is_of_tokens:
        return f"{name}, which is no choice of tokens for each row"
    if flow.reads and flow.puts:
        return f"{name}, by which tokens change places and run all alike"
    if flow.reads:
        read = flow.reads[0].node
        return f"{name}, whose indices read at {_operator(read)}, and nothing is put back at the same places"
    if flow.unknown:
        first = flow.unknown[0]
        value = tensor_of(first)
        all_tokens = flow.selector.rows * flow.selector.tokens
        runs = is_pointwise(first) and value is not None and value.numel() >= all_tokens
        return f"{name}, whose indices go to {_operator(first)}, which {'runs for all' if runs else 'is not followed'}"
    if flow.scores:
        return f"{name}, whose indices read no more than one number for each ({_operator(flow.scores[0].node)})"
    return f"{name}, whose indices read no tokens"


def _operator(node: fx.Node) -> str:
    name = str(getattr(node.target, "_overloadpacket", getattr(node.target, "__name__", node.target)))
    return f"{name}{_at(node)}"

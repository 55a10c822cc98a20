"""Finds the routing sites of a captured program whose model does not mark them.

A site is a top-k, or a sort of which k entries are kept, whose indices are used twice: to gather the tokens that run,
and to put the results back. Both are looked for behind everything that gives the indices another shape or another
order. A marker is set right behind the selection, so that whatever the program makes of the indices (an order by
position, flat indices, one-hot rows) is made of the marked ones. The values that a top-k returns beside its indices are
gathered from the scores at the marked indices instead, which gives the same bits.

Shape legend: B rows, T tokens that a site can select from, K slots.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count as count_up
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from mod_export.export.program_nodes import add_node, argument_of, module_path, shape_of
from mod_export.marker import MARKER
from mod_export.types import BY_POSITION, BY_SCORE

ATEN = torch.ops.aten
SORTS = {ATEN.sort.default, ATEN.sort.stable}
ARGSORTS = {ATEN.argsort.default, ATEN.argsort.stable}
SHAPES = {
    ATEN.view.default, ATEN.reshape.default, ATEN._unsafe_view.default, ATEN.flatten.using_ints, ATEN.squeeze.dim,
    ATEN.squeeze.default, ATEN.squeeze.dims, ATEN.unsqueeze.default, ATEN.unflatten.int, ATEN.expand.default,
    ATEN.expand_as.default, ATEN.repeat.default, ATEN.repeat_interleave.self_int, ATEN.transpose.int, ATEN.t.default,
    ATEN.permute.default, ATEN.movedim.int, ATEN.select.int, ATEN.clone.default, ATEN.contiguous.default,
    ATEN.alias.default, ATEN.detach.default, ATEN.lift_fresh_copy.default, ATEN.to.dtype, ATEN.to.dtype_layout,
    ATEN._to_copy.default, ATEN.type_as.default, ATEN.cat.default, ATEN.stack.default,
}  # fmt: skip
"""What gives indices, or one-hot rows of them, another shape or dtype, or puts others beside them."""
ARITHMETIC = {
    ATEN.add.Tensor, ATEN.add_.Tensor, ATEN.add.Scalar, ATEN.mul.Tensor, ATEN.mul_.Tensor, ATEN.mul.Scalar,
}  # fmt: skip
"""With these, an index of a row becomes an index of the flattened batch."""
PRODUCTS = {ATEN.matmul.default, ATEN.bmm.default, ATEN.mm.default, ATEN.einsum.default}
GATHERS = {
    ATEN.gather.default, ATEN.index.Tensor, ATEN.index_select.default, ATEN.embedding.default,
    ATEN.take_along_dim.default,
}  # fmt: skip
SCATTERS = {
    ATEN.scatter.src, ATEN.scatter_.src, ATEN.scatter.value, ATEN.scatter_.value, ATEN.scatter_add.default,
    ATEN.scatter_add_.default, ATEN.scatter_reduce.two, ATEN.scatter_reduce_.two, ATEN.index_put.default,
    ATEN.index_put_.default, ATEN.index_add.default, ATEN.index_add_.default, ATEN.index_copy.default,
    ATEN.index_copy_.default,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Selection:
    """A top-k, or a sort of which k entries are kept.

    Attributes:
        node: the operation.
        scores: what it compares.
        dim: of the scores, from 0: where the tokens are.
        indices: the node of the k indices.
        values: the nodes of the k scores.
        largest: False where the k smallest scores are selected.
    """

    node: fx.Node
    scores: fx.Node
    dim: int
    indices: fx.Node
    values: Sequence[fx.Node]
    largest: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Uses:
    """Where the indices of a selection are used, and whether they are in the order of positions there."""

    gather: fx.Node
    scatter: fx.Node
    in_order: bool


def mark_found_sites(program: ExportedProgram) -> None:
    """Marks every site that is found, and names it after the module that selects, gathers and puts back."""
    found = [(one, uses) for one in _selections(program.graph) if (uses := _uses(one)) is not None]
    paths = [_shared_path([one.node, uses.gather, uses.scatter]) for one, uses in found]
    counts = Counter(paths)
    names = {path for path, count in counts.items() if count == 1}
    for (one, uses), path in zip(found, paths, strict=True):
        numbered = (f"{path}.{number}" for number in count_up())
        name = path if counts[path] == 1 else next(name for name in numbered if name not in names)
        names.add(name)
        _mark(program.graph, one, name, BY_POSITION if uses.in_order else BY_SCORE)
    program.graph_module.recompile()


def _selections(graph: fx.Graph) -> Iterator[_Selection]:
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in SORTS | ARGSORTS | {ATEN.topk.default}:
            continue
        scores = node.args[0]
        if not scores.meta["val"].dtype.is_floating_point:
            continue  # Indices that are brought into order select nothing.
        dim = argument_of(node, "dim") % max(1, len(shape_of(scores)))
        values, indices = ([], [node]) if node.target in ARGSORTS else _items(node)
        if node.target is ATEN.topk.default:
            largest = bool(argument_of(node, "largest"))
            yield from (
                _Selection(node=node, scores=scores, dim=dim, indices=one, values=values, largest=largest)
                for one in indices
            )
            continue
        if any(_is_changed(one) for one in (*values, *indices)):
            continue  # Parts of a sort share its memory, which a marker would divide.
        descending = bool(argument_of(node, "descending"))
        for kept in (use for one in indices for use in one.users):
            start = _kept_from(kept, dim)
            if start is not None:
                same = [use for one in values for use in one.users if use.args[1:] == kept.args[1:]]
                largest = descending == (start == 0)
                yield _Selection(node=node, scores=scores, dim=dim, indices=kept, values=same, largest=largest)


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


def _uses(selection: _Selection) -> _Uses | None:
    """None where nothing is gathered at the indices, or nothing of it put back."""
    if not _is_of_tokens(selection):
        return None
    found: dict[str, list[fx.Node]] = {"gather": [], "scatter": [], "same": [selection.indices], "": []}
    one_hot, in_order = set[fx.Node](), set[fx.Node]()
    for node in found["same"]:  # Which grows meanwhile.
        for use in node.users:
            if use in found["same"]:
                continue
            found[_kind_of_use(use, node, selection, is_one_hot=node in one_hot)].append(use)
            if use.target is ATEN.one_hot.default or node in one_hot:
                one_hot.add(use)
            if node in in_order or (use.target in SORTS and not argument_of(use, "descending")):
                in_order.add(use)
    for gather in found["gather"]:
        behind = _behind(gather)
        for scatter in found["scatter"]:
            if scatter in behind:
                return _Uses(gather=gather, scatter=scatter, in_order=scatter in in_order)
    return None


def _is_of_tokens(selection: _Selection) -> bool:
    """Whether it can be a choice of k tokens for each row: not one of experts for each token, nor of nothing."""
    indices, scores = shape_of(selection.indices), shape_of(selection.scores)
    if 0 in indices or sum(size != 1 for size in indices) > 2:
        return False
    # Only with nothing behind it is the dimension that is selected from the last one of (B, T).
    return len(scores) > 0 and math.prod(scores[selection.dim + 1 :]) == 1


def _behind(node: fx.Node) -> set[fx.Node]:
    """Whatever depends on a node."""
    found, waiting = {node}, [node]
    while waiting:
        new = [use for use in waiting.pop().users if use not in found]
        found.update(new)
        waiting += new
    return found


def _kind_of_use(use: fx.Node, node: fx.Node, selection: _Selection, *, is_one_hot: bool) -> str:
    """Whether indices, or one-hot rows of them, `gather` or `scatter` here, or go on as the `same` in another form."""
    if use.target in GATHERS | SCATTERS and _is_index(node, use):
        is_gather = use.target in GATHERS
        # Tokens have features: what is as small as the indices are scores, or gates.
        large = math.prod(shape_of(use)) > math.prod(shape_of(selection.indices))
        return ("gather" if is_gather else "scatter") if large and _reads_rows(use, selection) else ""
    if use.target in PRODUCTS and is_one_hot:
        shape, tokens = shape_of(use), shape_of(selection.scores)[selection.dim]
        # One-hot rows (K, T) take tokens out of a row; transposed, (T, K), they put them back.
        return "" if len(shape) < 2 else "scatter" if shape[-2] == tokens else "gather"
    return "same" if _follows(use) else ""


def _reads_rows(use: fx.Node, selection: _Selection) -> bool:
    """Whether what is indexed are the T tokens of each of the B rows, or those of the flattened batch."""
    source: Any = use.args[0]
    shape, size, tokens = shape_of(source), _indexed_size(use), shape_of(selection.scores)[selection.dim]
    rows = math.prod(shape_of(selection.scores)) // tokens
    return size == rows * tokens or (size == tokens and shape[0] == rows)


def _is_changed(node: fx.Node) -> bool:
    """Whether a value, or a part of it, is changed in place."""
    return any(
        getattr(getattr(use.target, "_schema", None), "is_mutable", False)
        or (use.target is ATEN.slice.Tensor and _is_changed(use))
        for use in node.users
    )


def _follows(node: fx.Node) -> bool:
    """Whether it gives indices on, whatever their shape and order."""
    if node.target is operator.getitem:
        return bool(node.args[1] == 0)  # Of a sort, which gives the indices in order as its values.
    if node.target in ARITHMETIC:
        return not node.meta["val"].dtype.is_floating_point
    return node.target in SORTS | SHAPES | {ATEN.one_hot.default}


def _is_index(node: fx.Node, use: fx.Node) -> bool:
    index = argument_of(use, "index", "indices")
    return index is node or (isinstance(index, (list, tuple)) and node in index)


def _indexed_size(use: fx.Node) -> int:
    """Of the dimension that indices are of."""
    source: Any = use.args[0]
    shape, dim = shape_of(source), argument_of(use, "dim")
    indices = argument_of(use, "indices")
    if isinstance(indices, (list, tuple)):
        dim = max(n for n, index in enumerate(indices) if index is not None)
    return shape[0 if dim is None else dim]


def _shared_path(nodes: Sequence[fx.Node]) -> str:
    """The innermost module that all of them belong to."""
    parts = [module_path(node).split(".") for node in nodes]
    shared = 0
    while all(len(part) > shared for part in parts) and len({part[shared] for part in parts}) == 1:
        shared += 1
    return (".".join(parts[0][:shared]) or "model").replace(",", "_")


def _mark(graph: fx.Graph, one: _Selection, name: str, rule: str) -> None:
    """Sets the marker, on (B, K) and (B, T), and gives everything behind the selection what it returns."""
    shape, tokens = shape_of(one.indices), shape_of(one.scores)[one.dim]
    rows = math.prod(shape) // shape[one.dim]
    users, value_users = list(one.indices.users), [(value, use) for value in one.values for use in value.users]

    def add(target: Any, *args: Any) -> fx.Node:
        return add_node(graph, one.node, target, *args)

    def again(node: fx.Node) -> fx.Node:
        return node if node is one.node else graph.node_copy(node, again)

    # Right behind the selection, so before whatever uses it.
    with graph.inserting_before(one.node.next):
        index = add(ATEN.reshape.default, again(one.indices), [rows, shape[one.dim]])
        scores = add(ATEN.reshape.default, one.scores, [rows, tokens])
        scores = scores if one.largest else add(ATEN.neg.default, scores)
        live = add(ATEN.ge.Scalar, index, 0)
        # Masks are -inf, or the smallest number that there is.
        lowest = torch.finfo(scores.meta["val"].dtype).min
        available = add(ATEN.gt.Scalar, scores, lowest / 2)
        marked = add(MARKER, index, live, scores, available, None, name, rule)
        index = add(ATEN.reshape.default, add(operator.getitem, marked, 0), list(shape))
        values = add(ATEN.gather.default, one.scores, one.dim, index)
    for use in users:
        use.replace_input_with(one.indices, index)
    for value, use in value_users:
        use.replace_input_with(value, values)
    graph.eliminate_dead_code()

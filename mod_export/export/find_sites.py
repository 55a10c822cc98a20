"""Finds the routing sites of a captured program whose model does not mark them.

A site is a top-k, or a sort of which k entries are kept, whose indices are used twice: to gather the tokens that run, and
to put the results back. Both are followed from the indices through everything that only gives them another shape. A
marker is set right behind the selection, so that everything the program makes of the indices (an order by position, flat
indices, one-hot rows) is made of the marked ones; and the values that a top-k returns beside its indices are gathered
from the scores by the marked indices, which gives the same bits.

Shape legend: B rows, T tokens that a site can select from, K slots.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from mod_export.export.program_nodes import add_node, module_path, shape_of
from mod_export.marker import AS_GIVEN, MARKER

__all__ = ["mark_found_sites"]

ATEN = torch.ops.aten
SORTS = (ATEN.sort.default, ATEN.sort.stable)
ARGSORTS = (ATEN.argsort.default, ATEN.argsort.stable)
SHAPES = (
    ATEN.view.default, ATEN.reshape.default, ATEN._unsafe_view.default, ATEN.flatten.using_ints, ATEN.squeeze.dim,
    ATEN.squeeze.default, ATEN.squeeze.dims, ATEN.unsqueeze.default, ATEN.expand.default, ATEN.repeat.default,
    ATEN.transpose.int, ATEN.permute.default, ATEN.clone.default, ATEN.contiguous.default, ATEN.alias.default,
    ATEN.select.int, ATEN.expand_as.default, ATEN.unflatten.int, ATEN.detach.default, ATEN.t.default, ATEN.movedim.int,
    ATEN.to.dtype, ATEN._to_copy.default, ATEN.type_as.default, ATEN.to.dtype_layout, ATEN.lift_fresh_copy.default,
    ATEN.repeat_interleave.self_int, ATEN.cat.default, ATEN.stack.default,
)  # fmt: skip
"""What leaves indices as they are, or one-hot rows of them, but for shape and dtype."""
ARITHMETIC = (ATEN.add.Tensor, ATEN.add.Scalar, ATEN.mul.Tensor, ATEN.mul.Scalar)
"""With these, an index of a row becomes an index of the flattened batch."""
ONE_HOT = (ATEN.one_hot.default,)
PRODUCTS = (ATEN.matmul.default, ATEN.bmm.default, ATEN.mm.default, ATEN.einsum.default)
GATHERS = {
    ATEN.gather.default: 2, ATEN.index.Tensor: 1, ATEN.index_select.default: 2, ATEN.embedding.default: 1,
    ATEN.take_along_dim.default: 1,
}  # fmt: skip
"""What reads at indices, and which of its arguments they are."""
SCATTERS = {
    ATEN.scatter.src: 2, ATEN.scatter.value: 2, ATEN.scatter_.src: 2, ATEN.scatter_add.default: 2,
    ATEN.scatter_add_.default: 2, ATEN.scatter_reduce.two: 2, ATEN.scatter_reduce_.two: 2, ATEN.index_put.default: 1,
    ATEN.index_put_.default: 1, ATEN.index_add.default: 2, ATEN.index_add_.default: 2, ATEN.index_copy.default: 2,
    ATEN.index_copy_.default: 2,
}  # fmt: skip
"""What writes at indices, and which of its arguments they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Selection:
    """A top-k: the scores, the dimension that is selected from, its indices, and the nodes that give the same k values.

    `largest` is False where the k smallest scores are selected.
    """

    node: fx.Node
    scores: fx.Node
    dim: int
    indices: fx.Node
    values: Sequence[fx.Node]
    largest: bool


def mark_found_sites(program: ExportedProgram) -> None:
    """Marks every site that is found, and names it after the module that selects, gathers and puts back."""
    graph = program.graph
    found = [(one, uses) for one in _selections(graph) if (uses := _uses(one)) is not None]
    paths = [_common([module_path(node) for node in (one.node, *uses)]) for one, uses in found]
    counts, numbers = Counter(paths), Counter[str]()
    for (one, _), path in zip(found, paths, strict=True):
        name = path if counts[path] == 1 else f"{path}.{numbers[path]}"
        numbers[path] += 1
        _mark(graph, one, name)
    program.graph_module.recompile()


def _selections(graph: fx.Graph) -> Iterator[_Selection]:
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is ATEN.topk.default:
            yield from _top_k(node)
        elif node.target in (*SORTS, *ARGSORTS):
            yield from _sorted(node)


def _top_k(node: fx.Node) -> Iterator[_Selection]:
    scores, _, dim, largest = (*node.args, *(-1, True)[len(node.args) - 2 :])[:4]
    items = _items(node)
    if items[1] and not _is_order(scores):
        (index, *_), rank = items[1], len(shape_of(scores))
        yield _Selection(
            node=node, scores=scores, dim=dim % rank, indices=index, values=items[0], largest=bool(largest)
        )


def _sorted(node: fx.Node) -> Iterator[_Selection]:
    """Of a sort, k entries at either end."""
    named = {argument.name: index for index, argument in enumerate(node.target._schema.arguments)}  # type: ignore[union-attr]

    def argument(name: str, default: Any) -> Any:
        index = named[name]
        return node.args[index] if index < len(node.args) else node.kwargs.get(name, default)

    scores, rank = node.args[0], len(shape_of(node.args[0]))
    if _is_order(scores):
        return
    dim, descending = argument("dim", -1) % rank, argument("descending", False)
    is_argsort = node.target in ARGSORTS
    ordered = [node] if is_argsort else _items(node)[1]
    values = [] if is_argsort else _items(node)[0]
    for index, kept in ((one, use) for one in ordered for use in one.users):
        if kept.target is not ATEN.slice.Tensor or (kept.args[1] if len(kept.args) > 1 else 0) % rank != dim:
            continue
        total, k = shape_of(index)[dim], shape_of(kept)[dim]
        start = kept.args[2] if len(kept.args) > 2 and kept.args[2] is not None else 0
        start = start + total if start < 0 else start
        if k == total or start not in (0, total - k):
            continue
        same = [
            use for one in values for use in one.users if use.target is kept.target and use.args[1:] == kept.args[1:]
        ]
        yield _Selection(
            node=node, scores=scores, dim=dim, indices=kept, values=same, largest=bool(descending) == (start == 0)
        )


def _items(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The nodes that take the values and the indices of what returns both."""
    users = [use for use in node.users if "getitem" in str(use.target)]
    return [use for use in users if use.args[1] == 0], [use for use in users if use.args[1] == 1]


def _is_order(scores: fx.Node) -> bool:
    """Whether what is sorted are whole numbers: indices that are brought into order select nothing."""
    return not scores.meta["val"].dtype.is_floating_point


def _uses(selection: _Selection) -> tuple[fx.Node, fx.Node] | None:
    """The last node that gathers tokens by the indices, and the last that puts something back; None if one is missing."""
    tokens = shape_of(selection.scores)[selection.dim]
    if len([size for size in shape_of(selection.indices) if size != 1]) > 2:
        return None  # A choice for each token, say of experts, and not of tokens.
    gathers: list[fx.Node] = []
    scatters: list[fx.Node] = []
    waiting, seen, hot = [selection.indices], {selection.indices}, set[fx.Node]()
    while waiting:
        node = waiting.pop()
        for use in node.users:
            target = use.target
            if target in GATHERS and _reads_at(use, GATHERS[target], node):
                gathers += [use] if _size_read(use) % tokens == 0 else []
            elif target in SCATTERS and _reads_at(use, SCATTERS[target], node):
                scatters.append(use)
            elif node in hot and target in PRODUCTS:
                # One-hot rows (K, T) take tokens out of a row; transposed, (T, K), they put them back.
                (scatters if tokens in shape_of(use)[-2:-1] else gathers).append(use)
            elif use not in seen and (target in SHAPES or target in ONE_HOT or _is_order_of(use) or _flattens(use)):
                seen.add(use)
                waiting.append(use)
                if target in ONE_HOT or node in hot:
                    hot.add(use)
    return (gathers[-1], scatters[-1]) if gathers and scatters else None


def _is_order_of(node: fx.Node) -> bool:
    """Whether it brings indices into the order of positions, or takes them out of what did."""
    return node.target in SORTS or (
        "getitem" in str(node.target) and node.args[0].target in SORTS and node.args[1] == 0
    )  # type: ignore[union-attr]


def _flattens(node: fx.Node) -> bool:
    return node.target in ARITHMETIC and not node.meta["val"].dtype.is_floating_point


def _reads_at(use: fx.Node, argument: int, index: fx.Node) -> bool:
    given = use.args[argument]
    return index is given or (isinstance(given, (list, tuple)) and index in given)


def _size_read(use: fx.Node) -> int:
    """Of the dimension that is indexed."""
    shape = shape_of(use.args[0])  # type: ignore[arg-type]
    if use.target in (ATEN.gather.default, ATEN.index_select.default):
        return shape[use.args[1]]  # type: ignore[index]
    if use.target is ATEN.index.Tensor:
        given = [n for n, one in enumerate(use.args[1]) if one is not None]  # type: ignore[arg-type]
        return shape[given[-1]]
    return shape[0]


def _common(paths: Sequence[str]) -> str:
    parts = [path.split(".") for path in paths]
    shared = [same[0] for same in zip(*parts, strict=False) if len(set(same)) == 1]
    # Of different lengths, the parts that all have; of none, the model itself.
    return ".".join(shared) or "model"


def _mark(graph: fx.Graph, one: _Selection, name: str) -> None:
    """Sets the marker, on (B, K) and (B, T), and gives everything behind the selection what it returns."""
    shape, tokens = shape_of(one.indices), shape_of(one.scores)[one.dim]
    rows = math.prod(shape) // shape[one.dim]
    users, value_users = list(one.indices.users), [(value, list(value.users)) for value in one.values]

    def add(target: Any, *args: Any) -> fx.Node:
        return add_node(graph, one.node, target, *args)

    def again(node: fx.Node) -> fx.Node:
        return node if node is one.node else graph.node_copy(node, again)

    # Right behind the selection, so before whatever uses it.
    with graph.inserting_before(one.node.next):
        index = add(ATEN.reshape.default, again(one.indices), [rows, shape[one.dim]])
        scores = add(ATEN.reshape.default, one.scores, [rows, tokens])
        scores = scores if one.largest else add(ATEN.neg.default, scores)
        live, available = add(ATEN.ge.Scalar, index, 0), add(ATEN.eq.Tensor, scores, scores)
        marked = add(MARKER, index, live, scores, available, None, name, AS_GIVEN)
        index = add(ATEN.reshape.default, add(operator.getitem, marked, 0), list(shape))
        values = add(ATEN.gather.default, one.scores, one.dim, index) if one.values else None
    for use in users:
        use.replace_input_with(one.indices, index)
    for value, its_users in value_users:
        for use in its_users:
            assert values is not None
            use.replace_input_with(value, values)
    graph.eliminate_dead_code()

"""Follows the tokens of a selection through a captured program: where they are read, where they go, and where they are
put back.

An operation *reads* tokens if, of a tensor that depends on an input of the program, it gives the elements of exactly
the selected tokens. It *moves* them if its result consists of their elements, whatever these are. It *puts them back*
if what it is given of them stands at their own places afterwards, or changes the result at exactly these. Which of
this an operator does is seen by running it on labels (`probing.py`), so none has to be known by name. One that computes
keeps tokens where the dimensions that tell them apart stay.

Shape legend: B rows, T tokens that a site can select from, K slots.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from mod_export.graph.probing import (
    Known,
    bases_after_write,
    filled,
    is_among,
    is_pointwise,
    is_product,
    is_view,
    narrowest,
    ran,
    tensor_of,
    unnoticed,
)
from mod_export.graph.program_nodes import behind, behind_inputs
from mod_export.graph.token_places import Layout, Selection, Tokens, are_in_order, layouts, tokens_at, tokens_by_row


@dataclass(frozen=True, slots=True)
class Read:
    """An operation that reads selected tokens, or one number of each.

    Attributes:
        node: the operation.
        source: what it reads from.
        tokens: those in its result.
    """

    node: fx.Node
    source: fx.Node
    tokens: Tokens


@dataclass(slots=True)
class Flow:
    """What a program does with the tokens of one selection.

    Attributes:
        selection: the selection.
        index_BK: int64, the indices that were made up for it.
        reads: what reads tokens.
        scores: what reads one number of each token, such as gates.
        puts: what puts results back.
        unknown: what indices go to where it is not known any more what becomes of them.
        is_from: an earlier flow whose selected tokens these are, and their numbers in it, int64 (B, T); None where it
            is the whole row.
        follower: what follows the tokens from where they are read; None where nothing has to be followed.
    """

    selection: Selection
    index_BK: Tensor
    reads: list[Read] = field(default_factory=list)
    scores: list[Read] = field(default_factory=list)
    puts: list[fx.Node] = field(default_factory=list)
    unknown: list[fx.Node] = field(default_factory=list)
    is_from: tuple[Flow, Tensor] | None = None
    follower: _Follower | None = None
    _between: set[fx.Node] | None = None
    _tokens: dict[fx.Node, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> dict[fx.Node, Any]:
        """Node -> labels of its tokens, from where they are read to where they are put back.

        Where it is known without them that results are put back, they are only followed if they are asked for.
        """
        if self.follower is not None:
            follower, self.follower = self.follower, None
            with unnoticed():
                follower.run(self._tokens)
        return self._tokens

    @property
    def between(self) -> set[fx.Node]:
        """What depends on tokens that were read, until they are put back."""
        if self._between is None:
            found = list[tuple[fx.Node, fx.Node | None]]()
            for read in self.reads:
                after = behind(read.node)
                found.append((read.node, next((one for one in self.puts if one in after), None)))
            self._between = nodes_of(found)
        return self._between

    @property
    def positions_BT(self) -> Tensor | None:
        """Where in the whole row the tokens stand that are selected from; None where they are the row."""
        if self.is_from is None:
            return None
        outer, own_BT = self.is_from
        before = outer.positions_BT
        return own_BT if before is None else before.gather(1, own_BT)

    @property
    def tables(self) -> list[Tensor | None]:
        """Every numbering in which the tokens can be meant: their own, and those of the selections before."""
        found: list[Tensor | None] = [None]
        if self.is_from is not None:
            outer, own_BT = self.is_from
            found += [own_BT if table is None else table.gather(1, own_BT) for table in outer.tables]
        return found

    @property
    def pairs(self) -> list[tuple[fx.Node, fx.Node | None]]:
        """Every operation that reads tokens whose results are put back, and the first that does that; where none are
        put back, the first that reads tokens.
        """
        found: list[tuple[fx.Node, fx.Node | None]] = []
        for read in self.reads:
            after = behind(read.node)
            put = next((one for one in self.puts if one in after), None)
            found += [] if put is None else [(read.node, put)]
        return found or [(read.node, None) for read in self.reads[:1]]

    @property
    def in_order(self) -> bool:
        """Whether the tokens run in the order of positions."""
        first = self.pairs[0][0]
        read = next(one for one in self.reads if one.node is first)
        return are_in_order(read.tokens.labels, self.selection.tokens)

    def computing(self) -> list[fx.Node]:
        """The products that read the tokens one by one: none where they are just pooled or copied."""
        return [use for node in self.tokens for use in node.users if is_product(use)]

    def sets_computed(self) -> list[set[int]]:
        """The tokens of the first row that products compute with, different ones of several."""
        found: list[set[int]] = []
        for node, labels in self.tokens.items():
            if isinstance(labels, Tensor) and any(is_product(use) for use in node.users):
                own = tokens_by_row(labels, self.selection).get(0, set())
                found += [] if own in found else [own]
        return found


def flows_of(program: ExportedProgram, selections: Sequence[Selection]) -> tuple[list[Flow], Known]:
    """What a program does with the tokens of each of its selections, which come in the order of the program, and the
    values behind indices that were made up for them.
    """
    made_up = {one.indices: one.some_indices() for one in selections if one.is_of_tokens}
    with unnoticed():
        return _followed(program, selections, made_up)


def _followed(
    program: ExportedProgram, selections: Sequence[Selection], made_up: dict[fx.Node, Tensor]
) -> tuple[list[Flow], Known]:
    known, data = Known(program, made_up), behind_inputs(program)
    found: list[Flow] = []
    for one in selections:
        if one.indices not in made_up:
            found.append(Flow(one, torch.empty(0, 0, dtype=torch.int64)))
            continue
        flow = Flow(one, one.by_row(made_up[one.indices]), is_from=_outer(one, found))
        flow.follower = _Follower(program.graph, known, data, flow)
        flow.follower.run(None)
        if one.is_order or not flow.puts:
            _ = flow.tokens  # Only these can tell what is put back, or goes on alone.
        found.append(flow)
    return found, known


def _outer(selection: Selection, before: Sequence[Flow]) -> tuple[Flow, Tensor] | None:
    """The latest flow of whose selected tokens the scores are, one for each."""
    for flow in reversed(before):
        if selection.scores not in flow.between:
            continue
        labels = flow.tokens.get(selection.scores)
        if not isinstance(labels, Tensor) or flow.selection.rows != selection.rows:
            continue
        number = labels.reshape(-1) - 1
        if bool((number < 0).any()) or number.numel() != selection.rows * selection.tokens:
            continue
        token_BT = selection.by_row(number)
        own = (token_BT // flow.selection.tokens == torch.arange(selection.rows)[:, None]).all()
        if bool(own):
            return flow, token_BT % flow.selection.tokens
    return None


class _Follower:
    """Walks through a graph for one selection: from its indices, or from its tokens as well."""

    def __init__(self, graph: fx.Graph, known: Known, data: set[fx.Node], flow: Flow) -> None:
        self._graph, self._known, self._data, self._flow = graph, known, data, flow
        self._indices = flow.selection.indices
        self._after = set[fx.Node]()
        self._forms = set(known.forms(self._indices))
        self._tokens: dict[fx.Node, Any] = {}
        self._follows = False

    def run(self, tokens: dict[fx.Node, Any] | None) -> None:
        """Finds what reads tokens and puts them back, and where they are between, in `tokens` if they are followed."""
        flow = self._flow
        self._follows, self._tokens = tokens is not None, {} if tokens is None else tokens
        self._after.clear()
        for found in (flow.reads, flow.scores, flow.puts, flow.unknown):
            found.clear()
        for node in self._graph.nodes:
            # A check has no result.
            if node in self._forms or node.op != "call_function" or (tensor_of(node) is None and not node.users):
                continue
            inputs = node.all_input_nodes
            indexed = any(one in self._forms for one in inputs)
            if indexed and not self._indexed(node):
                flow.unknown.append(node)
            elif not indexed and any(one in self._tokens for one in inputs):
                self._goes_on(node, indexed=False)
            if any(one in self._after for one in inputs):
                self._after.add(node)

    def _indexed(self, node: fx.Node) -> bool:
        """Whether it is known what is done here with indices."""
        if is_pointwise(node):
            return self._goes_on(node, indexed=True)
        if any(one in self._after for one in node.all_input_nodes) and self._puts(node):
            self._flow.puts.append(node)
            return True
        read = self._read(node)
        if read is not None:
            selection = self._flow.selection
            count = (narrowest(read.tokens.labels) > 0).sum()
            value = tensor_of(node)
            assert value is not None
            # Tokens have features: what is as small as the indices are scores, or gates.
            if value.numel() <= max(int(count), selection.rows * selection.k):
                self._flow.scores.append(read)
            else:
                self._flow.reads.append(read)
                self._after.add(node)
                if self._follows:
                    self._tokens[node] = read.tokens.labels
            return True
        return self._goes_on(node, indexed=True)

    def _read(self, node: fx.Node) -> Read | None:
        for source in node.all_input_nodes:
            value = tensor_of(source)
            if value is None or source in self._forms or source in self._tokens or source not in self._data:
                continue
            for layout in layouts(value.shape, value.stride(), self._flow.selection):
                if layout.one_row and not _is_of_one_row(source, self._flow.selection.rows):
                    continue
                narrow = narrowest(layout.labels)
                given = narrow.float() if value.dtype.is_floating_point else narrow.to(value.dtype)
                if not torch.equal(given.long(), narrow):
                    break  # Numbers that are too large for this dtype, or truths.
                found = self._run(node, {source: given.expand(value.shape)}, 0.0)
                if isinstance(found, Tensor) and (tokens := self._tokens_at(_whole(found), layout)) is not None:
                    return Read(node, source, tokens)
        return None

    def _tokens_at(self, places: Tensor | None, layout: Layout) -> Tokens | None:
        flow = self._flow
        if places is None or bool((narrowest(places) > len(flow.index_BK) * layout.places).any()):
            return None
        for index_BK in self._parts(narrowest(places), layout):
            found = tokens_at(places, layout, index_BK, flow.selection.tokens, flow.tables)
            if found is not None:
                return found
        return None

    def _parts(self, places: Tensor, layout: Layout) -> list[Tensor]:
        """The selected tokens; of a whole order those at either end, as many as there are places."""
        index_BK = self._flow.index_BK
        if not self._flow.selection.is_order:
            return [index_BK]
        if places.numel() > 4 * len(index_BK) * layout.places:
            return []
        k = int((torch.unique(places[places > 0]) <= layout.places).sum())
        return [index_BK[:, :k], index_BK[:, index_BK.shape[1] - k :]] if 0 < k < index_BK.shape[1] else [index_BK]

    def _run(self, node: fx.Node, given: Mapping[fx.Node, Any], fill: float) -> Any:
        def value_of(one: fx.Node) -> Any:
            if one in given:
                return given[one]
            value = self._known.value(one)
            return filled(one, fill) if value is None else value

        return ran(node, value_of)

    def _puts(self, node: fx.Node) -> bool:
        """Whether results stand at the places of their tokens afterwards, or change exactly these."""
        shape = tensor_of(node)
        if shape is None:
            return False
        for source in node.all_input_nodes:
            if source not in self._after:
                continue
            labels = self._tokens.get(source)
            if isinstance(labels, Tensor):
                found = self._run(node, {source: _floats(labels)}, 0.0)
                whole = _whole(found) if isinstance(found, Tensor) else None
                if whole is not None and _any(whole) and is_among(whole, labels):
                    return self._stand_at_home(whole)
            if self._changes_home(node, source, shape):
                return True
        return False

    def _stand_at_home(self, labels: Tensor) -> bool:
        narrow = narrowest(labels)
        for layout in layouts(labels.shape, [1] * labels.dim(), self._flow.selection):
            held = torch.where(narrow > 0, narrowest(layout.labels), 0).expand(labels.shape)
            home = self._tokens_at(held, layout)
            if home is not None and bool((narrowest(home.labels) == narrow).all()):
                return True
        return False

    def _changes_home(self, node: fx.Node, source: fx.Node, shape: Tensor) -> bool:
        value = tensor_of(source)
        if value is None or not value.dtype.is_floating_point or value.numel() >= shape.numel():
            return False
        found = self._run(node, {source: filled(source, 1.0)}, 0.0)
        if not isinstance(found, Tensor) or found.shape != shape.shape:
            return False
        changed = narrowest((narrowest(found) != 0).to(torch.int64))
        if not bool(changed.any()) or bool(changed.all()):
            return False
        for layout in layouts(shape.shape, [1] * shape.dim(), self._flow.selection):
            if layout.one_row and not _is_of_one_row(node, self._flow.selection.rows):
                continue
            if self._tokens_at((changed * narrowest(layout.labels)).expand(shape.shape), layout) is not None:
                return True
        return False

    def _goes_on(self, node: fx.Node, *, indexed: bool) -> bool:
        """Whether tokens still have a place of their own behind an operation."""
        tokens = self._tokens
        if not any(one in tokens for one in node.all_input_nodes):
            return False
        labels = self._labels_behind(node, indexed)
        if labels is None:
            return False
        tokens[node] = labels
        if isinstance(labels, Tensor):
            for base, whole in bases_after_write(node, _floats(labels), lambda one: _floats(tokens.get(one))):
                tokens[base] = whole.long()
                self._after.add(base)
        return True

    def _labels_behind(self, node: fx.Node, indexed: bool) -> Any:
        tokens = self._tokens
        labelled = [one for one in node.all_input_nodes if one in tokens]
        if node.target is operator.getitem:
            whole = tokens[labelled[0]]
            number: Any = node.args[1]
            found = whole[number] if isinstance(whole, list) else None
            return found if _any(found) else None
        tensors = [(one, tokens[one]) for one in labelled if isinstance(tokens[one], Tensor)]
        shape = tensor_of(node)
        if not tensors:
            return None
        if is_pointwise(node) and shape is not None:
            return _broadcast([labels for _, labels in tensors], shape.shape)
        if indexed or not is_product(node):
            moved = self._moved(node, dict(tensors), indexed)
            if moved is not None:
                return moved
        return None if shape is None else _kept(tensors[0][1], shape.shape)

    def _moved(self, node: fx.Node, labels: Mapping[fx.Node, Tensor], indexed: bool) -> Any:
        selection = self._flow.selection
        last = selection.rows * selection.tokens + 1
        found = self._run(node, {one: _as(one, each) for one, each in labels.items()}, 0.0)
        if not is_view(node) and not indexed:
            other = {one: _as(one, _turned(each, last)) for one, each in labels.items()}
            if not _agree(found, self._run(node, other, 0.0), last):
                return None
        if isinstance(found, (tuple, list)):
            several = [_whole(one) if isinstance(one, Tensor) else None for one in found]
            return several if any(_any(one) for one in several) else None
        whole = _whole(found) if isinstance(found, Tensor) else None
        if whole is None or not _any(whole):
            return None
        known = torch.cat([narrowest(one).flatten() for one in labels.values()])
        return whole if is_among(whole, known) else None


def _is_of_one_row(node: fx.Node, rows: int) -> bool:
    """Whether it is one part of a tensor that is taken apart into rows, or what is written into such a part."""
    seen: Any = node
    for _ in range(3):
        if not isinstance(seen, fx.Node) or not seen.all_input_nodes:
            return False
        source = seen.all_input_nodes[0]
        value, part = tensor_of(source), tensor_of(seen)
        if isinstance(source.meta.get("val"), (tuple, list)):
            return len(source.meta["val"]) == rows
        if part is not None and value is not None and value.dim() > part.dim():
            return value.numel() == part.numel() * rows
        seen = source
    return False


def _floats(labels: Any) -> Tensor | None:
    return narrowest(labels).float().expand(labels.shape) if isinstance(labels, Tensor) else None


def _as(node: fx.Node, labels: Tensor) -> Any:
    value = tensor_of(node)
    return labels if value is not None and not value.dtype.is_floating_point else _floats(labels)


def _any(labels: Any) -> bool:
    return isinstance(labels, Tensor) and bool((narrowest(labels) > 0).any())


def _whole(found: Tensor) -> Tensor | None:
    """Labels, as int64 and without memory for dimensions along which they are the same; None where it holds others."""
    if found.dtype is torch.bool or found.is_complex():
        return None
    narrow = narrowest(found)
    numbers = narrow.long()
    same = bool((numbers == narrow).all()) and bool((numbers >= 0).all())
    return numbers.expand(found.shape) if same else None


def _turned(labels: Tensor, last: int) -> Tensor:
    """Other labels of the same tokens."""
    narrow = narrowest(labels)
    return torch.where(narrow > 0, last - narrow, 0).expand(labels.shape)


def _agree(found: Any, other: Any, last: int) -> bool:
    """Whether an operation did the same with other labels, so that it does not choose by them."""
    if isinstance(found, (tuple, list)):
        return isinstance(other, (tuple, list)) and all(_agree(*pair, last) for pair in zip(found, other, strict=True))
    if not isinstance(found, Tensor):
        return found is None
    if not isinstance(other, Tensor) or found.shape != other.shape:
        return False
    if found.dtype is torch.bool or found.is_complex():
        return False
    one, two = narrowest(_turned(found, last)), narrowest(other)
    return one.shape == two.shape and torch.equal(one, two)


def _broadcast(labels: Sequence[Tensor], shape: Sequence[int]) -> Tensor | None:
    """Where elements of several tensors meet, they belong to the token of the first that has one."""
    if len(labels) == 1 and labels[0].numel() != math.prod(shape):
        return None
    try:
        wide = [one.expand(tuple(shape)) for one in labels]
    except RuntimeError:
        return None  # A result of another shape, as of an operation in place that reports the base.
    found = wide[0]
    for one in wide[1:]:
        if one is not found and not _is_same(found, one):
            found = torch.where(found > 0, found, one)
            found = narrowest(found).expand(tuple(shape))
    return found


def _is_same(one: Tensor, two: Tensor) -> bool:
    first, second = narrowest(one), narrowest(two)
    return first.shape == second.shape and torch.equal(first, second)


def _kept(labels: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Labels behind an operation that computes, if the dimensions that tell tokens apart stay, in this order."""
    narrow = narrowest(labels)
    varying = [dim for dim, size in enumerate(narrow.shape) if size > 1]
    last = varying[-1] + 1 if varying else 0
    stay = len(shape) == labels.dim() and all(shape[dim] == labels.shape[dim] for dim in varying)
    dims: list[int] = []
    if stay or tuple(shape[:last]) == tuple(labels.shape[:last]):
        dims = varying
    else:
        for dim in varying:
            start = dims[-1] + 1 if dims else 0
            place = next((n for n in range(start, len(shape)) if shape[n] == labels.shape[dim]), None)
            if place is None:
                return None
            dims.append(place)
    sizes = [shape[n] if n in dims else 1 for n in range(len(shape))]
    return narrow.reshape(sizes).expand(tuple(shape))


def nodes_of(pairs: Iterable[tuple[fx.Node, fx.Node | None]]) -> set[fx.Node]:
    """What is computed of the tokens that were read, until results are put back."""
    nodes = set[fx.Node]()
    for read, put in pairs:
        nodes |= behind(read) - (set() if put is None else behind(put))
    return nodes

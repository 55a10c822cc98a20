"""Follows the tokens of a selection through a captured program: where it reads them, moves them, and puts them back.

An operation *reads* tokens if it takes a tensor that depends on a program input, and returns the elements of exactly
the selected tokens. It *moves* tokens if its result consists of their elements, for any values. It *puts tokens back*
if its result holds them at their own places, or differs at exactly these places. No operator has to be known by name:
each one is run on labels to see what it does (`probing.py`). An operation that computes keeps the tokens if the
dimensions along which tokens vary stay.

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
        source: the tensor that it reads from.
        tokens: the tokens in its result.
    """

    node: fx.Node
    source: fx.Node
    tokens: Tokens


@dataclass(slots=True)
class Flow:
    """What a program does with the tokens of one selection.

    Attributes:
        selection: the selection.
        index_BK: int64, made-up indices that stand for the selected ones.
        reads: the operations that read tokens.
        scores: the operations that read one number of each token, such as a gate.
        puts: the operations that put results back.
        unknown: the operations on indices that could not be followed.
        is_from: the earlier flow whose selected tokens it selects from, and the numbers of its tokens there, int64
            (B, T); None if it selects from the whole row.
        follower: follows the tokens when `tokens` is first read; None afterwards, or if there is nothing to follow.
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

        They are computed at the first access: a flow whose results are put back may never need them.
        """
        if self.follower is not None:
            follower, self.follower = self.follower, None
            with unnoticed():
                follower.run(self._tokens)
        return self._tokens

    @property
    def between(self) -> set[fx.Node]:
        """The nodes that depend on read tokens, up to where these are put back."""
        if self._between is None:
            pairs = list[tuple[fx.Node, fx.Node | None]]()
            for read in self.reads:
                after = behind(read.node)
                pairs.append((read.node, next((node for node in self.puts if node in after), None)))
            self._between = nodes_of(pairs)
        return self._between

    @property
    def positions_BT(self) -> Tensor | None:
        """Positions in the whole row of the tokens that it selects from; None if it selects from the whole row."""
        if self.is_from is None:
            return None
        outer, own_BT = self.is_from
        before = outer.positions_BT
        return own_BT if before is None else before.gather(1, own_BT)

    @property
    def tables(self) -> list[Tensor | None]:
        """A table for each numbering that indices may use: None for the tokens' own, then those of outer selections."""
        tables: list[Tensor | None] = [None]
        if self.is_from is not None:
            outer, own_BT = self.is_from
            tables += [own_BT if table is None else table.gather(1, own_BT) for table in outer.tables]
        return tables

    @property
    def pairs(self) -> list[tuple[fx.Node, fx.Node | None]]:
        """Each read whose results are put back, with the first operation that does so; if there is none, the first read
        alone.
        """
        pairs: list[tuple[fx.Node, fx.Node | None]] = []
        for read in self.reads:
            after = behind(read.node)
            put = next((node for node in self.puts if node in after), None)
            pairs += [] if put is None else [(read.node, put)]
        return pairs or [(read.node, None) for read in self.reads[:1]]

    @property
    def in_order(self) -> bool:
        """Whether the selected tokens run in ascending order of position."""
        first = self.pairs[0][0]
        read = next(entry for entry in self.reads if entry.node is first)
        return are_in_order(read.tokens.labels, self.selection.tokens)

    def computing(self) -> list[fx.Node]:
        """The products that read the tokens; there are none if the tokens are only pooled or copied."""
        return [use for node in self.tokens for use in node.users if is_product(use)]

    def sets_computed(self) -> list[set[int]]:
        """The different sets of tokens of the first row that products compute with."""
        sets: list[set[int]] = []
        for node, labels in self.tokens.items():
            if isinstance(labels, Tensor) and any(is_product(use) for use in node.users):
                tokens = tokens_by_row(labels, self.selection).get(0, set())
                sets += [] if tokens in sets else [tokens]
        return sets


def flows_of(program: ExportedProgram, selections: Sequence[Selection]) -> tuple[list[Flow], Known]:
    """Returns the flow of each selection, in program order, and the values that depend on made-up indices."""
    made_up = {selection.indices: selection.some_indices() for selection in selections if selection.is_of_tokens}
    with unnoticed():
        return _followed(program, selections, made_up)


def _followed(
    program: ExportedProgram, selections: Sequence[Selection], made_up: dict[fx.Node, Tensor]
) -> tuple[list[Flow], Known]:
    known, data = Known(program, made_up), behind_inputs(program)
    flows: list[Flow] = []
    for selection in selections:
        if selection.indices not in made_up:
            flows.append(Flow(selection, torch.empty(0, 0, dtype=torch.int64)))
            continue
        flow = Flow(selection, selection.by_row(made_up[selection.indices]), is_from=_outer(selection, flows))
        flow.follower = _Follower(program.graph, known, data, flow)
        flow.follower.run(None)
        if selection.is_order or not flow.puts:
            _ = flow.tokens  # Only labels show whether tokens are put back or continue alone.
        flows.append(flow)
    return flows, known


def _outer(selection: Selection, before: Sequence[Flow]) -> tuple[Flow, Tensor] | None:
    """The latest flow whose selected tokens have one score each here, and the numbers (B, T) of these tokens there."""
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
        same_row = (token_BT // flow.selection.tokens == torch.arange(selection.rows)[:, None]).all()
        if bool(same_row):
            return flow, token_BT % flow.selection.tokens
    return None


class _Follower:
    """Walks through a graph and follows the indices of one selection, and its tokens if they are needed."""

    def __init__(self, graph: fx.Graph, known: Known, data: set[fx.Node], flow: Flow) -> None:
        self._graph, self._known, self._data, self._flow = graph, known, data, flow
        self._indices = flow.selection.indices
        self._after = set[fx.Node]()
        self._forms = set(known.forms(self._indices))
        self._tokens: dict[fx.Node, Any] = {}
        self._follows = False

    def run(self, tokens: dict[fx.Node, Any] | None) -> None:
        """Finds the operations that read tokens and put them back. Fills `tokens` with labels unless it is None."""
        flow = self._flow
        self._follows, self._tokens = tokens is not None, {} if tokens is None else tokens
        self._after.clear()
        for operations in (flow.reads, flow.scores, flow.puts, flow.unknown):
            operations.clear()
        for node in self._graph.nodes:
            # A check has no result to follow.
            if node in self._forms or node.op != "call_function" or (tensor_of(node) is None and not node.users):
                continue
            inputs = node.all_input_nodes
            indexed = any(source in self._forms for source in inputs)
            if indexed and not self._indexed(node):
                flow.unknown.append(node)
            elif not indexed and any(source in self._tokens for source in inputs):
                self._goes_on(node, indexed=False)
            if any(source in self._after for source in inputs):
                self._after.add(node)

    def _indexed(self, node: fx.Node) -> bool:
        """Classifies a node that takes indices; False if its use of them is unknown."""
        if is_pointwise(node):
            return self._goes_on(node, indexed=True)
        if any(source in self._after for source in node.all_input_nodes) and self._puts(node):
            self._flow.puts.append(node)
            return True
        read = self._read(node)
        if read is not None:
            selection = self._flow.selection
            count = (narrowest(read.tokens.labels) > 0).sum()
            value = tensor_of(node)
            assert value is not None
            # Tokens have features, so a result as small as the indices holds scores or gates.
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
                numbers = narrow.float() if value.dtype.is_floating_point else narrow.to(value.dtype)
                if not torch.equal(numbers.long(), narrow):
                    break  # This dtype cannot hold the labels.
                result = self._run(node, {source: numbers.expand(value.shape)}, 0.0)
                if isinstance(result, Tensor) and (tokens := self._tokens_at(_whole(result), layout)) is not None:
                    return Read(node, source, tokens)
        return None

    def _tokens_at(self, places: Tensor | None, layout: Layout) -> Tokens | None:
        flow = self._flow
        if places is None or bool((narrowest(places) > len(flow.index_BK) * layout.places).any()):
            return None
        for index_BK in self._parts(narrowest(places), layout):
            tokens = tokens_at(places, layout, index_BK, flow.selection.tokens, flow.tables)
            if tokens is not None:
                return tokens
        return None

    def _parts(self, places: Tensor, layout: Layout) -> list[Tensor]:
        """The selected tokens; for a complete order, as many tokens at either end as there are labelled places."""
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
        """Whether the result holds tokens at their own places, or differs at exactly these places."""
        output = tensor_of(node)
        if output is None:
            return False
        for source in node.all_input_nodes:
            if source not in self._after:
                continue
            labels = self._tokens.get(source)
            if isinstance(labels, Tensor):
                result = self._run(node, {source: _floats(labels)}, 0.0)
                whole = _whole(result) if isinstance(result, Tensor) else None
                if whole is not None and _any(whole) and is_among(whole, labels):
                    return self._stand_at_home(whole)
            if self._changes_home(node, source, output):
                return True
        return False

    def _stand_at_home(self, labels: Tensor) -> bool:
        narrow = narrowest(labels)
        for layout in layouts(labels.shape, [1] * labels.dim(), self._flow.selection):
            places = torch.where(narrow > 0, narrowest(layout.labels), 0).expand(labels.shape)
            home = self._tokens_at(places, layout)
            if home is not None and bool((narrowest(home.labels) == narrow).all()):
                return True
        return False

    def _changes_home(self, node: fx.Node, source: fx.Node, shape: Tensor) -> bool:
        value = tensor_of(source)
        if value is None or not value.dtype.is_floating_point or value.numel() >= shape.numel():
            return False
        result = self._run(node, {source: filled(source, 1.0)}, 0.0)
        if not isinstance(result, Tensor) or result.shape != shape.shape:
            return False
        changed = narrowest((narrowest(result) != 0).to(torch.int64))
        if not bool(changed.any()) or bool(changed.all()):
            return False
        for layout in layouts(shape.shape, [1] * shape.dim(), self._flow.selection):
            if layout.one_row and not _is_of_one_row(node, self._flow.selection.rows):
                continue
            if self._tokens_at((changed * narrowest(layout.labels)).expand(shape.shape), layout) is not None:
                return True
        return False

    def _goes_on(self, node: fx.Node, *, indexed: bool) -> bool:
        """Labels the result of an operation on tokens; False if its tokens cannot be told apart any more."""
        tokens = self._tokens
        if not any(source in tokens for source in node.all_input_nodes):
            return False
        labels = self._labels_behind(node, indexed)
        if labels is None:
            return False
        tokens[node] = labels
        if isinstance(labels, Tensor):
            for base, whole in bases_after_write(node, _floats(labels), lambda source: _floats(tokens.get(source))):
                tokens[base] = whole.long()
                self._after.add(base)
        return True

    def _labels_behind(self, node: fx.Node, indexed: bool) -> Any:
        tokens = self._tokens
        labelled = [source for source in node.all_input_nodes if source in tokens]
        if node.target is operator.getitem:
            whole = tokens[labelled[0]]
            number: Any = node.args[1]
            item = whole[number] if isinstance(whole, list) else None
            return item if _any(item) else None
        tensors = [(source, tokens[source]) for source in labelled if isinstance(tokens[source], Tensor)]
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
        result = self._run(node, {one: _as(one, each) for one, each in labels.items()}, 0.0)
        if not is_view(node) and not indexed:
            reversed_labels = {one: _as(one, _turned(each, last)) for one, each in labels.items()}
            if not _agree(result, self._run(node, reversed_labels, 0.0), last):
                return None
        if isinstance(result, (tuple, list)):
            several = [_whole(one) if isinstance(one, Tensor) else None for one in result]
            return several if any(_any(one) for one in several) else None
        whole = _whole(result) if isinstance(result, Tensor) else None
        if whole is None or not _any(whole):
            return None
        known = torch.cat([narrowest(one).flatten() for one in labels.values()])
        return whole if is_among(whole, known) else None


def _is_of_one_row(node: fx.Node, rows: int) -> bool:
    """Whether a node is one part of a tensor that is split into rows, or is written into such a part."""
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
    """Labels as int64, without memory for dimensions along which they are equal; None if these are not labels."""
    if found.dtype is torch.bool or found.is_complex():
        return None
    narrow = narrowest(found)
    numbers = narrow.long()
    are_labels = bool((numbers == narrow).all()) and bool((numbers >= 0).all())
    return numbers.expand(found.shape) if are_labels else None


def _turned(labels: Tensor, last: int) -> Tensor:
    """Reverses the order of the labels, so that each token gets another one."""
    narrow = narrowest(labels)
    return torch.where(narrow > 0, last - narrow, 0).expand(labels.shape)


def _agree(found: Any, other: Any, last: int) -> bool:
    """Whether an operation did the same with reversed labels, so that it does not depend on their values."""
    if isinstance(found, (tuple, list)):
        return isinstance(other, (tuple, list)) and all(_agree(*pair, last) for pair in zip(found, other, strict=True))
    if not isinstance(found, Tensor):
        return found is None
    if not isinstance(other, Tensor) or found.shape != other.shape:
        return False
    if found.dtype is torch.bool or found.is_complex():
        return False
    expected, actual = narrowest(_turned(found, last)), narrowest(other)
    return expected.shape == actual.shape and torch.equal(expected, actual)


def _broadcast(labels: Sequence[Tensor], shape: Sequence[int]) -> Tensor | None:
    """Labels of a pointwise result: an element belongs to the token of the first operand that has one there."""
    if len(labels) == 1 and labels[0].numel() != math.prod(shape):
        return None
    try:
        wide = [operand.expand(tuple(shape)) for operand in labels]
    except RuntimeError:
        return None  # The result has another shape, for example because an operation in place returns the base.
    result = wide[0]
    for operand in wide[1:]:
        if operand is not result and not _is_same(result, operand):
            result = torch.where(result > 0, result, operand)
            result = narrowest(result).expand(tuple(shape))
    return result


def _is_same(one: Tensor, two: Tensor) -> bool:
    first, second = narrowest(one), narrowest(two)
    return first.shape == second.shape and torch.equal(first, second)


def _kept(labels: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Labels of a computed result; None unless the dimensions along which tokens vary stay in their order."""
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
    """The nodes that depend on each read, up to the operation that puts its results back."""
    nodes = set[fx.Node]()
    for read, put in pairs:
        nodes |= behind(read) - (set() if put is None else behind(put))
    return nodes

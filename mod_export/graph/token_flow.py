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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from mod_export.graph.probing import (
    Known,
    Layout,
    agrees_reversed,
    are_in_order,
    as_floats,
    as_value_of,
    bases_after_write,
    broadcast_labels,
    filled,
    has_tokens,
    is_among,
    is_pointwise,
    is_product,
    is_view,
    kept_labels,
    labels_of,
    layouts,
    narrowest,
    reversed_labels,
    tensor_of,
    tokens_at,
    tokens_by_row,
    unnoticed,
)
from mod_export.graph.program_nodes import behind, behind_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """A top-k, a sort that keeps k entries, or a marker.

    Attributes:
        node: the operation.
        scores: the node of the scores that it compares.
        dim: the dimension of the scores, from 0, along which the tokens are.
        indices: the node of the k indices; of all T indices if several parts of a sort are used.
        values: the nodes of the scores at these indices.
        largest: False if the k smallest scores are selected.
        is_order: whether `indices` holds all T indices in order, so that the tokens at one end may be selected.
    """

    node: fx.Node
    scores: fx.Node
    dim: int
    indices: fx.Node
    values: Sequence[fx.Node]
    largest: bool
    is_order: bool = False

    @property
    def tokens(self) -> int:
        """The number of tokens of a row that it selects from, T."""
        return _shape(self.scores)[self.dim]

    @property
    def k(self) -> int:
        """The number of selected tokens of a row, K."""
        return _shape(self.indices)[self.dim]

    @property
    def rows(self) -> int:
        """B; 1 if one selection is made among the tokens of all rows."""
        return math.prod(_shape(self.scores)) // max(1, self.tokens)

    @property
    def is_tokens_first(self) -> bool:
        """Whether scores are (T, B) and not (B, T)."""
        return math.prod(_shape(self.scores)[: self.dim]) == 1

    @property
    def is_of_tokens(self) -> bool:
        """Whether it can be a selection of k tokens for each row, and not of experts for each token or of nothing."""
        indices, scores = _shape(self.indices), _shape(self.scores)
        if not scores or 0 in indices or sum(size != 1 for size in indices) > 2:
            return False
        return 1 in (math.prod(scores[self.dim + 1 :]), math.prod(scores[: self.dim]))

    def some_indices(self) -> Tensor:
        """Makes up int64 indices with the shape of `indices`: different tokens of each row, unsorted."""
        generator = torch.Generator().manual_seed(self.tokens)
        order_BT = torch.rand(self.rows, self.tokens, generator=generator).argsort(1)
        index_BK = order_BT[:, : self.k]
        for number, index_K in enumerate(index_BK):
            # Few indices may be sorted by chance: let the first exceed the last in even rows, and not in odd ones.
            if self.k > 1 and bool((index_K[0] < index_K[-1]) == (number % 2 == 0)):
                index_BK[number] = index_K.flip(0)
        turned = index_BK.t() if self.is_tokens_first and self.rows > 1 else index_BK
        return turned.reshape(_shape(self.indices)).contiguous()

    def by_row(self, index: Tensor) -> Tensor:
        """Reshapes a tensor with the shape of `indices` to (B, K)."""
        if self.rows == 1 or not self.is_tokens_first:
            return index.reshape(self.rows, -1)
        return index.reshape(-1, self.rows).t()


def _shape(node: fx.Node) -> tuple[int, ...]:
    value = tensor_of(node)
    return () if value is None else tuple(value.shape)


class Read(NamedTuple):
    """An operation that reads selected tokens, or one number of each, and labels of the tokens in its result."""

    node: fx.Node
    labels: Tensor


@dataclass(slots=True)
class Flow:
    """What a program does with the tokens of one selection.

    Attributes:
        selector: the operation that selects the tokens.
        index_BK: int64, made-up indices that stand for the selected ones.
        reads: the operations that read tokens.
        scores: the operations that read one number of each token, such as a gate.
        puts: the operations that put results back.
        unknown: the operations on indices that could not be followed.
        is_from: the earlier flow whose selected tokens it selects from, and the numbers of its tokens there, int64
            (B, T); None if it selects from the whole row.
        follower: follows the tokens when `tokens` is first read; None afterwards, or if there is nothing to follow.
    """

    selector: Selector
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
            self._between = nodes_of(self._put_back())
        return self._between

    def _put_back(self) -> Iterator[tuple[fx.Node, fx.Node | None]]:
        """Yields each read with the first operation that puts its results back; None if there is none."""
        for read in self.reads:
            after = behind(read.node)
            yield read.node, next((node for node in self.puts if node in after), None)

    @property
    def tables(self) -> list[Tensor | None]:
        """A table for each numbering that indices may use: None for the tokens' own, then those of outer selections;
        the last one holds positions in the whole row.
        """
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
        pairs = [pair for pair in self._put_back() if pair[1] is not None]
        return pairs or [(read.node, None) for read in self.reads[:1]]

    @property
    def in_order(self) -> bool:
        """Whether the selected tokens run in ascending order of position."""
        first = self.pairs[0][0]
        read = next(entry for entry in self.reads if entry.node is first)
        return are_in_order(read.labels, self.selector.tokens)

    def computing(self) -> list[fx.Node]:
        """The products that read the tokens; there are none if the tokens are only pooled or copied."""
        return [use for node in self.tokens for use in node.users if is_product(use)]

    def sets_computed(self) -> list[set[int]]:
        """The different sets of tokens of the first row that products compute with."""
        sets: list[set[int]] = []
        for node, labels in self.tokens.items():
            if isinstance(labels, Tensor) and any(is_product(use) for use in node.users):
                tokens = tokens_by_row(labels, self.selector.tokens).get(0, set())
                sets += [] if tokens in sets else [tokens]
        return sets


def flows_of(program: ExportedProgram, selectors: Sequence[Selector]) -> tuple[list[Flow], Known]:
    """Returns the flow of each selection, in program order, and the values that depend on made-up indices."""
    made_up = {selector.indices: selector.some_indices() for selector in selectors if selector.is_of_tokens}
    with unnoticed():
        return _followed(program, selectors, made_up)


def _followed(
    program: ExportedProgram, selectors: Sequence[Selector], made_up: dict[fx.Node, Tensor]
) -> tuple[list[Flow], Known]:
    known, data = Known(program, made_up), behind_inputs(program)
    flows: list[Flow] = []
    for selector in selectors:
        if selector.indices not in made_up:
            flows.append(Flow(selector, torch.empty(0, 0, dtype=torch.int64)))
            continue
        flow = Flow(selector, selector.by_row(made_up[selector.indices]), is_from=_outer(selector, flows))
        flow.follower = _Follower(program.graph, known, data, flow)
        flow.follower.run(None)
        if selector.is_order or not flow.puts:
            _ = flow.tokens  # Only labels show whether tokens are put back or continue alone.
        flows.append(flow)
    return flows, known


def _outer(selector: Selector, before: Sequence[Flow]) -> tuple[Flow, Tensor] | None:
    """The latest flow of `before` whose selected tokens have one score each in `selector`, and the numbers (B, T) of
    these tokens in that flow; None if there is no such flow.
    """
    for flow in reversed(before):
        if selector.scores not in flow.between:
            continue
        labels = flow.tokens.get(selector.scores)
        if not isinstance(labels, Tensor) or flow.selector.rows != selector.rows:
            continue
        number = labels.reshape(-1) - 1
        if bool((number < 0).any()) or number.numel() != selector.rows * selector.tokens:
            continue
        token_BT = selector.by_row(number)
        same_row = (token_BT // flow.selector.tokens == torch.arange(selector.rows)[:, None]).all()
        if bool(same_row):
            return flow, token_BT % flow.selector.tokens
    return None


class _Follower:
    """Walks through a graph and follows the indices of one selection, and its tokens if they are needed."""

    def __init__(self, graph: fx.Graph, known: Known, data: set[fx.Node], flow: Flow) -> None:
        self._graph, self._known, self._data, self._flow = graph, known, data, flow
        self._after = set[fx.Node]()
        self._forms = set(known.forms(flow.selector.indices))
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
            selector = self._flow.selector
            count = (narrowest(read.labels) > 0).sum()
            value = tensor_of(node)
            assert value is not None
            # Tokens have features, so a result as small as the indices holds scores or gates.
            if value.numel() <= max(int(count), selector.rows * selector.k):
                self._flow.scores.append(read)
            else:
                self._flow.reads.append(read)
                self._after.add(node)
                if self._follows:
                    self._tokens[node] = read.labels
            return True
        return self._goes_on(node, indexed=True)

    def _read(self, node: fx.Node) -> Read | None:
        for source in node.all_input_nodes:
            value = tensor_of(source)
            if value is None or source in self._forms or source in self._tokens or source not in self._data:
                continue
            for layout in self._layouts(value.shape, value.stride()):
                if layout.one_row and not _is_of_one_row(source, self._flow.selector.rows):
                    continue
                narrow = narrowest(layout.labels)
                numbers = narrow.float() if value.dtype.is_floating_point else narrow.to(value.dtype)
                if not torch.equal(numbers.long(), narrow):
                    break  # This dtype cannot hold the labels.
                result = self._run(node, {source: numbers.expand(value.shape)})
                if isinstance(result, Tensor) and (labels := self._tokens_at(labels_of(result), layout)) is not None:
                    return Read(node, labels)
        return None

    def _layouts(self, shape: Sequence[int], strides: Sequence[int] | None = None) -> Iterator[Layout]:
        selector = self._flow.selector
        return layouts(shape, [1] * len(shape) if strides is None else strides, selector.rows, selector.tokens)

    def _tokens_at(self, places: Tensor | None, layout: Layout) -> Tensor | None:
        flow = self._flow
        if places is None or bool((narrowest(places) > len(flow.index_BK) * layout.places).any()):
            return None
        for index_BK in self._parts(narrowest(places), layout):
            labels = tokens_at(places, layout, index_BK, flow.selector.tokens, flow.tables)
            if labels is not None:
                return labels
        return None

    def _parts(self, places: Tensor, layout: Layout) -> list[Tensor]:
        """The selected tokens; for a complete order, as many tokens at either end as there are labelled places."""
        index_BK = self._flow.index_BK
        if not self._flow.selector.is_order:
            return [index_BK]
        if places.numel() > 4 * len(index_BK) * layout.places:
            return []
        k = int((torch.unique(places[places > 0]) <= layout.places).sum())
        return [index_BK[:, :k], index_BK[:, index_BK.shape[1] - k :]] if 0 < k < index_BK.shape[1] else [index_BK]

    def _run(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        return self._known.run(node, values, 0.0)

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
                result = self._run(node, {source: as_floats(labels)})
                whole = labels_of(result) if isinstance(result, Tensor) else None
                if whole is not None and has_tokens(whole) and is_among(whole, labels):
                    return self._stand_at_home(whole)
            if self._changes_home(node, source, output):
                return True
        return False

    def _stand_at_home(self, labels: Tensor) -> bool:
        narrow = narrowest(labels)
        for layout in self._layouts(labels.shape):
            places = torch.where(narrow > 0, narrowest(layout.labels), 0).expand(labels.shape)
            home = self._tokens_at(places, layout)
            if home is not None and bool((narrowest(home) == narrow).all()):
                return True
        return False

    def _changes_home(self, node: fx.Node, source: fx.Node, shape: Tensor) -> bool:
        value = tensor_of(source)
        if value is None or not value.dtype.is_floating_point or value.numel() >= shape.numel():
            return False
        result = self._run(node, {source: filled(source, 1.0)})
        if not isinstance(result, Tensor) or result.shape != shape.shape:
            return False
        changed = narrowest((narrowest(result) != 0).to(torch.int64))
        if not bool(changed.any()) or bool(changed.all()):
            return False
        for layout in self._layouts(shape.shape):
            if layout.one_row and not _is_of_one_row(node, self._flow.selector.rows):
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
            values = bases_after_write(node, as_floats(labels), lambda source: as_floats(tokens.get(source)))
            for base, whole in values:
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
            return item if has_tokens(item) else None
        tensors = [(source, tokens[source]) for source in labelled if isinstance(tokens[source], Tensor)]
        shape = tensor_of(node)
        if not tensors:
            return None
        if is_pointwise(node) and shape is not None:
            return broadcast_labels([labels for _, labels in tensors], shape.shape)
        if indexed or not is_product(node):
            moved = self._moved(node, dict(tensors), indexed)
            if moved is not None:
                return moved
        return None if shape is None else kept_labels(tensors[0][1], shape.shape)

    def _moved(self, node: fx.Node, labels: Mapping[fx.Node, Tensor], indexed: bool) -> Any:
        selector = self._flow.selector
        last = selector.rows * selector.tokens + 1
        result = self._run(node, {source: as_value_of(source, each) for source, each in labels.items()})
        if not is_view(node) and not indexed:
            mirrored = {source: as_value_of(source, reversed_labels(each, last)) for source, each in labels.items()}
            if not agrees_reversed(result, self._run(node, mirrored), last):
                return None
        if isinstance(result, (tuple, list)):
            several = [labels_of(item) if isinstance(item, Tensor) else None for item in result]
            return several if any(has_tokens(item) for item in several) else None
        result_labels = labels_of(result) if isinstance(result, Tensor) else None
        if result_labels is None or not has_tokens(result_labels):
            return None
        input_labels = torch.cat([narrowest(tensor).flatten() for tensor in labels.values()])
        return result_labels if is_among(result_labels, input_labels) else None


def _is_of_one_row(node: fx.Node, rows: int) -> bool:
    """Whether a node is one part of a tensor that is split into rows, or is written into such a part."""
    current: Any = node
    for _ in range(3):
        if not isinstance(current, fx.Node) or not current.all_input_nodes:
            return False
        source = current.all_input_nodes[0]
        value, part = tensor_of(source), tensor_of(current)
        if isinstance(source.meta.get("val"), (tuple, list)):
            return len(source.meta["val"]) == rows
        if part is not None and value is not None and value.dim() > part.dim():
            return value.numel() == part.numel() * rows
        current = source
    return False


def nodes_of(pairs: Iterable[tuple[fx.Node, fx.Node | None]]) -> set[fx.Node]:
    """The nodes that depend on each read, up to the operation that puts its results back."""
    nodes = set[fx.Node]()
    for read, put in pairs:
        nodes |= behind(read) - (set() if put is None else behind(put))
    return nodes

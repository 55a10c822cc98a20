"""Where the tokens of rows stand in tensors, and which of them a selection has.

Tokens of a selection are told apart by labels, 1 + row * T + token, and 0 is no token. A tensor of labels has the shape
of the tensor whose elements it labels.

Shape legend: B rows, T tokens that a site can select from, K slots, P places of a row, which has at least T.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from mod_export.graph.probing import narrowest, tensor_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A top-k, a sort of which k entries are kept, or a marker.

    Attributes:
        node: the operation.
        scores: what it compares.
        dim: of the scores, from 0: where the tokens are.
        indices: the node of the k indices; of a sort of which several parts are used, that of all T.
        values: the nodes of the scores of these.
        largest: False where the k smallest scores are selected.
        is_order: whether `indices` are all T in order, of which the tokens at one end may be selected.
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
        """T."""
        return _shape(self.scores)[self.dim]

    @property
    def k(self) -> int:
        """K."""
        return _shape(self.indices)[self.dim]

    @property
    def rows(self) -> int:
        """B; 1 where one selection is made among the tokens of all rows."""
        return math.prod(_shape(self.scores)) // max(1, self.tokens)

    @property
    def is_tokens_first(self) -> bool:
        """Whether scores are (T, B), not (B, T)."""
        return math.prod(_shape(self.scores)[: self.dim]) == 1

    @property
    def is_of_tokens(self) -> bool:
        """Whether it can be a choice of k tokens for each row: not one of experts for each token, nor of nothing."""
        indices, scores = _shape(self.indices), _shape(self.scores)
        if not scores or 0 in indices or sum(size != 1 for size in indices) > 2:
            return False
        return 1 in (math.prod(scores[self.dim + 1 :]), math.prod(scores[: self.dim]))

    def some_indices(self) -> Tensor:
        """int64, of the shape of `indices`: different tokens of each row, in no order."""
        generator = torch.Generator().manual_seed(self.tokens)
        order_BT = torch.rand(self.rows, self.tokens, generator=generator).argsort(1)
        index_BK = order_BT[:, : self.k]
        for number, index_K in enumerate(index_BK):
            # Two are in order by chance in every other row.
            if self.k > 1 and bool((index_K[0] < index_K[-1]) == (number % 2 == 0)):
                index_BK[number] = index_K.flip(0)
        turned = index_BK.t() if self.is_tokens_first and self.rows > 1 else index_BK
        return turned.reshape(_shape(self.indices)).contiguous()

    def by_row(self, index: Tensor) -> Tensor:
        """Indices of the shape of `indices` as (B, K)."""
        if self.rows == 1 or not self.is_tokens_first:
            return index.reshape(self.rows, -1)
        return index.reshape(-1, self.rows).t()


def _shape(node: fx.Node) -> tuple[int, ...]:
    found = tensor_of(node)
    return () if found is None else tuple(found.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """One way in which a tensor may hold tokens.

    Attributes:
        places: P.
        labels: int64, of the shape of the tensor: 1 + row * P + place; where `one_row`, 1 + place.
        one_row: whether it holds those of one row of several.
    """

    places: int
    labels: Tensor
    one_row: bool


def layouts(shape: Sequence[int], strides: Sequence[int], selection: Selection) -> Iterator[Layout]:
    """Every way in which a tensor can hold T tokens of B rows, or more of them; exact ones come first."""
    rows, tokens = selection.rows, selection.tokens
    found: list[tuple[int, int, Tensor, bool]] = []
    for dim, size in enumerate(shape):
        number = _along(torch.arange(1, size + 1), dim, len(shape))
        if rows > 1 and size % rows == 0 and size // rows >= tokens:
            places = size // rows
            found.append((places, 0, number, False))
            found.append((places, 1, 1 + (number - 1) % rows * places + (number - 1) // rows, False))
        if size < tokens:
            continue
        if rows == 1:
            found.append((size, 0, number, False))
            continue
        # Experts that share the tokens of a row have no rows of their own.
        others = [n for n, count in enumerate(shape) if n != dim and count == rows and strides[n]]
        found += [(size, 0, _along(torch.arange(rows) * size, n, len(shape)) + number, False) for n in others]
        found.append((size, 2, number, True))
    for places, _, labels, one_row in sorted(found, key=lambda one: (one[0] != tokens, one[1])):
        yield Layout(places, labels.expand(tuple(shape)), one_row)


def _along(numbers: Tensor, dim: int, dims: int) -> Tensor:
    """Numbers along one of several dimensions, whose others are 1."""
    return numbers.reshape([-1 if n == dim else 1 for n in range(dims)])


@dataclass(frozen=True, slots=True)
class Tokens:
    """Which selected tokens elements belong to.

    Attributes:
        labels: int64, of the shape of the tensor: 1 + row * T + token, or 0.
        shift: how far places of tokens are behind their numbers.
        table: int64 (B, T), the places of tokens that were selected before; None where places are numbers.
    """

    labels: Tensor
    shift: int
    table: Tensor | None


def tokens_at(
    places: Tensor, layout: Layout, index_BK: Tensor, tokens: int, tables: Sequence[Tensor | None]
) -> Tokens | None:
    """The tokens of a selection that elements belong to, if they are of exactly the selected ones, and of others at
    most of such that cannot be selected, as a class token.

    Args:
        places: labels of a layout, 0 where an element belongs to no place.
        layout: what they mean.
        index_BK: int64, the selected tokens.
        tokens: T.
        tables: int64 (B, T) in which places of tokens can have been looked up; None for their own numbers.
    """
    narrow, rows, (B, K) = narrowest(places), 1 if layout.one_row else len(index_BK), index_BK.shape
    if narrow.numel() > 4 * B * layout.places:
        return None  # Parts of one token are told apart, so these are no places of tokens.
    held = torch.zeros(rows * layout.places + 1, dtype=torch.bool)
    held[narrow.flatten()] = True
    held_RP = held[1:].view(rows, layout.places)
    if not bool((held_RP.sum(1) >= K).all()):
        return None
    own_BT = torch.arange(tokens).expand(B, tokens)
    for table in tables:
        placed_BT = own_BT if table is None else table
        for shift in _shifts(held_RP[0], placed_BT.gather(1, index_BK)[0], tokens, layout):
            row = _row_held(held_RP, placed_BT + shift, index_BK)
            if row is None:
                continue
            token_of = torch.zeros(rows * layout.places + 1, dtype=torch.int64)
            first_B1 = torch.arange(B)[:, None]
            where_BT, label_BT = 1 + first_B1 * layout.places + placed_BT + shift, 1 + first_B1 * tokens + own_BT
            if layout.one_row:
                where_BT, label_BT = where_BT[row : row + 1] - row * layout.places, label_BT[row : row + 1]
            fits_BT = placed_BT[: len(where_BT)] + shift < layout.places
            token_of[where_BT[fits_BT]] = label_BT[fits_BT]
            return Tokens(token_of[narrow].expand(places.shape), shift, table)
    return None


def _shifts(held_P: Tensor, placed_K: Tensor, tokens: int, layout: Layout) -> list[int]:
    """How far the places of a row can be behind those that tokens are numbered by: others stand before or after all."""
    found = [0]
    if layout.places > tokens and not layout.one_row:
        place = held_P.nonzero()[:, 0]
        shifts = (place[: len(place) - len(placed_K) + 1] - placed_K.min()).tolist()
        found += [one for one in shifts if one > 0]
    return found


def _row_held(held_RP: Tensor, placed_BT: Tensor, index_BK: Tensor) -> int | None:
    """Which row's selected tokens are held, 0 where each row holds its own; None where others are held."""
    (rows, places), chosen_BK = held_RP.shape, placed_BT.gather(1, index_BK)
    if int(chosen_BK.max()) >= places:
        return None
    none_BP = torch.zeros(len(placed_BT), places, dtype=torch.bool)
    chosen_BP = none_BP.scatter(1, chosen_BK, True)
    # Those of a longer row end where it ends.
    open_BP = none_BP.scatter(1, placed_BT.clamp(max=places - 1), True)
    others_BP = held_RP & ~open_BP
    same_B = ((held_RP & open_BP) == chosen_BP).all(1)
    if rows == 1 and len(placed_BT) > 1:
        return int(same_B.int().argmax()) if bool(same_B.any()) and not bool(others_BP[same_B].any()) else None
    return 0 if bool(same_B.all()) and bool((others_BP == others_BP[:1]).all()) else None


def are_in_order(labels: Tensor, tokens: int) -> bool:
    """Whether the tokens of each row stand in the order of their numbers."""
    narrow = narrowest(labels).flatten()
    narrow = narrow[narrow > 0] - 1
    for row in torch.unique(narrow // tokens).tolist():
        row_K = narrow[narrow // tokens == row]
        if bool((row_K[1:] < row_K[:-1]).any()):
            return False
    return True


def tokens_by_row(labels: Tensor, selection: Selection) -> Mapping[int, set[int]]:
    """Row -> the tokens of it that elements belong to."""
    number = torch.unique(narrowest(labels))
    number = number[number > 0] - 1
    found: dict[int, set[int]] = {}
    for one in number.tolist():
        found.setdefault(one // selection.tokens, set()).add(one % selection.tokens)
    return found

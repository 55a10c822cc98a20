"""Finds where tensors hold the tokens of rows, and which of these tokens are selected.

A label identifies a token: 1 + row * T + token; 0 means no token. A tensor of labels has the shape of the tensor whose
elements it labels.

Shape legend: B rows, T tokens that a site can select from, K slots, P places that a tensor has for each row (P >= T).
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


@dataclass(frozen=True, slots=True)
class Layout:
    """One way in which a tensor may hold tokens.

    Attributes:
        places: P.
        labels: int64, with the shape of the tensor: 1 + row * P + place, or 1 + place if `one_row`.
        one_row: whether the tensor holds the tokens of only one of several rows.
    """

    places: int
    labels: Tensor
    one_row: bool


def layouts(shape: Sequence[int], strides: Sequence[int], selection: Selection) -> Iterator[Layout]:
    """Yields every way in which a tensor can hold at least T tokens for each of B rows, those with exactly T first."""
    rows, tokens = selection.rows, selection.tokens
    entries: list[tuple[int, int, Tensor, bool]] = []
    for dim, size in enumerate(shape):
        number = _along(torch.arange(1, size + 1), dim, len(shape))
        if rows > 1 and size % rows == 0 and size // rows >= tokens:
            places = size // rows
            entries.append((places, 0, number, False))
            entries.append((places, 1, 1 + (number - 1) % rows * places + (number - 1) // rows, False))
        if size < tokens:
            continue
        if rows == 1:
            entries.append((size, 0, number, False))
            continue
        # A dimension with stride 0 holds no rows: it repeats the tokens, for example for each expert.
        row_dims = [n for n, count in enumerate(shape) if n != dim and count == rows and strides[n]]
        entries += [(size, 0, _along(torch.arange(rows) * size, n, len(shape)) + number, False) for n in row_dims]
        entries.append((size, 2, number, True))
    for places, _, labels, one_row in sorted(entries, key=lambda entry: (entry[0] != tokens, entry[1])):
        yield Layout(places, labels.expand(tuple(shape)), one_row)


def _along(numbers: Tensor, dim: int, dims: int) -> Tensor:
    """Reshapes numbers to lie along one of `dims` dimensions; the others have size 1."""
    return numbers.reshape([-1 if n == dim else 1 for n in range(dims)])


@dataclass(frozen=True, slots=True)
class Tokens:
    """The selected tokens that the elements of a tensor belong to.

    Attributes:
        labels: int64, with the shape of the tensor: 1 + row * T + token, or 0.
        shift: the difference between a token's place and its number, such as 1 behind a class token.
        table: int64 (B, T), the token numbers in an earlier selection; None if tokens have their own numbers.
    """

    labels: Tensor
    shift: int
    table: Tensor | None


def tokens_at(
    places: Tensor, layout: Layout, index_BK: Tensor, tokens: int, tables: Sequence[Tensor | None]
) -> Tokens | None:
    """The selected tokens that elements belong to; None unless the elements are those of exactly the selected tokens.
    Tokens that cannot be selected, such as a class token, may be there too.

    Args:
        places: labels of a layout; 0 where an element belongs to no place.
        layout: the layout that these labels belong to.
        index_BK: int64, the selected tokens.
        tokens: T.
        tables: int64 (B, T), numberings that the program may use for the tokens; None for their own numbers.
    """
    narrow, rows, (B, K) = narrowest(places), 1 if layout.one_row else len(index_BK), index_BK.shape
    if narrow.numel() > 4 * B * layout.places:
        return None  # The labels vary within a token, so they are not places of tokens.
    occupied = torch.zeros(rows * layout.places + 1, dtype=torch.bool)
    occupied[narrow.flatten()] = True
    occupied_RP = occupied[1:].view(rows, layout.places)
    if not bool((occupied_RP.sum(1) >= K).all()):
        return None
    number_BT = torch.arange(tokens).expand(B, tokens)
    for table in tables:
        placed_BT = number_BT if table is None else table
        for shift in _shifts(occupied_RP[0], placed_BT.gather(1, index_BK)[0], tokens, layout):
            row = _row_held(occupied_RP, placed_BT + shift, index_BK)
            if row is None:
                continue
            token_of = torch.zeros(rows * layout.places + 1, dtype=torch.int64)
            first_B1 = torch.arange(B)[:, None]
            where_BT, label_BT = 1 + first_B1 * layout.places + placed_BT + shift, 1 + first_B1 * tokens + number_BT
            if layout.one_row:
                where_BT, label_BT = where_BT[row : row + 1] - row * layout.places, label_BT[row : row + 1]
            fits_BT = placed_BT[: len(where_BT)] + shift < layout.places
            token_of[where_BT[fits_BT]] = label_BT[fits_BT]
            return Tokens(token_of[narrow].expand(places.shape), shift, table)
    return None


def _shifts(held_P: Tensor, placed_K: Tensor, tokens: int, layout: Layout) -> list[int]:
    """Possible differences between a token's place and its number: other tokens may stand before or after them all."""
    result = [0]
    if layout.places > tokens and not layout.one_row:
        place = held_P.nonzero()[:, 0]
        shifts = (place[: len(place) - len(placed_K) + 1] - placed_K.min()).tolist()
        result += [shift for shift in shifts if shift > 0]
    return result


def _row_held(held_RP: Tensor, placed_BT: Tensor, index_BK: Tensor) -> int | None:
    """The row whose selected tokens are held, or 0 if each row holds its own; None if other tokens are held."""
    (rows, places), chosen_BK = held_RP.shape, placed_BT.gather(1, index_BK)
    if int(chosen_BK.max()) >= places:
        return None
    none_BP = torch.zeros(len(placed_BT), places, dtype=torch.bool)
    chosen_BP = none_BP.scatter(1, chosen_BK, True)
    # Tokens past the last place are clamped to it.
    open_BP = none_BP.scatter(1, placed_BT.clamp(max=places - 1), True)
    others_BP = held_RP & ~open_BP
    matches_B = ((held_RP & open_BP) == chosen_BP).all(1)
    if rows == 1 and len(placed_BT) > 1:
        return int(matches_B.int().argmax()) if bool(matches_B.any()) and not bool(others_BP[matches_B].any()) else None
    return 0 if bool(matches_B.all()) and bool((others_BP == others_BP[:1]).all()) else None


def are_in_order(labels: Tensor, tokens: int) -> bool:
    """Whether the tokens of each row are in ascending order."""
    narrow = narrowest(labels).flatten()
    narrow = narrow[narrow > 0] - 1
    for row in torch.unique(narrow // tokens).tolist():
        row_K = narrow[narrow // tokens == row]
        if bool((row_K[1:] < row_K[:-1]).any()):
            return False
    return True


def tokens_by_row(labels: Tensor, selection: Selection) -> Mapping[int, set[int]]:
    """Row -> the tokens of this row that elements belong to."""
    number = torch.unique(narrowest(labels))
    number = number[number > 0] - 1
    result: dict[int, set[int]] = {}
    for index in number.tolist():
        result.setdefault(index // selection.tokens, set()).add(index % selection.tokens)
    return result

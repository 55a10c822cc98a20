"""Where the tokens that a selection read go in a captured program, as long as each of them keeps a place of its own."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from mod_export.export.index_uses import Selection, Uses
from mod_export.export.program_nodes import argument_of, shape_of

ATEN = torch.ops.aten
MOVES = {ATEN.transpose.int, ATEN.permute.default, ATEN.t.default, ATEN.movedim.int}
COMPUTES = {
    ATEN.linear.default, ATEN.matmul.default, ATEN.mm.default, ATEN.addmm.default, ATEN.einsum.default,
    ATEN.scaled_dot_product_attention.default, ATEN.conv1d.default,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Places:
    """Where tokens stand in a tensor whose elements are numbered as (outer, size, inner): from `first` on in the
    dimension of this size.
    """

    outer: int
    size: int
    first: int

    def inner(self, node: fx.Node) -> int:
        return math.prod(shape_of(node)) // (self.outer * self.size)

    def dim(self, node: fx.Node) -> int | None:
        """The dimension that has them; None where it is one with another."""
        shape = shape_of(node)
        return next(
            (n for n, size in enumerate(shape) if size == self.size and math.prod(shape[:n]) == self.outer), None
        )


def tokens_behind(selection: Selection, uses: Uses) -> dict[fx.Node, Places]:
    """Every value that has the selected tokens, in the order in which they were read, and where it has them."""
    start = _read_places(selection, uses)
    if start is None:
        return {}
    found = {uses.gather: start}
    waiting = [uses.gather]
    while waiting:
        node = waiting.pop()
        for use in node.users:
            if use in found:
                continue
            places = _places(use, node, found[node], selection)
            if places is not None:
                found[use] = places
                waiting.append(use)
    return found


def computing(tokens: Iterable[fx.Node]) -> list[fx.Node]:
    """The products of matrices that read the tokens one by one: none where they are just pooled or copied."""
    return [use for node in tokens for use in node.users if use.target in COMPUTES]


def _read_places(selection: Selection, uses: Uses) -> Places | None:
    gather, read, rows = uses.gather, uses.read, selection.rows
    shape = shape_of(gather)
    if read.one_row:
        return None
    indices = argument_of(gather, "indices")
    if isinstance(indices, (list, tuple)):
        dim = next(n for n, index in enumerate(indices) if index is not None)
    else:
        dim = (argument_of(gather, "dim") or 0) % len(shape)
    before = math.prod(shape[:dim])
    if shape[dim] == read.slots:
        return Places(before, read.slots, read.first)
    flat = shape[dim] == rows * read.slots or shape[dim : dim + 2] == (rows, read.slots)
    return Places(before * rows, read.slots, read.first) if flat else None


def _places(use: fx.Node, node: fx.Node, places: Places, selection: Selection) -> Places | None:
    """Where an operation leaves the tokens that it reads; None where they have no place of their own any more."""
    if not isinstance(use.meta.get("val"), torch.Tensor):
        return places if use.target is not ATEN.topk.default else None
    if use.target is operator.getitem:
        return places if math.prod(shape_of(use)) % (places.outer * places.size) == 0 else None
    dim = places.dim(node) if isinstance(node.meta["val"], torch.Tensor) else None
    if use.target in MOVES:
        return _moved(use, node, places, dim)
    if use.target is ATEN.cat.default and dim is not None and argument_of(use, "dim") % len(shape_of(use)) == dim:
        return _beside(use, node, places, dim, selection)
    if use.target is ATEN.slice.Tensor and dim is not None and argument_of(use, "dim") % len(shape_of(use)) == dim:
        start, size = argument_of(use, "start") or 0, shape_of(use)[dim]
        start = start + places.size if start < 0 else start
        kept = argument_of(use, "step") == 1 and start <= places.first and places.first + selection.k <= start + size
        return replace(places, size=size, first=places.first - start) if kept else None
    size = math.prod(shape_of(use))
    if size == math.prod(shape_of(node)):
        return places
    same = dim is not None and dim < len(shape_of(use)) and shape_of(use)[: dim + 1] == shape_of(node)[: dim + 1]
    return places if same else None


def _moved(use: fx.Node, node: fx.Node, places: Places, dim: int | None) -> Places | None:
    """Behind a change of the order of dimensions, which the strides tell."""
    if dim is None:
        return None
    shape = shape_of(node)
    numbers = torch.empty_strided(shape, tuple(range(1, len(shape) + 1)), device="meta")
    target: Any = use.target
    moved = target(numbers, *use.args[1:], **use.kwargs)
    new = list(moved.stride()).index(dim + 1)
    return replace(places, outer=math.prod(shape_of(use)[:new]))


def _beside(use: fx.Node, node: fx.Node, places: Places, dim: int, selection: Selection) -> Places | None:
    """Beside other tokens, such as a class token; beside all others, the row is as long as before."""
    parts: Any = use.args[0]
    before = sum(shape_of(part)[dim] for part in parts[: parts.index(node)])
    size = shape_of(use)[dim]
    return None if size >= selection.tokens else replace(places, size=size, first=places.first + before)

"""Writes operations on boolean masks with fixed sizes: `where` picks masked entries, and a cumulative sum numbers them.

The number of true entries is unknown when a graph is exported, so a graph of fixed sizes cannot hold their indices. It
needs no indices if only the masked entries change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mod_export.graph.program_nodes import argument_of, shape_of

Lowered = Callable[..., Any]


def lowered_index_put(node: fx.Node) -> Lowered | None:
    """`x[mask] = value`, if one boolean mask is the only index of x."""
    indices: Any = argument_of(node, "indices")
    used = [index for index in indices if index is not None]
    if len(used) != 1 or used[0].meta["val"].dtype is not torch.bool or argument_of(node, "accumulate"):
        return None
    return _put_by_mask


def lowered_masked_scatter(node: fx.Node) -> Lowered:
    """`x.masked_scatter(mask, source)`: the n-th true entry becomes the n-th element of the source."""
    mask, source = argument_of(node, "mask"), argument_of(node, "source")
    return _scatter_by_mask(_copied_last(mask, math.prod(shape_of(source))))


def lowered_nonzero_static(node: fx.Node) -> Lowered:
    """`nonzero_static(x, size=n, fill_value=f)`: the positions of the first n entries that are not 0."""
    return _first_nonzero


def _put_by_mask(x: Tensor, indices: Sequence[Tensor | None], value: Tensor, accumulate: bool = False) -> Tensor:
    before = next(n for n, index in enumerate(indices) if index is not None)
    mask = indices[before]
    assert mask is not None
    rest = x.dim() - before - mask.dim()
    wide = mask.reshape(*[1] * before, *mask.shape, *[1] * rest)
    # The value is (before, n true entries, rest), or has a single entry that is broadcast.
    entries = value.shape[value.dim() - rest - 1] if value.dim() > rest else 1
    if entries == 1:
        if value.dim() > rest:
            shape = value.shape
            at = value.dim() - rest - 1
            value = value.reshape(*shape[:at], *[1] * mask.dim(), *shape[at + 1 :])
        return torch.where(wide, value.to(x.dtype), x)
    number = _number(mask).clamp(0, entries - 1)
    value = value.expand(*x.shape[:before], entries, *x.shape[x.dim() - rest :])
    chosen = value.index_select(before, number.reshape(-1)).reshape(x.shape)
    return torch.where(wide, chosen.to(x.dtype), x)


def _number(mask: Tensor) -> Tensor:
    """The number of true entries before each true entry, in the shape of the mask."""
    return (mask.reshape(-1).to(torch.int64).cumsum(0) - 1).reshape(mask.shape)


def _copied_last(mask: fx.Node, elements: int) -> int:
    """The number of copies that a mask holds of each entry, such as D in `mask_BS[..., None].expand_as(x_BSD)`. Each
    true entry then takes a whole row of the source.
    """
    value = mask.meta["val"]
    copies = 1
    for size, step in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if step != 0 and size != 1:
            break
        copies *= size
    return copies if elements % copies == 0 else 1


def _scatter_by_mask(copies: int) -> Lowered:
    def scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        shape = torch.broadcast_shapes(x.shape, mask.shape)  # type: ignore[no-untyped-call]  # torch has no annotations there.
        mask = mask.expand(shape)
        first = mask.reshape(-1, copies)[:, 0]
        rows = source.reshape(-1, copies)
        number = (first.to(torch.int64).cumsum(0) - 1).clamp(0, rows.shape[0] - 1)
        return torch.where(mask, rows.index_select(0, number).reshape(shape).to(x.dtype), x)

    return scatter


def _first_nonzero(x: Tensor, *, size: int, fill_value: int = -1) -> Tensor:
    flat = (x != 0).reshape(-1)
    # A stable sort keeps true entries in their order.
    order = flat.to(torch.uint8).sort(stable=True, descending=True).indices[:size]
    live = flat.index_select(0, order)
    steps = [math.prod(x.shape[n + 1 :]) for n in range(x.dim())]
    places = [order.div(step, rounding_mode="floor") % extent for step, extent in zip(steps, x.shape, strict=True)]
    positions = torch.where(live[:, None], torch.stack(places, 1), fill_value)
    missing = size - positions.shape[0]
    return torch.cat([positions, positions.new_full((missing, x.dim()), fill_value)]) if missing > 0 else positions

"""Ways to write the same routed block: how indices get from the top-k to the gather and to the scatter.

Shape legend: B rows, S tokens, K = S / 4 selected tokens, D features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from mod_dialects import D, Routed
from torch import Tensor
from torch.nn import functional as F

from mod_export.types import BY_POSITION, BY_SCORE

Block = Callable[[Tensor], Tensor]
Written = Callable[[Tensor, Tensor, Block], Tensor]
"""(x (B, S, D), scores (B, S), block) -> the residual stream (B, S, D)."""


def top(scores: Tensor) -> Tensor:
    """Indices (B, K) of the highest scores, in order of position."""
    return scores.topk(scores.shape[1] // 4, dim=1).indices.sort(dim=1).values


def wide(index: Tensor) -> Tensor:
    return index[..., None].expand(-1, -1, D)


def through(index: Tensor, x: Tensor, block: Block) -> Tensor:
    """Runs the block between `gather` and `scatter` at indices (B, K, D)."""
    return x.scatter(1, index, block(x.gather(1, index)))


# Indices that get another shape.


def broadcast_to(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    index = top(scores)
    return through(torch.broadcast_to(index[..., None], (*index.shape, D)), x, block)


def broadcast_tensors(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    index, _ = torch.broadcast_tensors(top(scores)[..., None], torch.zeros(D))
    return through(index, x, block)


def tile(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    return through(torch.tile(top(scores).unsqueeze(-1), (1, 1, D)), x, block)


def repeated(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    index = top(scores)
    return through(index.repeat_interleave(D).view(*index.shape, D), x, block)


def swapaxes(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    index = torch.swapaxes(top(scores)[:, None].expand(-1, D, -1), 1, 2)
    return through(index, x, block)


def swapdims(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    return through(top(scores)[:, None].repeat(1, D, 1).swapdims(-1, -2), x, block)


def matrix_transpose(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    return through(top(scores)[:, None].expand(-1, D, -1).mT, x, block)


def moveaxis(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    return through(torch.moveaxis(top(scores).expand(D, -1, -1), 0, -1), x, block)


def view_as(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    index = top(scores)
    return through(index.flatten().view_as(index).unsqueeze(-1).expand_as(x[:, : index.shape[1]]), x, block)


def reshape_as(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    index = top(scores)
    return through(wide(index).reshape(-1).reshape_as(x[:, : index.shape[1]]), x, block)


def ravel(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    index = top(scores)
    rows = torch.arange(len(x)).repeat_interleave(index.shape[1])
    out, at = x.clone(), index.ravel()
    out[rows, at] = block(x[rows, at].view(*index.shape, D)).view(-1, D)
    return out


def rolled(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    return through(wide(top(scores).roll(1, 1)), x, block)


def diagonal(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    return through(wide(torch.diag_embed(top(scores)).diagonal(dim1=-2, dim2=-1)), x, block)


def through_columns(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    index = wide(top(scores))
    return through(torch.stack([index[..., n] for n in range(D)], -1), x, block)


# Indices that are cut or reordered.


def narrow(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    order = scores.argsort(dim=1, descending=True)
    return through(wide(order.narrow(1, 0, scores.shape[1] // 4)), x, block)


def select_first(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    order = scores.sort(dim=1, descending=True).indices
    return through(wide(order.index_select(1, torch.arange(scores.shape[1] // 4))), x, block)


def split(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    k = scores.shape[1] // 4
    index, _ = scores.argsort(dim=1, descending=True).split([k, scores.shape[1] - k], 1)
    return through(wide(index), x, block)


def chunk(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    return through(wide(scores.argsort(dim=1, descending=True).chunk(4, 1)[0]), x, block)


def last_chunk(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    return through(wide(scores.argsort(dim=1).tensor_split(4, 1)[-1]), x, block)


def flipped(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    return through(wide(top(scores).flip(1).flip(1)), x, block)


def flipped_order(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    return through(wide(scores.argsort(dim=1).flip(1)[:, : scores.shape[1] // 4]), x, block)


def argsort_then_gather(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    index = scores.topk(scores.shape[1] // 4).indices
    return through(wide(index.gather(1, index.argsort(1))), x, block)


def argsort_then_take(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    index = scores.topk(scores.shape[1] // 4).indices
    return through(wide(torch.take_along_dim(index, index.argsort(1), 1)), x, block)


def negative_topk(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    index = scores.topk(scores.shape[1] // 4).indices
    return through(wide(-(-index).sort(dim=1, descending=True).values), x, block)


def kthvalues_of_indices(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    index = scores.topk(scores.shape[1] // 4).indices
    return through(wide(torch.stack([index.kthvalue(n + 1, 1).values for n in range(index.shape[1])], 1)), x, block)


# Arithmetic that does not change the indices, or that is undone.


def clamped(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    return through(wide(top(scores).clamp(0, scores.shape[1] - 1)), x, block)


def bounded(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    index = torch.minimum(top(scores).clamp_min(0), torch.tensor(scores.shape[1] - 1))
    return through(wide(index), x, block)


def where(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    index = top(scores)
    return through(wide(torch.where(index >= 0, index, 0)), x, block)


def masked_filled(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    index = top(scores)
    return through(wide(index.masked_fill(index < 0, 0)), x, block)


def remainder(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    return through(wide((top(scores) + scores.shape[1]) % scores.shape[1]), x, block)


def divided(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    index = top(scores) * 4 + 3
    return through(wide(torch.div(index, 4, rounding_mode="floor")), x, block)


def shifted_back(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    return through(wide((top(scores) + 1).abs() - 1), x, block)


def as_int32(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    return through(wide(top(scores).int().float().round().long()), x, block)


def out_of_place_copy(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    index = top(scores)
    buffer = torch.zeros_like(index)
    buffer.copy_(index)
    return through(wide(buffer), x, block)


def written_by_slices(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    index = top(scores)
    buffer = torch.zeros(*index.shape, D, dtype=torch.int64)
    buffer[:, :, :] = index[..., None]
    return through(buffer, x, block)


# Other ways to read tokens and to write results.


def take(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    B, S, _ = x.shape
    flat = (wide(top(scores)) + S * torch.arange(B)[:, None, None]) * D + torch.arange(D)
    y = block(torch.take(x, flat))
    return torch.put(x, flat, y)


def identity_rows(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    one_hot = torch.eye(x.shape[1])[top(scores)]
    y = block(one_hot @ x)
    return x + one_hot.mT @ (y - one_hot @ x)


def scattered_rows(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    index = top(scores)
    one_hot = torch.zeros(*index.shape, x.shape[1]).scatter(2, index[..., None], 1.0)
    return x + torch.bmm(one_hot.transpose(1, 2), block(torch.bmm(one_hot, x)))


def equal_rows(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    one_hot = torch.eq(top(scores)[:, :, None], torch.arange(x.shape[1])).to(x)
    return x + torch.einsum("bks,bkd->bsd", one_hot, block(torch.einsum("bks,bsd->bkd", one_hot, x)))


def indexed_by_lists(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    index = top(scores)
    at = [torch.arange(len(x))[:, None], index]
    return torch.index_put(x, at, block(x[at[0], at[1]]))


def mapped_over_rows(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    """The operators that `torch.vmap` of `row[index]` becomes."""
    index = top(scores)
    rows = torch.arange(len(x)).view(-1, 1).expand_as(index)
    return x.index_put((rows, index), block(x[rows, index]))


def every_index(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    at = torch.arange(len(x))[:, None, None], wide(top(scores)), torch.arange(D)
    return x.index_put(at, block(x[at]))


def filled_and_added(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    index = wide(top(scores))
    return x.scatter(1, index, 0.0) + torch.zeros_like(x).scatter_add(1, index, block(x.gather(1, index)))


def mean_of_both(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    index = wide(top(scores))
    return x.scatter_reduce(1, index, block(x.gather(1, index)), "amax")


def halved(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    B, S, _ = x.shape
    index = top(scores)
    flat = (index + S * torch.arange(B)[:, None]).flatten()
    rows = x.reshape(-1, D)
    return rows.index_add(0, flat, block(rows[flat].view(*index.shape, D)).view(-1, D), alpha=0.5).view(x.shape)


def masked(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    """Writes results, in order of position, where the mask of the selected tokens is true."""
    index = top(scores)
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter(1, index, True)
    place = mask.long().cumsum(1) - 1
    y = block(x.gather(1, wide(index)))
    return torch.where(mask[..., None], y.gather(1, wide(place.clamp(0))), x)


def by_heads(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    """Reads the heads of the tokens one by one."""
    index = top(scores)
    chosen = torch.cat([part.gather(1, index[..., None].expand(-1, -1, D // 2)) for part in x.chunk(2, -1)], -1)
    return x.scatter(1, wide(index), block(chosen))


def heads_apart(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    B, S, _ = x.shape
    index = top(scores)
    heads = x.view(B, S, 2, D // 2).transpose(1, 2)
    chosen = heads.gather(2, index[:, None, :, None].expand(-1, 2, -1, D // 2)).transpose(1, 2).reshape(B, -1, D)
    return x.scatter(1, wide(index), block(chosen))


# Permutations of all tokens, of which only the selected ones run.


def order_and_inverse(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    order, k = scores.argsort(1, descending=True), scores.shape[1] // 4
    packed = torch.take_along_dim(x, order[..., None], 1)
    return torch.take_along_dim(torch.cat([block(packed[:, :k]), packed[:, k:]], 1), order.argsort(1)[..., None], 1)


def order_scattered(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    order, k = scores.argsort(1, descending=True), scores.shape[1] // 4
    packed = x.gather(1, wide(order))
    return torch.empty_like(x).scatter(1, wide(order), torch.cat([block(packed[:, :k]), packed[:, k:]], 1))


def order_from_the_end(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    order, k = scores.sort(1).indices, scores.shape[1] // 4
    rest, chosen = x.gather(1, wide(order)).split([scores.shape[1] - k, k], 1)
    return torch.cat([rest, block(chosen)], 1).gather(1, wide(order.argsort(1)))


def two_parts(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    order, k, rows = scores.argsort(1, descending=True), scores.shape[1] // 4, torch.arange(len(x))[:, None]
    both = torch.cat([block(x[rows, order[:, :k]]), x[rows, order[:, k:]]], 1)
    return both[rows, order.argsort(1)]


def inverse_by_scatter(x: Tensor, scores: Tensor, block: Block) -> Tensor:
    order, k = scores.argsort(1, descending=True), scores.shape[1] // 4
    places = torch.arange(scores.shape[1]).expand_as(order)
    inverse = torch.empty_like(order).scatter_(1, order, places)
    packed = x.gather(1, wide(order))
    packed = torch.cat([block(packed[:, :k]), packed[:, k:]], 1)
    return packed.gather(1, wide(inverse))


class Way(NamedTuple):
    """A way to write the block, and the order in which its selected tokens run."""

    written: Written
    rule: str = BY_POSITION


WAYS = [
    Way(function)
    for function in (
        broadcast_to, broadcast_tensors, tile, repeated, swapaxes, swapdims, matrix_transpose, moveaxis, view_as,
        reshape_as, ravel, diagonal, through_columns, flipped, argsort_then_gather, argsort_then_take, negative_topk,
        kthvalues_of_indices, clamped, bounded, where, masked_filled, remainder, divided, shifted_back, as_int32,
        out_of_place_copy, written_by_slices, take, identity_rows, scattered_rows, equal_rows, indexed_by_lists,
        mapped_over_rows, every_index, filled_and_added, mean_of_both, halved, masked, by_heads, heads_apart,
    )
] + [
    Way(function, BY_SCORE)
    for function in (
        rolled, narrow, select_first, split, chunk, last_chunk, flipped_order, order_and_inverse, order_scattered,
        order_from_the_end, two_parts, inverse_by_scatter,
    )
]  # fmt: skip


def routed_by(written: Written) -> type[Routed]:
    """Class of a routed block that is written in this way."""

    class Ways(Routed):
        def forward(self, x: Tensor) -> Tensor:
            return written(x, self.router(x)[..., 0], lambda chosen: F.dropout(self.block(chosen), 0.1, self.training))

    return Ways

"""Routed blocks that select, gather and write back in the styles of public code.

Shape legend: B rows, S tokens, K selected tokens, D features.
"""

from __future__ import annotations

import torch
from mod_dialects import D, Inner, Routed
from torch import Tensor, nn
from torch.nn import functional as F


class TakeAlong(Routed):
    """Reads with `take_along_dim`, and writes back with `where` on the sum of one-hot rows."""

    def forward(self, x: Tensor) -> Tensor:
        gate, index = torch.topk(self.router(x).squeeze(-1), max(1, round(x.shape[1] * 0.25)), dim=-1)
        index = torch.sort(index, dim=-1)[0]
        gate = torch.sigmoid(torch.take_along_dim(self.router(x), index.unsqueeze(-1), dim=1))
        y = self.block(torch.take_along_dim(x, index.unsqueeze(-1), dim=1)) * gate
        one_hot = F.one_hot(index, num_classes=x.shape[1]).to(x.dtype)
        return torch.where(one_hot.sum(1).unsqueeze(-1) > 0, torch.einsum("bks,bkd->bsd", one_hot, y), x)


class IndexCopy(Routed):
    """Indices into the flattened batch, `index_select` and `index_copy`."""

    def forward(self, x: Tensor) -> Tensor:
        B, S, _ = x.shape
        index = self.router(x).flatten(1).topk(S // 4, dim=1).indices.sort(dim=1).values
        flat = (index + S * torch.arange(B).unsqueeze(1)).flatten()
        rows = x.flatten(0, 1)
        y = self.block(torch.index_select(rows, 0, flat).unflatten(0, (B, -1)))
        return torch.index_copy(rows, 0, flat, y.flatten(0, 1)).unflatten(0, (B, S))


class ScatterReduce(Routed):
    """Scores (B, 1, S) from a convolution; `scatter_reduce` adds the change that the block makes."""

    def forward(self, x: Tensor) -> Tensor:
        score = F.conv1d(x.transpose(1, 2), self.router.weight.unsqueeze(-1))
        weight, index = score.topk(x.shape[1] // 4, dim=-1)
        index = index.transpose(1, 2).expand(-1, -1, x.size(-1))
        chosen = torch.gather(x, 1, index)
        delta = (self.block(chosen) - chosen) * weight.transpose(1, 2).softmax(1)
        return x.scatter_reduce(1, index, delta, reduce="sum", include_self=True)


class PutAccumulate(Routed):
    """`index_put_` accumulates into a clone."""

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0]).view(-1, 1)
        gate, index = torch.topk(self.router(x).view(x.shape[0], -1), x.shape[1] // 4)
        out = x.clone()
        out.index_put_((rows, index), self.block(x[rows, index]) * gate.unsqueeze(-1), accumulate=True)
        return out


class SortedPut(Routed):
    """The head of an `argsort`; `out[rows, index] = ...` writes into zeros, which are then added."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.router(x).squeeze(-1).softmax(1)
        index = weight.argsort(dim=1, descending=True)[:, : x.shape[1] // 4]
        rows = torch.arange(x.shape[0]).unsqueeze(1)
        out = torch.zeros_like(x)
        out[rows, index] = self.block(x[rows, index]) * weight[rows, index].unsqueeze(-1)
        return x + out


class PutInPlace(Routed):
    """`out[rows, index] += y`, with row numbers from `expand_as`."""

    def forward(self, x: Tensor) -> Tensor:
        index, _ = torch.topk(self.router(x)[:, :, 0], int(0.25 * x.shape[1]), sorted=False)[1].sort()
        rows = torch.arange(x.shape[0])[:, None].expand_as(index)
        out = x.clone()
        out[rows, index] += self.block(x[rows, index]) * 0.5
        return out


class Embedding(Routed):
    """Reads rows with `F.embedding`, scatters into zeros in place, and adds the residual at the end."""

    def forward(self, x: Tensor) -> Tensor:
        B, S, D = x.shape
        _, index = self.router(x).squeeze(2).sigmoid().topk(S // 4, dim=1)
        flat = index + torch.arange(B)[:, None] * S
        y = self.block(F.embedding(flat, x.reshape(-1, D)))
        return x + torch.zeros_like(x).scatter_(1, index[..., None].expand_as(y), y)


class RowLoop(Routed):
    """A loop over the rows of the batch, which the export unrolls."""

    def forward(self, x: Tensor) -> Tensor:
        index = self.router(x)[..., 0].topk(x.shape[1] // 4).indices.sort(-1).values
        out = x.clone()
        for b in range(x.shape[0]):
            out[b, index[b]] = self.block(x[b, index[b]].unsqueeze(0)).squeeze(0)
        return out


class Compared(Routed):
    """One-hot rows from a comparison of the indices with all positions."""

    def forward(self, x: Tensor) -> Tensor:
        index = self.router(x)[..., 0].topk(x.shape[1] // 4).indices
        one_hot = (index.unsqueeze(-1) == torch.arange(x.shape[1])).type_as(x)
        return x + torch.einsum("bks,bkd->bsd", one_hot, self.block(torch.einsum("bks,bsd->bkd", one_hot, x)))


class MaskOrder(Routed):
    """A stable sort of the mask of selected tokens gives the indices in order of position."""

    dtype = torch.long

    def forward(self, x: Tensor) -> Tensor:
        S = x.shape[1]
        index = self.router(x)[..., 0].topk(S // 4).indices
        mask = torch.zeros(x.shape[:2], dtype=self.dtype).scatter(1, index, 1)
        index = torch.argsort(mask, dim=1, descending=True, stable=True)[:, : S // 4]
        wide = index.unsqueeze(-1).repeat(1, 1, x.shape[-1])
        return x.scatter(1, wide, self.block(x.gather(1, wide)))


class BoolOrder(MaskOrder):
    dtype = torch.bool


class EncoderLayer(nn.Module):
    """Selection around PyTorch's own `nn.TransformerEncoderLayer`."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.layer = nn.Linear(D, 1), nn.TransformerEncoderLayer(D, 2, 32, 0.1, "gelu", batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        score = self.router(x).squeeze(-1)
        index = score.argsort(dim=-1, descending=True)[:, : x.shape[1] // 4]
        index, _ = index.sort()
        gather = index.unsqueeze(-1).expand(-1, -1, x.size(-1))
        return x.scatter(1, gather, self.layer(x.gather(1, gather), is_causal=False))


class Stacked(Routed):
    """Splits the batch, indexes its rows one by one, and stacks them again."""

    def forward(self, x: Tensor) -> Tensor:
        index = torch.topk(self.router(x).squeeze(-1), max(1, round(x.shape[1] * 0.25))).indices.sort().values
        y = self.block(torch.stack([row.index_select(0, index[b]) for b, row in enumerate(x)]))
        return torch.stack([row.index_copy(0, index[b], y[b]) for b, row in enumerate(x)])


class Region(nn.Module):
    """Selects among tokens 3 to 12 by their norm; the head of the sort is sliced twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Inner()

    def forward(self, x: Tensor) -> Tensor:
        order = torch.sort(x[:, 3:13].norm(dim=-1), dim=1, descending=True)[1]
        rows, out = torch.arange(x.shape[0])[:, None], x.clone()
        out[rows, order[:, :4] + 3] = self.block(x[rows, order[:, :4] + 3])
        return out


class FirstTokens(Routed):
    """Selects among the first 10 tokens, such as patches before a text; `repeat` widens the indices."""

    def forward(self, x: Tensor) -> Tensor:
        gate, index = torch.topk(self.router(x[:, :10]).squeeze(-1), 4)
        wide = index.unsqueeze(-1).repeat(1, 1, x.shape[2])
        return torch.scatter_add(x, 1, wide, self.block(x.gather(1, wide)) * gate.tanh().unsqueeze(-1))


class WeightedRows(Routed):
    """One-hot rows dispatch the tokens; the same rows times the gates combine the results."""

    def forward(self, x: Tensor) -> Tensor:
        gate, index = torch.topk(torch.einsum("bsd,d->bs", x, self.router.weight[0]), x.shape[1] // 4, dim=-1)
        dispatch = F.one_hot(index, x.shape[1]).type_as(x)
        combine = dispatch * gate.softmax(-1)[..., None]
        chosen = torch.einsum("bks,bsd->bkd", dispatch, x)
        return x + torch.einsum("bks,bkd->bsd", combine, self.block(chosen) - chosen)


class AdditiveMask(nn.Module):
    """`nn.MultiheadAttention` with an additive mask of minus infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.norm = nn.Sequential(nn.Linear(D, 8), nn.GELU(), nn.Linear(8, 1)), nn.LayerNorm(D)
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        k = int(x.shape[1] * 0.25)
        score, index = self.router(x).squeeze(-1).float().topk(k)
        index, order = index.sort()
        chosen = torch.gather(x, 1, index.unsqueeze(2).expand(index.shape[0], index.shape[1], x.shape[2]))
        mask, h = torch.triu(torch.full((k, k), float("-inf")), diagonal=1), self.norm(chosen)
        delta = self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        delta = delta * torch.tanh(score.gather(-1, order))[..., None]
        rows = torch.arange(x.shape[0])[:, None].expand_as(index)
        return x.index_put((rows, index), delta, accumulate=True)


class AllKeys(Routed):
    """The selected tokens attend to all tokens of the row, each under its own row of the causal mask."""

    def forward(self, x: Tensor) -> Tensor:
        index = self.router(x).squeeze(-1).topk(x.shape[1] // 4).indices.sort().values
        wide = index[..., None].expand(-1, -1, D)
        query, seen = x.gather(1, wide), torch.arange(x.shape[1]) <= index[..., None]
        y = F.scaled_dot_product_attention(query[:, None], x[:, None], x[:, None], attn_mask=seen[:, None])[:, 0]
        return x.scatter(1, wide, self.block.down(F.gelu(self.block.up(y))) + query)

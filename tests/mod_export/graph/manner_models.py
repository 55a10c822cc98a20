"""Routed models with other layouts or several levels, for images, and in the style of transformers.

Shape legend: B rows, S tokens, K selected tokens, D features.
"""

from __future__ import annotations

import math

import torch
from mod_dialects import D, Inner, Routed, V
from torch import Tensor, nn
from torch.nn import functional as F


class TwoRouters(nn.Module):
    """Attention and MLP are routed separately, each in its own module."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = (
            Half(nn.Identity()),
            Half(nn.Sequential(nn.Linear(D, 32), nn.GELU(), nn.Linear(32, D))),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attention(x))


class Half(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.router, self.norm = nn.Linear(D, 1), nn.LayerNorm(D)
        self.inner = nn.MultiheadAttention(D, 2, batch_first=True) if isinstance(inner, nn.Identity) else inner

    def forward(self, x: Tensor) -> Tensor:
        gate, index = self.router(x).topk(x.shape[1] // 4, dim=1)
        index = index.expand(-1, -1, x.shape[-1])
        h = self.norm(x.gather(1, index))
        h = (
            self.inner(h, h, h, need_weights=False)[0]
            if isinstance(self.inner, nn.MultiheadAttention)
            else self.inner(h)
        )
        return x.scatter_add(1, index, h * gate.tanh())


class Nested(nn.Module):
    """Each recursion selects among the tokens selected before, and writes back level by level."""

    def __init__(self) -> None:
        super().__init__()
        self.routers = nn.ModuleList([nn.Linear(D, 1) for _ in range(2)])
        self.block = Inner()

    def forward(self, x: Tensor, depth: int = 0) -> Tensor:
        x = self.block(x)
        if depth == len(self.routers):
            return x
        index = self.routers[depth](x).topk(x.shape[1] // 2, dim=1).indices.sort(1).values
        index = index.expand(-1, -1, D)
        return x.scatter(1, index, self.forward(x.gather(1, index), depth + 1))


class Recursions(nn.Module):
    """As in Mixture-of-Recursions: each step selects among the previous selection; indices refer to the whole row."""

    def __init__(self) -> None:
        super().__init__()
        self.routers = nn.ModuleList([nn.Linear(D, 1, bias=False) for _ in range(3)])
        self.block = Inner()

    def forward(self, x: Tensor) -> Tensor:
        previous, size = None, x.shape[1]
        for router, share in zip(self.routers, (0.75, 0.5, 0.25), strict=True):
            seen = x if previous is None else torch.gather(x, 1, previous.expand(-1, -1, D))
            weight = torch.sigmoid(router(seen)) * 0.1
            _, inner = torch.topk(weight, int(size * share), dim=1, sorted=False)
            inner, _ = torch.sort(inner, dim=1)
            index = inner if previous is None else torch.gather(previous, 1, inner)
            wide = index.expand(-1, -1, D)
            y = self.block(torch.gather(x, 1, wide)) * torch.gather(weight, 1, inner)
            x = torch.scatter_add(x, 1, wide, y)
            previous = index
        return x


class SequenceFirst(nn.Module):
    """Tensors are (S, B, D), and tokens are selected along the first dimension."""

    def __init__(self, flat: bool = False) -> None:
        super().__init__()
        self.router, self.norm, self.flat = nn.Linear(D, 1), nn.LayerNorm(D), flat
        self.attention = nn.MultiheadAttention(D, 2)
        self.mlp = nn.Sequential(nn.Linear(D, 32), nn.GELU(), nn.Linear(32, D))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        score = self.router(x)
        score = score.squeeze(-1) if self.flat else score
        gate, index = torch.topk(score, x.shape[0] // 4, dim=0)
        wide = (index.unsqueeze(-1) if self.flat else index).expand(-1, -1, x.shape[2])
        h = self.norm(x.gather(0, wide))
        h = h + self.attention(h, h, h)[0]
        h = self.mlp(h) * gate.reshape(h.shape[0], h.shape[1], 1)
        return torch.scatter_add(x, 0, wide, h).transpose(0, 1)


class SequenceFirstFlat(SequenceFirst):
    """Like `SequenceFirst`, with scores (S, B)."""

    def __init__(self) -> None:
        super().__init__(flat=True)


class FlatBatch(Routed):
    """One top-k over the tokens of all rows."""

    def forward(self, x: Tensor) -> Tensor:
        B, S, D = x.shape
        rows = x.reshape(B * S, D)
        gate, index = torch.topk(self.router(rows).squeeze(-1), B * S // 4)
        y = self.block(rows[index].unsqueeze(0)).squeeze(0) * gate.sigmoid().unsqueeze(-1)
        return rows.index_add(0, index, y).view(B, S, D)


class SharedIndex(nn.Module):
    """Several layers use the selection of one router."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.layers = nn.Linear(D, 1), nn.ModuleList([Inner(), Inner()])

    def forward(self, x: Tensor) -> Tensor:
        index = self.router(x).topk(x.shape[1] // 4, dim=1).indices.sort(1).values.expand(-1, -1, D)
        for layer in self.layers:
            x = x.scatter(1, index, layer(x.gather(1, index)))
        return x


class Patches(nn.Module):
    """An image classifier with a class token; a block keeps the shape (B, 1 + T, D) or returns fewer tokens."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.patch, self.cls = nn.Conv2d(3, D, 4, 4), nn.Parameter(torch.randn(1, 1, D))
        self.position = nn.Parameter(torch.randn(1, 17, D))
        self.blocks, self.norm, self.head = nn.ModuleList(blocks), nn.LayerNorm(D), nn.Linear(D, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class ClassApart(Routed):
    """Only patches are selected; the class token always runs with them."""

    def forward(self, x: Tensor) -> Tensor:
        first, patches = x[:, :1], x[:, 1:]
        index = self.router(patches).squeeze(-1).topk(patches.shape[1] // 4).indices.sort().values
        wide = index[..., None].expand(-1, -1, x.shape[-1])
        y = self.block(torch.cat([first, patches.gather(1, wide)], 1))
        return torch.cat([y[:, :1], patches.scatter(1, wide, y[:, 1:])], 1)


class ClassShifted(Routed):
    """Indices of patches are shifted by one, and index 0 of the class token is prepended."""

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        index = self.router(x[:, 1:]).squeeze(-1).topk((T - 1) // 4).indices
        index = torch.cat([torch.zeros(B, 1, dtype=torch.long), index + 1], 1)
        wide = index.unsqueeze(-1).expand(-1, -1, D)
        return x.scatter(1, wide, self.block(x.gather(1, wide)))


class ClassForced(Routed):
    """The class token is selected because its score is infinite."""

    def forward(self, x: Tensor) -> Tensor:
        score = self.router(x).squeeze(-1)
        score = torch.cat([torch.full_like(score[:, :1], float("inf")), score[:, 1:]], 1)
        index = score.topk(5).indices
        rows = torch.arange(x.shape[0]).unsqueeze(1)
        out = x.clone()
        out[rows, index] = self.block(x[rows, index])
        return out


class Pruned(Routed):
    """Half of the patches continue; the others are dropped."""

    def forward(self, x: Tensor) -> Tensor:
        first, patches = x[:, :1], x[:, 1:]
        score = self.router(patches).squeeze(-1)
        index = score.topk(patches.shape[1] // 2, dim=1).indices
        patches = patches.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        return self.block(torch.cat([first, patches], dim=1))


class TopLevel(nn.Module):
    """All routing is in the model's own `forward`; a mask of zeros and ones keeps the skipped tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.h, self.head = nn.Embedding(V, D), nn.ModuleList([Inner() for _ in range(4)]), nn.Linear(D, V)
        self.routers = nn.ModuleDict({"1": nn.Linear(D, 1), "3": nn.Linear(D, 1)})

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        for number, block in enumerate(self.h):
            if str(number) not in self.routers:
                x = block(x)
                continue
            score = self.routers[str(number)](x)[..., 0]
            index = score.topk(round(x.shape[1] * 0.25))[1].sort(-1)[0]
            kept = torch.zeros_like(score).scatter(1, index, 1.0)[..., None]
            y = block(x.gather(1, index[..., None].expand(*index.shape, D)))
            y = y * score.gather(1, index).sigmoid()[..., None]
            x = x * (1 - kept) + torch.zeros_like(x).scatter_add_(1, index[..., None].expand_as(y), y)
        return self.head(x)


class ChannelsFirst(Routed):
    """Tensors are (B, D, S), and tokens are selected along the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        c = x.transpose(1, 2)
        gate, index = F.conv1d(c, self.router.weight[..., None]).topk(c.shape[-1] // 4, dim=2)
        index = index.expand(-1, c.shape[1], -1)
        y = self.block(c.gather(2, index).transpose(1, 2)).transpose(1, 2)
        return (c + torch.zeros_like(c).scatter_(2, index, y * gate.sigmoid())).transpose(1, 2)


class Rms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(D) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def _rotate_half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


class Written(nn.Module):
    """A layer as in transformers' eager mode: RoPE by `rotate_half`, repeated keys, attention in basic operators."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.k, self.v = nn.Linear(D, D // 2, bias=False), nn.Linear(D, D // 2, bias=False)
        self.gate, self.up, self.down = nn.Linear(D, 32), nn.Linear(D, 32), nn.Linear(32, D)
        self.norm, self.norm_2 = Rms(), Rms()

    def forward(self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, S, _ = x.shape
        h = self.norm(x)
        q, k, v = (one(h).view(B, S, -1, 4).transpose(1, 2) for one in (self.q, self.k, self.v))
        q, k = ((one * cos) + (_rotate_half(one) * sin) for one in (q, k))
        k, v = (one[:, :, None].expand(B, 2, 2, S, 4).reshape(B, 4, S, 4) for one in (k, v))
        weight = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(4) + mask
        attended = torch.matmul(F.softmax(weight, dim=-1, dtype=torch.float32).to(q.dtype), v)
        x = x + self.o(attended.transpose(1, 2).contiguous().reshape(B, S, -1))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Transformers(nn.Module):
    """Selected tokens keep their own rotary angles, and their rows and columns of the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(V, D), Rms(), nn.Linear(D, V, bias=False)
        self.layers = nn.ModuleList([Written() for _ in range(3)])
        self.layers[1].router = nn.Linear(D, 1, bias=False)
        self.register_buffer("frequency", 1.0 / (10000 ** (torch.arange(0, 4, 2).float() / 4)), persistent=False)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        frequency = self.frequency[None, :, None].expand(positions.shape[0], -1, 1)
        turns = (frequency @ positions[:, None, :].float()).transpose(1, 2)
        turns = torch.cat((turns, turns), dim=-1)
        return turns.cos().unsqueeze(1), turns.sin().unsqueeze(1)

    def forward(self, ids: Tensor) -> Tensor:
        x, (B, S) = self.embedding(ids), ids.shape
        positions = torch.arange(S).unsqueeze(0).expand(B, -1)
        mask = torch.full((S, S), torch.finfo(x.dtype).min).triu(1)[None, None].expand(B, 1, -1, -1)
        for layer in self.layers:
            if not hasattr(layer, "router"):
                x = layer(x, mask, *self.angles(positions))
                continue
            weight, index = torch.topk(layer.router(x).squeeze(-1), max(1, int(0.25 * S)), dim=1, sorted=False)
            index, order = torch.sort(index, dim=1)
            rows = torch.arange(B).unsqueeze(1)
            selected_mask = mask[rows[:, :, None], 0, index[:, :, None], index[:, None, :]].unsqueeze(1)
            y = layer(x[rows, index], selected_mask, *self.angles(torch.gather(positions, 1, index)))
            out = x.clone()
            out[rows, index] = y * torch.gather(weight, 1, order).unsqueeze(-1)
            x = out
        return self.head(self.norm(x))

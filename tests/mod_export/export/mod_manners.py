"""Further manners of Mixture-of-Depths, as whole models: other layouts, shared and nested selections, images, pruning.

Shape legend: B rows, S tokens, K selected ones, D features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir
import torch
from mod_dialects import D, Inner, Model, Routed, V
from torch import Tensor, nn
from torch.nn import functional as F

from mod_export.export.capture import captured
from mod_export.export.onnx_export import onnx_from_captured
from mod_export.export.passes import PORTABLE, run_passes
from mod_export.export.routing_sites import RoutingSite
from mod_export.export.weights import state_of
from mod_export.types import BY_POSITION, BY_SCORE

B, S, K = 2, 16, 4


class TakeAlong(Routed):
    """`take_along_dim`, put back by `where` on the sum of one-hot rows."""

    def forward(self, x: Tensor) -> Tensor:
        gate, index = torch.topk(self.router(x).squeeze(-1), max(1, round(x.shape[1] * 0.25)), dim=-1)
        index = torch.sort(index, dim=-1)[0]
        gate = torch.sigmoid(torch.take_along_dim(self.router(x), index.unsqueeze(-1), dim=1))
        y = self.block(torch.take_along_dim(x, index.unsqueeze(-1), dim=1)) * gate
        one_hot = F.one_hot(index, num_classes=x.shape[1]).to(x.dtype)
        return torch.where(one_hot.sum(1).unsqueeze(-1) > 0, torch.einsum("bks,bkd->bsd", one_hot, y), x)


class IndexCopy(Routed):
    """Flat indices by arithmetic on the batch, `index_select`, `index_copy`."""

    def forward(self, x: Tensor) -> Tensor:
        B, S, _ = x.shape
        index = self.router(x).flatten(1).topk(S // 4, dim=1).indices.sort(dim=1).values
        flat = (index + S * torch.arange(B).unsqueeze(1)).flatten()
        rows = x.flatten(0, 1)
        y = self.block(torch.index_select(rows, 0, flat).unflatten(0, (B, -1)))
        return torch.index_copy(rows, 0, flat, y.flatten(0, 1)).unflatten(0, (B, S))


class ScatterReduce(Routed):
    """Scores (B, 1, S) of a convolution, `scatter_reduce` of what the block adds."""

    def forward(self, x: Tensor) -> Tensor:
        score = F.conv1d(x.transpose(1, 2), self.router.weight.unsqueeze(-1))
        weight, index = score.topk(x.shape[1] // 4, dim=-1)
        index = index.transpose(1, 2).expand(-1, -1, x.size(-1))
        chosen = torch.gather(x, 1, index)
        delta = (self.block(chosen) - chosen) * weight.transpose(1, 2).softmax(1)
        return x.scatter_reduce(1, index, delta, reduce="sum", include_self=True)


class PutAccumulate(Routed):
    """`index_put_` that accumulates, on a clone."""

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0]).view(-1, 1)
        gate, index = torch.topk(self.router(x).view(x.shape[0], -1), x.shape[1] // 4)
        out = x.clone()
        out.index_put_((rows, index), self.block(x[rows, index]) * gate.unsqueeze(-1), accumulate=True)
        return out


class PutInPlace(Routed):
    """`out[rows, index] += y`, with `expand_as` rows."""

    def forward(self, x: Tensor) -> Tensor:
        index, _ = torch.topk(self.router(x)[:, :, 0], int(0.25 * x.shape[1]), sorted=False)[1].sort()
        rows = torch.arange(x.shape[0])[:, None].expand_as(index)
        out = x.clone()
        out[rows, index] += self.block(x[rows, index]) * 0.5
        return out


class Embedding(Routed):
    """Rows looked up as if in a table, added onto zeros in place, and the residual outside."""

    def forward(self, x: Tensor) -> Tensor:
        B, S, D = x.shape
        _, index = self.router(x).squeeze(2).sigmoid().topk(S // 4, dim=1)
        flat = index + torch.arange(B)[:, None] * S
        y = self.block(F.embedding(flat, x.reshape(-1, D)))
        return x + torch.zeros_like(x).scatter_(1, index[..., None].expand_as(y), y)


class RowLoop(Routed):
    """A loop over the rows of the batch, which unrolls."""

    def forward(self, x: Tensor) -> Tensor:
        index = self.router(x)[..., 0].topk(x.shape[1] // 4).indices.sort(-1).values
        out = x.clone()
        for b in range(x.shape[0]):
            out[b, index[b]] = self.block(x[b, index[b]].unsqueeze(0)).squeeze(0)
        return out


class Compared(Routed):
    """One-hot rows by a comparison with all positions."""

    def forward(self, x: Tensor) -> Tensor:
        index = self.router(x)[..., 0].topk(x.shape[1] // 4).indices
        one_hot = (index.unsqueeze(-1) == torch.arange(x.shape[1])).type_as(x)
        return x + torch.einsum("bks,bkd->bsd", one_hot, self.block(torch.einsum("bks,bsd->bkd", one_hot, x)))


class MaskOrder(Routed):
    """The order of positions from a stable sort of the mask of selected tokens."""

    def forward(self, x: Tensor) -> Tensor:
        S = x.shape[1]
        index = self.router(x)[..., 0].topk(S // 4).indices
        mask = torch.zeros(x.shape[:2], dtype=torch.long).scatter(1, index, 1)
        index = torch.argsort(mask, dim=1, descending=True, stable=True)[:, : S // 4]
        wide = index.unsqueeze(-1).repeat(1, 1, x.shape[-1])
        return x.scatter(1, wide, self.block(x.gather(1, wide)))


class TwoRouters(nn.Module):
    """Attention and MLP are routed apart, each by a module of its own."""

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
    """Each recursion selects among the tokens selected before, and puts back level by level."""

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
    """As in Mixture-of-Recursions: positions are those of the whole row, selected among the ones before."""

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
    """(S, B, D) throughout, selected along the first dimension."""

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
    """The same with scores (S, B)."""

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
    """One router, whose selection several layers use."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.layers = nn.Linear(D, 1), nn.ModuleList([Inner(), Inner()])

    def forward(self, x: Tensor) -> Tensor:
        index = self.router(x).topk(x.shape[1] // 4, dim=1).indices.sort(1).values.expand(-1, -1, D)
        for layer in self.layers:
            x = x.scatter(1, index, layer(x.gather(1, index)))
        return x


class EncoderLayer(nn.Module):
    """A layer of PyTorch's own around which tokens are selected."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.layer = nn.Linear(D, 1), nn.TransformerEncoderLayer(D, 2, 32, 0.1, "gelu", batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        score = self.router(x).squeeze(-1)
        index = score.argsort(dim=-1, descending=True)[:, : x.shape[1] // 4]
        index, _ = index.sort()
        gather = index.unsqueeze(-1).expand(-1, -1, x.size(-1))
        return x.scatter(1, gather, self.layer(x.gather(1, gather), is_causal=False))


class Patches(nn.Module):
    """An image classifier with a class token; `block` maps (B, 1 + T, D) to itself, or to fewer tokens."""

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
    """The class token is set aside while patches are selected, and runs with them."""

    def forward(self, x: Tensor) -> Tensor:
        first, patches = x[:, :1], x[:, 1:]
        index = self.router(patches).squeeze(-1).topk(patches.shape[1] // 4).indices.sort().values
        wide = index[..., None].expand(-1, -1, x.shape[-1])
        y = self.block(torch.cat([first, patches.gather(1, wide)], 1))
        return torch.cat([y[:, :1], patches.scatter(1, wide, y[:, 1:])], 1)


class ClassShifted(Routed):
    """Positions of patches shifted by one, and the class token's before them."""

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
    """Half of the patches go on; the others are gone."""

    def forward(self, x: Tensor) -> Tensor:
        first, patches = x[:, :1], x[:, 1:]
        score = self.router(patches).squeeze(-1)
        index = score.topk(patches.shape[1] // 2, dim=1).indices
        patches = patches.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        return self.block(torch.cat([first, patches], dim=1))


class TopLevel(nn.Module):
    """Everything in the forward pass of the whole model; skipped tokens by a mask of zeros and ones."""

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


class Stacked(Routed):
    """Rows taken apart, selected from one by one, and stacked again."""

    def forward(self, x: Tensor) -> Tensor:
        index = torch.topk(self.router(x).squeeze(-1), max(1, round(x.shape[1] * 0.25))).indices.sort().values
        y = self.block(torch.stack([row.index_select(0, index[b]) for b, row in enumerate(x)]))
        return torch.stack([row.index_copy(0, index[b], y[b]) for b, row in enumerate(x)])


class ChannelsFirst(Routed):
    """(B, D, S), selected along the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        c = x.transpose(1, 2)
        gate, index = F.conv1d(c, self.router.weight[..., None]).topk(c.shape[-1] // 4, dim=2)
        index = index.expand(-1, c.shape[1], -1)
        y = self.block(c.gather(2, index).transpose(1, 2)).transpose(1, 2)
        return (c + torch.zeros_like(c).scatter_(2, index, y * gate.sigmoid())).transpose(1, 2)


class Region(nn.Module):
    """Tokens 3 to 12 are selected from, by their norm; the head of the sort is taken twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Inner()

    def forward(self, x: Tensor) -> Tensor:
        order = torch.sort(x[:, 3:13].norm(dim=-1), dim=1, descending=True)[1]
        rows, out = torch.arange(x.shape[0])[:, None], x.clone()
        out[rows, order[:, :4] + 3] = self.block(x[rows, order[:, :4] + 3])
        return out


class WeightedRows(Routed):
    """One-hot rows that dispatch, and the same multiplied with the gates that combine."""

    def forward(self, x: Tensor) -> Tensor:
        gate, index = torch.topk(torch.einsum("bsd,d->bs", x, self.router.weight[0]), x.shape[1] // 4, dim=-1)
        dispatch = F.one_hot(index, x.shape[1]).type_as(x)
        combine = dispatch * gate.softmax(-1)[..., None]
        chosen = torch.einsum("bks,bsd->bkd", dispatch, x)
        return x + torch.einsum("bks,bkd->bsd", combine, self.block(chosen) - chosen)


class AdditiveMask(nn.Module):
    """`nn.MultiheadAttention` under a mask of minus infinities."""

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
    """The selected tokens attend to all tokens of the row, under the rows of the mask that are theirs."""

    def forward(self, x: Tensor) -> Tensor:
        index = self.router(x).squeeze(-1).topk(x.shape[1] // 4).indices.sort().values
        wide = index[..., None].expand(-1, -1, D)
        query, seen = x.gather(1, wide), torch.arange(x.shape[1]) <= index[..., None]
        y = F.scaled_dot_product_attention(query[:, None], x[:, None], x[:, None], attn_mask=seen[:, None])[:, 0]
        return x.scatter(1, wide, self.block.down(F.gelu(self.block.up(y))) + query)


def _image_model(*blocks: type[Inner] | type[Routed]) -> Patches:
    return Patches(Inner(causal=False), *(block(causal=False) for block in blocks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """A model, the sites that it has, and its inputs; `tokens` are those of a row that the sites select from."""

    make: Callable[[], nn.Module]
    sites: list[RoutingSite]
    rows: int = B
    tokens: int = S
    image: bool = False

    def inputs(self, seed: int) -> tuple[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        if self.image:
            return (torch.randn(B, 3, 16, 16, generator=generator),)
        return (torch.randint(0, V, (B, S), generator=generator),)


def _blocks(routed: type[nn.Module], rule: str) -> Manner:
    """A model with a routed block as its second and its fourth."""
    return Manner(make=lambda: Model(routed), sites=[RoutingSite(f"blocks.{n}", K, rule) for n in (1, 3)])


def _names(prefixes: list[str], k: int, rule: str) -> list[RoutingSite]:
    return [RoutingSite(name, k, rule) for name in prefixes]


MANNERS = {
    "take_along_dim": _blocks(TakeAlong, BY_POSITION),
    "index_copy": _blocks(IndexCopy, BY_POSITION),
    "scatter_reduce": _blocks(ScatterReduce, BY_SCORE),
    "put_accumulate": _blocks(PutAccumulate, BY_SCORE),
    "put_in_place": _blocks(PutInPlace, BY_POSITION),
    "embedding": _blocks(Embedding, BY_SCORE),
    "row_loop": _blocks(RowLoop, BY_POSITION),
    "compared": _blocks(Compared, BY_SCORE),
    "mask_order": _blocks(MaskOrder, BY_POSITION),
    "two_routers": Manner(
        make=lambda: Model(TwoRouters),
        sites=_names([f"blocks.{n}.{part}" for n in (1, 3) for part in ("attention", "mlp")], K, BY_SCORE),
    ),
    "nested": Manner(
        make=lambda: Model(Nested),
        sites=[RoutingSite(f"blocks.{n}.{depth}", k, BY_POSITION) for n in (1, 3) for depth, k in enumerate((8, 4))],
    ),
    "recursions": Manner(
        make=lambda: Model(Recursions),
        sites=[RoutingSite(f"blocks.{n}.{i}", k, BY_POSITION) for n in (1, 3) for i, k in enumerate((12, 8, 4))],
    ),
    "sequence_first": _blocks(SequenceFirst, BY_SCORE),
    "sequence_first_flat": _blocks(SequenceFirstFlat, BY_SCORE),
    "flat_batch": Manner(
        make=lambda: Model(FlatBatch), sites=_names(["blocks.1", "blocks.3"], B * K, BY_SCORE), rows=1, tokens=B * S
    ),
    "shared_index": _blocks(SharedIndex, BY_POSITION),
    "encoder_layer": _blocks(EncoderLayer, BY_POSITION),
    "top_level": Manner(make=TopLevel, sites=_names(["h.1", "h.3"], K, BY_POSITION)),
    "stacked": _blocks(Stacked, BY_POSITION),
    "channels_first": _blocks(ChannelsFirst, BY_SCORE),
    "region": Manner(make=lambda: Model(Region), sites=_names(["blocks.1", "blocks.3"], K, BY_SCORE), tokens=10),
    "weighted_rows": _blocks(WeightedRows, BY_SCORE),
    "additive_mask": _blocks(AdditiveMask, BY_POSITION),
    "all_keys": _blocks(AllKeys, BY_POSITION),
    "class_apart": Manner(
        make=lambda: _image_model(ClassApart), sites=[RoutingSite("blocks.1", K, BY_POSITION)], image=True
    ),
    "class_shifted": Manner(
        make=lambda: _image_model(ClassShifted), sites=[RoutingSite("blocks.1", K, BY_SCORE)], image=True
    ),
    "class_forced": Manner(
        make=lambda: _image_model(ClassForced), sites=[RoutingSite("blocks.1", 5, BY_SCORE)], image=True, tokens=17
    ),
    "pruned": Manner(
        make=lambda: _image_model(Pruned, Pruned, Inner),
        sites=[RoutingSite("blocks.1", 8, BY_SCORE), RoutingSite("blocks.2", 4, BY_SCORE)],
        image=True,
    ),
}


def manner_graph(name: str) -> tuple[ir.Model, nn.Module]:
    """The portable graph of a model in this manner, with its weights in it, and the model."""
    torch.manual_seed(0)
    module = MANNERS[name].make().eval()
    return whole_graph(module, MANNERS[name].inputs(0), name), module


def whole_graph(module: nn.Module, inputs: tuple[Tensor, ...], name: str) -> ir.Model:
    """The portable graph of a model of one input and one output, with its weights in it."""
    state = state_of(module)
    model = onnx_from_captured(captured(module, inputs, name), state, ["x"], ["y"])
    for weight, value in model.graph.initializers.items():
        if weight in state:
            value.const_value = ir.tensor(state[weight].detach().numpy(), name=weight)
    run_passes(model, PORTABLE, "float32")
    return model

"""Routed blocks as people write them, without a static graph; and blocks that fail for other reasons."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from torch import Tensor, nn

D = 16


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.block, self.step = nn.Linear(D, 1), nn.Linear(D, D), 0


class RowMasks(Routed):
    def forward(self, x: Tensor) -> Tensor:
        out, scores = x.clone(), self.router(x).squeeze(-1)
        for row in range(x.shape[0]):
            mask = scores[row] > scores[row].topk(4).values[-1]
            chosen = x[row][mask]
            out[row, mask] = self.block(chosen[None])[0]
        return out


class Threshold(Routed):
    def forward(self, x: Tensor) -> Tensor:
        mask = self.router(x).squeeze(-1).sigmoid() > 0.5
        early = x[mask].mean(0)
        late = x[~mask].mean(0)
        return x + early + late


class Nonzero(Routed):
    def forward(self, x: Tensor) -> Tensor:
        index = (self.router(x)[0, :, 0] > 0.005).nonzero().squeeze(1)
        return x.index_copy(1, index, self.block(x[:, index]))


class WhereAlone(Routed):
    def forward(self, x: Tensor) -> Tensor:
        rows, index = torch.where(self.router(x).squeeze(-1) > 0)
        return x.index_put((rows, index), self.block(x[rows, index]))


class AnySelected(Routed):
    def forward(self, x: Tensor) -> Tensor:
        mask = self.router(x) > 0
        if mask.any():
            x = x + mask * self.block(x)
        return x


class SkippedLayer(Routed):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.router(x).sigmoid()
        if gate.mean() < 0.3:
            return x
        return gate * self.block(x) + (1 - gate) * x


class Equal(Routed):
    def forward(self, x: Tensor) -> Tensor:
        update = self.block(x)
        if torch.equal(update, x):
            return x
        return x + update


class NanCheck(Routed):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.router(x)
        assert not torch.isnan(weight).any(), "NaN in the router"
        return x + weight * self.block(x)


class Item(Routed):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.router(x).mean().item()
        return x + weight * self.block(x)


class Float(Routed):
    def forward(self, x: Tensor) -> Tensor:
        strength = float(self.router(x).mean())
        return x + strength * self.block(x)


class CountedK(Routed):
    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).squeeze(-1)
        k = int((scores > 0).sum(1).max())
        index = scores.topk(k).indices.sort().values[..., None].expand(-1, -1, D)
        return x.scatter(1, index, self.block(x.gather(1, index)))


class ShareAsK(Routed):
    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).squeeze(-1)
        k = int(scores.sigmoid().mean() * x.shape[1])
        index = scores.topk(k).indices[..., None].expand(-1, -1, D)
        return x.scatter(1, index, self.block(x.gather(1, index)))


class RowsOfTheirOwnK(Routed):
    def forward(self, x: Tensor) -> Tensor:
        rows = []
        for row in x:
            scores = self.router(row).squeeze(-1)
            own_k = int((scores > 0).sum())
            index = scores.topk(own_k).indices
            rows.append(row.index_copy(0, index, self.block(row[index])))
        return torch.stack(rows)


class TooMany(Routed):
    def forward(self, x: Tensor) -> Tensor:
        scores, k = self.router(x).squeeze(-1), 4
        wants = scores > 0
        if wants.sum() > k:
            index = scores.topk(k).indices[..., None].expand(-1, -1, D)
            return x.scatter(1, index, self.block(x.gather(1, index)))
        return torch.where(wants[..., None], self.block(x), x)


class LayersInTurn(Routed):
    """Has a loop that is not over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            # Not for each token in a row.
            if self.router(x).mean() > 0:
                x = layer(x)
        return x


class TokenByToken(Routed):
    def forward(self, x: Tensor) -> Tensor:
        out = []
        for row in x:
            for token in row:
                # A token that does not want to run.
                if self.router(token) > 0:
                    token = self.block(token)
                out.append(token)
        return torch.stack(out).view_as(x)


class ReadScores(Routed):
    def forward(self, x: Tensor) -> Tensor:
        out = x.clone()
        for row in range(x.shape[0]):
            for position in range(x.shape[1]):
                score = self.router(x[row, position])

                if score.item() > 0:
                    out[row, position] += self.block(x[row, position])
        return out


class RowsInTurn(Routed):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.block(row) if self.router(row).mean() > 0 else row for row in x])


class CutRows(Routed):
    def forward(self, x: Tensor) -> Tensor:
        count, rows = (self.router(x) > 0).sum((1, 2)), []
        for row in range(x.shape[0]):
            rows.append(self.block(x[row, : count[row]]).sum(0))
        return torch.stack(rows)


class OneByOne(Routed):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x[:, self.router(x)[0, :, 0].argmax().item()])[:, None]


class BestToken(Routed):
    def forward(self, x: Tensor) -> Tensor:
        best = int(self.router(x)[0, :, 0].argmax())
        return x + self.block(x[:, best])[:, None]


class Unique(Routed):
    def forward(self, x: Tensor) -> Tensor:
        index = torch.unique(self.router(x)[0, :, 0].topk(4).indices)
        return x.index_copy(1, index, self.block(x[:, index]))


class MaskedSelect(Routed):
    def forward(self, x: Tensor) -> Tensor:
        mask = (self.router(x) > 0).expand_as(x)
        chosen = torch.masked_select(x, mask).view(-1, D)
        return x.masked_scatter(mask, self.block(chosen).view(-1))


class ToList(Routed):
    def forward(self, x: Tensor) -> Tensor:
        out = x.clone()
        for row, index in enumerate(self.router(x).squeeze(-1).topk(4).indices.tolist()):
            for position in index:
                out[row, position] = self.block(x[row, position])
        return out


class ToSizes(Routed):
    def forward(self, x: Tensor) -> Tensor:
        sizes = (self.router(x) > 0).sum((1, 2)).tolist()
        return x + sum(x.new_ones(size).sum() for size in sizes)


class AskedSize(Routed):
    def forward(self, x: Tensor) -> Tensor:
        chosen = x[self.router(x).squeeze(-1) > 0]
        if chosen.shape[0] == 0:
            return x
        return x + self.block(chosen).mean(0)


class Repeats(Routed):
    def forward(self, x: Tensor) -> Tensor:
        count = (self.router(x) > 0).sum((1, 2))
        return torch.repeat_interleave(x, count, dim=0)


class TryExcept(Routed):
    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        try:
            if scores.sum() > 0:
                x = x + self.block(x)
        except RuntimeError:
            x = x * 2
        return x


class Printing(Routed):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.router(x)
        print("weights", weight)  # noqa: T201
        return x + weight * self.block(x)


class Warns(Routed):
    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("attention without a mask", stacklevel=2)
        return x + self.block(x)


class Logging(Routed):
    def forward(self, x: Tensor) -> Tensor:
        logging.getLogger("model").info("%d tokens", x.shape[1])
        return x + self.block(x)


class Numpy(Routed):
    def forward(self, x: Tensor) -> Tensor:
        order = self.router(x)[..., 0].detach().numpy().argsort()
        index = torch.from_numpy(order.copy())[:, -4:, None].expand(-1, -1, D)
        return x.scatter(1, index, self.block(x.gather(1, index)))


class Annealed(Routed):
    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        k = max(4, 16 - self.step)
        index = self.router(x).topk(k, dim=1).indices.expand(-1, -1, D)
        return x.scatter(1, index, self.block(x.gather(1, index)))


# Models that fail by themselves.


class WrongShapes(Routed):
    def forward(self, x: Tensor) -> Tensor:
        return self.router(x) @ x.new_zeros(3, 3)


class Refuses(Routed):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("this model wants 3 tokens\nand no more")


class NoSuchKey(Routed):
    def forward(self, x: Tensor) -> Tensor:
        return {"logits": x}["hidden"]


class WantsMask(Routed):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.block(x) * mask


class Silent(Routed):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError


class OtherPython(Routed):
    """Breaks the graph in a way for which there is no advice."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.block(x)


# Models that are static, or as static as their part.


class Holds(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


class TakesAnything(Routed):
    def forward(self, x: Tensor, **options: Any) -> Tensor:
        index = self.router(x).topk(4, dim=1).indices.sort(1).values.expand(-1, -1, D)
        return x.scatter(1, index, self.block(x.gather(1, index)) * options.get("scale", 1.0))

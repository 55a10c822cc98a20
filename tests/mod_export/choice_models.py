"""Small sound models whose discrete choices are not routing sites, one model for each kind of choice."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

D, V, N = 16, 50, 4
"""Width, number of token ids, and number of options: experts, codes, classes, buckets."""
SHAPE = (2, 24)


def ids_of(batch: int, seq: int, seed: int = 0) -> Tensor:
    return torch.randint(0, V, (batch, seq), generator=torch.Generator().manual_seed(seed))


class Chooser(nn.Module):
    """Embeds ids, mixes them, makes a choice and continues with its result; returns logits (B, S, N)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(V, D), nn.Linear(D, D)
        self.router, self.table = nn.Linear(D, N), nn.Parameter(torch.randn(N, D))
        self.score, self.head = nn.Linear(D, 1), nn.Linear(D, N)

    def forward(self, ids: Tensor) -> Tensor | tuple[Tensor, ...]:
        x = self.embedding(ids)
        # Each token sees the mean of itself and the tokens before it.
        count = torch.arange(1, ids.shape[1] + 1)[:, None]
        x = x + torch.tanh(self.mix(x.cumsum(1) / count))
        return self.head(self.choose(x))

    def choose(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Argmax(Chooser):
    """Picks one vector per token."""

    def choose(self, x: Tensor) -> Tensor:
        return x + self.table[self.router(x).argmax(-1)]


class MaxOfRow(Chooser):
    """Adds the largest score of a row to all its tokens."""

    def choose(self, x: Tensor) -> Tensor:
        best = self.score(x)[..., 0].max(1)
        return x + torch.gather(x, 1, best.indices[:, None, None].expand(-1, 1, D))


class MinValues(Chooser):
    """Uses the smallest score and its index."""

    def choose(self, x: Tensor) -> Tensor:
        values, indices = self.router(x).min(-1, keepdim=True)
        return x * values.sigmoid() + self.table[indices[..., 0]]


class Bucketize(Chooser):
    def choose(self, x: Tensor) -> Tensor:
        return x + self.table[torch.bucketize(self.score(x)[..., 0], torch.tensor([-0.5, 0.0, 0.5]))]


class SecondTopk(Chooser):
    """Uses a top-k only as a mask over all tokens."""

    def choose(self, x: Tensor) -> Tensor:
        score_BS = self.score(x)[..., 0]
        index = score_BS.topk(6, 1).indices
        kept = torch.zeros_like(score_BS).scatter(1, index, 1.0)
        return x + kept[..., None] * torch.tanh(self.mix(x))


class Sorted(Chooser):
    """Uses the order of the scores."""

    def choose(self, x: Tensor) -> Tensor:
        order = self.score(x)[..., 0].argsort(1)
        return x + 0.5 * x.gather(1, order[..., None].expand(-1, -1, D))


class Rounded(Chooser):
    """Rounds activations to the coarse steps of a quantizer."""

    def choose(self, x: Tensor) -> Tensor:
        scale = 4 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
        return torch.round(x * scale) / scale


class Floored(Chooser):
    def choose(self, x: Tensor) -> Tensor:
        return x + torch.floor(self.score(x) * 3)


class Signed(Chooser):
    def choose(self, x: Tensor) -> Tensor:
        return x * torch.sign(self.score(x))


class EqualToMax(Chooser):
    """Makes a gate of `x == x.max()`, as hand-written code does."""

    def choose(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        gate = (logits == logits.max(-1, keepdim=True).values).to(x.dtype)
        return x + gate @ self.table


class AtLeastKth(Chooser):
    """Masks the k largest scores by comparison with the k-th."""

    def choose(self, x: Tensor) -> Tensor:
        score_BS = self.score(x)[..., 0]
        kth = score_BS.topk(5, 1).values[:, -1:]
        return torch.where((score_BS >= kth)[..., None], torch.tanh(self.mix(x)) + x, x)


class Threshold(Chooser):
    def choose(self, x: Tensor) -> Tensor:
        return x + (torch.sigmoid(self.score(x)) > 0.5).float() * torch.tanh(self.mix(x))


class Codebook(Chooser):
    """Picks the nearest vector of a table."""

    def choose(self, x: Tensor) -> Tensor:
        distance = (x * x).sum(-1, keepdim=True) - 2 * x @ self.table.T + (self.table * self.table).sum(-1)
        return x + self.table[distance.argmin(-1)]


class OneHot(Chooser):
    """Multiplies a hard gate by its softmax weight."""

    def choose(self, x: Tensor) -> Tensor:
        gate = self.router(x).softmax(-1)
        hard = F.one_hot(gate.argmax(-1), N).to(x.dtype)
        return x + (hard * gate) @ self.table


class Cast(Chooser):
    """Casts to integers with `.long()`."""

    def choose(self, x: Tensor) -> Tensor:
        return x + self.table[(torch.sigmoid(self.score(x)[..., 0]) * N).long().clamp(max=N - 1)]


class LeakyByHand(Chooser):
    """Compares with 0, where both results are equal, so the output does not jump."""

    def choose(self, x: Tensor) -> Tensor:
        y = self.mix(x)
        return x + torch.where(y > 0, y, 0.1 * y) + y * (y > 0)


class TwoScores(Chooser):
    """Compares two scores with each other."""

    def choose(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        return x + torch.where(scores[..., :1] > scores[..., 1:2], self.table[0], self.table[1])


class Ids(Chooser):
    """Returns its choices and their counts, as integers beside the logits."""

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        logits = self.router(self.mix(self.embedding(ids)))
        chosen = logits.argmax(-1)
        return logits, chosen, (chosen == 0).sum(), (logits > 0).any(-1)

    def choose(self, x: Tensor) -> Tensor:
        return x


class Routed(Chooser):
    """Picks an expert for each token, then has a routing site."""

    def choose(self, x: Tensor) -> Tensor:
        x = x + self.table[self.router(x).argmax(-1)]
        score_BS = self.score(x)[..., 0]
        gate, index = score_BS.topk(6)
        wide = index[..., None].expand(-1, -1, D)
        return x.scatter_add(1, wide, torch.sigmoid(gate)[..., None] * torch.tanh(self.mix(x.gather(1, wide))))


class Positions(Chooser):
    """Puts distances into buckets, as T5 does; they are the same for every input."""

    def choose(self, x: Tensor) -> Tensor:
        distance = torch.arange(x.shape[1], dtype=torch.float32)
        bucket = (torch.log(distance + 1) / torch.log(torch.tensor(2.0))).floor().long().clamp(max=N - 1)
        return x + self.table[bucket]


class Saturated(Chooser):
    """Clamps scores to a maximum that several tokens of some rows reach exactly."""

    def choose(self, x: Tensor) -> Tensor:
        best = self.score(x)[..., 0].clamp(max=0.5).topk(3, 1).indices
        return x + torch.gather(x, 1, best[..., None].expand(-1, -1, D)).mean(1, keepdim=True)


CHOOSERS: dict[str, type[Chooser]] = {
    "argmax": Argmax, "max of a row": MaxOfRow, "min with indices": MinValues, "bucketize": Bucketize,
    "a top-k that is no site": SecondTopk, "scores that are cut": Saturated, "sort": Sorted, "round": Rounded,
    "floor": Floored, "sign": Signed,
    "equal to the largest": EqualToMax, "at least the k-th": AtLeastKth, "threshold": Threshold, "codebook": Codebook,
    "one hot": OneHot, "cast": Cast, "leaky by hand": LeakyByHand, "two scores": TwoScores, "ids": Ids,
    "routed behind an argmax": Routed, "buckets of distances": Positions,
}  # fmt: skip


def chooser(name: str, change: Callable[[Chooser], object] = lambda model: None) -> Chooser:
    """Returns a model with fixed initial weights, after `change`."""
    torch.manual_seed(1)
    model = CHOOSERS[name]().eval()
    with torch.no_grad():
        change(model)
    return model

"""Routed layers in the styles of published code, in their static forms. docs/models.md has a table of them.

They were written from facts about the originals, and no code is copied. Where the published code is not static,
`published_originals.py` has it in plain Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from layers import TEXTS, D, ImageAndText, Inputs, Layer, SeenLayer, Text, Vision, embeddings_and_text, ids, patches
from torch import Tensor, nn
from torch.nn import functional as F

from mod_export import mark_selection
from mod_models import forced_scores, gather_tokens, scatter_tokens, select_chosen, select_tokens, tokens_of


def wide(index: Tensor) -> Tensor:
    return index[..., None].expand(-1, -1, D)


class Routed(nn.Module):
    capacity = 0.25
    bias = False

    def __init__(self) -> None:
        super().__init__()
        self.router, self.block = nn.Linear(D, 1, bias=self.bias), Layer()

    def score(self, x: Tensor) -> Tensor:
        return self.router(x).squeeze(-1)

    def k(self, x: Tensor) -> int:
        return tokens_of(self.capacity, x.shape[1])


class Astramind(Routed):
    """astramind-ai: runs the k - 1 tokens above the k-th score; original rotary positions; w * Block(x) replaces x."""

    bias = True

    def forward(self, x: Tensor) -> Tensor:
        score = self.score(x)
        index = select_tokens(score, self.k(x) - 1)
        update = self.block(gather_tokens(x, index), index) * score.gather(1, index)[..., None]
        return scatter_tokens(x, index, update)


class MixtureAi(Routed):
    """Mixture-AI at inference: an auxiliary router decides by sigmoid > 0.5; w * Block(x) replaces x."""

    capacity, bias = 0.75, True

    def __init__(self) -> None:
        super().__init__()
        self.aux = nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        index, live = select_chosen(self.aux(x).squeeze(-1).sigmoid() > 0.5, self.k(x))
        chosen = gather_tokens(x, index)
        return scatter_tokens(x, index, torch.where(live[..., None], self.block(chosen) * self.router(chosen), chosen))


class Kyegomez(Routed):
    """kyegomez: top-k, sorted indices, softmax over the selected scores; the result is added to x."""

    def forward(self, x: Tensor) -> Tensor:
        weight, index = torch.topk(self.score(x), int(x.shape[1] * self.capacity), dim=-1, sorted=False)
        index, order = torch.sort(index, dim=-1)
        weight = torch.gather(weight, 1, order).softmax(-1)
        return x.scatter_add(1, wide(index), weight[..., None] * self.block(x.gather(1, wide(index))))


class Ohara(Routed):
    """ohara: like `Kyegomez` with rotary positions 0 to k - 1, and a block whose residual is counted twice."""

    def forward(self, x: Tensor) -> Tensor:
        k = int(x.shape[1] * self.capacity)
        weight, index = torch.topk(self.router(x), k, dim=1)
        index, order = torch.sort(index, dim=1)
        weight = F.softmax(torch.gather(weight, 1, order), dim=1)
        index = index.expand(-1, -1, D)
        chosen = self.block(torch.gather(x, 1, index), torch.arange(k))
        return torch.scatter_add(x, 1, index, chosen * weight)


class Sramshetty(Routed):
    """sramshetty: one router for all layers, an absolute k, sigmoid before the top-k; FFN weighed; added to x."""

    def __init__(self, router: nn.Linear) -> None:
        super().__init__()
        self.router = router

    def forward(self, x: Tensor) -> Tensor:
        k = min(x.shape[1], 5)
        weight, index = self.router(x).sigmoid().topk(k, dim=1)
        index, order = index.sort(dim=1)
        chosen = x.gather(1, index.expand(-1, -1, D))
        h = chosen + self.block.attend(chosen, torch.arange(k))
        return x.scatter_add(1, index.expand(-1, -1, D), h + weight.gather(1, order) * self.block.feed(h))


class Epfml(Routed):
    """epfml/llm-baselines: unsorted top-k over (B, S, 1), then sorted; raw weight; the whole block is added."""

    def forward(self, x: Tensor) -> Tensor:
        weight, index = torch.topk(self.router(x), min(int(0.25 * 32), int(0.25 * x.shape[1])), dim=1, sorted=False)
        index, order = torch.sort(index, dim=1)
        chosen = self.block(torch.gather(x, 1, index.expand(-1, -1, D)))
        return torch.scatter_add(x, 1, index.expand(-1, -1, D), chosen * torch.gather(weight, 1, order))


class Nanotron(Routed):
    """nanotron's branch: softmax over the row, indices in order of score, no weight; an indexed write replaces x."""

    bias = True

    def forward(self, x: Tensor) -> Tensor:
        index = self.score(x).softmax(-1).topk(self.k(x), dim=-1).indices
        rows = torch.arange(x.shape[0], device=x.device)[:, None]
        out = x.clone()
        out[rows, index] = self.block(x[rows, index])
        return out


class Recursions(nn.Module):
    """Mixture-of-Recursions: one block runs again on fewer and fewer tokens; 0.1 * sigmoid; masks are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.routers, self.block = nn.ModuleList(nn.Linear(D, 1, bias=False) for _ in range(2)), Layer()

    def forward(self, x: Tensor) -> Tensor:
        B, S, _ = x.shape
        position, levels = torch.arange(S, device=x.device).expand(B, S), [x]
        seen, order = torch.ones(S, S, dtype=torch.bool, device=x.device).tril().expand(B, 1, S, S), []
        for router, share in zip(self.routers, (0.5, 0.25), strict=True):
            weight = 0.1 * router(levels[-1]).sigmoid()
            index = weight.topk(max(1, int(share * S)), dim=1, sorted=False).indices.squeeze(-1).sort(1).values
            seen = seen.gather(2, index[:, None, :, None].expand(-1, -1, -1, seen.shape[3]))
            seen = seen.gather(3, index[:, None, None, :].expand(-1, -1, seen.shape[2], -1))
            position = position.gather(1, index)
            chosen = levels[-1].gather(1, wide(index))
            h = chosen + self.block.attend(chosen, position, seen)
            levels.append(h + self.block.feed(h))
            order.append((index, weight.gather(1, index[..., None])))
        update = levels.pop()
        while levels:
            index, weight = order.pop()
            update = levels.pop().scatter_add(1, wide(index), weight * update)
        return update


class GammaMod(Routed):
    """Gamma-MoD in training: two-way softmax on the normed input; text is forced; only the FFN has a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, 2, bias=False)

    def forward(self, x: Tensor, is_text: Tensor) -> Tensor:
        p = self.router(self.block.norm(x)).softmax(-1)[..., 1]
        k = math.ceil(x.shape[1] * 0.5)
        index = (p + is_text.to(p.dtype)).topk(k, dim=1).indices.sort(dim=1).values
        chosen = x.gather(1, wide(index))
        h = chosen + self.block.attend(chosen, torch.arange(k))
        return x.scatter(1, wide(index), h + self.block.feed(h) * p.gather(1, index)[..., None])


class PMod(Routed):
    """p-MoD: all text and a share of the image tokens run; 0.2 tanh + 1 weighs the FFN and skipped tokens."""

    bias = True

    def forward(self, x: Tensor, is_text: Tensor) -> Tensor:
        score = self.score(x)
        weight = torch.where(is_text, 1.0, 0.2 * score.tanh() + 1)[..., None]
        index = select_tokens(forced_scores(score, is_text), TEXTS + int(0.5 * (x.shape[1] - TEXTS)))
        chosen = gather_tokens(x, index)
        h = chosen + self.block.attend(chosen, index)
        return scatter_tokens(x * weight, index, h + gather_tokens(weight, index) * self.block.feed(h))


class Dlo(Routed):
    """LLaMA-DLO at inference: sigmoid > 0.5; original positions; an affine sigmoid weighs the FFN."""

    capacity = 0.75

    def forward(self, x: Tensor) -> Tensor:
        gate = self.router(x).sigmoid()
        index, live = select_chosen(gate.squeeze(-1) > 0.5, self.k(x))
        chosen = gather_tokens(x, index)
        h = chosen + self.block.attend(chosen, index)
        update = h + (0.75 + (gather_tokens(gate, index) - 0.5) * 0.5) * self.block.feed(h)
        return scatter_tokens(x, index, torch.where(live[..., None], update, chosen))


class Praxis(Routed):
    """praxis: attention without a weight; the raw logit weighs the FFN, unless all logits are 0; replaces x."""

    bias = True

    def forward(self, x: Tensor) -> Tensor:
        score = self.score(x)
        index = score.topk(int(x.shape[1] * self.capacity), sorted=False).indices.sort(-1).values
        weight = score.gather(1, index)[..., None]
        weight = torch.where(weight.abs().max() > 0, weight, 1.0)
        chosen = x.gather(1, wide(index))
        h = chosen + self.block.attend(chosen)
        return x.scatter(1, wide(index), h + weight * self.block.feed(h))


class Nanochat(nn.Module):
    """nanochat's derivatives: no router; the norm of a token is its score; k depends on the logarithm of the length."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Layer()

    @staticmethod
    def k(seq: int) -> int:
        return max(1, int(seq * (1 - math.log(seq) / math.log(64) * (1 - 0.25))))

    def forward(self, x: Tensor) -> Tensor:
        index = x.norm(dim=-1).topk(self.k(x.shape[1])).indices.sort().values
        return x.scatter(1, wide(index), self.block(x.gather(1, wide(index)), index))


class Supermix(Routed):
    """Supermix: a predictor decides; a sigmoid weighs both updates; keys and values are those of all tokens."""

    capacity = 0.75

    def __init__(self) -> None:
        super().__init__()
        self.predictor = nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        index, live = select_chosen(self.predictor(x).squeeze(-1) > 0, self.k(x))
        gate = gather_tokens(self.router(x).sigmoid(), index) * live[..., None]
        h = gather_tokens(x, index) + gate * self.block.attend_from(x, index)
        return scatter_tokens(x, index, h + gate * self.block.feed(h))


class SkipGpt(nn.Module):
    """SkipGPT: two routers with two classes read the layer's input; one skips attention, the other the MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.router_attention, self.router_mlp = (
            nn.Sequential(nn.Linear(D, D // 4), nn.ReLU(), nn.Linear(D // 4, 2)) for _ in range(2)
        )
        self.block = Layer()

    @staticmethod
    def runs(router: nn.Module, x: Tensor) -> Tensor:
        logits = router(x)
        return logits[..., 0] >= logits[..., 1]

    def forward(self, x: Tensor) -> Tensor:
        k = tokens_of(0.9, x.shape[1])
        index, live = select_chosen(self.runs(self.router_attention, x), k)
        update = self.block.attend_from(x, index) * live[..., None]
        h = scatter_tokens(x, index, gather_tokens(x, index) + update)
        index, live = select_chosen(self.runs(self.router_mlp, x), k)
        chosen = gather_tokens(h, index)
        return scatter_tokens(h, index, chosen + self.block.feed(chosen) * live[..., None])


class DLlm(nn.Module):
    """D-LLM: two classes; the first two tokens are forced; no token attends to a skipped one; no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.block = nn.Sequential(nn.Linear(D, D), nn.SiLU(), nn.Linear(D, 2)), Layer()

    def wants(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        return (logits[..., 1] > logits[..., 0]) | (torch.arange(x.shape[1], device=x.device) < 2)

    def forward(self, x: Tensor) -> Tensor:
        index, live = select_chosen(self.wants(x), tokens_of(0.9, x.shape[1]))
        chosen = gather_tokens(x, index)
        return scatter_tokens(x, index, torch.where(live[..., None], self.block(chosen, index), chosen))


class Paulilioaica(Routed):
    """paulilioaica: half of the tokens, in order of score; no weight; the result is added to x."""

    def forward(self, x: Tensor) -> Tensor:
        index = torch.topk(self.router(x), x.shape[1] // 2, dim=1).indices.expand(-1, -1, D)
        return torch.scatter_add(x, 1, index, self.block(torch.gather(x, 1, index)))


class Codedestructor(Routed):
    """Codedestructor56: an absolute k; the result is the processed tokens, then the others."""

    def forward(self, x: Tensor) -> Tensor:
        score = self.score(x)
        index, _ = mark_selection(select_tokens(score, 6), score)
        taken = torch.zeros_like(score).scatter(1, index, 1.0)
        rest = taken.sort(dim=1, stable=True).indices[:, : x.shape[1] - 6]
        return torch.cat([self.block(x.gather(1, wide(index))), x.gather(1, wide(rest))], 1)


class AMod(nn.Module):
    """A-MoD: selects the tokens that the previous layer attended to most, and the class token; no router, no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.block = SeenLayer()

    def forward(self, x: Tensor, probability: Tensor) -> tuple[Tensor, Tensor]:
        seen = probability.mean((1, 2))
        score = torch.where(torch.arange(x.shape[1], device=x.device) < 1, torch.inf, seen)
        k = max(1, int(x.shape[1] * 0.25))
        index = torch.argsort(score, dim=1, descending=True, stable=True)[:, :k].sort(dim=1).values
        update, _ = self.block(x.gather(1, wide(index)), probability)
        return x.scatter(1, wide(index), update), probability


class Published(NamedTuple):
    """A published implementation.

    Attributes:
        make: creates a model, with random weights by torch's seed.
        sites: the length of a row -> site -> k.
        inputs: (batch, seq, seed) -> inputs of the model.
    """

    make: Callable[[], nn.Module]
    sites: Callable[[int], dict[str, int]]
    inputs: Inputs = ids


def text(routed: Callable[[], nn.Module], k: Callable[[int], int]) -> Published:
    return Published(lambda: Text(Layer(), routed()), lambda seq: {"blocks.1": k(seq)})


def image_and_text(routed: Callable[[], nn.Module], k: Callable[[int], int]) -> Published:
    return Published(lambda: ImageAndText(Layer(), routed()), lambda seq: {"blocks.1": k(seq)}, embeddings_and_text)


def _shared_router() -> nn.Module:
    router = nn.Linear(D, 1, bias=False)
    return Text(Layer(), Sramshetty(router), Sramshetty(router))


def quarter(seq: int) -> int:
    return seq // 4


PUBLISHED = {
    "astramind": text(Astramind, lambda seq: seq // 4 - 1),
    "mixture_ai": text(MixtureAi, lambda seq: int(0.75 * seq)),
    "kyegomez": text(Kyegomez, quarter),
    "ohara": text(Ohara, quarter),
    "sramshetty": Published(_shared_router, lambda seq: {"blocks.1": 5, "blocks.2": 5}),
    "epfml": text(Epfml, lambda seq: min(8, seq // 4)),
    "nanotron": text(Nanotron, quarter),
    "recursions": Published(
        lambda: Text(Layer(), Recursions()), lambda seq: {"blocks.1.0": seq // 2, "blocks.1.1": seq // 4}
    ),
    "gamma_mod": image_and_text(GammaMod, lambda seq: math.ceil(seq / 2)),
    "p_mod": image_and_text(PMod, lambda seq: TEXTS + (seq - TEXTS) // 2),
    "dlo": text(Dlo, lambda seq: int(0.75 * seq)),
    "praxis": text(Praxis, quarter),
    "nanochat": text(Nanochat, Nanochat.k),
    "supermix": text(Supermix, lambda seq: int(0.75 * seq)),
    "skipgpt": Published(
        lambda: Text(Layer(), SkipGpt()), lambda seq: {"blocks.1.0": int(0.9 * seq), "blocks.1.1": int(0.9 * seq)}
    ),
    "d_llm": text(DLlm, lambda seq: int(0.9 * seq)),
    "paulilioaica": text(Paulilioaica, lambda seq: seq // 2),
    "codedestructor": text(Codedestructor, lambda seq: 6),
    "a_mod": Published(lambda: Vision(SeenLayer(), AMod()), lambda seq: {"blocks.1": seq // 4}, patches),
}  # fmt: skip

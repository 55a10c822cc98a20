"""Plain PyTorch models with inputs and outputs other than ids and logits, whose routed blocks mark nothing."""

from __future__ import annotations

import math

import torch
from mod_dialects import DIALECTS, D, Inner, Model, V
from torch import Tensor, nn

ROUTED = DIALECTS["scatter_add"]


class Masked(nn.Module):
    """(input_ids, attention_mask) -> {"logits", "hidden"}: the mask scales positions, and embeddings are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(V, D), ROUTED()
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((D,), 0.5), persistent=False)
        self.register_buffer("position_ids", torch.arange(64))
        self.offset = torch.ones(D)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        S = input_ids.shape[1]
        x = self.embedding(input_ids) * self.scale + self.offset * 0.1
        x = x + self.embedding(self.position_ids[:S] % V) * attention_mask[..., None]
        hidden = self.block(x)
        return {"logits": self.head(hidden), "hidden": hidden}


class Embedded(nn.Module):
    """Embeddings (B, S, D) -> scores of each row (B, 3) and of each token (B, S, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Inner(), ROUTED()])
        self.row, self.token = nn.Linear(D, 3), nn.Linear(D, 5)

    def forward(self, inputs_embeds: Tensor) -> tuple[Tensor, Tensor]:
        x = inputs_embeds
        for block in self.blocks:
            x = block(x)
        return self.row(x.mean(1)), self.token(x)


class Buffered(nn.Module):
    """Embeddings (B, S, D) -> hidden states, with attention as in nanoGPT: basic operators, causal mask in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.block = nn.Linear(D, 3 * D), nn.Linear(D, D), ROUTED()
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def forward(self, inputs_embeds: Tensor) -> Tensor:
        B, S, _ = inputs_embeds.shape
        q, k, v = (part.view(B, S, 2, D // 2).transpose(1, 2) for part in self.qkv(inputs_embeds).split(D, dim=2))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        weights = scores.masked_fill(self.bias[:, :, :S, :S] == 0, float("-inf")).softmax(-1)
        return self.block(inputs_embeds + self.out((weights @ v).transpose(1, 2).contiguous().view(B, S, D)))


class Images(nn.Module):
    """Images (B, 3, 32, 32) -> class scores (B, 10), from 16 patches and a class token; the second block is routed."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, D, 8, stride=8)
        self.token = nn.Parameter(torch.randn(1, 1, D))
        self.position = nn.Parameter(torch.randn(1, 17, D) * 0.1)
        self.blocks = nn.ModuleList([Inner(), ROUTED()])
        self.head = nn.Linear(D, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


def token_ids(batch: int, seq: int, seed: int = 0) -> Tensor:
    return torch.randint(0, V, (batch, seq), generator=torch.Generator().manual_seed(seed))


def masked_inputs(batch: int, seq: int, seed: int = 0) -> dict[str, Tensor]:
    mask = torch.ones(batch, seq)
    mask[:, seq - 2 :] = 0
    return {"input_ids": token_ids(batch, seq, seed), "attention_mask": mask}


def made(kind: type[nn.Module] | str) -> nn.Module:
    """Model with the same initial weights on every call: a class of this file, or a name in `DIALECTS`."""
    torch.manual_seed(0)
    return (Model(DIALECTS[kind]) if isinstance(kind, str) else kind()).eval()

"""Parts of the published models: a transformer layer, and models that contain plain and routed layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

V, D, HEADS, PATCH, TEXTS = 40, 32, 2, 12, 4


def rotated(x_BHTE: Tensor, position: Tensor) -> Tensor:
    """Rotary embedding; `position` is (T,), or (B, T)."""
    half = x_BHTE.shape[-1] // 2
    angle = position[..., None] * 100.0 ** (-torch.arange(half, device=x_BHTE.device) / half)
    angle = angle if position.dim() == 1 else angle[:, None]
    a, b = x_BHTE.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class Layer(nn.Module):
    """A pre-norm transformer layer with fused qkv and biases; rotary if positions are given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out, self.up, self.down = (
            nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D),
        )  # fmt: skip

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        B, T, _ = x.shape
        q, k, v = (part.view(B, T, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        return q, k, v

    def attend(self, x: Tensor, position: Tensor | None = None, seen: Tensor | None = None) -> Tensor:
        """The update by attention, which is causal or uses the mask `seen` (B, 1, T, T)."""
        q, k, v = self.heads(x)
        if position is not None:
            q, k = rotated(q, position), rotated(k, position)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None)
        return self.out(y.transpose(1, 2).reshape(x.shape))

    def attend_from(self, x: Tensor, index: Tensor) -> Tensor:
        """Like `attend`, for the queries at these positions only; keys and values are those of all tokens."""
        _, k, v = self.heads(x)
        chosen = torch.gather(x, 1, index[..., None].expand(-1, -1, D))
        q, _, _ = self.heads(chosen)
        seen = torch.arange(x.shape[1], device=x.device) <= index[:, None, :, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.out(y.transpose(1, 2).reshape(chosen.shape))

    def feed(self, h: Tensor) -> Tensor:
        """The update by the MLP."""
        return self.down(F.gelu(self.up(self.norm_2(h))))

    def forward(self, x: Tensor, position: Tensor | None = None) -> Tensor:
        h = x + self.attend(x, position)
        return h + self.feed(h)


class SeenLayer(Layer):
    """A dense layer of a vision transformer that returns its attention probabilities, too."""

    def forward(self, x: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(x)
        probability = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        h = x + self.out((probability @ v).transpose(1, 2).reshape(x.shape))
        return h + self.feed(h), probability


class Text(nn.Module):
    """Token ids (B, S) to logits (B, S, V)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(V, D), nn.Embedding(64, D)
        self.blocks = nn.ModuleList(layers)
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ImageAndText(nn.Module):
    """Embeddings (B, S, D) and a mask of text tokens (B, S) to hidden states (B, S, D)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(layers), nn.LayerNorm(D)

    def forward(self, embeddings: Tensor, is_text: Tensor) -> Tensor:
        x = embeddings
        for block in self.blocks:
            x = block(x) if type(block) is Layer else block(x, is_text)
        return self.norm(x)


class Vision(nn.Module):
    """Patches (B, S - 1, PATCH) to class scores (B, V), with a class token in front and full attention."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.patch, self.first = nn.Linear(PATCH, D), nn.Parameter(torch.randn(1, 1, D))
        self.position = nn.Embedding(65, D)
        self.blocks, self.norm, self.head = nn.ModuleList(layers), nn.LayerNorm(D), nn.Linear(D, V)

    def forward(self, patches: Tensor) -> Tensor:
        x = torch.cat([self.first.expand(len(patches), -1, -1), self.patch(patches)], 1)
        x = x + self.position(torch.arange(x.shape[1], device=x.device))
        probability = x.new_zeros(())
        for block in self.blocks:
            x, probability = block(x, probability)
        return self.head(self.norm(x[:, 0]))


def ids(batch: int, seq: int, seed: int = 0) -> tuple[Tensor, ...]:
    return (torch.randint(0, V, (batch, seq), generator=torch.Generator().manual_seed(seed)),)


def embeddings_and_text(batch: int, seq: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Random embeddings, of which TEXTS tokens of each row are text, at random places."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.rand(batch, seq, generator=generator).argsort(1)[:, :TEXTS]
    is_text = torch.zeros(batch, seq, dtype=torch.bool).scatter(1, places, True)
    return torch.randn(batch, seq, D, generator=generator), is_text


def patches(batch: int, seq: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Random patches for rows of `seq` tokens, one of which is the class token."""
    return (torch.randn(batch, seq - 1, PATCH, generator=torch.Generator().manual_seed(seed)),)


Inputs = Callable[[int, int, int], tuple[Tensor, ...]]

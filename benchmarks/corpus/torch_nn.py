"""Modules of torch.nn: transformers (batch first and sequence first), attention and recurrent layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.corpus.entry import Entry, Inputs
from benchmarks.corpus.queries import QueriesOfMultihead
from benchmarks.corpus.routers import Apart, BatchFirst, OneHot, Paper, ScatterAdd, SequenceFirst, SoftmaxGate

VOCABULARY = 80
LAYER = {"d_model": 64, "nhead": 4, "dim_feedforward": 96, "dropout": 0.0}


class Stack(nn.Module):
    """A model from ids to logits with blocks of one class. If a block returns a tuple, its first tensor is used."""

    def __init__(self, block: Callable[[], nn.Module], depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 64)
        self.layers = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x_BSD = self.embed(input_ids)
        for layer in self.layers:
            result = layer(x_BSD)
            x_BSD = result[0] if isinstance(result, tuple) else result
        out: Tensor = self.head(x_BSD)
        return out


class SelfAttention(nn.Module):
    """A residual around `nn.MultiheadAttention`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(64), nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x_BSD: Tensor) -> Tensor:
        normed = self.norm(x_BSD)
        out: Tensor = x_BSD + self.attention(normed, normed, normed, need_weights=False)[0]
        return out


def token_ids(batch: int, seq: int) -> Inputs:
    """Ids of a text."""
    return {"input_ids": torch.randint(0, VOCABULARY, (batch, seq))}


def encoder(batch_first: bool, **options: Any) -> nn.Module:
    """`nn.TransformerEncoder`."""
    layer = nn.TransformerEncoderLayer(**LAYER | options, batch_first=batch_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def decoder(batch_first: bool) -> nn.Module:
    """`nn.TransformerDecoder`."""
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(**LAYER, batch_first=batch_first), 2)


def both() -> nn.Module:
    """`nn.Transformer`."""
    return nn.Transformer(64, 4, 2, 4, 96, dropout=0.0, batch_first=True)


def with_padding(batch: int, seq: int) -> Inputs:
    """A residual stream and its padding mask."""
    padding = torch.arange(seq) >= torch.linspace(seq // 2, seq, batch).long()[:, None]
    return {"src": torch.randn(batch, seq, 64), "src_key_padding_mask": padding}


ENTRIES = [
    Entry(
        "torch",
        "nn.TransformerEncoder",
        partial(encoder, True),
        lambda batch, seq: {"src": torch.randn(batch, seq, 64)},
        "layers.*",
        Paper,
    ),
    Entry(
        "torch",
        "nn.TransformerEncoder",
        partial(encoder, True, norm_first=True, activation="gelu"),
        with_padding,
        "layers.*",
        ScatterAdd,
        "padded rows",
    ),
    Entry(
        "torch",
        "nn.TransformerEncoder",
        partial(encoder, False),
        lambda batch, seq: {"src": torch.randn(seq, batch, 64)},
        "layers.*",
        SequenceFirst,
        "sequence first",
        dim=0,
    ),
    Entry(
        "torch",
        "nn.TransformerDecoder",
        partial(decoder, True),
        lambda batch, seq: {"tgt": torch.randn(batch, seq, 64), "memory": torch.randn(batch, 20, 64)},
        "layers.*",
        BatchFirst,
    ),
    Entry(
        "torch",
        "nn.TransformerDecoder",
        partial(decoder, False),
        lambda batch, seq: {"tgt": torch.randn(seq, batch, 64), "memory": torch.randn(20, batch, 64)},
        "layers.*",
        SequenceFirst,
        "sequence first",
        dim=0,
    ),
    Entry(
        "torch",
        "nn.Transformer",
        both,
        lambda batch, seq: {"src": torch.randn(batch, 20, 64), "tgt": torch.randn(batch, seq, 64)},
        "decoder.layers.*",
        OneHot,
    ),
    Entry(
        "torch",
        "nn.TransformerEncoderLayer",
        partial(Stack, partial(nn.TransformerEncoderLayer, **LAYER, batch_first=True)),
        token_ids,
        "layers.*",
        SoftmaxGate,
    ),
    Entry(
        "torch",
        "nn.MultiheadAttention",
        partial(Stack, SelfAttention),
        token_ids,
        "layers.*:attention",
        QueriesOfMultihead,
    ),
    Entry("torch", "nn.LSTM", partial(Stack, partial(nn.LSTM, 64, 64, batch_first=True)), token_ids, "layers.*", Apart),
    Entry("torch", "nn.GRU", partial(Stack, partial(nn.GRU, 64, 64, batch_first=True)), token_ids, "layers.*", Paper),
    Entry(
        "torch", "nn.RNN", partial(Stack, partial(nn.RNN, 64, 64, batch_first=True)), token_ids, "layers.*", ScatterAdd
    ),
]

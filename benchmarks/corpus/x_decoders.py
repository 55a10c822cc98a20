"""Models of x-transformers, whose layers are attention and feed-forward parts with a residual around each."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.corpus.entry import Entry, Inputs
from benchmarks.corpus.queries import QueriesOfContext
from benchmarks.corpus.routers import Apart, Routed

VOCABULARY = 80
PARTS = "attn_layers.layers.2.1 attn_layers.layers.3.1"
"""Attention and feed-forward of the second of two layers."""


def token_ids(batch: int, seq: int) -> Inputs:
    """Token ids; the parameter of forward is called x."""
    return {"x": torch.randint(0, VOCABULARY, (batch, seq))}


def of_tokens(layers: str, **options: Any) -> nn.Module:
    """A `TransformerWrapper` of a `Decoder` or an `Encoder`."""
    import x_transformers

    made = getattr(x_transformers, layers)(dim=64, depth=2, heads=4, attn_dim_head=16, **options)
    wrapper: nn.Module = x_transformers.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=64, attn_layers=made)
    return wrapper


def continuous() -> nn.Module:
    """A `ContinuousTransformerWrapper`: vectors in, vectors out."""
    import x_transformers

    layers = x_transformers.Encoder(dim=64, depth=2, heads=4, attn_dim_head=16, attn_flash=True)
    made: nn.Module = x_transformers.ContinuousTransformerWrapper(
        dim_in=24, dim_out=24, max_seq_len=64, attn_layers=layers
    )
    return made


def vision() -> nn.Module:
    """A `ViTransformerWrapper` of 36 patches."""
    import x_transformers

    layers = x_transformers.Encoder(dim=64, depth=2, heads=4, attn_dim_head=16)
    made: nn.Module = x_transformers.ViTransformerWrapper(
        image_size=24, patch_size=4, attn_layers=layers, num_classes=10
    )
    return made


def crossing() -> nn.Module:
    """A `CrossAttender`, whose layers are cross-attention and feed-forward."""
    import x_transformers

    made: nn.Module = x_transformers.CrossAttender(dim=64, depth=2, heads=4, attn_dim_head=16)
    return made


def wrapped(variant: str, layers: str, manner: type[Routed] = Apart, blocks: str = PARTS, **options: Any) -> Entry:
    """An entry of a `TransformerWrapper`."""
    make = partial(of_tokens, layers, **options)
    return Entry("x-transformers", "TransformerWrapper", make, token_ids, blocks, manner, variant)


ENTRIES = [
    wrapped("decoder", "Decoder"),
    wrapped("rotary positions", "Decoder", rotary_pos_emb=True),
    wrapped("alibi", "Decoder", alibi_pos_bias=True),
    wrapped(
        "flash and rotary",
        "Decoder",
        rotary_pos_emb=True,
        attn_flash=True,
        use_rmsnorm=True,
        ff_glu=True,
        ff_swish=True,
    ),
    wrapped("one key and value head", "Decoder", attn_one_kv_head=True, attn_flash=True),
    wrapped("grouped heads", "Decoder", attn_kv_heads=2, attn_qk_norm=True),
    wrapped("T5 bias", "Encoder", rel_pos_bias=True),
    wrapped("talking heads", "Encoder", attn_pre_talking_heads=True),
    wrapped("scale norm", "Encoder", use_scalenorm=True, ff_relu_squared=True),
    wrapped("queries", "Encoder", QueriesOfContext, "attn_layers.layers.2.1"),
    Entry(
        "x-transformers",
        "ContinuousTransformerWrapper",
        continuous,
        lambda batch, seq: {"x": torch.randn(batch, seq, 24)},
        PARTS,
        Apart,
    ),
    Entry(
        "x-transformers",
        "ViTransformerWrapper",
        vision,
        lambda batch, seq: {"img": torch.randn(batch, 3, 24, 24)},
        PARTS,
        Apart,
        tokens=36,
    ),
    Entry(
        "x-transformers",
        "CrossAttender",
        crossing,
        lambda batch, seq: {"x": torch.randn(batch, seq, 64), "context": torch.randn(batch, 20, 64)},
        "layers.2.1 layers.3.1",
        Apart,
    ),
]

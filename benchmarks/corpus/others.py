"""Models of smaller packages."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.corpus.entry import Entry, Inputs
from benchmarks.corpus.routers import Apart, SequenceFirst

VOCABULARY = 80


def protein(batch: int, seq: int) -> Inputs:
    """Ids of residues. ESM's id 1 is padding, 0 and 2 begin and end a chain, and 32 masks a residue."""
    return {"tokens": torch.randint(4, 24, (batch, seq))}


def esm2() -> nn.Module:
    """`ESM2`, whose layers take the sequence as the first dimension."""
    import esm

    made: nn.Module = esm.ESM2(num_layers=2, embed_dim=64, attention_heads=4, alphabet="ESM-1b", token_dropout=True)
    return made


def local_transformer() -> nn.Module:
    """`LocalTransformer` with attention in windows of 8 tokens."""
    from local_attention import LocalTransformer

    made: nn.Module = LocalTransformer(
        num_tokens=VOCABULARY, max_seq_len=64, dim=64, depth=2, dim_head=16, heads=4, local_attn_window_size=8,
        num_residual_streams=1,
    )  # fmt: skip
    return made


def nystromformer() -> nn.Module:
    """`Nystromformer`, which approximates attention with landmarks."""
    from nystrom_attention import Nystromformer

    made: nn.Module = Nystromformer(dim=64, depth=2, dim_head=16, heads=4, num_landmarks=4)
    return made


def linformer() -> nn.Module:
    """`LinformerLM`, which projects keys and values to a fixed length."""
    from linformer import LinformerLM

    made: nn.Module = LinformerLM(VOCABULARY, 64, 32, 2, k=8, heads=4)
    return made


BRANCH = "if not padding_mask.any():\nPython chooses its way by a value that depends on the data"
"""Part of the message that refuses ESM2, which branches on whether a batch has padding."""
ENTRIES = [
    Entry("fair-esm", "ESM2", esm2, protein, "layers.*", SequenceFirst, dim=0, refused=BRANCH),
    Entry(
        "local-attention",
        "LocalTransformer",
        local_transformer,
        lambda batch, seq: {"x": torch.randint(0, VOCABULARY, (batch, seq))},
        "layers.1.0.branch layers.1.1.branch",
        Apart,
    ),
    Entry(
        "nystrom-attention",
        "Nystromformer",
        nystromformer,
        lambda batch, seq: {"x": torch.randn(batch, seq, 64)},
        "layers.1.0 layers.1.1",
        Apart,
    ),
    Entry(
        "linformer",
        "LinformerLM",
        linformer,
        lambda batch, seq: {"x": torch.randint(0, VOCABULARY, (batch, seq))},
        "linformer.net.layers.1.1",
        Apart,
    ),
]

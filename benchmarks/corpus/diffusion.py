"""Transformers of diffusers, which remove noise from images, videos and sound."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.corpus.entry import Entry, Inputs
from benchmarks.corpus.queries import Queries
from benchmarks.corpus.routers import Apart, BatchFirst, OneHot, Paper, Routed, ScatterAdd, SoftmaxGate

SIDE = 12
"""Height and width of a latent image, whose patches are 2 x 2."""
PATCHES = 36
TEXT, TEXT_WIDTH = 10, 24
HEADS: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 16}
BLOCKS = "transformer_blocks.*"


def small(name: str, **options: Any) -> nn.Module:
    """A model of diffusers with initial weights."""
    import diffusers

    made: nn.Module = getattr(diffusers, name)(**options)
    return made


def image(batch: int) -> torch.Tensor:
    """A latent image of four channels."""
    return torch.randn(batch, 4, SIDE, SIDE)


def steps(batch: int) -> torch.Tensor:
    """Timestep (noise level) of each row. Some models instead take it from 0 to 1 and multiply it by 1,000."""
    return torch.randint(0, 1000, (batch,))


def text(batch: int, width: int = TEXT_WIDTH) -> torch.Tensor:
    """Output of a text encoder."""
    return torch.randn(batch, TEXT, width)


def with_text(batch: int, seq: int) -> Inputs:
    """A latent image, the encoded text that it should show, and its timestep."""
    return {"hidden_states": image(batch), "encoder_hidden_states": text(batch), "timestep": steps(batch)}


def diffuser(
    of: str,
    manner: type[Routed],
    inputs: Callable[[int, int], Inputs],
    blocks: str = BLOCKS,
    tokens: int = PATCHES,
    variant: str = "",
    own_sizes: bool = False,
    **options: Any,
) -> Entry:
    """An entry with four heads of width 16, unless `own_sizes` is true or `options` changes them."""
    make = partial(small, of, **({} if own_sizes else HEADS) | options)
    return Entry("diffusers", of, make, inputs, blocks, manner, variant, tokens)


def pixart(manner: type[Routed], blocks: str = BLOCKS, variant: str = "") -> Entry:
    """An entry of `PixArtTransformer2DModel`, which the table has twice."""
    return diffuser(
        "PixArtTransformer2DModel", manner, with_text, blocks, variant=variant, in_channels=4, out_channels=4,
        num_layers=2, sample_size=SIDE, cross_attention_dim=64, caption_channels=TEXT_WIDTH,
        use_additional_conditions=False,
    )  # fmt: skip


ENTRIES = [
    diffuser(
        "DiTTransformer2DModel",
        Paper,
        lambda b, s: {"hidden_states": image(b), "timestep": steps(b), "class_labels": torch.randint(0, 10, (b,))},
        in_channels=4,
        out_channels=4,
        num_layers=2,
        sample_size=SIDE,
        num_embeds_ada_norm=10,
    ),
    diffuser(
        "DiTTransformer2DModel",
        Apart,
        lambda b, s: {"hidden_states": image(b), "timestep": steps(b), "class_labels": torch.randint(0, 10, (b,))},
        f"{BLOCKS}:attn1,ff",
        variant="parts",
        in_channels=4,
        out_channels=4,
        num_layers=2,
        sample_size=SIDE,
        num_embeds_ada_norm=10,
    ),
    pixart(SoftmaxGate),
    pixart(Queries, f"{BLOCKS}:attn1", "queries"),
    diffuser(
        "Transformer2DModel",
        ScatterAdd,
        lambda b, s: {"hidden_states": image(b), "encoder_hidden_states": text(b)},
        "transformer_blocks.*",
        144,
        in_channels=4,
        num_layers=2,
        cross_attention_dim=TEXT_WIDTH,
        norm_num_groups=2,
    ),
    diffuser(
        "PriorTransformer",
        BatchFirst,
        lambda b, s: {
            "hidden_states": torch.randn(b, 24),
            "timestep": steps(b),
            "proj_embedding": torch.randn(b, 24),
            "encoder_hidden_states": text(b),
        },
        tokens=14,
        num_layers=2,
        embedding_dim=24,
        num_embeddings=10,
        additional_embeddings=4,
    ),
    diffuser(
        "SD3Transformer2DModel",
        Apart,
        lambda b, s: {
            "hidden_states": image(b),
            "encoder_hidden_states": text(b),
            "pooled_projections": torch.randn(b, 16),
            "timestep": steps(b),
        },
        f"{BLOCKS}:ff",
        sample_size=SIDE,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        joint_attention_dim=TEXT_WIDTH,
        caption_projection_dim=64,
        pooled_projection_dim=16,
    ),
    diffuser(
        "FluxTransformer2DModel",
        Apart,
        lambda b, s: {
            "hidden_states": torch.randn(b, PATCHES, 4),
            "encoder_hidden_states": text(b),
            "pooled_projections": torch.randn(b, 16),
            "timestep": torch.rand(b),
            "img_ids": torch.randint(0, 6, (PATCHES, 3)).float(),
            "txt_ids": torch.zeros(TEXT, 3),
        },
        f"{BLOCKS}:ff",
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=16,
        guidance_embeds=False,
        axes_dims_rope=(4, 6, 6),
    ),
    diffuser(
        "AuraFlowTransformer2DModel",
        Apart,
        lambda b, s: with_text(b, s) | {"timestep": torch.rand(b)},
        "single_transformer_blocks.*:ff",
        PATCHES + TEXT + 8,
        sample_size=SIDE,
        num_mmdit_layers=1,
        num_single_dit_layers=2,
        joint_attention_dim=TEXT_WIDTH,
        caption_projection_dim=64,
        pos_embed_max_size=64,
    ),
    diffuser(
        "HunyuanDiT2DModel",
        Apart,
        lambda b, s: {
            "hidden_states": image(b),
            "timestep": steps(b).float(),
            "encoder_hidden_states": text(b),
            "text_embedding_mask": torch.ones(b, TEXT),
            "encoder_hidden_states_t5": torch.randn(b, 6, 24),
            "text_embedding_mask_t5": torch.ones(b, 6),
            "image_meta_size": torch.randn(b, 6),
            "style": torch.zeros(b, dtype=torch.long),
            "image_rotary_emb": (torch.randn(PATCHES, 16), torch.randn(PATCHES, 16)),
        },
        "blocks.*:ff",
        sample_size=SIDE,
        in_channels=4,
        patch_size=2,
        num_layers=2,
        hidden_size=64,
        cross_attention_dim=TEXT_WIDTH,
        cross_attention_dim_t5=24,
        pooled_projection_dim=16,
        text_len=TEXT,
        text_len_t5=6,
    ),
    diffuser(
        "SanaTransformer2DModel",
        Apart,
        with_text,
        f"{BLOCKS}:attn1",
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_cross_attention_heads=4,
        cross_attention_head_dim=16,
        cross_attention_dim=64,
        caption_channels=TEXT_WIDTH,
        sample_size=SIDE,
        patch_size=2,
    ),
    diffuser(
        "WanTransformer3DModel",
        Paper,
        lambda b, s: {
            "hidden_states": torch.randn(b, 4, 1, SIDE, SIDE),
            "timestep": steps(b),
            "encoder_hidden_states": text(b),
        },
        "blocks.*",
        in_channels=4,
        out_channels=4,
        text_dim=TEXT_WIDTH,
        freq_dim=16,
        ffn_dim=96,
        num_layers=2,
    ),
    diffuser(
        "LTXVideoTransformer3DModel",
        SoftmaxGate,
        lambda b, s: {
            "hidden_states": torch.randn(b, PATCHES, 4),
            "encoder_hidden_states": text(b),
            "timestep": torch.rand(b),
            "encoder_attention_mask": torch.ones(b, TEXT),
            "num_frames": 1,
            "height": 6,
            "width": 6,
        },
        in_channels=4,
        out_channels=4,
        cross_attention_dim=64,
        num_layers=2,
        caption_channels=TEXT_WIDTH,
    ),
    diffuser(
        "LatteTransformer3DModel",
        OneHot,
        lambda b, s: {
            "hidden_states": torch.randn(b, 4, 2, SIDE, SIDE),
            "timestep": steps(b),
            "encoder_hidden_states": text(b),
        },
        in_channels=4,
        out_channels=4,
        num_layers=2,
        sample_size=SIDE,
        patch_size=2,
        cross_attention_dim=64,
        caption_channels=TEXT_WIDTH,
        video_length=2,
    ),
    diffuser(
        "CogVideoXTransformer3DModel",
        Apart,
        lambda b, s: {
            "hidden_states": torch.randn(b, 1, 4, SIDE, SIDE),
            "encoder_hidden_states": text(b),
            "timestep": steps(b),
        },
        f"{BLOCKS}:ff",
        PATCHES + TEXT,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        time_embed_dim=16,
        text_embed_dim=TEXT_WIDTH,
        sample_width=SIDE,
        sample_height=SIDE,
        sample_frames=1,
        max_text_seq_length=TEXT,
    ),
    diffuser(
        "CogView3PlusTransformer2DModel",
        Apart,
        lambda b, s: {
            "hidden_states": image(b),
            "encoder_hidden_states": text(b),
            "timestep": steps(b),
            "original_size": torch.full((b, 2), 96.0),
            "target_size": torch.full((b, 2), 96.0),
            "crop_coords": torch.zeros(b, 2),
        },
        f"{BLOCKS}:ff",
        PATCHES + TEXT,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        text_embed_dim=TEXT_WIDTH,
        time_embed_dim=16,
        condition_dim=8,
        sample_size=SIDE,
        pos_embed_max_size=8,
    ),
    diffuser(
        "StableAudioDiTModel",
        Apart,
        lambda b, s: {
            "hidden_states": torch.randn(b, 4, 31),
            "timestep": torch.rand(b),
            "encoder_hidden_states": text(b),
            "global_hidden_states": torch.randn(b, 1, 16),
        },
        f"{BLOCKS}:ff",
        32,
        sample_size=31,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_key_value_attention_heads=2,
        cross_attention_dim=TEXT_WIDTH,
        time_proj_dim=16,
        global_states_input_dim=16,
        cross_attention_input_dim=TEXT_WIDTH,
    ),
    diffuser(
        "UVit2DModel",
        SoftmaxGate,
        lambda b, s: {
            "input_ids": torch.randint(0, 64, (b, 6, 6)),
            "encoder_hidden_states": text(b),
            "pooled_text_emb": torch.randn(b, 16),
            "micro_conds": torch.rand(b, 5),
        },
        "transformer_layers.*",
        own_sizes=True,
        hidden_size=64,
        cond_embed_dim=16,
        micro_cond_encode_dim=8,
        micro_cond_embed_dim=40,
        encoder_hidden_size=TEXT_WIDTH,
        vocab_size=68,
        codebook_size=64,
        in_channels=64,
        block_out_channels=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        block_num_heads=4,
        intermediate_size=96,
        sample_size=6,
    ),
    diffuser(
        "AllegroTransformer3DModel",
        Apart,
        lambda b, s: {
            "hidden_states": torch.randn(b, 4, 1, SIDE, SIDE),
            "encoder_hidden_states": text(b),
            "timestep": steps(b),
        },
        f"{BLOCKS}:ff",
        in_channels=4,
        out_channels=4,
        num_layers=2,
        cross_attention_dim=64,
        sample_height=SIDE,
        sample_width=SIDE,
        sample_frames=1,
        caption_channels=TEXT_WIDTH,
    ),
]

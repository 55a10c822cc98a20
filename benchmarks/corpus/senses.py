"""Models of transformers for images, sound, trajectories and time series."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.corpus.entry import TOKENS, Entry, Inputs
from benchmarks.corpus.queries import QueriesOfKeyValueStates
from benchmarks.corpus.routers import Apart, BatchFirst, OneHot, Paper, Routed, ScatterAdd, SequenceFirst, SoftmaxGate
from benchmarks.corpus.small import FIRST, VOCABULARY, small

PATCHES = 36
"""Number of patches of 4 x 4 in an image of 24 x 24 pixels."""


def pixels(batch: int, seq: int) -> Inputs:
    """Images. Their patches determine the number of tokens, so `seq` is not used."""
    return {"pixel_values": torch.randn(batch, 3, 24, 24)}


def waves(batch: int, seq: int) -> Inputs:
    """Sound, with 4 samples for each token."""
    return {"input_values": torch.randn(batch, 4 * seq)}


def sees(
    of: str, manner: type[Routed], blocks: str, tokens: int = PATCHES + 1, variant: str = "", **changes: Any
) -> Entry:
    """An entry of a class that takes images."""
    return Entry("transformers", of, partial(small, of, **changes), pixels, blocks, manner, variant, tokens)


def hears(
    of: str,
    manner: type[Routed],
    blocks: str,
    inputs: Callable[[int, int], Inputs] = waves,
    variant: str = "",
    tokens: int = TOKENS,
    **changes: Any,
) -> Entry:
    """An entry of a class that takes sound."""
    return Entry("transformers", of, partial(small, of, **changes), inputs, blocks, manner, variant, tokens)


def mel_bands(batch: int, seq: int) -> Inputs:
    """Sound as 16 bands of 64 frames, which become 32 tokens in Whisper's encoder, and ids of a text."""
    return {
        "input_features": torch.randn(batch, 16, 64),
        "decoder_input_ids": torch.randint(FIRST, VOCABULARY, (batch, 12)),
    }


def frames(batch: int, seq: int) -> Inputs:
    """Frames of 16 bands, one for each token."""
    return {"input_features": torch.randn(batch, seq, 16)}


CONVOLVED = {
    "conv_dim": [16, 16],
    "conv_kernel": [2, 2],
    "conv_stride": [2, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 4,
}
ENCODED = "encoder.layers.*"
WHISPER = {"d_model": 64, "num_mel_bins": 16, "max_source_positions": 32}
ENTRIES = [
    sees("ViTForImageClassification", Paper, "vit.layers.*"),
    sees("DeiTForImageClassification", SoftmaxGate, "deit.layers.*", PATCHES + 2),
    sees("BeitForImageClassification", ScatterAdd, "beit.layers.*", use_mean_pooling=True),
    sees("Dinov2ForImageClassification", BatchFirst, "dinov2.encoder.layer.*"),
    sees(
        "Dinov2WithRegistersForImageClassification", SequenceFirst, "dinov2_with_registers.encoder.layer.*", PATCHES + 5
    ),
    sees("DINOv3ViTModel", Apart, "model.layer.*:mlp"),
    sees("ViTMSNForImageClassification", Apart, "vit.layers.*:attention"),
    sees("IJepaForImageClassification", OneHot, "ijepa.layers.*", PATCHES),
    sees("YolosModel", SoftmaxGate, "encoder.layer.*", PATCHES + 1 + 8, num_detection_tokens=8, image_size=[24, 24]),
    sees("Data2VecVisionForImageClassification", Paper, "data2vec_vision.encoder.layer.*"),
    sees("CLIPVisionModel", SequenceFirst, ENCODED),
    sees("SiglipVisionModel", ScatterAdd, ENCODED, PATCHES),
    sees("Aimv2VisionModel", Paper, ENCODED, PATCHES),
    hears("Wav2Vec2ForCTC", Paper, "wav2vec2.encoder.layers.*", **CONVOLVED),
    hears("HubertForCTC", SoftmaxGate, "hubert.encoder.layers.*", **CONVOLVED),
    hears("UniSpeechForCTC", ScatterAdd, "unispeech.encoder.layers.*", **CONVOLVED),
    hears("UniSpeechSatForCTC", BatchFirst, "unispeech_sat.encoder.layers.*", **CONVOLVED),
    hears("WavLMForCTC", Apart, "wavlm.encoder.layers.*:feed_forward", **CONVOLVED),
    hears(
        "Data2VecAudioForCTC",
        SequenceFirst,
        "data2vec_audio.encoder.layers.*",
        conv_dim=[16, 16],
        conv_kernel=[2, 2],
        conv_stride=[2, 2],
        conv_pos_kernel_size=3,
        num_conv_pos_embeddings=2,
        num_conv_pos_embedding_groups=4,
    ),
    hears("Wav2Vec2ConformerForCTC", Apart, "wav2vec2_conformer.encoder.layers.*:ffn1,ffn2", **CONVOLVED),
    hears(
        "Wav2Vec2BertForCTC", Apart, "wav2vec2_bert.encoder.layers.*:ffn1,ffn2", frames, feature_projection_input_dim=16
    ),
    hears(
        "WhisperForConditionalGeneration", Paper, "model.encoder.layers.* model.decoder.layers.*", mel_bands, **WHISPER
    ),
    hears(
        "WhisperForConditionalGeneration",
        QueriesOfKeyValueStates,
        "model.encoder.layers.*:self_attn",
        mel_bands,
        "queries",
        **WHISPER,
    ),
    hears(
        "Speech2TextForConditionalGeneration",
        Paper,
        "model.decoder.layers.*",
        lambda batch, seq: {
            "input_features": torch.randn(batch, 64, 16),
            "decoder_input_ids": torch.randint(FIRST, VOCABULARY, (batch, seq)),
        },
        d_model=64,
        input_feat_per_channel=16,
        input_channels=1,
        conv_channels=32,
    ),
    hears(
        "ASTForAudioClassification",
        OneHot,
        "audio_spectrogram_transformer.layers.*",
        lambda batch, seq: {"input_values": torch.randn(batch, 32, 16)},
        tokens=34,
        num_mel_bins=16,
        max_length=32,
        frequency_stride=4,
        time_stride=4,
    ),
    hears(
        "MoonshineForConditionalGeneration",
        Paper,
        "model.decoder.layers.*",
        lambda batch, seq: {
            "input_values": torch.randn(batch, 4000),
            "decoder_input_ids": torch.randint(FIRST, VOCABULARY, (batch, seq)),
        },
    ),
    hears(
        "ParakeetForCTC",
        Paper,
        "encoder.layers.*",
        lambda batch, seq: {"input_features": torch.randn(batch, 8 * seq, 16)},
        encoder_config={
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_hidden_layers": 2,
            "num_mel_bins": 16,
            "subsampling_conv_channels": 8,
        },
    ),
    Entry(
        "transformers",
        "DecisionTransformerModel",
        partial(small, "DecisionTransformerModel", state_dim=5, act_dim=3, max_ep_len=64, n_positions=128),
        lambda batch, seq: {
            "states": torch.randn(batch, 11, 5),
            "actions": torch.randn(batch, 11, 3),
            "rewards": torch.randn(batch, 11, 1),
            "returns_to_go": torch.randn(batch, 11, 1),
            "timesteps": torch.arange(11).expand(batch, 11).contiguous(),
            "attention_mask": torch.ones(batch, 11, dtype=torch.long),
        },
        "encoder.h.*",
        Paper,
        tokens=33,
    ),
    Entry(
        "transformers",
        "TimesFmModelForPrediction",
        partial(small, "TimesFmModelForPrediction", context_length=128, patch_length=4, horizon_length=8),
        lambda batch, seq: {"past_values": torch.randn(batch, 128), "freq": torch.zeros(batch, 1, dtype=torch.long)},
        "decoder.layers.*",
        Paper,
    ),
]

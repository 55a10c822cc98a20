"""Small configurations of transformers. A model takes from one table the sizes that its configuration has."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.corpus.entry import Inputs

VOCABULARY = 80
FIRST = 3
"""First id of an ordinary token. Some models treat the lower ids specially: padding, beginning and end of a text."""
LACKS = object()
"""Marks a field that the default configuration has but that must not be passed to the constructor."""
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "sliding_window": 16,
    "embedding_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "image_size": 24,
    "patch_size": 4,
    "max_source_positions": 128,
    "max_target_positions": 128,
    "use_cache": False,
}


def small(name: str, **changes: Any) -> nn.Module:
    """Builds a model of transformers with initial weights. `changes` override or extend the table of sizes."""
    model = getattr(transformers, name)
    default = model.config_class()
    sizes = {
        field: value for field, value in SIZES.items() if hasattr(default, field) and not _is_computed(default, field)
    }
    ways = {
        f"_{name}": changes.pop(name) for name in ("attn_implementation", "experts_implementation") if name in changes
    }
    fields = {field: value for field, value in (sizes | changes).items() if value is not LACKS}
    config = model.config_class(**fields)
    for name, way in ways.items():
        setattr(config, name, way)
    made: nn.Module = model(config)
    return made


def token_ids(batch: int, seq: int) -> Inputs:
    """Draws the ids of texts."""
    return {"input_ids": torch.randint(FIRST, VOCABULARY, (batch, seq))}


def _is_computed(config: Any, field: str) -> bool:
    attribute = getattr(type(config), field, None)
    return isinstance(attribute, property) and attribute.fset is None

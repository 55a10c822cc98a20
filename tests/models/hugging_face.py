"""Tiny transformers models with random weights, the references for converted models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GemmaConfig, LlamaConfig, MistralConfig, Phi3Config, PreTrainedModel, Qwen2Config, Qwen3Config

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
Make = Callable[..., Any]


def of(kind: type, **changes: Any) -> Make:
    return lambda **more: kind(**{**SIZES, **changes, **more})


CONFIGS: dict[str, Make] = {
    "Llama": of(LlamaConfig),
    "Llama, a head for each, eps": of(LlamaConfig, num_key_value_heads=4, rms_norm_eps=1e-2, hidden_act="gelu"),
    "Llama 2 long": of(LlamaConfig, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "Llama 3.1": of(LlamaConfig, rope_parameters=LLAMA3, tie_word_embeddings=True, head_dim=32),
    "Llama with biases": of(LlamaConfig, attention_bias=True, mlp_bias=True),
    "SmolLM": of(LlamaConfig, hidden_size=72, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True),
    "Mistral": of(MistralConfig, sliding_window=None, head_dim=20),
    "Mistral, window as long as rows": of(MistralConfig, sliding_window=128),
    "Mistral, a window of 16": of(MistralConfig, sliding_window=16),
    "Qwen2": of(Qwen2Config),
    "Qwen2, windows switched off": of(Qwen2Config, sliding_window=8, tie_word_embeddings=True),
    "Qwen2, windows above the last layer": of(
        Qwen2Config, use_sliding_window=True, sliding_window=8, max_window_layers=3
    ),
    "Qwen3": of(Qwen3Config, head_dim=16),
    "Qwen3 with biases": of(Qwen3Config, attention_bias=True, head_dim=20, tie_word_embeddings=True),
    "Phi-3": of(Phi3Config),
    "Gemma": of(GemmaConfig, head_dim=20),
    "Gemma, one key": of(GemmaConfig, num_key_value_heads=1, hidden_act="gelu", attention_bias=True),
}
"""Configurations by name: every form of each family, and one that only short rows can have."""


def made(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Makes a model with weights large enough that each of them affects the logits; `changes` are of its config."""
    torch.manual_seed(seed)
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](**changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.08))
    return model


def saved(name: str, folder: Path, seed: int = 0, **options: Any) -> PreTrainedModel:
    """Makes a model and saves it with `save_pretrained`."""
    model = made(name, seed)
    model.save_pretrained(folder, **options)
    return model


def change_config(folder: Path, **changes: Any) -> None:
    """Changes fields of config.json; a field that becomes `...` is removed."""
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not ...}))

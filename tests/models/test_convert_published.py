"""The config.json of published models is accepted unchanged, and its spec has as many weights as the model."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mod_models.convert.config_json import Config
from mod_models.convert.hugging_face import FAMILIES, spec_of
from mod_models.transformer import weight_shapes

COMMON = {
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": [2, 3], "initializer_range": 0.02,
    "hidden_act": "silu", "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
}  # fmt: skip


def sizes(
    width: int, d_ff: int, layers: int, heads: int, kv_heads: int, vocabulary: int, longest: int
) -> dict[str, Any]:
    return {
        "hidden_size": width, "intermediate_size": d_ff, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocabulary, "max_position_embeddings": longest,
    }  # fmt: skip


LLAMA_3_2 = {
    "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
PUBLISHED: dict[str, tuple[dict[str, Any], float]] = {
    "Llama-3.2-1B": (
        {"model_type": "llama", "attention_bias": False, "head_dim": 64, "mlp_bias": False, "pretraining_tp": 1,
         "rms_norm_eps": 1e-5, "rope_scaling": LLAMA_3_2, "rope_theta": 500000.0, "tie_word_embeddings": True,
         **sizes(2048, 8192, 16, 32, 8, 128256, 131072)},
        1235.8,
    ),
    "SmolLM2-135M": (
        {"model_type": "llama", "attention_bias": False, "is_llama_config": True, "mlp_bias": False,
         "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_interleaved": False, "rope_scaling": None,
         "rope_theta": 100000, "tie_word_embeddings": True, "transformers.js_config": {"kv_cache_dtype": {}},
         **sizes(576, 1536, 30, 9, 3, 49152, 8192)},
        134.5,
    ),
    "Mistral-7B-v0.3": (
        {"model_type": "mistral", "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": None,
         "tie_word_embeddings": False, **sizes(4096, 14336, 32, 32, 8, 32768, 32768)},
        7248.0,
    ),
    "Qwen2-0.5B": (
        {"model_type": "qwen2", "max_window_layers": 24, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
         "sliding_window": 131072, "use_sliding_window": False, "tie_word_embeddings": True,
         **sizes(896, 4864, 24, 14, 2, 151936, 131072)},
        494.0,
    ),
    "Qwen3-0.6B": (
        {"model_type": "qwen3", "attention_bias": False, "head_dim": 128, "max_window_layers": 28,
         "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
         "use_sliding_window": False, "tie_word_embeddings": True, **sizes(1024, 3072, 28, 16, 8, 151936, 40960)},
        596.0,
    ),
    "Gemma-2B": (
        {"model_type": "gemma", "attention_bias": False, "head_dim": 256, "hidden_act": "gelu",
         "hidden_activation": None, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000.0,
         **sizes(2048, 16384, 18, 8, 1, 256000, 8192)},
        2506.2,
    ),
}  # fmt: skip
"""Name -> (fields of its config.json beside `COMMON`, millions of weights)."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name: str) -> None:
    config_fields, millions = PUBLISHED[name]
    fields = {**COMMON, "architectures": [FAMILIES[config_fields["model_type"]].architecture], **config_fields}
    family = FAMILIES[fields["model_type"]]
    config = Config(fields, family.defaults)
    spec = spec_of(family, config, None)
    config.check_others(family.harmless)
    assert config.problems == []
    assert spec is not None
    assert sum(map(math.prod, weight_shapes(spec).values())) / 1e6 == pytest.approx(millions, abs=0.1)

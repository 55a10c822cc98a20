"""GGUF files of tiny transformers models, as llama.cpp's converter would write them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from hugging_face import made
from transformers import PreTrainedModel

ARCHITECTURES = {"mistral": "llama"}
NAMES = (
    (r"model\.embed_tokens\.weight", "token_embd.weight"),
    (r"model\.norm\.weight", "output_norm.weight"),
    (r"lm_head\.weight", "output.weight"),
    (r"model\.layers\.(\d+)\.input_layernorm\.(.*)", r"blk.\1.attn_norm.\2"),
    (r"model\.layers\.(\d+)\.post_attention_layernorm\.(.*)", r"blk.\1.ffn_norm.\2"),
    (r"model\.layers\.(\d+)\.self_attn\.o_proj\.(.*)", r"blk.\1.attn_output.\2"),
    (r"model\.layers\.(\d+)\.self_attn\.(q|k|v|qkv)_proj\.(.*)", r"blk.\1.attn_\2.\3"),
    (r"model\.layers\.(\d+)\.self_attn\.(q|k)_norm\.(.*)", r"blk.\1.attn_\2_norm.\3"),
    (r"model\.layers\.(\d+)\.mlp\.gate_up_proj\.(.*)", r"blk.\1.ffn_up.\2"),
    (r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj\.(.*)", r"blk.\1.ffn_\2.\3"),
)
Change = Callable[[dict[str, Any], dict[str, np.ndarray]], object]


def theirs(name: str) -> str:
    return next(match.expand(to) for pattern, to in NAMES if (match := re.fullmatch(pattern, name)))


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Does the same as `LlamaModel.permute` of llama.cpp's converter."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def tensors_of(model: PreTrainedModel) -> dict[str, np.ndarray]:
    config, tied = model.config, model.config.tie_word_embeddings
    kind = ARCHITECTURES.get(config.model_type, config.model_type)
    found = {}
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        array = tensor.float().numpy()
        if kind == "llama" and (match := re.search(r"\.([qk])_proj\.", name)):
            array = permuted(array, config.num_attention_heads if match[1] == "q" else config.num_key_value_heads)
        found[theirs(name)] = array + 1 if kind == "gemma" and name.endswith("norm.weight") else array
    if config.rope_parameters["rope_type"] == "llama3":
        found["rope_freqs.weight"] = rope_factors(config)
    return found


def rope_factors(config: Any) -> np.ndarray:
    """Does the same as `LlamaModel.generate_extra_tensors` of llama.cpp's converter."""
    rope = config.rope_parameters
    width = config.head_dim or config.hidden_size // config.num_attention_heads
    freqs = 1.0 / (rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    factor, low, high = (rope[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    length, found = rope["original_max_position_embeddings"], []
    for freq in freqs:
        wavelength = 2 * math.pi / freq
        if wavelength < length / high:
            found.append(1.0)
        elif wavelength > length / low:
            found.append(factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, dtype=np.float32)


def metadata_of(model: PreTrainedModel) -> dict[str, Any]:
    config = model.config
    kind, rope = ARCHITECTURES.get(config.model_type, config.model_type), config.rope_parameters
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": width,
        "attention.value_length": width,
        "rope.dimension_count": width,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if rope["rope_type"] == "linear":
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    return {"general.architecture": kind, **{f"{kind}.{key}": value for key, value in found.items()}}


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    kinds: Callable[[str], Kind] = lambda name: Kind.F32,
) -> Path:
    """Writes each tensor in the type that `kinds` returns; bytes are already of that type."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key != "general.architecture":
            add_value(writer, key, value)
    for name, array in tensors.items():
        kind = kinds(name) if array.ndim > 1 else Kind.F32
        data = array if array.dtype == np.uint8 else gguf.quantize(array, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    by_type = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    if isinstance(value, list | tuple):
        writer.add_array(key, value)
    elif type(value) is int and value < 0:
        writer.add_int32(key, value)
    else:
        by_type[type(value)](key, value)


def as_gguf(
    name: str,
    path: Path,
    seed: int = 0,
    kinds: Callable[[str], Kind] = lambda name: Kind.F32,
    change: Change = lambda metadata, tensors: None,
) -> PreTrainedModel:
    """Writes a tiny transformers model as GGUF, after `change` was applied to its metadata and tensors."""
    model = made(name, seed)
    metadata, tensors = metadata_of(model), tensors_of(model)
    change(metadata, tensors)
    write_gguf(path, metadata, tensors, kinds)
    return model

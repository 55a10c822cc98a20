"""Writes a dense checkpoint in the formats of other programs: a Hugging Face folder of Llama, and a GGUF file.

All programs start from the same weights.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mod_models.checkpoint import Checkpoint
from mod_models.convert.hugging_face import foreign_name
from mod_models.spec import ModelSpec

LLAMA = {"attention_bias": "none", "qk_norm": "none", "activation": "silu", "mlp_bias": False, "embedding_scale": 1.0}
"""Declarations that a spec must have for transformers' Llama to compute the same."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
GGUF_NAMES = (
    (r"embedding\.weight", "token_embd.weight"),
    (r"norm\.weight", "output_norm.weight"),
    (r"head\.weight", "output.weight"),
    (r"layers\.(\d+)\.attention_norm\.(.*)", r"blk.\1.attn_norm.\2"),
    (r"layers\.(\d+)\.mlp_norm\.(.*)", r"blk.\1.ffn_norm.\2"),
    (r"layers\.(\d+)\.attention\.o_proj\.(.*)", r"blk.\1.attn_output.\2"),
    (r"layers\.(\d+)\.attention\.(q|k|v)_proj\.(.*)", r"blk.\1.attn_\2.\3"),
    (r"layers\.(\d+)\.mlp\.(gate|up|down)_proj\.(.*)", r"blk.\1.ffn_\2.\3"),
)
"""Pattern of our name -> name in llama.cpp."""

FILE_TYPES = {np.float32: gguf.LlamaFileType.ALL_F32, np.float16: gguf.LlamaFileType.MOSTLY_F16}


def check_llama(spec: ModelSpec) -> None:
    """Checks that Llama's code computes the same as the model.

    Raises:
        ValueError: the model routes, has experts, or declares something else that Llama does not have.
    """
    unsupported = [name for name, value in LLAMA.items() if getattr(spec, name) != value]
    unsupported += [name for name in ("routing", "experts", "rope_scaling") if getattr(spec, name) is not None]
    if unsupported:
        raise ValueError(f"the rivals are given a dense Llama model, and this one declares {', '.join(unsupported)}")


def write_hugging_face(checkpoint: Checkpoint, folder: Path, tokenizer: Path | None = None) -> Path:
    """Writes a folder like transformers' `save_pretrained`, with the tokenizer of a folder, or a tokenizer of bytes."""
    spec = checkpoint.spec
    check_llama(spec)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": spec.vocab_size,
        "hidden_size": spec.d_model, "num_hidden_layers": spec.n_layers, "num_attention_heads": spec.n_heads,
        "num_key_value_heads": spec.n_kv_heads, "head_dim": spec.d_head, "intermediate_size": spec.d_ff,
        "max_position_embeddings": spec.max_positions, "rope_theta": spec.rope_theta, "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tie_embeddings, "hidden_act": "silu", "torch_dtype": "float32",
        "attention_bias": False, "mlp_bias": False, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(ids), encoding="utf-8")
    tensors = {foreign_name(name): tensor.float().contiguous() for name, tensor in checkpoint.weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer is None:
        _write_tokenizer_of_bytes(spec.vocab_size, folder)
    else:
        for name in TOKENIZER_FILES:
            if (tokenizer / name).is_file():
                shutil.copy(tokenizer / name, folder / name)
    return folder


def _write_tokenizer_of_bytes(size: int, folder: Path) -> None:
    """Writes a tokenizer of bytes and unused words up to `size`, because some programs need one to open a model."""
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: index for index, word in enumerate([*words, *(f"<{i}>" for i in range(len(words), size))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": words[0], "bos_token": words[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")


def write_gguf(checkpoint: Checkpoint, path: Path, dtype: type[np.floating[Any]] = np.float32) -> Path:
    """Writes a GGUF file of architecture `llama` with matrices in `dtype`, without a vocabulary: programs get ids."""
    spec = checkpoint.spec
    check_llama(spec)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(spec.vocab_size)
    writer.add_context_length(spec.max_positions)
    writer.add_embedding_length(spec.d_model)
    writer.add_block_count(spec.n_layers)
    writer.add_feed_forward_length(spec.d_ff)
    writer.add_head_count(spec.n_heads)
    writer.add_head_count_kv(spec.n_kv_heads)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_key_length(spec.d_head)
    writer.add_value_length(spec.d_head)
    writer.add_rope_dimension_count(spec.d_head)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_file_type(FILE_TYPES[dtype])
    writer.add_tokenizer_model("no_vocab")
    for name, array in _gguf_tensors(checkpoint).items():
        writer.add_tensor(name, array.astype(dtype) if array.ndim > 1 else array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_tensors(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    spec, tensors = checkpoint.spec, {}
    heads = {"q": spec.n_heads, "k": spec.n_kv_heads}
    for name, tensor in checkpoint.weights.items():
        array = tensor.float().numpy()
        if match := re.search(r"\.([qk])_proj\.", name):
            # llama.cpp rotates neighbours, Llama's code rotates halves. See `LlamaModel.permute` of its converter.
            apart: Any = array.reshape(heads[match[1]], 2, spec.d_head // 2, -1)
            array = np.ascontiguousarray(apart.swapaxes(1, 2)).reshape(array.shape)
        tensors[_gguf_name(name)] = array
    return tensors


def _gguf_name(name: str) -> str:
    return next(match.expand(to) for pattern, to in GGUF_NAMES if (match := re.fullmatch(pattern, name)))

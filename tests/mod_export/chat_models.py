"""Random Llamas that answer conversations, as transformers saves them, and their build folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from command_line import invoke
from tokenizer_folders import write_folder
from transformers import LlamaConfig, LlamaForCausalLM


def random_llama(vocab_size: int, positions: int, **changed: Any) -> Any:
    """Returns a model that is large enough for texts of many different tokens."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "initializer_range": 0.3,
    }  # fmt: skip
    config = LlamaConfig(vocab_size=vocab_size, max_position_embeddings=positions, **{**sizes, **changed})
    return LlamaForCausalLM(config).eval()


def save_chat_model(folder: Path, model: Any, family: str, template: str) -> None:
    """Saves a model with the tokenizer of a family and a chat template."""
    model.save_pretrained(folder)
    config_json = (folder / "config.json").read_text()
    write_folder(folder, family)
    (folder / "config.json").write_text(config_json)
    (folder / "chat_template.jinja").write_text(template)


def text_toml(window: int, prompt: int, batches: Sequence[int]) -> str:
    """Configuration of a build for ONNX Runtime that writes text."""
    return (
        f'buckets = [[1, 16]]\ntargets = ["ort-cpu"]\n'
        f"[generation]\nwindow = {window}\nprompts = [{prompt}]\nbatches = {list(batches)}\n"
    )


def built(source: Path, toml: str, out: Path | None = None) -> Path:
    """Builds a model without evidence, beside its folder or as `out`, and returns the build folder."""
    out = out or source.parent / "built"
    (source.parent / "c.toml").write_text(toml)
    result = invoke("build", source, "--no-evidence", "-c", source.parent / "c.toml", "-o", out, "-q")
    assert result.exit_code == 0, result.output
    return out

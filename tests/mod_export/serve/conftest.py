"""Servers that the tests of a module share, and a folder that answers conversations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from chat_templates import LLAMA3
from command_line import invoke
from serving import Server, serving
from tokenizer_folders import write_folder
from transformers import LlamaConfig, LlamaForCausalLM

from mod_export.runtime.generator import Generator, load_generator

BUILD_TOML = """
buckets = [[1, 16]]
targets = ["ort-cpu"]
[generation]
window = 128
prompts = [64]
batches = [2]
"""


@pytest.fixture(scope="module")
def server(written: Path) -> Iterator[Server]:
    """A server of the folder that writes text."""
    with serving(written) as found:
        yield found


@pytest.fixture(scope="module")
def other(written: Path) -> Iterator[Generator]:
    """A generator on the same folder, which writes the expected texts."""
    with load_generator(written) as found:
        yield found


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build folder of a random Llama with Llama 3's tokenizer and template."""
    source = tmp_path_factory.mktemp("chat") / "llama"
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=408, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).eval().save_pretrained(source)
    config_json = (source / "config.json").read_text()
    write_folder(source, "llama3")
    (source / "config.json").write_text(config_json)
    (source / "chat_template.jinja").write_text(LLAMA3)
    (source.parent / "c.toml").write_text(BUILD_TOML)
    built = source.parent / "built"
    result = invoke("build", source, "--no-evidence", "-c", source.parent / "c.toml", "-o", built, "-q")
    assert result.exit_code == 0, result.output
    return built

"""A small chat model as transformers saves it, a server of its build folder, and programs of another environment."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from chat_templates import CHATML
from client_programs import Run
from command_line import invoke
from serving import Server, serving
from tokenizer_folders import write_folder
from transformers import LlamaConfig, LlamaForCausalLM

PROGRAMS = Path(__file__).parents[2] / ".venv" / "clients" / "bin"
"""Environment of the clients (`make clients`), which pin other versions of libraries than the project."""
BUILD_TOML = """
buckets = [[1, 16]]
targets = ["ort-cpu"]
[generation]
window = 256
prompts = [256]
batches = [1, 4]
"""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Llama with a byte-level tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("clients") / "llama"
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=403, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2, bos_token_id=401, eos_token_id=402,
    )  # fmt: skip
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    config_json = (folder / "config.json").read_text()
    write_folder(folder, "smollm2", chat_template=CHATML)
    (folder / "config.json").write_text(config_json)
    return folder


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[Server]:
    (model.parent / "c.toml").write_text(BUILD_TOML)
    built = model.parent / "built"
    result = invoke("build", model, "--no-evidence", "-c", model.parent / "c.toml", "-o", built, "-q")
    assert result.exit_code == 0, result.output
    with serving(built) as found:
        yield found


@pytest.fixture(scope="session")
def run() -> Run:
    """Runs a program of the clients' environment, which must succeed, and returns what it prints."""

    def call(program: str, *arguments: object, **environment: str) -> str:
        done = subprocess.run(
            [PROGRAMS / program, *map(str, arguments)],
            capture_output=True, text=True, timeout=900, check=False,
            env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", "OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1",
                 "TOKENIZERS_PARALLELISM": "false", "LITELLM_LOCAL_MODEL_COST_MAP": "True", **environment},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    return call

"""A small chat model as transformers saves it, a server of its build folder, and programs of another environment."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_models import built, random_llama, save_chat_model, text_toml
from chat_templates import CHATML, LLAMA3
from client_programs import PROGRAMS, Run
from serving import Server, serving


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Llama with a byte-level tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("clients") / "llama"
    config = {"hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.2}
    save_chat_model(folder, random_llama(403, 256, bos_token_id=401, eos_token_id=402, **config), "smollm2", CHATML)
    return folder


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[Server]:
    with serving(built(model, text_toml(256, 256, [1, 4]))) as found:
        yield found


@pytest.fixture(scope="session")
def calling_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a random Llama whose template writes tools, with a window for their descriptions."""
    source = tmp_path_factory.mktemp("calling") / "llama"
    save_chat_model(source, random_llama(408, 2048), "llama3", LLAMA3)
    with serving(built(source, text_toml(2048, 1024, [2]))) as found:
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

"""Servers that the tests of a module share, and a folder that answers conversations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from build_folders import once
from chat_models import built, random_llama, save_chat_model, text_toml
from chat_templates import LLAMA3
from serving import Server, serving

from mod_export.runtime.generator import Generator, load_generator


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
def chat_folder(shared_folder: Path) -> Path:
    """Build folder, read-only, of a random Llama with Llama 3's tokenizer and template."""
    folder = shared_folder / "chat"

    def make() -> None:
        save_chat_model(folder / "llama", random_llama(408, 128), "llama3", LLAMA3)
        built(folder / "llama", text_toml(128, 64, [2]))

    return once(folder, make) / "built"

"""The commands and the code of the quick starts run as they stand in docs/quickstart.md."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from chat_models import built, random_llama, save_chat_model, text_toml
from chat_templates import CHATML
from command_line import uncovered
from hub_server import hub_environment, serving_hub
from serving import command

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
PARTS = dict(re.findall(r"^## (.*)\n((?:(?!^## ).*\n)+)", PAGE, re.MULTILINE))
SERVER = "http://127.0.0.1:8000"


def code_of(part: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", PARTS[part], re.DOTALL)


def commands_of(part: str, name: str) -> list[list[str]]:
    """Arguments of each command with this name, without the comment that may follow them."""
    return [shlex.split(line, comments=True) for line in re.findall(rf"^    {name} (.*)$", PARTS[part], re.MULTILINE)]


def ran(arguments: list[str], folder: Path, environment: dict[str, str] | None = None) -> str:
    """Runs Python in a folder and returns what it printed. A busy machine may miss the gate on speed: exit code 4."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 4), done.stderr
    return done.stdout


def test_parts() -> None:
    assert list(PARTS) == ["Your own module", "A Hugging Face model", "A server"]
    assert [len(code_of(part)) for part in PARTS] == [2, 1, 1]
    (extras,) = re.findall(r'^    pip install .* "\.\[(.*)\]"$', PAGE, re.MULTILINE)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= set(declared)


@pytest.mark.slow
def test_own_module(tmp_path: Path) -> None:
    model, use = code_of("Your own module")
    (tmp_path / "my_model.py").write_text(model, encoding="utf-8")
    (arguments,) = commands_of("Your own module", "mod-export")
    assert re.search(r"ort-cpu +b1s256", ran(["-m", "mod_export", *arguments], tmp_path))
    report = json.loads((tmp_path / "build" / "mine" / "report.json").read_text())
    assert {row["passed"] for row in report["parity"]} == {True}
    assert [row["bucket"] for row in report["speedup"]] == ["b1s64", "b1s256"]
    assert "{'logits': (1, 64, 256)}" in ran(["-c", use], tmp_path)


@pytest.mark.slow
def test_hugging_face_model(tmp_path: Path) -> None:
    """The hub has a tiny model under the page's name."""
    build, generate = commands_of("A Hugging Face model", "mod-export")
    name = next(word for word in build if word.startswith("hf://")).removeprefix("hf://")
    folder = tmp_path / "hub" / name
    save_chat_model(folder, random_llama(480, 512), "qwen2", CHATML)
    with serving_hub(tmp_path / "hub") as endpoint:
        environment = hub_environment(endpoint, tmp_path / "cache")
        ran(["-m", "mod_export", *build], tmp_path, environment)
    assert ran(["-m", "mod_export", *generate], tmp_path)
    (code,) = code_of("A Hugging Face model")
    assert ran(["-c", code], tmp_path)


@pytest.mark.slow
def test_server(tmp_path: Path) -> None:
    save_chat_model(tmp_path / "model", random_llama(480, 512), "qwen2", CHATML)
    (arguments,) = commands_of("A server", "mod-export")
    assert arguments[0] == "serve"
    folder = built(tmp_path / "model", text_toml(256, 32, [1]), tmp_path / arguments[1])
    with command(folder) as (_, address):
        answers = [_answer(arguments, address) for arguments in commands_of("A server", "curl")]
        (code,) = code_of("A server")
        said = ran(["-c", code.replace(SERVER, address)], tmp_path, uncovered())
        with urllib.request.urlopen(address) as page:
            assert "mod-export" in page.read().decode()
    assert answers[0]["usage"]["completion_tokens"] <= 16
    assert answers[1]["choices"][0]["message"]["role"] == "assistant"
    assert "mod_export_queue_depth" in answers[2]
    assert said.strip()


def _answer(arguments: list[str], address: str) -> Any:
    """Sends the request that curl would send with these arguments."""
    url, *body = arguments
    assert url.startswith(SERVER)
    assert body[::2] in ([], ["-d"])
    data = body[1].encode() if body else None
    with urllib.request.urlopen(url.replace(SERVER, address), data) as answer:
        text = answer.read().decode()
    return json.loads(text) if body else text

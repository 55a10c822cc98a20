"""The examples of the README and the guide run, and the links of all pages lead somewhere."""

from __future__ import annotations

import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import FEW_SAMPLES
from foreign_models import made
from headless_chromium import BROWSER
from mod_dialects import Inner

from benchmarks.figures.run import main
from mod_export.cli import cli
from mod_export.config import config_from_toml

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README + GUIDE, re.DOTALL)
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_inference_example(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(built, tmp_path / "build" / "demo")
    monkeypatch.chdir(tmp_path)
    first, second = [block for block in BLOCKS if 'load("build/demo"' in block]
    exec(first, {})
    exec(second, {})
    assert capsys.readouterr().out == "(1, 11, 256)\nort-cpu (1, 11, 256)\n"


class Named(torch.nn.Module):
    """Wraps a model, with the input name that the README uses."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(input_ids)
        return found


@pytest.mark.slow
def test_example_of_a_model_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the smallest model with the README's names, at shapes that take no time, and one target."""
    monkeypatch.chdir(tmp_path)
    (example,) = [block for block in BLOCKS if "mod_export.build(" in block]
    example = example.replace("32_000", "40").replace("128", "16").replace("512", "32")
    example = example.replace(
        'out="build/mine",', f"out='build/mine', targets='ort-cpu', config={str(tmp_path / 'c')!r},"
    )
    (tmp_path / "c").write_text(FEW_SAMPLES, encoding="utf-8")
    model, dense = made("scatter_add"), made("scatter_add")
    dense.blocks = torch.nn.ModuleList([Inner().eval() for _ in range(4)])
    names: dict[str, Any] = {"model": Named(model), "dense_model": Named(dense), "ids": np.zeros((1, 16), np.int64)}
    exec(example, names)
    assert names["report"].verdict.status == "pass"
    assert names["outputs"]["logits"].shape == (1, 16, 40)


def test_checkpoint_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = [block for block in BLOCKS if "save_checkpoint" in block]
    exec(example, {})
    assert (tmp_path / "build" / "mine.pt").exists()


def test_every_python_block_is_tested() -> None:
    assert len(BLOCKS) == 4


def leads_somewhere(document: Path, name: str, anchor: str) -> bool:
    """Whether a file exists and, if it is a page, has a heading for the anchor."""
    path = document.parent / name if name else document
    if not path.exists() or not anchor or path.suffix != ".md":
        return path.exists()
    prose = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_exist_and_python_is_python(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [link for link in links if not leads_somewhere(document, *link.partition("#")[::2])] == []
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        compile(block, document.name, "exec")


def test_commands_and_make_targets_exist() -> None:
    assert set(re.findall(r"^    \.venv/bin/mod-export (\w+)", README, re.MULTILINE)) <= set(cli.commands)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^    make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_configurations_in_the_pages_are_valid(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "text.md").read_text(encoding="utf-8")
    indented = re.findall(r"^    \[generation\]\n(?:    .+\n)+", text, re.MULTILINE)
    blocks = [*re.findall(r"```toml\n(.*?)```", README + GUIDE, re.DOTALL), *map(textwrap.dedent, indented)]
    assert len(blocks) == 2
    for block in blocks:
        (tmp_path / "c.toml").write_text(block, encoding="utf-8")
        config_from_toml(tmp_path / "c.toml")


def test_options_in_the_pages_exist() -> None:
    """Options of the command line that stand in code are those of some command."""
    options = {name for command in cli.commands.values() for option in command.params for name in option.opts}
    for page in ("README.md", "docs/quickstart.md", "docs/guide.md", "docs/text.md", "docs/evidence.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        lines = re.findall(r"^ +(?:\$ )?(?:\.venv/bin/)?(mod-export .*)", text, re.MULTILINE)
        named = {name for line in lines for name in re.findall(r"--[a-z-]+", line)}
        assert named <= options, page


@pytest.mark.skipif(BROWSER is None, reason="needs a browser")
def test_pictures_are_small_and_tell_the_speedup(built: Path, tmp_path: Path) -> None:
    assert main(built, tmp_path) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"report.png", "speedup.svg"}
    assert all(path.stat().st_size < 300_000 for path in tmp_path.iterdir())
    svg = (tmp_path / "speedup.svg").read_text(encoding="utf-8")
    assert "predicted (FLOPs)" in svg
    assert re.search(r"\d\.\d\dx \[\d", svg)

"""What the README shows runs, and what it links to exists."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def run(code: str, folder: Path) -> str:
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True).stdout


def test_inference_example(tmp_path: Path, built: Path) -> None:
    shutil.copytree(built, tmp_path / "build" / "demo")
    (example,) = [block for block in BLOCKS if "mod_export.load" in block]
    assert run(example, tmp_path) == "(1, 11, 256)\n"


def test_checkpoint_example(tmp_path: Path) -> None:
    (example,) = [block for block in BLOCKS if "save_checkpoint" in block]
    run(example, tmp_path)
    assert (tmp_path / "build" / "mine.pt").exists()


def test_every_python_block_is_tested() -> None:
    assert len(BLOCKS) == 2


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_exist(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", document.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert missing == []


def test_the_tree_names_what_exists() -> None:
    tree = README.split("## The tree")[1]
    names = re.findall(r"^\s{4,6}([a-z_]+(?:/|\.py))\s", tree, re.MULTILINE)
    assert len(names) > 12
    for name in names:
        assert (ROOT / name).exists() or (ROOT / "mod_export" / name).exists(), name


def test_commands_exist() -> None:
    shown = set(re.findall(r"^    \.venv/bin/mod-export (\w+)", README, re.MULTILINE))
    help_text = run("from mod_export.cli import main; import sys; sys.argv = ['mod-export', '--help']; main()", ROOT)
    assert shown <= set(re.findall(r"^  (\w+)  ", help_text, re.MULTILINE))


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^    make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target

"""What the README shows runs, and what it links to exists."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from mod_export.cli import generate
from mod_export.config import GenerationOptions

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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_of_the_documents_is_python(document: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL):
        compile(block, document.name, "exec")


def test_options_of_generation_are_those_of_the_configuration() -> None:
    page = (ROOT / "docs" / "generation.md").read_text(encoding="utf-8")
    table = textwrap.dedent(page[page.index("    [generation]") : page.index("**The window is part")])
    shown = tomllib.loads(table)["generation"]
    assert shown == GenerationOptions().model_dump(mode="json")


def test_the_command_that_writes_text_has_the_options_that_are_explained() -> None:
    page = (ROOT / "docs" / "generation.md").read_text(encoding="utf-8")
    known = {name for option in generate.params for name in option.opts if name.startswith("--")}
    rows = "\n".join(re.findall(r"^\| (`--.*?) \|", page, re.MULTILINE))
    assert set(re.findall(r"--[a-z-]+", rows)) == known - {"--quiet", "--verbose"}

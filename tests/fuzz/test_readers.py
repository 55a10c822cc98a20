"""Untrusted inputs that are kept, among them all that fuzzing found: each is read, or refused with a sentence."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.fuzz import run
from benchmarks.fuzz.readers import READERS, inputs_of, read

KEPT = [(name, path) for name in READERS for path in inputs_of(name)]
INCOMPLETE = ("checkpoint", "hugging_face", "manifest")
"""What these read is a part of something, of which the rest is missing here, so that they refuse it in the end."""
CUTS = 12


@pytest.mark.parametrize(("name", "path"), KEPT, ids=[f"{name}-{path.name}" for name, path in KEPT])
def test_an_input_is_read_or_refused(name: str, path: Path, tmp_path: Path) -> None:
    taken = read(name, path.read_bytes(), tmp_path)
    if not path.name.startswith("found-"):
        # Fuzzing begins with inputs that are right, or it would not get far.
        assert taken == (name not in INCOMPLETE)


@pytest.mark.parametrize(("name", "path"), KEPT, ids=[f"{name}-{path.name}" for name, path in KEPT])
def test_an_input_that_is_cut_off(name: str, path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    for end in range(0, len(content), max(1, len(content) // CUTS)):
        folder = tmp_path / str(end)
        folder.mkdir()
        read(name, content[:end], folder)


def test_every_reader_has_inputs() -> None:
    assert {name for name in READERS if inputs_of(name)} == set(READERS)
    assert {path.name for path in run.INPUTS.iterdir()} == set(READERS)


@pytest.mark.slow
def test_cases_in_the_format_of_a_reader_do_no_harm(inputs: Path) -> None:
    found = CliRunner().invoke(run.main, ["--cases", "20", "--seed", "1"])
    assert found.exit_code == 0, found.output
    assert len(re.findall(r"^\w+ +20 cases .* 0 problems$", found.output, re.MULTILINE)) == len(READERS)


PLANTED = {
    "open(folder.parent / 'outside' / 'secret').close()": r"open \S+/outside/secret",
    "__import__('subprocess').run(['true'])": r"subprocess\.Popen: ",
    "(folder.parent / 'x').write_text('')": r"open \S+/x",
    "bytearray(3 << 30)": "MemoryError: ",
    "print(1 / 0)": "ZeroDivisionError: division by zero",
}
"""What a careless reader could do -> how it is reported."""


@pytest.mark.slow
@pytest.mark.parametrize("code", PLANTED)
def test_harm_is_noticed(code: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import mod_export.config as config\nfrom pathlib import Path\nread = config.config_from_toml\nseen = set()\n"
        "def planted(path):\n    folder = path.parent\n    seen.add(path.read_bytes())\n"
        f"    if len(seen) == 5: {code}\n"
        "    return read(path)\nconfig.config_from_toml = planted\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    found = CliRunner().invoke(run.main, ["--cases", "5", "configuration"])
    assert found.exit_code == 1, found.output
    assert re.search(rf"^  case \d: {PLANTED[code]}.*; found-\w+$", found.output, re.MULTILINE), found.output


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the inputs, beside which findings are written."""
    copy = Path(shutil.copytree(run.INPUTS, tmp_path / "tests" / "fuzz" / "inputs"))
    monkeypatch.setattr(run, "INPUTS", copy)
    return copy


@pytest.mark.slow
def test_a_planted_error_is_found_and_kept(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import mod_export.config as config\nread = config.config_from_toml\n"
        "def planted(path):\n    if b'k' in path.read_bytes()[:8]: raise ZeroDivisionError('planted')\n"
        "    return read(path)\nconfig.config_from_toml = planted\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    found = CliRunner().invoke(run.main, ["--seconds", "60", "configuration"])
    assert found.exit_code == 1, found.output
    assert "ZeroDivisionError: planted" in found.output
    (kept,) = (inputs / "configuration").glob("found-*")
    assert b"k" in kept.read_bytes()[:8]


@pytest.mark.slow
def test_a_commit_draws_one_reader(inputs: Path) -> None:
    drawn = set()
    for commit in ("a", "b"):
        found = CliRunner().invoke(run.main, ["--seconds", "1", "--drawn", commit])
        assert found.exit_code == 0, found.output
        (line,) = found.output.splitlines()
        assert int(line.split()[1].replace(",", "")) > 0
        drawn.add(line.split()[0])
    assert drawn <= set(READERS)

"""The workflows in .github fit GitHub's schema and name what exists. No runner is used."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.pythons.run import PYTHONS
from benchmarks.release.run import BILL

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
CI, RELEASE = WORKFLOWS
each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    return found


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in jobs(path).values():
        yield from job["steps"]


@each_workflow
def test_it_fits_the_schema(path: Path) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


@each_workflow
def test_its_commands_are_bash_and_name_what_exists(path: Path) -> None:
    for step in steps(path):
        script = step.get("run", "")
        checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, ""), script
        for target in re.findall(r"\bmake (\w+)", script):
            assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target
        named = re.findall(r"(?<![\w/$])(?:deploy|tests|\.ci)/[\w./-]+\w", script)
        assert [name for name in named if not (ROOT / name).exists()] == []


@each_workflow
def test_actions_have_a_major_version_and_jobs_an_end(path: Path) -> None:
    for job in jobs(path).values():
        assert job["timeout-minutes"] <= 90
    for step in steps(path):
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w/-]+@(v\d+|release/v\d+)", step["uses"])


def test_every_python_is_in_the_matrix() -> None:
    found = jobs(CI)
    (main,) = [step["with"]["python-version"] for step in found["ci"]["steps"] if "with" in step]
    assert [main, *found["pythons"]["strategy"]["matrix"]["python"]] == list(PYTHONS)


def test_only_what_is_built_is_published_and_by_nobody_else() -> None:
    found = jobs(RELEASE)
    assert found["publish"]["needs"] == "build"
    assert found["publish"]["permissions"] == {"id-token": "write"}
    assert not any("password" in step.get("with", {}) for step in steps(RELEASE))
    (bill,) = [step["with"]["sbom-path"] for step in steps(RELEASE) if "sbom-path" in step.get("with", {})]
    assert bill == f"dist/{BILL}"

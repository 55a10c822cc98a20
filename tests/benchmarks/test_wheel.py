"""The wheel in empty environments, with different extras: what works there, and what it says about the rest."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

from benchmarks.floors.environments import (
    ROOT,
    alone_with_pytest,
    checked,
    environment_with,
    logits_here,
    run,
    serve,
    tiny_build,
    tiny_checkpoint,
    wheel_of,
)

TOLERANCE = 1e-4
CONSTRAINTS = ROOT / "constraints.txt"
KEPT = ROOT / "tests" / "deployment"
BASE_IMAGE_BYTES, IMAGE_BYTES = 135_000_000, 400_000_000
"""About what python:3.11-slim has, and the most that our image may have (.github/workflows/ci.yml)."""


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_of(tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_a_wheel_with_ort_serves_and_does_not_build(tmp_path: Path, wheel: Path) -> None:
    built = tiny_build(tmp_path / "model")
    python = environment_with(tmp_path / "venv", wheel, "ort", [], CONSTRAINTS)
    out = tmp_path / "out"
    out.mkdir()
    np.testing.assert_allclose(serve(python, built, out), logits_here(built), atol=TOLERANCE)

    checkpoint, config = tiny_checkpoint(tmp_path / "other")
    refused = run(python, "-m", "mod_export", "build", checkpoint, "-c", config, "-o", out / "build", cwd=out)
    assert refused.returncode == 2, refused.stderr
    assert re.fullmatch(
        r"error: `mod-export build` needs (\w+), which cannot be imported here \(No module named '\1'\)\n"
        r' +install it: pip install "mod-export\[build\]"\n',
        refused.stderr,
    )
    shown = run(python, "-m", "mod_export", "targets", cwd=out).stdout
    assert re.search(
        r'^ort-cpu +runs +onnxruntime \S+; to build, pip install "mod-export\[build\]"', shown, re.MULTILINE
    )
    assert not (out / "build").exists()


@pytest.mark.slow
def test_a_wheel_alone_says_what_each_target_needs(tmp_path: Path, wheel: Path) -> None:
    python = environment_with(tmp_path / "venv", wheel, "", [], CONSTRAINTS)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert checked(python.parent / "mod-export", "--version", cwd=tmp_path) == f"mod-export, version {version}\n"
    lines = checked(python, "-m", "mod_export", "targets", cwd=tmp_path).splitlines()
    assert len(lines) == 7
    assert all(re.fullmatch(r"\S+ +- +\w+ is not installed; install mod-export\[[\w-]+\]", line) for line in lines)
    assert "buckets" in tomllib.loads(checked(python, "-m", "mod_export", "config", "show", cwd=tmp_path))


@pytest.mark.slow
def test_a_wheel_as_in_the_image_serves_and_is_small(tmp_path: Path, wheel: Path) -> None:
    python = environment_with(tmp_path / "venv", wheel, "serve,ort,generate", [], CONSTRAINTS)
    installed = [path for path in (tmp_path / "venv").rglob("*") if path.is_file() and "pip" not in path.parts]
    assert sum(path.stat().st_size for path in installed) < IMAGE_BYTES - BASE_IMAGE_BYTES
    checked(python, "-m", "pip", "install", "-q", "--constraint", CONSTRAINTS, "pytest", cwd=tmp_path)
    shown = checked(python, *alone_with_pytest(KEPT, tmp_path), cwd=tmp_path)
    assert re.search(r"^\d+ passed in ", shown, re.MULTILINE)


@pytest.mark.slow
def test_a_wheel_that_builds_runs_the_commands_of_the_readme(tmp_path: Path, wheel: Path) -> None:
    python = environment_with(tmp_path / "venv", wheel, "build,ort,generate", [], CONSTRAINTS)
    checkpoint, config = tiny_checkpoint(tmp_path / "model")

    def command(*arguments: object) -> str:
        return checked(python.parent / "mod-export", *arguments, cwd=tmp_path)

    assert command("build", checkpoint, "-c", config, "-o", "out", "-q").endswith("every gate met: out\n")
    assert "PASS" in command("validate", "out")
    assert "ort-cpu" in command("bench", "out")
    assert json.loads(command("report", "out", "--format", "json"))["verdict"]["status"] == "pass"
    assert "FLOPs" in command("inspect", checkpoint)
    assert "one thread" in command("plan", checkpoint)
    lines = command("generate", "out", "text", "--max-new-tokens", "4", "--ignore-eos", "--json").splitlines()
    assert len(json.loads(lines[-1])["done"]["ids"]) == 4

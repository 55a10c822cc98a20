"""The wheel with [ort], in an empty environment, serves a build folder and says what building needs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.floors.environments import (
    ROOT,
    environment_with,
    logits_here,
    run,
    serve,
    tiny_build,
    tiny_checkpoint,
    wheel_of,
)

TOLERANCE = 1e-4


@pytest.mark.slow
def test_a_wheel_with_ort_serves_and_does_not_build(tmp_path: Path) -> None:
    built = tiny_build(tmp_path / "model")
    constraints = ROOT / "constraints.txt"
    python = environment_with(tmp_path / "venv", wheel_of(tmp_path / "wheel"), "ort", [], constraints)
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

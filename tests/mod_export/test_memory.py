"""A budget of memory: what is left of it, and what does not fit is refused with the number that is needed."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest
from command_line import invoke

from mod_export.memory import free_bytes, limited


def test_without_a_budget_it_is_what_is_free() -> None:
    free = psutil.virtual_memory().available
    assert free_bytes() == pytest.approx(free, rel=0.2)


def test_a_budget_counts_what_this_process_has() -> None:
    with limited(2**62):
        assert free_bytes() == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    own = psutil.Process().memory_info()
    with limited(own.rss + 2**26):
        assert free_bytes() <= own.rss + 2**26
    with limited(1):
        assert free_bytes() == 0
    assert free_bytes() > 0


def test_too_small_a_budget_is_refused_before_anything_is_built(checkpoint: Path, fast: Path, tmp_path: Path) -> None:
    said = invoke("build", checkpoint, "-c", fast, "-o", tmp_path / "out", "--max-memory", "10MiB")
    assert said.exit_code == 2, said.output
    found = re.search(r"max_memory: this build needs about ([\d.]+) GiB, 0\.0 GiB are allowed", said.stderr)
    assert found, said.stderr
    assert not (tmp_path / "out").exists()
    enough = f"{float(found[1]) + 0.1:.1f}GiB"
    assert invoke("build", checkpoint, "-c", fast, "-o", tmp_path / "out", "--max-memory", enough).exit_code == 0


def test_a_size_that_is_none(checkpoint: Path, tmp_path: Path) -> None:
    said = invoke("build", checkpoint, "-o", tmp_path / "out", "--max-memory", "12 apples")
    assert said.exit_code == 2
    assert "max_memory: " in said.stderr

"""A budget of memory: what is left of it, and what does not fit is refused with the number that is needed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import psutil
import pytest
import torch
from command_line import invoke
from safetensors.torch import load_file, save_file

from mod_export import environment
from mod_export.environment import free_bytes, let_go, limited


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


def test_too_small_a_budget_is_refused_before_anything_is_built(
    checkpoint: Path, config_file: Path, built_copy: Path
) -> None:
    arguments = ["build", checkpoint, "-c", config_file, "--max-memory"]
    said = invoke(*arguments, "10MiB", "-o", built_copy.parent / "out")
    assert said.exit_code == 2, said.output
    found = re.search(r"max_memory: this build needs about ([\d.]+) GiB, 0\.0 GiB are allowed", said.stderr)
    assert found, said.stderr
    assert not (built_copy.parent / "out").exists()
    assert invoke(*arguments, f"{float(found[1]) + 0.1:.1f}GiB", "-o", built_copy).exit_code == 0


def test_a_size_that_is_none(checkpoint: Path, tmp_path: Path) -> None:
    said = invoke("build", checkpoint, "-o", tmp_path / "out", "--max-memory", "12 apples")
    assert said.exit_code == 2
    assert "max_memory: " in said.stderr


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssFile:"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux for what is resident")
def test_what_was_read_from_a_file_is_given_back(tmp_path: Path) -> None:
    size = 2**26
    save_file({"large": torch.arange(size // 4, dtype=torch.float32)}, tmp_path / "w.safetensors")
    tensors = load_file(tmp_path / "w.safetensors")
    total = tensors["large"].double().sum()
    before = resident_bytes()
    let_go(tensors.values())
    assert before - resident_bytes() > size // 2
    assert tensors["large"].double().sum() == total


def test_what_is_in_memory_alone_stays() -> None:
    tensors = [torch.arange(2**16), torch.zeros(0), torch.ones(3), torch.arange(2**14).reshape(128, 128).T]
    copies = [tensor.clone() for tensor in tensors]
    let_go(tensors)
    assert all(torch.equal(one, other) for one, other in zip(tensors, copies, strict=True))


def test_other_systems_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(environment.ctypes, "CDLL", None)
    let_go([torch.zeros(2**16)])

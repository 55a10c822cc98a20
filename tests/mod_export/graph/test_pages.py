"""Pages of mapped weights are given back, and nothing is lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mod_export.graph import pages
from mod_export.graph.pages import let_go


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
    monkeypatch.setattr(pages.ctypes, "CDLL", None)
    let_go([torch.zeros(2**16)])

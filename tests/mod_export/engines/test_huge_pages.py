"""Memory that an engine fills moves into huge pages, and nothing else changes."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from graph_folders import write_products

from mod_export.engines import huge_pages
from mod_export.engines.huge_pages import MADV_COLLAPSE, huge_page_size, in_huge_pages
from mod_export.graph.weights import write_weights

SYSTEM = Path("/sys/kernel/mm/transparent_hugepage")
HUGE = int((SYSTEM / "hpage_pmd_size").read_text()) if SYSTEM.is_dir() else 2**21


def can_collapse() -> bool:
    """Whether this Linux gives huge pages only to who asks, and moves memory that is in use into them."""
    version = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    return SYSTEM.is_dir() and "[madvise]" in (SYSTEM / "enabled").read_text() and version >= (6, 1)


needs_collapse = pytest.mark.skipif(not can_collapse(), reason="this system cannot move memory into huge pages")


class Memory:
    """Private memory that begins where a huge page can begin, for which nobody has asked for huge pages. A page before
    it that cannot be written keeps the kernel from counting it together with other memory.
    """

    def __init__(self, pages: int) -> None:
        self.map = mmap.mmap(-1, (pages + 1) * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ)
        self.offset = HUGE - address % HUGE
        self.begin, self.bytes = address + self.offset, pages * HUGE

    def fill(self, value: int, share: float = 1.0) -> None:
        """Writes the first share of each huge page."""
        for start in range(self.offset, self.offset + self.bytes, HUGE):
            length = int(share * HUGE)
            self.map[start : start + length] = bytes([value]) * length

    def huge(self) -> int:
        """Counts the bytes that are in huge pages, as the kernel says."""
        found, counted = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if begins := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                first, last = (int(number, 16) for number in begins.groups())
                counted = first < self.begin + self.bytes and last > self.begin
            elif counted and line.startswith("AnonHugePages:"):
                found += 1024 * int(line.split()[1])
        return found


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    huge_page_size.cache_clear()
    yield
    huge_page_size.cache_clear()


@needs_collapse
def test_memory_that_is_filled_within_moves_and_other_memory_does_not() -> None:
    earlier, within, sparse = Memory(4), Memory(8), Memory(4)
    earlier.fill(1)
    with in_huge_pages():
        within.fill(2)
        sparse.fill(3, share=0.5)
    assert within.huge() == within.bytes
    assert earlier.huge() == sparse.huge() == 0
    assert within.map[within.offset : within.offset + within.bytes] == b"\2" * within.bytes


@needs_collapse
def test_a_reservation_that_is_larger_than_the_memory_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(4)
    assert any(first <= memory.begin < last for first, last in huge_pages._private_memory())
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": HUGE // mmap.PAGESIZE}.__getitem__)
    assert not any(first <= memory.begin < last for first, last in huge_pages._private_memory())


@pytest.mark.parametrize("text", ["always madvise [never]\n", None])
def test_nothing_happens_where_huge_pages_are_turned_off_or_unknown(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "enabled").write_text(text)
        (tmp_path / "hpage_pmd_size").write_text("2097152\n")
    monkeypatch.setattr(huge_pages, "HUGE_PAGES", tmp_path)
    memory = Memory(4)
    with in_huge_pages():
        memory.fill(1)
    assert huge_page_size() == 0
    if can_collapse():
        assert memory.huge() == 0


@pytest.mark.parametrize(("number", "asked"), [(errno.ENOMEM, 1), (errno.EBUSY, 1), (errno.EINVAL, 3)])
def test_an_error_of_linux_stops_nothing(number: int, asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory left ends it; an address that cannot move, as on an older Linux, is left."""
    calls = []

    def refuses(address: int, size: int, advice: int) -> int:
        calls.append((address, size, advice))
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(huge_pages, "_madvise", lambda: refuses)
    # The second and the third are one piece of memory.
    huge_pages._collapse(np.array([9 * HUGE, 3 * HUGE, 4 * HUGE, HUGE], np.uint64), HUGE)
    expected = [(HUGE, HUGE, MADV_COLLAPSE), (3 * HUGE, 2 * HUGE, MADV_COLLAPSE), (9 * HUGE, HUGE, MADV_COLLAPSE)]
    assert calls == expected[:asked]


def test_without_a_map_of_its_memory_nothing_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "PAGEMAP", tmp_path / "absent")
    memory = Memory(4)
    with in_huge_pages():
        memory.fill(1)
    assert not can_collapse() or memory.huge() == 0


WIDTH = 1024
PROGRAM = """
import re, sys
from pathlib import Path
import numpy as np
from mod_export.config import config_from_toml
from mod_export.engines.ort import OrtCpu
from mod_export.types import Bucket, Engine

target = OrtCpu()
target.nvidia = sys.argv[2] == "GPU"
weights = {"w0": np.ones((1024, 1024), np.float32)} if sys.argv[2] == "probe" else None
engine = Engine(target="ort-cpu", model="mod", bucket=Bucket(1, 16), dtype="float32", path="g.onnx", weights="w.data")
runner = target.load(Path(sys.argv[1]), engine, config_from_toml(None), 1, weights)
print(sum(map(int, re.findall(r"AnonHugePages: +(\\d+)", Path("/proc/self/smaps").read_text()))) * 1024)
"""


@needs_collapse
@pytest.mark.parametrize("use", ["run", "GPU", "probe"])
def test_the_weights_of_an_engine_are_in_huge_pages_unless_it_is_for_a_gpu_or_a_probe(use: str, tmp_path: Path) -> None:
    """Runs in its own process, because this one could reuse memory that it has freed."""
    weights = {f"w{i}": torch.eye(WIDTH) + i for i in range(6)}
    write_weights(tmp_path / "w.data", weights, "float32")
    write_products(tmp_path / "g.onnx", tmp_path / "w.data", list(weights), (16, WIDTH))
    arguments = [sys.executable, "-c", PROGRAM, str(tmp_path), use]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    share = int(done.stdout) / (tmp_path / "w.data").stat().st_size
    # NumPy asks for huge pages for the one weight that the probe replaces, a sixth of all.
    assert share > 0.7 if use == "run" else share < 0.3

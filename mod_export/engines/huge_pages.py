"""Moves what an engine loads into huge pages, on Linux.

A step of text reads every weight once, so its time is that of reading memory. In pages of 4 KiB the processor must also
look up the place of each page. In huge pages of 2 MiB it need not: a step of one text takes 0.69 of the time in int8 on
`ort-cpu` and 0.81 in bfloat16 on `openvino` (docs/LOG.md). Neither library asks for huge pages itself, and many
distributions give them only to programs that ask.

Linux 6.1 and later can move memory that is in use: `madvise(2)`, MADV_COLLAPSE. The addresses stay the same. Elsewhere,
and where the administrator has turned huge pages off, nothing happens.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
MAPS, PAGEMAP = Path("/proc/self/maps"), Path("/proc/self/pagemap")
"""The memory of this process, and an entry of 8 bytes for each of its pages (proc_pid_maps(5), proc_pid_pagemap(5))."""
PRESENT = np.uint64(1 << 63)
MADV_COLLAPSE = 25
LEAST_PRESENT = 0.95
"""The share of a huge page that must be in use already, so that huge pages take hardly any additional memory."""
NO_MEMORY = (errno.ENOMEM, errno.EBUSY)
"""The system has no huge page left, or the control group of a container may not have another one."""


@contextlib.contextmanager
def in_huge_pages() -> Iterator[None]:
    """Moves the memory that this process fills within the context into huge pages at its end.

    Memory that was in use before stays as it is: it is the caller's, and moving it would take time. Memory that another
    thread fills meanwhile is moved too, which does no harm.
    """
    size = huge_page_size()
    if size == 0:
        yield
        return
    before = _filled(size)
    yield
    now = _filled(size)
    _collapse(np.setdiff1d(now, before), size)


@cache
def huge_page_size() -> int:
    """Returns the bytes of a huge page; 0 if this system has none, or has them turned off."""
    if sys.platform != "linux":
        return 0
    try:
        if "[never]" in (HUGE_PAGES / "enabled").read_text(encoding="ascii"):
            return 0
        return int((HUGE_PAGES / "hpage_pmd_size").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def _filled(size: int) -> np.ndarray:
    """Returns the addresses, uint64, at which a huge page of private memory could begin that is in use already."""
    starts = [np.zeros(0, np.uint64)]
    with contextlib.suppress(OSError), PAGEMAP.open("rb") as pagemap:
        for begin, end in _private_memory():
            first, last = -(-begin // size) * size, end // size * size
            if first < last:
                pagemap.seek(8 * (first // mmap.PAGESIZE))
                pages_N = np.frombuffer(pagemap.read(8 * ((last - first) // mmap.PAGESIZE)), np.uint64)
                share_H = (pages_N & PRESENT != 0).reshape(-1, size // mmap.PAGESIZE).mean(axis=1)
                starts.append(first + size * np.flatnonzero(share_H >= LEAST_PRESENT).astype(np.uint64))
    return np.concatenate(starts)


def _private_memory() -> Iterator[tuple[int, int]]:
    """Yields begin and end of memory that can be written and belongs to no file. What is larger than the memory of this
    machine is only reserved, and looking at all its pages would take long.
    """
    most = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    for line in MAPS.read_text(encoding="utf-8", errors="replace").splitlines():
        addresses, permissions, _, _, inode, *name = line.split(maxsplit=5)
        if permissions == "rw-p" and inode == "0" and (not name or name[0].startswith(("[heap", "[anon"))):
            begin, end = (int(number, 16) for number in addresses.split("-"))
            if end - begin <= most:
                yield begin, end


def _collapse(starts: np.ndarray, size: int) -> None:
    """Makes huge pages at these addresses, as long as this system and the container have memory for them. A page that
    Linux refuses for another reason, which an older Linux does with all, stays as it is.
    """
    madvise = _madvise()
    starts = np.sort(starts)
    for part in np.split(starts, np.flatnonzero(np.diff(starts) != size) + 1):
        if len(part) and madvise(int(part[0]), size * len(part), MADV_COLLAPSE) and ctypes.get_errno() in NO_MEMORY:
            return


@cache
def _madvise() -> Any:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function

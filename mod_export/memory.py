"""How much memory may still be used (what is free on the machine, or left of a budget), and giving some of it back."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

__all__ = ["free_bytes", "let_go", "limited"]

MADV_PAGEOUT = 21
"""linux/mman.h, since Linux 5.4: takes pages back now. Unlike MADV_DONTNEED it loses nothing that is in memory only."""

_budget: ContextVar[int] = ContextVar("budget", default=0)


@contextlib.contextmanager
def limited(budget: int) -> Iterator[None]:
    """Inside, `free_bytes` counts from `budget` bytes for this process; 0 is no limit."""
    token = _budget.set(budget)
    try:
        yield
    finally:
        _budget.reset(token)


def free_bytes() -> int:
    """Bytes that may still be allocated."""
    free = psutil.virtual_memory().available
    budget = _budget.get()
    if not budget:
        return free
    own = psutil.Process().memory_info()
    # The system can take pages of mapped files back at any time; where it does not count them apart, all count as used.
    used = own.rss - getattr(own, "shared", 0)
    return max(0, min(free, budget - used))


def let_go(tensors: Iterable[torch.Tensor]) -> None:
    """Asks the system to take back the whole pages of these tensors; they are read again when they are next used.

    Weights that are mapped from a file count as this process's memory once they were touched, although the system can
    read them again at any time. This is a request, not a promise: other systems than Linux are not asked.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    for tensor in tensors:
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = tensor.data_ptr() + tensor.numel() * tensor.element_size() - start
        if length >= mmap.PAGESIZE:
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length // mmap.PAGESIZE * mmap.PAGESIZE), MADV_PAGEOUT)

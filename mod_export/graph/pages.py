"""Lets go of what was read: weights that are mapped from a file count as this process's memory once they were touched,
although the system can read them again at any time.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["let_go"]

MADV_PAGEOUT = 21
"""linux/mman.h, since Linux 5.4: takes pages back now. Unlike MADV_DONTNEED it loses nothing that is in memory only."""


def let_go(tensors: Iterable[torch.Tensor]) -> None:
    """Asks the system to take back the whole pages of these tensors; they are read again when they are next used.

    A request, not a promise: where the system knows no such request nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    for tensor in tensors:
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = tensor.data_ptr() + tensor.numel() * tensor.element_size() - start
        if length >= mmap.PAGESIZE:
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length // mmap.PAGESIZE * mmap.PAGESIZE), MADV_PAGEOUT)

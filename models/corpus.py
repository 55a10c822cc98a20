"""Text that is on nearly every machine: the source of the running Python's standard library, as bytes.

Nothing is downloaded. Files are assigned to the held-out split by a hash of their path, so a file is on the same side
on every machine and for every Python version, whatever other files that version has.
"""

from __future__ import annotations

import hashlib
import sysconfig
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

__all__ = ["HELD_OUT_SHARE", "batch_at", "read_split"]

HELD_OUT_SHARE = 0.05
SKIPPED = {"site-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}


def _is_held_out(relative: str) -> bool:
    digest = hashlib.sha256(relative.encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


def split_files(split: Literal["train", "held_out"]) -> list[Path]:
    """The files of one split, in the order of their paths. Packages of the user and tests are in neither."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = [path for path in sorted(root.rglob("*.py")) if SKIPPED.isdisjoint(path.relative_to(root).parts)]
    return [path for path in sources if _is_held_out(path.relative_to(root).as_posix()) == (split == "held_out")]


@cache
def read_split(split: Literal["train", "held_out"]) -> Tensor:
    """All bytes of one split.

    Returns:
        uint8 (N,): the files with a zero byte between two. The same tensor at every call, not to be written to. Empty
        on a Python that ships without its sources.
    """
    text = bytearray(b"\0".join(path.read_bytes() for path in split_files(split)))
    return torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def batch_at(text_N: Tensor, batch: int, seq: int, seed: int) -> Tensor:
    """`batch` random windows of `seq` bytes: int64 (batch, seq). The same seed gives the same windows."""
    generator = torch.Generator().manual_seed(seed)
    start_B = torch.randint(0, len(text_N) - seq, (batch,), generator=generator)
    return text_N[start_B[:, None] + torch.arange(seq)].long()

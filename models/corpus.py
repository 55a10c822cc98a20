"""Text that is on every machine: the source of the running Python's standard library, as bytes.

Nothing is downloaded. Files are assigned to the held-out split by a hash of their path, so the split is the same on
every machine and for every Python version, whatever files that version has.
"""

from __future__ import annotations

import hashlib
import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["HELD_OUT_SHARE", "batch_at", "read_split"]

HELD_OUT_SHARE = 0.05


def _is_held_out(relative: str) -> bool:
    digest = hashlib.sha256(relative.encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


@cache
def read_split(split: str) -> Tensor:
    """All bytes of one split.

    Args:
        split: `train` or `held_out`.

    Returns:
        uint8 (N,): files in the order of their paths, a zero byte between two files.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
    pieces = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if skipped.isdisjoint(relative.parts) and _is_held_out(relative.as_posix()) == (split == "held_out"):
            pieces.append(path.read_bytes())
    return torch.frombuffer(bytearray(b"\0".join(pieces)), dtype=torch.uint8)


def batch_at(text_N: Tensor, batch: int, seq: int, seed: int) -> Tensor:
    """`batch` random windows of `seq` bytes: int64 (batch, seq). The same seed gives the same windows."""
    generator = torch.Generator().manual_seed(seed)
    start_B = torch.randint(0, len(text_N) - seq, (batch,), generator=generator)
    return text_N[start_B[:, None] + torch.arange(seq)].long()

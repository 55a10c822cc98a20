"""Compiles shim.c, which is loaded before libc and lets renames fail and clocks jump."""

from __future__ import annotations

import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")


def compiled_shim(folder: Path) -> Path:
    """Compiles the shim into a folder, and returns the path of the library."""
    shim = folder.resolve() / "shim.so"
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", SOURCE, "-o", shim, "-ldl"], check=True)
    return shim

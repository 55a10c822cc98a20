"""Files that a user names outside of a build folder: written completely or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from mod_export.errors import UsageError

__all__ = ["check_place", "write_bytes", "write_text"]


def check_place(path: Path, option: str = "--report") -> None:
    """Checks that a file can be written there, before minutes are spent on its content.

    Raises:
        UsageError: it cannot; the message says to name another file with `option`.
    """
    existing = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir() or not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        what = "is a folder" if path.is_dir() else f"cannot write in {existing}"
        raise UsageError(f"{path}: {what}; name another file with {option}")


def write_text(path: Path, text: str, option: str = "--report") -> None:
    """As `write_bytes`, in UTF-8."""
    write_bytes(path, text.encode(), option)


def write_bytes(path: Path, content: bytes, option: str) -> None:
    """Writes a temporary file beside it and renames that, so an existing file is replaced completely or not at all.

    Raises:
        UsageError: it cannot be written; the message says to name another file with `option`.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            temporary = Path(folder) / path.name
            temporary.write_bytes(content)
            temporary.replace(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror}); name another file with {option}") from error

"""Writes files whole or not at all, and checks files against the hashes of what was written."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from mod_export.errors import BuildFolderError, UsageError

PARTIAL = ".partial-"
"""Prefix of the names of unfinished files and folders; a process that was killed leaves them behind."""


class FileEntry(BaseModel):
    """Size and hash of a file as it was written."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: int
    sha256: str


def entry_of(path: Path) -> FileEntry:
    """Returns the size and hash of a file as it is."""
    return FileEntry(bytes=path.stat().st_size, sha256=sha256_of_file(path))


def sha256_of_file(path: Path) -> str:
    """Returns the SHA-256 of the content of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def changed_file(root: Path, name: str, entry: FileEntry) -> str:
    """Says what is wrong with a file; empty if the file is as it was built."""
    problem = _changed_size(root, name, entry)
    if problem or sha256_of_file(root / name) == entry.sha256:
        return problem
    return "has been changed since it was built (SHA-256 differs)"


def _changed_size(root: Path, name: str, entry: FileEntry) -> str:
    path = root / name
    if path.is_symlink() or not path.is_file():
        return "is missing or not a regular file"
    size = path.stat().st_size
    return "" if size == entry.bytes else f"has {size} bytes, {entry.bytes} were written"


def verify_files(root: Path, files: Mapping[str, FileEntry], *, read: bool = True) -> None:
    """Compares files of a build folder with their entries in its manifest; without `read`, only their sizes.

    Raises:
        BuildFolderError: a file is missing, or is not what was built.
    """
    look = changed_file if read else _changed_size
    problems = {name: look(root, name, entry) for name, entry in files.items()}
    damaged = [f"{name} {problem}" for name, problem in problems.items() if problem]
    if damaged:
        raise BuildFolderError(f"{root}: {'; '.join(damaged)}. Build again to repair it")


def replace_file(path: Path, data: str | bytes) -> None:
    """Writes a temporary file and renames it: a reader sees the old file or the new one. The folder must exist."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=PARTIAL) as folder:
        beside = Path(folder) / path.name
        beside.write_bytes(data.encode() if isinstance(data, str) else data)
        beside.replace(path)


def check_place(path: Path, option: str = "--report") -> None:
    """Checks that a file outside of a build folder can be written, before minutes are spent on its content.

    Raises:
        UsageError: the file cannot be written; the message says to choose another place with `option`.
    """
    existing = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir() or not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        problem = "is a folder" if path.is_dir() else f"cannot write in {existing}"
        raise UsageError(f"{path}: {problem}; choose another place with {option}")


def write_whole(path: Path, data: str | bytes, option: str = "--report") -> None:
    """Writes a file outside of a build folder, and creates its folder if necessary.

    Raises:
        UsageError: the file cannot be written; the message says to choose another place with `option`.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror}); choose another place with {option}") from error

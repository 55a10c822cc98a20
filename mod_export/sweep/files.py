"""Files of a sweep's folder: written beside their place and renamed, so that they are there whole or not at all."""

from __future__ import annotations

from pathlib import Path

from mod_export.errors import BuildFolderError

__all__ = ["write_whole"]


def write_whole(path: Path, data: str | bytes) -> None:
    """Replaces a file; its folder is made if need be.

    Raises:
        BuildFolderError: no room, or no right to write there.
    """
    beside = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(data.encode() if isinstance(data, str) else data)
        beside.replace(path)
    except OSError as error:
        raise BuildFolderError(
            f"{path}: cannot be written ({error.strerror}); free some space or name another folder with -o, and start "
            "the sweep again"
        ) from error

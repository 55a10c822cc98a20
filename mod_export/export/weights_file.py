"""The table of contents of a weights file, read without any library: a server opens it, too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mod_export.errors import BuildFolderError

__all__ = ["WeightsFile"]


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """The table of contents of a weights file: name -> (dtype, shape, offset in the file, bytes)."""

    name: str
    entries: Mapping[str, tuple[str, tuple[int, ...], int, int]]

    @classmethod
    def open(cls, path: Path) -> WeightsFile:
        """Reads the header only; nothing of the weights is loaded.

        Raises:
            BuildFolderError: not a regular file, or not a weights file.
        """
        if path.is_symlink() or not path.is_file():
            raise BuildFolderError(f"{path}: expected a regular file of weights; links are refused by ONNX tools")
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size)) if size <= path.stat().st_size else None
        except ValueError:
            header = None
        if not isinstance(header, dict):
            raise BuildFolderError(f"{path}: not a weights file, or damaged; delete it and build again")
        header.pop("__metadata__", None)
        base = 8 + size
        return cls(
            path.name,
            {
                name: (item["dtype"], tuple(item["shape"]), base + item["data_offsets"][0], _length(item))
                for name, item in header.items()
            },
        )


def _length(item: Mapping[str, list[int]]) -> int:
    begin, end = item["data_offsets"]
    return end - begin

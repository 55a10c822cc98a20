"""The zip file of a .pt2, read as it was written by torch: records that are stored as they are, each once.

Only records that are read here are given to torch, so no second reader can see another file than the one that was
checked. Tensors are mapped, not loaded: a program takes no memory for its weights until they are used.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Of a record: its signature, and the lengths of the name and the extra field behind which its bytes begin."""
SIGNATURE = b"PK\3\4"
ENCRYPTED = 1
SHOWN = 80


class ArchiveError(Exception):
    """The file is not an archive as torch writes it; the message is for the user, in one line."""


@dataclass(frozen=True, slots=True)
class Archive:
    """An open archive. `records`: name, without the archive's folder -> (where its bytes begin, how many they are)."""

    records: Mapping[str, tuple[int, int]]
    whole: torch.Tensor
    """The bytes of the file, uint8, mapped. What is written to them stays in memory."""

    @classmethod
    def open(cls, path: Path) -> Archive:
        """Reads the table of contents.

        Raises:
            ArchiveError: not a zip file, or not as torch writes it.
        """
        size = path.stat().st_size
        with path.open("rb") as file:
            records = records_of(file, size)
        return cls(records, torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8))

    def read(self, name: str) -> bytes:
        """The bytes of a record."""
        return self.mapped(name).numpy().tobytes()

    def mapped(self, name: str) -> torch.Tensor:
        """The bytes of a record as a part of `whole`."""
        begin, size = self.records[name]
        return self.whole[begin : begin + size]


def records_of(file: BinaryIO, size: int) -> dict[str, tuple[int, int]]:
    """`Archive.records` of an open file of `size` bytes.

    Raises:
        ArchiveError: not a zip file, or not as torch writes it.
    """
    try:
        with zipfile.ZipFile(file) as table:
            entries = table.infolist()
    except Exception as error:  # Of any type: a file that is given to us may be anything.
        raise ArchiveError(f"not a program of torch.export.save ({error or type(error).__name__})") from error
    folders = {entry.filename.partition("/")[0] for entry in entries}
    if len(folders) != 1:
        raise ArchiveError("not a program of torch.export.save (an archive of several folders)")
    found: dict[str, tuple[int, int]] = {}
    for entry in entries:
        name = entry.filename.partition("/")[2]
        if name in found:
            raise ArchiveError(f"holds {shown(name)} twice")
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise ArchiveError(f"{shown(name)} is compressed, which torch.export.save does not do")
        if entry.flag_bits & ENCRYPTED:
            raise ArchiveError(f"{shown(name)} is encrypted")
        file.seek(entry.header_offset)
        header = file.read(LOCAL_HEADER.size)
        if len(header) < LOCAL_HEADER.size or not header.startswith(SIGNATURE):
            raise ArchiveError(f"{shown(name)} does not begin where the table of contents says")
        _, name_length, extra_length = LOCAL_HEADER.unpack(header)
        begin = entry.header_offset + LOCAL_HEADER.size + name_length + extra_length
        if begin + entry.file_size > size:
            raise ArchiveError(f"{shown(name)} of {entry.file_size:,} bytes ends behind the end of the file")
        found[name] = (begin, entry.file_size)
    if sum(length for _, length in found.values()) > size:
        raise ArchiveError("its records share their bytes")
    return found


def shown(text: object) -> str:
    """Text from a file, which may hold anything, for a message of one line."""
    plain = str(text).encode("ascii", "backslashreplace").decode()
    printable = "".join(one if one.isprintable() else repr(one)[1:-1] for one in plain)
    return printable if len(printable) <= SHOWN else printable[: SHOWN - 3] + "..."

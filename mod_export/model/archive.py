"""Reads the zip archive of a .pt2 file, in which torch stores every record once and uncompressed.

torch is given only the bytes that were checked here: another zip reader might see other content in the same file.
Tensors are memory-mapped, so weights take no memory until they are used.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from mod_export.errors import shown

LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Local header of a record: signature, then the lengths of the name and of the extra field that precede its bytes."""
SIGNATURE = b"PK\3\4"
ENCRYPTED = 1


class ArchiveError(Exception):
    """The file is not an archive as torch writes it. The message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Archive:
    """An open archive. `records` maps a name without the archive's top folder to (offset, length) in bytes."""

    records: Mapping[str, tuple[int, int]]
    whole: torch.Tensor
    """All bytes of the file, uint8, memory-mapped. Writes to them stay in memory."""

    @classmethod
    def open(cls, path: Path) -> Archive:
        """Reads the table of contents.

        Raises:
            ArchiveError: the file is not a zip file, or not as torch writes it.
        """
        size = path.stat().st_size
        with path.open("rb") as file:
            records = records_of(file, size)
        return cls(records, torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8))

    def read(self, name: str) -> bytes:
        """Returns the bytes of a record."""
        return self.mapped(name).numpy().tobytes()

    def mapped(self, name: str) -> torch.Tensor:
        """Returns the bytes of a record as a view of `whole`."""
        begin, size = self.records[name]
        return self.whole[begin : begin + size]


def records_of(file: BinaryIO, size: int) -> dict[str, tuple[int, int]]:
    """Returns `Archive.records` of an open file of `size` bytes.

    Raises:
        ArchiveError: the file is not a zip file, or not as torch writes it.
    """
    try:
        with zipfile.ZipFile(file) as table:
            entries = table.infolist()
    except Exception as error:  # Any type of error: the user's file may hold anything.
        raise ArchiveError(f"not a program of torch.export.save ({error or type(error).__name__})") from error
    folders = {entry.filename.partition("/")[0] for entry in entries}
    if len(folders) != 1:
        raise ArchiveError("not a program of torch.export.save (an archive of several folders)")
    records: dict[str, tuple[int, int]] = {}
    for entry in entries:
        name = entry.filename.partition("/")[2]
        if name in records:
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
        records[name] = (begin, entry.file_size)
    if sum(length for _, length in records.values()) > size:
        raise ArchiveError("its records share their bytes")
    return records

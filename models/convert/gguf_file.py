"""Reader of a GGUF file: its metadata, and its tensors, whose rows are read and dequantized on demand.

The layout is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The package `gguf` dequantizes blocks.
Its reader is not used, because it trusts the counts and lengths in a file, so a damaged file makes it fill the memory.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mod_models.checkpoint import CheckpointError, first_line
from mod_models.convert.foreign import PIECE_BYTES
from mod_models.spec import shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
"""Number of a metadata type -> numpy dtype."""
MOST_DIMENSIONS = 4
FLOATS = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}
"""Number of a tensor type without blocks -> dtype."""
BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
"""Quantized tensor types, which are read as float32."""
REMOVED = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}  # fmt: skip
"""Number of a tensor type that llama.cpp no longer reads -> its name."""
KNOWN = f"F32, F16, BF16, F64, {', '.join(BLOCKS)}"
Metadata = Mapping[str, Any]


class GgufFile(NamedTuple):
    """Content of a file.

    Attributes:
        metadata: key -> a number, a string, a list of strings, or an array of numbers.
        tensors: name -> tensor, in the order of the file.
    """

    metadata: Metadata
    tensors: Mapping[str, GgufTensor]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in a file, see `foreign.StoredTensor`.

    Attributes:
        path: path of the file.
        name: name in the file.
        shape: PyTorch shape, the reverse of the file's.
        stored: dtype of its rows, or the name of its type if the type cannot be read.
        kind: number of its type.
        offset: first byte in the file.
        row_bytes: bytes of one row of the first dimension of `shape`.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    stored: torch.dtype | str
    kind: int
    offset: int
    row_bytes: int

    @property
    def dtype(self) -> torch.dtype:
        assert isinstance(self.stored, torch.dtype), "the caller checks `stored` first"
        return self.stored

    def rows(self, start: int, stop: int) -> Tensor:
        """Like `foreign.TensorRows.rows`. Floats are mapped; blocks are dequantized `PIECE_BYTES` at a time.

        Raises:
            CheckpointError: the file has changed or was damaged since it was opened.
        """
        shape = (stop - start, *self.shape[1:])
        if not math.prod(shape):
            return torch.empty(shape, dtype=self.dtype)
        try:
            if self.kind in FLOATS:
                first, count = self.offset + start * self.row_bytes, (stop - start) * self.row_bytes
                # Copy on write, because PyTorch expects writable memory.
                data = np.memmap(self.path, dtype=np.uint8, mode="c", offset=first, shape=(count,))
                return torch.from_numpy(data).view(self.dtype).view(shape)
            return self._dequantized(start, stop)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path}: cannot be read ({first_line(error)})") from error

    def _dequantized(self, start: int, stop: int) -> Tensor:
        from gguf import GGMLQuantizationType, dequantize

        values = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        step = max(1, PIECE_BYTES // max(1, values[:1].nbytes))
        with self.path.open("rb") as file:
            for first in range(start, stop, step):
                last = min(stop, first + step)
                file.seek(self.offset + first * self.row_bytes)
                data = np.frombuffer(file.read((last - first) * self.row_bytes), dtype=np.uint8)
                # An infinite or NaN scale is detected later in the values, as in every other format.
                with np.errstate(all="ignore"):
                    piece = dequantize(data.reshape(last - first, self.row_bytes), GGMLQuantizationType(self.kind))
                values[first - start : last - start] = torch.from_numpy(piece).view(last - first, *self.shape[1:])
        return values


def read_gguf_file(path: Path) -> GgufFile:
    """Reads everything in a file except the values of its tensors.

    Raises:
        CheckpointError: the file is not GGUF, has another version, is truncated or is damaged.
        ImportError: the package `gguf` is missing, which comes with the extra `convert`.
    """
    try:
        with path.open("rb") as file:
            start = file.read(len(MAGIC))
            if start != MAGIC:
                raise CheckpointError(f"{path}: not a GGUF file, which starts with {MAGIC!r}; this one with {start!r}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _File(path, data).content()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or first_line(error)})") from error


class _File:
    """Parser that reads a file from front to end and refuses a count for which the rest of the file is too short."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, len(MAGIC)

    def wrong(self, said: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {said}; it may be truncated or damaged")

    def content(self) -> GgufFile:
        (version,) = self.numbers("<u4")
        if version not in VERSIONS:
            big = int(version).to_bytes(4, "little") in [known.to_bytes(4, "big") for known in VERSIONS]
            raise CheckpointError(
                f"{self.path}: is big-endian, which is not read here; convert it with gguf-convert-endian"
                if big
                else f"{self.path}: GGUF version {version}, this release reads {' and '.join(map(str, VERSIONS))}"
                + ("; convert the original model again with convert_hf_to_gguf.py of llama.cpp" if version == 1 else "")
            )
        n_tensors, n_keys = (int(count) for count in self.numbers("<u8", 2))
        metadata: dict[str, Any] = {}
        self.room(n_keys, 13, "metadata keys")
        for _ in range(n_keys):
            key = self.text("a metadata key")
            if key in metadata:
                raise self.wrong(f"holds the metadata key {shown(key)} twice")
            metadata[key] = self.value(key, int(self.numbers("<u4")[0]))
        self.room(n_tensors, 24, "tensors")
        entries = [self.entry() for _ in range(n_tensors)]
        return GgufFile(metadata, self.tensors(entries, self.alignment(metadata)))

    def room(self, count: int, least_bytes: int, what: str) -> None:
        """Refuses a count of items, each of at least `least_bytes` bytes, that do not fit into the rest of the file."""
        left = len(self.data) - self.at
        if count * least_bytes > left:
            raise self.wrong(f"speaks of {count} {what}, and {left} bytes are left")

    def numbers(self, kind: str, count: int = 1) -> np.ndarray:
        dtype = np.dtype(kind)
        self.room(count, dtype.itemsize, "numbers")
        # Copied, because the file is unmapped after the header is read.
        values = np.frombuffer(self.data, dtype, count, self.at).copy()
        self.at += values.nbytes
        return values

    def text(self, what: str) -> str:
        length = int(self.numbers("<u8")[0])
        self.room(length, 1, f"bytes of {what}")
        self.at += length
        # Bytes that are not UTF-8 are kept as surrogates, which match no known name.
        return self.data[self.at - length : self.at].decode("utf-8", errors="surrogateescape")

    def value(self, key: str, kind: int) -> Any:
        if kind == STRING:
            return self.text(f"the value of {shown(key)}")
        if kind in SCALARS:
            return self.numbers(SCALARS[kind])[0].item()
        if kind == ARRAY:
            of, count = int(self.numbers("<u4")[0]), int(self.numbers("<u8")[0])
            if of in SCALARS:
                return self.numbers(SCALARS[of], count)
            if of == STRING:
                self.room(count, 8, f"strings of {shown(key)}")
                return [self.text(f"a string of {shown(key)}") for _ in range(count)]
            kind = of
        raise self.wrong(f"the metadata key {shown(key)} is of the unknown type {kind}")

    def entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Reads an entry of the table of tensors: name, PyTorch shape, number of the type, offset in the data."""
        name = self.text("the name of a tensor")
        n_dims = int(self.numbers("<u4")[0])
        if not 1 <= n_dims <= MOST_DIMENSIONS:
            raise self.wrong(f"tensor {shown(name)} has {n_dims} dimensions, expected 1 to {MOST_DIMENSIONS}")
        shape = tuple(int(size) for size in reversed(self.numbers("<u8", n_dims)))
        return name, shape, int(self.numbers("<u4")[0]), int(self.numbers("<u8")[0])

    def alignment(self, metadata: Metadata) -> int:
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
            raise self.wrong(f"general.alignment: expected a power of 2 of at least 8, got {shown(alignment)}")
        return alignment

    def tensors(self, entries: list[tuple[str, tuple[int, ...], int, int]], alignment: int) -> dict[str, GgufTensor]:
        begin = -(-self.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        ends: list[tuple[int, int, str]] = []
        size_of, name_of = _types()
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise self.wrong(f"holds the tensor {shown(name)} twice")
            sizes = size_of(kind)
            if kind in REMOVED:
                raise CheckpointError(
                    f"{self.path}: tensor {shown(name)} is of the type {REMOVED[kind]}, which llama.cpp has removed; "
                    "take the model in another quantization, or quantize the original again"
                )
            if sizes is None:
                raise self.wrong(f"tensor {shown(name)} is of the unknown type {kind}")
            if shape[-1] % sizes[0]:
                raise self.wrong(
                    f"tensor {shown(name)} has rows of {shape[-1]} numbers, and {name_of(kind)} blocks of {sizes[0]}"
                )
            row_bytes = math.prod(shape[1:]) // sizes[0] * sizes[1] if shape[1:] else sizes[1] // sizes[0]
            end = begin + offset + math.prod(shape) // sizes[0] * sizes[1]
            if end > len(self.data) or offset % alignment:
                where = f"bytes {begin + offset} to {end} of {len(self.data)}"
                raise self.wrong(f"tensor {shown(name)} is said to be in {where}")
            stored = FLOATS.get(kind) or (torch.float32 if name_of(kind) in BLOCKS and shape[1:] else name_of(kind))
            tensors[name] = GgufTensor(self.path, name, shape, stored, kind, begin + offset, row_bytes)
            ends.append((begin + offset, end, name))
        ends.sort()
        for (_, end, name), (start, _, next_name) in pairwise(ends):
            if start < end:
                raise self.wrong(f"tensors {shown(name)} and {shown(next_name)} share bytes")
        return tensors


def _types() -> tuple[Callable[[int], tuple[int, int] | None], Callable[[int], str]]:
    """Returns two functions that take the number of a type. The first returns (elements, bytes) of its block, or None
    if the type is unknown; the second returns its name.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    sizes = {kind.value: size for kind, size in GGML_QUANT_SIZES.items()}
    return sizes.get, lambda kind: GGMLQuantizationType(kind).name


def starts_as_gguf(path: Path) -> bool:
    """Whether the path has the suffix .gguf, or is a GGUF file."""
    if path.is_dir():
        return False
    if path.suffix == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False

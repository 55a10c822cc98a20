"""Result of every reader of another format: the spec, the location of each tensor, and the files beside them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mod_models.checkpoint import MOST_PROBLEMS, Checkpoint, CheckpointError
from mod_models.spec import ModelSpec
from mod_models.transformer import Transformer

PIECE_BYTES = 2**25
"""Bytes of weights in memory at a time while they are read."""


class TensorRows(Protocol):
    """A tensor in a file whose rows can be read separately."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype:
        """A dtype that a checkpoint can hold: floating-point of 16, 32 or 64 bits."""

    def rows(self, start: int, stop: int) -> Tensor:
        """Reads rows [start, stop). The result can be a mapping, whose pages stay in memory as long as the result."""


class StoredTensor(TensorRows, Protocol):
    """A tensor in a file, of any dtype."""

    @property
    def stored(self) -> torch.dtype | str:
        """The dtype; only its name if a checkpoint cannot hold it."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a tensor in a file, and a number to add: the source of one tensor of a checkpoint.

    Attributes:
        source: the whole tensor.
        start: the first row.
        length: number of rows.
        added: number to add to each element, in float32; 0 for no change.
    """

    source: TensorRows
    start: int
    length: int
    added: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.length, *self.source.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.added else self.source.dtype

    def rows(self, start: int, stop: int) -> Tensor:
        rows = self.source.rows(self.start + start, self.start + stop)
        return rows.float() + self.added if self.added else rows

    def pieces(self) -> Iterator[Tensor]:
        """Yields the rows in order, in pieces of at most `PIECE_BYTES` (or one row)."""
        one_row = torch.empty((1, *self.shape[1:]), dtype=self.dtype, device="meta")
        step = max(1, PIECE_BYTES // max(1, one_row.nbytes))
        for start in range(0, self.length, step):
            yield self.rows(start, min(self.length, start + step))


@dataclass(frozen=True, slots=True)
class HalvesOfHeads:
    """Reorders rows of queries or keys: the source rotates pairs of neighbouring rows, this package rotates two halves.

    Meta's own code for Llama, and files of llama.cpp, store row i of the second half next to row i of the first.
    """

    source: TensorRows
    d_head: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    def rows(self, start: int, stop: int) -> Tensor:
        """Like `TensorRows.rows`, but reads whole heads."""
        first, last = start // self.d_head * self.d_head, -(-stop // self.d_head) * self.d_head
        rows = self.source.rows(first, last)
        pairs = rows.reshape(-1, self.d_head // 2, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)[start - first : stop - first]


class Place(NamedTuple):
    """Location of one of our tensors: name and shape of the tensor in the other format, and our first row in it."""

    name: str
    shape: tuple[int, ...]
    start: int = 0


def part_at(
    place: Place, tensors: Mapping[str, StoredTensor], length: int, added: float, declared_by: str, known: str
) -> Part | str:
    """Returns the source of one of our tensors, or the problem with it.

    Args:
        place: location of our tensor.
        tensors: name -> tensor in the other format.
        length: number of rows of our tensor.
        added: see `Part`.
        declared_by: the file that declares the shape, for messages.
        known: the dtypes that can be read, for messages.
    """
    tensor = tensors.get(place.name)
    if tensor is None:
        return f"{place.name} is missing, expected {list(place.shape)}"
    if tensor.shape != place.shape:
        return f"{place.name} has shape {list(tensor.shape)}, {declared_by} says {list(place.shape)}"
    if not isinstance(tensor.stored, torch.dtype):
        return f"{place.name} holds {tensor.stored}, expected {known}"
    return Part(tensor, place.start, length, added)


def projection_rows(spec: ModelSpec, part: str) -> int:
    """Number of rows of a projection by its name, such as `q_proj`."""
    if part == "q_proj":
        return spec.n_heads * spec.d_head
    return spec.n_kv_heads * spec.d_head if part in ("k_proj", "v_proj") else spec.d_ff


class Companion(Protocol):
    """A file that belongs to a model, such as its tokenizer; a `Path` is one."""

    @property
    def name(self) -> str: ...

    def read_bytes(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class MadeFile:
    """A companion whose content is generated, not read from a file."""

    name: str
    content: bytes

    def read_bytes(self) -> bytes:
        return self.content


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignModel:
    """A model in another format, described as a checkpoint of this package.

    Attributes:
        path: path of the source, for messages.
        family: name of its architecture in that format.
        spec: the spec.
        parts: state_dict name -> source of the tensor.
        companions: files that belong to the model and are written beside it, such as its tokenizer.
        notes: notes about the conversion for the user, one sentence each.
    """

    path: Path
    family: str
    spec: ModelSpec
    parts: Mapping[str, Part]
    companions: tuple[Companion, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(math.prod(part.shape) for part in self.parts.values())

    def check_finite(self) -> None:
        """Reads every weight once and checks it.

        Raises:
            CheckpointError: a weight is NaN, or infinite in float32.
        """
        for name, part in self.parts.items():
            for piece in part.pieces():
                self.check_piece(name, piece)

    def check_piece(self, name: str, piece: Tensor) -> None:
        """Like `check_finite`, for a piece that was already read."""
        bad = piece.numel() - int(torch.isfinite(piece.float()).sum())
        if bad:
            raise CheckpointError(f"{self.path}: {name} holds values that are NaN or infinite in float32")

    def checkpoint(self) -> Checkpoint:
        """Returns a checkpoint whose weights are mapped from the files, if these store plain floats."""
        return Checkpoint(
            spec=self.spec, weights={name: part.rows(0, part.length) for name, part in self.parts.items()}
        )


def shapes_of(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """state_dict name -> shape of every tensor of a checkpoint with this spec."""
    # One position is enough: no weight depends on it, and RoPE tables take memory even on the meta device.
    with torch.device("meta"):
        state = Transformer(replace(spec, max_positions=1)).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def refuse(path: Path, problems: list[str]) -> None:
    """Raises the problems as one CheckpointError, if there are any."""
    if problems := list(dict.fromkeys(problems)):
        more = f"; and {len(problems) - MOST_PROBLEMS} more" if len(problems) > MOST_PROBLEMS else ""
        raise CheckpointError(f"{path}: " + "; ".join(problems[:MOST_PROBLEMS]) + more)

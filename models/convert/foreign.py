"""What every reader of another format gives: the spec, where each tensor is found, and the files beside them."""

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
"""What is in memory at a time while weights are read."""


class TensorRows(Protocol):
    """A tensor in a file, of which rows can be read."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype:
        """One of those that a checkpoint can hold: floating-point of 16, 32 or 64 bits."""

    def rows(self, start: int, stop: int) -> Tensor:
        """[start, stop) of the first dimension. Pages of the file stay in memory as long as the result."""


class StoredTensor(TensorRows, Protocol):
    """The same, of any dtype."""

    @property
    def stored(self) -> torch.dtype | str:
        """The dtype; its name where it is none that a checkpoint can hold."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a tensor in a file, plus a number: what one tensor of a checkpoint is made from.

    Attributes:
        source: the whole tensor.
        start: the first row.
        length: number of rows.
        added: what is added to each element, in float32; 0 for weights that stay as they are.
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
        """The tensor from its first row to its last, `PIECE_BYTES` at a time."""
        one_row = torch.empty((1, *self.shape[1:]), dtype=self.dtype, device="meta")
        step = max(1, PIECE_BYTES // max(1, one_row.nbytes))
        for start in range(0, self.length, step):
            yield self.rows(start, min(self.length, start + step))


@dataclass(frozen=True, slots=True)
class HalvesOfHeads:
    """Queries or keys whose neighbouring rows are rotated: the two halves of a head one after the other, as here.

    So Llama has them in Meta's own code, and in the files of llama.cpp: row i of the second half beside row i of the
    first.
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
        """See `TensorRows.rows`; whole heads are read."""
        first, last = start // self.d_head * self.d_head, -(-stop // self.d_head) * self.d_head
        rows = self.source.rows(first, last)
        pairs = rows.reshape(-1, self.d_head // 2, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)[start - first : stop - first]


class Place(NamedTuple):
    """Where one of our tensors is in a format: the name and shape of theirs, and the first row of it."""

    name: str
    shape: tuple[int, ...]
    start: int = 0


def part_at(
    place: Place, tensors: Mapping[str, StoredTensor], length: int, added: float, declared_by: str, known: str
) -> Part | str:
    """What a tensor of ours is made from, or what is wrong with that.

    Args:
        place: where it is.
        tensors: theirs by name.
        length: rows of ours.
        added: see `Part`.
        declared_by: what says which shape is expected, for messages.
        known: the dtypes that can be read, for messages.
    """
    found = tensors.get(place.name)
    if found is None:
        return f"{place.name} is missing, expected {list(place.shape)}"
    if found.shape != place.shape:
        return f"{place.name} has shape {list(found.shape)}, {declared_by} says {list(place.shape)}"
    if not isinstance(found.stored, torch.dtype):
        return f"{place.name} holds {found.stored}, expected {known}"
    return Part(found, place.start, length, added)


def projection_rows(spec: ModelSpec, part: str) -> int:
    """Of a projection by its name, such as `q_proj`."""
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
    """One that is no file in the other format."""

    name: str
    content: bytes

    def read_bytes(self) -> bytes:
        return self.content


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignModel:
    """A model in another format, as a checkpoint of this package.

    Attributes:
        path: where it was read from, for messages.
        family: what that format calls its architecture.
        spec: what it computes.
        parts: state_dict name -> what the tensor is made from.
        companions: files that belong to the model and are written beside it, such as its tokenizer.
        notes: what a person should know of the conversion, a sentence each.
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
        """Reads every weight once.

        Raises:
            CheckpointError: one is NaN, or infinite in float32.
        """
        for name, part in self.parts.items():
            for piece in part.pieces():
                self.check_piece(name, piece)

    def check_piece(self, name: str, piece: Tensor) -> None:
        """The same of a piece that was read already."""
        bad = piece.numel() - int(torch.isfinite(piece.float()).sum())
        if bad:
            raise CheckpointError(f"{self.path}: {name} holds values that are NaN or infinite in float32")

    def checkpoint(self) -> Checkpoint:
        """With weights that are mapped from the files they are in, where the format stores them as numbers."""
        return Checkpoint(
            spec=self.spec, weights={name: part.rows(0, part.length) for name, part in self.parts.items()}
        )


def shapes_of(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a checkpoint with this spec."""
    # One position: shapes do not depend on their number, and the RoPE tables are real even on the meta device.
    with torch.device("meta"):
        state = Transformer(replace(spec, max_positions=1)).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def refuse(path: Path, problems: list[str]) -> None:
    """Raises them as one CheckpointError, if there are any."""
    if problems := list(dict.fromkeys(problems)):
        more = f"; and {len(problems) - MOST_PROBLEMS} more" if len(problems) > MOST_PROBLEMS else ""
        raise CheckpointError(f"{path}: " + "; ".join(problems[:MOST_PROBLEMS]) + more)

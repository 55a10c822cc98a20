"""A model in another format, as every reader describes it: spec, location of each tensor, and the files beside them.

`write_folder` writes it as a checkpoint folder, one piece of the weights at a time. A build of the model itself copies
only weights that must be dequantized or reordered.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mod_models.checkpoint import MOST_PROBLEMS, Checkpoint, CheckpointError, config_text, first_line
from mod_models.spec import ModelSpec, SpecError
from mod_models.transformer import weight_shapes

PIECE_BYTES = 2**25
"""Bytes of weights in memory at a time while they are read."""
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
ALIGNMENT = 8


class TensorRows(Protocol):
    """A tensor in a file whose rows can be read separately."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype:
        """A dtype that a checkpoint can hold: floating-point of 16, 32 or 64 bits."""

    def rows(self, start: int, stop: int) -> Tensor:
        """Reads rows [start, stop). If the result is mapped from the file, its pages stay in memory while it exists."""


class StoredTensor(TensorRows, Protocol):
    """A tensor in a file, of any dtype."""

    @property
    def stored(self) -> torch.dtype | str:
        """The dtype; only its name if a checkpoint cannot hold it."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a tensor in a file: the source of one tensor of a checkpoint.

    Attributes:
        source: the whole tensor.
        start: the first row.
        length: number of rows.
    """

    source: TensorRows
    start: int
    length: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.length, *self.source.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    def rows(self, start: int, stop: int) -> Tensor:
        return self.source.rows(self.start + start, self.start + stop)

    def pieces(self) -> Iterator[Tensor]:
        """Yields the rows in order, in pieces of at most `PIECE_BYTES` (or one row)."""
        one_row = torch.empty((1, *self.shape[1:]), dtype=self.dtype, device="meta")
        step = max(1, PIECE_BYTES // max(1, one_row.nbytes))
        for start in range(0, self.length, step):
            yield self.rows(start, min(self.length, start + step))


@dataclass(frozen=True, slots=True)
class Derived:
    """A tensor that is computed from others when its rows are read; see `TensorRows`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: Callable[[int, int], Tensor]


def plus(source: TensorRows, added: float) -> Derived:
    """A tensor plus a number, float32."""
    return Derived(source.shape, torch.float32, lambda start, stop: source.rows(start, stop).float() + added)


def halves_of_heads(source: TensorRows, d_head: int) -> Derived:
    """Reorders rows of queries or keys: the source rotates pairs of neighbouring rows, this package rotates two halves.

    Meta's own code for Llama, and files of llama.cpp, store row i of the second half next to row i of the first.
    """

    def rows(start: int, stop: int) -> Tensor:
        # Whole heads are read.
        first, last = start // d_head * d_head, -(-stop // d_head) * d_head
        heads = source.rows(first, last)
        pairs = heads.reshape(-1, d_head // 2, 2, *heads.shape[1:])
        return pairs.transpose(1, 2).reshape(heads.shape)[start - first : stop - first]

    return Derived(source.shape, source.dtype, rows)


def difference(source: TensorRows, row: int) -> Derived:
    """One row of a tensor of two rows minus the other, float32: the logit of one of two classes against the other."""

    def rows(start: int, stop: int) -> Tensor:
        both = source.rows(0, 2).float()
        return (both[row] - both[1 - row])[None][start:stop]

    return Derived((1, *source.shape[1:]), torch.float32, rows)


def low_rank(source: TensorRows, down: TensorRows, up: TensorRows) -> Derived:
    """A matrix plus a low-rank product, float32: W + up @ down (LoRA, Hu et al., arXiv 2106.09685)."""

    def rows(start: int, stop: int) -> Tensor:
        product = up.rows(start, stop).float() @ down.rows(0, down.shape[0]).float()
        return source.rows(start, stop).float() + product

    return Derived(source.shape, torch.float32, rows)


def product(source: TensorRows, factor: TensorRows) -> Derived:
    """The product of two matrices, float32: two linear layers without biases as one."""

    def rows(start: int, stop: int) -> Tensor:
        return source.rows(start, stop).float() @ factor.rows(0, factor.shape[0]).float()

    return Derived((source.shape[0], *factor.shape[1:]), torch.float32, rows)


def constant(shape: tuple[int, ...], value: float) -> Derived:
    """A tensor whose elements are all the same number, float32, for what the other format has no tensor for."""
    return Derived(shape, torch.float32, lambda start, stop: torch.full((stop - start, *shape[1:]), value))


class Place(NamedTuple):
    """Location of one of our tensors in another format.

    Attributes:
        name: the name of the tensor there.
        shape: the shape that it must have there.
        start: the row at which ours starts.
        made: converts the tensor to our order and values; by default they are the same.
    """

    name: str
    shape: tuple[int, ...]
    start: int = 0
    made: Callable[[TensorRows], TensorRows] = lambda tensor: tensor


Find = Callable[[str, tuple[int, ...]], Place | Derived]
"""(name, shape) of one of our tensors -> its place in another format, or the tensor itself if the format has none."""


class LocatedTensors(NamedTuple):
    """The sources of our tensors.

    Attributes:
        parts: state_dict name -> source.
        problems: for each of our other tensors, why no source was found.
        unused: names of tensors of the other format that no source uses.
    """

    parts: dict[str, Part]
    problems: list[str]
    unused: list[str]


def locate(
    spec: ModelSpec,
    find: Find,
    tensors: Mapping[str, StoredTensor],
    declared_by: str,
    known: str,
    located: Mapping[str, Part] | None = None,
) -> LocatedTensors:
    """Finds the sources of the tensors of a model with this spec.

    Args:
        spec: the spec of the model.
        find: finds the place of each of our tensors.
        tensors: name -> tensor in the other format.
        declared_by: the file that declares the shapes, for messages.
        known: the dtypes that can be read, for messages.
        located: our tensors that were already found.
    """
    parts, problems, looked_up = dict(located or {}), [], set()
    for name, shape in weight_shapes(spec).items():
        if name in parts:
            continue
        place = find(name, shape)
        if isinstance(place, Derived):
            parts[name] = Part(place, 0, shape[0])
            continue
        looked_up.add(place.name)
        tensor = tensors.get(place.name)
        if tensor is None:
            problems.append(f"{place.name} is missing, expected {list(place.shape)}")
        elif tensor.shape != place.shape:
            problems.append(f"{place.name} has shape {list(tensor.shape)}, {declared_by} says {list(place.shape)}")
        elif not isinstance(tensor.stored, torch.dtype):
            problems.append(f"{place.name} holds {tensor.stored}, expected {known}")
        else:
            parts[name] = Part(place.made(tensor), place.start, shape[0])
    return LocatedTensors(parts, problems, [name for name in tensors if name not in looked_up])


Fused = Mapping[str, tuple[str, ...]]
"""Name of a fused projection -> our projections in it: a format stores them in one tensor, one after the other."""
PHI3_FUSED: Fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def renamed(name: str, names: Iterable[tuple[str, str]]) -> str:
    """Name of one of our tensors in another format, by a table of patterns and templates."""
    for pattern, template in names:
        if match := re.fullmatch(pattern, name):
            return match.expand(template)
    raise AssertionError(name)


def place_of(
    spec: ModelSpec, name: str, shape: tuple[int, ...], their_name: Callable[[str], str], fused: Fused
) -> Place:
    """Finds the place of one of our tensors by its name, as a part of a fused projection if it is in one."""
    rows_of = {"q_proj": spec.n_heads * spec.d_head} | dict.fromkeys(
        ("k_proj", "v_proj"), spec.n_kv_heads * spec.d_head
    )
    for whole, members in fused.items():
        for number, member in enumerate(members):
            if f".{member}." in name:
                rows = [rows_of.get(projection, spec.d_ff) for projection in members]
                theirs = their_name(name.replace(f".{member}.", f".{whole}."))
                return Place(theirs, (sum(rows), *shape[1:]), sum(rows[:number]))
    return Place(their_name(name), shape)


@dataclass(frozen=True, slots=True)
class MadeFile:
    """A companion of a model whose content is generated, not read from a file."""

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
        tokenizer: folder of its tokenizer, if it is not `path`.
    """

    path: Path
    family: str
    spec: ModelSpec
    parts: Mapping[str, Part]
    companions: tuple[Path | MadeFile, ...] = ()
    notes: tuple[str, ...] = ()
    tokenizer: Path | None = None

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


def refuse(path: Path, problems: list[str]) -> None:
    """Raises the problems as one CheckpointError, if there are any."""
    if problems := list(dict.fromkeys(problems)):
        more = f"; and {len(problems) - MOST_PROBLEMS} more" if len(problems) > MOST_PROBLEMS else ""
        raise CheckpointError(f"{path}: " + "; ".join(problems[:MOST_PROBLEMS]) + more)


def declared_spec(path: Path, problems: list[str], **fields: Any) -> ModelSpec:
    """Returns the spec with these fields, which the file at `path` declares.

    Raises:
        CheckpointError: there are problems with the declarations, or the spec is not valid.
    """
    refuse(path, problems)
    try:
        return ModelSpec(**fields)
    except SpecError as error:
        raise CheckpointError(f"{path}: {error}") from error


def write_folder(model: ForeignModel, out: Path, written: Callable[[int, int], None] = lambda done, all_: None) -> None:
    """Writes config.json, model.safetensors and the companions of a model. The folder appears complete or not at all.

    Args:
        model: the model. Weights keep their stored dtype.
        out: a folder that does not exist yet, or is empty.
        written: called after each piece with the bytes of weights that are written, and the bytes of all weights.

    Raises:
        CheckpointError: `out` is not empty, the disk is full or not writable, or a weight is not finite.
    """
    with _new_folder(out) as folder:
        (folder / "config.json").write_text(config_text(model.spec), encoding="utf-8")
        for companion in model.companions:
            (folder / companion.name).write_bytes(_content(companion))
        # Order of the safetensors library: wide dtypes first, then by name. So every tensor is aligned.
        parts = dict(sorted(model.parts.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
        done, all_ = 0, sum(map(_bytes, parts.values()))
        with (folder / "model.safetensors").open("wb") as file:
            file.write(_header(parts))
            for name, part in parts.items():
                for piece in part.pieces():
                    model.check_piece(name, piece)
                    done += file.write(piece.contiguous().view(torch.uint8).numpy().data)
                    written(done, all_)


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Yields a folder beside `out`, which is renamed to `out` if the block succeeds, and removed if not."""
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise CheckpointError(f"{out}: exists already; name another folder, or delete it")
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as temporary:
            folder = Path(temporary) / out.name
            folder.mkdir()
            yield folder
            folder.rename(out)
    except OSError as error:
        raise CheckpointError(f"{out}: could not be written ({error.strerror or first_line(error)})") from error


def _content(companion: Path | MadeFile) -> bytes:
    try:
        return companion.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{companion}: cannot be read ({error.strerror})") from error


def _bytes(part: Part) -> int:
    return part.dtype.itemsize * math.prod(part.shape)


def _header(parts: Mapping[str, Part]) -> bytes:
    """Header of a safetensors file (https://huggingface.co/docs/safetensors): the length of a JSON table, the table."""
    end, table = 0, {}
    for name, part in parts.items():
        begin, end = end, end + _bytes(part)
        table[name] = {"dtype": DTYPES[part.dtype], "shape": part.shape, "data_offsets": (begin, end)}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text

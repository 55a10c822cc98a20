"""Reads the weights of a Hugging Face folder: one file, or shards; safetensors or pickles of tensors.

At first only headers are read. Every read of rows maps the file again, and the mapping ends with the result. So a model
of any size needs only the memory of the rows that are in use.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mod_models.checkpoint import CheckpointError, first_line, is_plain, read_plain
from mod_models.spec import shown

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Name of a dtype in safetensors -> dtype. Only quantized models and buffers have other dtypes."""
SAVE_AGAIN = "Save the model again as safetensors, as save_pretrained of transformers does"
WHOLE_FILES = ("model.safetensors", "pytorch_model.bin")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SHARD = re.compile(r"(?:model|pytorch_model)-(\d{5})-of-(\d{5})\.(?:safetensors|bin)")
"""Name of a shard. Groups: its number, and how many there are."""
MOST_SHARDS = 8
"""How many missing shards a message lists after the first."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a file; see `foreign.StoredTensor`.

    `table` is the key under which a pickle holds the table of the tensor; empty if the pickle itself is that table.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    stored: torch.dtype | str
    table: str = ""

    @property
    def dtype(self) -> torch.dtype:
        assert isinstance(self.stored, torch.dtype), "the caller checks `stored` first"
        return self.stored

    def rows(self, start: int, stop: int) -> Tensor:
        """Like `foreign.TensorRows.rows`.

        Raises:
            CheckpointError: the file has changed or was damaged since it was opened.
        """
        if self.path.suffix != ".safetensors":
            whole: Tensor = _pickled(self.path, self.table)[self.name]
            return whole[start:stop]
        try:
            with safe_open(self.path, framework="pt") as file:
                rows: Tensor = file.get_slice(self.name)[start:stop]
                return rows
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path}: cannot be read ({first_line(error)})") from error


def tensors_of_folder(folder: Path) -> dict[str, FileTensor]:
    """Returns name -> tensor for all tensors of a model: of one file, of the shards in an index, or of other shards.

    As in transformers, the index only says which shards there are. A tensor that only the index names, or only a shard
    holds, is no error here: some tools drop derived tensors from the shards and leave their names in the index.

    Raises:
        CheckpointError: there are no weights, a shard is missing or damaged, two shards hold one tensor, or a pickle
            holds more than tensors.
    """
    for whole, index in zip(WHOLE_FILES, INDEXES, strict=True):
        if (folder / whole).is_file():
            return tensors_of_file(folder / whole)
        if (folder / index).is_file():
            return _of_index(folder / index)
    for suffix in (".safetensors", ".bin"):
        if shards := sorted(path.name for path in folder.glob(f"*{suffix}") if SHARD.fullmatch(path.name)):
            return _without_index(folder, shards)
    raise CheckpointError(f"{folder}: holds no weights; expected one of {', '.join((*WHOLE_FILES, *INDEXES))}")


def _of_index(index: Path) -> dict[str, FileTensor]:
    declared = read_json(index).get("weight_map")
    if not isinstance(declared, Mapping) or not declared:
        raise CheckpointError(f"{index}: holds no table 'weight_map' of tensors and their files")
    shards = sorted({str(name) for name in declared.values()})
    for shard in shards:
        if Path(shard).name != shard:
            raise CheckpointError(f"{index}: names the file {shown(shard)}, expected one beside the index")
    missing = [shard for shard in shards if not _is_file(index.parent / shard)]
    if missing:
        name = next(name for name, file in declared.items() if str(file) == missing[0])
        raise CheckpointError(
            f"{index.parent / missing[0]}: missing; {index.name} says that {shown(name)} is in it{_also(missing[1:])}"
        )
    return _of_shards(index.parent, shards)


def _without_index(folder: Path, shards: list[str]) -> dict[str, FileTensor]:
    """Reads shards whose names say how many there are."""
    first, count = shards[0], int(SHARD.fullmatch(shards[0])[2])  # type: ignore[index]  # The caller matched it.
    before, after = first.split("-")[0], Path(first).suffix
    expected = [f"{before}-{number:05}-of-{count:05}{after}" for number in range(1, count + 1)]
    if others := sorted({*shards} - {*expected}):
        raise CheckpointError(f"{folder}: holds {first} and {others[0]}, which are shards of two models")
    missing = sorted({*expected} - {*shards})
    if missing:
        raise CheckpointError(
            f"{folder / missing[0]}: missing; {first} beside it is one of {count} shards{_also(missing[1:])}"
        )
    return _of_shards(folder, shards)


def _also(missing: list[str]) -> str:
    more = f" and {len(missing) - MOST_SHARDS} more" if len(missing) > MOST_SHARDS else ""
    return f". Also missing: {', '.join(missing[:MOST_SHARDS])}{more}" if missing else ""


def _of_shards(folder: Path, shards: Iterable[str]) -> dict[str, FileTensor]:
    tensors: dict[str, FileTensor] = {}
    for shard in shards:
        for name, tensor in tensors_of_file(folder / shard).items():
            if name in tensors:
                raise CheckpointError(
                    f"{folder / shard}: holds {shown(name)}, which {tensors[name].path.name} holds too"
                )
            tensors[name] = tensor
    return tensors


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False  # For example, the name is too long.


def tensors_of_file(path: Path, table: str = "") -> dict[str, FileTensor]:
    """Returns name -> tensor of one file, a pickle if its suffix is not .safetensors. `table` is as in `FileTensor`.

    Raises:
        CheckpointError: the file is damaged, or is a pickle that holds more than tensors.
    """
    if path.suffix != ".safetensors":
        return {
            name: FileTensor(
                path, name, tuple(tensor.shape), tensor.dtype if is_plain(tensor) else str(tensor.dtype), table
            )
            for name, tensor in _pickled(path, table).items()
        }
    tensors = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # Not a mapping.
                tensor = file.get_slice(name)
                dtype = tensor.get_dtype()
                tensors[name] = FileTensor(path, name, tuple(tensor.get_shape()), FLOATS.get(dtype, dtype))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not readable, it may be truncated ({first_line(error)})") from error
    return tensors


def _pickled(path: Path, table: str) -> Mapping[str, Tensor]:
    data = read_plain(path, "file of tensors", SAVE_AGAIN)
    if table:
        data = data[table] if isinstance(data.get(table), Mapping) else {}
    wrong = next((name for name, tensor in data.items() if not isinstance(tensor, Tensor)), None)
    if wrong is not None:
        raise CheckpointError(f"{path}: {shown(wrong)} in it is no tensor, expected a state_dict")
    return data


def read_json(path: Path) -> Mapping[str, Any]:
    """Reads a file that holds one JSON object.

    Raises:
        CheckpointError: the file cannot be read or holds anything else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path}: not readable JSON ({first_line(error)})") from error
    if not isinstance(data, Mapping):
        raise CheckpointError(f"{path}: holds {type(data).__name__}, expected an object")
    return data

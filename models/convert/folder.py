"""Writes a model in another format as a checkpoint folder, a piece at a time."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from mod_models.checkpoint import CheckpointError, config_text, first_line
from mod_models.convert.foreign import Companion, ForeignModel, Part

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
ALIGNMENT = 8


def write_folder(model: ForeignModel, out: Path, written: Callable[[int, int], None] = lambda done, all_: None) -> None:
    """Writes config.json, model.safetensors and the companions of a model. A folder appears whole or not at all.

    Args:
        model: what is written. Weights keep the dtype that they are stored in.
        out: a folder that does not exist yet, or is empty.
        written: is told after each piece how many bytes of weights there are, and how many there will be.

    Raises:
        CheckpointError: `out` holds something, the disk cannot be written to or is full, or a weight is not finite.
    """
    with _new_folder(out) as folder:
        (folder / "config.json").write_text(config_text(model.spec), encoding="utf-8")
        for companion in model.companions:
            (folder / companion.name).write_bytes(_content(companion))
        # Wide numbers first, then by name: the order of the safetensors library, and every tensor is aligned.
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
    """A folder beside `out` that becomes it when the block has succeeded, and is removed when it has not."""
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


def _content(companion: Companion) -> bytes:
    try:
        return companion.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{companion}: cannot be read ({error.strerror})") from error


def _bytes(part: Part) -> int:
    return part.dtype.itemsize * math.prod(part.shape)


def _header(parts: Mapping[str, Part]) -> bytes:
    """https://huggingface.co/docs/safetensors: the length of the table of contents, and the table."""
    end, table = 0, {}
    for name, part in parts.items():
        begin, end = end, end + _bytes(part)
        table[name] = {"dtype": DTYPES[part.dtype], "shape": part.shape, "data_offsets": (begin, end)}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text

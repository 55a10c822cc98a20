"""Writes a model of another format as a checkpoint folder, one piece of the weights at a time."""

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


def _content(companion: Companion) -> bytes:
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

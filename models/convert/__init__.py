"""Models in other formats: which readers there are, and what reads and converts with the one that fits."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from mod_models.checkpoint import CheckpointError
from mod_models.convert.dialects import read_dialect, refuse_undeclared
from mod_models.convert.foreign import ForeignModel
from mod_models.convert.gguf_file import starts_as_gguf
from mod_models.convert.gguf_model import read_gguf
from mod_models.convert.hugging_face import is_hugging_face, read_hugging_face


class Reader(NamedTuple):
    """A format.

    Attributes:
        what: for a person to read.
        recognises: whether a path is of this format, from as little as possible of it.
        read: (path, longest row or None, fields that are known to change nothing) -> the model.
    """

    what: str
    recognises: Callable[[Path], bool]
    read: Callable[[Path, int | None, Collection[str]], ForeignModel]


READERS: tuple[Reader, ...] = (
    Reader("a Hugging Face folder (a readable config.json with a model_type)", is_hugging_face, read_hugging_face),
    Reader("a GGUF file", starts_as_gguf, read_gguf),
)


def is_foreign(path: Path) -> bool:
    """Whether there is a reader for a path."""
    return any(reader.recognises(path) for reader in READERS)


def read_foreign(
    path: Path,
    max_positions: int | None = None,
    ignored: Collection[str] = (),
    dialect: str | None = None,
    capacity: float | None = None,
) -> ForeignModel:
    """A model in another format, its weights still in their files.

    Args:
        path: of the model.
        max_positions: the longest row, where it shall be shorter than the model allows.
        ignored: fields of its configuration that the caller knows to change nothing.
        dialect: name in `dialects.DIALECTS`, for a folder of a Mixture-of-Depths model of others.
        capacity: of its routed layers, where it is not what the folder or the dialect says.

    Raises:
        CheckpointError: no reader knows the format, or what stands there cannot be said by a spec, or is damaged; or
            it has the routers of a dialect, and none was declared.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    if dialect is not None:
        return read_dialect(path, dialect, capacity, max_positions, ignored)
    if capacity is not None:
        raise CheckpointError("--capacity is for routed layers of a --dialect, and none was declared")
    if path.is_dir():
        refuse_undeclared(path)
    for reader in READERS:
        if reader.recognises(path):
            return reader.read(path, max_positions, ignored)
    raise CheckpointError(f"{path}: not {', or '.join(reader.what for reader in READERS)}")

"""Models in other formats: the table of readers, and reading with the reader that fits."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from mod_models.checkpoint import ARCHITECTURE, CheckpointError
from mod_models.convert.foreign import ForeignModel
from mod_models.convert.gguf_file import starts_as_gguf
from mod_models.convert.gguf_model import read_gguf
from mod_models.convert.hugging_face import is_hugging_face, read_hugging_face, spec_of_config
from mod_models.convert.implementations import read_implementation, refuse_undeclared
from mod_models.convert.lora_adapter import ADAPTER_CONFIG, is_adapter, read_adapter
from mod_models.convert.tensor_files import read_json
from mod_models.spec import ModelSpec, SpecError


class Reader(NamedTuple):
    """A format.

    Attributes:
        what: description for messages.
        recognises: whether a path has this format; reads as little as possible.
        read: (path, longest row or None, configuration fields to ignore) -> the model.
    """

    what: str
    recognises: Callable[[Path], bool]
    read: Callable[[Path, int | None, Collection[str]], ForeignModel]


READERS: tuple[Reader, ...] = (
    Reader("a Hugging Face folder (a readable config.json with a model_type)", is_hugging_face, read_hugging_face),
    Reader("a GGUF file", starts_as_gguf, read_gguf),
)


def is_foreign(path: Path) -> bool:
    """Whether a reader recognises the path."""
    return any(reader.recognises(path) for reader in READERS)


def read_foreign(
    path: Path,
    max_positions: int | None = None,
    ignored: Collection[str] = (),
    implementation: str | None = None,
    capacity: float | None = None,
    base: Path | None = None,
) -> ForeignModel:
    """Reads a model in another format; its weights stay in their files.

    Args:
        path: path of the model.
        max_positions: tokens of the longest row, to make it shorter than the model allows.
        ignored: configuration fields that the caller knows to change nothing.
        implementation: name in `IMPLEMENTATIONS`, for a folder of a public implementation of Mixture-of-Depths.
        capacity: capacity of the routed layers; None for the value of the folder or of the implementation.
        base: folder of the base model, for an adapter; None for the one that the adapter names.

    Raises:
        CheckpointError: no reader recognises the format, a spec cannot describe the model, the model is damaged, it has
            the routers of an implementation and none was declared, or it is an adapter whose base model is not here.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    if base is not None and (implementation is not None or not is_adapter(path)):
        reason = "has an --implementation" if implementation is not None else f"holds no {ADAPTER_CONFIG}"
        raise CheckpointError(f"--base {base}: is for an adapter, and {path} {reason}")
    if implementation is not None:
        return read_implementation(path, implementation, capacity, max_positions, ignored)
    if capacity is not None:
        raise CheckpointError("--capacity is for routed layers of an --implementation, and none was declared")
    if is_adapter(path):
        return read_adapter(path, base, max_positions, ignored)
    if path.is_dir():
        refuse_undeclared(path)
    for reader in READERS:
        if reader.recognises(path):
            return reader.read(path, max_positions, ignored)
    raise CheckpointError(f"{path}: not {', or '.join(reader.what for reader in READERS)}")


def declared_in(path: Path) -> ModelSpec | None:
    """Returns the spec in a JSON file, which is a spec, or the config.json of a checkpoint or Hugging Face folder.

    Returns:
        None if the file declares a model of another architecture, or no model.

    Raises:
        CheckpointError: the file is not readable, its family is unknown, or its spec is not valid.
    """
    fields = read_json(path)
    if "model_type" in fields:
        return spec_of_config(path, fields)
    if fields.get("architecture", ARCHITECTURE) != ARCHITECTURE:
        return None
    spec = fields.get("spec", fields)
    if not isinstance(spec, dict) or "d_model" not in spec:
        return None
    try:
        return ModelSpec.from_dict(spec)
    except SpecError as error:
        raise CheckpointError(f"{path}: {error}") from error

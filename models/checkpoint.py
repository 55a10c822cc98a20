"""Checkpoints: (spec, weights) in one `model.pt`, or in a folder of `config.json` and `model.safetensors`.

Both carry the same header: a format version, the name of the architecture, and the spec. Weights without a spec are
refused, because routing semantics cannot be guessed from tensor names. Nothing in a checkpoint is executed:
`model.pt` is read with `weights_only=True`, and an architecture is a name in a table, never a module path.
"""

from __future__ import annotations

import json
import pickle
import re
import struct
import tempfile
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mod_models.spec import ModelSpec, SpecError, shown
from mod_models.transformer import Transformer, weight_shapes

ARCHITECTURE = "mod_transformer"
ROUTES = re.compile(r"layers\.\d+\.((mlp_)?(router|predictor)|adapter)\.")
"""Names of the weights that the dense baseline leaves out: those that decide which tokens skip a block, and those of
adapters. It keeps the routers of experts.
"""
FORMAT_VERSION = 1
DECLARE = (
    "Save it with mod_models.checkpoint.save_checkpoint(path, Checkpoint(spec=ModelSpec(...), weights=state_dict)), "
    "which declares the architecture and how it routes"
)
MOST_PROBLEMS = 8  # in one message about weights that do not fit


class CheckpointError(ValueError):
    """The file is not a usable checkpoint; the message says what is wrong and what to do."""


class ForeignArchitectureError(LookupError):
    """The checkpoint is intact but has another architecture; the message is the name of that architecture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A spec and its weights, state_dict name -> tensor. 16-bit weights stay 16-bit here; the model is float32."""

    spec: ModelSpec
    weights: Mapping[str, Tensor]

    def module(self, outputs: str = "logits") -> Transformer:
        """Builds the eager float32 model in eval mode. It shares float32 weights with this checkpoint."""
        model = self.skeleton(outputs)
        model.load_state_dict({name: tensor.float() for name, tensor in self.weights.items()}, assign=True)
        return model.requires_grad_(False)

    def skeleton(self, outputs: str = "logits") -> Transformer:
        """Builds the model in eval mode, parameters on the meta device; buffers that are not saved (RoPE) are real."""
        with torch.device("meta"):
            model = Transformer(self.spec, outputs)
        return model.eval().requires_grad_(False)

    def dense(self) -> Checkpoint:
        """Returns the dense baseline: the same weights without those of routing; every token runs every block."""
        weights = {name: tensor for name, tensor in self.weights.items() if not ROUTES.match(name)}
        return Checkpoint(spec=self.spec.dense(), weights=weights)


def random_checkpoint(spec: ModelSpec, seed: int) -> Checkpoint:
    """Draws initial weights, to measure models before training. The spec and the seed determine the weights."""
    with torch.device("meta"):
        model = Transformer(spec)
    empty = {name: torch.empty_like(tensor, device="cpu") for name, tensor in model.state_dict().items()}
    model.load_state_dict(empty, assign=True)
    model.init_weights(torch.Generator().manual_seed(seed))
    return Checkpoint(spec=spec, weights=dict(model.state_dict()))


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Writes `model.pt` (a path ending in .pt) or a folder of config.json and model.safetensors.

    Every file is written to a temporary file beside it and then renamed. If a write fails, the old checkpoint is
    unchanged. If the process is killed, the old checkpoint or none is left, but never a spec with other weights.

    Raises:
        OSError: the disk is full or not writable.
    """
    weights = _separate(checkpoint.weights)
    if path.suffix == ".pt":
        write_plain(path, {**_header(checkpoint.spec), "weights": weights})
        return
    path.mkdir(parents=True, exist_ok=True)
    with written_beside(path / "config.json") as config:
        config.write_text(config_text(checkpoint.spec), encoding="utf-8")
        with written_beside(path / "model.safetensors") as tensors:
            try:
                save_file(weights, tensors)
            except SafetensorError as error:
                raise OSError(f"{path / 'model.safetensors'}: could not be written ({error})") from error
            # Without config.json a folder is no checkpoint, so a run killed between the two renames leaves none.
            (path / "config.json").unlink(missing_ok=True)


def config_text(spec: ModelSpec) -> str:
    """Content of the config.json of a checkpoint folder."""
    return json.dumps(_header(spec), indent=2) + "\n"


def _header(spec: ModelSpec) -> dict[str, object]:
    return {"format_version": FORMAT_VERSION, "architecture": ARCHITECTURE, "spec": spec.to_dict()}


@contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`, and renames that file to `path` if the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        temporary = Path(folder) / path.name
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # the mode that the user's umask gives; safetensors makes its files private
        temporary.replace(path)


def write_plain(path: Path, data: Mapping[str, object]) -> None:
    """Writes a table that `read_plain` can read, through a temporary file that is then renamed.

    Raises:
        OSError: the disk is full or not writable.
    """
    with written_beside(path) as temporary:
        try:
            with temporary.open("wb") as file:
                torch.save(data, file)
        except (OSError, RuntimeError) as error:
            # torch raises a RuntimeError from its own writer; the error of the file system is its context.
            reason = error if isinstance(error, OSError) else error.__context__ or error
            raise OSError(f"{path}: could not be written ({first_line(reason)})") from error


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads a `model.pt` or a checkpoint folder.

    Raises:
        CheckpointError: the path is not a checkpoint, is damaged, would run code, has no spec, or has weights that do
            not fit the spec or are not finite.
        ForeignArchitectureError: the checkpoint names another architecture.
    """
    try:
        header, weights = _read_folder(path) if path.is_dir() else _read_file(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or first_line(error)})") from error
    for key in ("format_version", "architecture", "spec"):
        if key not in header:
            raise CheckpointError(f"{path}: holds no {key!r}, so its routing is unknown. {DECLARE}")
    version, architecture = header["format_version"], header["architecture"]
    if type(version) is not int or version != FORMAT_VERSION:
        raise CheckpointError(f"{path}: format version {shown(version)}, this release reads version {FORMAT_VERSION}")
    if not isinstance(architecture, str):
        raise CheckpointError(f"{path}: the architecture is {shown(architecture)}, expected a name. {DECLARE}")
    if architecture != ARCHITECTURE:
        raise ForeignArchitectureError(architecture)
    try:
        spec = ModelSpec.from_dict(header["spec"])
    except SpecError as error:
        raise CheckpointError(f"{path}: {error}") from error
    _check_weights(path, spec, weights)
    return Checkpoint(spec=spec, weights=weights)


def read_plain(path: Path, what: str = "model.pt", way_out: str = DECLARE) -> Mapping[Any, Any]:
    """Reads a table of plain data and tensors that `torch.save` wrote, without running code from the file.

    In error messages, `what` names the expected kind of file, and `way_out` is the advice for a file of another kind.

    Raises:
        CheckpointError: the file is anything else.
        OSError: the file cannot be opened.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file or folder" if not path.exists() else f"{path}: not a plain file")
    not_one = f"{path}: not a {what} as torch.save writes it; it may be truncated"
    try:
        problem = _archive_problem(path)
        with warnings.catch_warnings():
            # torch warns about unusual pickles before it refuses them; the user only needs the refusal.
            warnings.simplefilter("ignore")
            data = None if problem else torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except zipfile.BadZipFile as error:
        # Before version 1.6 torch wrote bare pickles. None of them can hold a spec, so they are refused unread.
        raise CheckpointError(f"{not_one}, or a bare pickle, which could run code. {way_out}") from error
    except pickle.UnpicklingError as error:
        requested = re.search(r"GLOBAL (\S+)", str(error))
        what = f"asks for {requested[1]}, which is" if requested else "is damaged or asks for"
        raise CheckpointError(
            f"{path}: refused, its pickle {what} more than plain data and tensors and could run code. {way_out}"
        ) from error
    except (
        RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError, EOFError, OverflowError,
        struct.error,
    ) as error:  # fmt: skip
        raise CheckpointError(f"{not_one} ({first_line(error)})") from error
    if problem:
        raise CheckpointError(f"{path}: {problem}. {way_out}")
    if not isinstance(data, Mapping):
        raise CheckpointError(f"{path}: holds {type(data).__name__}, expected a table with a spec. {way_out}")
    return data


def _archive_problem(path: Path) -> str | None:
    """Returns why torch.save did not write this zip archive, judged by its table of contents; None if it may have."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    names = {entry.filename.rpartition("/")[2] for entry in entries}
    if "data.pkl" not in names:
        return "a zip archive, but none that torch.save wrote"
    if "constants.pkl" in names:
        return "a TorchScript archive, which is code and no checkpoint"
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED:
            # Weights are memory-mapped, so torch would take the compressed bytes for numbers.
            return f"{entry.filename} in it is compressed, and torch.save compresses nothing"
    return None


def _read_file(path: Path) -> tuple[Mapping[Any, Any], Mapping[Any, Any]]:
    if path.suffix == ".safetensors" and path.is_file():
        raise CheckpointError(f"{path}: weights without a spec; give the folder that holds it beside its config.json")
    data = read_plain(path)
    weights = data.get("weights")
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"{path}: holds no table 'weights', so it is not a checkpoint with a spec. {DECLARE}")
    return data, weights


def _read_folder(path: Path) -> tuple[Mapping[Any, Any], Mapping[Any, Any]]:
    config, tensors = path / "config.json", path / "model.safetensors"
    for file in (config, tensors):
        if not file.is_file():
            raise CheckpointError(f"{path}: no {file.name} in this folder, expected config.json and model.safetensors")
    try:
        header = json.loads(config.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{config}: not readable JSON ({first_line(error)})") from error
    if not isinstance(header, Mapping):
        raise CheckpointError(f"{config}: holds {type(header).__name__}, expected an object. {DECLARE}")
    try:
        return header, load_file(tensors)
    except SafetensorError as error:
        raise CheckpointError(f"{tensors}: not readable, it may be truncated ({first_line(error)})") from error


def _check_weights(path: Path, spec: ModelSpec, weights: Mapping[Any, Any]) -> None:
    expected = weight_shapes(spec)
    problems = [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in weights]
    for name, tensor in weights.items():
        if name not in expected:
            problems.append(f"{shown(name)} belongs to no layer of the spec")
        elif not is_plain(tensor):
            problems.append(f"{name} is not a dense tensor of 16, 32 or 64-bit floating-point numbers")
        elif tensor.shape != expected[name]:
            problems.append(f"{name} has shape {list(tensor.shape)}, the spec says {list(expected[name])}")
    if problems:
        more = f" (and {len(problems) - MOST_PROBLEMS} more)" if len(problems) > MOST_PROBLEMS else ""
        raise CheckpointError(f"{path}: weights do not fit the spec: " + "; ".join(problems[:MOST_PROBLEMS]) + more)
    for name, tensor in weights.items():
        bad = tensor.numel() - int(torch.isfinite(tensor.float()).sum())
        if bad:
            where = f"{path}: {name} holds {bad} values that are NaN or infinite in float32"
            raise CheckpointError(f"{where}, of {tensor.numel()}")


def is_plain(tensor: object) -> bool:
    """Whether this is a dense CPU tensor of 16, 32 or 64-bit floating-point numbers, all of them in its storage."""
    return (
        isinstance(tensor, Tensor)
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.device.type == "cpu"
        and tensor.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        # This excludes expanded views, which store few numbers and can claim any size.
        and tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()
    )


def _separate(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gives each tensor its own storage. For a view, torch.save writes the whole storage and safetensors refuses it."""
    storages: set[int] = set()
    copies = {}
    for name, tensor in weights.items():
        copy = tensor.detach().cpu().contiguous()
        storage = copy.untyped_storage()
        if storage.data_ptr() in storages or storage.nbytes() != copy.numel() * copy.element_size():
            copy = copy.clone()
        storages.add(storage.data_ptr())
        copies[name] = copy
    return copies


def first_line(error: BaseException) -> str:
    """First line of the text of an error; the name of its type if the text is empty."""
    return (str(error).splitlines() or [type(error).__name__])[0]

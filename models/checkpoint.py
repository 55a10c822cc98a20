"""Checkpoints: (spec, weights) in one `model.pt`, or in a folder of `config.json` and `model.safetensors`.

Both carry the same header: a format version, the name of the architecture, and the spec. Weights without a spec are
refused, because routing semantics cannot be guessed from tensor names. Nothing in a checkpoint is executed:
`model.pt` is read with `weights_only=True`, and an architecture is a name in a table, never a module path.
"""

from __future__ import annotations

import json
import os
import pickle
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mod_models.spec import ModelSpec, SpecError
from mod_models.transformer import Transformer

__all__ = ["ARCHITECTURE", "Checkpoint", "CheckpointError", "load_checkpoint", "random_checkpoint", "save_checkpoint"]

ARCHITECTURE = "mod_transformer"
FORMAT_VERSION = 1
DECLARE = (
    "Save it with mod_models.checkpoint.save_checkpoint(path, Checkpoint(spec=ModelSpec(...), weights=state_dict)), "
    "which declares the architecture and how it routes"
)


class CheckpointError(ValueError):
    """A file that is not a usable checkpoint; the message says what is wrong with it and what to do."""


class ForeignArchitecture(LookupError):
    """A sound checkpoint of an architecture that is not this package's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A spec and its weights, state_dict name -> tensor; 16-bit weights are stored as such and computed in float32."""

    spec: ModelSpec
    weights: Mapping[str, Tensor]

    def module(self) -> Transformer:
        """The eager float32 model in eval mode. Float32 weights are shared with this checkpoint, not copied."""
        with torch.device("meta"):
            model = Transformer(self.spec)
        model.load_state_dict({name: tensor.float() for name, tensor in self.weights.items()}, assign=True)
        return model.eval().requires_grad_(False)

    def dense(self) -> Checkpoint:
        """The dense twin: the same weights without routers and predictors, every token through every block."""
        weights = {n: t for n, t in self.weights.items() if ".router." not in n and ".predictor." not in n}
        return Checkpoint(spec=self.spec.dense(), weights=weights)


def random_checkpoint(spec: ModelSpec, seed: int) -> Checkpoint:
    """Initial weights, for measuring models that nobody has trained yet. Same spec and seed, same weights."""
    model = Transformer(spec)
    model.init_weights(torch.Generator().manual_seed(seed))
    return Checkpoint(spec=spec, weights=dict(model.state_dict()))


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Writes `model.pt` (a path ending in .pt) or a folder of config.json and model.safetensors.

    Every file is written beside its place and renamed, so a killed run leaves the old checkpoint or none.
    """
    header = {
        "format_version": FORMAT_VERSION,
        "architecture": ARCHITECTURE,
        "spec": checkpoint.spec.to_dict(),
    }
    weights = {name: tensor.detach().contiguous() for name, tensor in checkpoint.weights.items()}
    if path.suffix == ".pt":
        # Plain lists instead of tuples: weights_only=True admits both, JSON only lists, and one form is enough.
        plain = json.loads(json.dumps(header))
        _replace(path, lambda file: torch.save({**plain, "weights": weights}, file))
        return
    path.mkdir(parents=True, exist_ok=True)
    _replace(path / "model.safetensors", lambda file: save_file(weights, file))
    _replace(path / "config.json", lambda file: Path(file).write_text(json.dumps(header, indent=2) + "\n"))


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads either form.

    Raises:
        CheckpointError: not a checkpoint, damaged, wants to run code, no spec, weights that do not fit the spec, or
            weights that are not finite.
        ForeignArchitecture: a checkpoint that names another architecture.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    header, weights = _read_folder(path) if path.is_dir() else _read_file(path)
    for key in ("format_version", "architecture", "spec"):
        if key not in header:
            raise CheckpointError(f"{path}: holds no {key!r}, so its routing is unknown. {DECLARE}")
    if header["format_version"] != FORMAT_VERSION:
        found = header["format_version"]
        raise CheckpointError(f"{path}: format version {found!r}, this release reads version {FORMAT_VERSION}")
    if header["architecture"] != ARCHITECTURE:
        raise ForeignArchitecture(str(header["architecture"]))
    if not isinstance(header["spec"], Mapping):
        raise CheckpointError(f"{path}: the spec is {type(header['spec']).__name__}, expected a table. {DECLARE}")
    try:
        spec = ModelSpec.from_dict(header["spec"])
    except SpecError as error:
        raise CheckpointError(f"{path}: " + "; ".join(error.problems)) from error
    _check_weights(path, spec, weights)
    return Checkpoint(spec=spec, weights=weights)


def _read_file(path: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    try:
        data = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: refused, its pickle is damaged or asks for more than plain data and tensors, which could run code. {DECLARE}"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a readable model.pt, it may be truncated ({_first_line(error)})") from error
    if not isinstance(data, Mapping) or not isinstance(data.get("weights"), Mapping):
        raise CheckpointError(f"{path}: holds {type(data).__name__} without a spec. {DECLARE}")
    return data, data["weights"]


def _read_folder(path: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    config, tensors = path / "config.json", path / "model.safetensors"
    for file in (config, tensors):
        if not file.is_file():
            raise CheckpointError(f"{path}: no {file.name} in this folder, expected config.json and model.safetensors")
    try:
        header = json.loads(config.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{config}: not readable JSON ({_first_line(error)})") from error
    if not isinstance(header, Mapping):
        raise CheckpointError(f"{config}: holds {type(header).__name__}, expected an object. {DECLARE}")
    try:
        return header, load_file(tensors)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{tensors}: not readable, it may be truncated ({_first_line(error)})") from error


def _check_weights(path: Path, spec: ModelSpec, weights: Mapping[str, Any]) -> None:
    with torch.device("meta"):
        expected = Transformer(spec).state_dict()
    problems = [f"missing {name} {list(t.shape)}" for name, t in expected.items() if name not in weights]
    for name, tensor in weights.items():
        if name not in expected:
            problems.append(f"{name} belongs to no layer of the spec")
        elif not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            problems.append(f"{name} is not a floating-point tensor")
        elif tensor.shape != expected[name].shape:
            problems.append(f"{name} has shape {list(tensor.shape)}, the spec says {list(expected[name].shape)}")
    if problems:
        more = f" (and {len(problems) - 8} more)" if len(problems) > 8 else ""
        raise CheckpointError(f"{path}: weights do not fit the spec: " + "; ".join(problems[:8]) + more)
    for name, tensor in weights.items():
        bad = tensor.numel() - int(torch.isfinite(tensor).sum())
        if bad:
            raise CheckpointError(f"{path}: {name} holds {bad} values that are NaN or infinite, of {tensor.numel()}")


def _replace(path: Path, write: Callable[[str], object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

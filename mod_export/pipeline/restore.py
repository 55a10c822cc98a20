"""Rebuilds the models of a finished build folder from its spec and weights, or from the checkpoint of the build."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mod_export.config import BuildConfig
from mod_export.errors import BuildFolderError, CheckpointError
from mod_export.folder.manifest import MANIFEST, ModelFacts
from mod_export.folder.programs import PROGRAM
from mod_export.folder.workspace import FinishedFolder
from mod_export.model.checkpoint import model_from_checkpoint, model_from_weights
from mod_export.model.model import Model
from mod_export.types import ModelKind

if TYPE_CHECKING:
    import torch


def restored_model(folder: FinishedFolder, kind: ModelKind, checkpoint: Path | None) -> Model:
    """Returns a model of the folder, with the weights of `checkpoint` if one is named.

    Raises:
        BuildFolderError: spec and weights do not fit each other, or the weights file cannot be read.
        CheckpointError: the folder was built from another checkpoint.
    """
    facts = folder.manifest.models[kind]
    weights = _checkpoint_weights(folder, kind, checkpoint) or _weights_of_folder(folder.root, facts)
    if facts.architecture == PROGRAM:
        from mod_export.model.program_files import read_graphs

        return read_graphs(folder.root, kind, facts.spec, weights)
    model = model_from_weights(facts.architecture, facts.spec, weights)
    try:
        model.module()
    except RuntimeError as error:  # torch raises it for weights that do not fit the model.
        raise BuildFolderError(
            f"{folder.root / MANIFEST}: the reference cannot be rebuilt from spec and weights "
            f"({str(error).splitlines()[0]}); build again"
        ) from error
    return model


def _checkpoint_weights(folder: FinishedFolder, kind: ModelKind, checkpoint: Path | None) -> Mapping[str, torch.Tensor]:
    """Returns the checkpoint's weights; empty where none is named, or where this model was built from another one."""
    models = folder.manifest.models
    expected = models[kind].checkpoint_sha256
    if checkpoint is None or expected != models["mod"].checkpoint_sha256:
        return {}
    model = model_from_checkpoint(checkpoint)
    if model.origin.checkpoint_sha256 != expected:
        raise CheckpointError(
            f"{checkpoint}: is not the checkpoint that {folder.root} was built from (SHA-256 "
            f"{model.origin.checkpoint_sha256[:12]}, expected {expected[:12]})"
        )
    # Only weights are returned: the spec stays that of the folder, whose capacity may differ from the checkpoint's own.
    # A model that skips no block has no dense form, but may have been named as its own baseline.
    built = model if kind == "mod" else model.dense() or model
    return built.weights


def _weights_of_folder(root: Path, facts: ModelFacts) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(root / facts.weights)
        return {name: tensors[name] for name in facts.tensors}
    except (SafetensorError, KeyError, OSError) as error:
        raise BuildFolderError(
            f"{root / facts.weights}: the reference cannot be rebuilt from it ({error}); build again"
        ) from error


def as_built(config: BuildConfig | None, built: BuildConfig) -> BuildConfig:
    """Returns `config`, or else `built`, with the options that the folder's graphs were made for."""
    if config is None:
        return built
    made_for = {name: getattr(built.generation, name) for name in ("window", "slack", "slots")}
    generation = config.generation.model_copy(update=made_for)
    return config.model_copy(update={"generation": generation, "outputs": built.outputs})

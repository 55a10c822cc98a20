"""A model to export with its origin, and functions that work for every model, whatever its capabilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import numpy as np

from mod_export.environment import source_digest
from mod_export.errors import CheckpointError, ConfigError
from mod_export.folder.programs import PROGRAM
from mod_export.graph.weights import state_of
from mod_export.model.protocol import (
    AdjustableCapacity,
    DeclaredRouting,
    DenseBaseline,
    ExportableModel,
    SampledInputs,
    TokenIds,
)
from mod_export.types import KINDS, PRIMARY, TOKEN_INPUTS, Bucket, ModelKind, Outputs

if TYPE_CHECKING:
    import torch

GROUP = "mod_export.architectures"
"""The entry-point group in which packages register their architectures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model to export, and its origin."""

    name: str
    architecture: str
    loaded: ExportableModel
    checkpoint_sha256: str

    @property
    def package(self) -> str:
        """The package that provides the architecture. For a captured program it is mod_export, which reads it."""
        if self.architecture == PROGRAM:
            return "mod_export"
        return entry_points(group=GROUP)[self.architecture].module.partition(".")[0]

    @property
    def code_sha256(self) -> str:
        """SHA-256 of the source code of `package`, because graphs depend on it."""
        return source_digest(self.package)

    @property
    def kinds(self) -> tuple[ModelKind, ...]:
        """`mod`, and `dense` if the model has a dense baseline of its own that is a different model."""
        return KINDS if self.routes_depth and isinstance(self.loaded, DenseBaseline) else ("mod",)

    def of_kind(self, kind: ModelKind) -> ExportableModel:
        """Returns the model itself for `mod`, or its dense baseline for `dense`. `kind` must be one of `kinds`."""
        if kind == "mod":
            return self.loaded
        assert isinstance(self.loaded, DenseBaseline), f"{self.name}: the caller asks `kinds` first"
        return self.loaded.dense()

    @property
    def routes_depth(self) -> bool:
        """Whether tokens skip blocks. True if the model does not declare it; its captured graphs then decide."""
        return not isinstance(self.loaded, DeclaredRouting) or self.loaded.routes_depth

    @property
    def capacity(self) -> float | None:
        """Capacity of every routed layer; None if layers differ or the capacity cannot be changed."""
        return self.loaded.capacity if isinstance(self.loaded, AdjustableCapacity) else None

    def with_capacity(self, capacity: float) -> Model:
        """Returns the same checkpoint with another capacity in every routed layer.

        Raises:
            ConfigError: the model cannot have this capacity.
        """
        if not isinstance(self.loaded, AdjustableCapacity):
            raise ConfigError([f"capacity {capacity:g}: that of {self.name} cannot be changed without training"])
        try:
            return replace(self, loaded=self.loaded.with_capacity(capacity))
        except ValueError as error:
            raise ConfigError([f"capacity {capacity:g}: {error}"]) from error

    @property
    def parameters(self) -> int:
        """Number of weights, predictors included."""
        return sum(tensor.numel() for tensor in self.loaded.weights.values())


def sample_of(model: ExportableModel, bucket: Bucket, seed: int) -> Mapping[str, np.ndarray]:
    """Returns inputs of one run by name, in the order of the module's arguments: the model's own sample, or full rows
    of random ids.
    """
    if isinstance(model, SampledInputs):
        return model.sample(bucket, seed)
    return tokens_sample(token_ids(model).vocab_size, bucket, seed)


def tokens_sample(vocab_size: int, bucket: Bucket, seed: int) -> dict[str, np.ndarray]:
    """Returns full rows of random ids, for a model of token ids."""
    ids_BS = np.random.default_rng(seed).integers(0, vocab_size, (bucket.batch, bucket.seq), dtype=np.int64)
    return dict(zip(TOKEN_INPUTS, (ids_BS, np.full(bucket.batch, bucket.seq, dtype=np.int64)), strict=True))


def token_ids(model: ExportableModel) -> TokenIds:
    """Returns the model itself, which must read token ids."""
    assert isinstance(model, TokenIds), "neither TokenIds nor SampledInputs"
    return model


def output_names(model: ExportableModel, outputs: Outputs) -> tuple[str, ...]:
    """Names of the outputs of the model's module, in order."""
    return tuple(model.output_names) if isinstance(model, SampledInputs) else (PRIMARY[outputs],)


def stored_state(loaded: ExportableModel) -> dict[str, torch.Tensor]:
    """State dict without building the module: weights as the checkpoint stores them, except float64, which becomes
    float32, and the other buffers.

    Raises:
        CheckpointError: the module has a parameter that the checkpoint holds nothing for.
    """
    state = {name: loaded.weights.get(name, tensor) for name, tensor in state_of(loaded.skeleton()).items()}
    missing = [name for name, tensor in state.items() if tensor.is_meta]
    if missing:
        raise CheckpointError(f"the checkpoint holds no value for {', '.join(missing[:3])}")
    wide = {name for name, weight in loaded.weights.items() if weight.is_floating_point() and weight.dtype.itemsize > 4}
    return {name: tensor.float() if name in wide else tensor for name, tensor in state.items()}

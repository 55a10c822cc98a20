"""A model to export and where it comes from, and what can be asked of every one whatever its capabilities."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import entry_points

from mod_export.environment import source_digest
from mod_export.errors import CheckpointError, ConfigError
from mod_export.sources.protocol import AdjustableCapacity, DeclaredRouting, DenseBaseline, ExportableModel
from mod_export.types import ModelKind

GROUP = "mod_export.architectures"
"""The entry-point group in which packages register their architectures."""
PROGRAM = "program"
"""The architecture of a model that is captured already (`sources/programs.py`), which no package provides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model to export, and its origin."""

    name: str
    architecture: str
    loaded: ExportableModel
    checkpoint_sha256: str

    @property
    def package(self) -> str:
        """The package that provides the architecture; of a program, whose spec says all, the one that reads it."""
        if self.architecture == PROGRAM:
            return "mod_export"
        return entry_points(group=GROUP)[self.architecture].module.partition(".")[0]

    @property
    def code_sha256(self) -> str:
        """Of the source code of that package, because graphs depend on it."""
        return source_digest(self.package)

    def of_kind(self, kind: ModelKind) -> ExportableModel:
        """The model itself for `mod`, its dense baseline for `dense`.

        Raises:
            CheckpointError: it has no dense baseline of its own.
        """
        if kind == "mod":
            return self.loaded
        if not isinstance(self.loaded, DenseBaseline):
            raise CheckpointError(f"{self.name}: has no dense baseline of its own; name a checkpoint with --baseline")
        return self.loaded.dense()

    @property
    def routes_depth(self) -> bool:
        """Whether tokens skip blocks in it, as far as it declares; else its captured graphs tell."""
        return not isinstance(self.loaded, DeclaredRouting) or self.loaded.routes_depth

    @property
    def capacity(self) -> float | None:
        """That of every routed layer; None where layers differ, or where it cannot be changed."""
        return self.loaded.capacity if isinstance(self.loaded, AdjustableCapacity) else None

    def with_capacity(self, capacity: float) -> Model:
        """The same checkpoint with another capacity in every routed layer.

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

"""What a target brings: rewrites of its graphs, how its engines are built, and how they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, runtime_checkable

from mod_export.artifacts import (
    Availability,
    Bucket,
    Dialect,
    DType,
    Engine,
    Graph,
    ModelKind,
    Profile,
    Variant,
)
from mod_export.config import BuildConfig

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir
    import torch

__all__ = ["BindableRunner", "EngineBuilder", "EngineJob", "EngineProfiler", "GraphPass", "Runner"]


class GraphPass(Protocol):
    """One rewrite of an ONNX graph. `graph/passes/__init__.py` runs requires, run, ensures, and orders them."""

    name: ClassVar[str]

    def applies(self, dialect: Dialect, dtype: DType) -> bool:
        """Whether graphs of this dialect and dtype go through this pass."""

    def run(self, model: onnx_ir.Model, dialect: Dialect, dtype: DType) -> int:
        """Rewrites in place; returns how many places were rewritten.

        Raises:
            LimitError: the graph holds what the dialect cannot take and this pass cannot rewrite it.
        """

    def ensures(self, model: onnx_ir.Model, dialect: Dialect, dtype: DType) -> Sequence[str]:
        """Problems that must not be left after `run`; empty when all is well."""


class EngineJob(Protocol):
    """What an engine may draw on when it builds one variant. Values are computed when first asked for."""

    @property
    def root(self) -> Path:
        """The build folder."""

    @property
    def graph(self) -> Graph:
        """The graph of the target's dialect; the portable one where they are the same."""

    @property
    def weights(self) -> str:
        """The weights file that `graph` points into, relative to the root."""

    def exported_program(self) -> torch.export.ExportedProgram:
        """The captured program that `graph` came from."""


class Runner(Protocol):
    """A loaded engine. A context manager; `run` checks its feeds against the engine's own inputs."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    providers: tuple[str, ...]
    threads: int

    def run(self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """Runs once. `outputs` names what is wanted, all by default. Returns after the device has finished."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class BindableRunner(Protocol):
    """A loaded engine on this machine's processor whose inputs and outputs can stay in one place."""

    inputs: tuple[str, ...]

    @property
    def ports(self) -> Mapping[str, Any]:
        """Of every input and output (shape, dtype)."""

    def bind(self, feeds: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> Callable[[], None]:
        """What runs the engine on these arrays each time it is called: read where they lie, written where they lie.

        Args:
            feeds: all inputs.
            outputs: those that are wanted.

        Raises:
            EngineError: an array is not of its port's shape and dtype.
        """


class EngineBuilder(Protocol):
    """One target, one vendor, one file."""

    name: ClassVar[str]
    dialect: ClassVar[Dialect]
    from_onnx: ClassVar[bool]  # False: builds from the captured program instead of a graph of its dialect
    apart: ClassVar[bool]  # True: builds in a process of its own, so that several engines can be built at once
    binds: ClassVar[bool]  # True: its runners are BindableRunners, so that a cache can stay where it is

    def availability(self) -> Availability:
        """What this machine can do, found by trying, without building anything."""

    def variants(self, config: BuildConfig) -> Sequence[Variant]:
        """The engines that the configuration asks for."""

    def versions(self) -> Mapping[str, str]:
        """The libraries whose version decides whether an engine must be built again."""

    def check(self, config: BuildConfig, model: ModelKind, bucket: Bucket) -> Sequence[str]:
        """Reasons why this bucket cannot be built, known without a graph; empty when there are none."""

    def build(self, job: EngineJob, variant: Variant, destination: Path, config: BuildConfig) -> None:
        """Writes the engine to `destination`. The caller renames it into place once it is whole.

        Raises:
            EngineError: the vendor's builder failed.
            LimitError: the target cannot take this graph.
        """

    suffix: ClassVar[str]

    def load(
        self, root: Path, engine: Engine, config: BuildConfig, weights: Mapping[str, np.ndarray] | None = None
    ) -> Runner:
        """Loads an engine of the build folder `root`.

        Args:
            root: the build folder.
            engine: one of its engines.
            config: the resolved configuration.
            weights: tensors that take the place of those of the same name in the weights file, for probes. Only for
                engines that have a weights file (`Engine.weights`).

        Raises:
            TargetError: this machine cannot run it.
            EngineError: the file is not a usable engine, or takes no other weights.
        """


@runtime_checkable
class EngineProfiler(Protocol):
    """An engine builder whose engines run on this machine's processor and can say where their time goes there."""

    def profile(
        self, root: Path, engine: Engine, config: BuildConfig, feeds: Mapping[str, np.ndarray], runs: int
    ) -> Profile:
        """Profiles an engine of the build folder `root`, in a session of its own: the one that is timed stays clean.

        Args:
            root: the build folder.
            engine: one of its engines.
            config: the resolved configuration.
            feeds: input name -> array; those that the engine has no input for are left out.
            runs: runs that count; one more comes before them.

        Raises:
            TargetError: this machine cannot run it.
            EngineError: the file is not a usable engine, or the profiler failed.
        """

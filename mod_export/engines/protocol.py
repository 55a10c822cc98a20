"""What a target provides: how its engines are built and loaded, and what a loaded engine can do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np

from mod_export.config import BuildConfig
from mod_export.errors import EngineError
from mod_export.types import (
    Availability,
    Bucket,
    Dialect,
    Engine,
    Graph,
    ModelKind,
    Profile,
    Variant,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "BindableRunner",
    "EngineBuilder",
    "EngineJob",
    "EngineProfiler",
    "Port",
    "Runner",
    "check_bound",
    "check_feeds",
    "check_outputs",
]

INT64: np.dtype[np.generic] = np.dtype(np.int64)


class Port(NamedTuple):
    """An input or output of an engine: its static shape, and its dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]


class EngineJob(Protocol):
    """What a target may use to build one variant. Values are computed when they are first asked for."""

    @property
    def root(self) -> Path:
        """The build folder."""

    @property
    def graph(self) -> Graph:
        """The graph of the target's dialect; the portable one where they are the same."""

    @property
    def weights(self) -> str:
        """The weights file that `graph` refers to, relative to the root."""

    def exported_program(self) -> torch.export.ExportedProgram:
        """The captured program that `graph` came from."""


class Runner(Protocol):
    """A loaded engine. A context manager; `run` checks its feeds against the engine's own inputs."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    providers: tuple[str, ...]
    threads: int

    def run(self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """Runs once, and returns after the device has finished. `outputs` names the wanted outputs, all by default."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class BindableRunner(Protocol):
    """A loaded engine on this machine's CPU that can run on the same arrays again and again."""

    inputs: tuple[str, ...]

    @property
    def ports(self) -> Mapping[str, Port]:
        """Every input and output by name."""

    def bind(self, feeds: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> Callable[[], None]:
        """A function that runs the engine on these arrays each time it is called; inputs and outputs are used in place.

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
    apart: ClassVar[bool]  # True: builds in a process of its own, so several engines can be built at once
    suffix: ClassVar[str]  # of its files
    embeds_weights: ClassVar[bool]  # True: an engine file holds its weights; False: it reads a file of graphs/
    binds: ClassVar[bool]  # True: its runners are BindableRunners, so a cache can stay in place

    def availability(self) -> Availability:
        """What this machine can do. Found by trying, without building anything."""

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

    def load(
        self,
        root: Path,
        engine: Engine,
        config: BuildConfig,
        threads: int,
        weights: Mapping[str, np.ndarray] | None = None,
    ) -> Runner:
        """Loads an engine of the build folder `root`.

        Args:
            root: the build folder.
            engine: one of its engines.
            config: the resolved configuration.
            threads: threads inside one operator, for engines on the processor; 0 leaves the library's own choice.
            weights: tensors that replace those of the same name in the weights file, for probes. Only for engines that
                have a weights file (`Engine.weights`).

        Raises:
            TargetError: this machine cannot run it.
            EngineError: the file is not a usable engine, or its weights cannot be replaced.
        """


@runtime_checkable
class EngineProfiler(Protocol):
    """An engine builder whose engines run on this machine's CPU and can measure the time of each kernel."""

    def profile(
        self,
        root: Path,
        engine: Engine,
        config: BuildConfig,
        threads: int,
        feeds: Mapping[str, np.ndarray],
        runs: int,
    ) -> Profile:
        """Profiles an engine of the build folder `root`, in a session of its own, apart from the one that is timed.

        Args:
            root: the build folder.
            engine: one of its engines.
            config: the resolved configuration.
            threads: as in `EngineBuilder.load`.
            feeds: input name -> array; those that the engine has no input for are left out.
            runs: runs that count; one more comes before them.

        Raises:
            TargetError: this machine cannot run it.
            EngineError: the file is not a usable engine, or the profiler failed.
        """


def check_feeds(
    where: str,
    inputs: Mapping[str, tuple[int, ...]],
    feeds: Mapping[str, np.ndarray],
    dtypes: Mapping[str, np.dtype[np.generic]] | None = None,
) -> None:
    """Refuses feeds that are not exactly the engine's inputs, with their shapes and dtypes.

    An input that was dropped without notice would make two different computations look comparable.

    Args:
        where: the engine, for the message.
        inputs: name -> static shape.
        feeds: name -> array.
        dtypes: of inputs that are not int64, by name.

    Raises:
        EngineError: names, shapes or dtypes differ.
    """
    if set(feeds) != set(inputs):
        raise EngineError(f"{where}: got inputs {sorted(feeds)}, the engine has {sorted(inputs)}")
    for name, array in feeds.items():
        expected = (dtypes or {}).get(name, INT64)
        if tuple(array.shape) != inputs[name] or array.dtype != expected:
            raise EngineError(
                f"{where}: input {name} is {array.dtype} {list(array.shape)}, expected {expected} {list(inputs[name])}"
            )


def check_bound(
    where: str, ports: Mapping[str, Port], feeds: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]
) -> None:
    """Refuses arrays that cannot be used in place: each must have its port's shape and dtype, and be contiguous.

    Raises:
        EngineError: one is not, or there is no such port.
    """
    for name, array in {**feeds, **outputs}.items():
        port = ports.get(name)
        if port is None:
            raise EngineError(f"{where}: no input or output is called {name}; the engine has {', '.join(ports)}")
        if tuple(array.shape) != port.shape or array.dtype != port.dtype or not array.flags.c_contiguous:
            raise EngineError(
                f"{where}: {name} is {array.dtype} {list(array.shape)}, expected {port.dtype} {list(port.shape)}, "
                "contiguous"
            )


def check_outputs(where: str, known: Sequence[str], wanted: Sequence[str]) -> None:
    """Refuses names of outputs that the engine does not have.

    Raises:
        EngineError: one does not.
    """
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise EngineError(f"{where}: no output {', '.join(unknown)}; the engine has {', '.join(known)}")

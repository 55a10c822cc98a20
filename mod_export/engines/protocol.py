"""The interface of a target: how its engines are built and loaded, and what a loaded engine can do."""

from __future__ import annotations

import contextlib
import platform
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np

from mod_export.config import BuildConfig
from mod_export.engines.huge_pages import in_huge_pages
from mod_export.environment import package_version
from mod_export.errors import EngineError
from mod_export.types import Availability, DType, Engine, Graph, Profile, TargetLimits, Variant

if TYPE_CHECKING:
    import torch

NO_NVIDIA = "needs NVIDIA's libraries, which do not exist for macOS; use a machine with Linux"
INTEL_MAC = ("darwin", "x86_64")
ON_GPU = threading.RLock()
"""Held by whoever opens or runs an engine on a GPU. CUDA lets no other thread use a device while a CUDA graph is
recorded (capture mode `global`, which torch and ONNX Runtime use), the buffers and the context of a runner belong to
one run at a time, and opening a CUDA session changes the output and the log of the whole process."""

Arrays = Mapping[str, np.ndarray]
OptionalArrays = Arrays | None


class Port(NamedTuple):
    """An input or output of an engine: its static shape, and its dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineJob:
    """The input of a target that builds one variant.

    Attributes:
        root: the build folder.
        graph: the target's graph; the portable graph if they are the same.
        program: captures the program that `graph` came from, with its matrix products in a dtype.
    """

    root: Path
    graph: Graph
    program: Callable[[DType], torch.export.ExportedProgram]


class Runner(Protocol):
    """An object that runs like a loaded engine. It is a context manager."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    providers: tuple[str, ...]
    threads: int

    def run(self, feeds: Arrays, outputs: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """Runs once, like `EngineRunner.run`."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class EngineRunner(ABC):
    """A loaded engine: a Runner that checks its inputs."""

    def __init__(
        self, where: str, inputs: Mapping[str, Port], outputs: Sequence[str], providers: Sequence[str], threads: int
    ) -> None:
        """Messages call the engine `where`. It runs on `providers`. `threads` is 0 if the library chose the number."""
        self._where = where
        self._feeds = inputs
        self.inputs: tuple[str, ...] = tuple(inputs)
        self.outputs: tuple[str, ...] = tuple(outputs)
        self.providers: tuple[str, ...] = tuple(providers)
        self.threads = threads

    def run(self, feeds: Arrays, outputs: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """Runs once, and returns after the device has finished.

        Args:
            feeds: exactly the engine's inputs. If a further input were ignored, two different computations could look
                comparable.
            outputs: names of the wanted outputs, all by default.

        Raises:
            EngineError: names, shapes or dtypes are not the engine's, or the run failed.
        """
        if set(feeds) != set(self.inputs):
            raise EngineError(f"{self._where}: got inputs {sorted(feeds)}, the engine has {sorted(self.inputs)}")
        for name, array in feeds.items():
            shape, dtype = self._feeds[name]
            if array.shape != shape or array.dtype != dtype:
                raise EngineError(
                    f"{self._where}: input {name} is {array.dtype} {list(array.shape)}, expected {dtype} {list(shape)}"
                )
        wanted = list(outputs or self.outputs)
        unknown, known = [name for name in wanted if name not in self.outputs], ", ".join(self.outputs)
        if unknown:
            raise EngineError(f"{self._where}: no output {', '.join(unknown)}; the engine has {known}")
        return self._run(feeds, wanted)

    @abstractmethod
    def _run(self, feeds: Arrays, wanted: list[str]) -> dict[str, np.ndarray]:
        """Runs once on feeds that were checked."""

    @abstractmethod
    def close(self) -> None:
        """Releases the engine's resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@runtime_checkable
class BindableRunner(Protocol):
    """A loaded engine on this machine's CPU that can run repeatedly on the same arrays."""

    inputs: tuple[str, ...]

    @property
    def ports(self) -> Mapping[str, Port]:
        """Every input and output by name."""

    def bind(self, feeds: Arrays, outputs: Arrays) -> Callable[[], None]:
        """Returns a function that runs the engine at each call, and uses all inputs and the wanted outputs in place.

        Raises:
            EngineError: an array does not have its port's shape and dtype, or is not contiguous.
        """


class EngineBuilder(ABC):
    """Builds and loads the engines of one target.

    Attributes:
        name: name of the target.
        packages: packages that it needs; their versions decide whether an engine must be built again.
        extra: the extra of mod-export that installs these packages.
        limits: what a graph for this target may contain.
        suffix: suffix of its engine files.
        from_onnx: False if it builds from the captured program instead of a graph within its limits.
        apart: True if it builds in a process of its own, so that several engines can be built at once.
        embeds_weights: True if an engine file holds its weights; otherwise it reads a weights file in graphs/.
        binds: True if its runners are BindableRunners, so that a cache can stay in place.
        nvidia: True if building and running need NVIDIA's libraries.
    """

    name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    extra: ClassVar[str]
    limits: ClassVar[TargetLimits]
    suffix: ClassVar[str]
    from_onnx: ClassVar[bool] = True
    apart: ClassVar[bool] = False
    embeds_weights: ClassVar[bool] = False
    binds: ClassVar[bool] = False
    nvidia: ClassVar[bool] = False

    def availability(self) -> Availability:
        """Returns what this machine can do. This is tested without building anything."""
        if self.nvidia and sys.platform == "darwin":
            return Availability(builds=False, runs=False, reason=NO_NVIDIA)
        missing = next((package for package in self.packages if package_version(package) is None), None)
        if missing is None:
            return self._installed()
        reason = f"{missing} is not installed; install mod-export[{self.extra}]"
        if (sys.platform, platform.machine()) == INTEL_MAC:
            reason = f"needs {missing}, which is not published for Macs with an Intel processor"
        return Availability(builds=False, runs=False, reason=reason)

    @abstractmethod
    def _installed(self) -> Availability:
        """Returns what this machine can do, given that the packages are installed."""

    def limits_here(self) -> TargetLimits:
        """Returns what a graph may contain that is made for this machine."""
        return self.limits

    def versions(self) -> Mapping[str, str]:
        """Returns the versions of the libraries that decide whether an engine must be built again."""
        return {package: package_version(package) or "" for package in self.packages}

    def variants(self, config: BuildConfig) -> Sequence[Variant]:
        """Returns the variants that the configuration asks for: one for each dtype, if there are no others."""
        return [Variant(dtype=dtype) for dtype in config.target.of(self.name).dtypes]

    def problems(self, config: BuildConfig) -> Sequence[str]:
        """Returns reasons why these variants cannot be built, as far as they are known without a graph."""
        return []

    @abstractmethod
    def build(self, job: EngineJob, variant: Variant, destination: Path, config: BuildConfig) -> None:
        """Writes the engine to `destination`. The caller renames it into place once it is complete.

        Raises:
            EngineError: the vendor's builder failed.
            LimitError: the target cannot take this graph.
        """

    def made_here(self, root: Path, engine: Engine) -> bool:
        """Whether an engine was made on a machine like this one, as far as its file says. If not, only loading it shows
        whether it runs here.
        """
        return True

    def load(
        self, root: Path, engine: Engine, config: BuildConfig, threads: int, weights: OptionalArrays = None
    ) -> Runner:
        """Loads an engine of the build folder `root`. On the processor it is moved into huge pages where there are any,
        except for probes, which run few times.

        Args:
            root: the build folder.
            engine: one of its engines.
            config: the resolved configuration.
            threads: threads inside one operator, for engines on the processor; with 0 the library chooses.
            weights: tensors that replace those of the same name in the weights file, for probes.

        Raises:
            TargetError: this machine cannot run the engine.
            EngineError: the file is not a usable engine, or its weights cannot be replaced.
        """
        with contextlib.nullcontext() if self.nvidia or weights is not None else in_huge_pages():
            return self._load(root, engine, config, threads, weights)

    @abstractmethod
    def _load(self, root: Path, engine: Engine, config: BuildConfig, threads: int, weights: OptionalArrays) -> Runner:
        """Loads an engine; see `load`."""


@runtime_checkable
class EngineProfiler(Protocol):
    """An engine builder that can measure the time of each kernel of its engines, on this machine's CPU."""

    def profile(
        self, root: Path, engine: Engine, config: BuildConfig, threads: int, feeds: Arrays, runs: int
    ) -> Profile:
        """Profiles an engine, opened as `EngineBuilder.load` opens it, but separately from the one that is timed.

        Feeds that the engine has no input for are ignored. `runs` is the number of runs that count; one more run comes
        before them.

        Raises:
            TargetError: this machine cannot run the engine.
            EngineError: the file is not a usable engine, or the profiler failed.
        """


def check_bound(where: str, ports: Mapping[str, Port], feeds: Arrays, outputs: Arrays) -> None:
    """Refuses arrays that cannot be used in place: each must have its port's shape and dtype, and be contiguous.

    Raises:
        EngineError: an array does not fit its port, or there is no such port.
    """
    for name, array in {**feeds, **outputs}.items():
        port = ports.get(name)
        if port is None:
            raise EngineError(f"{where}: no input or output is called {name}; the engine has {', '.join(ports)}")
        if array.shape != port.shape or array.dtype != port.dtype or not array.flags.c_contiguous:
            raise EngineError(
                f"{where}: {name} is {array.dtype} {list(array.shape)}, expected {port.dtype} {list(port.shape)}, "
                "contiguous"
            )

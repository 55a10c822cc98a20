"""torch.compile, packaged ahead of time by AOTInductor for the NVIDIA GPU that it is built on.

It is a target of its own beside `inductor`, as `ort-cuda` is beside `ort-cpu`: engines, verdicts, times and served
models are identified by their target, and a machine with a GPU can have both.

A run is recorded once as a CUDA graph and then launched as a whole. Otherwise a model with many small kernels waits for
the processor, which starts them one by one. Every bucket has static shapes, so every package can be recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mod_export.config import BuildConfig
from mod_export.engines.inductor import (
    NO_COMPILER,
    AotInductor,
    InductorRunner,
    compiler_found,
    metadata_of,
    without_tf32,
)
from mod_export.engines.protocol import ON_GPU, Arrays, OptionalArrays
from mod_export.environment import package_version
from mod_export.errors import EngineError, TargetError
from mod_export.types import Availability, Engine

if TYPE_CHECKING:
    import torch

WARM_UPS = 3
"""Runs before the recorded one: the first run loads kernels, and libraries allocate memory in it."""


class CudaRunner(InductorRunner):
    """A loaded package whose inputs have fixed addresses on its device, as a CUDA graph needs.

    `run` copies its feeds to the device and the wanted outputs back; one thread runs at a time. The graph is recorded
    in the first run, with the caller's inputs.
    """

    def __init__(
        self, package: Any, metadata: Mapping[str, str], weights: Mapping[str, torch.Tensor], where: str,
        device: str, *, cuda_graph: bool,
    ) -> None:  # fmt: skip
        import torch

        super().__init__(package, metadata, weights, where, 0, f"AOTInductor {metadata.get('gpu') or device}")
        self.threads = 0
        self._stream = _stream_on(device)
        self._given = {
            name: torch.zeros(port.shape, dtype=torch.from_numpy(np.zeros(0, port.dtype)).dtype, device=device)
            for name, port in self._feeds.items()
        }
        self._records = cuda_graph
        self._graph: torch.cuda.CUDAGraph | None = None
        self._results: Sequence[torch.Tensor] = ()

    def _run(self, feeds: Arrays, wanted: list[str]) -> dict[str, np.ndarray]:
        import torch

        with ON_GPU, self._errors(), torch.no_grad(), without_tf32(), torch.cuda.stream(self._stream):
            for name, array in feeds.items():
                # `ascontiguousarray` would add a dimension to an array without one.
                self._given[name].copy_(torch.from_numpy(np.asarray(array, order="C")))
            if self._records and self._graph is None:
                self._record()
            if self._graph is None:
                self._results = self._package(*self._given.values())
            else:
                self._graph.replay()
            named = dict(zip(self.outputs, self._results, strict=True))
            # Copies, because the next run writes to the same addresses. Copying waits for the stream.
            return {name: np.array(named[name].cpu().numpy()) for name in wanted}

    def _record(self) -> None:
        import torch

        for _ in range(WARM_UPS):
            self._package(*self._given.values())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                self._results = self._package(*self._given.values())
        except RuntimeError as error:
            raise EngineError(
                f"{self._where}: no CUDA graph can be recorded of it ({str(error).splitlines()[0]}); set "
                "target.inductor-cuda.cuda_graph = false"
            ) from error
        self._graph = graph

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise EngineError(f"{self._where}: torch failed: {str(error).splitlines()[0]}") from error

    def close(self) -> None:
        # The graph holds the addresses of these tensors, so it is released first.
        self._graph = None
        self._results = ()
        self._given.clear()
        super().close()
        self._weights.clear()


class InductorCuda(AotInductor):
    """AOTInductor for the NVIDIA GPU of the machine that builds."""

    name = "inductor-cuda"
    nvidia = True

    def _installed(self) -> Availability:
        problem = gpu_problem()
        if problem:
            return Availability(builds=False, runs=False, reason=problem)
        compiler, missing = compiler_found(), no_triton()
        about = f"torch {package_version('torch')} on {gpu_name(0)}"
        if compiler is None or missing:
            return Availability(builds=False, runs=True, reason=missing or NO_COMPILER)
        return Availability(builds=True, runs=True, reason=f"{about}, {compiler}")

    def _placed(self, program: torch.export.ExportedProgram, config: BuildConfig) -> torch.export.ExportedProgram:
        return placed(program, f"cuda:{config.target.inductor_cuda.device}")

    def _machine(self, config: BuildConfig) -> Mapping[str, str]:
        return {"gpu": architecture(config.target.inductor_cuda.device)}

    def made_here(self, root: Path, engine: Engine) -> bool:
        import torch

        here = {architecture(device) for device in range(torch.cuda.device_count())}
        return super().made_here(root, engine) and metadata_of(root / engine.path).get("gpu") in here

    def _load(
        self, root: Path, engine: Engine, config: BuildConfig, threads: int, weights: OptionalArrays
    ) -> CudaRunner:
        options = config.target.inductor_cuda
        if problem := gpu_problem(options.device):
            raise TargetError(f"{self.name}: cannot run {engine.path} here: {problem}")
        device = f"cuda:{options.device}"
        # `run_single_threaded` leaves out locks and events for several threads: a CUDA graph cannot contain them.
        with ON_GPU:
            package, metadata, tensors = self.opened(
                root, engine, weights, device, run_single_threaded=True, device_index=options.device
            )
            where, gpu = f"{self.name} {engine.path}", architecture(options.device)
            check_architecture(engine.path, metadata["gpu"], gpu)
            # A probe with replaced weights runs only once, so recording would not pay.
            graph = options.cuda_graph and weights is None
            return CudaRunner(package, metadata, tensors, where, device, cuda_graph=graph)


def _stream_on(device: str) -> torch.cuda.Stream | None:
    import torch

    return torch.cuda.Stream(device) if device.startswith("cuda") else None  # type: ignore[no-untyped-call]


def placed(program: torch.export.ExportedProgram, device: str) -> torch.export.ExportedProgram:
    """Returns a program on a device: its weights, its constants, and the devices that its operations name."""
    from torch.export.passes import move_to_device_pass

    return move_to_device_pass(program, device)


def check_architecture(path: str, built_for: str, here: str) -> None:
    """Refuses a package of another GPU, because a package has kernels for one architecture only.

    Raises:
        TargetError: the package was compiled for another architecture.
    """
    if built_for != here:
        raise TargetError(f"{path}: compiled for {built_for}, this GPU is {here}; build again here")


def gpu_problem(device: int = 0) -> str:
    """Returns why torch cannot use a CUDA device; empty if it can."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install one that is built with it"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no NVIDIA GPU"
    count = torch.cuda.device_count()
    return "" if device < count else f"there is no CUDA device {device}; torch finds {count}"


def no_triton() -> str:
    """Returns why kernels for a GPU cannot be compiled; empty if they can."""
    from torch.utils._triton import has_triton

    return "" if has_triton() else "no Triton for this GPU; install triton to build, running needs none"


def architecture(device: int) -> str:
    """Returns the compute capability of a GPU as NVIDIA writes it: sm90."""
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


def gpu_name(device: int) -> str:
    """Returns the driver's name of a GPU, and its architecture."""
    import torch

    return f"{torch.cuda.get_device_name(device)} ({architecture(device)})"

"""TensorRT, built on the GPU that runs it, and TensorRT-RTX, built ahead of time for named GPU architectures.

Both build in a process of their own (`trt_worker.py`) and run in this one. The two can be installed side by side, but a
process runs engines of only one of them, because Polygraphy decides once per process which library it drives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mod_export.config import BuildConfig
from mod_export.engines.protocol import ON_GPU, Arrays, EngineBuilder, EngineJob, EngineRunner, OptionalArrays, Port
from mod_export.environment import cache_folder, package_version
from mod_export.errors import EngineError, TargetError
from mod_export.types import AttentionKernels, Availability, Engine, TargetLimits, Variant

ALIASED = "get_aliased_input_tensor"
"""A method of ICudaEngine since TensorRT 10.15."""
PROBE_SECONDS = 120
SAVED_POSITIONS = 4096
"""A TopK in groups pays off if it saves at least this many positions of an axis. A TopK takes 51 us for 24,000
positions, whatever k is (ultralytics/ultralytics#25666), so these positions take 9 us. Groups cost one more TopK, an
addition and a gather: small kernels of 2 to 3 us each. We have not measured this.
"""
LIMITS = TargetLimits(
    name="TensorRT",
    max_opset=24,
    topk_limit=3840,
    topk_saving=SAVED_POSITIONS,
    scatter_reduction=False,
    branches=True,
    cache_update=True,
    attention_dtypes=frozenset({"float16", "bfloat16"}),
    # TensorRT-RTX 1.7.1 refuses widths of 8 and 257, one head (with a mask, or in one row), and one query in fewer than
    # four heads of all rows, whatever the dtype, the number of keys and the architecture.
    attention_kernels=AttentionKernels(narrowest=9, widest=256, fewest_heads=2, fewest_vectors=4),
)
"""The limits of both libraries; their parsers come from the same code.

`If` becomes a conditional layer that executes only one branch. TensorScatter (opset 24) becomes a layer that updates a
cache in place, since TensorRT 10.15. It must be outside of branches, and lead from an input to an output ("The cache
tensor must be a network input"). Axes other than -2 and the mode `circular` are refused.
"""

WITHOUT_FLOAT32 = {"sm75": "TensorRT-RTX has no float32 matrix product on sm75, and routers are float32"}


def _work(job: Mapping[str, Any], timeout: float | None = None) -> tuple[dict[str, Any], str]:
    """Runs one job in a worker process.

    Returns:
        The job's result, and the errors that the vendor printed, as one line.

    Raises:
        EngineError: the worker died.
        subprocess.TimeoutExpired: the job took longer than `timeout` seconds.
    """
    command = [sys.executable, "-P", "-m", "mod_export.engines.trt_worker"]
    done = subprocess.run(  # noqa: S603
        command, input=json.dumps(job), capture_output=True, text=True, errors="replace", timeout=timeout, check=False
    )
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if done.returncode:
        died = f"signal {signal.Signals(-done.returncode).name}" if done.returncode < 0 else f"exit {done.returncode}"
        raise EngineError(f"{job['library']}: the {job['action']} process died ({died}): {' | '.join(lines[-3:])}")
    errors = list(dict.fromkeys(line.removeprefix("[E]").strip() for line in lines if line.startswith("[E]")))
    # The parser logs many lines about one error; the last one names both the node and the reason.
    return json.loads(done.stdout), " | ".join([line for line in errors if "ModelImporter.cpp" not in line] or errors)


@cache
def _probe(library: str) -> dict[str, Any]:
    """Returns the result of the worker's `probe`, which runs once per process."""
    try:
        return _work({"action": "probe", "library": library}, PROBE_SECONDS)[0]
    except (EngineError, subprocess.TimeoutExpired) as error:
        problem = f"the probe of {library} failed: {error}"
        return {"version": "", "devices": [], "architectures": [], "build_problem": problem, "run_problem": problem}


def polygraphy_cuda() -> Any:
    """Returns Polygraphy's CUDA module after making sure that it finds a CUDA runtime that pip installed.

    Polygraphy searches LD_LIBRARY_PATH, the system's folders, and the folder of the CUDA 12 wheels. The CUDA 13 wheels
    use another folder, which is added to LD_LIBRARY_PATH here.
    """
    from polygraphy import cuda

    known = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    wheels = [str(folder) for entry in sys.path for folder in Path(entry).glob("nvidia/cu[0-9]*/lib")]
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(dict.fromkeys(filter(None, [*known, *wheels])))
    return cuda


class TensorRTRunner(EngineRunner):
    """An engine of static shape on the first CUDA device, with buffers that live as long as the runner.

    A cache that the engine updates in place is one buffer, both input and output, as TensorRT requires. `run` copies
    its inputs to the device, and the wanted outputs back into new arrays; one thread runs at a time.
    """

    def __init__(self, trt: Any, cuda_engine: Any, where: str, provider: str, keep: Sequence[object] = ()) -> None:
        # Keeps the logger and the runtime alive: the engine uses them as long as it exists, which Python cannot see.
        self._keep = (cuda_engine, *keep)
        self._context = cuda_engine.create_execution_context()
        if self._context is None:
            raise EngineError(f"{where}: no execution context; the GPU may be short of memory")
        inputs: dict[str, Port] = {}
        self._ports: dict[str, Port] = {}
        self._buffers: dict[str, Any] = {}
        with ON_GPU, _cuda_errors(where):
            cuda = polygraphy_cuda()
            self._stream = cuda.Stream()
            for i in range(cuda_engine.num_io_tensors):
                name = cuda_engine.get_tensor_name(i)
                is_input = cuda_engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
                dtype = np.dtype(trt.nptype(cuda_engine.get_tensor_dtype(name)))
                (inputs if is_input else self._ports)[name] = Port(tuple(cuda_engine.get_tensor_shape(name)), dtype)
            for name, port in (*inputs.items(), *self._ports.items()):
                source = None if name in inputs else _updated_input(cuda_engine, name)
                self._buffers[name] = cuda.DeviceArray(*port) if source is None else self._buffers[source]
                self._context.set_tensor_address(name, self._buffers[name].ptr)
        super().__init__(where, inputs, tuple(self._ports), [provider], 0)

    def _run(self, feeds: Arrays, wanted: list[str]) -> dict[str, np.ndarray]:
        # Kept until the stream has finished, because the copies read them asynchronously.
        sources = [np.ascontiguousarray(feeds[name]) for name in self.inputs]
        results = {name: np.empty(*self._ports[name]) for name in wanted}
        with ON_GPU, _cuda_errors(self._where):
            for name, array in zip(self.inputs, sources, strict=True):
                self._buffers[name].copy_from(array, self._stream)
            if not self._context.execute_async_v3(self._stream.ptr):
                raise EngineError(f"{self._where}: the engine did not start")
            for name, array in results.items():
                self._buffers[name].copy_to(array, self._stream)
            self._stream.synchronize()
        return results

    def close(self) -> None:
        for buffer in {id(buffer): buffer for buffer in self._buffers.values()}.values():
            buffer.free()
        self._buffers.clear()
        self._stream.free()
        # In this order: a context must not outlive its engine, nor an engine its runtime.
        del self._context
        del self._keep


def _updated_input(cuda_engine: Any, output: str) -> str | None:
    """Returns the input whose memory an output shares; None if there is none, as always before TensorRT 10.15."""
    ask = getattr(cuda_engine, ALIASED, None)
    source: str | None = ask(output) if ask else None
    return source


@contextlib.contextmanager
def _cuda_errors(where: str) -> Iterator[None]:
    from polygraphy.exception import PolygraphyException

    try:
        yield
    except PolygraphyException as error:
        raise EngineError(f"{where}: {str(error).splitlines()[0]}") from error
    except OSError as error:
        raise TargetError(
            f"{where}: no CUDA runtime library ({error}); put the folder of libcudart.so on LD_LIBRARY_PATH"
        ) from error


class _LoggerBase(EngineBuilder):
    """Base of the two targets."""

    library: ClassVar[str]
    title: ClassVar[str]
    apart = True
    embeds_weights = True
    nvidia = True
    suffix = ".engine"

    def _installed(self) -> Availability:
        probe = _probe(self.library)
        runs = not (probe["build_problem"] or self._run_problem(probe))
        arch = probe["devices"][0] if probe["devices"] else None
        return Availability(builds=not probe["build_problem"], runs=runs, reason=self._reason(probe), arch=arch)

    def build(self, job: EngineJob, variant: Variant, destination: Path, config: BuildConfig) -> None:
        from mod_export.graph.target import check_external_data

        check_external_data(job.root / job.graph.path)
        request = {
            "action": "build",
            "library": self.library,
            "onnx": str(job.root / job.graph.path),
            "engine": str(destination),
            "arch": variant.arch,
            **self._options(config),
        }
        result, errors = _work(request)
        if result["error"]:
            raise EngineError(f"{job.graph.path}: {self.title} cannot build it: {errors or result['error']}")

    def _load(
        self, root: Path, engine: Engine, config: BuildConfig, threads: int, weights: OptionalArrays
    ) -> TensorRTRunner:
        if weights:
            raise EngineError(f"{engine.path}: a plan holds its own weights, which cannot be replaced")
        probe = _probe(self.library)
        if probe["build_problem"] or self._run_problem(probe):
            raise TargetError(f"{self.name}: cannot run {engine.path} here: {self._reason(probe)}")
        device = probe["devices"][0]
        if engine.arch not in (None, device):
            raise TargetError(
                f"{engine.path} is built for {engine.arch}, this GPU is {device}; build it for {device} too"
            )
        provider = f"{self.title} {probe['version']} on {device}"
        return runner_from_engine(self.library, root / engine.path, f"{self.name} {engine.path}", provider)

    def _options(self, config: BuildConfig) -> dict[str, int | str]:
        return {}

    def _run_problem(self, probe: Mapping[str, Any]) -> str:
        return str(probe["run_problem"])

    def _reason(self, probe: Mapping[str, Any]) -> str:
        problem = probe["build_problem"] or self._run_problem(probe)
        if not probe["version"]:
            return str(problem)
        return f"{self.title} {probe['version']}" + (f", {problem}" if problem else f" on {probe['devices'][0]}")


def runner_from_engine(library: str, path: Path, where: str, provider: str) -> TensorRTRunner:
    """Loads an engine file.

    Raises:
        EngineError: the library refuses the file.
        TargetError: the library does not work here, for example without a driver.
    """
    trt = importlib.import_module(library)
    errors: list[str] = []

    class VendorLog(trt.ILogger):  # type: ignore[misc, name-defined]  # The library is known at run time only.
        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.Logger.ERROR, trt.Logger.INTERNAL_ERROR):
                errors.append(message)

    logger = VendorLog()
    try:
        runtime = trt.Runtime(logger)
    except (RuntimeError, TypeError) as error:
        raise TargetError(f"{where}: {library} has no runtime here: {' | '.join(errors) or error}") from error
    # `runtime.engine_host_code_allowed` keeps its default False, so that a plan cannot contain code for the host. That
    # is why no loader of Polygraphy is used here: all of them set it to True.
    cuda_engine = runtime.deserialize_cuda_engine(path.read_bytes())
    if cuda_engine is None:
        raise EngineError(f"{where}: not a usable engine for {library} here: {' | '.join(errors) or 'no reason given'}")
    return TensorRTRunner(trt, cuda_engine, where, provider, keep=(runtime, logger))


class TensorRT(_LoggerBase):
    """TensorRT 10 and 11."""

    name = extra = library = "tensorrt"
    packages = ("tensorrt", "polygraphy")
    title = "TensorRT"
    limits = LIMITS

    def made_here(self, root: Path, engine: Engine) -> bool:
        return False  # A plan does not say which GPU it was made on.

    def _options(self, config: BuildConfig) -> dict[str, int | str]:
        options = config.target.tensorrt
        cache = cache_folder() / f"tensorrt-{package_version(self.library)}.timing"
        cache.parent.mkdir(parents=True, exist_ok=True)
        return {
            "workspace_mib": options.workspace_mib,
            "optimization_level": options.optimization_level,
            "timing_cache": str(cache),
        }


class TensorRTRTX(_LoggerBase):
    """TensorRT for RTX: plans for consumer and workstation GPUs, finished by a compiler on the GPU that runs them."""

    name = extra = "tensorrt-rtx"
    library = "tensorrt_rtx"
    packages = ("tensorrt_rtx", "polygraphy")
    title = "TensorRT-RTX"
    limits = dataclasses.replace(LIMITS, name="TensorRT-RTX")

    def variants(self, config: BuildConfig) -> Sequence[Variant]:
        options = config.target.tensorrt_rtx
        return [Variant(dtype=dtype, arch=arch) for dtype in options.dtypes for arch in options.architectures]

    def problems(self, config: BuildConfig) -> Sequence[str]:
        known = [arch for arch in _probe(self.library)["architectures"] if arch not in WITHOUT_FLOAT32]
        return [
            f"target.tensorrt-rtx.architectures: {WITHOUT_FLOAT32.get(arch, f'TensorRT-RTX has no plans for {arch}')}; "
            f"it builds for {', '.join(known)}; use the target tensorrt on other GPUs"
            for arch in config.target.tensorrt_rtx.architectures
            if known and arch not in known
        ]

    def _run_problem(self, probe: Mapping[str, Any]) -> str:
        if probe["devices"] and probe["devices"][0] not in probe["architectures"]:
            return f"which has no kernels for this GPU ({probe['devices'][0]})"
        return super()._run_problem(probe)

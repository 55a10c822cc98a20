"""ONNX Runtime on CPU and on CUDA. What it runs is a graph of its dialect; the weights stay in graphs/."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from mod_export.artifacts import Availability, Bucket, Dialect, Engine, ModelKind, Profile, Variant, primary_output
from mod_export.config import BuildConfig
from mod_export.engine.ort_bound import BoundRunner
from mod_export.engine.ort_c import ort_c
from mod_export.engine.ort_session import CPU, OrtRunner, session_from_onnx
from mod_export.engine.ort_shared import shared_runner
from mod_export.engine.ort_trace import kernels_from_trace
from mod_export.environment import package_version
from mod_export.errors import EngineError, TargetError
from mod_export.protocols import EngineJob, Runner

if TYPE_CHECKING:
    import onnxruntime

__all__ = ["OrtCpu", "OrtCuda"]

CUDA = "CUDAExecutionProvider"


class _Ort(ABC):
    """What the two targets share: an engine is the graph itself, proven to load."""

    name: ClassVar[str]
    dialect: ClassVar[Dialect]
    from_onnx: ClassVar[bool] = True
    apart: ClassVar[bool] = False
    binds: ClassVar[bool] = False
    suffix: ClassVar[str] = ".onnx"

    def versions(self) -> Mapping[str, str]:
        return {"onnxruntime": package_version("onnxruntime") or ""}

    def check(self, config: BuildConfig, model: ModelKind, bucket: Bucket) -> Sequence[str]:
        return []

    def build(self, job: EngineJob, variant: Variant, destination: Path, config: BuildConfig) -> None:
        graph = job.root / job.graph.path
        # A graph that does not load is found here, on a CPU if need be, and not by whoever deploys it.
        session_from_onnx(graph, graph.parent, [CPU], 1, {"session.disable_prepacking": "1"})
        destination.write_bytes(graph.read_bytes())

    def load(
        self, root: Path, engine: Engine, config: BuildConfig, weights: Mapping[str, np.ndarray] | None = None
    ) -> Runner:
        assert engine.weights is not None
        session = self._session(root / engine.path, (root / engine.weights).parent, config, weights)
        return OrtRunner(session, f"{self.name} {engine.path}", config.latency.threads)

    @abstractmethod
    def _session(
        self, path: Path, weights_folder: Path, config: BuildConfig, weights: Mapping[str, np.ndarray] | None
    ) -> onnxruntime.InferenceSession: ...


class OrtCpu(_Ort):
    """ONNX Runtime's CPU execution provider."""

    name: ClassVar[str] = "ort-cpu"
    binds: ClassVar[bool] = True
    dialect: ClassVar[Dialect] = Dialect(
        name="ONNX Runtime (CPU)",
        max_opset=26,
        whole_scores=True,
        extra_domains=frozenset({"com.microsoft"}),
        stored_weights=True,
        rotary_embedding=True,
        flat_heads=True,
        branches=True,
    )

    def availability(self) -> Availability:
        if package_version("onnxruntime") is None:
            return Availability(
                builds=False, runs=False, reason="onnxruntime is not installed; install mod-export[ort]"
            )
        return Availability(builds=True, runs=True, reason=f"onnxruntime {package_version('onnxruntime')}")

    def variants(self, config: BuildConfig) -> Sequence[Variant]:
        return [Variant(dtype=dtype) for dtype in config.target.ort_cpu.dtypes]

    def load(
        self, root: Path, engine: Engine, config: BuildConfig, weights: Mapping[str, np.ndarray] | None = None
    ) -> Runner:
        api = ort_c() if weights is None else None
        if api is None:  # Other weights are a probe's own, which nobody shares.
            return super().load(root, engine, config, weights)
        assert engine.weights is not None
        where = f"{self.name} {engine.path}"
        return shared_runner(api, root / engine.path, root / engine.weights, where, config.latency.threads)

    def _session(
        self, path: Path, weights_folder: Path, config: BuildConfig, weights: Mapping[str, np.ndarray] | None
    ) -> onnxruntime.InferenceSession:
        return session_from_onnx(path, weights_folder, [CPU], config.latency.threads, {}, weights)

    def profile(
        self, root: Path, engine: Engine, config: BuildConfig, feeds: Mapping[str, np.ndarray], runs: int
    ) -> Profile:
        assert engine.weights is not None
        threads = config.latency.threads
        with tempfile.TemporaryDirectory() as folder:
            session = session_from_onnx(
                root / engine.path, (root / engine.weights).parent, [CPU], threads, {}, profile=Path(folder) / "profile"
            )
            with OrtRunner(session, f"{self.name} {engine.path}", threads) as runner:
                used = {name: array for name, array in feeds.items() if name in runner.inputs}
                for _ in range(1 + runs):
                    runner.run(used, [primary_output(runner.outputs)])
            kernels = kernels_from_trace(Path(session.end_profiling()), runs)
        return Profile(profiler=f"ONNX Runtime {package_version('onnxruntime')}", runs=runs, kernels=kernels)


class OrtCuda(_Ort):
    """ONNX Runtime's CUDA execution provider. Refuses a session that would quietly run on the CPU."""

    name: ClassVar[str] = "ort-cuda"
    dialect: ClassVar[Dialect] = Dialect(name="ONNX Runtime (CUDA)", max_opset=26)

    def availability(self) -> Availability:
        if package_version("onnxruntime") is None:
            reason = "onnxruntime-gpu is not installed; install mod-export[ort-gpu]"
            return Availability(builds=False, runs=False, reason=reason)
        import onnxruntime as ort

        if CUDA not in ort.get_available_providers():
            reason = "this onnxruntime has no CUDA provider; install onnxruntime-gpu in its place"
            return Availability(builds=False, runs=False, reason=reason)
        # The provider is listed wherever the wheel is installed. Only a device makes it real.
        devices = [device for device in ort.get_ep_devices() if device.ep_name == CUDA]
        if not devices and not Path("/proc/driver/nvidia/version").exists():
            return Availability(
                builds=False, runs=False, reason="onnxruntime-gpu is installed, but there is no NVIDIA GPU"
            )
        return Availability(builds=True, runs=True, reason=f"onnxruntime-gpu {package_version('onnxruntime')} on CUDA")

    def variants(self, config: BuildConfig) -> Sequence[Variant]:
        return [Variant(dtype=dtype) for dtype in config.target.ort_cuda.dtypes]

    def load(
        self, root: Path, engine: Engine, config: BuildConfig, weights: Mapping[str, np.ndarray] | None = None
    ) -> Runner:
        assert engine.weights is not None
        session = self._session(root / engine.path, (root / engine.weights).parent, config, weights)
        where = f"{self.name} {engine.path}"
        return BoundRunner(session, where, config.latency.threads, "cuda", config.target.ort_cuda.device)

    def _session(
        self, path: Path, weights_folder: Path, config: BuildConfig, weights: Mapping[str, np.ndarray] | None
    ) -> onnxruntime.InferenceSession:
        # TF32 rounds float32 products to 10 bits, which no float32 parity gate would pass. A CUDA graph is started as a
        # whole; for probes with other weights, which run once, recording one is not worth it.
        options = {"device_id": str(config.target.ort_cuda.device), "use_tf32": "0"}
        if weights is None and config.target.ort_cuda.cuda_graph:
            options["enable_cuda_graph"] = "1"
        try:
            session = session_from_onnx(
                path,
                weights_folder,
                [(CUDA, options)],
                config.latency.threads,
                {"session.disable_cpu_ep_fallback": "1"},
                weights,
            )
        except EngineError as error:
            raise TargetError(f"ort-cuda: no CUDA session on this machine: {error}") from error
        if CUDA not in session.get_providers():
            raise TargetError(f"ort-cuda: the session runs on {', '.join(session.get_providers())}, not on CUDA")
        return session

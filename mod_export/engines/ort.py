"""ONNX Runtime on the CPU and on CUDA. An engine is the target's graph; its weights stay in graphs/."""

from __future__ import annotations

import contextlib
import io
import json
import platform
import tempfile
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from mod_export.config import BuildConfig
from mod_export.engines.huge_pages import in_huge_pages
from mod_export.engines.ort_c import ort_c
from mod_export.engines.ort_session import CPU, BoundRunner, OrtRunner, session_from_onnx
from mod_export.engines.ort_shared import shared_runner
from mod_export.engines.protocol import ON_GPU, Arrays, EngineBuilder, EngineJob, OptionalArrays, Runner
from mod_export.environment import package_version
from mod_export.errors import EngineError, TargetError
from mod_export.types import Availability, Engine, Kernel, Profile, TargetLimits, Variant, primary_output

CUDA = "CUDAExecutionProvider"
NO_CUDA = "this onnxruntime has no CUDA provider; install onnxruntime-gpu in its place"
X86 = ("x86_64", "AMD64")
"""Names of the architecture for which ONNX Runtime's matrix products have a kernel for one row."""
WARNING, ERROR = 2, 3
"""Severities of ONNX Runtime's log; it begins with WARNING."""
KERNEL_TIME = "_kernel_time"
"""Suffix of a kernel's event name in ONNX Runtime's profile."""
US_PER_MS = 1000


class _Ort(EngineBuilder):
    """Base of the two targets. An engine is the graph itself, after a session has been opened on it once."""

    packages = ("onnxruntime",)
    suffix = ".onnx"

    def build(self, job: EngineJob, variant: Variant, destination: Path, config: BuildConfig) -> None:
        graph = job.root / job.graph.path
        # Opens the graph, on the CPU for both targets, so that a bad graph fails now and not when it is deployed.
        session_from_onnx(graph, graph.parent, [CPU], 1, {"session.disable_prepacking": "1"})
        destination.write_bytes(graph.read_bytes())


class OrtCpu(_Ort):
    """ONNX Runtime's CPU execution provider."""

    name = "ort-cpu"
    extra = "ort"
    binds = True
    limits = TargetLimits(
        name="ONNX Runtime (CPU)",
        max_opset=26,
        whole_scores=True,
        extra_domains=frozenset({"com.microsoft"}),
        stored_weights=True,
        rotary_embedding=True,
        flat_heads=True,
        branches=True,
        cached_attention=True,
        scaled_queries=True,
        gathered_rows=True,
    )

    def _installed(self) -> Availability:
        return Availability(builds=True, runs=True, reason=f"onnxruntime {package_version('onnxruntime')}")

    def limits_here(self) -> TargetLimits:
        return replace(self.limits, scaled_queries=platform.machine() in X86)

    def _load(self, root: Path, engine: Engine, config: BuildConfig, threads: int, weights: OptionalArrays) -> Runner:
        where = f"{self.name} {engine.path}"
        path, file = _paths(root, engine)
        api = ort_c() if weights is None else None
        if api is None:  # Replaced weights belong to one probe and cannot be shared.
            return OrtRunner(session_from_onnx(path, file.parent, [CPU], threads, weights=weights), where, threads)
        return shared_runner(api, path, file, where, threads)

    def profile(
        self, root: Path, engine: Engine, config: BuildConfig, threads: int, feeds: Arrays, runs: int
    ) -> Profile:
        path, file = _paths(root, engine)
        with tempfile.TemporaryDirectory() as folder:
            with in_huge_pages():
                session = session_from_onnx(path, file.parent, [CPU], threads, profile=Path(folder) / "profile")
            with OrtRunner(session, f"{self.name} {engine.path}", threads) as runner:
                used = {name: array for name, array in feeds.items() if name in runner.inputs}
                for _ in range(1 + runs):
                    runner.run(used, [primary_output(runner.outputs)])
            kernels = kernels_from_trace(Path(session.end_profiling()), runs)
        return Profile(profiler=f"ONNX Runtime {package_version('onnxruntime')}", runs=runs, kernels=kernels)


class OrtCuda(_Ort):
    """ONNX Runtime's CUDA execution provider. Refuses a session that would silently run on the CPU."""

    name = "ort-cuda"
    extra = "ort-gpu"
    nvidia = True
    # Together these halve the kernels of a layer. A small model waits for the start of kernels (docs/LOG.md, "On an
    # H100").
    limits = TargetLimits(name="ONNX Runtime (CUDA)", max_opset=26, rotary_embedding=True, flat_heads=True)

    def _installed(self) -> Availability:
        import onnxruntime as ort

        if CUDA not in ort.get_available_providers():
            return Availability(builds=False, runs=False, reason=NO_CUDA)
        # The wheel lists the provider even if there is no device.
        devices = [device for device in ort.get_ep_devices() if device.ep_name == CUDA]
        if not devices and not Path("/proc/driver/nvidia/version").exists():
            return Availability(
                builds=False, runs=False, reason="onnxruntime-gpu is installed, but there is no NVIDIA GPU"
            )
        return Availability(builds=True, runs=True, reason=f"onnxruntime-gpu {package_version('onnxruntime')} on CUDA")

    def _load(self, root: Path, engine: Engine, config: BuildConfig, threads: int, weights: OptionalArrays) -> Runner:
        import onnxruntime as ort

        if CUDA not in ort.get_available_providers():
            raise TargetError(f"ort-cuda: {NO_CUDA}")
        path, file = _paths(root, engine)
        device = config.target.ort_cuda.device
        # TF32 rounds factors of float32 products to 10 bits, which no float32 parity gate would pass. Probes with
        # replaced weights run once, so recording a CUDA graph for them would only cost time.
        options = {"device_id": str(device), "use_tf32": "0"}
        if weights is None and config.target.ort_cuda.cuda_graph:
            options["enable_cuda_graph"] = "1"
        entries = {"session.disable_cpu_ep_fallback": "1"}
        with ON_GPU:
            missing = load_cuda_libraries()
            # The CUDA provider warns about every ScatterND, even if its indices all differ, as those of a top-k do. The
            # severity of the log belongs to the process and cannot be read, so one that the caller has set is lost.
            ort.set_default_logger_severity(ERROR)
            try:
                session = session_from_onnx(path, file.parent, [(CUDA, options)], threads, entries, weights)
            except EngineError as error:
                why = "; ".join(filter(None, [str(error), missing]))
                raise TargetError(f"ort-cuda: no CUDA session on this machine: {why}") from error
            finally:
                ort.set_default_logger_severity(WARNING)
        if CUDA not in session.get_providers():
            raise TargetError(f"ort-cuda: the session runs on {', '.join(session.get_providers())}, not on CUDA")
        return BoundRunner(session, f"{self.name} {engine.path}", threads, "cuda", device)


@cache
def load_cuda_libraries() -> str:
    """Loads the libraries of CUDA and cuDNN that pip installed, which the dynamic linker does not find by itself.

    Returns:
        What ONNX Runtime prints about libraries that it cannot load, as one line. It does not name those that it counts
        as optional, such as cuDNN.
    """
    import onnxruntime as ort

    # ONNX Runtime prints what fails. Libraries that this process has already, such as torch's, stay as they are.
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        ort.preload_dlls()
    return " | ".join(line for line in printed.getvalue().splitlines() if line.strip())


def _paths(root: Path, engine: Engine) -> tuple[Path, Path]:
    """Returns the paths of an engine and of its weights file."""
    assert engine.weights is not None
    return root / engine.path, root / engine.weights


def kernels_from_trace(path: Path, runs: int) -> tuple[Kernel, ...]:
    """Returns the kernels of the last `runs` runs of a session, in the order in which they first ran.

    Raises:
        EngineError: the file is not a profile of ONNX Runtime, or holds fewer runs.
    """
    try:
        events = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EngineError(f"{path.name}: ONNX Runtime's profile is damaged ({error}); measure again") from error
    begins = sorted(event["ts"] for event in events if event["name"] == "model_run")[-runs:]
    if len(begins) < runs:
        raise EngineError(f"{path.name}: ONNX Runtime's profile holds {len(begins)} runs, expected {runs}")
    kernels = [event for event in events if event["cat"] == "Node" and event["name"].endswith(KERNEL_TIME)]
    operators: dict[str, str] = {}
    ms_by_run: dict[str, list[float]] = defaultdict(lambda: [0.0] * runs)
    for event in sorted(kernels, key=lambda event: event["ts"]):
        run = _run_of(event, begins)
        if run is not None:
            name = event["name"].removesuffix(KERNEL_TIME)
            operators.setdefault(name, event["args"]["op_name"])
            ms_by_run[name][run] += event["dur"] / US_PER_MS
    return tuple(Kernel(name=name, operator=operators[name], ms=min(ms)) for name, ms in ms_by_run.items())


def _run_of(event: dict[str, Any], begins: list[float]) -> int | None:
    """Returns the number of the run that an event belongs to; None for events before the first run that counts."""
    before = sum(begin <= event["ts"] for begin in begins)
    return before - 1 if before else None

"""Builds one TensorRT or TensorRT-RTX engine, or says what the library offers, in a process of its own, through
Polygraphy.

    python -m mod_export.engines.trt_worker < job.json > result.json

It has a process of its own for two reasons: a vendor's builder may abort the process instead of raising, and Polygraphy
decides once for each process whether it drives TensorRT or TensorRT-RTX. Jobs and results are flat JSON objects. All
output of the vendor's libraries goes to stderr, where lines that begin with [E] are their errors.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def main() -> int:
    """Reads the job from stdin, writes the result to stdout, and returns the exit code."""
    results = os.dup(1)
    # From here on, all that C++ code and Polygraphy print to stdout goes to stderr.
    os.dup2(2, 1)
    job = json.load(sys.stdin)
    if job["library"] == "tensorrt_rtx":
        os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = "1"
    result = ACTIONS[job["action"]](job)
    sys.stdout.flush()
    with os.fdopen(results, "w", encoding="utf-8") as file:
        json.dump(result, file)
    return 0


def probe(job: Mapping[str, Any]) -> dict[str, Any]:
    """Tests what this machine can do.

    Returns:
        `version`, `devices` (compute capabilities of the GPUs here, such as sm89), `architectures` for which engines
        can be built ahead of time, and `build_problem` and `run_problem`, which are empty if there is no problem.
    """
    result: dict[str, Any] = {"version": "", "devices": cuda_devices(), "architectures": [], "build_problem": ""}
    result["run_problem"] = _run_problem() if result["devices"] else "no CUDA device to run on"
    try:
        trt = importlib.import_module(job["library"])
    except (ImportError, OSError) as error:
        result["build_problem"] = f"{job['library']} cannot be loaded: {error}"
        return result
    result["version"] = trt.__version__
    known = getattr(trt, "ComputeCapability", None)  # Only TensorRT-RTX has this class.
    names = [] if known is None else [name for name in known.__members__ if name.startswith("SM")]
    result["architectures"] = [name.lower() for name in names]
    try:
        trt.Builder(trt.Logger(trt.Logger.ERROR))
    except (RuntimeError, TypeError) as error:
        # If createInferBuilder fails, pybind11 only says "factory function returned nullptr".
        result["build_problem"] = f"no builder{'' if result['devices'] else ' without a CUDA device'} ({error})"
    return result


def _run_problem() -> str:
    from polygraphy.exception import PolygraphyException

    from mod_export.engines.trt import polygraphy_cuda

    try:
        polygraphy_cuda().wrapper()
    except (OSError, PolygraphyException) as error:
        return f"no CUDA runtime library ({error}); put the folder of libcudart.so on LD_LIBRARY_PATH"
    return ""


def build(job: Mapping[str, Any]) -> dict[str, Any]:
    """Builds `onnx` into the file `engine`. Returns an empty `error` and the `seconds`, or the reason as `error`."""
    from polygraphy.backend.trt import PostprocessConfig, engine_bytes_from_network, network_from_onnx_path
    from polygraphy.exception import PolygraphyException
    from polygraphy.logger import G_LOGGER

    G_LOGGER.module_severity = G_LOGGER.ERROR
    trt = importlib.import_module(job["library"])
    started = time.perf_counter()
    try:
        # Strongly typed: values that are float32 in the graph, such as router scores, are float32 in the engine.
        network = network_from_onnx_path(job["onnx"], strongly_typed=True)
        config = PostprocessConfig(_config(trt, job), lambda builder, network, config: _without_tf32(trt, config))
        data = engine_bytes_from_network(network, config=config, save_timing_cache=job.get("timing_cache"))
    except (PolygraphyException, RuntimeError, TypeError) as error:
        return {"error": str(error)}
    Path(job["engine"]).write_bytes(data)
    return {"error": "", "seconds": time.perf_counter() - started}


def _config(trt: Any, job: Mapping[str, Any]) -> Any:
    if job["library"] == "tensorrt_rtx":
        from polygraphy.backend.tensorrt_rtx import CreateConfigRTX

        number = int(job["arch"].removeprefix("sm"))
        return CreateConfigRTX(compute_capabilities=[divmod(number, 10)])
    from polygraphy.backend.trt import CreateConfig

    # Kernels that this version has timed on this machine before are not timed again. Polygraphy locks the file, so two
    # builds cannot write to it at once.
    cache = job.get("timing_cache")
    return CreateConfig(
        load_timing_cache=cache if cache and Path(cache).exists() else None,
        memory_pool_limits={trt.MemoryPoolType.WORKSPACE: job["workspace_mib"] << 20},
        builder_optimization_level=job["optimization_level"],
    )


def _without_tf32(trt: Any, config: Any) -> None:
    # TF32 is on by default and rounds the factors of float32 products to 10 bits. Router scores are always float32.
    config.clear_flag(trt.BuilderFlag.TF32)


def cuda_devices() -> list[str]:
    """Returns the compute capabilities of the CUDA devices here. It asks the driver, which needs no further library."""
    try:
        driver = ctypes.CDLL("libcuda.so.1" if os.name == "posix" else "nvcuda.dll")
    except OSError:
        return []
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    devices = []
    for ordinal in range(count.value):
        numbers = []
        for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
            number = ctypes.c_int(0)
            driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, ordinal)
            numbers.append(number.value)
        devices.append(f"sm{numbers[0]}{numbers[1]}")
    return devices


ACTIONS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {"probe": probe, "build": build}

if __name__ == "__main__":
    sys.exit(main())

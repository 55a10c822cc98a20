"""Engines of ONNX Runtime: what they are, what they refuse, and how their profiles are summed up."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import pytest
import torch
from graph_folders import job_of

from mod_export.config import BuildConfig
from mod_export.engines.ort import OrtCpu, OrtCuda, kernels_from_trace, load_cuda_libraries
from mod_export.engines.ort_session import CPU, session_from_onnx
from mod_export.environment import package_version
from mod_export.errors import EngineError, TargetError
from mod_export.model.model import tokens_sample
from mod_export.types import Bucket, Engine, Graph, Kernel, ModelKind, Variant

BUCKET = Bucket(1, 64)
WEIGHTS = "graphs/weights-float32.data"
NO_GPU = not torch.cuda.is_available() and not Path("/proc/driver/nvidia/version").exists()


def engine(target: str, model: ModelKind = "mod") -> Engine:
    path = f"engines/ort-cpu/{model}-b1s64-float32.onnx"
    return Engine(target=target, model=model, bucket=BUCKET, dtype="float32", path=path, weights=WEIGHTS)


def build(root: Path, destination: Path, config: BuildConfig) -> None:
    path, k_by_layer = "graphs/mod-b1s64.onnx", {1: 8, 3: 8}
    graph = Graph(path=path, model="mod", bucket=BUCKET, dtype="float32", target=None, k_by_layer=k_by_layer)
    OrtCpu().build(job_of(root, graph), Variant(dtype="float32"), destination, config)


def feeds() -> dict[str, np.ndarray]:
    return {"input_ids": np.arange(64)[None], "lengths": np.array([60])}


def test_an_engine_is_the_graph_proven_to_load(built: Path, config: BuildConfig, tmp_path: Path) -> None:
    build(built, tmp_path / "engine.onnx", config)
    assert (tmp_path / "engine.onnx").read_bytes() == (built / "graphs/mod-b1s64.onnx").read_bytes()


def test_a_graph_without_its_weights_is_refused(built_copy: Path, config: BuildConfig, tmp_path: Path) -> None:
    (built_copy / WEIGHTS).unlink()
    with pytest.raises(EngineError, match=r"^mod-b1s64\.onnx: ONNX Runtime refuses this graph: "):
        build(built_copy, tmp_path / "engine.onnx", config)
    assert not (tmp_path / "engine.onnx").exists()


def test_other_weights_take_the_place_of_those_in_the_file(built: Path, config: BuildConfig) -> None:
    zeros = {"embedding.weight": np.zeros((256, 32), np.float32)}
    with (
        OrtCpu().load(built, engine("ort-cpu"), config, 1) as original,
        OrtCpu().load(built, engine("ort-cpu"), config, 1, zeros) as silenced,
    ):
        assert original.outputs == ("logits", "routed_1", "routed_3")
        assert np.ptp(original.run(feeds())["logits"]) > 0
        assert np.ptp(silenced.run(feeds())["logits"]) == 0
        # The first session keeps its own weights.
        assert np.ptp(original.run(feeds())["logits"]) > 0


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ({"layers.9.weight": np.zeros(3, np.float32)}, "Failed to find existing initializer with name layers.9.weight"),
        ({"embedding.weight": np.zeros((256, 31), np.float32)}, ""),
        ({"embedding.weight": np.zeros((256, 32), np.float16)}, ""),
    ],
)
def test_weights_that_are_not_the_engines_are_refused(
    built: Path, config: BuildConfig, weights: dict[str, np.ndarray], reason: str
) -> None:
    with pytest.raises(EngineError, match=rf"^mod-b1s64-float32\.onnx: ONNX Runtime refuses this graph: .*{reason}"):
        OrtCpu().load(built, engine("ort-cpu"), config, 1, weights)


def test_an_engine_takes_the_threads_that_it_is_loaded_with(built: Path, config: BuildConfig) -> None:
    with OrtCpu().load(built, engine("ort-cpu"), config, 3) as runner:
        assert runner.threads == 3
        before = psutil.Process().num_threads()
        with OrtCpu().load(built, engine("ort-cpu"), config, 5):
            # The calling thread is one of the five.
            assert psutil.Process().num_threads() == before + 4


def test_what_is_no_graph_for_it(tmp_path: Path) -> None:
    domains = '["" : 23, "com.vendor" : 1]'
    text = f"<ir_version: 10, opset_import: {domains}> g (float[1] x) => (float[1] y) {{ y = com.vendor.F(x) }}"
    onnx.save(onnx.parser.parse_model(text), tmp_path / "foreign.onnx")
    refused = "ONNX Runtime refuses this graph: "
    for graph, message in (
        (tmp_path / "foreign.onnx", rf"^foreign\.onnx: {refused}.*com\.vendor"),
        (tmp_path / "absent.onnx", rf"^absent\.onnx: {refused}.*File doesn't exist"),
        (b"no graph", f"^a graph in memory: {refused}"),
    ):
        with pytest.raises(EngineError, match=message):
            session_from_onnx(graph, tmp_path, [CPU], 1, {})


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU")
def test_cuda_is_not_claimed_and_the_cpu_not_taken_for_it(built: Path, config: BuildConfig) -> None:
    availability = OrtCuda().availability()
    assert (availability.builds, availability.runs) == (False, False)
    assert "GPU" in availability.reason or "onnxruntime-gpu" in availability.reason
    message = r"^ort-cuda: (no CUDA session on this machine|the session runs on CPUEx|this onnxruntime has no)"
    with pytest.raises(TargetError, match=message):
        OrtCuda().load(built, engine("ort-cuda"), config, 1)


def test_a_runtime_without_cuda(monkeypatch: pytest.MonkeyPatch, built: Path, config: BuildConfig) -> None:
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: [CPU])
    availability = OrtCuda().availability()
    assert (availability.builds, availability.runs) == (False, False)
    assert availability.reason == "this onnxruntime has no CUDA provider; install onnxruntime-gpu in its place"
    with pytest.raises(TargetError, match=rf"^ort-cuda: {availability.reason}$"):
        OrtCuda().load(built, engine("ort-cuda"), config, 1)


def test_cuda_libraries_that_are_missing_are_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], built: Path, config: BuildConfig
) -> None:
    severities: list[int] = []
    # The build of ONNX Runtime for CPUs neither looks for these libraries nor opens such a session.
    printed = "Failed to load libcudart.so.13: no file\n\nPlease"
    monkeypatch.setattr("onnxruntime.preload_dlls", lambda: print(printed))  # noqa: T201
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr("onnxruntime.set_default_logger_severity", severities.append)
    monkeypatch.setattr("mod_export.engines.ort.session_from_onnx", no_session)
    load_cuda_libraries.cache_clear()
    message = "ort-cuda: no CUDA session on this machine: no device; Failed to load libcudart.so.13: no file | Please"
    with pytest.raises(TargetError, match=f"^{re.escape(message)}$"):
        OrtCuda().load(built, engine("ort-cuda"), config, 1)
    load_cuda_libraries.cache_clear()
    assert capfd.readouterr().out == ""
    assert severities == [3, 2]


def no_session(*_: object) -> None:
    raise EngineError("no device")


def test_the_installed_runtime_is_named() -> None:
    assert OrtCpu().availability().reason == f"onnxruntime {package_version('onnxruntime')}"


def event(name: str, ts: int, dur: int, op_name: str | None = None) -> dict[str, Any]:
    category = "Session" if op_name is None else "Node"
    return {"cat": category, "name": name, "ts": ts, "dur": dur, "args": {"op_name": op_name} if op_name else {}}


EVENTS = [
    event("model_loading_uri", 0, 5),
    # The first run does not count.
    event("model_run", 10, 100),
    event("a_kernel_time", 11, 90_000, "MatMul"),
    # Three runs count; the file has the kernels before their run.
    event("b_kernel_time", 210, 400, "Add"),
    event("a_kernel_time", 201, 1000, "MatMul"),
    event("a_fence_before", 201, 7, "MatMul"),
    event("model_run", 200, 100),
    event("a_kernel_time", 301, 3000, "MatMul"),
    event("b_kernel_time", 310, 250, "Add"),
    event("model_run", 300, 100),
    event("a_kernel_time", 401, 2000, "MatMul"),
    event("b_kernel_time", 410, 300, "Add"),
    event("b_kernel_time", 420, 300, "Add"),
    event("model_run", 400, 100),
]


def test_a_profile_is_the_fastest_of_the_runs_that_count(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(EVENTS), encoding="utf-8")
    assert kernels_from_trace(path, 3) == (
        Kernel(name="a", operator="MatMul", ms=1.0),
        Kernel(name="b", operator="Add", ms=0.25),
    )
    with pytest.raises(EngineError, match=r"profile\.json: ONNX Runtime's profile holds 4 runs, expected 5"):
        kernels_from_trace(path, 5)
    path.write_text("[{", encoding="utf-8")
    with pytest.raises(EngineError, match=r"profile\.json: ONNX Runtime's profile is damaged \(.*\); measure again"):
        kernels_from_trace(path, 1)


def test_a_real_engine_is_profiled(built: Path, config: BuildConfig) -> None:
    profile = OrtCpu().profile(built, engine("ort-cpu", "dense"), config, 1, tokens_sample(256, BUCKET, 0), 2)
    assert profile.runs == 2
    assert profile.profiler.startswith("ONNX Runtime 1.")
    operators = [kernel.operator for kernel in profile.kernels]
    assert operators.count("Attention") == 4
    assert operators.count("RMSNormalization") == 9
    assert all(kernel.ms >= 0 for kernel in profile.kernels)
    assert sum(kernel.ms for kernel in profile.kernels) > 0

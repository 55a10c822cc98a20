"""ONNX Runtime's profile: what its events are summed up to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mod_export.benchmark.latency import timing_feeds
from mod_export.config import BuildConfig
from mod_export.engines.ort import OrtCpu, kernels_from_trace
from mod_export.errors import EngineError
from mod_export.types import Bucket, Engine, Kernel


def event(name: str, ts: int, dur: int, op_name: str | None = None) -> dict[str, Any]:
    category = "Session" if op_name is None else "Node"
    return {"cat": category, "name": name, "ts": ts, "dur": dur, "args": {"op_name": op_name} if op_name else {}}


def written(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps(events), encoding="utf-8")
    return path


EVENTS = [
    event("model_loading_uri", 0, 5),
    # The run that does not count.
    event("model_run", 10, 100),
    event("a_kernel_time", 11, 90_000, "MatMul"),
    # Three that do; the file has the runs after their kernels.
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


def test_the_fastest_of_the_runs_that_count(tmp_path: Path) -> None:
    assert kernels_from_trace(written(tmp_path / "profile.json", EVENTS), 3) == (
        Kernel(name="a", operator="MatMul", ms=1.0),
        Kernel(name="b", operator="Add", ms=0.25),
    )


def test_too_few_runs_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "profile.json", EVENTS)
    with pytest.raises(EngineError, match=r"profile\.json: ONNX Runtime's profile holds 4 runs, expected 5"):
        kernels_from_trace(path, 5)


def test_a_damaged_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text("[{", encoding="utf-8")
    with pytest.raises(EngineError, match=r"profile\.json: ONNX Runtime's profile is damaged \(.*\); measure again"):
        kernels_from_trace(path, 1)


def test_a_real_engine_is_profiled(built: Path, config: BuildConfig) -> None:
    engine = Engine(
        target="ort-cpu", model="dense", bucket=Bucket(1, 64), dtype="float32",
        path="engines/ort-cpu/dense-b1s64-float32.onnx", weights="graphs/weights-float32.data",
    )  # fmt: skip
    profile = OrtCpu().profile(built, engine, config, 1, timing_feeds(engine.bucket, 256, 0), 2)
    assert profile.runs == 2
    assert profile.profiler.startswith("ONNX Runtime 1.")
    operators = [kernel.operator for kernel in profile.kernels]
    assert operators.count("Attention") == 4
    assert operators.count("RMSNormalization") == 9
    assert all(kernel.ms >= 0 for kernel in profile.kernels)
    assert sum(kernel.ms for kernel in profile.kernels) > 0

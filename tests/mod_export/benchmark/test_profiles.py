"""The cost model of a finished build folder, as a server sees it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mod_export.benchmark.profile import can_profile
from mod_export.build_folder.manifest import open_folder
from mod_export.config import BuildConfig
from mod_export.results.cost import CostRow, PartRow, Roofline
from mod_export.stages.benchmark import profile
from mod_export.stages.folder import FolderContext


def profiled(root: Path, config: BuildConfig, runs: int) -> FolderContext:
    config = config.model_copy(update={"cost": config.cost.model_copy(update={"profile_runs": runs})})
    context = FolderContext(root, config, (), verify=True)
    profile(context)
    return context


def test_a_moved_folder_has_its_cost_model(built_copy: Path, config: BuildConfig) -> None:
    context = profiled(built_copy, config, 2)
    parts = context.rows(PartRow)
    assert [(one.dtype, one.threads) for one in context.rows(Roofline)] == [("float32", 1)]
    assert {(row.bucket, row.model) for row in parts} == {(one.bucket.name, one.model) for one in context.engines}
    for engine in context.engines:
        rows = [row for row in parts if (row.bucket, row.model) == (engine.bucket.name, engine.model)]
        assert ("routing" in {row.part for row in rows}) is (engine.model == "mod")
        assert sum(row.share or 0.0 for row in rows) == pytest.approx(1.0)
        assert all(row.predicted_ms > 0 and (row.measured_ms or 0) > 0 for row in rows)
        costs = {(row.model, row.bucket): row.flops for row in context.rows(CostRow)}
        assert sum(row.flops for row in rows) == costs[engine.model, engine.bucket.name]
        assert all(str(row.profiler).startswith("ONNX Runtime 1.") for row in rows)


def test_no_runs_leave_the_prediction(built: Path, config: BuildConfig) -> None:
    parts = profiled(built, config, 0).rows(PartRow)
    assert parts
    assert {(row.measured_ms, row.share, row.profiler) for row in parts} == {(None, None, None)}


def test_only_processors_have_a_cost_model(built: Path) -> None:
    (engine, *_) = open_folder(built).engines
    targets = ("ort-cpu", "inductor", "ort-cuda", "tensorrt", "tensorrt-rtx")
    assert [can_profile(replace(engine, target=target)) for target in targets] == [True, True, False, False, False]


SERVER = """
import json, sys
for name in ("torch", "onnx", "onnx_ir", "safetensors"):
    sys.modules[name] = None  # As if it were not installed.
from pathlib import Path
from mod_export.results.cost import PartRow, Roofline
from mod_export.stages.folder import FolderContext
from mod_export.stages.benchmark import profile
context = FolderContext(Path(sys.argv[1]), None, (), verify=True)
profile(context)
print(len(context.rows(Roofline)), all(row.measured_ms for row in context.rows(PartRow)))
"""


def test_a_server_needs_onnx_runtime_only(built: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SERVER, str(built)], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout == "1 True\n"

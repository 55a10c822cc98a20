"""The cost model of a finished build folder, as a server sees it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mod_export.config import BuildConfig
from mod_export.measure.profiles import can_profile, profile_engines
from mod_export.runtime import engines_of
from mod_export.workspace import read_manifest

MACHINE = {"cpu": "a processor", "logical_cores": 2}


@pytest.fixture
def manifest(built: Path) -> dict[str, Any]:
    return read_manifest(built)


def with_runs(config: BuildConfig, runs: int) -> BuildConfig:
    return config.model_copy(update={"cost": config.cost.model_copy(update={"profile_runs": runs})})


def test_a_moved_folder_has_its_cost_model(built_copy: Path, manifest: dict[str, Any], config: BuildConfig) -> None:
    engines = engines_of(manifest)
    rooflines, parts = profile_engines(built_copy, engines, manifest, MACHINE, with_runs(config, 2))
    assert [(one.dtype, one.threads) for one in rooflines] == [("float32", 1)]
    assert {(row.bucket, row.model) for row in parts} == {(e.bucket.name, e.model) for e in engines}
    for engine in engines:
        rows = [row for row in parts if (row.bucket, row.model) == (engine.bucket.name, engine.model)]
        assert ("routing" in {row.part for row in rows}) is (engine.model == "mod")
        assert sum(row.share or 0.0 for row in rows) == pytest.approx(1.0)
        assert all(row.predicted_ms > 0 and (row.measured_ms or 0) > 0 for row in rows)
        cost = next(c for c in manifest["cost"] if (c["model"], c["bucket"]) == (engine.model, engine.bucket.name))
        assert sum(row.flops for row in rows) == cost["flops"]
        assert all(str(row.profiler).startswith("ONNX Runtime 1.") for row in rows)


def test_no_runs_leave_the_prediction(built: Path, manifest: dict[str, Any], config: BuildConfig) -> None:
    _, parts = profile_engines(built, engines_of(manifest)[:1], manifest, MACHINE, with_runs(config, 0))
    assert parts
    assert {(row.measured_ms, row.share, row.profiler) for row in parts} == {(None, None, None)}


def test_a_folder_of_an_older_version_has_none(built: Path, manifest: dict[str, Any], config: BuildConfig) -> None:
    del manifest["work"]
    assert profile_engines(built, engines_of(manifest), manifest, MACHINE, config) == ((), ())


def test_only_processors_have_a_cost_model(manifest: dict[str, Any]) -> None:
    (engine, *_) = engines_of(manifest)
    from dataclasses import replace

    targets = ("ort-cpu", "inductor", "ort-cuda", "tensorrt", "tensorrt-rtx")
    assert [can_profile(replace(engine, target=target)) for target in targets] == [True, True, False, False, False]


SERVER = """
import json, sys
for name in ("torch", "onnx", "onnx_ir", "safetensors"):
    sys.modules[name] = None  # As if it were not installed.
from pathlib import Path
from mod_export.config import BuildConfig
from mod_export.measure.profiles import profile_engines
from mod_export.runtime import engines_of
from mod_export.workspace import read_manifest
root = Path(sys.argv[1])
manifest = read_manifest(root)
config = BuildConfig.model_validate(manifest["config"])
machine = {"cpu": "a server's processor", "logical_cores": 2}
rooflines, parts = profile_engines(root, engines_of(manifest), manifest, machine, config)
print(len(rooflines), all(row.measured_ms for row in parts))
"""


def test_a_server_needs_onnx_runtime_only(built: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SERVER, str(built)], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout == "1 True\n"

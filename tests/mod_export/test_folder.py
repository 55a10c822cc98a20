"""A finished build folder, moved and without its checkpoint: its latency is measured again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from manifests import rewrite_manifest

from mod_export.cli import cli
from mod_export.config import BuildConfig
from mod_export.errors import BuildFolderError, TargetError
from mod_export.folder import bench_folder
from mod_export.workspace import read_manifest


@pytest.mark.parametrize(
    "name",
    ["engines/ort-cpu/mod-b1s64-float32.onnx", "graphs/weights-float32.data", "graphs/dense-b2s32.onnx", "report.html"],
)
def test_a_changed_byte(name: str, built_copy: Path) -> None:
    data = bytearray((built_copy / name).read_bytes())
    data[len(data) // 3] ^= 1
    (built_copy / name).write_bytes(data)
    with pytest.raises(
        BuildFolderError, match=rf"moved: {name} has been changed since it was built \(SHA-256 differs\)"
    ):
        bench_folder(built_copy, None, ())


def test_bench_a_moved_folder(built_copy: Path) -> None:
    config = BuildConfig.model_validate(read_manifest(built_copy)["config"])
    latency, speedup, verdict = bench_folder(built_copy, None, ())
    assert verdict.status == "pass"
    assert [(row.bucket, row.model) for row in latency] == [
        (bucket, kind) for bucket in ("b1s64", "b2s32") for kind in ("mod", "dense")
    ]
    assert all(len(row.samples_ms) >= config.latency.samples for row in latency)
    assert [row.bucket for row in speedup] == ["b1s64", "b2s32"]


def test_a_config_of_ones_own(built_copy: Path) -> None:
    config = BuildConfig.model_validate(read_manifest(built_copy)["config"])
    latency = config.latency.model_copy(update={"samples": 9})
    rows, _, _ = bench_folder(built_copy, config.model_copy(update={"latency": latency}), ())
    # Whole blocks of rounds are taken.
    assert {len(row.samples_ms) for row in rows} == {16}


def test_bench_needs_no_module_that_built_it(built_copy: Path) -> None:
    code = """
import sys
from pathlib import Path
for name in ("onnx", "onnx_ir", "onnxscript", "torch", "safetensors", "mod_models"):
    sys.modules[name] = None
from mod_export.folder import bench_folder
print(bench_folder(Path(sys.argv[1]), None, ())[-1].status)
"""
    arguments = [sys.executable, "-c", code, str(built_copy)]
    found = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert found.stdout == "pass\n", found.stderr


def test_a_target_that_is_not_in_the_folder(built: Path) -> None:
    with pytest.raises(TargetError, match=r"built: holds no engine for inductor, abacus; built for ort-cpu$"):
        bench_folder(built, None, ["inductor", "ort-cpu", "abacus"])


def test_an_unfinished_build(built_copy: Path) -> None:
    rewrite_manifest(built_copy, lambda manifest: manifest.pop("files"))
    with pytest.raises(
        BuildFolderError, match=r"moved: the build was not finished; run the same build again, it resumes"
    ):
        bench_folder(built_copy, None, ())


def test_bench_needs_no_architecture(built_copy: Path) -> None:
    rewrite_manifest(built_copy, lambda manifest: manifest["models"]["mod"].update(architecture="mamba"))
    assert CliRunner().invoke(cli, ["bench", str(built_copy)]).exit_code == 0

"""A finished build folder, moved and without its checkpoint: its latency is measured again."""

from __future__ import annotations

from pathlib import Path

from build_folders import rewrite_manifest
from command_line import command

from mod_export.build_folder.manifest import read_manifest
from mod_export.config import BuildConfig
from mod_export.rerun import bench_folder
from mod_export.results.latency import LatencyRow, SpeedupRow


def test_bench_a_moved_folder_with_a_config_of_ones_own(built_copy: Path) -> None:
    # Measuring needs no architecture.
    rewrite_manifest(built_copy, lambda manifest: manifest["models"]["mod"].update(architecture="mamba"))
    config = BuildConfig.model_validate(read_manifest(built_copy)["config"])
    own = config.model_copy(update={"latency": config.latency.model_copy(update={"samples": 9})})
    found = bench_folder(built_copy, own, ())
    latency = found.rows(LatencyRow)
    assert found.verdict.status == "pass"
    assert [(row.bucket, row.model) for row in latency] == [
        (bucket, kind) for bucket in ("b1s64", "b2s32") for kind in ("mod", "dense")
    ]
    # Whole blocks of rounds are taken: 8 samples by the folder's own configuration.
    assert {len(row.samples_ms) for row in latency} == {16}
    assert [row.bucket for row in found.rows(SpeedupRow)] == ["b1s64", "b2s32"]


def test_bench_of_a_folder_that_writes_text_needs_no_builder(written: Path) -> None:
    absent = "for name in ('torch', 'onnx', 'onnx_ir', 'safetensors'): sys.modules[name] = None"
    found = command("bench", written, code=absent)
    assert found.returncode == 0, found.stderr
    tables = [line.split("  ")[0] for line in found.stdout.splitlines()]
    assert {"token by token", "first token"} <= set(tables)

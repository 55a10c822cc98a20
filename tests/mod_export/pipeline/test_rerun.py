"""`mod-export validate` and `bench` on a finished build folder that was moved or damaged. The validated folder is the
smallest that has everything: two layers, one of them routed, and one bucket.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from build_folders import WEIGHTS, Silent, changed, failed, file_entry, flip, once, rewrite_manifest
from command_line import FEW_SAMPLES, command, contents, invoke
from safetensors.torch import load_file, save_file

from mod_export.config import BuildConfig, config_from_toml
from mod_export.engines import ENGINES
from mod_export.folder.manifest import read_manifest
from mod_export.graph.weights import digests_of_file
from mod_export.model.request import Request
from mod_export.pipeline.rerun import bench_folder, validate_folder
from mod_export.pipeline.stages import build
from mod_export.rows.correctness import CausalityRow, ParityRow, StructureRow
from mod_export.rows.cost import Roofline
from mod_export.rows.speed import DecodeRow, LatencyRow, SpeedupRow
from mod_models.checkpoint import random_checkpoint, save_checkpoint
from mod_models.spec import ModelSpec

pytestmark = pytest.mark.usefixtures("searching_few_rows")
ENGINE = "engines/ort-cpu/mod-b2s16-float32.onnx"
GRAPH = "graphs/dense-b2s16.onnx"
DOWN = "layers.1.mlp.down_proj.weight"
TOML = f"""
buckets = [[2, 16]]
targets = ["ort-cpu"]
{FEW_SAMPLES}[cost]
profile_runs = 0
[parity]
text_batches = 1
"""


@pytest.fixture(scope="module")
def with_baseline(shared_folder: Path, tiny_spec: ModelSpec) -> Path:
    """Folder with `model.pt`, its dense baseline `base.pt`, `c.toml`, and the read-only build of the two."""
    folder = shared_folder / "with_baseline"

    def make() -> None:
        spec = replace(tiny_spec, n_layers=2)
        save_checkpoint(folder / "model.pt", random_checkpoint(spec, 0))
        save_checkpoint(folder / "base.pt", random_checkpoint(spec.dense(), 7))
        (folder / "c.toml").write_text(TOML, encoding="utf-8")
        config = config_from_toml(folder / "c.toml")
        build(
            Request.checkpoint(folder / "model.pt", folder / "base.pt").models,
            config,
            folder / "build",
            Silent(),
            "mod-export build",
        )

    return once(folder, make)


@pytest.fixture
def moved(with_baseline: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(with_baseline / "build", tmp_path / "moved"))


@pytest.fixture
def built_from(with_baseline: Path) -> Path:
    return with_baseline / "model.pt"


def test_a_moved_folder_passes_without_its_checkpoint(moved: Path) -> None:
    found = validate_folder(moved, None, ())
    assert found.verdict.status == "pass", found.verdict.reasons
    assert failed(found) == set()
    assert found.notes == []
    manifest = read_manifest(moved)
    checked: dict[str, set[str]] = {}
    for row in found.rows(StructureRow):
        checked.setdefault(row.path, set()).update(row.checked)
    assert checked.keys() == manifest["files"].keys()
    for path, what in checked.items():
        assert "the bytes that were built" in what
        assert ("what a fresh export gives" in what) == path.endswith(".onnx")
    assert any("tensors are the checkpoint's, bit for bit" in what for what in checked[WEIGHTS])
    cells = [("ort-cpu", "b2s16", kind) for kind in ("mod", "dense")]
    portable = [("portable", "b2s16", kind) for kind in ("mod", "dense")]
    assert [(row.target, row.bucket, row.model) for row in found.rows(ParityRow)] == cells + portable
    assert [(row.target, row.bucket, row.model) for row in found.rows(CausalityRow)] == cells
    assert [row.causal for row in found.rows(CausalityRow)] == [False, True]
    # The results equal those of the build.
    report = json.loads((moved / "report.json").read_text())
    for row, reported in zip(found.rows(ParityRow), report["parity"], strict=True):
        assert row.routing.agreed == reported["routing"]["agreed"]
        assert row.error.max_abs == pytest.approx(reported["error"]["max_abs"])


def test_a_configuration_of_ones_own(with_baseline: Path, moved: Path) -> None:
    config = config_from_toml(with_baseline / "c.toml")
    strict = changed(config, {"parity/float32/rounding_error_rms": 0.0, "parity/suffixes": 2})
    found = validate_folder(moved, strict, ["ort-cpu"])
    assert found.verdict.status == "fail"
    assert all("root mean square error" in reason for reason in found.verdict.reasons)
    assert {row.suffixes for row in found.rows(CausalityRow)} == {2}
    # The graph is correct, so no place is named.
    assert all(row.located is None for row in found.rows(ParityRow))


def test_the_command_prints_what_was_found_and_changes_nothing(
    with_baseline: Path, moved: Path, built_from: Path
) -> None:
    result = invoke("validate", moved, "--model", built_from, "--target", "ort-cpu")
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    assert result.stdout.splitlines()[-1] == "PASS"
    assert "weights are the checkpoint's, bit for bit" in result.stdout
    assert "mod: must not be used for autoregressive sampling: " in result.stdout
    assert "portable" not in result.stdout
    assert contents(moved) == contents(with_baseline / "build")


def test_missing_files_are_named(moved: Path) -> None:
    for name in (ENGINE, GRAPH):
        (moved / name).unlink()
    found = validate_folder(moved, None, ())
    assert {f"{name}: is missing or not a regular file" for name in (ENGINE, GRAPH)} <= set(found.verdict.reasons)
    assert failed(found) == {ENGINE, GRAPH}
    # Untouched engines and graphs still pass.
    rows = [(row.target, row.bucket, row.model) for row in found.rows(ParityRow) if not row.passed]
    assert rows == [("ort-cpu", "b2s16", "mod"), ("portable", "b2s16", "dense")]


def change_weight(root: Path, factor: float, *, sign: bool) -> None:
    tensors = load_file(root / WEIGHTS)
    tensors[DOWN][1, 2:] *= factor
    save_file(tensors, root / WEIGHTS)
    if sign:
        rewrite_manifest(root, lambda manifest: manifest["files"].update({WEIGHTS: file_entry(root / WEIGHTS)}))


def test_a_changed_weight_is_given_away_by_its_fingerprint(moved: Path) -> None:
    """The reference is rebuilt from the same file, so only the fingerprint can show it."""
    change_weight(moved, 1.01, sign=True)
    found = validate_folder(moved, None, ["ort-cpu"])
    assert found.verdict.reasons == (f"{WEIGHTS}: {DOWN}: not the checkpoint's values",)
    assert all(row.passed for row in found.rows(ParityRow))


@pytest.mark.slow
def test_with_the_checkpoint_a_changed_weight_is_seen_in_the_logits_too(moved: Path, built_from: Path) -> None:
    change_weight(moved, 50.0, sign=False)
    found = validate_folder(moved, None, ["ort-cpu"], built_from)
    assert f"{WEIGHTS}: {DOWN}: not the checkpoint's values" in found.verdict.reasons
    assert f"{WEIGHTS}: has been changed since it was built (SHA-256 differs)" in found.verdict.reasons
    assert [row.passed for row in found.rows(ParityRow)] == [False, True]
    # The model's file is compared with its fingerprints and the checkpoint; the baseline came from another checkpoint.
    looked = [row.path for row in found.rows(StructureRow) if any("bit for bit" in what for what in row.checked)]
    assert sorted(looked) == ["graphs/weights-baseline-float32.data", WEIGHTS, WEIGHTS]


@pytest.mark.slow
def test_the_folder_says_which_capacity(moved: Path, built_from: Path) -> None:
    """A sweep builds a checkpoint at capacities that differ from its own."""

    def quarter(manifest: dict[str, Any]) -> None:
        manifest["models"]["mod"]["spec"]["routing"]["capacity"] = 0.25
        manifest["exporters"]["torch"] = "1.0"

    rewrite_manifest(moved, quarter)
    found = validate_folder(moved, None, ["ort-cpu"], built_from)
    routed, whole = found.rows(ParityRow)[:2]
    reason = "text: layer 1 routing: the engine gives routed positions of shape [2, 2], expected [2, 4]"
    assert [one for one in routed.reasons if one.startswith(reason)] == [f"{reason}, and on 17 more inputs"]
    assert whole.passed


def test_versions_that_would_export_otherwise_are_not_held_against_it(moved: Path) -> None:
    """Another torch exports other graphs. The remaining checks still run, and a note says what was left out."""
    rewrite_manifest(moved, lambda manifest: manifest["exporters"].update(torch="1.0"))
    flip(moved / "report.html")
    found = validate_folder(moved, None, ["ort-cpu"])
    assert failed(found) == {"report.html"}
    assert all(row.passed for row in found.rows(ParityRow))
    assert not any("what a fresh export gives" in row.checked for row in found.rows(StructureRow))
    note = "graphs were not compared with a fresh export: other versions are installed than those that built them"
    assert note in found.notes


def with_package(root: Path) -> Callable[[dict[str, Any]], None]:
    """Adds a compiled engine whose file is not the one that was built."""
    path = "engines/inductor/mod-b2s16-float32.pt2"
    (root / path).parent.mkdir()
    (root / path).write_bytes(b"built")
    entry = file_entry(root / path)
    (root / path).write_bytes(b"other")

    def change(manifest: dict[str, Any]) -> None:
        (engine,) = [item for item in manifest["engines"] if item["path"] == ENGINE]
        manifest["engines"].append({**engine, "target": "inductor", "path": path})
        manifest["files"][path] = entry

    return change


def test_compiled_code_that_was_changed_is_not_run(moved: Path) -> None:
    if not ENGINES["inductor"].availability().runs:
        pytest.skip("torch is not here")
    rewrite_manifest(moved, with_package(moved))
    found = validate_folder(moved, None, ["inductor"])
    (row,) = found.rows(ParityRow)
    assert row.reasons == ("not run: it is compiled code, and not the file that was built",)
    assert (row.target, row.artifact, row.passed) == ("inductor", "engines/inductor/mod-b2s16-float32.pt2", False)
    assert found.rows(CausalityRow) == []
    assert any(
        reason == "inductor b2s16 float32 mod: parity: not run: it is compiled code, and not the file that was built"
        for reason in found.verdict.reasons
    )


@pytest.mark.slow
def test_weights_and_fingerprints_changed_together_are_found_with_the_checkpoint(moved: Path, built_from: Path) -> None:
    change_weight(moved, 1.001, sign=False)

    def sign(manifest: dict[str, Any]) -> None:
        manifest["files"][WEIGHTS] = file_entry(moved / WEIGHTS)
        manifest["weight_digests"][WEIGHTS] = digests_of_file(moved / WEIGHTS)

    rewrite_manifest(moved, sign)
    assert validate_folder(moved, None, ["ort-cpu"]).verdict.status == "pass"
    found = validate_folder(moved, None, ["ort-cpu"], built_from)
    assert f"{WEIGHTS}: {DOWN}: not the checkpoint's values" in found.verdict.reasons


@pytest.mark.slow
def test_engines_and_graphs_that_nothing_was_run_of_are_said(moved: Path) -> None:
    """A bfloat16 graph has no kernels on a CPU, so a note lists it."""
    half = "graphs/mod-b2s16.tensorrt-rtx.bfloat16.onnx"
    data = (moved / "graphs/mod-b2s16.onnx").read_bytes()
    (moved / half).write_bytes(data + b"\x00")

    def add(manifest: dict[str, Any]) -> None:
        manifest["files"][half] = file_entry(moved / half)
        graph = next(entry for entry in manifest["graphs"] if entry["path"] == "graphs/mod-b2s16.onnx")
        manifest["graphs"].append({**graph, "path": half, "dtype": "bfloat16", "target": "tensorrt-rtx"})

    rewrite_manifest(moved, add)
    note = "not run: 1 bfloat16 graphs of tensorrt-rtx; of these only the files were looked at"
    assert validate_folder(moved, None, ()).notes == [note]


# `mod-export bench`.


def test_bench_a_moved_folder_with_a_config_of_ones_own(built_copy: Path) -> None:
    # Measuring works with an unknown architecture.
    rewrite_manifest(built_copy, lambda manifest: manifest["models"]["mod"].update(architecture="mamba"))
    config = BuildConfig.model_validate(read_manifest(built_copy)["config"])
    found = bench_folder(built_copy, changed(config, {"latency/samples": 9}), ())
    latency = found.rows(LatencyRow)
    assert found.verdict.status == "pass"
    assert [(row.bucket, row.model) for row in latency] == [
        (bucket, kind) for bucket in ("b1s64", "b2s32") for kind in ("mod", "dense")
    ]
    # Samples come in whole blocks of rounds: 8 with the folder's own configuration.
    assert {len(row.samples_ms) for row in latency} == {16}
    assert [row.bucket for row in found.rows(SpeedupRow)] == ["b1s64", "b2s32"]


def test_steps_are_predicted_by_the_roofline_of_the_report(written: Path, writing_config: BuildConfig) -> None:
    """A roofline that is measured again is measured once, whoever asks first."""
    found = bench_folder(written, changed(writing_config, {"cost/measure_again": True}), ())
    (roofline,) = found.rows(Roofline)
    assert found.rows(DecodeRow)
    for row in found.rows(DecodeRow):
        times = {kind: size / roofline.bandwidth_gbs / 1e6 for kind, size in row.least_bytes.items()}
        assert row.predicted_ms == pytest.approx(times)


def test_bench_of_a_folder_that_writes_text_needs_no_builder(written: Path) -> None:
    absent = "for name in ('torch', 'onnx', 'onnx_ir', 'safetensors'): sys.modules[name] = None"
    found = command("bench", written, code=absent)
    assert found.returncode == 0, found.stderr
    tables = [line.split("  ")[0] for line in found.stdout.splitlines()]
    assert {"token by token", "first token"} <= set(tables)

"""A folder that was built without evidence is completed in several runs: on machines that run different engines, at the
same time, and where nothing may be written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from build_folders import WEIGHTS, changed, check_files, file_entry, flip, once, rewrite_manifest
from command_line import FEW_SAMPLES, invoke, toml_file
from safetensors.torch import load_file, save_file
from sample_rows import causality_row, parity_row
from sample_rows import changed as with_fields

from mod_export import environment, load
from mod_export.engines import ENGINES
from mod_export.errors import EngineError, TargetError, UnverifiedWarning
from mod_export.folder import workspace
from mod_export.folder.manifest import open_folder
from mod_export.pipeline import rerun
from mod_export.pipeline import validate as stage
from mod_export.pipeline.build import Build
from mod_export.pipeline.report import refused_by
from mod_export.pipeline.rerun import bench_folder, validate_folder
from mod_export.rows.correctness import ParityRow
from mod_export.rows.report import BuildReport, Verdict, report_from_json
from mod_export.types import Availability
from mod_models.checkpoint import random_checkpoint, save_checkpoint
from mod_models.spec import ModelSpec

pytestmark = pytest.mark.usefixtures("searching_few_rows")
TOML = f"""
buckets = [[2, 16]]
targets = ["ort-cpu", "openvino"]
{FEW_SAMPLES}[cost]
profile_runs = 0
[parity]
text_batches = 1
[parity.int8]
rounding_error = 1e-9
[target.openvino]
dtypes = ["int8"]
[generation]
build = "never"
"""
"""The engines of OpenVINO miss their gate."""
OURS, THEIRS = "engines/ort-cpu/mod-b2s16-float32.onnx", "engines/openvino/mod-b2s16-int8.blob"
ENGINES_OF_BOTH = {"mod", "dense"}
Here = Callable[[bool], None]


@pytest.fixture(scope="module")
def made(shared_folder: Path, tiny_spec: ModelSpec) -> Path:
    """The read-only build without evidence, for two targets."""
    available = ENGINES["openvino"].availability()
    if not available.builds:
        pytest.skip(available.reason)
    folder = shared_folder / "completing"

    def make() -> None:
        save_checkpoint(folder / "model.pt", random_checkpoint(replace(tiny_spec, n_layers=2), 0))
        toml_file(folder, TOML)
        arguments = ("-c", folder / "c.toml", "-o", folder / "build", "--no-evidence", "-q")
        found = invoke("build", folder / "model.pt", *arguments)
        assert found.exit_code == 0, found.output

    return once(folder, make) / "build"


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "build"))


@pytest.fixture
def openvino_runs(monkeypatch: pytest.MonkeyPatch) -> Here:
    """Changes whether this machine runs OpenVINO, which is a part of the environment."""

    def change(runs: bool) -> None:
        status = Availability(builds=runs, runs=runs, reason="openvino is not installed")
        monkeypatch.setattr(type(ENGINES["openvino"]), "availability", lambda engine: status)

    return change


def report_of(root: Path) -> BuildReport:
    return report_from_json((root / "report.json").read_text(encoding="utf-8"))


def test_it_is_verified_once_every_engine_was_judged(root: Path, openvino_runs: Here) -> None:
    openvino_runs(False)
    first = validate_folder(root, None, ())
    assert first.verdict.status == "pass", first.verdict.reasons
    assert (
        "not verified yet: 2 engines of openvino were judged on no machine so far; use validate where they run"
        in first.notes
    )
    manifest = open_folder(root)
    assert (manifest.verified, manifest.refused) == (False, {})
    with pytest.warns(UnverifiedWarning):
        deployment = load(root)
    with deployment:
        assert deployment.target == "ort-cpu"
    openvino_runs(True)
    second = validate_folder(root, None, ())
    assert second.verdict.status == "fail"
    assert not [note for note in second.notes if "written" in note or "verified" in note]
    manifest = open_folder(root)
    assert manifest.verified
    assert manifest.refused.keys() == {THEIRS, THEIRS.replace("mod-", "dense-")}
    report = report_of(root)
    judged = [(row.target, row.model) for row in report.parity if row.target != "portable"]
    assert judged == [(target, kind) for target in ("ort-cpu", "openvino") for kind in ("mod", "dense")]
    assert [stage.name for stage in report.stages][-3:] == ["validate", "validate", "report"]
    assert report.verdict.status == "fail"
    with pytest.raises(TargetError, match="the int8 engines for openvino missed their gates and are not served"):
        load(root, "openvino")
    check_files(root)
    # What is refused stays refused where it does not run.
    openvino_runs(False)
    text = (root / "report.json").read_text(encoding="utf-8")
    third = validate_folder(root, None, ())
    assert "not written into the folder: it has results of everything that runs here" in third.notes
    assert (root / "report.json").read_text(encoding="utf-8") == text
    assert open_folder(root).refused == manifest.refused


def refuse(monkeypatch: pytest.MonkeyPatch, error: type[Exception], *targets: str) -> None:
    """Lets the engines of targets refuse this processor, as those that were compiled for another one do."""

    def load(*arguments: Any) -> None:
        raise error("compiled for a CPU with avx512f, which this one lacks")

    for target in targets:
        monkeypatch.setattr(type(ENGINES[target]), "load", load)


@pytest.mark.parametrize("error", [TargetError, EngineError])
def test_a_machine_that_cannot_run_an_engine_does_not_judge_it(
    root: Path,
    openvino_runs: Here,
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception],
) -> None:
    openvino_runs(False)
    assert validate_folder(root, None, ()).verdict.status == "pass"
    earlier = report_of(root)
    openvino_runs(True)
    with monkeypatch.context() as elsewhere:
        refuse(elsewhere, error, "ort-cpu", "openvino")
        found = validate_folder(root, None, ())
    assert found.verdict.status == "fail"
    assert {row.target for row in found.rows(ParityRow) if not row.judged} == {"ort-cpu", "openvino"}
    reason = "cannot be run: compiled for a CPU with avx512f, which this one lacks"
    assert f"not judged here: ort-cpu b2s16 float32 mod: {reason}" in found.notes
    manifest, report = open_folder(root), report_of(root)
    assert (manifest.verified, manifest.refused) == (False, {})
    assert [row for row in report.parity if row.target != "portable"] == [
        row for row in earlier.parity if row.target != "portable"
    ]
    assert report.verdict.status == "pass", report.verdict.reasons
    with pytest.warns(UnverifiedWarning), load(root, "ort-cpu") as deployment:
        assert deployment.target == "ort-cpu"


def test_an_engine_is_judged_by_the_first_machine_that_runs_it(
    root: Path,
    openvino_runs: Here,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    openvino_runs(False)
    with monkeypatch.context() as elsewhere:
        refuse(elsewhere, TargetError, "ort-cpu")
        first = validate_folder(root, None, ())
    assert "not verified yet: 4 engines of ort-cpu, openvino were judged on no machine so far; use validate where" in (
        " ".join(first.notes)
    )
    assert open_folder(root).refused == {}
    openvino_runs(True)
    assert validate_folder(root, None, ()).verdict.status == "fail"
    manifest = open_folder(root)
    assert manifest.verified
    assert manifest.refused.keys() == {THEIRS, THEIRS.replace("mod-", "dense-")}


def test_an_engine_that_cannot_be_run_is_refused_in_a_build(small: Path) -> None:
    build = Build.open(small, None, (), verify=False)
    row = parity_row(artifact=OURS, passed=False, judged=False, reasons=("cannot be run: no such instruction",))
    assert refused_by(build, [row], [], []) == {OURS: row.reasons}


def test_a_failure_that_is_not_repeated_is_forgotten(
    root: Path, openvino_runs: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    openvino_runs(True)

    def fail(*arguments: Any) -> None:
        raise EngineError("no memory was left")

    with monkeypatch.context() as busy:
        busy.setattr(stage, "routing_map", fail)
        validate_folder(root, None, ())
    report = report_of(root)
    assert open_folder(root).verified
    assert {(row.stage, row.target) for row in report.failed} == {("validate", None)}
    assert report.routing_maps == ()
    validate_folder(root, None, ())
    report = report_of(root)
    assert report.failed == ()
    assert [row.bucket for row in report.routing_maps] == ["b2s16"]


def test_a_graph_that_was_judged_since_is_no_longer_named(
    root: Path, openvino_runs: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    openvino_runs(False)
    with monkeypatch.context() as small_machine:
        small_machine.setattr(stage, "free_bytes", lambda: 0)
        validate_folder(root, None, ())
    graphs = {f"graphs/{kind}-b2s16.onnx" for kind in ENGINES_OF_BOTH}
    assert report_of(root).not_run.keys() == graphs
    validate_folder(root, None, ())
    report = report_of(root)
    assert graphs <= {row.artifact for row in report.parity}
    assert report.not_run == {}
    openvino_runs(True)
    monkeypatch.setattr(stage, "free_bytes", lambda: 0)
    assert any(": not run: " in note for note in validate_folder(root, None, ()).notes)
    assert report_of(root).not_run == {}


def test_times_are_added_engine_by_engine(root: Path, openvino_runs: Here) -> None:
    openvino_runs(False)
    assert bench_folder(root, None, ()).notes == []
    earlier = report_of(root)
    assert {row.target for row in earlier.latency} == {"ort-cpu"}
    # Nothing was judged, and yet the engines ran.
    assert {row.target for row in earlier.targets if row.ran} == {"ort-cpu"}
    openvino_runs(True)
    assert bench_folder(root, None, ()).notes == []
    report, manifest = report_of(root), open_folder(root)
    assert report.latency[:2] == earlier.latency
    assert [row.target for row in report.latency] == ["ort-cpu"] * 2 + ["openvino"] * 2
    assert {(row.target, row.model) for row in manifest.measured} == {
        (target, kind) for target in ("ort-cpu", "openvino") for kind in ENGINES_OF_BOTH
    }
    assert {row.target for row in report.targets if row.ran} == {"ort-cpu", "openvino"}
    assert not manifest.verified
    assert bench_folder(root, None, ()).notes == [
        "not written into the folder: it has results of everything that runs here"
    ]


def test_times_of_two_machines_are_not_mixed(
    root: Path, openvino_runs: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    openvino_runs(False)
    assert bench_folder(root, None, ()).notes == []
    timed = report_of(root)
    (tmp_path / "cpuinfo").write_text("model name\t: another processor\n", encoding="utf-8")
    monkeypatch.setattr(environment, "CPUINFO", tmp_path / "cpuinfo")
    openvino_runs(True)
    (note,) = bench_folder(root, None, ()).notes
    assert note.startswith("not written into the folder: its times were taken under other conditions (cpu was ")
    assert note.endswith(
        "and is 'another processor'), and such times cannot be compared; build again to take all of them here"
    )
    assert report_of(root) == timed
    # What is right on one machine may be judged on another, and the times keep theirs.
    validate_folder(root, None, ())
    report = report_of(root)
    assert report.environment == timed.environment
    assert report.latency == timed.latency
    assert {row.target for row in report.parity} >= {"ort-cpu", "openvino"}


def test_runs_that_end_while_another_goes_on_lose_nothing(
    root: Path, openvino_runs: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    openvino_runs(False)
    give_verdict = rerun.verdict_of_build

    def after_another_run(build: Build, **options: Any) -> Verdict:
        monkeypatch.setattr(rerun, "verdict_of_build", give_verdict)
        assert bench_folder(root, None, ()).notes == []
        return give_verdict(build, **options)

    monkeypatch.setattr(rerun, "verdict_of_build", after_another_run)
    notes = validate_folder(root, None, ()).notes
    assert not [note for note in notes if "not written" in note]
    report = report_of(root)
    assert report.latency
    assert report.parity
    assert all(row.passed for row in report.structure)
    check_files(root)


def while_it_is_judged(root: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> str:
    """Validates a folder that is changed before the results are written; returns the note about that."""
    give_verdict = rerun.verdict_of_build

    def after_the_change(build: Build, **options: Any) -> Verdict:
        change()
        return give_verdict(build, **options)

    monkeypatch.setattr(rerun, "verdict_of_build", after_the_change)
    before = open_folder(root, verify=False).verified
    (note,) = [note for note in validate_folder(root, None, ()).notes if "not written" in note]
    assert open_folder(root, verify=False).verified is before
    return note


def test_results_about_another_build_are_not_written(
    root: Path, openvino_runs: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    openvino_runs(False)

    def build_again() -> None:
        (root / OURS).write_bytes((root / OURS).read_bytes() + b"\x00")
        rewrite_manifest(root, lambda manifest: manifest["files"].update({OURS: file_entry(root / OURS)}))

    assert while_it_is_judged(root, monkeypatch, build_again) == (
        "not written into the folder: it was built again since this run began; repeat the command"
    )


def test_a_folder_that_is_locked_for_long_is_left_alone(
    root: Path, openvino_runs: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    openvino_runs(False)
    monkeypatch.setattr(workspace, "PATIENCE_S", 0.1)
    held = workspace._locked(root)
    try:
        note = while_it_is_judged(root, monkeypatch, lambda: None)
    finally:
        os.close(held)
    assert note.endswith("build: another build is writing here; wait for it, or name another -o")


def test_files_that_were_changed_are_not_what_was_built(root: Path, openvino_runs: Here) -> None:
    openvino_runs(False)
    flip(root / OURS)
    found = validate_folder(root, None, ())
    assert (
        f"not written into the folder: {OURS} is not the file that was built, so the results are of another one"
        in found.notes
    )
    assert open_folder(root, verify=False).refused == {}


def test_a_report_that_was_changed_is_not_completed(root: Path, openvino_runs: Here) -> None:
    openvino_runs(False)
    flip(root / "report.html")
    page = (root / "report.html").read_bytes()
    note = "not written into the folder: report.html is not the one that was written; build again"
    assert note in validate_folder(root, None, ()).notes
    assert (root / "report.html").read_bytes() == page


def test_a_part_of_it_completes_nothing(root: Path, openvino_runs: Here) -> None:
    openvino_runs(False)
    note = "not written into the folder: that needs a run over all of it, with its own weights, configuration and text"
    assert note in validate_folder(root, None, ["ort-cpu"]).notes
    config = changed(open_folder(root).config, {"latency/samples": 9})
    assert bench_folder(root, config, ()).notes == [note]
    assert not report_of(root).parity
    assert not report_of(root).latency


# Everything that misses a gate is refused.


def with_changed_weights(root: Path, weights: str = WEIGHTS) -> None:
    """Changes a weight and signs the file, as a tool that writes wrong files would; its fingerprint gives it away."""
    tensors = load_file(root / weights)
    tensors["layers.1.mlp.down_proj.weight"][1, 2:] *= 1.01
    save_file(tensors, root / weights)
    rewrite_manifest(root, lambda manifest: manifest["files"].update({weights: file_entry(root / weights)}))


def test_engines_whose_weights_are_wrong_are_not_served(root: Path, openvino_runs: Here) -> None:
    openvino_runs(False)
    with_changed_weights(root)
    found = validate_folder(root, None, ())
    assert found.verdict.status == "fail"
    assert bench_folder(root, None, ()).notes == []
    refused = open_folder(root).refused
    reason = f"{WEIGHTS}: layers.1.mlp.down_proj.weight: not the checkpoint's values"
    assert reason in refused[OURS]
    report = report_of(root)
    assert all(row.passed for row in report.parity)
    assert report.served == ()
    with pytest.raises(TargetError, match="the float32 engines for ort-cpu missed their gates and are not served"):
        load(root)


def test_a_folder_with_evidence_says_what_is_still_served(small_copy: Path) -> None:
    before = (small_copy / "report.json").read_bytes()
    assert validate_folder(small_copy, None, ()).notes == []
    with_changed_weights(small_copy)
    (note,) = validate_folder(small_copy, None, ()).notes
    assert note.startswith("not written into the folder, whose report is that of its build: engines/ort-cpu/mod-b1s16")
    assert note.endswith(" missed a gate here and is still served; build again on this machine")
    assert (small_copy / "report.json").read_bytes() == before


def test_an_engine_that_looks_ahead_against_its_spec_is_refused(small: Path) -> None:
    build = Build.open(small, None, (), verify=False)
    (engine,) = [one for one in build.engines if one.model == "mod"]
    about = {"bucket": engine.bucket.name, "dtype": engine.dtype, "target": engine.target}
    ahead = causality_row(**about, declared=True, causal=False, earliest_change=3)
    assert refused_by(build, [], [ahead], []) == {
        engine.path: (
            "causality: the spec says that nothing looks ahead, and changing the end of a text changed logits from "
            "position 3 on before the change",
        )
    }
    assert refused_by(build, [], [with_fields(ahead, declared=False), with_fields(ahead, causal=True)], []) == {}

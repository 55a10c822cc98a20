"""Whole sweeps of the tiny model, with failures and resumed, and the output of the command."""

from __future__ import annotations

import fcntl
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from build_folders import upgraded
from command_line import invoke
from rich.console import Console

from mod_export.config import BuildConfig, config_from_toml
from mod_export.folder.manifest import read_manifest
from mod_export.model.model import Model
from mod_export.rows.report import report_from_json
from mod_export.sweep.run import Axes, GridCell, _job, _locked, exit_code_of, sweep
from mod_export.sweep.schema import CellEntry, SweepReport
from mod_export.sweep.show import SweepProgress
from mod_export.types import Bucket
from mod_models.checkpoint import load_checkpoint, save_checkpoint

GOOD, HUGE = "c0.25-b1s16-ort-cpu", "c0.25-b1000000000s16-ort-cpu"


@pytest.mark.slow
def test_a_sweep_goes_on_after_a_failure_and_resumes(checkpoint: Path, fast: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    axes = Axes(capacities=("0.25",), seqs=("16",), batches=("1", "1000000000"))

    def run() -> tuple[SweepReport, list[str]]:
        """Runs the sweep; returns the report, and the first two words of every progress line about a cell."""
        file = io.StringIO()
        progress = SweepProgress(Console(file=file, width=200), 0, "out")
        report = sweep(checkpoint, config_from_toml(fast), folder, axes, None, progress, "mod-export sweep tiny.pt")
        head, *lines = file.getvalue().splitlines()
        return report, [head, *(" ".join(line.split()[1:3]) for line in lines)]

    report, progress_lines = run()
    assert progress_lines == ["2 cells, 0 of them finished before", f"1/2 {GOOD}", f"2/2 {HUGE}"]
    good, huge = report.cells
    assert (good.status, good.passed, good.exit_code) == ("measured", True, 0), good.error
    assert (good.k, good.k_by_layer) == (4, {1: 4, 3: 4})
    (row,) = good.measured
    assert row.speedup.measured == pytest.approx(row.dense_ms / row.mod_ms)
    assert good.quality is not None
    assert good.quality.perplexity > 200
    assert huge.status == "failed"
    assert "of logits, this machine has" in str(huge.error)
    assert exit_code_of(report) == 3
    assert report.model.capacity == 0.125
    assert report.environment["mod_export"]

    # The cell is a separate build of the same checkpoint at another capacity.
    built = report_from_json((folder / good.folder / "report.json").read_text())
    assert built.model.checkpoint_sha256 == report.model.checkpoint_sha256
    # The type of a spec allows any JSON.
    assert built.model.spec["routing"]["capacity"] == 0.25  # type: ignore[index,call-overload]
    assert read_manifest(folder / good.folder)["models"]["mod"]["spec"]["routing"]["capacity"] == 0.25

    read = SweepReport.model_validate_json((folder / "sweep.json").read_text())
    assert read == report
    assert GOOD in {entry.name for entry in read.cells}
    assert "1 could not be built" in (folder / "sweep.html").read_text()
    config = json.loads((folder / f"cells/{GOOD}.job.json").read_text())["config"]
    assert config["latency"]["min_speedup"] == 0.0
    assert config["generation"]["build"] == "never"

    resumed, progress_lines = run()
    assert progress_lines == ["2 cells, 1 of them finished before", f"2/2 {HUGE}"]
    assert resumed.cells[0] == good

    # A cell whose row is lost is done again, and reuses its build folder.
    (folder / f"cells/{GOOD}.json").unlink()
    third = invoke("sweep", checkpoint, "-c", fast, "-o", folder, "--capacity", "0.25")
    assert third.exit_code == 0, third.output
    assert f"PASS  1 of 1 cells measured, every gate met: {folder}/sweep.html" in third.output
    (cell,) = SweepReport.model_validate_json((folder / "sweep.json").read_text()).cells
    assert [(measurement.dense_ms, measurement.mod_ms) for measurement in cell.measured] == [(row.dense_ms, row.mod_ms)]
    assert "reused" in (folder / f"cells/{GOOD}.log").read_text()


def test_exit_codes(cell: Any, failed: CellEntry, missed: CellEntry, report_of: Callable[..., SweepReport]) -> None:
    assert exit_code_of(report_of(cell(8))) == 0
    assert exit_code_of(report_of(cell(8), failed)) == 3
    assert exit_code_of(report_of(failed, missed)) == 4


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ("out/notes.txt", "out: holds files that are no sweep's (notes.txt); name an empty or new folder with -o"),
        ("out", "out: cannot be written ("),
        ("out/.lock", "out: another sweep is at work here; wait for it"),
    ],
)
def test_folders_that_are_refused(checkpoint: Path, fast: Path, tmp_path: Path, there: str, said: str) -> None:
    (tmp_path / there).parent.mkdir(exist_ok=True)
    with (tmp_path / there).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = invoke("sweep", checkpoint, "-c", fast, "-o", tmp_path / "out")
    assert found.exit_code == 2
    assert said in found.output


def test_what_a_killed_sweep_left_is_removed(tmp_path: Path) -> None:
    left = [tmp_path / "out/.partial-ab12/sweep.json", tmp_path / "out/cells/.partial-cd34/c.json"]
    for path in left:
        path.parent.mkdir(parents=True)
        path.write_text("half")
    (tmp_path / "out/sweep.json").write_text("{}")
    with _locked(tmp_path / "out"):
        assert not any(path.parent.exists() for path in left)
        assert (tmp_path / "out/sweep.json").exists()


@pytest.mark.parametrize("package", ["openvino", "onnxruntime_gpu"])
def test_a_cell_of_another_version_of_an_engine_is_done_again(
    package: str, model: Model, checkpoint: Path, config: BuildConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = GridCell(capacity=0.25, bucket=Bucket(1, 16), target="openvino")
    before = _job(cell, model, checkpoint, config, tmp_path, "mod-export sweep", None)
    with upgraded(tmp_path / "upgraded", monkeypatch, package):
        after = _job(cell, model, checkpoint, config, tmp_path, "mod-export sweep", None)
    assert before.fingerprint != after.fingerprint


def test_what_cannot_be_asked_for(checkpoint: Path, fast: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_checkpoint(model, load_checkpoint(checkpoint))
    found = invoke("sweep", model, "-c", fast, "-o", model / "out")
    assert found.exit_code == 2
    assert "out: lies in the checkpoint's own folder; name another folder with -o" in found.output
    found = invoke("sweep", checkpoint, "-c", fast, "-o", model / "out", "--capacity", "7", "--seq", "9999")
    assert found.exit_code == 2
    assert "--seq 9999: longer than the model's 256 positions" in found.output
    assert "--capacity 7: spec.routing.capacity: expected a share in (0, 1], got 7.0" in found.output
    assert not (model / "out").exists()

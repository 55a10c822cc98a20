"""`bench --rivals` on a tiny folder: every program computes the same numbers, and one that cannot run says why."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from command_line import invoke

from mod_export.pipeline import rivals
from mod_export.pipeline.build import Build
from mod_export.pipeline.rerun import bench_folder
from mod_export.pipeline.rivals import RIVALS, Task, measure_rivals
from mod_export.report.text import render_bench
from mod_export.rows.base import PairRow
from mod_export.rows.report import Verdict
from mod_export.rows.speed import RivalRow
from mod_export.types import Bucket

QUICK = ("onnxruntime", "openvino")
NO_BF16 = "RuntimeError: OpenVINO names no BF16 among the capabilities of this processor"


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(rivals, "RIVALS", {name: RIVALS[name] for name in names})
    monkeypatch.setattr(rivals, "FEWEST_ROUNDS", 2)
    monkeypatch.setattr(rivals, "SECONDS_SHARE", 0.0)


def test_programs_are_compared_with_the_engine_of_their_dtype(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, *QUICK)
    rows = list(measure_rivals(Build.open(small, None, (), verify=False)))
    assert [(row.model, row.route) for row in rows] == [
        (kind, route) for kind in ("mod", "dense") for route in ("mod-export, ort-cpu float32", *QUICK)
    ]
    for row in rows:
        assert row.reason is None
        assert row.error is not None
        assert row.error < 1e-5
        assert row.p50_ms == pytest.approx(float(np.median(row.samples_ms)))
        assert len(row.samples_ms) == 4
        if row.version is None:
            assert row.against is None
        else:
            assert row.against == "mod-export, ort-cpu float32"
            assert row.measured is not None
            assert row.ci95 is not None
            assert row.ci95[0] <= row.measured <= row.ci95[1]


def test_what_cannot_run_is_a_reason(small_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, *QUICK)
    (small_copy / "graphs" / "mod-b1s16.onnx").write_bytes(b"not a graph")
    rows = list(measure_rivals(Build.open(small_copy, None, (), verify=False)))
    failed = [row for row in rows if row.p50_ms is None]
    assert [(row.model, row.route) for row in failed] == [("mod", name) for name in QUICK]
    text = render_bench([], Verdict(status="pass", reasons=()), "no baseline", rows)
    for row in failed:
        assert row.reason
        assert f"{row.route}: {row.reason}" in text.splitlines()
    # The engine does not need that graph.
    assert sum(row.p50_ms is not None for row in rows) == 4


def test_a_hint_that_would_change_nothing_is_refused(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the answer of OpenVINO about the processor is replaced: this one may have the instructions."""
    import openvino

    monkeypatch.setattr(openvino.Core, "get_property", lambda core, device, name: ["FP32", "INT8"])
    build = Build.open(small, None, (), verify=False)
    task = Task(small, small / "graphs" / "mod-b1s16.onnx", "mod", Bucket(1, 16), build.config, {})
    with pytest.raises(RuntimeError, match="OpenVINO names no BF16 among the capabilities of this processor"):
        RIVALS["openvino, hint bf16"].open(task)


@pytest.mark.slow
def test_the_command_times_every_program(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "FEWEST_ROUNDS", 2)
    monkeypatch.setattr(rivals, "SECONDS_SHARE", 0.0)
    found = invoke("bench", small, "--rivals")
    assert found.exit_code == 0, found.stderr
    lines = found.stdout.splitlines()
    for kind in ("MoD", "dense"):
        for name, rival in RIVALS.items():
            line = [line for line in lines if f"{kind}  " in line and f" {name}  " in line and rival.dtype in line]
            assert line or f"{name}: {NO_BF16}" in lines, (kind, name)


def test_without_the_option_nothing_else_runs(small: Path) -> None:
    timed = bench_folder(small, None, ())
    assert timed.rows(RivalRow) == []
    assert "other programs" not in render_bench(timed.rows(PairRow), timed.verdict, timed.not_compared)

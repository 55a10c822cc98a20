"""`bench --rivals` on a tiny folder: every program computes the same numbers, and one that cannot run says why."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import FEW_SAMPLES, invoke
from torch import nn

import mod_export
from mod_export.pipeline import rivals
from mod_export.pipeline.build import Build
from mod_export.pipeline.rerun import bench_folder
from mod_export.pipeline.rivals import RIVALS, Task, _distance, measure_rivals
from mod_export.report.text import render_bench
from mod_export.rows.base import PairRow
from mod_export.rows.report import Verdict
from mod_export.rows.speed import RivalRow
from mod_export.types import Bucket

NO_BF16 = "RuntimeError: OpenVINO names no BF16 among the capabilities of this processor"


class Weighted(nn.Module):
    """A quarter of the tokens gets a product, and a second input weighs all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.block = nn.Linear(8, 1), nn.Linear(8, 8)

    def forward(self, stream: torch.Tensor, about: torch.Tensor) -> torch.Tensor:
        scores = self.router(stream)[..., 0]
        index = scores.topk(4, dim=1).indices[..., None].expand(-1, -1, 8)
        chosen = stream.gather(1, index)
        return stream.scatter(1, index, chosen + self.block(chosen)) * about[..., None]


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(rivals, "RIVALS", {name: RIVALS[name] for name in names})
    monkeypatch.setattr(rivals, "FEWEST_ROUNDS", 2)
    monkeypatch.setattr(rivals, "SECONDS_SHARE", 0.0)


@pytest.mark.slow
def test_programs_are_compared_with_the_engine_of_their_dtype(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "openvino")
    rows = list(measure_rivals(Build.open(small, None, (), verify=False)))
    assert [(row.model, row.program) for row in rows] == [
        (kind, route) for kind in ("mod", "dense") for route in ("mod-export, ort-cpu float32", "openvino")
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
    only(monkeypatch, "onnxruntime")
    (small_copy / "graphs" / "mod-b1s16.onnx").write_bytes(b"not a graph")
    rows = list(measure_rivals(Build.open(small_copy, None, (), verify=False)))
    failed = [row for row in rows if row.p50_ms is None]
    assert [(row.model, row.program) for row in failed] == [("mod", "onnxruntime")]
    text = render_bench([], Verdict(status="pass", reasons=()), "no baseline", rows)
    assert failed[0].reason
    assert f"b1s16 MoD onnxruntime: {failed[0].reason}" in text.splitlines()
    # The engine does not need that graph.
    assert sum(row.p50_ms is not None for row in rows) == 3


def test_a_hint_that_would_change_nothing_is_refused(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the answer of OpenVINO about the processor is replaced: this one may have the instructions."""
    import openvino

    monkeypatch.setattr(openvino.Core, "get_property", lambda core, device, name: ["FP32", "INT8"])
    build = Build.open(small, None, (), verify=False)
    task = Task(small, small / "graphs" / "mod-b1s16.onnx", "mod", Bucket(1, 16), (), build.config, {})
    with pytest.raises(RuntimeError, match="OpenVINO names no BF16 among the capabilities of this processor"):
        RIVALS["openvino, hint bf16"].open(task)


@pytest.mark.slow
def test_a_module_with_two_inputs_and_no_baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs reach the module in the order of its arguments, which is not that of the alphabet."""
    only(monkeypatch, "onnxruntime", "torch.compile")
    torch.manual_seed(0)
    (tmp_path / "c.toml").write_text(FEW_SAMPLES, encoding="utf-8")
    mod_export.build(
        Weighted(),
        inputs=lambda batch, seq: {"stream": torch.randn(batch, seq, 8), "about": torch.randn(batch, seq)},
        buckets=[(1, 16)],
        targets="ort-cpu",
        out=tmp_path / "out",
        config=tmp_path / "c.toml",
        name="weighted",
        verbosity=-1,
    )
    rows = list(measure_rivals(Build.open(tmp_path / "out", None, (), verify=False)))
    assert [(row.model, row.program, row.reason) for row in rows] == [
        ("mod", route, None) for route in ("mod-export, ort-cpu float32", "onnxruntime", "torch.compile")
    ]
    assert all(row.error is not None and row.error < 1e-5 for row in rows)


def test_a_folder_without_engines_of_the_cpu_says_so(small_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "CPU_TARGETS", ("openvino", "inductor"))
    timed = bench_folder(small_copy, None, (), rivals=True)
    assert timed.rows(RivalRow) == []
    assert any(note.startswith("no rivals were timed: no engine of ort-cpu, openvino") for note in timed.notes)


def test_an_output_of_another_kind_has_no_distance() -> None:
    reference = np.array([1.0, -np.inf, 3.0], dtype=np.float32)
    assert _distance(reference, reference) == 0
    assert _distance(reference + np.float32(0.5), reference) == pytest.approx(0.5 / np.sqrt(5))
    assert np.isnan(_distance(reference[:2], reference))
    assert np.isnan(_distance(np.array([1.0, 2.0, 3.0], dtype=np.float32), reference))


@pytest.mark.slow
def test_the_command_times_every_program(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, *RIVALS)
    found = invoke("bench", small, "--rivals")
    assert found.exit_code == 0, found.stderr
    lines = found.stdout.splitlines()
    for kind in ("MoD", "dense"):
        for name, rival in RIVALS.items():
            line = [line for line in lines if f"{kind}  " in line and f" {name}  " in line and rival.dtype in line]
            assert line or f"b1s16 {kind} {name}: {NO_BF16}" in lines, (kind, name)


def test_without_the_option_nothing_else_runs(small: Path) -> None:
    timed = bench_folder(small, None, ())
    assert timed.rows(RivalRow) == []
    assert "other programs" not in render_bench(timed.rows(PairRow), timed.verdict, timed.not_compared)

"""The tables of `validate` and `bench`, from the rows of a whole report."""

from __future__ import annotations

from mod_export.config import BuildConfig
from mod_export.measure.latency import LatencyRow
from mod_export.measure.statistics import SpeedupRow
from mod_export.measure.verdict import Verdict
from mod_export.report import BuildReport
from mod_export.report.rows import render_parity, render_speedup
from mod_export.validate.parity import ParityRow

PASSED = Verdict(status="pass", reasons=())


def parity_rows(report: BuildReport) -> list[ParityRow]:
    return [ParityRow(**entry.model_dump()) for entry in report.parity]


def latency_rows(report: BuildReport) -> list[LatencyRow]:
    return [LatencyRow(**entry.model_dump()) for entry in report.latency]


def speedup_rows(report: BuildReport) -> list[SpeedupRow]:
    return [SpeedupRow(**entry.model_dump()) for entry in report.speedup]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_parity(report: BuildReport) -> None:
    head, rule, *lines = render_parity(parity_rows(report), PASSED).splitlines()
    assert cells(head) == [
        "target", "bucket", "dtype", "model", "parity", "routed alike", "near-ties", "max error", "next token"
    ]  # fmt: skip
    assert set(rule) == {"-"}
    assert cells(lines[0]) == ["ort-cpu", "b1s128", "float32", "mod", "pass", "all 384", "0", "6.1e-06", "100 %"]
    assert cells(lines[1]) == ["ort-cpu", "b1s128", "float32", "dense", "pass", "-", "0", "4.8e-06", "100 %"]
    assert lines[-2:] == ["", "PASS"]
    assert len(lines) == len(report.parity) + 2


def test_parity_that_failed(failed_report: BuildReport) -> None:
    verdict = Verdict(status="fail", reasons=("inductor b1s512 float32 mod: parity: text: layer 5 routing",))
    text = render_parity(parity_rows(failed_report), verdict)
    (failed,) = [line for line in text.splitlines() if "FAIL" in line and "inductor" in line]
    assert cells(failed)[4:8] == ["FAIL", "1,533 of 1,536", "1", "3.1e-03"]
    assert text.endswith("\n\n  - inductor b1s512 float32 mod: parity: text: layer 5 routing\nFAIL\n")


def test_speedup(report: BuildReport) -> None:
    head, _, *lines = render_speedup(latency_rows(report), speedup_rows(report), PASSED).splitlines()
    assert cells(head) == [
        "target", "bucket", "dtype", "dense ms", "MoD ms", "speed-up [95 %]", "FLOPs say", "efficiency", "gate"
    ]  # fmt: skip
    for line, row in zip(lines[:-2], report.speedup, strict=True):
        found = cells(line)
        median = {e.model: e.p50_ms for e in report.latency if (e.target, e.bucket) == (row.target, row.bucket)}
        assert found[:3] == [row.target, row.bucket, row.dtype]
        assert float(found[3]) > float(found[4])
        assert abs(float(found[3]) - median["dense"]) < 1
        assert found[5].startswith(f"{row.measured:.2f}x [")
        assert found[6:8] == [f"{row.predicted_flops:.2f}x", f"{row.efficiency:.2f}"]
        # The gate is for the largest bucket.
        assert found[8] == ("1.00x pass" if row.bucket == "b1s512" else "-")
    assert lines[-2:] == ["", "PASS"]


def test_speedup_that_failed(failed_report: BuildReport) -> None:
    verdict = Verdict(status="fail", reasons=("too slow",))
    text = render_speedup(latency_rows(failed_report), speedup_rows(failed_report), verdict)
    assert [line.endswith("1.80x FAIL") for line in text.splitlines()].count(True) == 1
    assert text.endswith("\n\n  - too slow\nFAIL\n")


def test_lines_are_never_wrapped_and_end_without_blanks(report: BuildReport, config: BuildConfig) -> None:
    for text in (
        render_parity(parity_rows(report), PASSED),
        render_speedup(latency_rows(report), speedup_rows(report), PASSED),
    ):
        lines = text.splitlines()
        assert all(line == line.rstrip() for line in lines)
        assert len({line.split()[0] for line in lines[2:-2]} - {"ort-cpu", "inductor"}) == 0


def test_control_characters_of_a_reason_are_shown_harmless(report: BuildReport) -> None:
    verdict = Verdict(status="fail", reasons=("layer \x1b[31mred",))
    assert "\x1b" not in render_parity(parity_rows(report), verdict)


def test_nothing_ran() -> None:
    verdict = Verdict(status="fail", reasons=("nothing that was built can run",))
    for text in (render_parity([], verdict), render_speedup([], [], verdict)):
        assert text.endswith("\n\n  - nothing that was built can run\nFAIL\n")

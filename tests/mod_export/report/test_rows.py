"""The table of `bench`, from the rows of a whole report."""

from __future__ import annotations

from typing import Any

from mod_export.measure.conditions import Conditions
from mod_export.measure.decision import Control
from mod_export.measure.latency import LatencyRow
from mod_export.measure.statistics import SpeedupRow
from mod_export.measure.verdict import Verdict
from mod_export.report import BuildReport
from mod_export.report.remarks import disturbance_lines, reason_lines
from mod_export.report.rows import render_speedup

PASSED = Verdict(status="pass", reasons=())


def latency_rows(report: BuildReport) -> list[LatencyRow]:
    return [LatencyRow(**_nested(entry.model_dump(), "conditions", Conditions)) for entry in report.latency]


def speedup_rows(report: BuildReport) -> list[SpeedupRow]:
    return [SpeedupRow(**_nested(entry.model_dump(), "control", Control)) for entry in report.speedup]


def _nested(fields: dict[str, Any], name: str, kind: type) -> dict[str, Any]:
    return fields | {name: None if fields[name] is None else kind(**fields[name])}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_one_line_for_each_comparison(report: BuildReport) -> None:
    head, rule, *lines = render_speedup(latency_rows(report), speedup_rows(report), PASSED).splitlines()
    assert cells(head) == [
        "target", "bucket", "dtype", "dense ms", "MoD ms", "speed-up [95 %]", "verdict", "control [99 %]", "FLOPs say",
        "efficiency", "gate",
    ]  # fmt: skip
    assert set(rule) == {"-"}
    for line, row in zip(lines[:-2], report.speedup, strict=True):
        found = cells(line)
        median = {e.model: e.p50_ms for e in report.latency if (e.target, e.bucket) == (row.target, row.bucket)}
        assert found[:3] == [row.target, row.bucket, row.dtype]
        assert float(found[3]) > float(found[4])
        assert abs(float(found[3]) - median["dense"]) < 1
        assert found[5].startswith(f"{row.measured:.2f}x [")
        assert found[6:8] == ["faster", "1.002x [0.996, 1.009]"]
        assert found[8:10] == [f"{row.predicted_flops:.2f}x", f"{row.efficiency:.2f}"]
        # The gate is for the largest bucket.
        assert found[10] == ("1.00x pass" if row.bucket == "b1s512" else "-")
    assert lines[-2:] == ["", "PASS"]


def test_what_failed_and_why(failed_report: BuildReport) -> None:
    verdict = Verdict(status="fail", reasons=("too slow",))
    text = render_speedup(latency_rows(failed_report), speedup_rows(failed_report), verdict)
    assert [line.endswith("1.80x FAIL") for line in text.splitlines()].count(True) == 1
    assert text.endswith("\n\n  - too slow\nFAIL\n")
    assert text.split("\n\n")[1].splitlines() == [
        *reason_lines(failed_report.speedup), *disturbance_lines(failed_report.latency)
    ]  # fmt: skip


def test_rows_of_before_there_were_verdicts(report: BuildReport) -> None:
    rows = [
        SpeedupRow(
            target=row.target, bucket=row.bucket, dtype=row.dtype, measured=row.measured, ci95=row.ci95,
            predicted_flops=row.predicted_flops, efficiency=row.efficiency, gate=row.gate, passed=row.passed,
        )
        for row in report.speedup
    ]  # fmt: skip
    _, _, line, *_ = render_speedup(latency_rows(report), rows, PASSED).splitlines()
    assert cells(line)[6:8] == ["-", "-"]


def test_lines_are_never_wrapped_and_end_without_blanks(report: BuildReport) -> None:
    lines = render_speedup(latency_rows(report), speedup_rows(report), PASSED).splitlines()
    assert all(line == line.rstrip() for line in lines)
    assert {line.split()[0] for line in lines[2:-2]} == {"ort-cpu", "inductor"}


def test_control_characters_of_a_reason_are_shown_harmless(report: BuildReport) -> None:
    verdict = Verdict(status="fail", reasons=("layer \x1b[31mred",))
    assert "\x1b" not in render_speedup(latency_rows(report), speedup_rows(report), verdict)


def test_nothing_ran() -> None:
    verdict = Verdict(status="fail", reasons=("nothing that was built can run",))
    assert render_speedup([], [], verdict).endswith("\n\n  - nothing that was built can run\nFAIL\n")

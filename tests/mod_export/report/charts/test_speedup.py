from __future__ import annotations

import math

import pytest

from mod_export.report import BuildReport
from mod_export.report.charts.speedup import speedup_chart
from mod_export.report.latency_entries import SpeedupEntry


def speedup(measured: float, low: float, high: float, gate: float | None = None) -> SpeedupEntry:
    return SpeedupEntry(
        target="t", bucket="b", dtype="float32", measured=measured, ci95=(low, high), predicted_flops=1.7,
        efficiency=measured / 1.7, gate=gate, passed=None,
    )  # fmt: skip


def test_every_number_of_a_row_lies_on_the_axis(report: BuildReport) -> None:
    chart = speedup_chart(report.speedup)
    (low, _), (high, _) = chart.ticks[0], chart.ticks[-1]
    for mark in chart.marks:
        row = mark.row
        assert row.control is not None
        for place, value in (
            (mark.at, row.measured),
            (mark.low, row.ci95[0]),
            (mark.high, row.ci95[1]),
            (mark.predicted, row.predicted_flops),
            (mark.roofline, row.predicted_roofline),
            (mark.gate, row.gate),
            (mark.control_low, row.control.ci99[0]),
            (mark.control_high, row.control.ci99[1]),
        ):
            found = None if place is None else low + place / 100 * (high - low)
            assert found == (None if value is None else pytest.approx(value))


def test_the_gate_of_one_stands_where_nobody_gains() -> None:
    chart = speedup_chart([speedup(1.5, 1.4, 1.6, gate=1.0)])
    assert chart.marks[0].gate == chart.one


def test_what_is_not_finite_is_not_drawn() -> None:
    (mark,) = speedup_chart([speedup(math.nan, math.nan, math.inf)]).marks
    assert (mark.at, mark.low, mark.high, mark.gate, mark.roofline, mark.control_low) == (None,) * 6
    assert mark.predicted is not None


def test_no_speedup_gives_an_empty_chart() -> None:
    assert speedup_chart([]).marks == ()

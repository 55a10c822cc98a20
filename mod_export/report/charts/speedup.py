"""Speed-ups on one common axis: measured with its interval, predicted twice, the control, and the gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mod_export.report.charts.axis import Tick, ratio_axis
from mod_export.report.latency_entries import SpeedupEntry

__all__ = ["SpeedupChart", "SpeedupMark", "speedup_chart"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedupMark:
    """One row of the chart; None where there is no number, or none that is finite and can be drawn."""

    row: SpeedupEntry
    at: float | None
    low: float | None
    high: float | None
    predicted: float | None
    roofline: float | None
    gate: float | None
    control_low: float | None
    control_high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedupChart:
    """`one` is where neither model is faster."""

    marks: tuple[SpeedupMark, ...]
    ticks: tuple[Tick, ...]
    one: float


def speedup_chart(rows: Sequence[SpeedupEntry]) -> SpeedupChart:
    """The axis holds 1 and every number that is drawn."""
    axis = ratio_axis(number for row in rows for number in _numbers(row))
    marks = tuple(
        SpeedupMark(
            row=row,
            at=axis.place(row.measured),
            low=axis.place(row.ci95[0]),
            high=axis.place(row.ci95[1]),
            predicted=axis.place(row.predicted_flops),
            roofline=axis.place(row.predicted_roofline),
            gate=axis.place(row.gate),
            control_low=axis.place(row.control.ci99[0]) if row.control else None,
            control_high=axis.place(row.control.ci99[1]) if row.control else None,
        )
        for row in rows
    )
    return SpeedupChart(marks=marks, ticks=axis.ticks, one=axis.clamped(1.0))


def _numbers(row: SpeedupEntry) -> tuple[float | None, ...]:
    control = row.control.ci99 if row.control else ()
    return (row.measured, *row.ci95, row.predicted_flops, row.predicted_roofline, row.gate, *control)

"""Geometry of the charts of report.html. Every coordinate is a percentage of the chart's width, from 0 to 100."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mod_export.report.cost_entries import CostEntry
from mod_export.report.latency_entries import LatencyEntry, SpeedupEntry
from mod_export.report.summary import Setting

__all__ = [
    "FlopsBar",
    "FlopsChart",
    "LatencyBar",
    "LatencyChart",
    "SpeedupChart",
    "SpeedupMark",
    "flops_charts",
    "latency_charts",
    "speedup_chart",
]

STEPS = (0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
MOST_STEPS = 5
CLOCK_MS = 1e-6
"""Resolution of the clock that samples are taken with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedupMark:
    """One row of the speed-up chart; None where a number is not finite and cannot be drawn."""

    row: SpeedupEntry
    at: float | None
    low: float | None
    high: float | None
    predicted: float | None
    gate: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedupChart:
    """Speed-ups on one common axis; `one` is where neither model is faster."""

    marks: tuple[SpeedupMark, ...]
    ticks: tuple[tuple[float, float], ...]
    one: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyBar:
    """The samples of one model; the bar ends at the median."""

    row: LatencyEntry
    median: float
    samples: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyChart:
    """The models of one setting, the dense one first, on one axis that starts at 0."""

    setting: Setting
    bars: tuple[LatencyBar, ...]
    ticks: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsBar:
    """One model: (part, left edge, width) of every part that costs something."""

    row: CostEntry
    segments: tuple[tuple[str, float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsChart:
    """The models of one bucket on one axis that starts at 0."""

    bucket: str
    bars: tuple[FlopsBar, ...]


def speedup_chart(rows: Sequence[SpeedupEntry]) -> SpeedupChart:
    """The axis holds 1 and every number that is drawn; it does not start at 0, because a ratio has no length."""
    drawn = [1.0]
    for row in rows:
        numbers = (row.measured, *row.ci95, row.predicted_flops, row.gate)
        drawn += [value for value in numbers if value is not None and math.isfinite(value)]
    step = _step(max(drawn) - min(drawn))
    low = max(0.0, math.floor(min(drawn) / step - 0.25) * step)
    high = math.ceil(max(drawn) / step + 0.25) * step

    def place(value: float | None) -> float | None:
        return 100 * (value - low) / (high - low) if value is not None and math.isfinite(value) else None

    marks = tuple(
        SpeedupMark(
            row=row,
            at=place(row.measured),
            low=place(row.ci95[0]),
            high=place(row.ci95[1]),
            predicted=place(row.predicted_flops),
            gate=place(row.gate),
        )
        for row in rows
    )
    count = round((high - low) / step)
    ticks = tuple((low + index * step, 100 * index / count) for index in range(count + 1))
    return SpeedupChart(marks=marks, ticks=ticks, one=100 * (1 - low) / (high - low))


def latency_charts(settings: Sequence[Setting]) -> tuple[LatencyChart, ...]:
    """One chart for each setting that was sampled."""
    return tuple(_latency_chart(setting) for setting in settings if setting.latency)


def _latency_chart(setting: Setting) -> LatencyChart:
    longest = max(CLOCK_MS, *(sample for row in setting.latency for sample in row.samples_ms))
    step = 10 ** math.floor(math.log10(longest))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if longest / s <= MOST_STEPS)
    end = math.ceil(longest / step) * step
    bars = tuple(
        LatencyBar(
            row=row,
            median=100 * row.p50_ms / end,
            samples=tuple(100 * sample / end for sample in row.samples_ms),
        )
        for row in sorted(setting.latency, key=lambda row: row.model)
    )
    count = round(end / step)
    return LatencyChart(
        setting=setting, bars=bars, ticks=tuple((index * step, 100 * index / count) for index in range(count + 1))
    )


def flops_charts(rows: Sequence[CostEntry]) -> tuple[FlopsChart, ...]:
    """One chart for each bucket, the dense model first."""
    charts = []
    for bucket in dict.fromkeys(row.bucket for row in rows):
        chosen = sorted((row for row in rows if row.bucket == bucket), key=lambda row: row.model)
        most = max(1, *(row.flops for row in chosen))
        bars = tuple(FlopsBar(row=row, segments=_segments(row, most)) for row in chosen)
        charts.append(FlopsChart(bucket=bucket, bars=bars))
    return tuple(charts)


def _segments(row: CostEntry, most: int) -> tuple[tuple[str, float, float], ...]:
    segments = []
    left = 0.0
    for part, flops in row.flops_by_part.items():
        width = 100 * flops / most
        if flops:
            segments.append((part, left, width))
        left += width
    return tuple(segments)


def _step(span: float) -> float:
    return next((step for step in STEPS if span / step <= MOST_STEPS), 10 ** math.ceil(math.log10(max(span, 1) / 5)))

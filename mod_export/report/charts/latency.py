"""Samples twice: how they are distributed, on an axis from 0, and in the order they were taken, so that drift shows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from mod_export.artifacts import ModelKind
from mod_export.report.charts.axis import Axis, Tick, length_axis, span_axis
from mod_export.report.latency_entries import LatencyEntry
from mod_export.report.summary import Setting

__all__ = ["LatencyBar", "LatencyChart", "Series", "SeriesChart", "latency_charts"]

CLOCK_MS = 1e-6
"""Resolution of the clock that samples are taken with."""
STRIP_PLACES = 500
"""Samples that fall on the same of so many places of the axis are drawn as one line."""
MOST_BINS = 200
"""More samples than this are drawn as the smallest and the largest sample of each of so many bins."""
NARROWEST, WIDEST = 0.05, 0.5
"""How far from the median, as shares of it, the drawing in order reaches at least and at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyBar:
    """One model's samples as an SVG path in a box of 100 x 1; the bar ends at the median."""

    row: LatencyEntry
    median: float | None
    p90: float | None
    p99: float | None
    low: float | None
    high: float | None
    strip: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One model's samples in the order they were taken, as an SVG path in a box of 100 x 100.

    `bins` are (number of the first sample, of the last, smallest, largest), numbers from 1, milliseconds. `beyond`
    counts the samples that lie outside of the drawing and are drawn at its edge.
    """

    row: LatencyEntry
    path: str
    median: float
    bins: tuple[tuple[int, int, float, float], ...]
    beyond: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesChart:
    """All models of a setting on one axis: samples as shares of each model's own median."""

    series: tuple[Series, ...]
    low: float
    high: float

    @property
    def bins(self) -> int:
        """Places that a reader can point at."""
        return max(len(one.bins) for one in self.series)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyChart:
    """The models of one setting, the dense one first."""

    setting: Setting
    bars: tuple[LatencyBar, ...]
    ticks: tuple[Tick, ...]
    series: SeriesChart | None

    @property
    def flagged(self) -> bool:
        """Whether a reader should look at the samples."""
        return any(bar.row.flags for bar in self.bars)


def latency_charts(settings: Sequence[Setting]) -> tuple[LatencyChart, ...]:
    """One chart for each setting that was sampled."""
    return tuple(_chart(setting) for setting in settings if setting.latency)


def _chart(setting: Setting) -> LatencyChart:
    rows = sorted(setting.latency, key=lambda row: _ORDER[row.model])
    axis = length_axis((sample for row in rows for sample in row.samples_ms), smallest=CLOCK_MS)
    return LatencyChart(
        setting=setting,
        bars=tuple(_bar(row, axis) for row in rows),
        ticks=axis.ticks,
        series=_series_chart([row for row in rows if row.samples_ms and row.p50_ms > 0]),
    )


_ORDER: dict[ModelKind, int] = {"dense": 0, "mod": 1}


def _bar(row: LatencyEntry, axis: Axis) -> LatencyBar:
    places = {round(place * STRIP_PLACES / 100) for place in map(axis.place, row.samples_ms) if place is not None}
    low, high = row.p50_ci95 or (None, None)
    return LatencyBar(
        row=row,
        median=axis.place(row.p50_ms),
        p90=axis.place(row.p90_ms),
        p99=axis.place(row.p99_ms),
        low=axis.place(low),
        high=axis.place(high),
        strip="".join(f"M{100 * place / STRIP_PLACES:g} 0v1" for place in sorted(places)),
    )


def _series_chart(rows: Sequence[LatencyEntry]) -> SeriesChart | None:
    if not rows:
        return None
    shares = [sample / row.p50_ms for row in rows for sample in row.samples_ms if math.isfinite(sample)]
    low = min(1 - NARROWEST, max(1 - WIDEST, min(shares, default=1.0)))
    high = max(1 + NARROWEST, min(1 + WIDEST, max(shares, default=1.0)))
    axis = span_axis(low, high)
    return SeriesChart(series=tuple(_series(row, axis) for row in rows), low=low, high=high)


def _series(row: LatencyEntry, axis: Axis) -> Series:
    count = len(row.samples_ms)
    bins, points, beyond = [], [], 0
    edges = [count * index // min(count, MOST_BINS) for index in range(min(count, MOST_BINS) + 1)]
    for first, end in itertools.pairwise(edges):
        taken = [(index, row.samples_ms[index]) for index in range(first, end)]
        finite = [(index, sample) for index, sample in taken if math.isfinite(sample)]
        smallest = min((sample for _, sample in taken), key=_rank)
        largest = max((sample for _, sample in taken), key=_rank)
        bins.append((first + 1, end, smallest, largest))
        beyond += sum(not axis.low <= sample / row.p50_ms <= axis.high for _, sample in taken)
        extremes = {min(finite, key=lambda one: one[1]), max(finite, key=lambda one: one[1])} if finite else set()
        for index, sample in sorted(extremes):
            points.append((100 * (index + 0.5) / count, 100 - axis.clamped(sample / row.p50_ms)))
    path = "M" + "L".join(f"{x:.4g} {y:.4g}" for x, y in points) if points else ""
    return Series(row=row, path=path, median=100 - axis.clamped(1.0), bins=tuple(bins), beyond=beyond)


def _rank(sample: float) -> tuple[bool, float]:
    return math.isnan(sample), sample

"""Charts of speed: the speed-up with its interval, every sample of latency, and the steps of generation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from mod_export.report.charts import (
    CLOCK_MS,
    CURSOR,
    HALF,
    MODELS,
    Axis,
    Lane,
    axis_around,
    axis_from_zero,
    bar,
    dot,
    flat,
    glyph,
    html,
    key,
    lanes_chart,
    legend,
    name_of,
    stretched,
    upright,
)
from mod_export.report.summary import SettingResults
from mod_export.report.wording import (
    interval_text,
    ms_text,
    ratio_text,
)
from mod_export.rows.speed import DecodeRow, LatencyRow, SpeedupRow
from mod_export.types import ModelKind, Setting

STRIP_PLACES = 500
"""Number of places on an axis. Samples at the same place are drawn as one line."""
MOST_BINS = 200
"""Largest number of bins. With more samples, only the smallest and the largest sample of each bin are drawn."""
NARROWEST, WIDEST = 0.05, 0.5
"""Least and largest distance from the median, as a share of it, that the chart of samples in order shows."""


def speedup_figure(rows: Sequence[SpeedupRow]) -> Markup:
    """Returns a chart of all settings on one axis: measured speed-up, interval, two predictions, control and gate."""
    axis = axis_around([1.0, *(number for row in rows for number in _speedup_numbers(row))], "{:g}x".format)
    lanes = (
        Lane(
            name=html("{}<br><b>{}</b>", row.setting, interval_text(row)),
            told=_speedup_in_words(row),
            height=48,
            marks=[
                upright("one", axis.place(1.0), 0, "100%"),
                upright("gate", axis.place(row.gate), 4, 44),
                flat("control", axis.place(row.control.ci99[0]), axis.place(row.control.ci99[1]), 40),
                flat("interval", axis.place(row.ci95[0]), axis.place(row.ci95[1]), 20),
                dot("point", axis.place(row.measured), 20, 5),
                dot("predicted", axis.place(row.predicted_flops), 20, 8),
                dot("predicted roofline", axis.place(row.predicted_roofline), 20, 8),
            ],
        )
        for row in rows
    )
    signs = [
        (glyph(flat("interval", 0, 100, 7), dot("point", HALF, "50%", 4)), "measured, 95 % interval"),
        (glyph(dot("predicted", HALF, "50%", 5)), "predicted (FLOPs)"),
        (glyph(dot("predicted roofline", HALF, "50%", 5)), "predicted (roofline)"),
        (glyph(flat("control", 0, 100, 7)), "control, 99 % interval"),
        (glyph(upright("one", HALF, 0, "100%")), "1x, no gain"),
        (glyph(upright("gate", HALF, 0, "100%")), "gate"),
    ]
    return legend(signs) + lanes_chart(lanes, axis)


def _speedup_numbers(row: SpeedupRow) -> Iterable[float | None]:
    return (row.measured, *row.ci95, row.predicted_flops, row.predicted_roofline, row.gate, *row.control.ci99)


def _speedup_in_words(row: SpeedupRow) -> str:
    predictions = (("FLOPs", row.predicted_flops), ("the roofline", row.predicted_roofline))
    known = [f"by {source} {ratio_text(ratio)}" for source, ratio in predictions if ratio is not None]
    predicted = f"; predicted {', '.join(known)}" if known else ""
    return (
        f"{row.setting}: speed-up {interval_text(row)}, {row.verdict}{predicted}; control "
        f"{ratio_text(row.control.measured)}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyFigure:
    """The samples of one setting: their distribution, and their values round after round.

    `bins` are, for each model drawn in order, (number of the first sample, number of the last, smallest, largest).
    Numbers start at 1, milliseconds are text. `low` and `high` bound the drawing in order, as shares of a model's own
    median.
    """

    setting: Setting
    rows: tuple[LatencyRow, ...]
    distribution: Markup
    in_order: Markup
    bins: tuple[tuple[tuple[int, int, str, str], ...], ...]
    low: float
    high: float

    @property
    def flagged(self) -> bool:
        """Whether a reader should look at the samples."""
        return any(row.flags for row in self.rows)


def latency_figures(settings: Iterable[SettingResults]) -> tuple[LatencyFigure, ...]:
    """Returns one figure for each setting that was sampled, the dense model first."""
    return tuple(_latency_figure(entry.setting, rows) for entry in settings if (rows := entry.of(LatencyRow)))


def _latency_figure(setting: Setting, measured: Iterable[LatencyRow]) -> LatencyFigure:
    rows = tuple(sorted(measured, key=lambda row: MODELS.index(row.model)))
    axis = axis_from_zero((sample for row in rows for sample in row.samples_ms), smallest=CLOCK_MS, unit=" ms")
    drawn = [row for row in rows if row.samples_ms and row.p50_ms > 0]
    shares = [sample / row.p50_ms for row in drawn for sample in row.samples_ms if math.isfinite(sample)]
    low = min(1 - NARROWEST, max(1 - WIDEST, min(shares, default=1.0)))
    high = max(1 + NARROWEST, min(1 + WIDEST, max(shares, default=1.0)))
    in_order = lanes_chart((_lane_in_order(row, low, high) for row in drawn), None) if drawn else Markup()
    return LatencyFigure(
        setting=setting,
        rows=rows,
        distribution=lanes_chart((_distribution_lane(row, axis) for row in rows), axis),
        in_order=in_order,
        bins=tuple(_bins(row) for row in drawn),
        low=low,
        high=high,
    )


def _distribution_lane(row: LatencyRow, axis: Axis) -> Lane:
    """Returns a lane with a bar up to the median, a thin line for each sample, and ticks at p90 and p99."""
    median = axis.place(row.p50_ms)
    places = {round(place * STRIP_PLACES / 100) for place in map(axis.place, row.samples_ms) if place is not None}
    strip = "".join(f"M{100 * place / STRIP_PLACES:g} 0v1" for place in sorted(places))
    return Lane(
        name=html("{}{} <b>{} ms</b>", key(row.model), name_of(row.model), ms_text(row.p50_ms)),
        told=f"{name_of(row.model)}: median {ms_text(row.p50_ms)} ms, 90th percentile {ms_text(row.p90_ms)} ms, 99th "
        f"{ms_text(row.p99_ms)} ms, {len(row.samples_ms):,} samples",
        height=40,
        marks=[
            bar(f"bar {row.model}", 0, median, 6, 20),
            stretched([(f"sample {row.model}", strip)], (100, 1), 6, 20),
            upright(f"median {row.model}", median, 2, 30),
            upright("quantile", axis.place(row.p90_ms), 29, 38),
            upright("quantile", axis.place(row.p99_ms), 29, 38),
        ],
    )


def _lane_in_order(row: LatencyRow, low: float, high: float) -> Lane:
    """Returns a lane with a curve through the extremes of every bin. Samples outside the drawing are drawn at its edge
    and counted.
    """

    def height(sample: float) -> float:
        return 100 - 100 * (min(high, max(low, sample / row.p50_ms)) - low) / (high - low)

    count = len(row.samples_ms)
    points = []
    for first, end in _edges(count):
        finite = [(index, row.samples_ms[index]) for index in range(first, end) if math.isfinite(row.samples_ms[index])]
        extremes = {min(finite, key=lambda pair: pair[1]), max(finite, key=lambda pair: pair[1])} if finite else set()
        points += [(100 * (index + 0.5) / count, height(sample)) for index, sample in sorted(extremes)]
    beyond = sum(not low <= sample / row.p50_ms <= high for sample in row.samples_ms)
    outside = html("<br><small>{} outside, drawn at the edge</small>", beyond) if beyond else ""
    path = "M" + "L".join(f"{x:.4g} {y:.4g}" for x, y in points) if points else ""
    return Lane(
        name=html("{}{} in order{}", key(row.model), name_of(row.model), outside),
        told=f"{name_of(row.model)}: {count:,} samples in order, drift {100 * row.drift:+.1f} %",
        height=56,
        marks=[
            stretched([("grid", f"M0 {height(row.p50_ms):.4g}H100"), (f"series {row.model}", path)], (100, 100), 0, 56),
            CURSOR,
        ],
        data=name_of(row.model),
    )


def _bins(row: LatencyRow) -> tuple[tuple[int, int, str, str], ...]:
    def rank(sample: float) -> tuple[bool, float]:
        return math.isnan(sample), sample

    return tuple(
        (
            first + 1,
            end,
            ms_text(min(row.samples_ms[first:end], key=rank)),
            ms_text(max(row.samples_ms[first:end], key=rank)),
        )
        for first, end in _edges(len(row.samples_ms))
    )


def _edges(count: int) -> Iterable[tuple[int, int]]:
    bins = min(count, MOST_BINS)
    return itertools.pairwise(count * index // bins for index in range(bins + 1))


def step_figure(steps: SettingResults) -> Markup:
    """Returns a chart of a decode step's time, and of the time that memory takes for its bytes; empty if not timed."""
    row, bucket = steps.written, steps.setting.bucket
    if not isinstance(row, DecodeRow):
        return Markup()
    bound_ms: Mapping[ModelKind, float] = row.predicted_ms or {}
    axis = axis_from_zero([*row.ms.values(), *bound_ms.values()], smallest=CLOCK_MS, unit=" ms")
    texts = f"{bucket.batch} text{'' if bucket.batch == 1 else 's'} of {bucket.seq} tokens"
    lanes = []
    for model in (kind for kind in MODELS if kind in row.ms):
        ms, bound = ms_text(row.ms[model]), bound_ms.get(model)
        memory = "" if bound is None else f", memory takes {ms_text(bound)} ms for its bytes"
        lanes.append(
            Lane(
                name=html("{} <b>{} ms</b>, {:,.0f} tokens/s", name_of(model), ms, row.tokens_per_second[model]),
                told=f"{name_of(model)}, {texts}: {ms} ms a step{memory}",
                height=32,
                marks=[
                    bar(f"bar {model}", 0, axis.place(row.ms[model]), 6, 20),
                    upright(f"median {model}", axis.place(row.ms[model]), 6, 26),
                    upright("bound", axis.place(bound), 2, 30),
                ],
            )
        )
    return lanes_chart(lanes, axis)


def step_legend(*, alone: bool) -> Markup:
    """Returns the common legend of all `step_figure`s; with `alone`, without the dense baseline."""
    models: list[ModelKind] = ["mod"] if alone else ["dense", "mod"]
    memory = (glyph(upright("bound", HALF, 0, "100%")), "predicted (bytes)")
    return legend([*((key(model), name_of(model)) for model in models), memory])

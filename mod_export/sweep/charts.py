"""Geometry of the charts of sweep.html. Coordinates are percentages of the plot, from its lower left corner."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from mod_export.report.wording import ms_text, ratio_text
from mod_export.sweep.findings import Point
from mod_export.sweep.schema import Front, Stair
from mod_export.sweep.text import advice_text, front_text, perplexity_text, share_of

__all__ = ["Mark", "Plot", "Series", "front_plot", "speedup_plots", "stair_plot"]

MOST_TICKS = 5
CHARACTER = 2.8
"""Percent of the width that a character of a label takes on a phone."""
MARGIN = 0.06
Scale = Callable[[float], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One measured value. `strong` marks are what the chart is about; `label` is shown when pointed at."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    strong: bool = True
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Marks of one colour, and the lines (x1, y1, x2, y2) between them."""

    name: str
    marks: tuple[Mark, ...]
    lines: tuple[tuple[float, float, float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """One chart. `level` is a horizontal line of reference, `limit` a vertical one, each with what it is."""

    title: str
    alt: str
    x_name: str
    y_name: str
    x_ticks: tuple[tuple[str, float], ...]
    y_ticks: tuple[tuple[str, float], ...]
    series: tuple[Series, ...]
    level: tuple[str, float] | None = None
    limit: tuple[str, float] | None = None


def speedup_plots(points: Sequence[Point]) -> tuple[Plot, ...]:
    """Speed-up over capacity, one line for each length; over length where there is one capacity only."""
    plots = []
    ordered = sorted(points, key=lambda p: (p.target, p.dtype, p.machine, p.batch, p.seq, p.capacity or 0))
    for (target, dtype, _, batch), found in groupby(ordered, key=lambda p: (p.target, p.dtype, p.machine, p.batch)):
        group = list(found)
        by_capacity = len({p.capacity for p in group}) > 1
        plots.append(_speedups(f"{target} {dtype} batch {batch}", group, by_capacity=by_capacity))
    return tuple(plots)


def stair_plot(stair: Stair) -> Plot:
    """Latency over k; a line joins what costs the same, and the k to take of it is filled."""
    ks = [k for step in stair.steps for k in step.k]
    place_x = _logarithmic(ks)
    bounds = [ms for step in stair.steps for pair in step.ci95_ms for ms in pair]
    y_ticks, place_y = _linear(bounds, ms_text)
    series = []
    for step in stair.steps:
        marks = tuple(
            Mark(
                x=place_x(k),
                y=place_y(ms),
                low=place_y(low),
                high=place_y(high),
                strong=k == step.advised_k,
                label=f"k {k} (capacity {capacity:g}): {ms_text(ms)} ms [{ms_text(low)}, {ms_text(high)}]",
            )
            for k, capacity, ms, (low, high) in zip(step.k, step.capacity, step.ms, step.ci95_ms, strict=True)
        )
        series.append(Series(name="", marks=marks, lines=_joined(marks)))
    return Plot(
        title=_title(stair),
        alt=f"latency of MoD over k for {_title(stair)}: {advice_text(stair)}",
        x_name="k, tokens that a routed layer takes",
        y_name="ms",
        x_ticks=_own_ticks(ks, place_x),
        y_ticks=y_ticks,
        series=tuple(series),
    )


def front_plot(front: Front) -> Plot:
    """Perplexity over latency: down and left is better. Filled marks are on the front."""
    x_ticks, place_x = _linear([*(p.ms for p in front.points), front.dense_ms], ms_text)
    y_ticks, place_y = _linear([p.perplexity for p in front.points], perplexity_text)
    marks = tuple(
        Mark(
            x=place_x(point.ms),
            y=place_y(point.perplexity),
            strong=point.on_front,
            label=f"{front_text(point)}, {ms_text(point.ms)} ms",
        )
        for point in front.points
    )
    on_front = [mark for mark in marks if mark.strong]
    best = ", ".join(share_of(point.capacity) for point in front.points if point.on_front)
    return Plot(
        title=_title(front),
        alt=f"perplexity over latency for {_title(front)}: on the front are the capacities {best}",
        x_name="ms of MoD, less is better",
        y_name="perplexity",
        x_ticks=x_ticks,
        y_ticks=y_ticks,
        series=(Series(name="", marks=marks, lines=_joined(on_front)),),
        limit=("dense twin", place_x(front.dense_ms)),
    )


def _speedups(name: str, points: Sequence[Point], *, by_capacity: bool) -> Plot:
    def x(point: Point) -> float:
        return (point.capacity or 0) if by_capacity else point.seq

    def of_series(point: Point) -> str:
        return f"seq {point.seq}" if by_capacity else f"capacity {share_of(point.capacity)}"

    x_name = "capacity" if by_capacity else "sequence length"
    place_x = _logarithmic([x(p) for p in points])
    y_ticks, place_y = _linear([1.0, *(bound for p in points for bound in (p.low, p.high))], ratio_text)
    series = []
    for series_name, found in groupby(points, key=of_series):
        marks = tuple(
            Mark(
                x=place_x(x(p)),
                y=place_y(p.speedup),
                low=place_y(p.low),
                high=place_y(p.high),
                strong=p.faster,
                label=f"seq {p.seq}, capacity {share_of(p.capacity)}: "
                f"{ratio_text(p.speedup)} [{p.low:.2f}, {p.high:.2f}]",
            )
            for p in found
        )
        series.append(Series(name=series_name, marks=marks, lines=_joined(marks)))
    best = max(points, key=lambda p: p.speedup)
    return Plot(
        title=name,
        alt=f"speed-up over {x_name} for {name}; the largest is {ratio_text(best.speedup)} at seq {best.seq}, "
        f"capacity {share_of(best.capacity)}",
        x_name=x_name,
        y_name="speed-up",
        x_ticks=_own_ticks([x(p) for p in points], place_x),
        y_ticks=y_ticks,
        series=tuple(series),
        level=("1x, no gain", place_y(1.0)),
    )


def _title(found: Stair | Front) -> str:
    return f"{found.target} {found.dtype} batch {found.batch} seq {found.seq}"


def _joined(marks: Sequence[Mark]) -> tuple[tuple[float, float, float, float], ...]:
    return tuple((one.x, one.y, other.x, other.y) for one, other in pairwise(marks))


def _logarithmic(values: Iterable[float]) -> Scale:
    """Capacities and k are tried in ratios. 0 stands where half the smallest other value would."""
    given = set(values)
    least = min((value for value in given if value > 0), default=1.0)
    logs = {value: math.log2(value if value > 0 else least / 2) for value in given}
    low, high = min(logs.values()), max(logs.values())
    if low == high:
        return lambda value: 50.0
    return lambda value: 100 * (MARGIN + (1 - 2 * MARGIN) * (logs[value] - low) / (high - low))


def _linear(values: Sequence[float], text: Callable[[float], str]) -> tuple[tuple[tuple[str, float], ...], Scale]:
    """Ticks around the values, and where a value lies. The axis does not start at 0: differences are the subject."""
    low, high = min(values), max(values)
    span = (high - low) or abs(high) or 1.0
    step = _round_step(span)
    first, last = math.floor(low / step), math.ceil(high / step)
    last = max(last, first + 1)

    def place(value: float) -> float:
        return 100 * (value / step - first) / (last - first)

    return tuple((text(index * step), place(index * step)) for index in range(first, last + 1)), place


def _round_step(span: float) -> float:
    size = 10.0 ** math.floor(math.log10(span))
    return next(s for s in (size / 5, size / 2, size, 2 * size, 5 * size) if span / s <= MOST_TICKS)


def _own_ticks(values: Iterable[float], place: Scale) -> tuple[tuple[str, float], ...]:
    """The values themselves, as far as their labels do not touch."""
    ticks: list[tuple[str, float]] = []
    for value in sorted(set(values)):
        text, at = f"{value:g}", place(value)
        # Labels are centred, with the width of a character between two.
        if not ticks or at - ticks[-1][1] >= CHARACTER * (1 + (len(text) + len(ticks[-1][0])) / 2):
            ticks.append((text, at))
    return tuple(ticks)

"""Renders sweep.html, the sweep as one self-contained page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from markupsafe import Markup

from mod_export.report.charts import Axis, axis_around, axis_of_listed, dot, glyph, html, legend, line, plot
from mod_export.report.pages import render_page
from mod_export.report.tables import table_of
from mod_export.report.wording import ci_text, interval_text, ms_text, ratio_text
from mod_export.sweep.findings import Point, points_of
from mod_export.sweep.schema import Front, Stair, SweepReport
from mod_export.sweep.text import (
    CELL_COLUMNS,
    advice_text,
    capacity_text,
    front_text,
    length_lines,
    lines_of_cells,
    perplexity_text,
    setting_text,
    share_of,
    step_text,
)

SERIES_COLOURS = 6
"""Number of classes series-0, series-1 ... in page.css."""


def render_html(report: SweepReport) -> str:
    """Returns the sweep as one page."""
    findings = report.findings
    return render_page(
        __package__,
        "sweep.html.j2",
        report=report,
        found=findings,
        failed=[cell for cell in report.cells if cell.failed],
        missed=[cell for cell in report.cells if cell.missed],
        break_even=[
            *((setting_text(row), capacity_text(row)) for row in findings.break_even_capacity),
            *length_lines(findings.break_even_length),
        ],
        speedups=speedup_plots(points_of(report.cells)),
        stairs=[(stair_plot(stair), [step_text(step) for step in stair.steps]) for stair in findings.stairs],
        fronts=[
            (front_plot(front), [front_text(point) for point in front.points if point.on_front], front)
            for front in findings.fronts
        ],
        cells=table_of(CELL_COLUMNS, lines_of_cells(report.cells)),
        capacity=share_of,
        perplexity=perplexity_text,
    )


def speedup_plots(points: Sequence[Point]) -> tuple[Markup, ...]:
    """Plots speed-up over capacity, with one line for each length; or over length, if there is only one capacity."""
    plots = []
    ordered = sorted(points, key=lambda p: (*p.setting, p.cell.capacity or 0))
    for (target, dtype, _, batch), members in groupby(ordered, key=lambda p: p.setting[:-1]):
        group = list(members)
        by_capacity = len({p.cell.capacity for p in group}) > 1
        plots.append(_speedup_plot(f"{target} {dtype} batch {batch}", group, by_capacity=by_capacity))
    return tuple(plots)


def stair_plot(stair: Stair) -> Markup:
    """Plots latency over k. A line joins values that cost the same, and the largest k among them is a filled mark."""
    x = axis_of_listed(k for step in stair.steps for k in step.k)
    y = axis_around((ms for step in stair.steps for pair in step.ci95_ms for ms in pair), ms_text)
    marks: list[Markup] = []
    for step in stair.steps:
        rows = zip(step.k, step.capacity, step.ms, step.ci95_ms, strict=True)
        values = [
            _Value(
                k,
                ms,
                k == step.advised_k,
                f"k {k} (capacity {capacity:g}): {ms_text(ms)} ms {ci_text(interval)}",
                interval,
            )
            for k, capacity, ms, interval in rows
        ]
        marks += _series(0, values, values, x, y)
    title = f"{setting_text(stair)} seq {stair.seq}"
    return plot(
        caption=html("<b>{}</b>", title),
        told=f"latency of MoD over k for {title}: {advice_text(stair)}",
        x=x,
        y=y,
        x_name="k, slots of a routed layer",
        y_name="ms",
        marks=marks,
    )


def front_plot(front: Front) -> Markup:
    """Plots perplexity over latency, where lower and further left is better. Filled marks are on the front."""
    x = axis_around([*(p.ms for p in front.points), front.dense_ms], ms_text)
    y = axis_around([p.perplexity for p in front.points], perplexity_text)
    values = [_Value(p.ms, p.perplexity, p.on_front, f"{front_text(p)}, {ms_text(p.ms)} ms") for p in front.points]
    dense = x.clamped(front.dense_ms)
    best = ", ".join(share_of(point.capacity) for point in front.points if point.on_front)
    title = f"{setting_text(front)} seq {front.seq}"
    return plot(
        caption=html("<b>{}</b>", title),
        told=f"perplexity over latency for {title}: on the front are the capacities {best}",
        x=x,
        y=y,
        x_name="ms of MoD, less is better",
        y_name="perplexity",
        marks=[
            line("one", (dense, 0), (dense, 100), "dense baseline"),
            *_series(0, values, [value for value in values if value.filled], x, y),
        ],
    )


def _speedup_plot(name: str, points: Sequence[Point], *, by_capacity: bool) -> Markup:
    def at(point: Point) -> float:
        return (point.cell.capacity or 0) if by_capacity else point.cell.seq

    def of_series(point: Point) -> str:
        return f"seq {point.cell.seq}" if by_capacity else f"capacity {share_of(point.cell.capacity)}"

    x = axis_of_listed(at(p) for p in points)
    y = axis_around([1.0, *(bound for p in points for bound in p.interval)], ratio_text)
    marks, signs = [line("one", (0, y.clamped(1.0)), (100, y.clamped(1.0)), "1x, no gain")], []
    for index, (series, members) in enumerate(groupby(points, key=of_series)):
        values = [
            _Value(at(p), p.speedup, p.faster, f"{_where(p)}: {interval_text(p.row.speedup)}", p.interval)
            for p in members
        ]
        marks += _series(index, values, values, x, y)
        signs.append((glyph(line(f"series-{index % SERIES_COLOURS}", (0, 50), (100, 50))), series))
    best = max(points, key=lambda p: p.speedup)
    x_name = "capacity" if by_capacity else "sequence length"
    return plot(
        caption=html("<b>{}</b>{}", name, legend(signs)),
        told=f"speed-up over {x_name} for {name}; the largest is {ratio_text(best.speedup)} at {_where(best)}",
        x=x,
        y=y,
        x_name=x_name,
        y_name="speed-up",
        marks=marks,
    )


def _where(point: Point) -> str:
    return f"seq {point.cell.seq}, capacity {share_of(point.cell.capacity)}"


class _Value(NamedTuple):
    """One measured value of a series; `told` is shown when a reader points at it."""

    x: float
    y: float
    filled: bool
    told: str
    interval: tuple[float, float] | None = None


def _series(index: int, values: Iterable[_Value], joined: Iterable[_Value], x: Axis, y: Axis) -> list[Markup]:
    """Draws lines between the `joined` values, and each value with its interval, in one colour."""
    kind = f"series-{index % SERIES_COLOURS}"

    def at(value: _Value, height: float) -> tuple[float, float]:
        return x.clamped(value.x), y.clamped(height)

    marks = [line(kind, at(start, start.y), at(end, end.y)) for start, end in pairwise(joined)]
    for value in values:
        if value.interval:
            low, high = value.interval
            marks.append(line(f"{kind} range", at(value, low), at(value, high), value.told))
        hollow = "" if value.filled else " hollow"
        marks.append(dot(kind + hollow, x.clamped(value.x), f"{100 - y.clamped(value.y):.2f}%", 5, value.told))
    return marks

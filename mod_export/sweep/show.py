"""Shows a sweep: one line for each cell while it runs, at the end a table and the findings, and sweep.html."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from markupsafe import Markup
from rich.console import Console

from mod_export.report.charts import Axis, axis_around, axis_of_listed, dot, glyph, html, legend, line, plot
from mod_export.report.pages import render_page
from mod_export.report.tables import Cell, Column, ResultTable, table_of
from mod_export.report.text import render_parts, sections
from mod_export.report.wording import ci_text, count_text, interval_text, ms_text, printable, ratio_text
from mod_export.sweep.findings import Point, points_of
from mod_export.sweep.schema import (
    CapacityBreakEven,
    CellEntry,
    Finding,
    Findings,
    Front,
    FrontPoint,
    LengthBreakEven,
    Measured,
    Stair,
    StairStep,
    SweepReport,
)

SHOWN_CHARACTERS = 160
"""Maximum length of an error while the sweep runs; the result and the log hold all of it."""
SERIES_COLOURS = 6
"""Number of classes series-0, series-1 ... in page.css."""


class SweepProgress:
    """Progress of a sweep. `verbosity` -1 prints nothing, 0 a line for each finished cell, 1 also the path of its log.

    There is no live line: updating it would disturb the latency that is being measured.
    """

    def __init__(self, console: Console, verbosity: int, folder: str) -> None:
        self._console = console
        self._verbosity = verbosity
        self._folder = folder
        self._left = 0
        self._cells = 0

    def planned(self, cells: int, reused: int) -> None:
        self._cells, self._left = cells, cells - reused
        self._say(f"{cells} cells, {reused} of them finished before")

    def cell_finished(self, entry: CellEntry) -> None:
        self._left -= 1
        count = f"{self._cells - self._left}/{self._cells}"
        state = "failed" if entry.failed else "gate failed" if entry.missed else "measured"
        result = ", ".join(f"{row.dtype} {interval_text(row.speedup)}" for row in entry.measured)
        result = result or textwrap.shorten(entry.error or "", SHOWN_CHARACTERS, placeholder=" ...")
        self._say(f"* {count:>7}  {entry.name:<26}  {state:<12}{entry.seconds:>8.1f} s  {printable(result)}".rstrip())
        if self._verbosity > 0:
            self._say(f"    {self._folder}/cells/{entry.name}.log")

    def _say(self, line: str) -> None:
        if self._verbosity >= 0:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)


# Sentences


def perplexity_text(perplexity: float) -> str:
    """Formats a perplexity with three decimals, because capacities differ by little: 5.312, or 1.2e+05."""
    return f"{perplexity:,.3f}" if perplexity < 10_000 else f"{perplexity:.1e}"


def fidelity_text(row: Measured) -> str:
    """Perplexity of the engine divided by that of PyTorch with which the gate compares it, on the texts of the parity
    check.
    """
    return f"{row.text.perplexity / row.text.expected_perplexity(row.dtype):.5f}" if row.text else "-"


def share_of(capacity: float | None) -> str:
    """Returns a capacity as text; `own` stands for the checkpoint's own schedule."""
    return "own" if capacity is None else f"{capacity:g}"


def capacity_text(finding: CapacityBreakEven) -> str:
    """Says up to which capacity MoD is faster than dense."""
    if finding.largest_capacity is None:
        return f"seq {finding.seq}: at no capacity in the grid faster than dense"
    larger = finding.tried[finding.tried.index(finding.largest_capacity) + 1 :]
    tail = f"the next, {larger[0]:g}, is not shown to be" if larger else "every capacity tried"
    k = "" if finding.largest_k is None else f" (k {finding.largest_k})"
    return f"seq {finding.seq}: faster than dense up to capacity {finding.largest_capacity:g}{k}; {tail}"


def length_lines(break_evens: Sequence[LengthBreakEven]) -> list[tuple[str, str]]:
    """Says from which length on MoD is faster: (setting, sentence). Capacities with equal answers share a sentence."""
    capacities: dict[tuple[str, str], list[str]] = {}
    for finding in break_evens:
        if len(finding.tried) > 1:
            capacities.setdefault((setting_text(finding), _length_text(finding)), []).append(share_of(finding.capacity))
    return [(setting, f"capacity {', '.join(names)}: {answer}") for (setting, answer), names in capacities.items()]


def _length_text(finding: LengthBreakEven) -> str:
    if finding.smallest_seq is None:
        return "at no length in the grid faster than dense"
    shorter = finding.tried[: finding.tried.index(finding.smallest_seq)]
    tail = f"{shorter[-1]} is not shown to be" if shorter else "every length tried"
    return f"faster than dense from seq {finding.smallest_seq} on; {tail}"


def break_even_lines(findings: Findings) -> list[tuple[str, str]]:
    """Says where MoD is faster than dense: (setting, sentence), over capacities and then over lengths."""
    over_capacity = [(setting_text(finding), capacity_text(finding)) for finding in findings.break_even_capacity]
    return [*over_capacity, *length_lines(findings.break_even_length)]


def step_text(step: StairStep) -> str:
    """States what the values of k of a step cost, and which one to choose."""
    low, high = ms_text(min(step.ms)), ms_text(max(step.ms))
    cost = f"{low} ms" if low == high else f"{low} to {high} ms"
    ks = list(dict.fromkeys(step.k))
    if len(ks) == 1:
        return f"k {ks[0]}: {cost}"
    return f"k {', '.join(map(str, ks))}: {cost}, the same within the intervals; choose {step.advised_k}"


def advice_text(stair: Stair) -> str:
    """States in one sentence which values of k cost the same."""
    flat = [step for step in stair.steps if len(set(step.k)) > 1]
    if not flat:
        return "every k tried has a latency of its own: none can be raised without cost"
    other_ks = (" or ".join(str(k) for k in dict.fromkeys(step.k) if k != step.advised_k) for step in flat)
    return "; ".join(f"k {k} costs the same as k {step.advised_k}" for k, step in zip(other_ks, flat, strict=True))


def front_text(point: FrontPoint) -> str:
    """Describes one capacity of the front."""
    gain, quality = ratio_text(point.speedup), perplexity_text(point.perplexity)
    return f"capacity {share_of(point.capacity)}: {gain}, perplexity {quality}"


def setting_text(finding: Finding) -> str:
    """Target, dtype and batch, which are equal for all cells of a finding."""
    return f"{finding.target} {finding.dtype} batch {finding.batch}"


# The table and the text


class Line(NamedTuple):
    """A line of the table: a dtype of a cell, or a cell without numbers."""

    cell: CellEntry
    row: Measured | None


def _gates(line: Line) -> Cell:
    text = "failed" if line.cell.failed else "FAIL" if line.cell.missed else "pass"
    return Cell(text, state="pass" if text == "pass" else "fail")


CELL_COLUMNS: tuple[Column[Line], ...] = (
    Column("target", lambda line: line.cell.target, number=False),
    Column("dtype", lambda line: line.row.dtype if line.row else None, number=False),
    Column("bucket", lambda line: f"b{line.cell.batch}s{line.cell.seq}", number=False),
    Column("gates", _gates, number=False),
    Column("capacity", lambda line: share_of(line.cell.capacity)),
    Column("k", lambda line: None if line.cell.k is None else str(line.cell.k)),
    Column("dense ms", lambda line: ms_text(line.row.dense_ms) if line.row else None),
    Column("MoD ms", lambda line: ms_text(line.row.mod_ms) if line.row else None),
    Column("speed-up [95 %]", lambda line: interval_text(line.row.speedup) if line.row else None),
    Column("predicted (FLOPs)", lambda line: _predicted(line.row) if line.row else None),
    Column("perplexity", lambda line: perplexity_text(line.cell.quality.perplexity) if line.cell.quality else None),
    Column("engine / eager", lambda line: fidelity_text(line.row) if line.row else None),
)


def _predicted(row: Measured) -> str | None:
    return None if row.speedup.predicted_flops is None else ratio_text(row.speedup.predicted_flops)


def cells_table(report: SweepReport) -> ResultTable:
    """Returns a table with a line for each measured dtype of each cell, or one line without numbers."""
    return table_of(CELL_COLUMNS, [Line(cell, row) for cell in report.cells for row in cell.measured or (None,)])


def render_text(report: SweepReport, folder: str) -> str:
    """Returns the table, the failures, the findings and the outcome, without wrapping lines."""
    model, findings = report.model, report.findings
    headline = (
        f"{model.name}  {model.architecture}, {count_text(model.parameters)} parameters, "
        f"checkpoint {model.checkpoint_sha256[:12]}"
    )
    parts = sections(
        [headline],
        [cells_table(report)],
        list(_failures(report.cells, folder)),
        _titled(
            "break-even: faster means that the 95 % interval of the speed-up lies above 1",
            (f"  {setting} {sentence}" for setting, sentence in break_even_lines(findings)),
        ),
        _titled(
            "which k to choose: latency of MoD, scaled by the dense baseline so that changes of the machine cancel",
            (text for stair in findings.stairs for text in _stair(stair)),
        ),
        _titled(
            "speed against quality: no other capacity is both faster and better",
            (text for front in findings.fronts for text in _front(front)),
        ),
        [f"note: {note}" for note in findings.notes],
    )
    return render_parts([*parts, _outcome(report, folder)])


def _failures(cells: Sequence[CellEntry], folder: str) -> Iterator[str]:
    for cell in cells:
        if cell.failed:
            yield f"{cell.name} failed: {cell.error}"
            yield f"  log: {folder}/cells/{cell.name}.log"
        for reason in cell.reasons:
            yield f"{cell.name}: {reason}"


def _titled(title: str, lines: Iterable[str]) -> list[str]:
    listed = list(lines)
    return [title, *listed] if listed else []


def _stair(stair: Stair) -> Iterator[str]:
    yield f"  {setting_text(stair)} seq {stair.seq}: {advice_text(stair)}"
    yield from (f"    {step_text(step)}" for step in stair.steps)


def _front(front: Front) -> Iterator[str]:
    yield f"  {setting_text(front)} seq {front.seq}"
    yield from (f"    {front_text(point)}" for point in front.points if point.on_front)
    dominated = [point for point in front.points if not point.on_front]
    if dominated:
        yield f"    not on the front: capacity {', '.join(share_of(point.capacity) for point in dominated)}"


def _outcome(report: SweepReport, folder: str) -> str:
    failed, missed, count = len(report.failed), len(report.missed), len(report.cells)
    if not failed and not missed:
        return f"PASS  {count} of {report.planned} cells measured, every gate met: {folder}/sweep.html"
    return f"FAIL  of {count} cells {failed} could not be built, {missed} missed a gate: {folder}/sweep.html"


# The page


def render_html(report: SweepReport) -> str:
    """Returns the sweep as one page."""
    findings = report.findings
    return render_page(
        __package__,
        "sweep.html.j2",
        report=report,
        findings=findings,
        break_even=break_even_lines(findings),
        speedups=speedup_plots(points_of(report.cells)),
        stairs=[(stair_plot(stair), [step_text(step) for step in stair.steps]) for stair in findings.stairs],
        fronts=[
            (front_plot(front), [front_text(point) for point in front.points if point.on_front], front)
            for front in findings.fronts
        ],
        cells=cells_table(report),
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

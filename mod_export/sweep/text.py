"""Prints a sweep on a console: one line for each cell while it runs, and at the end a table and the findings."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console

from mod_export.report.tables import Cell, Column, table_of
from mod_export.report.text import render_parts
from mod_export.report.wording import count_text, interval_text, ms_text, printable, ratio_text
from mod_export.sweep.schema import (
    CapacityBreakEven,
    CellEntry,
    Finding,
    Front,
    FrontPoint,
    LengthBreakEven,
    Measured,
    Stair,
    StairStep,
    SweepReport,
)

Line = tuple[CellEntry, Measured | None]
SHOWN_CHARACTERS = 160
"""Maximum length of an error while the sweep runs; the result and the log hold all of it."""


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


def render_text(report: SweepReport, folder: str) -> str:
    """Returns the table, the failures, the findings and the outcome, without wrapping lines."""
    model = report.model
    return render_parts(
        [
            f"{model.name}  {model.architecture}, {count_text(model.parameters)} parameters, "
            f"checkpoint {model.checkpoint_sha256[:12]}",
            "",
            table_of(CELL_COLUMNS, lines_of_cells(report.cells)),
            "",
            *_failures(report.cells, folder),
            *_findings(report),
            _outcome(report, folder),
        ]
    )


def perplexity_text(perplexity: float) -> str:
    """Formats a perplexity with three decimals, because capacities differ by little: 5.312, or 1.2e+05."""
    return f"{perplexity:,.3f}" if perplexity < 10_000 else f"{perplexity:.1e}"


def fidelity_text(row: Measured) -> str:
    """Perplexity of the engine divided by that of the eager model, on the texts of the parity check."""
    return f"{row.text.perplexity / row.text.reference_perplexity:.5f}" if row.text else "-"


def share_of(capacity: float | None) -> str:
    """Returns a capacity as text; `own` stands for the checkpoint's own schedule."""
    return "own" if capacity is None else f"{capacity:g}"


def capacity_text(found: CapacityBreakEven) -> str:
    """Says up to which capacity MoD is faster than dense."""
    if found.largest_capacity is None:
        return f"seq {found.seq}: at no capacity in the grid faster than dense"
    larger = found.tried[found.tried.index(found.largest_capacity) + 1 :]
    tail = f"the next, {larger[0]:g}, is not" if larger else "every capacity tried"
    k = "" if found.largest_k is None else f" (k {found.largest_k})"
    return f"seq {found.seq}: faster than dense up to capacity {found.largest_capacity:g}{k}; {tail}"


def length_lines(found: Sequence[LengthBreakEven]) -> list[tuple[str, str]]:
    """Says from which length on MoD is faster: (setting, sentence). Capacities with equal answers share a sentence."""
    capacities: dict[tuple[str, str], list[str]] = {}
    for finding in found:
        if len(finding.tried) > 1:
            capacities.setdefault((setting_text(finding), _length_text(finding)), []).append(share_of(finding.capacity))
    return [(setting, f"capacity {', '.join(names)}: {answer}") for (setting, answer), names in capacities.items()]


def _length_text(found: LengthBreakEven) -> str:
    if found.smallest_seq is None:
        return "at no length in the grid faster than dense"
    shorter = found.tried[: found.tried.index(found.smallest_seq)]
    tail = f"{shorter[-1]} is not" if shorter else "every length tried"
    return f"faster than dense from seq {found.smallest_seq} on; {tail}"


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
    others = (" or ".join(str(k) for k in dict.fromkeys(step.k) if k != step.advised_k) for step in flat)
    return "; ".join(f"k {k} costs the same as k {step.advised_k}" for k, step in zip(others, flat, strict=True))


def front_text(point: FrontPoint) -> str:
    """Describes one capacity of the front."""
    gain, quality = ratio_text(point.speedup), perplexity_text(point.perplexity)
    return f"capacity {share_of(point.capacity)}: {gain}, perplexity {quality}"


def lines_of_cells(cells: Sequence[CellEntry]) -> list[Line]:
    """Returns one line for each measured dtype of each cell, or one line without numbers if there is none."""
    return [(cell, row) for cell in cells for row in cell.measured or (None,)]


def _measured(text: Callable[[Measured], str]) -> Callable[[Line], str]:
    return lambda line: "-" if line[1] is None else text(line[1])


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else ratio_text(ratio)


def _gates(line: Line) -> Cell:
    cell, _ = line
    text = "failed" if cell.failed else "FAIL" if cell.missed else "pass"
    return Cell(text, state="pass" if text == "pass" else "fail")


CELL_COLUMNS: tuple[Column[Line], ...] = (
    Column("target", lambda line: line[0].target, number=False),
    Column("dtype", _measured(lambda row: row.dtype), number=False),
    Column("bucket", lambda line: f"b{line[0].batch}s{line[0].seq}", number=False),
    Column("gates", _gates, number=False),
    Column("capacity", lambda line: share_of(line[0].capacity)),
    Column("k", lambda line: "-" if line[0].k is None else str(line[0].k)),
    Column("dense ms", _measured(lambda row: ms_text(row.dense_ms))),
    Column("MoD ms", _measured(lambda row: ms_text(row.mod_ms))),
    Column("speed-up [95 %]", _measured(lambda row: interval_text(row.speedup))),
    Column("predicted (FLOPs)", _measured(lambda row: _ratio(row.speedup.predicted_flops))),
    Column("perplexity", lambda line: perplexity_text(line[0].quality.perplexity) if line[0].quality else "-"),
    Column("engine / eager", _measured(fidelity_text)),
)


def _failures(cells: Sequence[CellEntry], folder: str) -> Iterator[str]:
    for cell in cells:
        if cell.failed:
            yield f"{cell.name} failed: {cell.error}"
            yield f"  log: {folder}/cells/{cell.name}.log"
        for reason in cell.reasons:
            yield f"{cell.name}: {reason}"
    if any(cell.failed or cell.reasons for cell in cells):
        yield ""


def _findings(report: SweepReport) -> Iterator[str]:
    findings = report.findings
    if findings.break_even_capacity or findings.break_even_length:
        yield "break-even: faster means that the 95 % interval of the speed-up lies above 1"
        yield from (f"  {setting_text(finding)} {capacity_text(finding)}" for finding in findings.break_even_capacity)
        yield from (f"  {setting} {sentence}" for setting, sentence in length_lines(findings.break_even_length))
        yield ""
    if findings.stairs:
        yield "which k to choose: latency of MoD, scaled by the dense baseline so that changes of the machine cancel"
        for stair in findings.stairs:
            yield f"  {setting_text(stair)} seq {stair.seq}: {advice_text(stair)}"
            yield from (f"    {step_text(step)}" for step in stair.steps)
        yield ""
    if findings.fronts:
        yield "speed against quality: no other capacity is both faster and better"
        for front in findings.fronts:
            yield from _front(front)
        yield ""
    if findings.notes:
        yield from (f"note: {note}" for note in findings.notes)
        yield ""


def _front(front: Front) -> Iterator[str]:
    yield f"  {setting_text(front)} seq {front.seq}"
    yield from (f"    {front_text(point)}" for point in front.points if point.on_front)
    others = [point for point in front.points if not point.on_front]
    if others:
        yield f"    not on the front: capacity {', '.join(share_of(point.capacity) for point in others)}"


def setting_text(found: Finding) -> str:
    """Target, dtype and batch, which are equal for all cells of a finding."""
    return f"{found.target} {found.dtype} batch {found.batch}"


def _outcome(report: SweepReport, folder: str) -> str:
    failed, missed = sum(cell.failed for cell in report.cells), sum(cell.missed for cell in report.cells)
    count = len(report.cells)
    if not failed and not missed:
        return f"PASS  {count} of {report.planned} cells measured, every gate met: {folder}/sweep.html"
    return f"FAIL  of {count} cells {failed} could not be built, {missed} missed a gate: {folder}/sweep.html"

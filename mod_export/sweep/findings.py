"""Derives findings from cells: break-even, the stair of latency over k, speed against quality. Pure functions.

Only cells that met their gates count: the speed of a wrong result means nothing. Neither does a speed whose control
fails. A cell that does not count ends a break-even, because it may have been slower than dense. Cells are compared
within one target, dtype, batch and machine.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from mod_export.sweep.schema import (
    CapacityBreakEven,
    CellEntry,
    CellKey,
    Finding,
    Findings,
    Front,
    FrontPoint,
    LengthBreakEven,
    Measured,
    Stair,
    StairStep,
)
from mod_export.types import DType

LARGE_DRIFT = 0.1
"""Limit for the relative change of the dense baseline's medians between cells. Above it, the machine surely changed."""

WIDEST = 0.1
"""Maximum width of the interval of a speed-up, as a share of the speed-up. A wider interval overlaps with all others,
which does not mean that all cost the same."""
AGAIN = "delete their folders below cells/ and repeat the sweep while the machine is quiet"


class Point(NamedTuple):
    """One dtype of one cell that met its gates, with the rows of sweep.json."""

    cell: CellEntry
    row: Measured

    @property
    def speedup(self) -> float:
        return self.row.speedup.measured

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the speed-up."""
        return self.row.speedup.ci95

    @property
    def faster(self) -> bool:
        """Whether the verdict says so."""
        return self.row.speedup.verdict == "faster"

    @property
    def steady(self) -> bool:
        """Whether the interval is narrow enough to compare the point with other cells."""
        low, high = self.interval
        return high - low <= WIDEST * self.speedup

    @property
    def setting(self) -> tuple[Any, ...]:
        """Key that is equal for all points that are compared over capacities."""
        return (*_common(self), self.cell.seq)


class Grid(NamedTuple):
    """All cells of a sweep, also those that were not run, and the rows of those that were."""

    keys: Sequence[CellKey]
    cells: Sequence[CellEntry]

    def tried_with(self, point: Point) -> list[CellKey]:
        """Returns the cells of a point's target and batch, except those that were measured on another machine only."""
        elsewhere = {cell.name for cell in self.cells if not cell.failed and cell.machine != point.cell.machine}
        here = {cell.name for cell in self.cells if cell.machine == point.cell.machine}
        return [
            key
            for key in self.keys
            if (key.target, key.batch) == (point.cell.target, point.cell.batch)
            and (key.name in here or key.name not in elsewhere)
        ]


def findings_of(keys: Sequence[CellKey], cells: Sequence[CellEntry], notes: Sequence[str] = ()) -> Findings:
    """Returns all findings from the rows of cells of a grid, which has all `keys`. Their notes begin with `notes`."""
    points, grid = points_of(cells), Grid(keys, cells)
    all_stairs = stairs(points)
    return Findings(
        break_even_capacity=break_even_capacity(points, grid),
        break_even_length=break_even_length(points, grid),
        stairs=all_stairs,
        fronts=fronts(points),
        notes=(*notes, *_notes(cells, points, all_stairs)),
    )


def points_of(cells: Sequence[CellEntry]) -> list[Point]:
    """Returns a point for each dtype of every cell that met its gates, if its numbers are finite and positive and its
    control covers 1.
    """
    points = [p for p in _that_met_gates(cells) if p.row.speedup.control.covers_one]
    return [p for p in points if all(math.isfinite(n) and n > 0 for n in (p.row.dense_ms, p.speedup, *p.interval))]


def _that_met_gates(cells: Sequence[CellEntry]) -> list[Point]:
    return [Point(cell, row) for cell in cells if not (cell.failed or cell.missed) for row in cell.measured]


def break_even_capacity(points: Sequence[Point], grid: Grid) -> tuple[CapacityBreakEven, ...]:
    """For each length, finds the largest capacity such that it and every smaller one tried are faster than dense."""
    findings = []
    for first, group in _groups([p for p in points if p.cell.capacity is not None], lambda p: p.setting):
        by_capacity = {p.cell.capacity: p for p in group}
        capacities = {key.capacity for key in grid.tried_with(first) if key.seq == first.cell.seq}
        tried = sorted(capacity for capacity in capacities if capacity is not None)
        last = _last_faster(by_capacity.get(capacity) for capacity in tried)
        findings.append(
            CapacityBreakEven(
                **_finding(first),
                seq=first.cell.seq,
                largest_capacity=last.cell.capacity if last else None,
                largest_k=last.cell.k if last else None,
                tried=tuple(tried),
            )
        )
    return tuple(findings)


def break_even_length(points: Sequence[Point], grid: Grid) -> tuple[LengthBreakEven, ...]:
    """For each capacity, finds the smallest length such that it and every longer one tried are faster than dense."""
    findings = []
    for first, group in _groups(points, lambda p: (*_common(p), p.cell.capacity or 0)):
        by_seq = {p.cell.seq: p for p in group}
        tried = sorted({key.seq for key in grid.tried_with(first) if key.capacity == first.cell.capacity})
        last = _last_faster(by_seq.get(seq) for seq in reversed(tried))
        findings.append(
            LengthBreakEven(
                **_finding(first),
                capacity=first.cell.capacity,
                smallest_seq=last.cell.seq if last else None,
                tried=tuple(tried),
            )
        )
    return tuple(findings)


def stairs(points: Sequence[Point]) -> tuple[Stair, ...]:
    """Returns latency over k: one stair for each setting with at least two values of k. Leaves out imprecise cells.

    A step begins with the smallest remaining k. It holds the following values of k until the latency interval of one
    lies above that of the first. All are compared with the first, so a gentle slope is not mistaken for a flat step.
    """
    findings = []
    counted = [p for p in points if p.steady and p.cell.k is not None and p.cell.capacity is not None]
    for first, group in _groups(counted, lambda p: p.setting):
        ascending = sorted(group, key=lambda p: (p.cell.k or 0, p.cell.capacity or 0))
        if len({p.cell.k for p in ascending}) < 2:
            continue
        medians = [p.row.dense_ms for p in ascending]
        steps: list[list[Point]] = []
        for point in ascending:
            # The comparison is on speed-ups, where a higher bound means a lower latency.
            if steps and point.interval[1] >= steps[-1][0].interval[0]:
                steps[-1].append(point)
            else:
                steps.append([point])
        dense_ms = statistics.median(medians)
        findings.append(
            Stair(
                **_finding(first),
                seq=first.cell.seq,
                dense_ms=dense_ms,
                drift=max(medians) / min(medians) - 1,
                steps=tuple(_step(step, dense_ms) for step in steps),
            )
        )
    return tuple(findings)


def fronts(points: Sequence[Point]) -> tuple[Front, ...]:
    """Returns speed against quality: one front for each setting with held-out text and at least two capacities. Leaves
    out imprecise cells.
    """
    findings = []
    for first, group in _groups([p for p in points if p.steady and _perplexity(p) is not None], lambda p: p.setting):
        if len(group) < 2 or first.cell.quality is None:
            continue
        dense_ms = statistics.median(p.row.dense_ms for p in group)
        costs = [(dense_ms / p.speedup, _perplexity(p) or math.inf) for p in group]
        ordered = sorted(zip(costs, group, strict=True), key=lambda pair: pair[0])
        findings.append(
            Front(
                **_finding(first),
                seq=first.cell.seq,
                dense_ms=dense_ms,
                dense_perplexity=first.cell.quality.dense_perplexity,
                tokens=first.cell.quality.tokens,
                points=tuple(
                    FrontPoint(
                        capacity=p.cell.capacity,
                        k=p.cell.k,
                        ms=ms,
                        speedup=p.speedup,
                        perplexity=perplexity,
                        on_front=not any(_dominates(cost, (ms, perplexity)) for cost in costs),
                    )
                    for (ms, perplexity), p in ordered
                ),
            )
        )
    return tuple(findings)


def _notes(cells: Sequence[CellEntry], points: Sequence[Point], stairs: Sequence[Stair]) -> Iterator[str]:
    failed = [cell.name for cell in cells if cell.failed]
    missed = [cell.name for cell in cells if cell.missed]
    if failed:
        yield f"left out, because they could not be built: {', '.join(failed)}"
    if missed:
        yield f"left out, because a gate was not met: {', '.join(missed)}"
    doubtful = [point.cell.name for point in _that_met_gates(cells) if not point.row.speedup.control.covers_one]
    if doubtful:
        yield (
            "left out, because the control misses 1, so the machine showed differences that are not there: "
            f"{', '.join(dict.fromkeys(doubtful))}; {AGAIN}"
        )
    unsteady = list(dict.fromkeys(point.cell.name for point in points if not point.steady))
    if unsteady:
        yield (
            f"not precise enough to be compared with other cells (interval wider than {WIDEST:.0%} of the speed-up): "
            f"{', '.join(unsteady)}; {AGAIN}"
        )
    machines = sorted({cell.machine for cell in cells if not cell.failed})
    if len(machines) > 1:
        yield f"measured on {len(machines)} kinds of machine, which are not compared with each other: " + "; ".join(
            machines
        )
    for stair in stairs:
        if stair.drift > LARGE_DRIFT:
            yield (
                f"{stair.target} {stair.dtype} batch {stair.batch} seq {stair.seq}: the median of the dense "
                f"baseline changed by {stair.drift:.0%} between cells, so the machine was busy or changed its clock. "
                "Speed-ups remain valid, because both models of a cell are sampled alternately, but steps of latency "
                "over k may be hidden or false"
            )


def _step(step: Sequence[Point], dense_ms: float) -> StairStep:
    ks = tuple(p.cell.k for p in step if p.cell.k is not None)
    capacities = tuple(p.cell.capacity for p in step if p.cell.capacity is not None)
    return StairStep(
        k=ks,
        capacity=capacities,
        ms=tuple(dense_ms / p.speedup for p in step),
        ci95_ms=tuple((dense_ms / p.interval[1], dense_ms / p.interval[0]) for p in step),
        advised_k=ks[-1],
        advised_capacity=capacities[-1],
    )


def _dominates(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return a != b and a[0] <= b[0] and a[1] <= b[1]


def _perplexity(point: Point) -> float | None:
    """Perplexity of the cell; None if it is unknown or not finite."""
    quality = point.cell.quality
    return quality.perplexity if quality is not None and math.isfinite(quality.perplexity) else None


def _common(point: Point) -> tuple[str, DType, str, int]:
    return point.cell.target, point.row.dtype, point.cell.machine, point.cell.batch


def _finding(point: Point) -> dict[str, Any]:
    return dict(zip(Finding.model_fields, _common(point), strict=True))


def _groups(points: Iterable[Point], key: Callable[[Point], Any]) -> Iterator[tuple[Point, list[Point]]]:
    """Yields the first point of each group, and the group."""
    for _, group in groupby(sorted(points, key=key), key=key):
        listed = list(group)
        yield listed[0], listed


def _last_faster(points: Iterable[Point | None]) -> Point | None:
    """Returns the last point of the initial run of points that are faster than dense; None if the first is not, or is
    missing.
    """
    last = None
    for point in points:
        if point is None or not point.faster:
            break
        last = point
    return last

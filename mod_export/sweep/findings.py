"""What follows from the cells: break-even, the stair of latency over k, speed against quality. Pure functions.

Only cells that met their gates count: the speed of a wrong result means nothing. Cells are
compared within one target, dtype, batch and machine.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

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
)
from mod_export.types import DType

LARGE_DRIFT = 0.1
"""Of the dense baseline's medians between cells. Beyond it the machine was clearly not the same for all of them."""

WIDEST = 0.1
"""Of an interval of a speed-up, as a share of it. A wider one overlaps with everything, which is not to say that
everything costs the same."""

T = TypeVar("T")


class Point(NamedTuple):
    """One dtype of one cell that met its gates, as both are in sweep.json."""

    cell: CellEntry
    row: Measured

    @property
    def speedup(self) -> float:
        return self.row.speedup.measured

    @property
    def interval(self) -> tuple[float, float]:
        """Of the speed-up, 95 %."""
        return self.row.speedup.ci95

    @property
    def faster(self) -> bool:
        """Whether the whole interval lies above 1."""
        return self.interval[0] > 1

    @property
    def steady(self) -> bool:
        """Whether it was measured well enough to be compared with other cells."""
        low, high = self.interval
        return high - low <= WIDEST * self.speedup

    @property
    def setting(self) -> tuple[Any, ...]:
        """What is the same for all points that are compared over capacities."""
        return (*_common(self), self.cell.seq)


def findings_of(cells: Sequence[CellEntry], notes: Sequence[str] = ()) -> Findings:
    """All findings; `notes` come first among the notes."""
    points = points_of(cells)
    found = stairs(points)
    return Findings(
        break_even_capacity=break_even_capacity(points),
        break_even_length=break_even_length(points),
        stairs=found,
        fronts=fronts(points),
        notes=(*notes, *_notes(cells, points, found)),
    )


def points_of(cells: Sequence[CellEntry]) -> list[Point]:
    """One for each dtype of every cell that was measured and met its gates, where the numbers are finite."""
    points = [Point(cell, row) for cell in cells if not (cell.failed or cell.missed) for row in cell.measured]
    return [p for p in points if all(math.isfinite(n) and n > 0 for n in (p.row.dense_ms, p.speedup, *p.interval))]


def break_even_capacity(points: Sequence[Point]) -> tuple[CapacityBreakEven, ...]:
    """For each length, the largest capacity up to which every one tried is faster than dense."""
    found = []
    for one, group in _groups([p for p in points if p.cell.capacity is not None], lambda p: p.setting):
        ascending = sorted(group, key=lambda p: p.cell.capacity or 0)
        last = _last_of_run(ascending, lambda p: p.faster)
        found.append(
            CapacityBreakEven(
                **_finding(one),
                seq=one.cell.seq,
                largest_capacity=last.cell.capacity if last else None,
                largest_k=last.cell.k if last else None,
                tried=tuple(p.cell.capacity for p in ascending if p.cell.capacity is not None),
            )
        )
    return tuple(found)


def break_even_length(points: Sequence[Point]) -> tuple[LengthBreakEven, ...]:
    """For each capacity, the smallest length from which on every one tried is faster than dense."""
    found = []
    for one, group in _groups(points, lambda p: (*_common(p), p.cell.capacity or 0)):
        descending = sorted(group, key=lambda p: -p.cell.seq)
        last = _last_of_run(descending, lambda p: p.faster)
        found.append(
            LengthBreakEven(
                **_finding(one),
                capacity=one.cell.capacity,
                smallest_seq=last.cell.seq if last else None,
                tried=tuple(p.cell.seq for p in reversed(descending)),
            )
        )
    return tuple(found)


def stairs(points: Sequence[Point]) -> tuple[Stair, ...]:
    """Latency over k, one stair for each setting with two values of k or more. Cells that are not precise enough are
    left out.

    A step begins with the smallest k that is left, and holds every following k whose interval reaches down to that of
    the first. Because all are compared with the first, a slow slope is not mistaken for a flat step.
    """
    found = []
    counted = [p for p in points if p.steady and p.cell.k is not None and p.cell.capacity is not None]
    for one, group in _groups(counted, lambda p: p.setting):
        ascending = sorted(group, key=lambda p: (p.cell.k or 0, p.cell.capacity or 0))
        if len({p.cell.k for p in ascending}) < 2:
            continue
        medians = [p.row.dense_ms for p in ascending]
        steps: list[list[Point]] = []
        for point in ascending:
            # The other way round than speed-ups: a high one is a low latency.
            if steps and point.interval[1] >= steps[-1][0].interval[0]:
                steps[-1].append(point)
            else:
                steps.append([point])
        dense_ms = statistics.median(medians)
        found.append(
            Stair(
                **_finding(one),
                seq=one.cell.seq,
                dense_ms=dense_ms,
                drift=max(medians) / min(medians) - 1,
                steps=tuple(_step(step, dense_ms) for step in steps),
            )
        )
    return tuple(found)


def fronts(points: Sequence[Point]) -> tuple[Front, ...]:
    """Speed against quality, one for each setting that has held-out text and two capacities or more. Cells that
    are not precise enough are left out.
    """
    found = []
    for one, group in _groups([p for p in points if p.steady and _perplexity(p) is not None], lambda p: p.setting):
        if len(group) < 2 or one.cell.quality is None:
            continue
        dense_ms = statistics.median(p.row.dense_ms for p in group)
        costs = [(dense_ms / p.speedup, _perplexity(p) or math.inf) for p in group]
        ordered = sorted(zip(costs, group, strict=True), key=lambda pair: pair[0])
        found.append(
            Front(
                **_finding(one),
                seq=one.cell.seq,
                dense_ms=dense_ms,
                dense_perplexity=one.cell.quality.dense_perplexity,
                tokens=one.cell.quality.tokens,
                points=tuple(
                    FrontPoint(
                        capacity=p.cell.capacity,
                        k=p.cell.k,
                        ms=ms,
                        speedup=p.speedup,
                        perplexity=perplexity,
                        on_front=not any(_dominates(other, (ms, perplexity)) for other in costs),
                    )
                    for (ms, perplexity), p in ordered
                ),
            )
        )
    return tuple(found)


def _notes(cells: Sequence[CellEntry], points: Sequence[Point], found: Sequence[Stair]) -> Iterator[str]:
    failed = [cell.name for cell in cells if cell.failed]
    missed = [cell.name for cell in cells if cell.missed]
    if failed:
        yield f"left out, because they could not be built: {', '.join(failed)}"
    if missed:
        yield f"left out, because a gate was not met: {', '.join(missed)}"
    unsteady = list(dict.fromkeys(point.cell.name for point in points if not point.steady))
    if unsteady:
        yield (
            f"not precise enough to be compared with other cells (interval wider than {WIDEST:.0%} of the speed-up): "
            f"{', '.join(unsteady)}; delete their folders below cells/ and repeat the sweep while the machine is quiet"
        )
    machines = sorted({cell.machine for cell in cells if not cell.failed})
    if len(machines) > 1:
        yield f"measured on {len(machines)} kinds of machine, which are not compared with each other: " + "; ".join(
            machines
        )
    for stair in found:
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


def _dominates(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one != other and one[0] <= other[0] and one[1] <= other[1]


def _perplexity(point: Point) -> float | None:
    """Where it is known, and a number."""
    quality = point.cell.quality
    return quality.perplexity if quality is not None and math.isfinite(quality.perplexity) else None


def _common(point: Point) -> tuple[str, DType, str, int]:
    return point.cell.target, point.row.dtype, point.cell.machine, point.cell.batch


def _finding(point: Point) -> dict[str, Any]:
    return dict(zip(Finding.model_fields, _common(point), strict=True))


def _groups(points: Iterable[Point], key: Callable[[Point], Any]) -> Iterator[tuple[Point, list[Point]]]:
    """The first of each group, and the group."""
    for _, group in groupby(sorted(points, key=key), key=key):
        listed = list(group)
        yield listed[0], listed


def _last_of_run(items: Sequence[T], holds: Callable[[T], bool]) -> T | None:
    """The last item up to which all of them hold; None when the first does not."""
    last = None
    for item in items:
        if not holds(item):
            break
        last = item
    return last

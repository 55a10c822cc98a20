"""What follows from the cells: break-even, the stair of latency over k, speed against quality. Pure functions.

Only cells that met their gates count: the speed of a wrong result means nothing. Cells are
compared within one target, dtype, batch and machine.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

from mod_export.sweep.schema import (
    CapacityBreakEven,
    CellEntry,
    Findings,
    Front,
    FrontPoint,
    LengthBreakEven,
    Quality,
    Stair,
    StairStep,
)
from mod_export.types import DType

__all__ = ["Point", "break_even_capacity", "break_even_length", "findings_of", "fronts", "points_of", "stairs"]

LARGE_DRIFT = 0.1
"""Of the dense baseline's medians between cells. Beyond it the machine was clearly not the same for all of them."""

WIDEST = 0.1
"""Of an interval of a speed-up, as a share of it. A wider one overlaps with everything, which is not to say that
everything costs the same."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One dtype of one cell that met its gates. Medians in milliseconds; `low` and `high` bound the speed-up (95 %)."""

    name: str
    target: str
    dtype: DType
    machine: str
    batch: int
    seq: int
    capacity: float | None
    k: int | None
    dense_ms: float
    speedup: float
    low: float
    high: float
    quality: Quality | None

    @property
    def faster(self) -> bool:
        """Whether the whole interval lies above 1."""
        return self.low > 1

    @property
    def steady(self) -> bool:
        """Whether it was measured well enough to be compared with other cells."""
        return self.high - self.low <= WIDEST * self.speedup


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
    points = [
        Point(
            name=cell.name,
            target=cell.target,
            dtype=row.dtype,
            machine=cell.machine,
            batch=cell.batch,
            seq=cell.seq,
            capacity=cell.capacity,
            k=cell.k,
            dense_ms=row.dense_ms,
            speedup=row.speedup.measured,
            low=row.speedup.ci95[0],
            high=row.speedup.ci95[1],
            quality=cell.quality,
        )
        for cell in cells
        if cell.status == "measured" and cell.passed
        for row in cell.measured
    ]
    return [p for p in points if all(math.isfinite(n) and n > 0 for n in (p.dense_ms, p.speedup, p.low, p.high))]


def break_even_capacity(points: Sequence[Point]) -> tuple[CapacityBreakEven, ...]:
    """For each length, the largest capacity up to which every one tried is faster than dense."""
    found = []
    with_capacity = [point for point in points if point.capacity is not None]
    for one, group in _groups(with_capacity, lambda p: (p.target, p.dtype, p.machine, p.batch, p.seq)):
        ascending = sorted(group, key=lambda p: p.capacity or 0)
        last = _last_of_run(ascending, lambda p: p.faster)
        found.append(
            CapacityBreakEven(
                **_setting(one),
                seq=one.seq,
                largest_capacity=last.capacity if last else None,
                largest_k=last.k if last else None,
                tried=tuple(p.capacity for p in ascending if p.capacity is not None),
            )
        )
    return tuple(found)


def break_even_length(points: Sequence[Point]) -> tuple[LengthBreakEven, ...]:
    """For each capacity, the smallest length from which on every one tried is faster than dense."""
    found = []
    for one, group in _groups(points, lambda p: (p.target, p.dtype, p.machine, p.batch, p.capacity or 0)):
        descending = sorted(group, key=lambda p: -p.seq)
        last = _last_of_run(descending, lambda p: p.faster)
        found.append(
            LengthBreakEven(
                **_setting(one),
                capacity=one.capacity,
                smallest_seq=last.seq if last else None,
                tried=tuple(p.seq for p in reversed(descending)),
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
    placed = [point for point in points if point.steady and point.k is not None and point.capacity is not None]
    for one, group in _groups(placed, _by_setting):
        ascending = sorted(group, key=lambda p: (p.k or 0, p.capacity or 0))
        if len({p.k for p in ascending}) < 2:
            continue
        medians = [p.dense_ms for p in ascending]
        dense_ms = statistics.median(medians)
        steps: list[list[Point]] = []
        for point in ascending:
            if steps and dense_ms / point.high <= dense_ms / steps[-1][0].low:
                steps[-1].append(point)
            else:
                steps.append([point])
        found.append(
            Stair(
                **_setting(one),
                seq=one.seq,
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
    for one, group in _groups([point for point in points if point.steady and _has_quality(point)], _by_setting):
        quality = one.quality
        if len(group) < 2 or quality is None:
            continue
        dense_ms = statistics.median(p.dense_ms for p in group)
        costs = {p: (dense_ms / p.speedup, p.quality.perplexity) for p in group if p.quality}
        found.append(
            Front(
                **_setting(one),
                seq=one.seq,
                dense_ms=dense_ms,
                dense_perplexity=quality.dense_perplexity,
                tokens=quality.tokens,
                points=tuple(
                    FrontPoint(
                        capacity=p.capacity,
                        k=p.k,
                        ms=ms,
                        speedup=p.speedup,
                        perplexity=perplexity,
                        on_front=not any(_dominates(other, (ms, perplexity)) for other in costs.values()),
                    )
                    for p, (ms, perplexity) in sorted(costs.items(), key=lambda item: item[1])
                ),
            )
        )
    return tuple(found)


def _notes(cells: Sequence[CellEntry], points: Sequence[Point], found: Sequence[Stair]) -> Iterator[str]:
    failed = [cell.name for cell in cells if cell.status == "failed"]
    missed = [cell.name for cell in cells if cell.status == "measured" and not cell.passed]
    if failed:
        yield f"left out, because they could not be built: {', '.join(failed)}"
    if missed:
        yield f"left out, because a gate was not met: {', '.join(missed)}"
    unsteady = list(dict.fromkeys(point.name for point in points if not point.steady))
    if unsteady:
        yield (
            f"not precise enough to be compared with other cells (interval wider than {WIDEST:.0%} of the speed-up): "
            f"{', '.join(unsteady)}; delete their folders below cells/ and repeat the sweep while the machine is quiet"
        )
    machines = sorted({cell.machine for cell in cells if cell.status == "measured"})
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
    last = step[-1]
    assert last.k is not None
    assert last.capacity is not None
    return StairStep(
        k=tuple(p.k for p in step if p.k is not None),
        capacity=tuple(p.capacity for p in step if p.capacity is not None),
        ms=tuple(dense_ms / p.speedup for p in step),
        ci95_ms=tuple((dense_ms / p.high, dense_ms / p.low) for p in step),
        advised_k=last.k,
        advised_capacity=last.capacity,
    )


def _dominates(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one != other and one[0] <= other[0] and one[1] <= other[1]


def _has_quality(point: Point) -> bool:
    return point.quality is not None and math.isfinite(point.quality.perplexity)


def _by_setting(point: Point) -> tuple[Any, ...]:
    return (point.target, point.dtype, point.machine, point.batch, point.seq)


def _setting(point: Point) -> dict[str, Any]:
    return {name: getattr(point, name) for name in ("target", "dtype", "machine", "batch")}


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

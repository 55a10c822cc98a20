"""Break-even, the stair and the front, on chosen latencies with a known answer."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mod_export.sweep.findings import (
    break_even_capacity,
    break_even_length,
    findings_of,
    fronts,
    points_of,
    stairs,
)
from mod_export.sweep.schema import CellEntry


@pytest.mark.parametrize(
    ("speedups", "k"),
    [
        ({64: 0.9, 8: 2.0, 16: 1.5, 32: 1.01}, 16),
        # A larger capacity that happens to be faster says nothing about a smaller one that is not.
        ({8: 1.2, 16: 0.99, 32: 1.2}, 8),
        ({8: 0.9, 16: 1.5}, None),
    ],
)
def test_break_even_is_the_last_capacity_of_a_run_of_faster_ones(
    cell: Any, speedups: dict[int, float], k: int | None
) -> None:
    (found,) = break_even_capacity(points_of([cell(*item) for item in speedups.items()]))
    assert (found.largest_k, found.largest_capacity) == (k, k and k / 128)
    assert found.tried == tuple(item / 128 for item in sorted(speedups))


def test_break_even_length_is_the_first_from_which_all_are_faster(cell: Any) -> None:
    cells = [cell(8, 1.5, seq=64), cell(16, 0.9, seq=128), cell(32, 1.3, seq=256), cell(64, 1.6, seq=512)]
    (found,) = break_even_length(points_of(cells))
    assert found.capacity == 0.125
    assert found.smallest_seq == 256
    assert found.tried == (64, 128, 256, 512)
    (nowhere,) = break_even_length(points_of([cell(8, 0.9, seq=64)]))
    assert nowhere.smallest_seq is None


def test_targets_batches_and_machines_are_kept_apart(cell: Any) -> None:
    cells = [cell(8, 2.0), cell(16, 0.5, target="inductor"), cell(32, 0.5, batch=2), cell(64, 0.5, machine="other")]
    found = break_even_capacity(points_of(cells))
    assert [(stair.target, stair.batch, stair.machine, stair.largest_k) for stair in found] == [
        ("inductor", 1, "a CPU, 2 cores", None),
        ("ort-cpu", 1, "a CPU, 2 cores", 8),
        ("ort-cpu", 2, "a CPU, 2 cores", None),
        ("ort-cpu", 1, "other", None),
    ]


def test_a_step_is_what_costs_the_same(cell: Any) -> None:
    cells = [cell(8, 2.0), cell(12, 2.01), cell(16, 1.99), cell(17, 1.6), cell(24, 1.61), cell(64, 1.0)]
    (stair,) = stairs(points_of(cells))
    assert [step.k for step in stair.steps] == [(8, 12, 16), (17, 24), (64,)]
    assert [step.advised_k for step in stair.steps] == [16, 24, 64]
    assert stair.steps[0].advised_capacity == 0.125
    assert stair.steps[0].ms[0] == pytest.approx(5.0)
    low, high = stair.steps[0].ci95_ms[0]
    assert low < 5.0 < high


def test_a_slow_slope_is_no_flat_step(cell: Any) -> None:
    """Within its interval each k costs as much as its neighbour, but the last is far from the first."""
    cells = [cell(8 + i, 2.0 - 0.03 * i, width=0.02) for i in range(7)]
    (stair,) = stairs(points_of(cells))
    assert [step.k for step in stair.steps] == [(8, 9), (10, 11), (12, 13), (14,)]


def test_the_drift_of_the_machine_is_taken_out(cell: Any) -> None:
    """The second cell ran while everything took twice as long; only its ratio shows the cost of k."""
    (stair,) = stairs(points_of([cell(8, 2.0, dense_ms=10.0), cell(16, 2.0, dense_ms=20.0)]))
    assert [step.k for step in stair.steps] == [(8, 16)]
    assert stair.drift == pytest.approx(1.0)
    assert stair.dense_ms == 15.0
    assert stair.steps[0].ms == pytest.approx((7.5, 7.5))


def test_an_imprecise_cell_says_nothing_about_others(cell: Any) -> None:
    """Its interval overlaps with all others, so every k would seem to cost the same."""
    wide = cell(16, 2.3, width=0.7, perplexity=1.0, name="wide")
    cells = [cell(8, 2.0, perplexity=3.0), wide, cell(32, 1.0, perplexity=2.0)]
    found = findings_of(cells)
    assert [step.k for stair in found.stairs for step in stair.steps] == [(8,), (32,)]
    assert [point.k for point in found.fronts[0].points] == [8, 32]
    assert found.break_even_capacity[0].tried == (0.0625, 0.125, 0.25)
    (note,) = found.notes
    assert note.startswith(
        "not precise enough to be compared with other cells (interval wider than 10% of the speed-up): wide;"
    )


def test_the_front_is_what_nothing_beats_in_both(cell: Any) -> None:
    cells = [cell(8, 2.0, perplexity=9.0), cell(16, 1.8, perplexity=7.0), cell(64, 1.1, perplexity=8.0)]
    (front,) = fronts(points_of(cells))
    assert [(point.k, point.on_front) for point in front.points] == [(8, True), (16, True), (64, False)]
    assert front.dense_perplexity == 40.0
    (equal,) = fronts(points_of([cell(8, 2.0, perplexity=9.0), cell(16, 2.0, perplexity=9.0)]))
    assert [point.on_front for point in equal.points] == [True, True]


def test_what_says_nothing(cell: Any) -> None:
    assert points_of([cell(8, math.nan), cell(16, math.inf), cell(24, dense_ms=0.0)]) == []
    assert stairs(points_of([cell(8), cell(8, capacity=0.06)])) == ()
    assert fronts(points_of([cell(8), cell(16)])) == ()
    assert fronts(points_of([cell(8, perplexity=math.inf), cell(16, perplexity=3.0)])) == ()


def test_what_failed_or_is_wrong_counts_for_nothing_and_is_named(
    cell: Any, failed: CellEntry, missed: CellEntry
) -> None:
    found = findings_of([cell(8, 0.9), missed, failed], ["first"])
    (break_even,) = found.break_even_capacity
    assert break_even.tried == (0.0625,)
    assert found.notes == (
        "first",
        "left out, because they could not be built: c0.125-b2s128-ort-cpu",
        "left out, because a gate was not met: c9-wrong",
    )


def test_other_machines_and_large_drift_are_noted(cell: Any) -> None:
    cells = [cell(8), cell(16, dense_ms=12.0), cell(8, machine="other")]
    machines, drift = findings_of(cells).notes
    assert machines == "measured on 2 kinds of machine, which are not compared with each other: a CPU, 2 cores; other"
    assert drift.startswith(
        "ort-cpu float32 batch 1 seq 128: the median of the dense baseline changed by 20% between cells"
    )


def test_a_schedule_has_a_length_but_no_capacity(cell: Any) -> None:
    uneven = {"k": None, "capacity": None, "k_by_layer": {1: 8, 3: 4}}
    cells = [cell(8, 2.0).model_copy(update=uneven), cell(8, 0.9, seq=64).model_copy(update=uneven)]
    points = points_of(cells)
    assert break_even_capacity(points) == stairs(points) == ()
    (length,) = break_even_length(points)
    assert (length.capacity, length.smallest_seq) == (None, 128)

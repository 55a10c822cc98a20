"""Break-even, the stair and the front, on chosen latencies with a known answer."""

from __future__ import annotations

import math
from typing import Any

import pytest
from sample_rows import changed

from mod_export.rows.speed import Control
from mod_export.sweep.findings import (
    Grid,
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
    cells = [cell(*item) for item in speedups.items()]
    (found,) = break_even_capacity(points_of(cells), Grid(cells, cells))
    assert (found.largest_k, found.largest_capacity) == (k, k and k / 128)
    assert found.tried == tuple(item / 128 for item in sorted(speedups))


def with_control(cell: CellEntry, ratio: float) -> CellEntry:
    """The cell, with a control of this ratio, and the verdict that follows."""
    control = Control(measured=ratio, ci99=(ratio - 0.01, ratio + 0.01), covers_one=abs(ratio - 1) <= 0.01)
    verdict = cell.measured[0].speedup.verdict if control.covers_one else "inconclusive"
    speedup = changed(cell.measured[0].speedup, control=control, verdict=verdict)
    return changed(cell, measured=(changed(cell.measured[0], speedup=speedup),))


def test_a_machine_that_shows_differences_that_are_not_there_finds_nothing(cell: Any) -> None:
    doubtful = with_control(cell(16, 2.0, perplexity=2.0, name="doubtful"), 1.2)
    cells = [with_control(cell(8, 2.0, perplexity=3.0), 1.005), doubtful, cell(32, 1.5, perplexity=1.0)]
    found = findings_of(cells, cells)
    (break_even,) = found.break_even_capacity
    assert (break_even.largest_k, break_even.tried) == (8, (0.0625, 0.125, 0.25))
    assert [step.k for stair in found.stairs for step in stair.steps] == [(8,), (32,)]
    assert [point.k for point in found.fronts[0].points] == [8, 32]
    assert found.notes == (
        "left out, because the control misses 1, so the machine showed differences that are not there: doubtful; "
        "delete their folders below cells/ and repeat the sweep while the machine is quiet",
    )


def test_a_cell_that_does_not_count_ends_a_break_even(cell: Any) -> None:
    """Between two capacities that are faster, one may not be."""
    lost = {"status": "failed", "measured": (), "passed": False}
    middle = [cell(16, 2.0), cell(16, 2.0, **lost), cell(16, 2.0, passed=False)]
    for between, largest in zip(middle, (32, 8, 8), strict=True):
        cells = [cell(8, 2.0), between, cell(32, 2.0)]
        (found,) = findings_of(cells, cells).break_even_capacity
        assert (found.largest_k, found.tried) == (largest, (0.0625, 0.125, 0.25))
    # A sweep that goes on has no row of it yet.
    (found,) = findings_of(cells, [cells[0], cells[2]]).break_even_capacity
    assert (found.largest_k, found.tried) == (8, (0.0625, 0.125, 0.25))
    lengths = [cell(8, 2.0, seq=64), cell(16, 2.0, seq=128, **lost), cell(32, 2.0, seq=256)]
    (length,) = findings_of(lengths, lengths).break_even_length
    assert (length.smallest_seq, length.tried) == (256, (64, 128, 256))


def test_break_even_length_is_the_first_from_which_all_are_faster(cell: Any) -> None:
    cells = [cell(8, 1.5, seq=64), cell(16, 0.9, seq=128), cell(32, 1.3, seq=256), cell(64, 1.6, seq=512)]
    (found,) = break_even_length(points_of(cells), Grid(cells, cells))
    assert found.capacity == 0.125
    assert found.smallest_seq == 256
    assert found.tried == (64, 128, 256, 512)
    slow = [cell(8, 0.9, seq=64)]
    (nowhere,) = break_even_length(points_of(slow), Grid(slow, slow))
    assert nowhere.smallest_seq is None


def test_targets_batches_and_machines_are_kept_apart(cell: Any) -> None:
    cells = [cell(8, 2.0), cell(16, 0.5, target="inductor"), cell(32, 0.5, batch=2), cell(64, 0.5, machine="other")]
    found = break_even_capacity(points_of(cells), Grid(cells, cells))
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
    found = findings_of(cells, cells)
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
    cells = [cell(8, 0.9), missed, failed]
    found = findings_of(cells, cells, ["first"])
    (break_even,) = found.break_even_capacity
    assert break_even.tried == (0.0625, 0.125)
    assert found.notes == (
        "first",
        "left out, because they could not be built: c0.125-b2s128-ort-cpu",
        "left out, because a gate was not met: c9-wrong",
    )


def test_other_machines_and_large_drift_are_noted(cell: Any) -> None:
    cells = [cell(8), cell(16, dense_ms=12.0), cell(8, machine="other")]
    machines, drift = findings_of(cells, cells).notes
    assert machines == "measured on 2 kinds of machine, which are not compared with each other: a CPU, 2 cores; other"
    assert drift.startswith(
        "ort-cpu float32 batch 1 seq 128: the median of the dense baseline changed by 20% between cells"
    )


def test_a_schedule_has_a_length_but_no_capacity(cell: Any) -> None:
    uneven = {"k": None, "capacity": None, "k_by_layer": {1: 8, 3: 4}}
    cells = [cell(8, 2.0).model_copy(update=uneven), cell(8, 0.9, seq=64).model_copy(update=uneven)]
    points, grid = points_of(cells), Grid(cells, cells)
    assert break_even_capacity(points, grid) == stairs(points) == ()
    (length,) = break_even_length(points, grid)
    assert (length.capacity, length.smallest_seq) == (None, 128)

"""From rows of latency and cost to rows of speed-up, on samples with a known answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from sample_rows import changed, cost_row, latency_row, part_row

from mod_export.config import LatencyOptions
from mod_export.errors import GraphError
from mod_export.measure.verdict import gate_of, gated_bucket, is_undisturbed, speedup_rows
from mod_export.rows.speed import Control, LatencyRow, SpeedupRow
from mod_export.types import Bucket, ModelKind

SMALL, LARGE = Bucket(1, 128), Bucket(1, 512)


def latency(model: ModelKind, samples_ms: Sequence[float], bucket: Bucket = LARGE, **fields: Any) -> LatencyRow:
    return latency_row(tuple(samples_ms), model=model, bucket=bucket.name, **fields)


COSTS = [
    cost_row(gflops * 10**9, model=model, bucket=bucket.name)
    for model, gflops, bucket in (("dense", 200, LARGE), ("mod", 100, LARGE), ("dense", 60, SMALL), ("mod", 50, SMALL))
]


def rows_of(latencies: Sequence[LatencyRow], min_speedup: float = 1.0, **known: Any) -> tuple[SpeedupRow, ...]:
    options = LatencyOptions(min_speedup=min_speedup, bootstrap=200)
    return speedup_rows(latencies, COSTS, [SMALL, LARGE], options, seed=0, **known)


def pair(ratio: float, bucket: Bucket = LARGE) -> list[LatencyRow]:
    return [latency("dense", [ratio] * 8, bucket), latency("mod", [1.0] * 8, bucket)]


def noisy(ratio: float) -> list[LatencyRow]:
    """Latency rows whose medians have this ratio; their samples vary from a fifth to five times the median."""
    wild = [0.2, 5.0, 1.0, 1.0, 5.0, 0.2, 0.2, 5.0]
    return [latency("dense", [ratio * ms for ms in wild]), latency("mod", wild[::-1])]


def test_rows_hold_ratio_prediction_and_efficiency() -> None:
    (row,) = rows_of([latency("dense", [3.0] * 8), latency("mod", [2.0] * 8)])
    assert row == SpeedupRow(
        target="ort-cpu", bucket="b1s512", dtype="float32", measured=1.5, ci95=(1.5, 1.5), predicted_flops=2.0,
        efficiency=0.75, gate=1.0, passed=True, predicted_roofline=None, verdict="faster", reason=None,
        control=Control(measured=1.0, ci99=(1.0, 1.0), covers_one=True),
    )  # fmt: skip


def test_the_gate_applies_to_the_largest_bucket_only() -> None:
    both = [*pair(0.5, SMALL), *pair(2.0)]
    assert [(row.gate, row.passed) for row in rows_of(both)] == [(None, None), (1.0, True)]
    assert [(row.gate, row.passed) for row in rows_of(both, min_speedup=2.5)] == [(None, None), (2.5, False)]
    assert [(row.gate, row.passed) for row in rows_of(both, min_speedup=0)] == [(None, None)] * 2
    assert gate_of(LARGE, [SMALL, LARGE], 1.3) == 1.3
    assert gate_of(SMALL, [SMALL, LARGE], 1.3) is gate_of(LARGE, [SMALL, LARGE], 0.0) is None
    # The bucket with most tokens is gated; among equals, the one with the longest rows.
    assert gated_bucket([Bucket(8, 128), LARGE]) == Bucket(8, 128)
    assert gated_bucket([Bucket(4, 128), LARGE]) == LARGE


@pytest.mark.parametrize(("measured", "passed"), [(1.0, True), (1.0 + 2**-40, True), (1.0 - 2**-40, False)])
def test_the_gate_is_met_at_its_own_value(measured: float, passed: bool) -> None:
    assert rows_of(pair(measured))[0].passed is passed


@pytest.mark.parametrize("bucket", [SMALL, LARGE])
def test_nan_fails_with_a_gate_and_without(bucket: Bucket) -> None:
    (row,) = rows_of(pair(math.nan, bucket))
    assert (str(row.measured), row.verdict, row.passed) == ("nan", "inconclusive", False)


def test_what_is_not_faster_is_explained_from_its_cost() -> None:
    (small, large) = rows_of([*pair(0.98, SMALL), *pair(1.0)], k_by_layer={SMALL: {1: 16, 3: 16}})
    assert small.verdict == large.verdict == "not faster"
    assert small.reason == (
        "FLOPs predict 1.20x; routed layers multiply 16 rows at a time (k = 16 of 128), which takes hardly less time "
        "than more rows would"
    )
    assert large.reason == (
        "FLOPs predict 2.00x; no cause that can be counted explains the rest; a profile of the engine may show one"
    )


def test_the_whole_interval_must_reach_the_gate() -> None:
    (row,) = rows_of(noisy(1.5))
    assert row.ci95[0] < 1 < row.measured < row.ci95[1]
    assert (row.verdict, row.passed) == ("inconclusive", False)
    assert rows_of(noisy(1.5), min_speedup=0)[0].passed is None
    assert (row.reason or "").startswith("the interval 0.")
    assert (row.reason or "").endswith(" of 8 samples allows both")
    (row,) = rows_of([changed(row, flags=("others took 60 % of the machine's CPU time",)) for row in noisy(1.0)])
    assert (row.reason or "").endswith(" of 8 samples allows both (others took 60 % of the machine's CPU time)")


def test_a_control_that_misses_one_is_the_reason() -> None:
    # Second turns take twice as long, so something is wrong with the machine or with the method.
    (row,) = rows_of([latency("dense", [9.0] * 8), latency("mod", [1.0, 2.0] * 4)])
    assert (row.verdict, row.passed) == ("inconclusive", False)
    assert row.reason == (
        "the control does not cover 1: the MoD engine against itself is 0.500x (99 % interval 0.500 to 0.500), so this "
        "machine shows differences that are not there"
    )


def test_a_roofline_predicts_where_both_models_have_one() -> None:
    parts = [
        part_row(model="dense", predicted_ms=9.0),
        part_row(predicted_ms=2.0),
        part_row(part="head", predicted_ms=4.0),
    ]
    found = rows_of([*pair(2.0, SMALL), *pair(2.0)], parts=parts)
    assert [row.predicted_roofline for row in found] == [None, 1.5]
    assert rows_of(pair(2.0), parts=parts[:1])[0].predicted_roofline is None


def test_flops_of_the_graphs_that_run_come_before_those_of_the_portable_ones() -> None:
    dense, mod = (row.setting for row in pair(2.0))
    assert rows_of(pair(2.0), flops={dense: 300, mod: 100})[0].predicted_flops == 3.0
    assert rows_of(pair(2.0), flops={dense: 300})[0].predicted_flops == 2.0


def test_a_row_gives_one_prediction() -> None:
    dense, mod = (row.setting for row in pair(1.0))
    (row,) = rows_of(pair(1.0), flops={dense: 300, mod: 100})
    assert (row.verdict, row.predicted_flops) == ("not faster", 3.0)
    assert (row.reason or "").startswith("FLOPs predict 3.00x; ")


@pytest.mark.parametrize(
    ("fields", "sound"),
    [
        ({}, True),
        ({"other_load": 0.6}, False),
        # A laptop's clock always varies, and the engine's own threads disturb nobody.
        ({"frequency_mhz": (3000.0, 2000.0)}, True),
        ({"threads_used": 2.0}, True),
    ],
)
def test_a_timing_on_a_busy_machine_shows_it(fields: dict[str, Any], sound: bool) -> None:
    rows = [changed(row, conditions=changed(row.conditions, **fields)) for row in pair(2.0)]
    options = LatencyOptions(min_speedup=1.0, bootstrap=200)
    assert is_undisturbed(rows, options, 0) is sound
    assert is_undisturbed(rows[1:], options, 0) is sound
    # The second turns take twice as long, so the control misses 1. A model alone has no control.
    doubtful = [latency("dense", [9.0] * 8), latency("mod", [1.0, 2.0] * 4)]
    assert not is_undisturbed(doubtful, options, 0)
    assert is_undisturbed(doubtful[1:], options, 0)


def test_what_a_row_needs() -> None:
    assert rows_of([latency("dense", [1.0] * 8), latency("mod", [1.0] * 8, target="inductor")]) == ()
    with pytest.raises(GraphError, match="mod b1s64: the FLOPs of this graph were not counted, so its latency cannot"):
        rows_of(pair(1.0, Bucket(1, 64)))


def test_nothing_is_predicted_from_what_was_not_all_counted() -> None:
    lacking = [row.model_copy(update={"not_counted": {"Loop": 1}}) for row in COSTS]
    options = LatencyOptions(min_speedup=1.0, bootstrap=200)

    def found(**known: Any) -> SpeedupRow:
        return speedup_rows(pair(2.0), lacking, [SMALL, LARGE], options, seed=0, **known)[0]

    row = found()
    assert (row.predicted_flops, row.efficiency, row.verdict) == (None, None, "faster")
    mod = row.setting
    # FLOPs may be known for the graphs that run and not for the portable ones, or the other way round.
    assert found(flops={mod.of("dense"): 300, mod: 100}).efficiency == pytest.approx(2 / 3)
    assert rows_of(pair(2.0), flops={mod.of("dense"): None, mod: None})[0].predicted_flops == 2.0
    parts = [part_row(model="dense", predicted_ms=9.0), part_row(predicted_ms=2.0, not_counted=1)]
    assert found(parts=parts).predicted_roofline is None

"""Ratios and intervals on samples whose answer is known."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mod_export.artifacts import Bucket, ModelKind
from mod_export.errors import GraphError
from mod_export.measure.cost import PARTS, CostRow
from mod_export.measure.latency import LatencyRow
from mod_export.measure.statistics import SpeedupRow, gated_bucket, ratio_of_medians, speedup_rows

SMALL, LARGE = Bucket(1, 128), Bucket(1, 512)
latencies = st.floats(min_value=1e-3, max_value=1e5)
rounds = st.lists(st.tuples(latencies, latencies), min_size=1, max_size=30)


def latency(
    model: ModelKind, samples_ms: Sequence[float], bucket: Bucket = LARGE, target: str = "ort-cpu"
) -> LatencyRow:
    return LatencyRow(
        target=target, bucket=bucket.name, dtype="float32", model=model, providers=("CPU",), threads=1, warmup=1,
        samples_ms=tuple(samples_ms), p50_ms=0.0, p90_ms=0.0, p99_ms=0.0, mean_ms=0.0, stdev_ms=0.0,
    )  # fmt: skip


def cost(model: ModelKind, flops: int, bucket: Bucket = LARGE) -> CostRow:
    return CostRow(
        model=model, bucket=bucket.name, flops=flops, flops_by_part=dict.fromkeys(PARTS, 0), weight_bytes=0,
        activation_bytes=0, kv_bytes=0,
    )  # fmt: skip


COSTS = [cost("dense", 200), cost("mod", 100), cost("dense", 60, SMALL), cost("mod", 50, SMALL)]


def rows_of(latencies: Sequence[LatencyRow], min_speedup: float = 1.0) -> tuple[SpeedupRow, ...]:
    return speedup_rows(latencies, COSTS, [SMALL, LARGE], min_speedup=min_speedup, resamples=500, seed=0)


def test_samples_without_spread_have_an_interval_without_width() -> None:
    assert ratio_of_medians([6.0] * 9, [4.0] * 9, resamples=200, seed=0) == (1.5, (1.5, 1.5))


def test_what_disturbs_whole_rounds_does_not_widen_the_interval() -> None:
    rng = np.random.default_rng(0)
    noise = 1 + rng.exponential(0.3, size=30)
    paired = ratio_of_medians(list(2 * noise), list(noise), resamples=2000, seed=0)
    assert paired == (2.0, (2.0, 2.0))
    _, (low, high) = ratio_of_medians(list(2 * noise), list(rng.permutation(noise)), resamples=2000, seed=0)
    assert high - low > 0.1


def test_the_interval_covers_a_known_ratio_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for seed in range(200):
        dense, mod = 1.5 * rng.lognormal(0, 0.1, 30), rng.lognormal(0, 0.1, 30)
        _, (low, high) = ratio_of_medians(list(dense), list(mod), resamples=400, seed=seed)
        covered += low <= 1.5 <= high
    # 95 % of 200 is 190, with a standard deviation of 3; percentile intervals of medians err to the wide side.
    assert covered >= 181


def test_the_interval_narrows_with_more_rounds() -> None:
    rng = np.random.default_rng(0)
    widths = []
    for count in (10, 1000):
        _, (low, high) = ratio_of_medians(
            list(rng.lognormal(0, 0.1, count)), list(rng.lognormal(0, 0.1, count)), resamples=500, seed=0
        )
        widths.append(high - low)
    assert widths[1] < widths[0] / 4


@given(rounds)
def test_the_interval_holds_the_ratio(pairs: list[tuple[float, float]]) -> None:
    dense, mod = zip(*pairs, strict=True)
    measured, (low, high) = ratio_of_medians(dense, mod, resamples=100, seed=0)
    assert low <= measured <= high
    assert measured == np.median(dense) / np.median(mod)


@given(rounds, st.integers(-8, 8), st.integers(-8, 8))
def test_the_ratio_scales_with_its_samples(pairs: list[tuple[float, float]], a: int, b: int) -> None:
    dense, mod = zip(*pairs, strict=True)
    measured, (low, high) = ratio_of_medians(dense, mod, resamples=100, seed=0)
    scaled = ratio_of_medians([x * 2.0**a for x in dense], [x * 2.0**b for x in mod], resamples=100, seed=0)
    factor = 2.0 ** (a - b)
    # Powers of two change no digit of a float, so this holds exactly.
    assert scaled == (measured * factor, (low * factor, high * factor))


def test_the_same_seed_gives_the_same_interval() -> None:
    dense, mod = list(np.linspace(5, 9, 20)), list(np.linspace(3, 7, 20)[::-1])
    first = ratio_of_medians(dense, mod, resamples=300, seed=3)
    assert first == ratio_of_medians(dense, mod, resamples=300, seed=3)
    assert first != ratio_of_medians(dense, mod, resamples=300, seed=4)


def test_rows_hold_ratio_prediction_and_efficiency() -> None:
    (row,) = rows_of([latency("dense", [3.0] * 5), latency("mod", [2.0] * 5)])
    assert row == SpeedupRow(
        target="ort-cpu", bucket="b1s512", dtype="float32", measured=1.5, ci95=(1.5, 1.5), predicted_flops=2.0,
        efficiency=0.75, gate=1.0, passed=True,
    )  # fmt: skip


def test_the_gate_applies_to_the_largest_bucket_only() -> None:
    slow = [latency("dense", [1.0] * 5, SMALL), latency("mod", [2.0] * 5, SMALL)]
    large = [latency("dense", [2.0] * 5), latency("mod", [1.0] * 5)]
    assert [(row.gate, row.passed) for row in rows_of([*slow, *large])] == [(None, None), (1.0, True)]
    assert [(row.gate, row.passed) for row in rows_of([*slow, *large], min_speedup=2.5)] == [(None, None), (2.5, False)]
    assert [(row.gate, row.passed) for row in rows_of([*slow, *large], min_speedup=0)] == [(None, None)] * 2


@pytest.mark.parametrize(("measured", "passed"), [(1.0, True), (1.0 + 2**-40, True), (1.0 - 2**-40, False)])
def test_the_gate_is_met_at_its_own_value(measured: float, passed: bool) -> None:
    (row,) = rows_of([latency("dense", [measured] * 5), latency("mod", [1.0] * 5)])
    assert row.passed is passed


@pytest.mark.parametrize("bucket", [SMALL, LARGE])
def test_nan_fails_with_a_gate_and_without(bucket: Bucket) -> None:
    (row,) = rows_of([latency("dense", [math.nan] * 5, bucket), latency("mod", [1.0] * 5, bucket)])
    assert math.isnan(row.measured)
    assert row.passed is False


def test_a_setting_with_one_model_has_no_row() -> None:
    assert rows_of([latency("dense", [1.0] * 5), latency("mod", [1.0] * 5, target="inductor")]) == ()


def test_flops_that_were_not_counted_are_named() -> None:
    rows = [latency("dense", [1.0] * 5, Bucket(1, 64)), latency("mod", [1.0] * 5, Bucket(1, 64))]
    with pytest.raises(GraphError, match="dense b1s64: the FLOPs of this graph were not counted, so its latency has"):
        rows_of(rows)


@pytest.mark.parametrize(
    ("buckets", "largest"),
    [
        ([Bucket(1, 512), Bucket(1, 128)], Bucket(1, 512)),
        ([Bucket(8, 128), Bucket(1, 512)], Bucket(8, 128)),
        ([Bucket(4, 128), Bucket(1, 512)], Bucket(1, 512)),
    ],
)
def test_the_largest_bucket_has_most_tokens_then_the_longest_rows(buckets: list[Bucket], largest: Bucket) -> None:
    assert gated_bucket(buckets) == largest

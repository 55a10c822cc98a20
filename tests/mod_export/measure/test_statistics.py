"""Intervals, spread and verdicts on samples with a known answer: how often they are right, and when there are none."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mod_export.config import LatencyOptions
from mod_export.measure.statistics import (
    SpeedComparison,
    block_length,
    compare,
    drift_of,
    effective_size,
    gate_reached,
    outliers_of,
    quantile_interval,
    ratio_interval,
    ratio_of_medians,
    settled,
)
from mod_export.rows.speed import Control, SpeedVerdict

if TYPE_CHECKING:
    from numpy.typing import NDArray

latencies = st.floats(min_value=1e-3, max_value=1e5)
rounds = st.lists(st.tuples(latencies, latencies, latencies, latencies), min_size=1, max_size=20)
OPTIONS = LatencyOptions(min_speedup=1.0, bootstrap=300)


def autoregressive(rng: np.random.Generator, count: int, memory: float) -> NDArray[np.float64]:
    """A series of unit variance whose neighbours have the correlation `memory`."""
    noise = rng.normal(0, math.sqrt(1 - memory**2), count + 100)
    for index in range(1, count + 100):
        noise[index] += memory * noise[index - 1]
    return noise[100:]


TRIES = 100
"""With 100 tries, the standard deviation of a share of 95 % is 2.2 %."""


def coverage(memory: float) -> float:
    """How often a 95 % interval contains a ratio of 1.5, if disturbances of each engine are correlated over time."""
    rng = np.random.default_rng(0)
    covered = 0
    for seed in range(TRIES):
        dense_RT, mod_RT = (
            scale * np.exp(0.1 * autoregressive(rng, 80, memory)[:, None] + rng.normal(0, 0.02, (80, 2)))
            for scale in (1.5, 1.0)
        )
        low, high = ratio_interval(dense_RT, mod_RT, confidence=0.95, resamples=200, seed=seed)
        covered += low <= 1.5 <= high
    return covered / TRIES


def test_the_interval_covers_a_known_ratio_as_often_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert coverage(0.0) >= 0.92
    assert coverage(0.7) >= 0.82
    monkeypatch.setattr("mod_export.measure.statistics.block_length", lambda series_R: 1)
    assert coverage(0.7) < 0.7


def test_what_disturbs_whole_rounds_does_not_widen_the_interval() -> None:
    rng = np.random.default_rng(0)
    noise_RT = np.repeat(1 + rng.exponential(0.3, size=(30, 1)), 2, axis=1)
    paired = ratio_interval(2 * noise_RT, noise_RT, confidence=0.95, resamples=1000, seed=0)
    assert paired == pytest.approx((2.0, 2.0), rel=1e-12)
    low, high = ratio_interval(2 * noise_RT, rng.permutation(noise_RT), confidence=0.95, resamples=1000, seed=0)
    assert high - low > 0.1


def test_it_narrows_with_rounds_and_widens_with_confidence() -> None:
    rng = np.random.default_rng(0)

    def width(two: NDArray[np.float64], confidence: float) -> float:
        return float(np.ptp(ratio_interval(*two, confidence=confidence, resamples=500, seed=0)))

    few, many = rng.lognormal(0, 0.1, (2, 10, 2)), rng.lognormal(0, 0.1, (2, 1000, 2))
    assert width(many, 0.9) < width(few, 0.9) / 4
    assert width(many, 0.9) < width(many, 0.99)
    constant = np.full((9, 2), 6.0), np.full((9, 2), 4.0)
    assert ratio_interval(*constant, confidence=0.95, resamples=9, seed=0) == (1.5, 1.5)


@given(rounds, st.integers(-8, 8), st.integers(-8, 8))
def test_it_holds_the_ratio_and_scales_with_its_samples(
    rows: list[tuple[float, float, float, float]], a: int, b: int
) -> None:
    dense_RT, mod_RT = np.array(rows)[:, :2], np.array(rows)[:, 2:]
    measured = ratio_of_medians(dense_RT, mod_RT)
    low, high = ratio_interval(dense_RT, mod_RT, confidence=0.95, resamples=100, seed=0)
    assert low <= measured <= high
    assert measured == np.median(dense_RT) / np.median(mod_RT)
    scaled = ratio_interval(dense_RT * 2.0**a, mod_RT * 2.0**b, confidence=0.95, resamples=100, seed=0)
    assert scaled == pytest.approx([bound * 2.0 ** (a - b) for bound in (low, high)], rel=1e-9)


def test_the_same_seed_gives_the_same_interval_however_much_memory_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    two = rng.lognormal(0, 0.1, (2, 20, 2))
    first = ratio_interval(*two, confidence=0.95, resamples=300, seed=3)
    assert first == ratio_interval(*two, confidence=0.95, resamples=300, seed=3)
    assert first != ratio_interval(*two, confidence=0.95, resamples=300, seed=4)
    monkeypatch.setattr("mod_export.measure.statistics.NUMBERS_AT_ONCE", 400)
    low, high = ratio_interval(*two, confidence=0.95, resamples=300, seed=3)
    assert (low, high) == pytest.approx(first, rel=0.02)


def test_correlated_samples_stand_in_long_blocks_and_say_less() -> None:
    rng = np.random.default_rng(0)
    assert block_length(rng.normal(size=216)) == 6
    assert block_length(autoregressive(rng, 216, 0.9)) > 12
    assert block_length(np.arange(216.0)) == 43
    assert [block_length(np.ones(count)) for count in (1, 4, 5, 10, 27, 1000)] == [1, 1, 1, 2, 3, 10]
    assert effective_size(rng.normal(size=400)) > 300
    # Theory: n (1 - r) / (1 + r) = 44 for a memory of 0.8.
    assert 25 < effective_size(autoregressive(rng, 400, 0.8)) < 80
    assert effective_size(np.ones(50)) == 50


@pytest.mark.parametrize(("share", "least"), [(0.5, 6), (0.9, 36), (0.99, 368)])
def test_a_quantile_needs_samples_beyond_it(share: float, least: int) -> None:
    # These are the binomial's numbers: 0.5^6, 0.9^36 and 0.99^368 are below 2.5 %. Alternating samples do not
    # correlate.
    samples = np.array([(index // 2 if index % 2 else -index // 2) for index in range(least)], dtype=np.float64)
    assert quantile_interval(samples[: least - 1], share) is None
    low, high = quantile_interval(samples, share) or (0.0, 0.0)
    assert samples.min() <= low < high == samples.max()
    assert {low, high} <= set(samples)
    for bad in (math.nan, math.inf):
        assert quantile_interval(np.append(samples, bad), share) is None


@pytest.mark.parametrize(("share", "normal", "memory"), [(0.5, 0.0, 0.0), (0.5, 0.0, 0.7), (0.9, 1.2816, 0.7)])
def test_quantile_intervals_cover(share: float, normal: float, memory: float) -> None:
    rng = np.random.default_rng(1)
    found = [quantile_interval(autoregressive(rng, 320, memory), share) for _ in range(100)]
    covered = [low <= normal <= high for low, high in filter(None, found)]
    assert len(covered) > 93
    assert sum(covered) / len(covered) >= 0.9


def test_outliers_lie_beyond_the_fences() -> None:
    # The quartiles are 1 and 3, the fences -2 and 6. A value on a fence is no outlier.
    assert outliers_of(np.array([1.0, 3.0] * 20 + [6.0, -2.0, 6.1, -2.1, 50.0])) == 3


@pytest.mark.parametrize(("slope", "real"), [(0.0, False), (0.3, True), (-0.2, True)])
def test_a_trend_is_seen_through_noise(slope: float, real: bool) -> None:
    rng = np.random.default_rng(0)
    drift, seen = drift_of((1 + slope * np.linspace(0, 1, 120)) * rng.lognormal(0, 0.05, 120))
    assert seen is real
    assert np.sign(drift) == np.sign(slope) or not slope
    assert drift_of(np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])) == (5.5 / 1.5 - 1, False)


def test_noise_seldom_looks_like_drift() -> None:
    rng = np.random.default_rng(0)
    assert sum(drift_of(rng.lognormal(0, 0.1, 90))[1] for _ in range(100)) <= 3


def made(ratio: float, spread: float, rounds: int = 40, seed: int = 0) -> tuple[NDArray[np.float64], ...]:
    """Dense and MoD latencies whose ratio is known."""
    rng = np.random.default_rng(seed)
    return ratio * rng.lognormal(0, spread, (rounds, 2)), rng.lognormal(0, spread, (rounds, 2))


def compared(ratio: float, spread: float, looks: int = 5, seed: int = 0) -> SpeedComparison:
    dense_RT, mod_RT = made(ratio, spread, seed=seed)
    return compare(dense_RT, mod_RT, OPTIONS, looks=looks, seed=0)


def with_interval(low: float, high: float, covers_one: bool = True) -> SpeedComparison:
    control = Control(measured=1.0, ci99=(0.99, 1.01), covers_one=covers_one)
    return SpeedComparison(measured=(low + high) / 2, ci95=(low, high), control=control, verdict="faster")


@pytest.mark.parametrize(
    ("ratio", "spread", "verdict"),
    [
        (1.3, 0.02, "faster"),
        (1.05, 0.01, "faster"),
        (1.0, 0.002, "not faster"),
        (0.7, 0.02, "not faster"),
        (1.01, 0.001, "faster"),
        (1.02, 0.1, "inconclusive"),
    ],
)
def test_three_verdicts(ratio: float, spread: float, verdict: SpeedVerdict) -> None:
    found = compared(ratio, spread)
    assert found.verdict == verdict
    assert found.control.covers_one
    assert found.ci95[0] <= found.measured <= found.ci95[1]


def test_a_control_that_misses_one_lets_nothing_be_said() -> None:
    dense_RT, mod_RT = made(1.5, 0.01)
    mod_RT[:, 1] *= 1.05
    found = compare(dense_RT, mod_RT, OPTIONS, looks=5, seed=0)
    assert found.control.measured == pytest.approx(1 / 1.05, rel=0.01)
    assert not found.control.covers_one
    assert found.verdict == "inconclusive"
    assert gate_reached(found, 1.0) is None
    assert not settled(found, None, 1.0)


def test_many_looks_cost_width_and_the_control_covers_one() -> None:
    one, many = compared(1.3, 0.1, looks=1), compared(1.3, 0.1, looks=10)
    assert np.ptp(many.ci95) > np.ptp(one.ci95)
    assert many.control == one.control
    assert sum(compared(1.5, 0.1, seed=seed).control.covers_one for seed in range(60)) >= 57


def test_looking_again_and_again_makes_no_speedup_out_of_noise() -> None:
    wrong = 0
    for seed in range(40):
        dense_RT, mod_RT = made(1.0, 0.1, rounds=160, seed=seed)
        # Sampling does this: it looks after 20, 40, 80 and 160 rounds, and stops at the first look that is settled.
        for rounds in (20, 40, 80, 160):
            found = compare(dense_RT[:rounds], mod_RT[:rounds], OPTIONS, looks=4, seed=seed)
            if settled(found, None, 1.0):
                break
        wrong += found.verdict == "faster" or found.ci95[1] < 1
    # Errors are 5 % at most, 2 of 40; a plain 95 % interval at every look errs in about 5 of them.
    assert wrong <= 3


@pytest.mark.parametrize(
    ("low", "high", "gate", "reached"),
    [
        (1.31, 1.40, 1.3, True),
        (1.30, 1.40, 1.3, True),
        (1.29, 1.40, 1.3, None),
        (1.10, 1.29, 1.3, False),
        (0.97, 1.05, 0.5, True),
        (0.97, 1.05, 1.0, None),
        (math.nan, math.nan, 1.0, None),
    ],
)
def test_a_gate_is_reached_by_the_whole_interval(low: float, high: float, gate: float, reached: bool | None) -> None:
    found = with_interval(low, high)
    assert gate_reached(found, gate) is reached
    assert settled(found, gate, 1.0) is (reached is not None)
    assert gate_reached(with_interval(low, high, covers_one=False), gate) is None
    # The ratio itself must be known well enough as well.
    assert [settled(with_interval(1.9, 2.1), None, precision) for precision in (0.09, 0.11)] == [False, True]

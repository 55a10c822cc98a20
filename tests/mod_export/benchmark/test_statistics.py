"""Intervals on samples whose answer is known: how often they hold it, and when they refuse."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mod_export.benchmark.statistics import (
    block_length,
    effective_size,
    quantile_interval,
    ratio_interval,
    ratio_of_medians,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

latencies = st.floats(min_value=1e-3, max_value=1e5)
rounds = st.lists(st.tuples(latencies, latencies, latencies, latencies), min_size=1, max_size=20)


def pair(rows: list[tuple[float, float, float, float]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    array = np.array(rows)
    return array[:, :2], array[:, 2:]


def autoregressive(rng: np.random.Generator, count: int, memory: float) -> NDArray[np.float64]:
    """A series of unit variance whose neighbours are correlated by `memory`."""
    noise = rng.normal(0, math.sqrt(1 - memory**2), count + 100)
    series = np.zeros(count + 100)
    for index in range(1, count + 100):
        series[index] = memory * series[index - 1] + noise[index]
    return series[100:]


def coverage(memory: float, confidence: float, count: int = 80) -> float:
    """How often the interval holds a ratio of 1.5 when the machine remembers what it did to each engine."""
    rng = np.random.default_rng(0)
    held = 0
    for seed in range(200):
        dense_RT, mod_RT = (
            scale * np.exp(0.1 * autoregressive(rng, count, memory)[:, None] + rng.normal(0, 0.02, (count, 2)))
            for scale in (1.5, 1.0)
        )
        low, high = ratio_interval(dense_RT, mod_RT, confidence=confidence, resamples=300, seed=seed)
        held += low <= 1.5 <= high
    return held / 200


def test_the_interval_covers_a_known_ratio_as_often_as_it_says() -> None:
    # A standard deviation of 200 tries is 1.5 %.
    assert coverage(0.0, 0.95) >= 0.92


def test_it_nearly_does_when_samples_remember(monkeypatch: pytest.MonkeyPatch) -> None:
    assert coverage(0.7, 0.95) >= 0.82
    monkeypatch.setattr("mod_export.benchmark.statistics.block_length", lambda series_R: 1)
    assert coverage(0.7, 0.95) < 0.7


def test_samples_without_spread_have_an_interval_without_width() -> None:
    dense_RT, mod_RT = np.full((9, 2), 6.0), np.full((9, 2), 4.0)
    assert ratio_of_medians(dense_RT, mod_RT) == 1.5
    assert ratio_interval(dense_RT, mod_RT, confidence=0.95, resamples=200, seed=0) == (1.5, 1.5)


def test_what_disturbs_whole_rounds_does_not_widen_the_interval() -> None:
    rng = np.random.default_rng(0)
    noise_RT = np.repeat(1 + rng.exponential(0.3, size=(30, 1)), 2, axis=1)
    paired = ratio_interval(2 * noise_RT, noise_RT, confidence=0.95, resamples=1000, seed=0)
    assert paired == pytest.approx((2.0, 2.0), rel=1e-12)
    low, high = ratio_interval(2 * noise_RT, rng.permutation(noise_RT), confidence=0.95, resamples=1000, seed=0)
    assert high - low > 0.1


def test_it_narrows_with_rounds_and_widens_with_confidence() -> None:
    rng = np.random.default_rng(0)
    few, many = rng.lognormal(0, 0.1, (2, 10, 2)), rng.lognormal(0, 0.1, (2, 1000, 2))
    width = {
        (count, confidence): np.ptp(ratio_interval(*two, confidence=confidence, resamples=500, seed=0))
        for count, two in (("few", few), ("many", many))
        for confidence in (0.9, 0.99)
    }
    assert width["many", 0.9] < width["few", 0.9] / 4
    assert width["many", 0.9] < width["many", 0.99]


@given(rounds)
def test_it_holds_the_ratio(rows: list[tuple[float, float, float, float]]) -> None:
    dense_RT, mod_RT = pair(rows)
    measured = ratio_of_medians(dense_RT, mod_RT)
    low, high = ratio_interval(dense_RT, mod_RT, confidence=0.95, resamples=100, seed=0)
    assert low <= measured <= high
    assert measured == np.median(dense_RT) / np.median(mod_RT)


@given(rounds, st.integers(-8, 8), st.integers(-8, 8))
def test_it_scales_with_its_samples(rows: list[tuple[float, float, float, float]], a: int, b: int) -> None:
    dense_RT, mod_RT = pair(rows)
    interval = ratio_interval(dense_RT, mod_RT, confidence=0.95, resamples=100, seed=0)
    scaled = ratio_interval(dense_RT * 2.0**a, mod_RT * 2.0**b, confidence=0.95, resamples=100, seed=0)
    assert scaled == pytest.approx([bound * 2.0 ** (a - b) for bound in interval], rel=1e-9)


def test_the_same_seed_gives_the_same_interval_however_much_memory_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    two = rng.lognormal(0, 0.1, (2, 20, 2))
    first = ratio_interval(*two, confidence=0.95, resamples=300, seed=3)
    assert first == ratio_interval(*two, confidence=0.95, resamples=300, seed=3)
    assert first != ratio_interval(*two, confidence=0.95, resamples=300, seed=4)
    monkeypatch.setattr("mod_export.benchmark.statistics.NUMBERS_AT_ONCE", 400)
    low, high = ratio_interval(*two, confidence=0.95, resamples=300, seed=3)
    assert (low, high) == pytest.approx(first, rel=0.02)


def test_blocks_are_as_long_as_the_memory() -> None:
    rng = np.random.default_rng(0)
    assert block_length(rng.normal(size=216)) == 6
    assert block_length(autoregressive(rng, 216, 0.9)) > 12
    assert block_length(np.arange(216.0)) == 43
    assert [block_length(np.ones(count)) for count in (1, 4, 5, 10, 27, 1000)] == [1, 1, 1, 2, 3, 10]


def test_correlated_samples_say_less() -> None:
    rng = np.random.default_rng(0)
    assert effective_size(rng.normal(size=400)) > 300
    # Theory: n (1 - r) / (1 + r) = 44 for a memory of 0.8.
    assert 25 < effective_size(autoregressive(rng, 400, 0.8)) < 80
    assert effective_size(np.ones(50)) == 50


@pytest.mark.parametrize(("share", "least"), [(0.5, 6), (0.9, 36), (0.99, 368)])
def test_a_quantile_needs_samples_beyond_it(share: float, least: int) -> None:
    # The binomial's own numbers: 0.5^6, 0.9^36 and 0.99^368 are below 2.5 %. Alternating samples do not correlate.
    samples = np.array([(index // 2 if index % 2 else -index // 2) for index in range(least)], dtype=np.float64)
    assert quantile_interval(samples[: least - 1], share) is None
    low, high = quantile_interval(samples, share) or (0.0, 0.0)
    assert samples.min() <= low < high == samples.max()


@pytest.mark.parametrize(("share", "normal"), [(0.5, 0.0), (0.9, 1.2816)])
@pytest.mark.parametrize("memory", [0.0, 0.7])
def test_quantile_intervals_cover(share: float, normal: float, memory: float) -> None:
    rng = np.random.default_rng(1)
    found = [quantile_interval(autoregressive(rng, 320, memory), share) for _ in range(150)]
    held = [low <= normal <= high for low, high in filter(None, found)]
    assert len(held) > 140
    assert sum(held) / len(held) >= 0.9


@given(st.lists(latencies, min_size=6, max_size=60))
def test_quantile_bounds_are_samples_around_the_median(samples: list[float]) -> None:
    bounds = quantile_interval(np.array(samples), 0.5)
    if bounds is not None:
        assert set(bounds) <= set(samples)
        assert bounds[0] <= np.median(samples) <= bounds[1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_has_no_interval(bad: float) -> None:
    assert quantile_interval(np.array([1.0, 2.0, bad] * 10), 0.5) is None

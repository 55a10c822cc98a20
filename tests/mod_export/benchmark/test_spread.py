"""Spread, drift and outliers of samples made to have them."""

from __future__ import annotations

import numpy as np
import pytest

from mod_export.benchmark.statistics import spread_of


def test_numbers_of_a_small_series() -> None:
    found = spread_of(np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
    assert found.cv == pytest.approx(np.std(range(1, 7), ddof=1) / 3.5)
    assert found.iqr_ms == 2.5
    assert found.drift == 5.5 / 1.5 - 1
    assert not found.drifts
    assert found.outliers == 0


def test_outliers_lie_beyond_the_fences() -> None:
    # Quartiles 1 and 3, fences at -2 and 6: what lies on a fence is none.
    samples = np.array([1.0, 3.0] * 20 + [6.0, -2.0, 6.1, -2.1, 50.0])
    assert spread_of(samples).outliers == 3


@pytest.mark.parametrize(("slope", "drifts"), [(0.0, False), (0.3, True), (-0.2, True)])
def test_a_trend_is_seen_through_noise(slope: float, drifts: bool) -> None:
    rng = np.random.default_rng(0)
    samples = (1 + slope * np.linspace(0, 1, 120)) * rng.lognormal(0, 0.05, 120)
    found = spread_of(samples)
    assert found.drifts is drifts
    if slope:
        assert np.sign(found.drift) == np.sign(slope)


def test_noise_seldom_looks_like_drift() -> None:
    rng = np.random.default_rng(0)
    assert sum(spread_of(rng.lognormal(0, 0.1, 90)).drifts for _ in range(200)) <= 6

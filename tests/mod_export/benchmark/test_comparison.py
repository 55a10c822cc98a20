"""Three verdicts, and a control that must hold before any of them counts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mod_export.benchmark.comparison import Comparison, compare, gate_reached, settled
from mod_export.config import LatencyOptions
from mod_export.results.latency import Control, SpeedVerdict

if TYPE_CHECKING:
    from numpy.typing import NDArray

OPTIONS = LatencyOptions(min_speedup=1.0, bootstrap=300)


def made(ratio: float, spread: float, rounds: int = 40, seed: int = 0) -> tuple[NDArray[np.float64], ...]:
    """Dense and MoD latencies whose ratio is known."""
    rng = np.random.default_rng(seed)
    return ratio * rng.lognormal(0, spread, (rounds, 2)), rng.lognormal(0, spread, (rounds, 2))


def compared(ratio: float, spread: float, looks: int = 5, seed: int = 0) -> Comparison:
    dense_RT, mod_RT = made(ratio, spread, seed=seed)
    return compare(dense_RT, mod_RT, OPTIONS, looks=looks, seed=0)


def with_interval(low: float, high: float, covers_one: bool = True) -> Comparison:
    control = Control(measured=1.0, ci99=(0.99, 1.01), covers_one=covers_one)
    return Comparison(measured=(low + high) / 2, ci95=(low, high), control=control, verdict="faster")


@pytest.mark.parametrize(
    ("ratio", "spread", "verdict"),
    [
        (1.3, 0.02, "faster"),
        (1.05, 0.01, "faster"),
        (1.0, 0.002, "not faster"),
        (0.7, 0.02, "not faster"),
        (1.02, 0.1, "inconclusive"),
        (1.0, 0.3, "inconclusive"),
    ],
)
def test_three_verdicts(ratio: float, spread: float, verdict: SpeedVerdict) -> None:
    found = compared(ratio, spread)
    assert found.verdict == verdict
    assert found.control.covers_one
    assert found.ci95[0] <= found.measured <= found.ci95[1]


def test_a_small_speedup_that_is_certain_is_a_speedup() -> None:
    found = compared(1.01, 0.001)
    assert 1 < found.ci95[0] < found.ci95[1] < 1 + OPTIONS.resolution
    assert found.verdict == "faster"


def test_a_control_that_misses_one_lets_nothing_be_said() -> None:
    dense_RT, mod_RT = made(1.5, 0.01)
    mod_RT[:, 1] *= 1.05
    found = compare(dense_RT, mod_RT, OPTIONS, looks=5, seed=0)
    assert found.control.measured == pytest.approx(1 / 1.05, rel=0.01)
    assert not found.control.covers_one
    assert found.verdict == "inconclusive"
    assert gate_reached(found, 1.0) is None
    assert not settled(found, None, 1.0)


def test_the_control_covers_one_where_nothing_differs() -> None:
    assert sum(compared(1.5, 0.1, seed=seed).control.covers_one for seed in range(100)) >= 96


def test_many_looks_cost_width() -> None:
    one, many = compared(1.3, 0.1, looks=1), compared(1.3, 0.1, looks=10)
    assert np.ptp(many.ci95) > np.ptp(one.ci95)
    assert many.control == one.control


def test_looking_again_and_again_makes_no_speedup_out_of_noise() -> None:
    wrong = 0
    for seed in range(60):
        dense_RT, mod_RT = made(1.0, 0.1, rounds=160, seed=seed)
        # What sampling does: looks after 20, 40, 80 and 160 rounds, and stops at the first that is settled.
        for rounds in (20, 40, 80, 160):
            found = compare(dense_RT[:rounds], mod_RT[:rounds], OPTIONS, looks=4, seed=seed)
            if settled(found, None, 1.0):
                break
        wrong += found.verdict == "faster" or found.ci95[1] < 1
    # 5 % at most, 3 of 60; a plain 95 % interval at every look errs in 8 of them or so.
    assert wrong <= 4


@pytest.mark.parametrize(("precision", "enough"), [(0.09, False), (0.11, True)])
def test_a_ratio_must_be_known_well_enough(precision: float, enough: bool) -> None:
    assert settled(with_interval(1.9, 2.1), None, precision) is enough


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

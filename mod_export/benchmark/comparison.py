"""What two series of samples say about each other, and whether sampling can stop."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mod_export.benchmark.statistics import ratio_interval, ratio_of_medians
from mod_export.config import LatencyOptions
from mod_export.results.latency import Control, SpeedVerdict

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Comparison", "SpeedVerdict", "compare", "gate_reached", "settled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Dense over MoD, the control, and the verdict that both allow."""

    measured: float
    ci95: tuple[float, float]
    control: Control
    verdict: SpeedVerdict


def compare(
    dense_RT: NDArray[np.float64], mod_RT: NDArray[np.float64], options: LatencyOptions, *, looks: int, seed: int
) -> Comparison:
    """Compares latencies, float64 (rounds, runs in a round), milliseconds.

    Samples are looked at `looks` times at most, and sampling stops when they look settled. So that chance is not
    taken for a result, the 5 % of error that a 95 % interval may make are shared among all planned looks (Bonferroni):
    with five of them each interval is one of 99 %, and with 95 % probability all of them hold at once, whichever is the
    last. The control's interval is not corrected: sampling goes on while it misses 1, which can only help it to cover.
    """
    resampling = {"resamples": options.bootstrap, "seed": seed}
    ci95 = ratio_interval(dense_RT, mod_RT, confidence=1 - 0.05 / looks, **resampling)
    first_R1, second_R1 = mod_RT[:, :1], mod_RT[:, 1:]
    ci99 = ratio_interval(first_R1, second_R1, confidence=0.99, **resampling)
    control = Control(measured=ratio_of_medians(first_R1, second_R1), ci99=ci99, covers_one=ci99[0] <= 1 <= ci99[1])
    return Comparison(
        measured=ratio_of_medians(dense_RT, mod_RT),
        ci95=ci95,
        control=control,
        verdict=_verdict(ci95, control, options.resolution),
    )


def _verdict(ci95: tuple[float, float], control: Control, resolution: float) -> SpeedVerdict:
    low, high = ci95
    if not control.covers_one:
        return "inconclusive"
    if low > 1:
        return "faster"
    return "not faster" if high < 1 + resolution else "inconclusive"


def gate_reached(comparison: Comparison, gate: float) -> bool | None:
    """Whether the whole interval reaches the gate, or none of it; None where the interval covers it."""
    low, high = comparison.ci95
    if not (math.isfinite(comparison.measured) and comparison.control.covers_one):
        return None
    return True if low >= gate else False if high < gate else None


def settled(comparison: Comparison, gate: float | None, precision: float) -> bool:
    """Whether verdict and gate are clear, and the ratio is known to within this share of it."""
    low, high = comparison.ci95
    clear = comparison.verdict != "inconclusive" and (gate is None or gate_reached(comparison, gate) is not None)
    return clear and high - low <= precision * comparison.measured

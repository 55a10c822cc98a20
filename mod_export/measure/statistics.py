"""Statistics of latency samples: confidence intervals, spread, and whether one engine is faster than another.

Successive samples resemble each other, because other load on the same cores or a lowered clock lasts for a while. An
interval that assumes independent samples is too narrow. So the interval of a ratio is a bootstrap of *blocks* of
successive rounds (the circular form of Politis and Romano, A circular block-resampling procedure for stationary data,
1992). The interval of a quantile comes from order statistics, with the number of independent samples that would have as
much information.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from mod_export.config import LatencyOptions
from mod_export.rows.speed import Control, SpeedVerdict

if TYPE_CHECKING:
    from numpy.typing import NDArray

Z95 = 1.96
"""Two-sided 95 % quantile of the normal distribution."""
TAIL = 0.025
"""Probability left out on either side of a 95 % interval."""
NUMBERS_AT_ONCE = 2**22
"""Numbers that a bootstrap holds in memory at a time: 32 MiB."""


def ratio_of_medians(above_RT: NDArray[np.float64], below_RT: NDArray[np.float64]) -> float:
    """Returns the ratio of medians, because latency has outliers on one side only and a mean would follow them."""
    return float(np.median(above_RT) / np.median(below_RT))


def ratio_interval(
    above_RT: NDArray[np.float64], below_RT: NDArray[np.float64], *, confidence: float, resamples: int, seed: int
) -> tuple[float, float]:
    """Returns the percentile interval of median(above) / median(below) by a circular block bootstrap over rows.

    A few blocks say little about their own variance. So the interval is widened, on a logarithmic scale, by the factor
    by which Student's t is wider than the normal distribution, with one degree of freedom less than there are blocks.
    If necessary, it is widened to contain the ratio, which a percentile interval of few or tied samples can miss.

    Latencies are float64 (R, T): row r of both was taken together, and rows follow each other in time. `confidence` is
    a share, such as 0.95.
    """
    measured = ratio_of_medians(above_RT, below_RT)
    R, T = above_RT.shape
    length = block_length(np.log(np.median(above_RT, axis=1) / np.median(below_RT, axis=1)))
    rng = np.random.default_rng(seed)
    at_once = max(1, NUMBERS_AT_ONCE // (R * T))
    ratios = [
        _resampled(above_RT, below_RT, length, min(at_once, resamples - done), rng)
        for done in range(0, resamples, at_once)
    ]
    tail = 50 * (1 - confidence)
    low, high = (math.log(ratio) for ratio in np.percentile(np.concatenate(ratios), (tail, 100 - tail)))
    center, wider = math.log(measured), _student_over_normal(confidence, R / length - 1)
    low, high = (math.exp(center + (bound - center) * wider) for bound in (low, high))
    return min(low, measured), max(high, measured)


def _student_over_normal(confidence: float, freedom: float) -> float:
    """Returns the ratio of the two-sided quantiles of Student's t and the normal distribution, to second order in
    1 / freedom (Fisher and Cornish, The percentile points of distributions having known cumulants, 1960).
    """
    if freedom <= 0:
        return 1.0
    square = NormalDist().inv_cdf(0.5 + confidence / 2) ** 2
    return 1 + (square + 1) / (4 * freedom) + (5 * square**2 + 16 * square + 3) / (96 * freedom**2)


def _resampled(
    above_RT: NDArray[np.float64],
    below_RT: NDArray[np.float64],
    length: int,
    resamples: int,
    rng: np.random.Generator,
) -> NDArray[np.float64]:
    R = len(above_RT)
    start = rng.integers(0, R, size=(resamples, -(-R // length), 1))
    row = ((start + np.arange(length)) % R).reshape(resamples, -1)[:, :R]
    medians = [np.median(sample_RT[row].reshape(resamples, -1), axis=1) for sample_RT in (above_RT, below_RT)]
    ratios: NDArray[np.float64] = medians[0] / medians[1]
    return ratios


def block_length(series_R: NDArray[np.float64]) -> int:
    """Returns the rows that a block must hold: twice the number of lags over which the series is autocorrelated.

    At least the cube root of the length of the series (the rate of Hall, Horowitz and Jing, On blocking rules for the
    bootstrap, 1995), at most a fifth of the length.
    """
    R = len(series_R)
    least, most = round(math.cbrt(R)), R // 5
    return max(1, min(max(least, 2 * len(_autocorrelation(series_R))), most))


def effective_size(series: NDArray[np.float64]) -> float:
    """Returns the number of equally informative independent samples: n / (1 + 2 sum of autocorrelations), at most n."""
    return min(float(len(series)), len(series) / (1 + 2 * sum(_autocorrelation(series))))


def _autocorrelation(series: NDArray[np.float64]) -> list[float]:
    """Returns autocorrelations from lag 1 on, before the first that chance alone explains (Bartlett's bound), for at
    most a quarter of the length. Only positive ones count: an alternating series needs no wider interval.
    """
    n = len(series)
    deviation = series - np.mean(series)
    variance = float(np.mean(deviation * deviation))
    correlations: list[float] = []
    for lag in range(1, n // 4 + 1):
        correlation = float(np.sum(deviation[lag:] * deviation[:-lag]) / (n * variance)) if variance > 0 else 0.0
        if not correlation > Z95 / math.sqrt(n):
            break
        correlations.append(correlation)
    return correlations


def quantile_interval(samples: NDArray[np.float64], share: float) -> tuple[float, float] | None:
    """Returns the 95 % interval of a quantile (`share` of 0 to 1) for samples of any distribution, in the order in
    which they were taken.

    The bounds are the samples between whose ranks the quantile lies with a probability of at least 95 % by the binomial
    distribution (Conover, Practical Nonparametric Statistics, 1999, section 3.2). If samples are autocorrelated, the
    ranks are computed for the effective number of independent samples, and spread over all samples.

    Returns:
        The bounds, or None if the samples do not bound the quantile: a 99th percentile needs 368 independent samples.
    """
    if not np.all(np.isfinite(samples)):
        return None
    ordered = np.sort(samples)
    # Autocorrelation of ranks, because a single outlier would hide the correlation of all other samples.
    size = int(effective_size(np.searchsorted(ordered, samples).astype(np.float64)))
    below = _binomial_cdf(size, share)
    low, high = int(np.sum(below <= TAIL)), int(np.searchsorted(below, 1 - TAIL)) + 1
    if low < 1 or high > size:
        return None
    n = len(samples)
    return float(ordered[low * n // size - 1]), float(ordered[-(-high * n // size) - 1])


def _binomial_cdf(n: int, share: float) -> NDArray[np.float64]:
    """Returns P(count <= c) for c = 0 to n - 1."""
    c = np.arange(n + 1)
    log_factorial = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, n + 1)))))
    log_ways = log_factorial[n] - log_factorial[c] - log_factorial[n - c]
    cdf: NDArray[np.float64] = np.cumsum(np.exp(log_ways + c * math.log(share) + (n - c) * math.log1p(-share)))[:n]
    return cdf


FENCE = 1.5
"""Interquartile ranges beyond a quartile at which outliers begin (Tukey, Exploratory Data Analysis)."""


def outliers_of(samples_ms: NDArray[np.float64]) -> int:
    """Counts the samples that lie beyond the fences."""
    low, high = np.percentile(samples_ms, (25, 75))
    fence = FENCE * (high - low)
    return int(np.sum((samples_ms < low - fence) | (samples_ms > high + fence)))


def drift_of(samples_ms: NDArray[np.float64]) -> tuple[float, bool]:
    """Returns the relative change of the median from the first to the last third of the samples, and whether the 95 %
    intervals of these two medians do not overlap. Chance alone does that in less than one of a hundred runs.
    """
    third = len(samples_ms) // 3
    first, last = samples_ms[:third], samples_ms[-third:]
    early, late = quantile_interval(first, 0.5), quantile_interval(last, 0.5)
    apart = early is not None and late is not None and (early[1] < late[0] or late[1] < early[0])
    return float(np.median(last) / np.median(first) - 1), apart


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedComparison:
    """The ratio dense / MoD, the control, and the verdict that both allow."""

    measured: float
    ci95: tuple[float, float]
    control: Control
    verdict: SpeedVerdict


def compare(
    dense_RT: NDArray[np.float64], mod_RT: NDArray[np.float64], options: LatencyOptions, *, looks: int, seed: int
) -> SpeedComparison:
    """Compares latencies, float64 (rounds, runs in a round), milliseconds.

    Samples are looked at `looks` times at most, and sampling stops when the result looks settled. To avoid taking
    chance for a result, the 5 % error of a 95 % interval is shared among all planned looks (Bonferroni). With five
    looks, each interval is one of 99 %, and with a probability of 95 % all of them hold, whichever is the last. The
    interval of the control is not corrected: sampling goes on while it misses 1, which can only help it to cover 1.
    """
    resampling = {"resamples": options.bootstrap, "seed": seed}
    ci95 = ratio_interval(dense_RT, mod_RT, confidence=1 - 0.05 / looks, **resampling)
    first_R1, second_R1 = mod_RT[:, :1], mod_RT[:, 1:]
    ci99 = ratio_interval(first_R1, second_R1, confidence=0.99, **resampling)
    control = Control(measured=ratio_of_medians(first_R1, second_R1), ci99=ci99, covers_one=ci99[0] <= 1 <= ci99[1])
    return SpeedComparison(
        measured=ratio_of_medians(dense_RT, mod_RT),
        ci95=ci95,
        control=control,
        verdict=verdict_of(ci95, options.resolution) if control.covers_one else "inconclusive",
    )


def verdict_of(ci95: tuple[float, float], resolution: float) -> SpeedVerdict:
    """Returns the verdict for an interval of dense / MoD; `inconclusive` if a bound is NaN."""
    low, high = ci95
    if low > 1:
        return "faster"
    return "not faster" if high < 1 + resolution else "inconclusive"


def gate_reached(comparison: SpeedComparison, gate: float) -> bool | None:
    """Returns True if the whole interval reaches the gate, and False if no part of it does; None if the interval covers
    the gate or the control fails.
    """
    low, high = comparison.ci95
    if not (math.isfinite(comparison.measured) and comparison.control.covers_one):
        return None
    return True if low >= gate else False if high < gate else None


def settled(comparison: SpeedComparison, gate: float | None, precision: float) -> bool:
    """Whether verdict and gate are clear, and the ratio is known to within the share `precision` of itself."""
    low, high = comparison.ci95
    clear = comparison.verdict != "inconclusive" and (gate is None or gate_reached(comparison, gate) is not None)
    return clear and high - low <= precision * comparison.measured

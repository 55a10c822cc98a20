"""How samples spread and whether they went anywhere, beside their quantiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mod_export.measure.intervals import quantile_interval

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Spread", "spread_of"]

FENCE = 1.5
"""Interquartile ranges beyond the quartiles from which on samples are outliers (Tukey, Exploratory Data Analysis)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """What a median does not say.

    Attributes:
        cv: coefficient of variation: standard deviation over mean.
        iqr_ms: interquartile range.
        drift: median of the last third of the samples over that of the first third, minus 1.
        drifts: whether the 95 % intervals of these two medians lie apart, which chance alone would do in less than one
            of a hundred runs.
        outliers: samples beyond the fences.
    """

    cv: float
    iqr_ms: float
    drift: float
    drifts: bool
    outliers: int


def spread_of(samples_ms: NDArray[np.float64]) -> Spread:
    """Of samples in the order in which they were taken, three or more."""
    low, high = (float(quartile) for quartile in np.percentile(samples_ms, (25, 75)))
    fence = FENCE * (high - low)
    third = len(samples_ms) // 3
    first, last = samples_ms[:third], samples_ms[-third:]
    bounds = quantile_interval(first, 0.5), quantile_interval(last, 0.5)
    return Spread(
        cv=float(np.std(samples_ms, ddof=1) / np.mean(samples_ms)),
        iqr_ms=high - low,
        drift=float(np.median(last) / np.median(first) - 1),
        drifts=bounds[0] is not None
        and bounds[1] is not None
        and (bounds[0][1] < bounds[1][0] or bounds[1][1] < bounds[0][0]),
        outliers=int(np.sum((samples_ms < low - fence) | (samples_ms > high + fence))),
    )

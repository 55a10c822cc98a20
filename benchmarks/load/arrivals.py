"""When requests arrive, and what is said of many samples. Needs the standard library only, as locust uses it, too."""

from __future__ import annotations

import argparse
import inspect
import math
import random
from collections.abc import Sequence
from statistics import fmean, median

TENTHS = 10


def poisson_times(per_s: float, seconds: float, seed: int) -> list[float]:
    """Arrivals at random, independent of each other and of the answers, in seconds from the beginning."""
    if not per_s > 0:
        raise ValueError(f"arrivals: expected a rate above 0 a second, got {per_s:g}")
    rng = random.Random(seed)
    times, at = [], rng.expovariate(per_s)
    while at < seconds:
        times.append(at)
        at += rng.expovariate(per_s)
    return times


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least this share of the samples does not exceed; NaN if there are none."""
    if not samples:
        return math.nan
    return sorted(samples)[max(0, math.ceil(share * len(samples)) - 1)]


def percentiles(samples: Sequence[float]) -> dict[str, float]:
    """Of many samples: how many, and the three that tables show."""
    found = sorted(samples)
    return {"samples": len(found), "p50": percentile(found, 0.5), "p95": percentile(found, 0.95),
            "p99": percentile(found, 0.99)}  # fmt: skip


def spread(samples: Sequence[float], digits: int = 2) -> str:
    """Median, and the least and the largest in brackets."""
    return f"{median(samples):.{digits}f} ({min(samples):.{digits}f} to {max(samples):.{digits}f})"


def early_and_late(samples: Sequence[float]) -> tuple[float, float]:
    """The mean of the second tenth of samples, when everything is warm, and that of the last tenth."""
    size = len(samples) // TENTHS
    if not size:
        raise ValueError(f"expected at least {TENTHS} samples, got {len(samples)}")
    return fmean(samples[size : 2 * size]), fmean(samples[-size:])


def prompts(count: int, characters: int, seed: int = 0) -> list[str]:
    """Pieces of a module of Python's standard library, all different."""
    text = inspect.getsource(argparse)
    rng = random.Random(seed)
    return [text[begin : begin + characters] for begin in rng.sample(range(len(text) - characters), count)]

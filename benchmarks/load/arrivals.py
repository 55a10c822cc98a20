"""Arrival times, prompts and statistics. Imports the standard library only, because locust's environment uses it."""

from __future__ import annotations

import argparse
import inspect
import math
import random
from collections.abc import Sequence
from statistics import fmean, median

TENTHS = 10


def poisson_times(per_s: float, seconds: float, seed: int) -> list[float]:
    """Returns random arrival times in seconds from the start, independent of each other and of the answers."""
    if not per_s > 0:
        raise ValueError(f"arrivals: expected a rate above 0 a second, got {per_s:g}")
    rng = random.Random(seed)
    times, at = [], rng.expovariate(per_s)
    while at < seconds:
        times.append(at)
        at += rng.expovariate(per_s)
    return times


def percentile(samples: Sequence[float], share: float) -> float:
    """Returns the smallest sample that at least this share of the samples does not exceed; NaN without samples."""
    if not samples:
        return math.nan
    return sorted(samples)[max(0, math.ceil(share * len(samples)) - 1)]


def percentiles(samples: Sequence[float]) -> dict[str, float]:
    """Returns the number of samples and the three percentiles that tables show."""
    ordered = sorted(samples)
    return {"samples": len(ordered), "p50": percentile(ordered, 0.5), "p95": percentile(ordered, 0.95),
            "p99": percentile(ordered, 0.99)}  # fmt: skip


def spread(samples: Sequence[float], digits: int = 2) -> str:
    """Returns the median as text, with the smallest and the largest sample in brackets."""
    return f"{median(samples):.{digits}f} ({min(samples):.{digits}f} to {max(samples):.{digits}f})"


def early_and_late(samples: Sequence[float]) -> tuple[float, float]:
    """Returns the means of the second tenth of the samples, when everything is warm, and of the last tenth."""
    size = len(samples) // TENTHS
    if not size:
        raise ValueError(f"expected at least {TENTHS} samples, got {len(samples)}")
    return fmean(samples[size : 2 * size]), fmean(samples[-size:])


def prompts(count: int, characters: int, seed: int = 0) -> list[str]:
    """Returns pieces of a module of Python's standard library that begin at different places."""
    text = inspect.getsource(argparse)
    rng = random.Random(seed)
    return [text[begin : begin + characters] for begin in rng.sample(range(len(text) - characters), count)]

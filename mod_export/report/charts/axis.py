"""Axes: from values to places between 0 and 100, and the ticks that are labelled."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Axis", "LogAxis", "Tick", "length_axis", "log_axis", "ratio_axis", "span_axis"]

Tick = tuple[float, float]
"""Value and place."""
STEPS = (0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
MOST_STEPS = 5
MOST_DECADES = 7
SMALLEST_DECADE = -18
ZERO_WIDTH = 12.0
"""Percent of a logarithmic axis that is kept for zero, which has no logarithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A linear axis."""

    low: float
    high: float
    ticks: tuple[Tick, ...]

    def place(self, value: float | None) -> float | None:
        """Where a value stands; None where there is no finite value."""
        if value is None or not math.isfinite(value):
            return None
        return 100 * (value - self.low) / (self.high - self.low)

    def clamped(self, value: float) -> float:
        """Where a finite value stands, at the nearer edge when it lies outside."""
        return min(100.0, max(0.0, 100 * (value - self.low) / (self.high - self.low)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogAxis:
    """Whole decades, with a place of its own for zero at the left edge when `zero`."""

    low: int
    high: int
    zero: bool
    ticks: tuple[Tick, ...]

    def place(self, value: float | None) -> float | None:
        """Where a value stands; None where there is none that is finite and not negative."""
        if value is None or not math.isfinite(value) or value < 0:
            return None
        return _log_place(value, self.low, self.high, self.zero)


def ratio_axis(values: Iterable[float | None]) -> Axis:
    """Holds 1 and every finite value. It does not start at 0, because a ratio has no length."""
    drawn = [1.0, *_finite(values)]
    step = _step(max(drawn) - min(drawn))
    low = max(0.0, math.floor(min(drawn) / step - 0.25) * step)
    high = math.ceil(max(drawn) / step + 0.25) * step
    return Axis(low=low, high=high, ticks=_ticks(low, high, step))


def length_axis(values: Iterable[float | None], *, smallest: float) -> Axis:
    """From 0 to the largest value, which is taken to be `smallest` at least: bars have lengths."""
    longest = max([smallest, *_finite(values)])
    step = 10 ** math.floor(math.log10(longest))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if longest / s <= MOST_STEPS)
    end = math.ceil(longest / step) * step
    return Axis(low=0.0, high=end, ticks=_ticks(0.0, end, step))


def span_axis(low: float, high: float) -> Axis:
    """Exactly from `low` to `high`, labelled at both ends."""
    return Axis(low=low, high=high, ticks=((low, 0.0), (high, 100.0)))


def log_axis(values: Iterable[float | None]) -> LogAxis:
    """Holds every finite value that is not negative."""
    found = [value for value in _finite(values) if value >= 0]
    decades = [max(SMALLEST_DECADE, math.log10(value)) for value in found if value > 0]
    low = math.floor(min(decades, default=0.0))
    high = max(low + 1, math.ceil(max(decades, default=0.0)))
    zero = 0.0 in found
    every = math.ceil((high - low) / MOST_DECADES)
    ticks = [(10.0**decade, _log_place(10.0**decade, low, high, zero)) for decade in range(low, high + 1, every)]
    return LogAxis(low=low, high=high, zero=zero, ticks=(*([(0.0, 0.0)] if zero else []), *ticks))


def _log_place(value: float, low: int, high: int, zero: bool) -> float:
    if value == 0:
        return 0.0
    start = ZERO_WIDTH if zero else 0.0
    share = (max(SMALLEST_DECADE, math.log10(value)) - low) / (high - low)
    return start + (100 - start) * share


def _finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _ticks(low: float, high: float, step: float) -> tuple[Tick, ...]:
    count = round((high - low) / step)
    return tuple((low + index * step, 100 * index / count) for index in range(count + 1))


def _step(span: float) -> float:
    return next((step for step in STEPS if span / step <= MOST_STEPS), 10 ** math.ceil(math.log10(max(span, 1) / 5)))

"""System load and clock of the CPU while something is measured."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psutil

from mod_export.rows.speed import Conditions

TICK_S = 0.01
"""Coarsest unit in which operating systems count CPU time."""
LEAST_TICKS = 20
"""With fewer ticks, shares mean nothing, and the number of threads is unknown."""


class Watch:
    """Reads the machine's state when made and when `conditions` is called, never in between: reading takes time."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._load = psutil.getloadavg()[0]
        self._frequency = _frequency_mhz()
        self._threads = self._thread_seconds()
        self._own, self._busy, self._begin = time.process_time(), _busy_seconds(), time.perf_counter()

    def conditions(self) -> Conditions:
        """Returns the conditions since this watch started."""
        elapsed = time.perf_counter() - self._begin
        own_cpu, busy = time.process_time() - self._own, _busy_seconds() - self._busy
        after = self._thread_seconds()
        spent = [seconds - self._threads.get(thread, 0.0) for thread, seconds in after.items()]
        frequency = _frequency_mhz()
        return Conditions(
            threads_used=_effective_number(spent),
            frequency_mhz=None if self._frequency is None or frequency is None else (self._frequency, frequency),
            load=self._load,
            other_load=_share_of_others(busy - own_cpu, elapsed),
        )

    def _thread_seconds(self) -> dict[int, float]:
        return {thread.id: thread.user_time + thread.system_time for thread in self._process.threads()}


def condition_flags(conditions: Conditions, threads: int, disturbance: float) -> tuple[str, ...]:
    """Returns the warnings that a reader needs: more than the configured `threads` were busy (0 allows any number),
    other processes took more than the share `disturbance` of CPU time, or the clock changed by more than that share.
    """
    flags = []
    used, other_load, frequency = conditions.threads_used, conditions.other_load, conditions.frequency_mhz
    if threads and used is not None and round(used) > threads:
        flags.append(f"{used:.1f} threads were busy, {threads} configured")
    if other_load is not None and other_load > disturbance:
        flags.append(f"others took {100 * other_load:.0f} % of the machine's CPU time")
    if frequency is not None and abs(frequency[1] - frequency[0]) > disturbance * frequency[0]:
        flags.append(f"the CPU's clock went from {frequency[0]:.0f} to {frequency[1]:.0f} MHz")
    return tuple(flags)


def _effective_number(seconds: Sequence[float]) -> float | None:
    total = sum(seconds)
    return total * total / sum(spent * spent for spent in seconds) if total >= LEAST_TICKS * TICK_S else None


def _share_of_others(seconds: float, elapsed: float) -> float | None:
    capacity = elapsed * (psutil.cpu_count() or 1)
    return min(1.0, max(0.0, seconds / capacity)) if capacity >= LEAST_TICKS * TICK_S else None


def _busy_seconds() -> float:
    """Returns CPU seconds of all processes since the machine started. The time of guests is already part of `user`."""
    times = psutil.cpu_times()._asdict()
    idle = ("idle", "iowait", "guest", "guest_nice")
    return float(sum(seconds for name, seconds in times.items() if name not in idle))


def _frequency_mhz() -> float | None:
    frequency = psutil.cpu_freq()
    return float(frequency.current) if frequency is not None and frequency.current else None

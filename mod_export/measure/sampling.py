"""Rounds in which engines are interleaved on one machine: warm-up until stable, then as many samples as requested.

Two separate loops would also measure the drift of the machine (clocks, temperature, neighbours). Here every engine runs
in every round, so a disturbance of a round affects all engines, and a ratio over the rounds stays meaningful.
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mod_export.config import LatencyOptions

if TYPE_CHECKING:
    from numpy.typing import NDArray

NS_PER_MS = 1e6
RUNS_PER_ROUND = 2
"""Runs of each engine in a round. The control compares one engine's runs of one number with those of the other; which
of them ran first is random."""
LEAST_BLOCKS = 2
"""Blocks of rounds that are sampled even after the deadline, for the slowest engines: one block has no spread."""
LEAST_WINDOW = 2
"""Rounds in each of the two warm-up windows that are run even after the deadline."""
WARMUP_SHARE = 1 / 3
"""Share of the time for warm-up and sampling that the warm-up may take."""


class Rounds:
    """Runs rounds of `runs`, one function for each engine, in orders drawn with `seed`, and keeps the samples."""

    def __init__(self, runs: Sequence[Callable[[], object]], seed: int) -> None:
        self._runs, self._seed = runs, seed
        self._samples_ms: list[list[float]] = []
        self._orders = run_orders(RUNS_PER_ROUND * len(runs), seed)
        self.warmup = 0

    @property
    def block(self) -> int:
        """Rounds over which the run order is balanced."""
        return balanced_rounds(RUNS_PER_ROUND * len(self._runs))

    @property
    def done(self) -> int:
        """Number of rounds sampled."""
        return len(self._samples_ms)

    def samples_ms(self, engine: int) -> NDArray[np.float64]:
        """Returns milliseconds, float64 (rounds, RUNS_PER_ROUND). Which run in a round came first is random."""
        samples = np.array(self._samples_ms, dtype=np.float64).reshape(self.done, RUNS_PER_ROUND, len(self._runs))
        return samples[:, :, engine]

    def warm_up(self, options: LatencyOptions, deadline: float) -> tuple[bool, ...]:
        """Runs every engine once per round until each is stable: until the medians of the last two windows of
        `options.warmup` rounds agree. Gives up after `options.max_warmup` rounds or at the deadline
        (of `time.perf_counter`); two windows of LEAST_WINDOW rounds are run in any case. Before there were two whole
        windows, nothing is known to be stable.

        Returns:
            For each engine, whether it became stable.
        """
        window, least = options.warmup, min(options.warmup, LEAST_WINDOW)
        rounds_ms: list[list[float]] = []
        stable = (False,) * len(self._runs)
        orders = run_orders(len(self._runs), self._seed)
        while len(rounds_ms) < 2 * least or (
            time.perf_counter() < deadline
            and (len(rounds_ms) < 2 * window or (not all(stable) and len(rounds_ms) < options.max_warmup))
        ):
            rounds_ms.append(self._round(next(orders)))
            if len(rounds_ms) >= 2 * window:
                pair = rounds_ms[-2 * window : -window], rounds_ms[-window:]
                earlier, later = (np.median(window_ms, axis=0) for window_ms in pair)
                stable = tuple(bool(agrees) for agrees in np.abs(later - earlier) <= options.warmup_tolerance * earlier)
        self.warmup += len(rounds_ms)
        return stable

    def sample(self, rounds: int, deadline: float = math.inf) -> None:
        """Samples more rounds, in which every engine runs RUNS_PER_ROUND times. After LEAST_BLOCKS blocks, no block
        begins after the deadline (of `time.perf_counter`).
        """
        for _ in range(rounds):
            begins = self.done % self.block == 0
            if begins and self.done >= LEAST_BLOCKS * self.block and time.perf_counter() >= deadline:
                return
            self._samples_ms.append(self._round(next(self._orders)))

    def _round(self, order: Sequence[int]) -> list[float]:
        times_ms = [0.0] * len(order)
        for index in order:
            run = self._runs[index % len(self._runs)]
            begin = time.perf_counter_ns()
            run()
            times_ms[index] = (time.perf_counter_ns() - begin) / NS_PER_MS
        return times_ms


def interleaved(runs: Sequence[Callable[[], object]], options: LatencyOptions, seed: int) -> Rounds:
    """Warms up, and takes `options.samples` samples of each engine, fewer if that takes longer than `max_seconds`."""
    rounds = Rounds(runs, seed)
    begin = time.perf_counter()
    with garbage_collector_off():
        rounds.warm_up(options, begin + WARMUP_SHARE * options.max_seconds)
        rounds.sample(planned_looks(options, rounds.block)[0], begin + options.max_seconds)
    return rounds


def planned_looks(options: LatencyOptions, block: int) -> tuple[int, ...]:
    """Returns the numbers of rounds after which samples are looked at: for `samples`, then doubled up to `max_samples`.

    Looks are few and planned, because every look is a chance to stop by accident (`statistics.compare`).
    """
    most = _whole(max(options.samples, options.max_samples), block)
    looks = [_whole(options.samples, block)]
    while looks[-1] < most:
        looks.append(min(2 * looks[-1], most))
    return tuple(looks)


def _whole(samples: int, block: int) -> int:
    """Returns the rounds for this many samples of each engine, in whole blocks."""
    return -(-samples // (RUNS_PER_ROUND * block)) * block


@contextlib.contextmanager
def garbage_collector_off() -> Iterator[None]:
    """Turns garbage collection off: a collection during a sample would count as time of the engine."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def run_orders(count: int, seed: int) -> Iterator[tuple[int, ...]]:
    """Yields orders of the numbers below `count` without end; every block of `balanced_rounds(count)` is balanced.

    A block is a Williams design (Experimental designs balanced for the estimation of residual effects of treatments,
    1949): over its orders, every number has every position equally often, and is followed by every other number equally
    often. In each block, the assignment of numbers and the order of the rows are drawn at random. A fixed order such as
    A/B/A' favours the engine that runs twice: it sometimes follows itself, with warm caches.
    """
    rng = random.Random(seed)  # noqa: S311 - a run order is no secret.
    while True:
        name = rng.sample(range(count), count)
        block = [tuple(name[index] for index in order) for order in _williams(count)]
        yield from rng.sample(block, len(block))


def balanced_rounds(count: int) -> int:
    """Returns the number of successive orders that are balanced."""
    return len(_williams(count))


def _williams(count: int) -> list[tuple[int, ...]]:
    # 0, 1, n-1, 2, n-2 ...: all differences between neighbours are distinct, and a shift keeps them.
    first = [(index + 1) // 2 if index % 2 else -(index // 2) for index in range(count)]
    square = [tuple((index + shift) % count for index in first) for shift in range(count)]
    return square if count % 2 == 0 else square + [order[::-1] for order in square]

"""Rounds in which engines are interleaved on one machine: warm-up until stable, then samples until told to stop.

Two loops one after the other measure the machine's drift (clocks, temperature, neighbours) as well as the models. Here
every engine runs in every round, so what disturbs a round disturbs all of them, and a ratio taken over the rounds
stays meaningful. What is timed is one `Runner.run` with its feeds in host memory: copies to a device and back count.
"""

from __future__ import annotations

import contextlib
import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mod_export.config import LatencyOptions
from mod_export.engines.protocol import Runner

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["RUNS_PER_ROUND", "Rounds", "balanced_rounds", "garbage_collector_off", "planned_looks", "run_orders"]

NS_PER_MS = 1e6
RUNS_PER_ROUND = 2
"""Runs of each engine in a round. Its first runs against its second runs are the control."""


class Rounds:
    """Runs rounds and keeps every sample.

    Args:
        runners: loaded engines.
        feeds: input name -> array. A runner is given those that it has inputs for: a dense engine reads no lengths, and
            some builders drop what nothing reads.
        seed: of the run order.
        outputs: names of the outputs to ask for; all by default.
        after_round: called after each round, warm-up included, outside the timed part: for a progress bar.
    """

    def __init__(
        self,
        runners: Sequence[Runner],
        feeds: Mapping[str, NDArray[np.generic]],
        *,
        seed: int,
        outputs: Sequence[str] | None = None,
        after_round: Callable[[], None] | None = None,
    ) -> None:
        self._runners = runners
        self._feeds = [{name: array for name, array in feeds.items() if name in runner.inputs} for runner in runners]
        self._seed = seed
        self._outputs = outputs
        self._after_round = after_round
        self._taken: list[list[float]] = []
        self._orders = run_orders(RUNS_PER_ROUND * len(runners), seed)
        self.warmup = 0

    @property
    def block(self) -> int:
        """Rounds over which the run order is balanced."""
        return balanced_rounds(RUNS_PER_ROUND * len(self._runners))

    @property
    def done(self) -> int:
        """Rounds sampled."""
        return len(self._taken)

    def samples_ms(self, runner: int) -> NDArray[np.float64]:
        """Milliseconds, float64 (rounds, RUNS_PER_ROUND). Which of the runs in a round came first is random."""
        taken = np.array(self._taken, dtype=np.float64).reshape(self.done, RUNS_PER_ROUND, len(self._runners))
        return taken[:, :, runner]

    def warm_up(self, options: LatencyOptions, deadline: float) -> tuple[bool, ...]:
        """Runs every runner once a round until each is stable: until the medians of the last two windows of
        `options.warmup` rounds agree. Gives up after `options.max_warmup` rounds or at the deadline
        (of `time.perf_counter`), but never before the first two windows.

        Returns:
            For each runner, whether it became stable.
        """
        window = options.warmup
        taken: list[list[float]] = []
        stable = (False,) * len(self._runners)
        orders = run_orders(len(self._runners), self._seed)
        while len(taken) < 2 * window or (
            not all(stable) and len(taken) < options.max_warmup and time.perf_counter() < deadline
        ):
            taken.append(self._round(next(orders)))
            if len(taken) >= 2 * window:
                earlier, later = np.median(taken[-2 * window : -window], axis=0), np.median(taken[-window:], axis=0)
                stable = tuple(bool(off) for off in np.abs(later - earlier) <= options.warmup_tolerance * earlier)
        self.warmup += len(taken)
        return stable

    def sample(self, rounds: int) -> None:
        """Samples more rounds, in which every engine runs RUNS_PER_ROUND times."""
        for _ in range(rounds):
            self._taken.append(self._round(next(self._orders)))

    def _round(self, order: Sequence[int]) -> list[float]:
        taken = [0.0] * len(order)
        for run in order:
            runner = run % len(self._runners)
            begin = time.perf_counter_ns()
            self._runners[runner].run(self._feeds[runner], self._outputs)
            end = time.perf_counter_ns()
            taken[run] = (end - begin) / NS_PER_MS
        if self._after_round is not None:
            self._after_round()
        return taken


def planned_looks(options: LatencyOptions, block: int) -> tuple[int, ...]:
    """Numbers of rounds after which samples are looked at: those for `samples`, then doubled up to `max_samples`.

    Few and planned, because every look is a chance to stop by accident (`comparison.compare`).
    """
    most = _whole(max(options.samples, options.max_samples), block)
    found = [_whole(options.samples, block)]
    while found[-1] < most:
        found.append(min(2 * found[-1], most))
    return tuple(found)


def _whole(samples: int, block: int) -> int:
    """Rounds for this many samples of each runner, in whole blocks."""
    return -(-samples // (RUNS_PER_ROUND * block)) * block


@contextlib.contextmanager
def garbage_collector_off() -> Iterator[None]:
    """A collection in the middle of a sample would be counted as time of the engine that it hits."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def run_orders(count: int, seed: int) -> Iterator[tuple[int, ...]]:
    """Endless orders of the numbers below `count`, balanced over every `balanced_rounds(count)` of them.

    A block is a Williams design (Experimental designs balanced for the estimation of residual effects of treatments,
    1949): over its orders, every number has every position equally often, and is followed by every other number equally
    often. In each block, the assignment of numbers and the order of the rows are drawn at random.
    """
    rng = random.Random(seed)  # noqa: S311 - a run order is no secret.
    while True:
        name = rng.sample(range(count), count)
        block = [tuple(name[index] for index in order) for order in _williams(count)]
        yield from rng.sample(block, len(block))


def balanced_rounds(count: int) -> int:
    """How many orders in a row are balanced."""
    return len(_williams(count))


def _williams(count: int) -> list[tuple[int, ...]]:
    # 0, 1, n-1, 2, n-2 ...: the differences between neighbours are all different, whatever is added to the row.
    first = [(index + 1) // 2 if index % 2 else -(index // 2) for index in range(count)]
    square = [tuple((index + shift) % count for index in first) for shift in range(count)]
    return square if count % 2 == 0 else square + [order[::-1] for order in square]

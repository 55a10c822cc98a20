"""Latency samples of runners that share a machine, taken in turns.

Two loops one after the other measure the machine's drift (clocks, temperature, neighbours) as well as the models. Here
every round runs every runner once, so what disturbs a round disturbs all of them, and a ratio taken over the rounds
stays meaningful. What is timed is one `Runner.run` with its feeds in host memory: copies to a device and back count.
"""

from __future__ import annotations

import contextlib
import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mod_export.artifacts import Bucket, DType, ModelKind
from mod_export.errors import EngineError
from mod_export.protocols import Runner

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["LatencyRow", "Setting", "latency_rows", "sample_latency"]

NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is the same for all runners of one comparison."""

    target: str
    bucket: Bucket
    dtype: DType

    def __str__(self) -> str:
        return f"{self.target} {self.bucket.name} {self.dtype}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyRow:
    """The latency of one model in one setting, with the conditions that it holds for.

    Attributes:
        target: name of the engine family.
        bucket: name of the bucket, such as b1s512.
        dtype: dtype of the engine.
        model: `mod` or `dense`.
        providers: what the engine really ran on.
        threads: CPU threads of the engine; 0 is the library's own choice.
        warmup: rounds that ran before the first sample.
        samples_ms: every sample, in the order of the rounds: sample i of two models of one setting is one round.
        p50_ms: median.
        p90_ms: 90th percentile, linear between samples.
        p99_ms: 99th percentile; with fewer than 100 samples it lies close to the slowest one.
        mean_ms: mean.
        stdev_ms: standard deviation of the sample (divisor n - 1).
    """

    target: str
    bucket: str
    dtype: DType
    model: ModelKind
    providers: tuple[str, ...]
    threads: int
    warmup: int
    samples_ms: tuple[float, ...]
    p50_ms: float
    p90_ms: float
    p99_ms: float
    mean_ms: float
    stdev_ms: float


def latency_rows(
    runners: Mapping[ModelKind, Runner],
    feeds: Mapping[str, NDArray[np.generic]],
    setting: Setting,
    *,
    warmup: int,
    samples: int,
    seed: int,
    outputs: Sequence[str] | None = None,
    after_round: Callable[[], None] | None = None,
) -> tuple[LatencyRow, ...]:
    """Samples all runners on the same feeds, in this process, and sums up each.

    Args:
        runners: model -> loaded engine. All of one target, dtype and thread count.
        feeds: input name -> array. A runner is given those that it has inputs for: a dense engine reads no lengths,
            and some builders drop what nothing reads.
        setting: what the rows are about.
        warmup: rounds to run first, without samples.
        samples: rounds to sample.
        seed: of the order in which runners take turns.
        outputs: names of the outputs to ask for; all by default.
        after_round: called after each round, warm-up included, outside the timed part: for a progress bar.

    Returns:
        One row for each runner, in their order.

    Raises:
        EngineError: the runners do not run under the same conditions, so that a ratio would mean nothing.
    """
    _same_conditions(runners, setting)
    sampled = sample_latency(
        list(runners.values()),
        feeds,
        warmup=warmup,
        samples=samples,
        seed=seed,
        outputs=outputs,
        after_round=after_round,
    )
    return tuple(
        _row(setting, model, runner, warmup, samples_ms)
        for (model, runner), samples_ms in zip(runners.items(), sampled, strict=True)
    )


def sample_latency(
    runners: Sequence[Runner],
    feeds: Mapping[str, NDArray[np.generic]],
    *,
    warmup: int,
    samples: int,
    seed: int,
    outputs: Sequence[str] | None = None,
    after_round: Callable[[], None] | None = None,
) -> tuple[tuple[float, ...], ...]:
    """Milliseconds of every sample, runner by runner; sample i of all runners was taken in the same round.

    The order inside a round is shuffled, and every second round runs in the reverse of the round before it, so that
    each runner comes first as often as any other and none always inherits the caches of the same neighbour.
    """
    rng = random.Random(seed)  # noqa: S311 - an order of turns is no secret.
    order = list(range(len(runners)))
    own_feeds = [{name: array for name, array in feeds.items() if name in runner.inputs} for runner in runners]
    taken: list[list[float]] = [[] for _ in runners]
    with _garbage_collector_off():
        for number in range(warmup + samples):
            if number % 2:
                order.reverse()
            else:
                rng.shuffle(order)
            for index in order:
                begin = time.perf_counter_ns()
                runners[index].run(own_feeds[index], outputs)
                end = time.perf_counter_ns()
                if number >= warmup:
                    taken[index].append((end - begin) / NS_PER_MS)
            if after_round is not None:
                after_round()
    return tuple(tuple(samples_ms) for samples_ms in taken)


@contextlib.contextmanager
def _garbage_collector_off() -> Iterator[None]:
    """A collection in the middle of a sample would be billed to whichever runner it hits."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _same_conditions(runners: Mapping[ModelKind, Runner], setting: Setting) -> None:
    conditions = {model: (runner.providers, runner.threads) for model, runner in runners.items()}
    if len(set(conditions.values())) > 1:
        found = "; ".join(
            f"{model} on {', '.join(providers)} with {threads} threads"
            for model, (providers, threads) in conditions.items()
        )
        raise EngineError(
            f"{setting}: latency can only be compared under the same conditions, but the engines run {found}. "
            "Load all of them with the same providers and thread count"
        )


def _row(setting: Setting, model: ModelKind, runner: Runner, warmup: int, samples_ms: tuple[float, ...]) -> LatencyRow:
    p50, p90, p99 = (float(value) for value in np.percentile(samples_ms, (50, 90, 99)))
    return LatencyRow(
        target=setting.target,
        bucket=setting.bucket.name,
        dtype=setting.dtype,
        model=model,
        providers=tuple(runner.providers),
        threads=runner.threads,
        warmup=warmup,
        samples_ms=samples_ms,
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        mean_ms=float(np.mean(samples_ms)),
        stdev_ms=float(np.std(samples_ms, ddof=1)),
    )

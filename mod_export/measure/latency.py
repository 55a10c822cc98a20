"""The latency of a model and its dense twin: sampled in turn, summed up, with the conditions that it holds for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter

from mod_export.artifacts import Bucket, DType, ModelKind
from mod_export.config import LatencyOptions
from mod_export.errors import EngineError
from mod_export.measure.conditions import Conditions, Watch, condition_flags
from mod_export.measure.decision import compare, settled
from mod_export.measure.intervals import quantile_interval
from mod_export.measure.sampling import TURNS, Rounds, garbage_collector_off, looks
from mod_export.measure.spread import Spread, spread_of
from mod_export.protocols import Runner

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["LatencyRow", "Setting", "latency_row", "latency_rows"]


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
        samples_ms: every sample, in the order of the rounds. Each round has two of each model, so samples 2 r and
            2 r + 1 of both models of a setting are round r. Those of even index against those of odd index are the
            control.
        p50_ms: median.
        p90_ms: 90th percentile, linear between samples.
        p99_ms: 99th percentile; with fewer than 100 samples it lies close to the slowest one.
        mean_ms: mean.
        stdev_ms: standard deviation of the sample (divisor n - 1).
        p50_ci95: 95 % interval of the median; None where the samples do not bound it.
        p90_ci95: likewise of the 90th percentile, which needs 36 independent samples.
        p99_ci95: likewise of the 99th percentile, which needs 368 independent samples.
        cv: coefficient of variation, standard deviation over mean.
        iqr_ms: interquartile range.
        drift: median of the last third of the samples over that of the first third, minus 1.
        outliers: samples more than 1.5 interquartile ranges beyond the quartiles.
        flags: what speaks against these numbers, in words.
        stable: whether the warm-up ended because the latency had become stable.
        conditions: of the machine, the same for both models.
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
    p50_ci95: tuple[float, float] | None = None
    p90_ci95: tuple[float, float] | None = None
    p99_ci95: tuple[float, float] | None = None
    cv: float | None = None
    iqr_ms: float | None = None
    drift: float | None = None
    outliers: int = 0
    flags: tuple[str, ...] = ()
    stable: bool | None = None
    conditions: Conditions | None = None

    @property
    def samples_RT(self) -> NDArray[np.float64]:
        """Milliseconds by round and turn, float64 (rounds, 2)."""
        return np.array(self.samples_ms, dtype=np.float64).reshape(-1, TURNS)


def latency_row(data: Mapping[str, Any]) -> LatencyRow:
    """The inverse of `dataclasses.asdict`, also after a round trip through JSON, which has lists only."""
    return TypeAdapter(LatencyRow).validate_python(data)


def latency_rows(
    runners: Mapping[ModelKind, Runner],
    feeds: Mapping[str, NDArray[np.generic]],
    setting: Setting,
    options: LatencyOptions,
    *,
    seed: int,
    gate: float | None = None,
    outputs: Sequence[str] | None = None,
    after_round: Callable[[], None] | None = None,
) -> tuple[LatencyRow, ...]:
    """Samples all runners on the same feeds, in this process, and sums up each.

    After `options.samples` samples the comparison of dense and MoD is looked at, and samples are doubled until it is
    settled or `options.max_samples` or `options.max_seconds` is spent (see `decision.compare` for why that is allowed).
    A single model gets `options.samples`.

    Args:
        runners: model -> loaded engine. All of one target, dtype and thread count.
        feeds: input name -> array; see `Rounds`.
        setting: what the rows are about.
        options: how to sample.
        seed: of the order of turns and of the intervals.
        gate: the speed-up that this setting must show, if any: sampling goes on until that is settled, too.
        outputs: names of the outputs to ask for; all by default.
        after_round: called after each round, warm-up included, outside the timed part: for a progress bar.

    Returns:
        One row for each runner, in their order.

    Raises:
        EngineError: the runners do not run under the same conditions, so that a ratio would mean nothing.
    """
    _same_conditions(runners, setting)
    deadline = time.perf_counter() + options.max_seconds
    kinds = list(runners)
    rounds = Rounds(list(runners.values()), feeds, seed=seed, outputs=outputs, after_round=after_round)
    with garbage_collector_off():
        stable = rounds.warm_up(options, deadline)
        watch = Watch()
        _sample(rounds, kinds, options, deadline, gate=gate, seed=seed)
        conditions = watch.conditions()
    return tuple(
        _row(
            setting, model, runners[model], rounds.samples_ms(index), rounds.warmup, stable[index], conditions, options
        )
        for index, model in enumerate(kinds)
    )


def _sample(
    rounds: Rounds,
    kinds: Sequence[ModelKind],
    options: LatencyOptions,
    deadline: float,
    *,
    gate: float | None,
    seed: int,
) -> None:
    planned = looks(options, rounds.block)
    begin = time.perf_counter()
    for look in planned:
        wanted = look - rounds.done
        if rounds.done:
            now = time.perf_counter()
            affordable = int((deadline - now) / (now - begin) * rounds.done)
            wanted = min(wanted, affordable // rounds.block * rounds.block)
        if wanted <= 0:
            return
        rounds.sample(wanted)
        if not {"dense", "mod"} <= set(kinds) or rounds.done < look:
            return
        dense_RT, mod_RT = (rounds.samples_ms(kinds.index(kind)) for kind in ("dense", "mod"))
        found = compare(dense_RT, mod_RT, options, looks=len(planned), seed=seed)
        if settled(found, gate, options.precision):
            return


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


def _row(
    setting: Setting,
    model: ModelKind,
    runner: Runner,
    samples_RT: NDArray[np.float64],
    warmup: int,
    stable: bool,
    conditions: Conditions,
    options: LatencyOptions,
) -> LatencyRow:
    samples_ms = samples_RT.reshape(-1)
    p50, p90, p99 = (float(value) for value in np.percentile(samples_ms, (50, 90, 99)))
    spread = spread_of(samples_ms)
    return LatencyRow(
        target=setting.target,
        bucket=setting.bucket.name,
        dtype=setting.dtype,
        model=model,
        providers=tuple(runner.providers),
        threads=runner.threads,
        warmup=warmup,
        samples_ms=tuple(samples_ms.tolist()),
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        mean_ms=float(np.mean(samples_ms)),
        stdev_ms=float(np.std(samples_ms, ddof=1)),
        p50_ci95=quantile_interval(samples_ms, 0.5),
        p90_ci95=quantile_interval(samples_ms, 0.9),
        p99_ci95=quantile_interval(samples_ms, 0.99),
        cv=spread.cv,
        iqr_ms=spread.iqr_ms,
        drift=spread.drift,
        outliers=spread.outliers,
        flags=(
            *(() if stable else (f"not stable after {warmup} rounds of warm-up",)),
            *_spread_flags(spread, len(samples_ms), options),
            *condition_flags(conditions, runner.threads, options.disturbance),
        ),
        stable=stable,
        conditions=conditions,
    )


def _spread_flags(spread: Spread, samples: int, options: LatencyOptions) -> tuple[str, ...]:
    flags = []
    if spread.drifts and abs(spread.drift) > options.resolution:
        way = "slower" if spread.drift > 0 else "faster"
        flags.append(f"drift: the last third of the samples is {100 * abs(spread.drift):.1f} % {way} than the first")
    if spread.outliers > options.disturbance * samples:
        flags.append(f"{spread.outliers} of {samples} samples are outliers")
    return tuple(flags)

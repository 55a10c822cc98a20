"""The latency of a model and its dense baseline: interleaved samples, summed up, with the conditions they hold for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mod_export.benchmark.comparison import compare, settled
from mod_export.benchmark.sampling import RUNS_PER_ROUND, Rounds, garbage_collector_off, planned_looks
from mod_export.benchmark.statistics import Spread, quantile_interval, spread_of
from mod_export.benchmark.system_load import Watch, condition_flags
from mod_export.config import BuildConfig, LatencyOptions
from mod_export.engines import ENGINES
from mod_export.engines.protocol import Runner
from mod_export.errors import EngineError
from mod_export.results.latency import Conditions, LatencyRow
from mod_export.types import Bucket, Engine, ModelKind, Setting, primary_output

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["engine_pairs", "latency_rows", "measure_pair", "samples_by_round", "timing_feeds"]


def samples_by_round(row: LatencyRow) -> NDArray[np.float64]:
    """Milliseconds by round, float64 (rounds, RUNS_PER_ROUND)."""
    return np.array(row.samples_ms, dtype=np.float64).reshape(-1, RUNS_PER_ROUND)


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
        seed: of the run order and of the intervals.
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
    planned = planned_looks(options, rounds.block)
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


def engine_pairs(engines: Sequence[Engine]) -> dict[Setting, dict[ModelKind, Engine]]:
    """Both engines of every setting that has the model and its dense baseline; the key is the model's."""
    found: dict[Setting, dict[ModelKind, Engine]] = {}
    for engine in engines:
        found.setdefault(engine.setting.of("mod"), {})[engine.model] = engine
    return {setting: pair for setting, pair in found.items() if {"mod", "dense"} <= pair.keys()}


def measure_pair(
    root: Path,
    setting: Setting,
    pair: Mapping[ModelKind, Engine],
    vocab_size: int,
    config: BuildConfig,
    gate: float | None = None,
) -> Sequence[LatencyRow]:
    """Loads both engines of the build folder `root` and samples them interleaved on the same tokens.

    Args:
        root: the build folder.
        setting: what both engines have in common.
        pair: the two engines.
        vocab_size: the tokens are drawn below it.
        config: how to sample.
        gate: the speed-up that this setting must show, if any.
    """
    builder = ENGINES[setting.target]
    feeds = timing_feeds(setting.bucket, vocab_size, config.seed)
    threads = config.latency.threads
    with (
        builder.load(root, pair["mod"], config, threads) as mod,
        builder.load(root, pair["dense"], config, threads) as dense,
    ):
        return latency_rows(
            {"mod": mod, "dense": dense},
            feeds,
            setting,
            config.latency,
            seed=config.seed,
            gate=gate,
            outputs=[primary_output(mod.outputs)],
        )


def timing_feeds(bucket: Bucket, vocab_size: int, seed: int) -> dict[str, np.ndarray]:
    """A full bucket of random ids, by the names of the graph's inputs. Graphs have static shapes, so their time does
    not depend on which ids they are.
    """
    ids_BS = np.random.default_rng(seed).integers(0, vocab_size, (bucket.batch, bucket.seq), dtype=np.int64)
    return {"input_ids": ids_BS, "lengths": np.full(bucket.batch, bucket.seq, dtype=np.int64)}

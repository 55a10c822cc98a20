"""Latency of engines: interleaved samples, their summary, and the conditions that they hold for.

A model is timed beside its dense baseline, or alone if it has none. A narrower dtype is timed beside float32.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mod_export.config import BuildConfig, LatencyOptions
from mod_export.engines import ENGINES
from mod_export.engines.protocol import Arrays, Runner
from mod_export.errors import EngineError
from mod_export.measure.conditions import Watch, condition_flags
from mod_export.measure.sampling import WARMUP_SHARE, Rounds, garbage_collector_off, interleaved, planned_looks
from mod_export.measure.statistics import compare, drift_of, outliers_of, quantile_interval, settled
from mod_export.rows.base import setting_fields
from mod_export.rows.speed import LatencyRow, PrecisionRow
from mod_export.types import Engine, ModelKind, Setting, primary_output

if TYPE_CHECKING:
    from numpy.typing import NDArray


def measure_latency(
    root: Path, engines: Mapping[ModelKind, Engine], feeds: Arrays, config: BuildConfig, gate: float | None = None
) -> tuple[LatencyRow, ...]:
    """Loads an engine of the build folder `root` and that of its dense baseline, if `engines` has one, and samples both
    on the same `feeds`. `gate` is the speed-up that this setting must reach, if any.
    """
    setting = engines["mod"].setting
    load = partial(ENGINES[setting.target].load, root, config=config, threads=config.latency.threads)
    with contextlib.ExitStack() as opened:
        runners = {kind: opened.enter_context(load(engine)) for kind, engine in engines.items()}
        return latency_rows(runners, feeds, setting, config.latency, seed=config.seed, gate=gate)


def latency_rows(
    runners: Mapping[ModelKind, Runner],
    feeds: Arrays,
    setting: Setting,
    options: LatencyOptions,
    *,
    seed: int,
    gate: float | None = None,
) -> tuple[LatencyRow, ...]:
    """Samples the models on the same feeds, in this process, and summarizes each.

    After `options.samples` samples, or as many as there is time for, the comparison of dense and MoD is looked at. The
    samples are doubled until the comparison and the `gate` of this setting are settled, or until `options.max_samples`
    or `options.max_seconds` is used up (`statistics.compare` says why that is allowed). For a model alone, the interval
    of its median is looked at.

    Returns:
        One row for each of `runners` (model -> loaded engine), in their order.

    Raises:
        EngineError: the runners do not run under the same conditions, so that a ratio would mean nothing.
    """
    _same_conditions(runners, setting)
    begin = time.perf_counter()
    rounds = Rounds(_runs(runners.values(), feeds), seed)
    kinds = list(runners)
    with garbage_collector_off():
        stable = rounds.warm_up(options, begin + WARMUP_SHARE * options.max_seconds)
        watch = Watch()
        _sample(rounds, kinds, options, begin + options.max_seconds, gate=gate, seed=seed)
        conditions = watch.conditions()
    rows = []
    for index, (model, runner) in enumerate(runners.items()):
        samples_ms = rounds.samples_ms(index).reshape(-1)
        unstable = () if stable[index] else (_unstable(rounds.warmup, options),)
        disturbed = condition_flags(conditions, runner.threads, options.disturbance)
        rows.append(
            LatencyRow(
                **setting_fields(setting.of(model)),
                **_numbers(samples_ms),
                providers=tuple(runner.providers),
                threads=runner.threads,
                warmup=rounds.warmup,
                samples_ms=tuple(samples_ms.tolist()),
                flags=(*unstable, *_spread_flags(samples_ms, options), *disturbed),
                stable=stable[index],
                conditions=conditions,
            )
        )
    return tuple(rows)


def _unstable(rounds: int, options: LatencyOptions) -> str:
    if rounds < 2 * options.warmup:
        return f"warm-up was cut off after {rounds} rounds, by latency.max_seconds"
    return f"not stable after {rounds} rounds of warm-up"


def _runs(runners: Iterable[Runner], feeds: Arrays) -> list[Callable[[], object]]:
    """Returns for each engine a function that runs it once on feeds in host memory: copies to a device and back count.

    An engine gets only the feeds that it has inputs for: a dense one reads no lengths, and builders drop unused inputs.
    """
    return [
        partial(
            runner.run,
            {name: array for name, array in feeds.items() if name in runner.inputs},
            [primary_output(runner.outputs)],
        )
        for runner in runners
    ]


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
        rounds.sample(wanted, deadline)
        if rounds.done < look or _settled(rounds, kinds, options, len(planned), gate=gate, seed=seed):
            return


def _settled(
    rounds: Rounds, kinds: Sequence[ModelKind], options: LatencyOptions, looks: int, *, gate: float | None, seed: int
) -> bool:
    """Whether the comparison is settled; for a model alone, whether its median is known to within `precision`."""
    if len(kinds) == 1:
        samples_ms = rounds.samples_ms(0).reshape(-1)
        interval = quantile_interval(samples_ms, 0.5)
        return interval is not None and interval[1] - interval[0] <= options.precision * float(np.median(samples_ms))
    dense_RT, mod_RT = (rounds.samples_ms(kinds.index(kind)) for kind in ("dense", "mod"))
    return settled(compare(dense_RT, mod_RT, options, looks=looks, seed=seed), gate, options.precision)


def _same_conditions(runners: Mapping[ModelKind, Runner], setting: Setting) -> None:
    conditions = {model: (runner.providers, runner.threads) for model, runner in runners.items()}
    if len(set(conditions.values())) > 1:
        listed = "; ".join(
            f"{model} on {', '.join(providers)} with {threads} threads"
            for model, (providers, threads) in conditions.items()
        )
        raise EngineError(
            f"{setting}: latency can only be compared under the same conditions, but the engines run {listed}. "
            "Load all of them with the same providers and thread count"
        )


def _numbers(samples_ms: NDArray[np.float64]) -> dict[str, Any]:
    mean_ms, stdev_ms = float(np.mean(samples_ms)), float(np.std(samples_ms, ddof=1))
    numbers: dict[str, Any] = {
        "mean_ms": mean_ms,
        "stdev_ms": stdev_ms,
        "cv": stdev_ms / mean_ms,
        "iqr_ms": float(np.subtract(*np.percentile(samples_ms, (75, 25)))),
        "drift": drift_of(samples_ms)[0],
        "outliers": outliers_of(samples_ms),
    }
    for percent in (50, 90, 99):
        numbers[f"p{percent}_ms"] = float(np.percentile(samples_ms, percent))
        numbers[f"p{percent}_ci95"] = quantile_interval(samples_ms, percent / 100)
    return numbers


def _spread_flags(samples_ms: NDArray[np.float64], options: LatencyOptions) -> tuple[str, ...]:
    flags = []
    drift, real = drift_of(samples_ms)
    if real and abs(drift) > options.resolution:
        way = "slower" if drift > 0 else "faster"
        flags.append(f"drift: the last third of the samples is {100 * abs(drift):.1f} % {way} than the first")
    outliers, count = outliers_of(samples_ms), len(samples_ms)
    if outliers > options.disturbance * count:
        flags.append(f"{outliers} of {count} samples are outliers")
    return tuple(flags)


def precision_pairs(engines: Sequence[Engine]) -> list[tuple[Engine, Engine]]:
    """Returns (engine, its float32 counterpart) for every engine of another dtype that has one."""
    wide = {(engine.setting, engine.arch): engine for engine in engines if engine.dtype == "float32"}
    counterparts = ((engine, wide.get((replace(engine.setting, dtype="float32"), engine.arch))) for engine in engines)
    return [(engine, twin) for engine, twin in counterparts if twin is not None and twin is not engine]


def measure_precision(root: Path, narrow: Engine, wide: Engine, feeds: Arrays, config: BuildConfig) -> PrecisionRow:
    """Samples an engine and its float32 counterpart interleaved on the same inputs, `latency.samples` each.

    Raises:
        TargetError: this machine cannot run them.
        EngineError: one of the files is not a usable engine.
    """
    load = partial(ENGINES[narrow.target].load, root, config=config, threads=config.latency.threads)
    with load(wide) as float32, load(narrow) as narrower:
        rounds = interleaved(_runs([float32, narrower], feeds), config.latency, config.seed)
    comparison = compare(rounds.samples_ms(0), rounds.samples_ms(1), config.latency, looks=1, seed=config.seed)
    p50_ms = float(np.median(rounds.samples_ms(1)))
    return PrecisionRow(
        **setting_fields(narrow.setting),
        bytes=_bytes(root, narrow),
        float32_bytes=_bytes(root, wide),
        p50_ms=p50_ms,
        float32_p50_ms=comparison.measured * p50_ms,
        measured=comparison.measured,
        ci95=comparison.ci95,
        verdict=comparison.verdict,
    )


def _bytes(root: Path, engine: Engine) -> int:
    # An engine in 16 bits reads a few tensors of the float32 file too, and none of its other bytes.
    return sum((root / path).stat().st_size for path in (engine.path, engine.weights) if path is not None)

"""From samples to a speed-up: a ratio, its interval, a verdict, and what FLOPs predict.

Over the dense baseline, and of a narrower dtype over float32. Rounds are compared, not samples: what both engines gave
in one round was taken together, and whatever disturbed the machine disturbed both.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mod_export.benchmark.comparison import Comparison, compare, gate_reached
from mod_export.benchmark.explain import explain
from mod_export.benchmark.latency import samples_by_round, timing_feeds
from mod_export.benchmark.sampling import RUNS_PER_ROUND, Rounds, balanced_rounds, garbage_collector_off, planned_looks
from mod_export.config import BuildConfig, LatencyOptions
from mod_export.engines import ENGINES
from mod_export.errors import GraphError
from mod_export.results.base import EngineKey
from mod_export.results.cost import CostRow, PartRow
from mod_export.results.latency import LatencyRow, PrecisionRow, SpeedupRow
from mod_export.types import KINDS, Bucket, Engine, ModelKind, Site, primary_output

__all__ = ["Known", "gate_of", "gated_bucket", "measure_precision", "precision_pairs", "speedup_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known beside samples and FLOPs; all of it may be missing.

    Attributes:
        k_by_layer: name of the bucket -> layer -> tokens that this routed layer takes.
        flops: engine -> FLOPs of the graph that it runs, which can be fewer than those of the portable graph:
            attention in blocks of queries does not compute what a causal mask hides.
        roofline_ms: engine -> milliseconds that the roofline predicts.
        parts: measured parts of engines.
    """

    k_by_layer: Mapping[str, Mapping[Site, int]] = field(default_factory=dict)
    flops: Mapping[EngineKey, int] = field(default_factory=dict)
    roofline_ms: Mapping[EngineKey, float] = field(default_factory=dict)
    parts: Sequence[PartRow] = ()


def gated_bucket(buckets: Sequence[Bucket]) -> Bucket:
    """The largest bucket, the one that the speed-up gate applies to: most tokens, then the longest sequence."""
    return max(buckets, key=lambda bucket: (bucket.batch * bucket.seq, bucket.seq))


def gate_of(bucket: str, buckets: Sequence[Bucket], min_speedup: float) -> float | None:
    """What the speed-up of this bucket must reach; None where no gate applies."""
    return min_speedup if min_speedup > 0 and bucket == gated_bucket(buckets).name else None


def speedup_rows(
    latency: Sequence[LatencyRow],
    cost: Sequence[CostRow],
    buckets: Sequence[Bucket],
    options: LatencyOptions,
    *,
    seed: int,
    known: Known | None = None,
) -> tuple[SpeedupRow, ...]:
    """One row for each setting in which both models were sampled, in the order of `latency`.

    A setting that should have been sampled and was not has no row; `verdict.judge` knows what was expected.

    Args:
        latency: rows of both models.
        cost: rows of both models for every bucket sampled.
        buckets: all buckets of the build.
        options: those that the samples were taken with.
        seed: of the bootstrap.
        known: what predictions and reasons are drawn from.

    Raises:
        GraphError: the FLOPs of a bucket were not counted.
    """
    known = known or Known()
    costs = {(row.model, row.bucket): row for row in cost}
    mod_rows = {row.pair_key: row for row in latency if row.model == "mod"}
    rows = []
    for dense in latency:
        mod = mod_rows.get(dense.pair_key)
        if dense.model != "dense" or mod is None:
            continue
        pair = _cost(costs, "dense", dense.bucket), _cost(costs, "mod", dense.bucket)
        gate = gate_of(dense.bucket, buckets, options.min_speedup)
        found = _compared(dense, mod, options, seed)
        predicted = _predicted(known.flops, dense, pair)
        rows.append(
            SpeedupRow(
                target=dense.target,
                bucket=dense.bucket,
                dtype=dense.dtype,
                measured=found.measured,
                ci95=found.ci95,
                predicted_flops=predicted,
                efficiency=found.measured / predicted,
                gate=gate,
                passed=_passed(found, gate),
                predicted_roofline=_roofline(known.roofline_ms, dense),
                verdict=found.verdict,
                reason=_reason(found, dense, mod, pair, buckets, known),
                control=found.control,
            )
        )
    return tuple(rows)


def _compared(dense: LatencyRow, mod: LatencyRow, options: LatencyOptions, seed: int) -> Comparison:
    planned = planned_looks(options, balanced_rounds(RUNS_PER_ROUND * len((dense, mod))))
    return compare(samples_by_round(dense), samples_by_round(mod), options, looks=len(planned), seed=seed)


def _passed(found: Comparison, gate: float | None) -> bool | None:
    if gate is None:
        return None if math.isfinite(found.measured) else False
    return gate_reached(found, gate) is True


def _predicted(flops: Mapping[EngineKey, int], row: LatencyRow, cost: tuple[CostRow, CostRow]) -> float:
    mod, dense = (flops.get((*row.pair_key, kind)) for kind in KINDS)
    return dense / mod if dense and mod else cost[0].flops / cost[1].flops


def _roofline(roofline_ms: Mapping[EngineKey, float], row: LatencyRow) -> float | None:
    mod, dense = (roofline_ms.get((*row.pair_key, kind)) for kind in KINDS)
    return dense / mod if dense is not None and mod else None


def _reason(
    found: Comparison,
    dense: LatencyRow,
    mod: LatencyRow,
    cost: tuple[CostRow, CostRow],
    buckets: Sequence[Bucket],
    known: Known,
) -> str | None:
    if found.verdict == "faster":
        return None
    if found.verdict == "not faster":
        return explain(
            next(bucket for bucket in buckets if bucket.name == dense.bucket),
            *cost,
            dense_ms=dense.p50_ms,
            k_by_layer=known.k_by_layer.get(dense.bucket),
            parts=[part for part in known.parts if part.pair_key == dense.pair_key],
        )
    if not found.control.covers_one:
        low, high = found.control.ci99
        return (
            f"the control does not cover 1: the MoD engine against itself is {found.control.measured:.3f}x "
            f"(99 % interval {low:.3f} to {high:.3f}), so this machine shows differences that are not there"
        )
    low, high = found.ci95
    flags = "; ".join(dict.fromkeys(flag for row in (dense, mod) for flag in row.flags))
    return f"the interval {low:.3f} to {high:.3f} of {len(mod.samples_ms)} samples allows both" + (
        f" ({flags})" if flags else ""
    )


def _cost(costs: Mapping[tuple[ModelKind, str], CostRow], model: ModelKind, bucket: str) -> CostRow:
    if (model, bucket) not in costs:
        raise GraphError(
            f"{model} {bucket}: the FLOPs of this graph were not counted, so its latency has nothing to be held "
            "against; count them with benchmark.cost.cost_row"
        )
    return costs[model, bucket]


def precision_pairs(engines: Sequence[Engine]) -> list[tuple[Engine, Engine]]:
    """(engine, its float32 counterpart) for every engine of another dtype that has one."""
    wide = {_counterpart_key(engine): engine for engine in engines if engine.dtype == "float32"}
    return [
        (engine, wide[_counterpart_key(engine)])
        for engine in engines
        if engine.dtype != "float32" and _counterpart_key(engine) in wide
    ]


def _counterpart_key(engine: Engine) -> tuple[str, ModelKind, Bucket, str | None]:
    return engine.target, engine.model, engine.bucket, engine.arch


def measure_precision(root: Path, narrow: Engine, wide: Engine, vocab_size: int, config: BuildConfig) -> PrecisionRow:
    """Loads two engines of a build folder and samples them interleaved on the same tokens, `latency.samples` each.

    Args:
        root: the build folder.
        narrow: the engine that the row is about.
        wide: its float32 counterpart.
        vocab_size: the tokens are drawn below it.
        config: how to sample.

    Raises:
        TargetError: this machine cannot run them.
        EngineError: one of the files is not a usable engine.
    """
    builder, options = ENGINES[narrow.target], config.latency
    feeds = timing_feeds(narrow.bucket, vocab_size, config.seed)
    threads = options.threads
    with builder.load(root, narrow, config, threads) as other, builder.load(root, wide, config, threads) as float32:
        rounds = Rounds([float32, other], feeds, seed=config.seed, outputs=[primary_output(other.outputs)])
        with garbage_collector_off():
            rounds.warm_up(options, time.perf_counter() + options.max_seconds)
            rounds.sample(planned_looks(options, rounds.block)[0])
    found = compare(rounds.samples_ms(0), rounds.samples_ms(1), options, looks=1, seed=config.seed)
    p50_ms = float(np.median(rounds.samples_ms(1)))
    return PrecisionRow(
        target=narrow.target,
        bucket=narrow.bucket.name,
        dtype=narrow.dtype,
        model=narrow.model,
        bytes=_bytes(root, narrow),
        float32_bytes=_bytes(root, wide),
        p50_ms=p50_ms,
        float32_p50_ms=found.measured * p50_ms,
        measured=found.measured,
        ci95=found.ci95,
        verdict=found.verdict,
    )


def _bytes(root: Path, engine: Engine) -> int:
    return sum((root / path).stat().st_size for path in (engine.path, engine.weights) if path is not None)

"""From latency samples to a speed-up that can be defended: a ratio, its interval, and what FLOPs promised.

The ratio is of medians, because latency has outliers on one side only and a mean would follow them. The interval is a
percentile bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13) over *rounds*: the dense
and the MoD sample of a round are drawn together, because they were taken together and share what disturbed the machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mod_export.artifacts import Bucket, DType, ModelKind
from mod_export.errors import GraphError
from mod_export.measure.cost import CostRow
from mod_export.measure.latency import LatencyRow

__all__ = ["SpeedupRow", "gated_bucket", "ratio_of_medians", "speedup_rows"]

TAIL_PERCENT = 2.5
"""Left out on either side of a 95 % interval, which is what report.json's field `ci95` is named for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedupRow:
    """How much faster MoD is than its dense twin in one setting.

    Attributes:
        target: name of the engine family.
        bucket: name of the bucket.
        dtype: dtype of both engines.
        measured: median dense latency / median MoD latency.
        ci95: 95 % bootstrap interval of `measured`.
        predicted_flops: FLOPs of the dense graph / FLOPs of the MoD graph.
        efficiency: measured / predicted_flops.
        gate: least `measured` that this row must reach; None where no gate applies.
        passed: whether it does; None where no gate applies. NaN never passes.
    """

    target: str
    bucket: str
    dtype: DType
    measured: float
    ci95: tuple[float, float]
    predicted_flops: float
    efficiency: float
    gate: float | None
    passed: bool | None


def ratio_of_medians(
    dense_ms: Sequence[float], mod_ms: Sequence[float], *, resamples: int, seed: int
) -> tuple[float, tuple[float, float]]:
    """Median of `dense_ms` / median of `mod_ms`, and its 95 % bootstrap interval.

    Sample i of both is one round. The interval is widened, where it must be, to hold the ratio itself: a percentile
    interval of few or oddly tied samples can miss it.

    Costs: resamples x rounds numbers of memory, three times.
    """
    pair = np.array([dense_ms, mod_ms], dtype=np.float64)
    dense, mod = np.median(pair, axis=1)
    measured = float(dense / mod)
    rounds = pair.shape[1]
    draw = np.random.default_rng(seed).integers(0, rounds, size=(resamples, rounds))
    dense_R, mod_R = np.median(pair[:, draw], axis=2)
    low, high = np.percentile(dense_R / mod_R, (TAIL_PERCENT, 100 - TAIL_PERCENT))
    return measured, (min(float(low), measured), max(float(high), measured))


def gated_bucket(buckets: Sequence[Bucket]) -> Bucket:
    """The largest bucket, the one that the speed-up gate applies to: most tokens, then the longest sequence."""
    return max(buckets, key=lambda bucket: (bucket.batch * bucket.seq, bucket.seq))


def speedup_rows(
    latency: Sequence[LatencyRow],
    cost: Sequence[CostRow],
    buckets: Sequence[Bucket],
    *,
    min_speedup: float,
    resamples: int,
    seed: int,
) -> tuple[SpeedupRow, ...]:
    """One row for each setting in which both models were sampled, in the order of `latency`.

    A setting that should have been sampled and was not has no row; `verdict.judge` knows what was expected.

    Args:
        latency: rows of both models.
        cost: rows of both models for every bucket sampled.
        buckets: all buckets of the build.
        min_speedup: gate at the largest bucket; 0 is no gate.
        resamples: of the bootstrap.
        seed: of the bootstrap.

    Raises:
        GraphError: the FLOPs of a bucket were not counted.
    """
    flops = {(row.model, row.bucket): row.flops for row in cost}
    mod_rows = {(row.target, row.bucket, row.dtype): row for row in latency if row.model == "mod"}
    gated = gated_bucket(buckets).name if min_speedup > 0 else None
    rows = []
    for dense in latency:
        mod = mod_rows.get((dense.target, dense.bucket, dense.dtype))
        if dense.model != "dense" or mod is None:
            continue
        measured, ci95 = ratio_of_medians(dense.samples_ms, mod.samples_ms, resamples=resamples, seed=seed)
        predicted = _flops(flops, "dense", dense.bucket) / _flops(flops, "mod", dense.bucket)
        gate = min_speedup if dense.bucket == gated else None
        rows.append(
            SpeedupRow(
                target=dense.target,
                bucket=dense.bucket,
                dtype=dense.dtype,
                measured=measured,
                ci95=ci95,
                predicted_flops=predicted,
                efficiency=measured / predicted,
                gate=gate,
                passed=_passed(measured, gate),
            )
        )
    return tuple(rows)


def _passed(measured: float, gate: float | None) -> bool | None:
    if gate is None:
        return None if math.isfinite(measured) else False
    return measured >= gate


def _flops(flops: dict[tuple[ModelKind, str], int], model: ModelKind, bucket: str) -> int:
    if (model, bucket) not in flops:
        raise GraphError(
            f"{model} {bucket}: the FLOPs of this graph were not counted, so its latency has nothing to be held "
            "against; count them with measure.cost.cost_row"
        )
    return flops[model, bucket]

"""Turns latency rows into the speed-up over the dense baseline: ratio, interval, verdict, and prediction from FLOPs.

Rounds are compared, not samples: the samples of one round were measured together, so any disturbance of the machine
affected both engines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from mod_export.config import LatencyOptions
from mod_export.errors import GraphError
from mod_export.measure.explain import explain
from mod_export.measure.profile import by_engine
from mod_export.measure.sampling import RUNS_PER_ROUND, balanced_rounds, planned_looks
from mod_export.measure.statistics import Comparison, compare, gate_reached
from mod_export.rows.base import pair_fields
from mod_export.rows.cost import CostRow, PartRow
from mod_export.rows.speed import LatencyRow, SpeedupRow
from mod_export.types import Bucket, ModelKind, Setting, Site, pairs_of

GIVE_A_BASELINE = (
    "give a dense model with --baseline dense.pt, in Python with baseline=dense_module (of a factory that takes a "
    "capacity, the same module with capacity=1.0)"
)
NOTHING_COMPARED = f"there is no dense baseline, so latency has no speed-up and no gate; {GIVE_A_BASELINE}"
NO_SITE_TO_COMPARE = (
    "no routing site was found, so no token is known to skip a block; to compare the model with another, name that one "
    "with --baseline, in Python with baseline=other_module"
)
DENSE_ITSELF = (
    "by its spec every token goes through every block of this model, so a dense baseline would be the model itself; to "
    "compare it with another model, name that one with --baseline, in Python with baseline=other_module"
)


def gated_bucket(buckets: Sequence[Bucket]) -> Bucket:
    """Returns the bucket that the speed-up gate applies to: the largest by tokens, then by sequence length."""
    return max(buckets, key=lambda bucket: (bucket.batch * bucket.seq, bucket.seq))


def gate_of(bucket: Bucket, buckets: Sequence[Bucket], min_speedup: float) -> float | None:
    """Returns the speed-up that this bucket must reach; None if no gate applies."""
    return min_speedup if min_speedup > 0 and bucket == gated_bucket(buckets) else None


def speedup_rows(
    latency: Sequence[LatencyRow],
    cost: Sequence[CostRow],
    buckets: Sequence[Bucket],
    options: LatencyOptions,
    *,
    seed: int,
    k_by_layer: Mapping[Bucket, Mapping[Site, int]] | None = None,
    flops: Mapping[Setting, int | None] | None = None,
    parts: Sequence[PartRow] = (),
) -> tuple[SpeedupRow, ...]:
    """Returns one row for each setting in which both models were sampled, in the order of `latency`.

    A setting that should have been sampled and was not has no row; `verdict.judge` knows the expected settings.

    Args:
        latency: rows of both models.
        cost: rows of both models for every bucket sampled.
        buckets: all buckets that were built.
        options: the options with which the samples were taken.
        seed: seed of the bootstrap.
        k_by_layer: bucket -> routing site -> slots, as far as known.
        flops: setting of an engine -> FLOPs of the graph that it runs, as far as known. They can be fewer than those of
            the portable graph: attention in blocks of queries does not compute what a causal mask hides.
        parts: time of the parts of engines, predicted and measured, as far as known.

    Raises:
        GraphError: the FLOPs of a bucket were not counted.
    """
    costs = {(row.model, row.bucket): row for row in cost}
    timed = by_engine(parts)
    rows = []
    for setting, pair in pairs_of(latency).items():
        counted = {kind: _cost(costs, kind, setting.bucket) for kind in pair}
        comparison = _compared(pair, options, seed)
        predicted = _predicted(counted, {kind: (flops or {}).get(setting.of(kind)) for kind in pair})
        mine, theirs = timed.get(setting, {}), timed.get(setting.of("dense"), {})
        gate = gate_of(setting.bucket, buckets, options.min_speedup)
        reason = _doubt(comparison, pair) if comparison.verdict == "inconclusive" else None
        if comparison.verdict == "not faster":
            reason = explain(
                setting.bucket,
                counted["dense"],
                counted["mod"],
                dense_ms=pair["dense"].p50_ms,
                k_by_layer=(k_by_layer or {}).get(setting.bucket),
                dense_parts=theirs,
                mod_parts=mine,
            )
        rows.append(
            SpeedupRow(
                **pair_fields(setting),
                measured=comparison.measured,
                ci95=comparison.ci95,
                predicted_flops=predicted,
                efficiency=None if predicted is None else comparison.measured / predicted,
                gate=gate,
                passed=_passed(comparison, gate),
                predicted_roofline=_of_roofline(theirs, mine),
                verdict=comparison.verdict,
                reason=reason,
                control=comparison.control,
            )
        )
    return tuple(rows)


def _cost(costs: Mapping[tuple[ModelKind, str], CostRow], model: ModelKind, bucket: Bucket) -> CostRow:
    if (model, bucket.name) not in costs:
        raise GraphError(
            f"{model} {bucket.name}: the FLOPs of this graph were not counted, so its latency has nothing to be held "
            "against; count them with measure.cost.cost_row"
        )
    return costs[model, bucket.name]


def _compared(pair: Mapping[ModelKind, LatencyRow], options: LatencyOptions, seed: int) -> Comparison:
    planned = planned_looks(options, balanced_rounds(RUNS_PER_ROUND * len(pair)))
    dense_RT, mod_RT = (
        np.array(pair[kind].samples_ms, dtype=np.float64).reshape(-1, RUNS_PER_ROUND) for kind in ("dense", "mod")
    )
    return compare(dense_RT, mod_RT, options, looks=len(planned), seed=seed)


def _predicted(counted: Mapping[ModelKind, CostRow], run: Mapping[ModelKind, int | None]) -> float | None:
    """Returns the FLOP ratio of the graphs that run, else of the portable graphs; None if neither is fully known."""
    whole = {kind: None if row.not_counted else row.flops for kind, row in counted.items()}
    for dense, mod in ((known["dense"], known["mod"]) for known in (run, whole)):
        if dense and mod:
            return dense / mod
    return None


def _of_roofline(dense: Mapping[str, PartRow], mod: Mapping[str, PartRow]) -> float | None:
    times = [sum(row.predicted_ms for row in parts.values()) for parts in (dense, mod)]
    is_whole = not any(row.not_counted for parts in (dense, mod) for row in parts.values())
    return times[0] / times[1] if all(times) and is_whole else None


def _passed(found: Comparison, gate: float | None) -> bool | None:
    if gate is None:
        return None if math.isfinite(found.measured) else False
    return gate_reached(found, gate) is True


def _doubt(found: Comparison, pair: Mapping[ModelKind, LatencyRow]) -> str:
    """Explains why the comparison is inconclusive."""
    if not found.control.covers_one:
        low, high = found.control.ci99
        return (
            f"the control does not cover 1: the MoD engine against itself is {found.control.measured:.3f}x "
            f"(99 % interval {low:.3f} to {high:.3f}), so this machine shows differences that are not there"
        )
    low, high = found.ci95
    flags = "; ".join(dict.fromkeys(flag for kind in ("dense", "mod") for flag in pair[kind].flags))
    return f"the interval {low:.3f} to {high:.3f} of {len(pair['mod'].samples_ms)} samples allows both" + (
        f" ({flags})" if flags else ""
    )

"""The speed-up over the dense baseline (ratio, interval, verdict, prediction from FLOPs), and pass or fail of a build.

Rounds of latency are compared, not samples: the samples of one round were measured together, so any disturbance of the
machine affected both engines. A gate that was not evaluated fails; so does a build that ran nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from mod_export.config import LatencyOptions
from mod_export.errors import GraphError
from mod_export.measure.explain import explain
from mod_export.measure.profile import by_engine
from mod_export.measure.sampling import RUNS_PER_ROUND, balanced_rounds, planned_looks
from mod_export.measure.statistics import SpeedComparison, compare, gate_reached
from mod_export.rows.base import FailedRow, pair_fields, reason_for, sentences, setting_fields
from mod_export.rows.correctness import CausalityRow, ParityRow, StructureRow
from mod_export.rows.cost import CostRow, PartRow
from mod_export.rows.report import Verdict
from mod_export.rows.speed import LatencyRow, SpeedupRow
from mod_export.types import KINDS, Bucket, ModelKind, Setting, Site, pairs_of

GIVE_A_BASELINE = (
    "give a dense model with --baseline dense.pt, in Python with baseline=dense_module (if a function with a parameter "
    "capacity makes your module, what it makes with capacity=1.0)"
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
QUIETER = "take more samples (latency.max_samples, latency.max_seconds), or a quieter machine"


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

    A setting that should have been sampled and was not has no row; `verdict_of_rows` knows the expected settings.

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
        compared = _compared_flops(counted, {kind: (flops or {}).get(setting.of(kind)) for kind in pair})
        predicted = None if compared is None else compared["dense"] / compared["mod"]
        mine, theirs = timed.get(setting, {}), timed.get(setting.of("dense"), {})
        gate = gate_of(setting.bucket, buckets, options.min_speedup)
        reason = _doubt(comparison, pair) if comparison.verdict == "inconclusive" else None
        if comparison.verdict == "not faster":
            reason = explain(
                setting,
                counted["dense"],
                counted["mod"],
                flops=compared,
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


def is_undisturbed(rows: Sequence[LatencyRow], options: LatencyOptions, seed: int) -> bool:
    """Whether nothing shows that the machine disturbed the samples of a setting: neither the control, if there is a
    dense baseline, nor other load. A clock that varies, as in every laptop, is no reason to measure again: all engines
    take turns, so the control shows what it does to a ratio.
    """
    if any((row.conditions.other_load or 0.0) > options.disturbance for row in rows):
        return False
    return all(_compared(pair, options, seed).control.covers_one for pair in pairs_of(rows).values())


def _cost(costs: Mapping[tuple[ModelKind, str], CostRow], model: ModelKind, bucket: Bucket) -> CostRow:
    if (model, bucket.name) not in costs:
        raise GraphError(
            f"{model} {bucket.name}: the FLOPs of this graph were not counted, so its latency cannot be compared "
            "with them; count them with measure.cost.cost_row"
        )
    return costs[model, bucket.name]


def _compared(pair: Mapping[ModelKind, LatencyRow], options: LatencyOptions, seed: int) -> SpeedComparison:
    planned = planned_looks(options, balanced_rounds(RUNS_PER_ROUND * len(pair)))
    dense_RT, mod_RT = (
        np.array(pair[kind].samples_ms, dtype=np.float64).reshape(-1, RUNS_PER_ROUND) for kind in ("dense", "mod")
    )
    return compare(dense_RT, mod_RT, options, looks=len(planned), seed=seed)


def _compared_flops(
    counted: Mapping[ModelKind, CostRow], run: Mapping[ModelKind, int | None]
) -> dict[ModelKind, int] | None:
    """Returns the FLOPs of the graphs that run, else of the portable graphs; None if neither are fully known."""
    portable_flops = {kind: None if row.not_counted else row.flops for kind, row in counted.items()}
    for dense, mod in ((flops_by_kind["dense"], flops_by_kind["mod"]) for flops_by_kind in (run, portable_flops)):
        if dense and mod:
            return {"dense": dense, "mod": mod}
    return None


def _of_roofline(dense: Mapping[str, PartRow], mod: Mapping[str, PartRow]) -> float | None:
    times = [sum(row.predicted_ms for row in parts.values()) for parts in (dense, mod)]
    is_whole = not any(row.not_counted for parts in (dense, mod) for row in parts.values())
    return times[0] / times[1] if all(times) and is_whole else None


def _passed(comparison: SpeedComparison, gate: float | None) -> bool | None:
    if gate is None:
        return None if math.isfinite(comparison.measured) else False
    return gate_reached(comparison, gate) is True


def _doubt(comparison: SpeedComparison, pair: Mapping[ModelKind, LatencyRow]) -> str:
    """Explains why the comparison is inconclusive."""
    if not comparison.control.covers_one:
        low, high = comparison.control.ci99
        return (
            f"the control does not cover 1: the MoD engine against itself is {comparison.control.measured:.3f}x "
            f"(99 % interval {low:.3f} to {high:.3f}), so this machine shows differences that are not there"
        )
    low, high = comparison.ci95
    flags = "; ".join(dict.fromkeys(flag for kind in ("dense", "mod") for flag in pair[kind].flags))
    return f"the interval {low:.3f} to {high:.3f} of {len(pair['mod'].samples_ms)} samples allows both" + (
        f" ({flags})" if flags else ""
    )


# The verdict


def verdict_of_rows(
    expected: Sequence[Setting],
    buckets: Sequence[Bucket],
    *,
    parity: Sequence[ParityRow] | None,
    speedup: Sequence[SpeedupRow] | None,
    min_speedup: float,
    kinds: Collection[ModelKind] = KINDS,
    structure: Sequence[StructureRow] = (),
    causality: Sequence[CausalityRow] = (),
    reads_rows: bool = True,
    failed: Sequence[FailedRow] = (),
    missing: Sequence[FailedRow] = (),
) -> Verdict:
    """Returns the verdict over everything that this machine can run.

    Args:
        expected: the setting of every MoD engine that reads whole rows and can run here.
        buckets: all buckets that were built.
        parity: rows for all `kinds` of these settings, because a ratio to a dense baseline that computes something else
            would mean nothing; None if parity was not requested.
        speedup: rows of the speed-up; None if it was not requested.
        min_speedup: the gate of the configuration; 0 is no gate, and then no speed-up row is required.
        kinds: the models of the build.
        structure: results of inspecting the files without running them.
        causality: whether logits depend on later tokens, and whether they may.
        reads_rows: whether any MoD engine that was built reads whole rows, wherever it runs.
        failed: what was requested and could not be built, judged or timed.
        missing: what the original build could not do; the rest is judged without it.
    """
    reasons = sentences(failed)
    reasons += [f"{row.path}: {reason}" for row in structure if not row.passed for reason in row.reasons]
    if not expected and reads_rows:
        reasons.append(
            "nothing that was built can run on this machine, so no gate was evaluated; copy the build folder to where "
            "it runs and use mod-export validate and bench there"
        )
    elif not expected:
        reasons.append("no engine that reads whole rows was built, so none of their gates was evaluated")
    if parity is not None:
        for kind in kinds:
            judged = {row.setting for row in parity}
            reasons += [
                f"{setting}: parity of the {kind} engine was not checked"
                for setting in expected
                if setting.of(kind) not in judged
                and reason_for((*failed, *missing), setting_fields(setting.of(kind))) is None
            ]
        reasons += [
            f"{row.setting} {row.model}: parity: {reason}"
            for row in parity
            if not row.passed
            for reason in row.reasons or ["failed, and the check gave no reason"]
        ]
    reasons += [f"{row.setting} {row.model}: causality: {row.breach}" for row in causality if row.broken]
    if speedup is not None and expected:
        reasons += _ungated(expected, speedup, gated_bucket(buckets), min_speedup) if min_speedup > 0 else []
        reasons += [_too_slow(row) for row in speedup if row.passed is False]
    return Verdict(status="fail" if reasons else "pass", reasons=tuple(reasons))


def _ungated(
    expected: Sequence[Setting], speedup: Sequence[SpeedupRow], gated: Bucket, min_speedup: float
) -> list[str]:
    required = [setting for setting in expected if setting.bucket == gated]
    if not required:
        return [f"{gated.name}: no target can run the largest bucket here, and the speed-up gate applies to it"]
    measured = {row.setting for row in speedup}
    missing = f"the speed-up was not measured, and the gate is {min_speedup:.2f}x"
    return [f"{setting}: {missing}" for setting in required if setting not in measured]


def _too_slow(row: SpeedupRow) -> str:
    low, high = row.ci95
    text = f"{row.setting}: speed-up {row.measured:.3f}x (95 % interval {low:.3f} to {high:.3f})"
    if row.gate is None or not math.isfinite(row.measured):
        return f"{text} is not a number"
    gate = f"the gate of {row.gate:.2f}x"
    if row.control is not None and not row.control.covers_one:
        return f"{text} cannot be compared with {gate}: {row.reason}; {QUIETER}"
    if high < row.gate:
        why = row.reason or ("" if row.predicted_flops is None else f"FLOPs predict {row.predicted_flops:.2f}x")
        return f"{text} does not reach {gate}" + (f": {why}" if why else "")
    return f"{text} is not clear of {gate}: {QUIETER}"

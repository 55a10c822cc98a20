"""Pass or fail of a build, with every reason. A gate that was not evaluated fails; so does a build that ran nowhere."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from mod_export.measure.speedup import gated_bucket
from mod_export.rows.base import FailedRow, reason_for, sentences, setting_fields
from mod_export.rows.correctness import CausalityRow, ParityRow, StructureRow
from mod_export.rows.report import Verdict
from mod_export.rows.speed import SpeedupRow
from mod_export.types import KINDS, Bucket, ModelKind, Setting

QUIETER = "take more samples (latency.max_samples, latency.max_seconds), or a quieter machine"


def judge(
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
    reasons += [
        f"{row.setting} {row.model}: causality: the spec says that nothing looks ahead, and changing the end of a text "
        f"changed logits from position {row.earliest_change} on before the change"
        for row in causality
        if row.declared and not row.causal
    ]
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
        return f"{text} cannot be held against {gate}: {row.reason}; {QUIETER}"
    if high < row.gate:
        why = row.reason or ("" if row.predicted_flops is None else f"FLOPs predict {row.predicted_flops:.2f}x")
        return f"{text} does not reach {gate}" + (f": {why}" if why else "")
    return f"{text} is not clear of {gate}: {QUIETER}"

"""The verdict: every failed gate is a reason, and so is every gate that could not be evaluated."""

from __future__ import annotations

import math
from typing import Any

import pytest
from sample_rows import causality_row, parity_row, speedup_row

from mod_export.measure.verdict import verdict_of_rows
from mod_export.rows.base import FailedRow
from mod_export.rows.correctness import ParityRow
from mod_export.rows.report import Verdict
from mod_export.rows.speed import Control, SpeedupRow
from mod_export.types import Bucket, ModelKind, Role, Setting

SMALL, LARGE = Bucket(1, 128), Bucket(1, 512)
SETTINGS = [
    Setting(target="ort-cpu", dtype="float32", model="mod", role="forward", bucket=bucket) for bucket in (SMALL, LARGE)
]


KINDS: tuple[ModelKind, ...] = ("mod", "dense")
PARITY = [parity_row(bucket=bucket.name, model=model) for bucket in (SMALL, LARGE) for model in KINDS]


def speedup(
    measured: float = 1.6, gate: float | None = 1.0, passed: bool | None = True, half: float = 0.01, **fields: Any
) -> SpeedupRow:
    ci95 = (measured - half, measured + half)
    return speedup_row(measured, ci95=ci95, gate=gate, passed=passed, **fields)


def verdict(
    judged: list[ParityRow] | None = PARITY,
    rows: list[SpeedupRow] | None = None,
    settings: list[Setting] = SETTINGS,
    min_speedup: float = 1.0,
) -> Verdict:
    rows = [speedup()] if rows is None else rows
    return verdict_of_rows(settings, [SMALL, LARGE], parity=judged, speedup=rows, min_speedup=min_speedup)


@pytest.mark.parametrize(("causal", "declared"), [(True, True), (False, False), (False, True)])
def test_what_is_declared_causal_has_to_be(causal: bool, declared: bool) -> None:
    probed = causality_row(bucket="b1s128", causal=causal, declared=declared, earliest_change=3)
    found = verdict_of_rows(SETTINGS, [SMALL, LARGE], parity=PARITY, speedup=None, min_speedup=1.0, causality=[probed])
    broken = (
        "ort-cpu b1s128 float32 mod: causality: the spec says that nothing looks ahead, and changing the end of a text "
        "changed logits from position 3 on before the change"
    )
    assert found.reasons == ((broken,) if declared and not causal else ())


def test_a_parity_row_that_failed_gives_all_its_reasons() -> None:
    failed = parity_row(bucket="b1s512", passed=False, reasons=("text: max abs error 0.1", "ties: next token"))
    mute = parity_row(bucket="b1s512", model="dense", passed=False)
    assert verdict([*PARITY[:2], failed, mute]) == Verdict(
        status="fail",
        reasons=(
            "ort-cpu b1s512 float32 mod: parity: text: max abs error 0.1",
            "ort-cpu b1s512 float32 mod: parity: ties: next token",
            "ort-cpu b1s512 float32 dense: parity: failed, and the check gave no reason",
        ),
    )


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_engines_that_write_text_are_judged_and_stand_for_no_others(role: Role) -> None:
    failed = parity_row(bucket="b1s512", model="mod", role=role, passed=False, reasons=("text: KL 1.5",))
    assert verdict([*PARITY, failed]).reasons == (f"ort-cpu {role} b1s512 float32 mod: parity: text: KL 1.5",)
    instead = [row if row.bucket != "b1s512" else row.model_copy(update={"role": role}) for row in PARITY]
    assert verdict(instead).reasons == tuple(
        f"ort-cpu b1s512 float32: parity of the {kind} engine was not checked" for kind in KINDS
    )


QUIETER = "take more samples (latency.max_samples, latency.max_seconds), or a quieter machine"
MISSED = Control(measured=1.04, ci99=(1.02, 1.06), covers_one=False)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (speedup(0.97, 1.0, False),
         "0.970x (95 % interval 0.960 to 0.980) does not reach the gate of 1.00x: FLOPs predict 1.69x"),
        (speedup(0.97, 1.0, False, verdict="not faster", reason="FLOPs predict 1.02x; head 90 %"),
         "0.970x (95 % interval 0.960 to 0.980) does not reach the gate of 1.00x: FLOPs predict 1.02x; head 90 %"),
        (speedup(1.3, 1.3, False, half=0.1),
         f"1.300x (95 % interval 1.200 to 1.400) is not clear of the gate of 1.30x: {QUIETER}"),
        (speedup(1.6, 1.0, False, control=MISSED, verdict="inconclusive", reason="the control is not 1"),
         "1.600x (95 % interval 1.590 to 1.610) cannot be compared with the gate of 1.00x: the control is not 1; "
         + QUIETER),
        (speedup(math.nan, 1.0, False), "nanx (95 % interval nan to nan) is not a number"),
        (speedup(math.nan, None, False), "nanx (95 % interval nan to nan) is not a number"),
    ],
    ids=["below its gate", "with its cause", "around the gate", "control", "not a number", "not a number, no gate"],
)  # fmt: skip
def test_a_speedup_that_misses_its_gate_is_a_reason(row: SpeedupRow, words: str) -> None:
    found = verdict(rows=[row], min_speedup=row.gate or 0)
    assert found == Verdict(status="fail", reasons=(f"ort-cpu b1s512 float32: speed-up {words}",))


def test_what_was_expected_and_is_missing_is_a_reason() -> None:
    assert verdict(PARITY[:3], []).reasons == (
        "ort-cpu b1s512 float32: parity of the dense engine was not checked",
        "ort-cpu b1s512 float32: the speed-up was not measured, and the gate is 1.00x",
    )
    assert verdict(PARITY[:2], [], SETTINGS[:1]).reasons == (
        "b1s512: no target can run the largest bucket here, and the speed-up gate applies to it",
    )
    assert verdict(settings=[]).reasons == (
        "nothing that was built can run on this machine, so no gate was evaluated; copy the build folder to where "
        "it runs and use mod-export validate and bench there",
    )


def test_without_a_baseline_only_the_model_itself_is_expected() -> None:
    mod_rows = [row for row in PARITY if row.model == "mod"]
    judged: dict[str, Any] = {"speedup": [], "min_speedup": 0.0, "kinds": ["mod"]}
    assert verdict_of_rows(SETTINGS, [SMALL, LARGE], parity=mod_rows, **judged).status == "pass"
    assert verdict_of_rows(SETTINGS, [SMALL, LARGE], parity=mod_rows[:1], **judged).reasons == (
        "ort-cpu b1s512 float32: parity of the mod engine was not checked",
    )


def test_what_was_not_asked_for_is_not_missed() -> None:
    assert verdict() == Verdict(status="pass", reasons=())
    for parity in (None, PARITY):
        assert verdict_of_rows(SETTINGS, [SMALL, LARGE], parity=parity, speedup=None, min_speedup=1.0).status == "pass"
    inconclusive = speedup(1.01, None, None, verdict="inconclusive", reason="noise")
    for rows in ([], [inconclusive]):
        assert verdict(rows=rows, min_speedup=0).status == "pass"


def lost(**fields: Any) -> FailedRow:
    defaults: dict[str, Any] = dict.fromkeys(("target", "dtype", "model", "role", "bucket"))
    return FailedRow(**defaults | {"stage": "engines", "reason": "no memory"} | fields)


def test_what_failed_is_a_reason_and_what_is_long_missing_is_none() -> None:
    dense = lost(target="ort-cpu", model="dense", bucket="b1s512", dtype="float32", role="forward")
    rest = [row for row in PARITY if (row.model, row.bucket) != ("dense", "b1s512")]
    options: dict[str, Any] = {"parity": rest, "speedup": None, "min_speedup": 0.0}
    unjudged = "ort-cpu b1s512 float32: parity of the dense engine was not checked"
    assert verdict_of_rows(SETTINGS, [SMALL, LARGE], **options).reasons == (unjudged,)
    reason = "ort-cpu b1s512 float32 dense: could not be built (stage engines): no memory"
    assert verdict_of_rows(SETTINGS, [SMALL, LARGE], **options, failed=[dense]).reasons == (reason,)
    assert verdict_of_rows(SETTINGS, [SMALL, LARGE], **options, missing=[dense]).status == "pass"
    # An engine that was built but not timed must still be judged.
    timed = lost(target="ort-cpu", dtype="float32", stage="benchmark")
    assert verdict_of_rows(SETTINGS, [SMALL, LARGE], **options, failed=[timed]).reasons == (
        "ort-cpu float32: could not be timed (stage benchmark): no memory", unjudged
    )  # fmt: skip


def test_several_failures_for_one_reason_are_one_reason() -> None:
    failed = [lost(bucket="b1s128"), lost(dtype="int4", reason="no\n memory"), lost(bucket="b1s512", stage="onnx")]
    found = verdict_of_rows(SETTINGS, [SMALL, LARGE], parity=PARITY, speedup=[], min_speedup=0.0, failed=failed)
    assert found.reasons == (
        "b1s128, int4: could not be built (stage engines): no memory",
        "b1s512: could not be built (stage onnx): no memory",
    )


def test_where_no_engine_reads_whole_rows_that_is_said() -> None:
    steps = parity_row(role="decode", bucket="b1s128", passed=False, reasons=("max abs error 0.1",))
    found = verdict_of_rows([], [SMALL], parity=[steps], speedup=[], min_speedup=1.0, reads_rows=False, failed=[lost()])
    assert found.reasons[1:] == (
        "no engine that reads whole rows was built, so none of their gates was evaluated",
        "ort-cpu decode b1s128 float32 mod: parity: max abs error 0.1",
    )


def test_a_gate_that_was_missed_without_a_prediction() -> None:
    slow = speedup(0.5, passed=False, predicted_flops=None, efficiency=None)
    (reason,) = verdict(rows=[slow]).reasons
    assert reason.endswith(" does not reach the gate of 1.00x")

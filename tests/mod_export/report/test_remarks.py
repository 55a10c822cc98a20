"""What stands beside the latency figures."""

from __future__ import annotations

from mod_export.report import BuildReport
from mod_export.report.latency_entries import Control
from mod_export.report.remarks import control_text, disturbance_lines, reason_lines


def test_the_control_farthest_from_one_is_named(report: BuildReport) -> None:
    assert control_text(report.speedup) == (
        "the MoD engine against itself covers 1 in 4 of 4 settings; farthest from it 1.002x [0.996, 1.009]"
    )
    above = report.speedup[0].model_copy(
        update={"control": Control(measured=1.04, ci99=(1.02, 1.06), covers_one=False)}
    )
    assert control_text([*report.speedup, above]) == (
        "the MoD engine against itself covers 1 in 4 of 5 settings; farthest from it 1.040x [1.020, 1.060]"
    )
    below = report.speedup[0].model_copy(update={"control": Control(measured=0.9, ci99=(0.85, 0.95), covers_one=False)})
    assert control_text([below]) == (
        "the MoD engine against itself covers 1 in 0 of 1 setting; farthest from it 0.900x [0.850, 0.950]"
    )


def test_without_controls_nothing_is_said(report: BuildReport) -> None:
    assert control_text([row.model_copy(update={"control": None}) for row in report.speedup]) == ""
    assert control_text([]) == ""


def test_every_reason_names_its_setting_and_verdict(report: BuildReport) -> None:
    assert reason_lines(report.speedup) == []
    first, *rest = report.speedup
    slow = first.model_copy(update={"verdict": "not faster", "reason": "FLOPs predict 1.02x"})
    assert reason_lines([*rest, slow]) == ["ort-cpu b1s128 float32: not faster: FLOPs predict 1.02x"]


def test_what_disturbed_both_models_is_said_once(report: BuildReport) -> None:
    dense, mod, *_ = report.latency
    both = [
        dense.model_copy(update={"flags": ("others took 40 % of the machine's CPU time",)}),
        mod.model_copy(
            update={"flags": ("6 of 40 samples are outliers", "others took 40 % of the machine's CPU time")}
        ),
    ]
    assert disturbance_lines(both) == [
        "ort-cpu b1s128 float32: others took 40 % of the machine's CPU time",
        "ort-cpu b1s128 float32 mod: 6 of 40 samples are outliers",
    ]
    assert disturbance_lines(report.latency) == []

from __future__ import annotations

import math

from mod_export.report.summary import (
    broken_controls,
    gains,
    samplings,
    settings_of,
    untried_targets,
)
from mod_export.results.report import BuildReport


def test_settings_are_joined_by_target_bucket_and_dtype(report: BuildReport) -> None:
    settings = settings_of(report)
    assert [(setting.target, setting.bucket) for setting in settings] == [
        ("ort-cpu", "b1s128"),
        ("ort-cpu", "b1s512"),
        ("inductor", "b1s128"),
        ("inductor", "b1s512"),
    ]
    for setting in settings:
        assert [row.model for row in setting.parity] == ["mod", "dense"]
        assert [row.model for row in setting.latency] == ["dense", "mod"]
        assert setting.speedup is not None
        assert setting.parity_passed is True
        assert setting.routing == setting.parity[0].routing


def test_the_worse_engine_speaks_for_a_setting(report: BuildReport) -> None:
    mod, dense = report.parity[:2]
    broken = dense.model_copy(update={"passed": False, "error": dense.error.model_copy(update={"max_abs": math.nan})})
    setting = settings_of(report.model_copy(update={"parity": (mod, broken)}))[0]
    assert setting.parity_passed is False
    assert setting.error == broken.error


def test_gains_are_ranges_sums_and_the_worst(report: BuildReport) -> None:
    found = gains(report)
    ratios = sorted(row.measured for row in report.speedup)
    assert (found.speedups, found.slowest, found.fastest) == (4, ratios[0], ratios[-1])
    assert (found.routed, found.agreed, found.faults) == (3840, 3840, 0)
    assert found.max_abs == 6.1e-06


def test_agreement_is_summed_by_kind_of_input(failed_report: BuildReport) -> None:
    found = gains(failed_report)
    assert found.faults == 2
    assert {batch.input: (batch.routed, batch.agreed) for batch in found.by_input} == {
        "padded": (960, 960),
        "random": (960, 960),
        "text": (960, 957),
        "ties": (960, 960),
    }


def test_gains_do_not_hide_what_is_not_a_number(report: BuildReport) -> None:
    row, *others = report.speedup
    error = report.parity[0].error.model_copy(update={"max_abs": math.nan})
    broken = report.model_copy(
        update={
            "speedup": (*others, row.model_copy(update={"measured": math.nan})),
            "parity": (*report.parity[1:], report.parity[0].model_copy(update={"error": error})),
        }
    )
    found = gains(broken)
    assert found.slowest is not None
    assert math.isnan(found.slowest)
    assert found.max_abs is not None
    assert math.isnan(found.max_abs)


def test_gains_of_nothing_are_nothing(report: BuildReport) -> None:
    found = gains(report.model_copy(update={"speedup": (), "parity": ()}))
    assert (found.speedups, found.slowest, found.fastest, found.max_abs) == (0, None, None, None)


def test_built_targets_come_before_those_that_are_missing(report: BuildReport) -> None:
    assert [(item.target, item.built) for item in untried_targets(report)] == [
        ("tensorrt-rtx", True),
        ("ort-cuda", False),
        ("tensorrt", False),
    ]


def test_one_engine_that_looks_ahead_speaks_for_its_model(report: BuildReport) -> None:
    mod, dense = samplings(report)
    assert (mod.model, mod.causal, mod.engines, mod.suffixes) == ("mod", False, 4, 48)
    assert (dense.model, dense.causal, len(dense.statements)) == ("dense", True, 1)
    harmless = tuple(
        row.model_copy(update={"causal": True, "statement": "nothing moved"}) if row.bucket == "b1s512" else row
        for row in report.causality
    )
    mod, _ = samplings(report.model_copy(update={"causality": harmless}))
    assert mod.causal is False
    assert mod.statements == (report.causality[0].statement, "nothing moved")


def test_what_was_not_probed_is_unknown(report: BuildReport) -> None:
    assert [item.causal for item in samplings(report.model_copy(update={"causality": ()}))] == [None, None]


def test_controls_that_miss_one_are_named(report: BuildReport, failed_report: BuildReport) -> None:
    assert broken_controls(report) == ()
    assert [(row.target, row.bucket) for row in broken_controls(failed_report)] == [("ort-cpu", "b1s128")]

from __future__ import annotations

import math

from mod_export.report import BuildReport
from mod_export.report.summary import deployments, gains, settings_of, untried_targets


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


def test_what_is_deployed_is_the_model_and_not_its_twin(failed_report: BuildReport) -> None:
    found = deployments(failed_report)
    assert {item.artifact.model for item in found} == {"mod"}
    assert {(item.target, item.artifact.bucket): item.state for item in found if item.artifact.dtype == "float32"} == {
        ("inductor", "b1s128"): "passed",
        ("inductor", "b1s512"): "failed",
        ("ort-cpu", "b1s128"): "passed",
        ("ort-cpu", "b1s512"): "passed",
        ("tensorrt-rtx", "b1s128"): "not run here",
        ("tensorrt-rtx", "b1s512"): "not run here",
        (None, "b1s128"): "portable",
        (None, "b1s512"): "portable",
    }
    states = [item.state for item in found]
    assert states.index("not run here") > states.index("failed")
    assert states[-2:] == ["portable", "portable"]


def test_the_graph_of_a_target_is_a_step_and_nothing_to_deploy(report: BuildReport) -> None:
    graph = next(artifact for artifact in report.artifacts if artifact.kind == "graph")
    of_target = graph.model_copy(update={"target": "tensorrt-rtx", "path": "graphs/tensorrt-rtx/mod.onnx"})
    found = deployments(report.model_copy(update={"artifacts": (graph, of_target)}))
    assert [item.artifact.path for item in found] == [graph.path]


def test_built_targets_come_before_those_that_are_missing(report: BuildReport) -> None:
    assert [(item.target, item.built) for item in untried_targets(report)] == [
        ("tensorrt-rtx", True),
        ("ort-cuda", False),
        ("tensorrt", False),
    ]

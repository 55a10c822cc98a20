"""What a reader asks first, from the rows of a report."""

from __future__ import annotations

import math

from sample_rows import changed, precision_row

from mod_export.report.summary import (
    broken_controls,
    deployments,
    gains,
    precisions,
    samplings,
    settings_of,
    untried_targets,
)
from mod_export.results.report import BuildReport


def test_settings_are_joined_by_target_bucket_and_dtype(report: BuildReport) -> None:
    settings = settings_of(report, "forward")
    assert [str(one.setting) for one in settings] == [
        "ort-cpu b1s128 float32", "ort-cpu b1s512 float32", "inductor b1s128 float32", "inductor b1s512 float32",
    ]  # fmt: skip
    for one, row in zip(settings, report.speedup, strict=True):
        assert one.speed == row
        assert [one.ms(kind) for kind in ("dense", "mod")] == [
            latency.p50_ms for latency in report.latency if latency.setting.of("mod") == one.setting
        ]
        assert one.parity_passed is True
        assert one.routing is not None


def test_steps_and_prompts_are_settings_too(report: BuildReport) -> None:
    assert report.generation is not None
    steps, prompts = settings_of(report, "decode"), settings_of(report, "prefill")
    assert [one.speed for one in steps] == list(report.generation.decode)
    assert [one.speed for one in prompts] == list(report.generation.first_token)
    assert [one.texts for one in steps] == [(8, 8)] * 2
    assert [one.ms("mod") for one in prompts] == [8.22, 27.6]
    assert all(one.parity_passed for one in (*steps, *prompts))


def test_the_worse_engine_speaks_for_a_setting(report: BuildReport) -> None:
    mod, dense = report.parity[:2]
    broken = dense.model_copy(update={"passed": False, "error": dense.error.model_copy(update={"max_abs": math.nan})})
    setting = settings_of(changed(report, parity=(mod, broken)), "forward")[0]
    assert setting.parity_passed is False
    assert setting.error == broken.error


def test_gains_are_ranges_sums_and_the_worst(report: BuildReport) -> None:
    found = gains(report)
    ratios = sorted(row.measured for row in report.speedup)
    assert (found.slowest, found.fastest) == (ratios[0], ratios[-1])
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
    assert (found.slowest, found.fastest, found.max_abs) == (None, None, None)


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


def test_what_is_deployed_is_the_model_and_not_its_dense_baseline(failed_report: BuildReport) -> None:
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


def test_a_deployment_knows_what_was_found_for_it(report: BuildReport) -> None:
    found = {item.artifact.path: item for item in deployments(report)}
    one = found["engines/ort-cpu/mod-b1s512-float32.onnx"].found
    assert one is not None
    assert one.speed == report.speedup[1]
    assert found["graphs/mod-b1s512.onnx"].found is None


def test_a_graph_that_was_judged_by_its_path_says_so(report: BuildReport) -> None:
    row = report.parity[0].model_copy(update={"artifact": "graphs/mod-b1s128.onnx", "target": "graph", "passed": False})
    found = {item.artifact.path: item.state for item in deployments(report.model_copy(update={"parity": (row,)}))}
    assert found["graphs/mod-b1s128.onnx"] == "failed"
    assert found["graphs/mod-b1s512.onnx"] == "portable"
    assert found["engines/ort-cpu/mod-b1s128-float32.onnx"] == "not run here"


def test_a_graph_that_an_engine_holds_is_judged_with_it(report: BuildReport) -> None:
    engine = next(item for item in report.artifacts if item.path == "engines/ort-cpu/mod-b1s128-float32.onnx")
    graph = next(item for item in report.artifacts if item.path == "graphs/mod-b1s128.onnx")
    row = report.parity[0].model_copy(update={"artifact": engine.path, "passed": True})
    artifacts = (engine, graph.model_copy(update={"sha256": engine.sha256}))
    found = deployments(report.model_copy(update={"parity": (row,), "artifacts": artifacts}))
    assert [(item.artifact.path, item.state) for item in found] == [(engine.path, "passed"), (graph.path, "passed")]


def test_an_engine_that_writes_is_judged_and_timed_by_its_own_rows(report: BuildReport) -> None:
    assert report.generation is not None
    engine = next(item for item in report.artifacts if item.path == "engines/ort-cpu/mod-b1s512-float32.onnx")
    decode = changed(engine, path="engines/ort-cpu/mod-decode-b1s512-float32.onnx", role="decode")
    other = changed(decode, path="engines/ort-cpu/mod-decode-b1s256-float32.onnx")
    found = deployments(changed(report, artifacts=(engine, decode, other)))
    assert [(item.state, item.found and item.found.speed) for item in found] == [
        ("passed", report.speedup[1]), ("passed", report.generation.decode[0]), ("not run here", None),
    ]  # fmt: skip


def test_what_stands_beside_float32(report: BuildReport) -> None:
    known = precision_row(dtype="float32")  # An engine that the report's parity knows.
    parity = next(row for row in report.parity if row.setting == known.setting)
    assert precisions(changed(report, precision=(known, precision_row()))) == [(known, parity), (precision_row(), None)]

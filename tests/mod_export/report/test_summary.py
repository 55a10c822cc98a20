"""Answers to a reader's first questions, from the rows of a report."""

from __future__ import annotations

import math

from sample_rows import changed, precision_row

from mod_export.report.summary import deployments, gains, precisions, samplings, settings_of, untried_targets
from mod_export.rows.correctness import OutputParity
from mod_export.rows.report import BuildReport


def test_settings_are_joined_by_target_bucket_and_dtype(report: BuildReport) -> None:
    settings = settings_of(report, "forward")
    assert [str(setting.setting) for setting in settings] == [
        "ort-cpu b1s128 float32", "ort-cpu b1s512 float32", "inductor b1s128 float32", "inductor b1s512 float32",
    ]  # fmt: skip
    for setting, row in zip(settings, report.speedup, strict=True):
        assert setting.speed == row
        assert [setting.ms(kind) for kind in ("dense", "mod")] == [
            latency.p50_ms for latency in report.latency if latency.setting.of("mod") == setting.setting
        ]
        assert setting.parity_passed is True
        assert setting.routing is not None


def test_steps_and_prompts_are_settings_too(report: BuildReport) -> None:
    assert report.generation is not None
    steps, prompts = settings_of(report, "decode"), settings_of(report, "prefill")
    for found, rows in ((steps, report.generation.decode), (prompts, report.generation.first_token)):
        assert [setting.written for setting in found] == list(rows)
        assert [setting.speed for setting in found] == [row.compared for row in rows]
    assert [setting.texts for setting in steps] == [(8, 8)] * 2
    assert [setting.ms("mod") for setting in prompts] == [8.22, 27.6]
    assert all(setting.parity_passed for setting in (*steps, *prompts))


def test_gains_are_ranges_sums_and_the_worst(report: BuildReport, failed_report: BuildReport) -> None:
    found = gains(report)
    ratios = sorted(row.measured for row in report.speedup)
    assert (found.slowest, found.fastest, found.max_abs) == (ratios[0], ratios[-1], 6.1e-06)
    assert (found.routed, found.agreed, found.faults) == (3840, 3840, 0)
    failed = gains(failed_report)
    assert failed.faults == 2
    assert {batch.input: (batch.routed, batch.agreed) for batch in failed.by_input} == {
        "padded": (960, 960), "random": (960, 960), "text": (960, 957), "ties": (960, 960),
    }  # fmt: skip
    nothing = gains(changed(report, speedup=(), parity=()))
    assert (nothing.slowest, nothing.fastest, nothing.max_abs) == (None, None, None)


def test_the_worst_error_is_that_of_any_output(report: BuildReport) -> None:
    mod, dense, *rest = report.parity
    further = OutputParity(
        name="pooled", error=changed(mod.error, max_abs=0.25), rounding_error=0.1, allowed_max_abs=1.6
    )
    found = changed(report, parity=(mod, changed(dense, further_outputs=(further,)), *rest))
    assert gains(found).max_abs == 0.25
    first, second, *_ = settings_of(found, "forward")
    assert first.error == further.error
    assert second.error == settings_of(report, "forward")[1].error
    undefined = changed(further, error=changed(mod.error, max_abs=math.nan))
    found = changed(report, parity=(changed(mod, further_outputs=(undefined, further)), dense, *rest))
    assert (str(gains(found).max_abs), settings_of(found, "forward")[0].error) == ("nan", undefined.error)


def test_what_is_not_a_number_is_the_worst(report: BuildReport) -> None:
    mod, dense, *rest = report.parity
    broken = changed(dense, passed=False, error=changed(dense.error, max_abs=math.nan))
    slow, *others = report.speedup
    changed_report = changed(report, parity=(mod, broken, *rest), speedup=(*others, changed(slow, measured=math.nan)))
    found = gains(changed_report)
    assert (str(found.slowest), str(found.max_abs)) == ("nan", "nan")
    setting = settings_of(changed_report, "forward")[0]
    assert (setting.parity_passed, setting.error) == (False, broken.error)


def test_built_targets_come_before_those_that_are_missing(report: BuildReport) -> None:
    found = untried_targets(report)
    assert [(state, target.target) for state, targets in found.items() for target in targets] == [
        ("built", "tensorrt-rtx"), ("not built", "ort-cuda"), ("not built", "tensorrt"),
    ]  # fmt: skip


def test_one_engine_that_looks_ahead_speaks_for_its_model(report: BuildReport) -> None:
    mod, dense = samplings(report)
    assert (mod.model, mod.causal, mod.engines, mod.suffixes) == ("mod", False, 4, 48)
    assert (dense.model, dense.causal, len(dense.statements)) == ("dense", True, 1)
    harmless = tuple(
        changed(row, causal=True, statement="nothing moved") if row.bucket == "b1s512" else row
        for row in report.causality
    )
    mod, _ = samplings(changed(report, causality=harmless))
    assert mod.causal is False
    assert mod.statements == (report.causality[0].statement, "nothing moved")
    assert [item.causal for item in samplings(changed(report, causality=()))] == [None, None]


def test_there_is_nothing_to_say_of_a_baseline_that_there_is_not(alone_report: BuildReport) -> None:
    (mod,) = samplings(alone_report)
    assert (mod.model, mod.causal) == ("mod", False)
    found = [setting for setting in settings_of(alone_report, "forward") if setting.latency("mod")]
    assert len(found) == 4
    assert {(setting.speed, setting.latency("dense")) for setting in found} == {(None, None)}


def test_what_is_deployed_is_the_model_and_not_its_dense_baseline(failed_report: BuildReport) -> None:
    found = deployments(failed_report)
    assert {item.artifact.model for item in found} == {"mod"}
    assert {(item.target, item.artifact.bucket): item.state for item in found} == {
        ("inductor", "b1s128"): "passed",
        ("inductor", "b1s512"): "failed",
        ("ort-cpu", "b1s128"): "passed",
        ("ort-cpu", "b1s512"): "passed",
        ("tensorrt-rtx", "b1s128"): "not judged",
        ("tensorrt-rtx", "b1s512"): "not judged",
        (None, "b1s128"): "portable",
        (None, "b1s512"): "portable",
    }
    states = [item.state for item in found]
    assert states.index("not judged") > states.index("failed")
    assert states[-2:] == ["portable", "portable"]


def test_a_graph_is_judged_by_its_path_or_with_the_engine_that_it_is(report: BuildReport) -> None:
    by_path = {item.path: item for item in report.artifacts}
    engine, graph = by_path["engines/ort-cpu/mod-b1s128-float32.onnx"], by_path["graphs/mod-b1s128.onnx"]
    judged = changed(report.parity[0], artifact=graph.path, target="graph", passed=False)
    found = {item.artifact.path: item.state for item in deployments(changed(report, parity=(judged,)))}
    assert (found[graph.path], found["graphs/mod-b1s512.onnx"], found[engine.path]) == (
        "failed", "portable", "not judged",
    )  # fmt: skip
    # The graph of a target is an intermediate file, and nothing to deploy.
    of_target = changed(graph, target="tensorrt-rtx", path="graphs/tensorrt-rtx/mod.onnx")
    artifacts = (engine, changed(graph, sha256=engine.sha256), of_target)
    deployed = deployments(changed(report, parity=report.parity[:1], artifacts=artifacts))
    assert [(item.artifact.path, item.state) for item in deployed] == [(engine.path, "passed"), (graph.path, "passed")]
    assert deployed[1].results is None


def test_an_engine_is_judged_and_timed_by_the_rows_of_its_role(report: BuildReport) -> None:
    assert report.generation is not None
    engine = next(item for item in report.artifacts if item.path == "engines/ort-cpu/mod-b1s512-float32.onnx")
    decode = changed(engine, path="engines/ort-cpu/mod-decode-b1s512-float32.onnx", role="decode")
    other = changed(decode, path="engines/ort-cpu/mod-decode-b1s256-float32.onnx")
    found = deployments(changed(report, artifacts=(engine, decode, other)))
    assert [(item.state, item.results and item.results.speed) for item in found] == [
        ("passed", report.speedup[1]), ("passed", report.generation.decode[0].compared), ("not judged", None),
    ]  # fmt: skip


def test_what_stands_beside_float32(report: BuildReport) -> None:
    known = precision_row(dtype="float32")  # The report's parity has this engine.
    parity = next(row for row in report.parity if row.setting == known.setting)
    assert precisions((known, precision_row()), report.parity) == [(known, parity), (precision_row(), None)]

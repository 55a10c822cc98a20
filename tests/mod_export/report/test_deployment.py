from __future__ import annotations

from mod_export.report.summary import deployments
from mod_export.results.report import BuildReport


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


def test_a_deployment_knows_what_was_found_for_it(report: BuildReport) -> None:
    found = {item.artifact.path: item for item in deployments(report)}
    setting = found["engines/ort-cpu/mod-b1s512-float32.onnx"].setting
    assert setting is not None
    assert setting.speedup == report.speedup[1]
    assert found["graphs/mod-b1s512.onnx"].setting is None


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


def test_an_engine_that_writes_is_judged_by_its_own_row(report: BuildReport) -> None:
    assert report.generation is not None
    engine = next(item for item in report.artifacts if item.path == "engines/ort-cpu/mod-b1s512-float32.onnx")
    decode = engine.model_copy(update={"path": "engines/ort-cpu/mod-decode-b1s512-float32.onnx", "role": "decode"})
    other = decode.model_copy(update={"path": "engines/ort-cpu/mod-decode-b1s256-float32.onnx"})
    found = deployments(report.model_copy(update={"artifacts": (engine, decode, other)}))
    assert [(item.state, item.setting is None) for item in found] == [
        ("passed", False),
        ("passed", True),
        ("not run here", True),
    ]

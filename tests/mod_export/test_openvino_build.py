"""A whole build for two engine families and two precisions: judged, timed, reported; the fastest engines are served."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from build_folders import Silent, changed

import mod_export
from mod_export.config import BuildConfig
from mod_export.engines import openvino as target
from mod_export.folder.manifest import read_manifest
from mod_export.model.request import Request
from mod_export.pipeline.rerun import bench_folder, validate_folder
from mod_export.pipeline.stages import build
from mod_export.report import render_html
from mod_models.checkpoint import random_checkpoint, save_checkpoint
from mod_models.spec import ModelSpec, RoutingSpec

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("BF16" not in target._capabilities(), reason="this processor has no instructions for bfloat16"),
]
SPEC = ModelSpec(
    vocab_size=256, d_model=32, n_layers=2, n_heads=2, n_kv_heads=1, d_head=16, d_ff=48, max_positions=160,
    routing=RoutingSpec(),
)  # fmt: skip
VARIANTS = {("ort-cpu", "float32"), ("openvino", "float32"), ("openvino", "bfloat16")}


def test_the_fastest_of_two_families_and_two_precisions_is_served(config: BuildConfig, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "m.pt", random_checkpoint(SPEC, 0))
    wanted = changed(
        config,
        {
            "targets": ["ort-cpu", "openvino"], "target/openvino/dtypes": ["float32", "bfloat16"],
            "buckets": [[1, 160]], "cost/profile_runs": 0,
        },
    )  # fmt: skip
    root = tmp_path / "build"
    report = build(Request.checkpoint(tmp_path / "m.pt").models, wanted, root, Silent(), "mod-export build")
    assert [row.reasons for row in report.parity if not row.passed] == []
    assert {(row.target, row.dtype) for row in report.parity} >= VARIANTS
    assert {(row.target, row.dtype) for row in report.speedup} == VARIANTS
    # Attention is split into blocks of 128 queries, with two products each.
    graphs = {graph["path"]: graph for graph in read_manifest(root)["graphs"]}
    graph = graphs["graphs/dense-b1s160.openvino.bfloat16.onnx"]
    assert graph["query_blocks"] == {"160": 128}
    nodes = [node.op_type for node in ir.load(root / graph["path"]).graph]
    assert (nodes.count("Softmax"), nodes.count("Attention")) == (2 * 2, 0)
    # The fastest engine is served, and the page says so.
    served = next(row for row in report.served if (row.model, row.role) == ("mod", "forward"))
    times = {(row.target, row.dtype): row.p50_ms for row in report.latency if row.model == "mod"}
    assert (served.target, served.dtype) == min(times, key=lambda variant: times[variant])
    assert served.reason.startswith("the fastest of those that met their gates; ")
    assert served.reason in render_html(report)
    ids_BS = np.random.default_rng(0).integers(0, 256, (1, 160))
    with mod_export.load(root) as fastest, mod_export.load(root, "ort-cpu") as exact:
        assert (fastest.target, fastest.dtype) == (served.target, served.dtype)
        largest = np.abs(exact.run(ids_BS)).max()
        np.testing.assert_allclose(fastest.run(ids_BS), exact.run(ids_BS), atol=0.1 * largest)
    found = validate_folder(root, None, ["openvino"])
    assert found.verdict.status == "pass", found.verdict.reasons
    assert {row.target for row in bench_folder(root, None, ["openvino"]).rows(type(report.speedup[0]))} == {"openvino"}

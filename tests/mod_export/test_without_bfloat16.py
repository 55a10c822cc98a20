"""Integer weights on a processor without instructions for bfloat16: built, judged, served, and judged elsewhere."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
from build_folders import Silent, changed, steps_of
from writing import LAX, writing_checkpoint

import mod_export
from mod_export.config import BuildConfig
from mod_export.engines import openvino as target
from mod_export.folder.manifest import read_manifest
from mod_export.model.request import Request
from mod_export.pipeline.rerun import validate_folder
from mod_export.pipeline.stages import build
from mod_export.rows.correctness import StructureRow
from mod_export.types import QUANTIZED
from mod_models.checkpoint import save_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("searching_few_rows")]


def floats_of(path: Path) -> set[str]:
    model = ir.load(path)
    values = [*model.graph.inputs, *(value for node in model.graph.all_nodes() for value in node.outputs)]
    return {str(value.dtype) for value in values if value.dtype is not None and value.dtype.is_floating_point()}


def test_everything_else_is_float32(
    writing_config: BuildConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path / "m.pt", writing_checkpoint())
    wanted = {
        "targets": ["openvino"], "generation/targets": ["openvino"], "target/openvino/dtypes": list(QUANTIZED),
        "generation/batches": [1], "generation/prompts": [16], "generation/compared_texts": 0,
    }  # fmt: skip
    root, config = tmp_path / "build", changed(writing_config, {**wanted, **LAX})
    monkeypatch.setattr(target, "_capabilities", lambda: ["FP32", "INT8"])
    report = build(Request.checkpoint(tmp_path / "m.pt").models, config, root, Silent(), "mod-export build")
    assert report.verdict.status == "pass", report.verdict.reasons
    assert {(row.role, row.dtype) for row in report.parity if row.target == "openvino"} == {
        (role, dtype) for role in ("forward", "prefill", "decode") for dtype in QUANTIZED
    }
    graphs = [graph for graph in read_manifest(root)["graphs"] if graph["target"] == "openvino"]
    assert all(graph["limits_of_machine"] == {"quantized_beside": "float32"} for graph in graphs)
    assert {kind for graph in graphs for kind in floats_of(root / graph["path"])} == {"FLOAT"}
    # ONNX Runtime could run them, but rounding weights is no rewrite that keeps what a graph computes.
    assert steps_of(root)["rewrite/openvino/mod-b1s16-int8"]["result"]["proof"].startswith("not run: rounded weights ")
    with mod_export.load_generator(root, "openvino", "int8") as generator:
        assert len(generator.generate([[1, 2, 3]], 8)[0].ids) == 8
        bucket = next(iter(generator._decode))
        cache = generator.cache_bytes(bucket)
    # The manifest counts a text in float32.
    assert cache == bucket.batch * read_manifest(root)["generation"]["kv_bytes"]["mod"][str(bucket.seq)]
    # The folder says what its graphs are, so that a machine with bfloat16 takes them for what they are.
    monkeypatch.setattr(target, "_capabilities", lambda: ["FP32", "BF16", "INT8"])
    found = validate_folder(root, None, ["openvino"])
    assert {reason for row in found.rows(StructureRow) for reason in row.reasons} == set()
    with mod_export.load_generator(root, "openvino", "int8") as generator:
        assert generator.cache_bytes(bucket) == cache

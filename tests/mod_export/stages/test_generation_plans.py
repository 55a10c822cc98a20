"""Plans that write text: built for a GPU that is not here, and their graphs judged token by token on the CPU."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from build_folders import Silent, check_files
from writing import WINDOW

from mod_export.build_folder.manifest import open_folder
from mod_export.config import BuildConfig
from mod_export.engines import ENGINES
from mod_export.pipeline import build
from mod_export.rerun import validate_folder
from mod_export.runtime.generate.generator import load_generator

TARGETS = ("ort-cpu", "tensorrt-rtx")


def with_plans(config: BuildConfig) -> BuildConfig:
    options = config.target.tensorrt_rtx.model_copy(update={"architectures": ("sm89",), "dtypes": ("float16",)})
    generation = config.generation.model_copy(
        update={"targets": TARGETS, "prompts": (16,), "batches": (3,), "compared_texts": 0}
    )
    target = config.target.model_copy(update={"tensorrt_rtx": options})
    return config.model_copy(update={"targets": TARGETS, "target": target, "generation": generation})


@pytest.mark.slow
def test_plans_are_built_and_their_graphs_judged(
    writing_folder: Path, writing_config: BuildConfig, tmp_path: Path
) -> None:
    if not ENGINES["tensorrt-rtx"].availability().builds:
        pytest.fail("CI installs tensorrt-rtx, whose builder needs no GPU")
    root = tmp_path / "plans"
    report = build(writing_folder / "writing.pt", with_plans(writing_config), root, None, Silent(), "test")
    assert report.verdict.status == "pass"
    check_files(root)
    engines = open_folder(root).engines
    plans = [one for one in engines if one.target == "tensorrt-rtx" and one.role != "forward"]
    assert {(one.model, one.role, one.arch, one.dtype) for one in plans} == {
        (kind, role, "sm89", "float16") for kind in ("mod", "dense") for role in ("prefill", "decode")
    }
    assert report.generation is not None
    judged = {(row.target, row.role, row.model, row.dtype) for row in report.parity if row.passed}
    assert {
        ("tensorrt-rtx graph", role, kind, "float16") for kind in ("mod", "dense") for role in ("prefill", "decode")
    } <= judged
    step = onnx.load(root / "graphs" / f"mod-decode-b3s{WINDOW}.tensorrt-rtx.float16.onnx", load_external_data=False)
    operators = [node.op_type for node in step.graph.node]
    assert operators.count("If") == 2
    assert operators.count("TensorScatter") == 6
    # What cannot run here is not validated here, and what can writes.
    assert validate_folder(root, None, []).verdict.status == "pass"
    with load_generator(root) as generator:
        assert generator.target == "ort-cpu"
        assert len(generator.generate("ab", 4)[0].ids) == 4

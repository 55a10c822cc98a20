"""Outputs of graphs other than the logits of every token, and attention in blocks, through a whole build."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from build_folders import Silent, changed

import mod_export
from mod_export.config import BuildConfig
from mod_export.folder.manifest import read_manifest
from mod_export.model.checkpoint import model_from_checkpoint
from mod_export.model.request import Request
from mod_export.pipeline.rerun import validate_folder
from mod_export.pipeline.stages import build
from mod_export.report import render_html
from mod_export.report.summary import samplings
from mod_export.rows.correctness import CausalityRow
from mod_export.rows.report import BuildReport
from mod_export.types import Outputs

pytestmark = pytest.mark.usefixtures("searching_few_rows")
SHAPES: dict[Outputs, tuple[int, ...]] = {"last": (2, 256), "none": (2, 12, 16)}
Returning = Callable[[Outputs], tuple[Path, BuildReport]]


def build_of(checkpoint: Path, config: BuildConfig, root: Path, **fields: Any) -> BuildReport:
    small = changed(config, {"buckets": [[2, 16]], "cost/profile_runs": 0, **fields})
    return build(Request.checkpoint(checkpoint).models, small, root, Silent(), "mod-export build tiny.pt")


@pytest.fixture(scope="module")
def builds(small_folder: Path, config: BuildConfig, tmp_path_factory: pytest.TempPathFactory) -> Returning:
    """Function that returns build folder and report of a kind of output; the first call builds them."""

    @functools.cache
    def made(outputs: Outputs) -> tuple[Path, BuildReport]:
        root = tmp_path_factory.mktemp("returning") / outputs
        return root, build_of(small_folder / "small.pt", config, root, outputs=outputs)

    return made


@pytest.fixture(params=["last", pytest.param("none", marks=pytest.mark.slow)])
def returning(request: pytest.FixtureRequest, builds: Returning) -> tuple[Outputs, Path, BuildReport]:
    return request.param, *builds(request.param)


def test_a_build_is_judged_by_what_it_returns(returning: tuple[Outputs, Path, BuildReport]) -> None:
    outputs, root, report = returning
    assert report.verdict.status == "pass", report.verdict.reasons
    assert {row.passed for row in report.parity} == {True}
    assert all(row.error.max_abs < 1e-4 for row in report.parity)
    assert {graph["outputs"] for graph in read_manifest(root)["graphs"]} == {outputs}
    # Only outputs of whole texts have a perplexity.
    assert {row.text is None for row in report.parity} == {outputs == "last"}
    assert {row.suffixes > 0 for row in report.causality} == {outputs != "last"}
    if outputs == "last":
        assert all("only the last token's logits are returned" in row.statement for row in report.causality)


def test_what_is_returned_is_the_eager_models(returning: tuple[Outputs, Path, BuildReport], small_folder: Path) -> None:
    outputs, root, _ = returning
    ids_BS, lengths_B = np.random.default_rng(0).integers(0, 256, (2, 12)), np.array([12, 7])
    with mod_export.load(root) as deployment:
        found = deployment.run(ids_BS, lengths_B)
    padded_BS = np.zeros((2, 16), np.int64)
    padded_BS[:, :12] = ids_BS
    with torch.no_grad():
        module = model_from_checkpoint(small_folder / "small.pt").module(outputs)
        expected = module(torch.from_numpy(padded_BS), torch.from_numpy(lengths_B))[0].numpy()
    assert found.shape == SHAPES[outputs]
    real = np.arange(12) < lengths_B[:, None]
    pairs = (found, expected) if outputs == "last" else (found[real], expected[:, :12][real])
    np.testing.assert_allclose(*pairs, atol=2e-5)


@pytest.mark.slow
def test_the_folder_validates_again(returning: tuple[Outputs, Path, BuildReport]) -> None:
    outputs, root, _ = returning
    found = validate_folder(root, None, [])
    assert found.verdict.status == "pass", found.verdict.reasons
    assert {row.suffixes > 0 for row in found.rows(CausalityRow)} == {outputs != "last"}


def test_what_was_not_probed_is_not_said_to_be_causal(returning: tuple[Outputs, Path, BuildReport]) -> None:
    outputs, _, report = returning
    expected = {"mod": None, "dense": None} if outputs == "last" else {"mod": False, "dense": True}
    assert {sampling.model: sampling.causal for sampling in samplings(report)} == expected
    assert ("It was not probed." in render_html(report)) == (outputs == "last")


@pytest.mark.slow
def test_a_fault_in_what_is_returned_is_found(builds: Returning, tmp_path: Path) -> None:
    """The engine is replaced by one with another kind of output."""
    root = shutil.copytree(builds("last")[0], tmp_path / "faulty")
    path = "engines/ort-cpu/mod-b2s16-float32.onnx"
    shutil.copy(builds("none")[0] / path, root / path)
    found = validate_folder(root, None, ["ort-cpu"])
    assert found.verdict.status == "fail"
    assert any("the engine gives no last_logits, expected" in reason for reason in found.verdict.reasons)


@pytest.mark.slow
def test_blocks_of_queries_are_built_judged_and_exported_afresh(
    small_folder: Path, config: BuildConfig, tmp_path: Path
) -> None:
    report = build_of(small_folder / "small.pt", config, tmp_path / "build", **{"target/ort-cpu/query_block": 4})
    assert report.verdict.status == "pass", report.verdict.reasons
    graphs = {graph["path"]: graph for graph in read_manifest(tmp_path / "build")["graphs"]}
    graph = graphs["graphs/mod-b2s16.ort-cpu.float32.onnx"]
    assert graph["query_blocks"] == {"16": 4}
    nodes = [node.op_type for node in ir.load(tmp_path / "build" / graph["path"]).graph]
    assert nodes.count("Attention") == 4 + 1  # There are four blocks in the dense layer; the routed one is not split.
    found = validate_folder(tmp_path / "build", None, [])
    assert found.verdict.status == "pass", found.verdict.reasons
    # The prediction counts the work of the engines.
    (row,) = report.speedup
    dense, mod = ({cost.model: cost.flops for cost in report.cost}[kind] for kind in ("dense", "mod"))
    assert row.predicted_flops is not None
    assert row.predicted_flops < dense / mod


@pytest.mark.slow
def test_no_blocks_when_none_are_wanted(small_folder: Path, config: BuildConfig, tmp_path: Path) -> None:
    build_of(small_folder / "small.pt", config, tmp_path / "build", **{"target/ort-cpu/query_block": 0})
    assert all(graph["query_blocks"] == {} for graph in read_manifest(tmp_path / "build")["graphs"])

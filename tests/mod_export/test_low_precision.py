"""int8 and int4 weights through a whole build: judged by their text, sized, timed, and not served if they fail."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from build_folders import Silent, changed
from writing import LAX

import mod_export
from mod_export.config import BuildConfig
from mod_export.errors import TargetError
from mod_export.folder.manifest import read_manifest
from mod_export.model.request import Request
from mod_export.pipeline.rerun import validate_folder
from mod_export.pipeline.stages import build
from mod_export.report import render_html, render_text
from mod_export.rows.report import BuildReport
from mod_export.types import DType
from mod_models.checkpoint import random_checkpoint, save_checkpoint
from mod_models.spec import ModelSpec

pytestmark = pytest.mark.usefixtures("searching_few_rows")


def low(config: BuildConfig, *dtypes: DType) -> BuildConfig:
    return changed(
        config,
        {
            "buckets": [[2, 16]],
            "target/ort-cpu/dtypes": ["float32", *dtypes],
            "parity/text_batches": 1,
            "cost/profile_runs": 0,
            **LAX,
        },
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny_spec: ModelSpec) -> Path:
    """A checkpoint with two layers, one of them routed."""
    path = tmp_path_factory.mktemp("model") / "tiny.pt"
    save_checkpoint(path, random_checkpoint(replace(tiny_spec, n_layers=2), 0))
    return path


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("low") / "build"


@pytest.fixture(scope="module")
def report(root: Path, checkpoint: Path, config: BuildConfig) -> BuildReport:
    return build(
        Request.checkpoint(checkpoint).models, low(config, "int8", "int4"), root, Silent(), "mod-export build tiny.pt"
    )


def test_every_dtype_is_judged_and_passes(report: BuildReport) -> None:
    assert report.verdict.status == "pass", report.verdict.reasons
    judged = {(row.target, row.dtype, row.model): row for row in report.parity}
    for dtype in ("int8", "int4"):
        row = judged["ort-cpu", dtype, "mod"]
        assert row.text is not None
        assert row.text.next_token_agreement is not None
        assert row.error.max_abs > judged["ort-cpu", "float32", "mod"].error.max_abs
    errors = {dtype: judged["ort-cpu", dtype, "dense"].error.rms for dtype in ("float32", "int8", "int4")}
    assert errors["float32"] < errors["int8"] < errors["int4"]


def test_size_and_speed_stand_beside_float32(report: BuildReport) -> None:
    assert {(row.dtype, row.model) for row in report.precision} == {
        (dtype, model) for dtype in ("int8", "int4") for model in ("mod", "dense")
    }
    assert len(report.precision) == 4
    for row in report.precision:
        assert row.ci95[0] <= row.measured <= row.ci95[1]
        assert row.p50_ms > 0
    text = render_text(report, "folder")
    assert re.search(r"^ort-cpu +b2s16 +int8 +MoD .* pass$", text, flags=re.MULTILINE)
    assert "Lower precision" in render_html(report)


def test_weights_files_hold_what_their_graphs_need(root: Path, report: BuildReport) -> None:
    sizes = {path.name: path.stat().st_size for path in (root / "graphs").glob("*.data")}
    assert sizes.keys() == {f"weights-{dtype}.data" for dtype in ("float32", "int8", "int4")}
    for dtype in ("int8", "int4"):
        graph = next(
            item for item in read_manifest(root)["graphs"] if item["dtype"] == dtype and item["model"] == "mod"
        )
        named = (root / graph["path"]).read_bytes()
        assert f"weights-{dtype}.data".encode() in named
        assert b"weights-float32.data" not in named


@pytest.mark.slow
def test_the_folder_validates_again(root: Path, report: BuildReport) -> None:
    found = validate_folder(root, None, [])
    assert found.verdict.status == "pass", found.verdict.reasons


@pytest.mark.slow
def test_another_number_in_the_weights_is_found(root: Path, report: BuildReport) -> None:
    path = root / "graphs/weights-int8.data"
    kept = path.read_bytes()
    try:
        path.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        found = validate_folder(root, None, [])
    finally:
        path.write_bytes(kept)
    assert any(
        "weights-int8.data" in reason and "not the checkpoint's values" in reason for reason in found.verdict.reasons
    )


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_it_is_served_on_request(dtype: DType, root: Path, report: BuildReport) -> None:
    ids_BS = np.random.default_rng(0).integers(0, 256, (2, 12))
    # Without a name the fastest dtype is served, and which one that is depends on the load of this machine.
    fastest = next(row.dtype for row in report.served if (row.model, row.role) == ("mod", "forward"))
    with (
        mod_export.load(root) as usual,
        mod_export.load(root, dtype="float32") as exact,
        mod_export.load(root, dtype=dtype) as narrow,
    ):
        assert (usual.dtype, exact.dtype, narrow.dtype) == (fastest, "float32", dtype)
        difference = np.abs(exact.run(ids_BS) - narrow.run(ids_BS)).max()
    assert 0 < difference < 5


@pytest.fixture
def rebuilt(root: Path, report: BuildReport, tmp_path: Path) -> Path:
    """A copy that a test may build again."""
    return Path(shutil.copytree(root, tmp_path / "build"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missed", "served", "shown"),
    [("int8", "float32", "int8 +MoD .* FAIL$"), ("float32", "int8", "float32 .*FAIL")],
)
def test_what_misses_its_gate_is_not_served_where_it_is_named(
    missed: DType, served: DType, shown: str, rebuilt: Path, checkpoint: Path, config: BuildConfig
) -> None:
    strict = changed(low(config, "int8"), {f"parity/{missed}/rounding_error": 0.0})
    found = build(Request.checkpoint(checkpoint).models, strict, rebuilt, Silent(), "mod-export build tiny.pt")
    assert found.verdict.status == "fail"
    assert re.search(rf"^ort-cpu .* {shown}", render_text(found, "folder"), flags=re.MULTILINE)
    assert {row.dtype for row in found.parity if not row.passed} == {missed}
    refused = read_manifest(rebuilt)["refused"]
    assert {path for path in refused if path.startswith("engines/")} == {
        f"engines/ort-cpu/{kind}-b2s16-{missed}.onnx" for kind in ("mod", "dense")
    }
    message = rf"the {missed} engines for ort-cpu missed their gates and are not served \(.*max abs error"
    with pytest.raises(TargetError, match=message):
        mod_export.load(rebuilt, dtype=missed)
    # A named target means its first built dtype, float32; no other dtype replaces it.
    if missed == "float32":
        with pytest.raises(TargetError, match=message):
            mod_export.load(rebuilt, "ort-cpu")
    # If nothing is named, it is the fastest of those that met their gates.
    with mod_export.load(rebuilt) as deployment:
        assert deployment.dtype == served

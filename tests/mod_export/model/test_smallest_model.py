"""A model with only what `Model` requires works in every command; its routing is read from the graph."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from build_folders import Silent
from command_line import invoke, refused, toml_file
from packages import register

from mod_export import load
from mod_export.config import config_from_toml
from mod_export.errors import CheckpointError, ConfigError, UsageError
from mod_export.folder.manifest import open_folder
from mod_export.inspect.describe import describe
from mod_export.model.checkpoint import model_from_checkpoint
from mod_export.model.request import Request
from mod_export.pipeline.rerun import validate_folder
from mod_export.pipeline.stages import build
from mod_export.rows.correctness import StructureRow
from mod_export.rows.report import BuildReport
from mod_export.sweep.run import Axes, cells_of

TOML = """
buckets = [[1, 32]]
targets = ["ort-cpu"]
[latency]
samples = 8
max_samples = 8
warmup = 1
bootstrap = 100
"""
"""A configuration with the default gate on speed-up."""
NO_GATE = "min_speedup = 0.0\n"
NO_BASELINE = (
    "there is no dense baseline, so latency has no speed-up and no gate; give a dense model with --baseline dense.pt, "
    "in Python with baseline=dense_module (if a function with a parameter capacity makes your module, what it makes "
    "with capacity=1.0)"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


@pytest.fixture(scope="module", autouse=True)
def _installed(folder: Path) -> object:
    """Installs the architecture as a package, and writes checkpoints: `mod`, `dense`, and `full`, which selects all."""
    with pytest.MonkeyPatch.context() as patch:
        code = (Path(__file__).parent / "plain_mod.py").read_text(encoding="utf-8")
        register(patch, folder, "plain_mod", "plain_mod", code)
        import plain_mod

        for name, k in (("mod", 4), ("dense", None), ("full", 32)):
            plain_mod.ARCHITECTURE.random({"k": k}, 0, folder / f"{name}.pt")
        yield
    sys.modules.pop("plain_mod", None)


def build_plain(folder: Path, root: Path, baseline: Path | None, more: str = "") -> BuildReport:
    config = config_from_toml(toml_file(folder, TOML + more))
    return build(
        Request.checkpoint(folder / "mod.pt", baseline).models, config, root, Silent(), "mod-export build mod.pt"
    )


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[Path, BuildReport]:
    """The folder of a build without a baseline, which tests only read, and its report."""
    return folder / "alone", build_plain(folder, folder / "alone", None)


def test_without_a_baseline_it_is_judged_and_timed(alone: tuple[Path, BuildReport]) -> None:
    """No dense model is built, and the default gate on speed-up does not fail the build."""
    root, report = alone
    assert (report.verdict.status, report.verdict.reasons) == ("pass", ())
    assert report.not_compared == NO_BASELINE
    manifest = open_folder(root)
    assert list(manifest.models) == ["mod"]
    assert not [path for path in manifest.files if "dense" in path]
    made = [*manifest.graphs, *manifest.engines, *report.parity, *report.causality, *report.cost, *report.parts]
    assert {item.model for item in made} == {"mod"}
    assert [row.artifact for row in report.parity if row.passed] == [row.artifact for row in report.parity]
    (timed,) = report.latency
    assert (timed.target, timed.bucket, len(timed.samples_ms)) == ("ort-cpu", "b1s32", 8)
    assert timed.p50_ms > 0
    assert report.speedup == ()
    with load(root) as deployment:
        assert deployment.run(np.zeros((1, 32), np.int64)).shape == (1, 32, 32)
    with pytest.raises(UsageError, match=r"alone: holds no engine of model 'dense'; expected 'mod'$"):
        load(root, model="dense")


def test_the_folder_is_validated_timed_inspected_and_shown(alone: tuple[Path, BuildReport]) -> None:
    root, _ = alone
    validated, timed, inspected, shown = (invoke(name, root) for name in ("validate", "bench", "inspect", "report"))
    assert {result.exit_code for result in (validated, timed, inspected, shown)} == {0}, validated.output + timed.output
    assert validated.stdout.endswith("PASS\n")
    head, _, line, blank, remark, *_ = timed.stdout.splitlines()
    assert re.split(r"\s{2,}", head)[-3:] == ["ms [95 %]", "p90 ms", "p99 ms"]
    assert line.startswith("ort-cpu  b1s32   float32  ")
    assert (blank, remark) == ("", f"not compared: {NO_BASELINE}")
    assert timed.stdout.endswith("PASS\n")
    assert "bucket   FLOPs\n--------------\nb1s32   41,984\n" in inspected.stdout
    assert f"not compared: {NO_BASELINE}\n" in shown.stdout
    assert all("dense" not in line for line in shown.stdout.splitlines() if "not compared" not in line)


def test_a_speed_up_that_nothing_could_show_is_not_promised(
    folder: Path, tmp_path: Path, alone: tuple[Path, BuildReport]
) -> None:
    """The gate is above the default, or it is the default but set in the configuration."""
    root, _ = alone
    for gate in ("1.3", "1"):
        message = (
            f"latency.min_speedup: a speed-up of {gate} is demanded, and there is no dense baseline that it could be "
            f"shown over; {NO_BASELINE.partition('; ')[2]}, or set min_speedup = 0"
        )
        with pytest.raises(ConfigError, match=re.escape(message)):
            build_plain(folder, tmp_path / "built", None, f"min_speedup = {gate}\n")
        assert not (tmp_path / "built").exists()
        demanding = toml_file(tmp_path, TOML + f"min_speedup = {gate}\n")
        refused(invoke("bench", root, "-c", demanding), re.escape(message))
    # A validation without timing demands no speed-up.
    assert validate_folder(root, config_from_toml(demanding), ()).verdict.status == "pass"


@pytest.mark.fast("full")
@pytest.mark.parametrize("name", ["dense", "full"])
def test_with_a_baseline_it_is_compared_judged_and_validated_again(folder: Path, tmp_path: Path, name: str) -> None:
    """The baseline is another model, or the same module with every token selected."""
    report = build_plain(folder, tmp_path / "built", folder / f"{name}.pt", NO_GATE)
    assert report.verdict.reasons == ()
    assert report.not_compared is None
    (row,) = report.speedup
    assert row.predicted_flops is not None
    assert row.predicted_flops > 1
    routed, dense = (graph.k_by_layer for graph in open_folder(tmp_path / "built").graphs if graph.target is None)
    assert (routed, dense) == ({"block": 4}, {"block": 32} if name == "full" else {})
    parity = next(row for row in report.parity if row.model == "mod")
    assert parity.passed
    assert [row.layer for row in parity.routing.layers] == ["block"]
    assert report.generation is not None
    assert report.generation.reason == "it only reads whole rows"
    validation = validate_folder(tmp_path / "built", None, ())
    assert validation.verdict.status == "pass"
    assert all(row.passed for row in validation.rows(StructureRow))


def test_what_it_cannot_do_is_said(folder: Path, tmp_path: Path) -> None:
    model = model_from_checkpoint(folder / "mod.pt")
    with pytest.raises(ConfigError, match=r"capacity 8: that of mod cannot be changed without training"):
        Request.checkpoint(folder / "mod.pt", capacity=8).models()
    with pytest.raises(ValueError, match=r"^this model cannot generate token by token: it only reads whole rows$"):
        model.generating(16)
    with pytest.raises(CheckpointError, match="mod: no layer is routed by a capacity that could be swept"):
        cells_of(model, config_from_toml(None), Axes(), here=True)
    assert describe(folder / "mod.pt").endswith("its layers are not declared; build it, and inspect the build folder\n")
    with pytest.raises(UsageError, match=r"--html: .*mod\.pt does not declare its layers; build it, and look at its"):
        describe(folder / "mod.pt", html=tmp_path / "page.html")


def test_a_baseline_that_selects_tokens_is_no_baseline(folder: Path, tmp_path: Path) -> None:
    message = "graphs/dense-b1s32.onnx: in the baseline block selects 4 of 32 tokens; all must run"
    report = build_plain(folder, tmp_path / "built", folder / "mod.pt", NO_GATE)
    assert report.verdict.reasons == (f"b1s32 dense: could not be built (stage onnx): {message}",)
    assert {(row.model, row.passed) for row in report.parity} == {("mod", True)}

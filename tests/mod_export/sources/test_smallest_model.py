"""A model that has `ExportableModel` and no capability goes through every command, its routing read from the graph."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from build_folders import Silent
from command_line import FEW_SAMPLES
from packages import register

from mod_export.build_folder.manifest import open_folder
from mod_export.config import config_from_toml
from mod_export.errors import CheckpointError, ConfigError, GraphError, UsageError
from mod_export.inspect.describe import describe
from mod_export.pipeline import build
from mod_export.rerun import validate_folder
from mod_export.results.report import BuildReport
from mod_export.results.structure import StructureRow
from mod_export.sources.checkpoint import model_from_checkpoint
from mod_export.sweep.grid import Axes, cells_of

TOML = f"""
buckets = [[1, 32]]
targets = ["ort-cpu"]
{FEW_SAMPLES}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


@pytest.fixture(scope="module", autouse=True)
def _installed(folder: Path) -> object:
    """The architecture as a package of its own, and two checkpoints of it: `mod` and `dense`."""
    with pytest.MonkeyPatch.context() as patch:
        code = (Path(__file__).parent / "plain_mod.py").read_text(encoding="utf-8")
        register(patch, folder, "plain_mod", "plain_mod", code)
        import plain_mod

        for name, k in (("mod", 4), ("dense", None)):
            plain_mod.ARCHITECTURE.random({"k": k}, 0, folder / f"{name}.pt")
        yield
    sys.modules.pop("plain_mod", None)


def build_plain(folder: Path, root: Path, baseline: Path | None) -> BuildReport:
    (folder / "plain.toml").write_text(TOML, encoding="utf-8")
    config = config_from_toml(folder / "plain.toml")
    return build(folder / "mod.pt", config, root, baseline, Silent(), "mod-export build mod.pt")


def test_it_is_built_judged_and_validated_again(folder: Path, tmp_path: Path) -> None:
    report = build_plain(folder, tmp_path / "built", folder / "dense.pt")
    assert report.verdict.reasons == ()
    routed, dense = (graph.k_by_layer for graph in open_folder(tmp_path / "built").graphs if graph.target is None)
    assert (routed, dense) == ({"block": 4}, {})
    parity = next(row for row in report.parity if row.model == "mod")
    assert parity.passed
    assert [row.layer for row in parity.routing.layers] == ["block"]
    assert report.generation is not None
    assert report.generation.reason == "it only reads whole rows"
    found = validate_folder(tmp_path / "built", None, ())
    assert found.verdict.status == "pass"
    assert all(row.passed for row in found.rows(StructureRow))


def test_what_it_cannot_do_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"mod: has no dense baseline of its own; name a checkpoint with --base"):
        build_plain(folder, tmp_path / "built", None)
    model = model_from_checkpoint(folder / "mod.pt")
    with pytest.raises(ConfigError, match=r"capacity 8: that of mod cannot be changed without training"):
        model.with_capacity(8)
    with pytest.raises(CheckpointError, match="mod: no layer is routed by a capacity that could be swept"):
        cells_of(model, config_from_toml(None), Axes(), here=True)
    assert describe(folder / "mod.pt").endswith("its layers are not declared; build it, and inspect the build folder\n")
    with pytest.raises(UsageError, match=r"--html: .*mod\.pt does not declare its layers; build it, and look at its"):
        describe(folder / "mod.pt", html=tmp_path / "page.html")


def test_a_baseline_that_selects_tokens_is_no_baseline(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"dense-b1s32\.onnx: the baseline selects tokens at block; it must not"):
        build_plain(folder, tmp_path / "built", folder / "mod.pt")

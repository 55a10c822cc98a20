"""`mod-export build --no-evidence`: engines can be used at once, and warnings say that nothing was judged."""

from __future__ import annotations

import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from build_folders import check_files, flip, once, steps_of
from command_line import FEW_SAMPLES, invoke, toml_file

from mod_export import load
from mod_export.errors import GraphError, TargetError, UnverifiedWarning
from mod_export.folder.manifest import open_folder
from mod_export.folder.workspace import LOCK
from mod_export.pipeline.build import Build
from mod_export.pipeline.validate import check_structure
from mod_export.rows.report import BuildReport, report_from_json
from mod_models.checkpoint import random_checkpoint, save_checkpoint
from mod_models.spec import ModelSpec

pytestmark = pytest.mark.usefixtures("searching_few_rows")
TOML = f"""
buckets = [[2, 16]]
targets = ["ort-cpu"]
{FEW_SAMPLES}[cost]
profile_runs = 0
[parity]
text_batches = 1
"""
IMPOSSIBLE = "[parity.float32]\nrounding_error = 1e-9\n"
"""A gate that no engine passes."""


@pytest.fixture(scope="module")
def made(shared_folder: Path, tiny_spec: ModelSpec) -> Path:
    """Folder with `model.pt`, `c.toml`, and the read-only build without evidence."""
    folder = shared_folder / "no_evidence"

    def make() -> None:
        save_checkpoint(folder / "model.pt", random_checkpoint(replace(tiny_spec, n_layers=2), 0))
        toml_file(folder, TOML)
        found = invoke(
            "build", folder / "model.pt", "-c", folder / "c.toml", "-o", folder / "build", "--no-evidence", "-q"
        )
        assert (found.exit_code, found.stdout) == (0, f"built, and nothing verified: {folder / 'build'}\n"), (
            found.output
        )

    return once(folder, make)


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "build", tmp_path / "build"))


def test_its_engines_are_served_with_a_warning(root: Path) -> None:
    check_files(root)
    assert not open_folder(root).verified
    assert {name.partition("/")[0] for name in steps_of(root)}.isdisjoint({"parity", "causality", "latency"})
    with pytest.warns(
        UnverifiedWarning, match=r"build: nothing in it was verified: .*`mod-export validate /.*/build` "
    ):
        deployment = load(root)
    with deployment:
        assert np.isfinite(deployment.run(np.zeros((2, 16), np.int64))).all()
    with warnings.catch_warnings():
        warnings.simplefilter("default", UnverifiedWarning)  # Users' default; in these tests warnings are errors.
        result = invoke("generate", root, "--prompt", "ab", "--selection", "topk-prefill")
    assert result.exit_code == 0
    assert result.stderr.startswith(f"warning: {root}: nothing in it was verified: it was built with --no-evidence. ")
    assert result.stderr.count("warning") == 1


def report_of(root: Path) -> BuildReport:
    found = invoke("report", root, "--format", "json")
    assert found.exit_code == 0, found.output
    return report_from_json(found.stdout)


@pytest.mark.fast("order0")
@pytest.mark.parametrize("order", [("validate", "bench"), ("bench", "validate")])
def test_its_report_says_what_is_missing_and_is_completed(root: Path, order: tuple[str, str]) -> None:
    def missing() -> set[str]:
        found = report_of(root)
        unjudged = any("parity of the mod engine was not checked" in reason for reason in found.verdict.reasons)
        assert unjudged is (not found.parity)
        return {name for name, rows in (("validate", found.parity), ("bench", found.latency)) if not rows}

    left = set(order)
    assert missing() == left
    shown = invoke("report", root).stdout
    assert shown.splitlines()[-1].startswith("NOT JUDGED  built without evidence: `mod-export validate ")
    assert '<h2 id="verdict">Not judged</h2>' in (root / "report.html").read_text(encoding="utf-8")
    for name in order:
        assert invoke(name, root).exit_code in ((0,) if name == "validate" else (0, 4))
        left.remove(name)
        assert missing() == left
        assert open_folder(root).verified == ("validate" not in left)
        check_files(root)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(root)
    found = report_of(root)
    assert "NOT JUDGED" not in invoke("report", root).stdout
    assert found.speedup
    assert found.routing_maps
    assert {stage.name for stage in found.stages} >= {"structure", "validate", "benchmark", "report"}
    assert any(target.ran for target in found.targets)
    text = (root / "report.html").read_text(encoding="utf-8")
    for name in order:
        assert invoke(name, root).exit_code in (0, 4)
    assert (root / "report.html").read_text(encoding="utf-8") == text


def test_a_report_that_was_changed_is_not_completed(root: Path) -> None:
    path = root / "report.json"
    path.write_text(path.read_text(encoding="utf-8").replace("structure", "Structure"), encoding="utf-8")
    changed = path.read_bytes()
    assert invoke("validate", root).exit_code == 4
    assert path.read_bytes() == changed
    assert not open_folder(root, verify=False).verified


def test_its_report_is_written_where_it_is_asked_for(made: Path, root: Path) -> None:
    where = root.parent / "r.json"
    again = ["build", made / "model.pt", "-c", made / "c.toml", "-o", root, "-q", "--no-evidence", "--report", where]
    found = invoke(*again)
    assert (found.exit_code, found.stdout) == (0, f"built, and nothing verified: {root}\n"), found.output
    assert where.read_text(encoding="utf-8") == (root / "report.json").read_text(encoding="utf-8")


@pytest.mark.fast("bench")
@pytest.mark.parametrize("name", ["validate", "bench"])
def test_what_is_found_counts_where_nothing_can_be_written(root: Path, name: str) -> None:
    (root / LOCK).unlink(missing_ok=True)
    (root / LOCK).mkdir()
    found = invoke(name, root)
    assert found.exit_code == 0, found.output
    assert re.search(r"not written into the folder: .*/build: cannot write .* \(Is a directory\)", found.output)
    assert not report_of(root).parity
    assert not report_of(root).latency


@pytest.mark.slow
def test_validate_with_other_gates_or_a_part_verifies_nothing(root: Path, tmp_path: Path) -> None:
    other = toml_file(tmp_path, TOML)
    for arguments in (("-c", other), ("--target", "ort-cpu")):
        assert invoke("validate", root, *arguments).exit_code == 0
        assert not open_folder(root).verified


@pytest.mark.slow
def test_what_then_misses_its_gate_is_not_served(made: Path, tmp_path: Path) -> None:
    strict = toml_file(tmp_path, TOML + IMPOSSIBLE)
    root = tmp_path / "strict"
    assert invoke("build", made / "model.pt", "-c", strict, "-o", root, "--no-evidence", "-q").exit_code == 0
    assert invoke("validate", root).exit_code == 4
    assert open_folder(root).verified
    with pytest.raises(TargetError, match="the float32 engines for ort-cpu missed their gates and are not served"):
        load(root)


@pytest.mark.slow
def test_the_same_build_goes_on(made: Path, root: Path) -> None:
    before = steps_of(root)
    found = invoke("build", made / "model.pt", "-c", made / "c.toml", "-o", root, "-q")
    assert found.exit_code in (0, 4), found.output
    after = steps_of(root)
    assert all(after[name] == step for name, step in before.items() if name != "report")
    assert open_folder(root).verified
    assert invoke("report", root).exit_code == 0


def test_files_that_are_not_what_they_must_be_end_it(root: Path) -> None:
    flip(root / "graphs" / "weights-float32.data")
    with pytest.raises(GraphError, match=r"graphs/weights-float32\.data: .*"):
        check_structure(Build.open(root, None, (), verify=False))

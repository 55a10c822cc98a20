"""Cells on a real Ray cluster that is started here, and on a node that shares nothing with the sweep."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from command_line import command
from sweep_jobs import job_of, with_tokenizer
from tokenizer_folders import write_folder

from mod_export.errors import UsageError
from mod_export.folder.files import write_whole
from mod_export.folder.workspace import Workspace
from mod_export.model.checkpoint import sha256_of
from mod_export.model.request import Request
from mod_export.sweep import cluster
from mod_export.sweep.cell import CellJob, digest_of_tokenizer, failed_cell
from mod_export.sweep.cluster import cell_on_node, packed_checkpoint, run_on_cluster
from mod_export.sweep.schema import CellEntry, SweepReport
from mod_models.checkpoint import load_checkpoint, save_checkpoint
from mod_models.spec import ModelSpec

ON_RAY = "import warnings; warnings.simplefilter('ignore')"
RAY = {
    # Ray's sockets lie in folders below this one, and a socket's path has at most 107 characters.
    "RAY_TMPDIR": "/tmp",
    # By default workers run at a niceness of 15, and get almost no CPU time beside other tests.
    "RAY_worker_niceness": "0",
}


@pytest.mark.slow
def test_a_sweep_on_a_local_cluster(checkpoint: Path, fast: Path, tmp_path: Path) -> None:
    """It runs in its own process, because Ray starts threads and emits warnings."""
    pytest.importorskip("ray")
    folder = tmp_path / "out"
    found = command(
        "sweep", checkpoint, "-c", fast, "-o", folder, "--capacity", "0.25,0.5", "--ray", "local",
        code=ON_RAY, env={**os.environ, **RAY}, timeout=600,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "PASS  2 of 2 cells measured" in found.stdout
    report = SweepReport.model_validate_json((folder / "sweep.json").read_text())
    assert [cell.k for cell in report.cells] == [4, 8]
    assert all(cell.node for cell in report.cells)
    assert all((folder / cell.folder / "report.html").is_file() for cell in report.cells)
    assert not list((folder / "cells").glob(".shared-*"))

    again = command("sweep", checkpoint, "-c", fast, "-o", folder, "--capacity", "0.25,0.5", "--ray", "nowhere:1")
    assert again.returncode == 0, again.stderr
    assert "2 cells, 2 of them finished before" in again.stderr


@pytest.mark.slow
def test_a_node_that_shares_nothing(
    checkpoint: Path, fast: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job = job_of(checkpoint, tmp_path / "elsewhere", fast)
    job = job.model_copy(update={"checkpoint": tmp_path / "elsewhere/tiny.pt"})
    sent = cell_on_node(job, tmp_path / "no marker", lambda: packed_checkpoint(checkpoint))
    entry = CellEntry.model_validate_json(sent.entry)
    assert entry.status == "measured", sent.log.decode()
    assert entry.node
    assert Path(entry.folder).is_relative_to(tmp_path / "cache")
    assert (Path(entry.folder) / "engines").is_dir()
    assert set(sent.files) == {"report.json", "report.html", "manifest.json"}
    assert b"* report" in sent.log
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("beside", ["nothing", "another", "the same"])
def test_a_node_gets_the_tokenizer_of_the_sweep(
    tiny_spec: ModelSpec, fast: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: str
) -> None:
    """The node has the same model.pt where the sweep has it, with these tokenizer files beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    named = with_tokenizer(tmp_path / "model", tiny_spec)
    tokenizer, _ = Request.checkpoint(named).tokenizer()
    job = job_of(named, tmp_path, fast, tokenizer_sha256=digest_of_tokenizer(tokenizer))
    files = packed_checkpoint(named)
    if beside != "the same":
        for path in named.parent.iterdir():
            if path != named:
                path.unlink()
    if beside == "another":
        write_folder(named.parent, "llama2")
    fetched, ran = [], []

    def fetch() -> dict[str, bytes]:
        fetched.append(beside)
        return files

    def run(on_node: CellJob) -> CellEntry:
        write_whole(on_node.log, b"", "-o")
        found, _ = Request.checkpoint(on_node.checkpoint).tokenizer()
        ran.append((sha256_of(on_node.checkpoint), digest_of_tokenizer(found)))
        return failed_cell(on_node, 3, "not built")

    monkeypatch.setattr(cluster, "run_cell", run)
    cell_on_node(job, tmp_path / "no marker", fetch)
    assert ran == [(job.checkpoint_sha256, job.tokenizer_sha256)]
    assert bool(fetched) is (beside != "the same")
    # The next sweep of this model has no tokenizer, and what was fetched for this one is not read.
    bare = {"model.pt": files["model.pt"]}
    missing = job.model_copy(update={"checkpoint": tmp_path / "elsewhere/model.pt", "tokenizer_sha256": None})
    cell_on_node(missing, tmp_path / "no marker", lambda: bare)
    assert ran[1] == (job.checkpoint_sha256, None)


def test_a_folder_is_packed_whole_and_without_builds(checkpoint: Path, tmp_path: Path) -> None:
    assert packed_checkpoint(checkpoint) == {"tiny.pt": checkpoint.read_bytes()}
    model = tmp_path / "model"
    save_checkpoint(model, load_checkpoint(checkpoint))
    with Workspace(model / "build") as build:
        build.step("one", {}, ["graphs/a.onnx"], lambda paths: paths[0].write_text("a graph"))
    # A manifest of something else, or of another release, makes no build folder.
    (model / "extension").mkdir()
    (model / "extension" / "manifest.json").write_text("{}")
    packed = packed_checkpoint(model)
    assert set(packed) == {"model/config.json", "model/model.safetensors", "model/extension/manifest.json"}
    for name, data in packed.items():
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(data)
    assert sha256_of(tmp_path / "copy/model") == sha256_of(model)


def test_no_cells_no_cluster(tmp_path: Path, checkpoint: Path) -> None:
    assert list(run_on_cluster("nowhere:1", tmp_path, checkpoint)([])) == []


def test_ray_is_not_installed(checkpoint: Path, fast: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r'--ray: Ray cannot be loaded \(.*\); pip install "mod-export\[ray\]"'):
        next(run_on_cluster("local", tmp_path, checkpoint)([job_of(checkpoint, tmp_path, fast)]))


@pytest.mark.slow
def test_no_cluster_there(checkpoint: Path, fast: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    found = command(
        "sweep", checkpoint, "-c", fast, "-o", tmp_path / "out", "--ray", "not an address", code=ON_RAY, timeout=120
    )
    assert found.returncode == 2, found.stderr
    assert "error: --ray not an address: no cluster there (" in found.stderr
    assert "`local` to start one here" in found.stderr

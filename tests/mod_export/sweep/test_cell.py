"""Cells in real processes: refused, killed, and ended with the process that waits for them; and their perplexity."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from sample_rows import changed
from sweep_jobs import PATIENCE_S, cells_below, job_of, wait_until, with_tokenizer

from mod_export.config import BuildConfig
from mod_export.folder.files import write_whole
from mod_export.folder.manifest import open_folder
from mod_export.model.checkpoint import model_from_checkpoint
from mod_export.model.model import Model
from mod_export.model.request import Request
from mod_export.model.transformer import MOD_TRANSFORMER
from mod_export.rows.report import report_from_json
from mod_export.sweep import cell as sweep_cell
from mod_export.sweep.cell import (
    QUALITY_TOKENS,
    finished_cell,
    machine_name,
    quality_of,
    run_cell,
)
from mod_export.sweep.cluster import packed_checkpoint
from mod_export.sweep.run import GridCell, _job
from mod_export.sweep.schema import CellEntry
from mod_export.types import Bucket, having
from mod_models.checkpoint import random_checkpoint, save_checkpoint
from mod_models.spec import ModelSpec


def test_a_finished_cell_is_reused_while_nothing_has_changed(
    cell: Any, checkpoint: Path, fast: Path, tmp_path: Path
) -> None:
    job = job_of(checkpoint, tmp_path, fast)
    assert finished_cell(job, here=True) is None
    write_whole(job.root / "report.json", "whole", "-o")
    entry = cell(4, machine=machine_name(), report_sha256=hashlib.sha256(b"whole").hexdigest())
    write_whole(job.row, entry.model_dump_json(), "-o")
    assert finished_cell(job, here=True) == entry

    assert finished_cell(job.model_copy(update={"fingerprint": "g"}), here=True) is None
    write_whole(job.row, entry.model_copy(update={"machine": "other"}).model_dump_json(), "-o")
    assert finished_cell(job, here=True) is None
    assert finished_cell(job, here=False) is not None
    write_whole(job.row, entry.model_copy(update={"complete": False}).model_dump_json(), "-o")
    assert finished_cell(job, here=True) is None
    write_whole(job.row, entry.model_dump_json(), "-o")
    write_whole(job.root / "report.json", "damaged", "-o")
    assert finished_cell(job, here=False) is None
    write_whole(job.row, "no row", "-o")
    assert finished_cell(job, here=False) is None


def test_what_changed_while_the_sweep_ran(checkpoint: Path, fast: Path, tmp_path: Path) -> None:
    entry = run_cell(job_of(checkpoint, tmp_path, fast, code={"mod_export": "other"}))
    assert (entry.status, entry.passed, entry.exit_code) == ("failed", False, 2)
    assert "mod_export: not the source that the sweep was started with" in str(entry.error)
    job = job_of(checkpoint, tmp_path, fast, checkpoint_sha256="other")
    entry = run_cell(job)
    assert str(entry.error).endswith("tiny.pt: has changed since the sweep began; start the sweep again")
    assert CellEntry.model_validate_json(job.row.read_text()) == entry
    assert finished_cell(job, here=True) is None


def test_a_cell_is_built_with_the_tokenizer_of_its_model(
    tiny_spec: ModelSpec, fast: Path, model: Model, config: BuildConfig, tmp_path: Path
) -> None:
    named = with_tokenizer(tmp_path / "model", tiny_spec)
    tokenizer, _ = Request.checkpoint(named).tokenizer()
    grid_cell = GridCell(capacity=0.25, bucket=Bucket(1, 16), target="ort-cpu")
    jobs = [_job(grid_cell, model, named, config, tmp_path, "mod-export sweep", files) for files in (tokenizer, None)]
    assert jobs[0].fingerprint != jobs[1].fingerprint
    # Without it, int4 would be calibrated, and text judged, on random ids.
    job = job_of(named, tmp_path, fast, tokenizer_sha256=jobs[0].tokenizer_sha256)
    entry = run_cell(job)
    assert entry.status == "measured", entry.error
    assert open_folder(job.root).tokenizer == "tokenizer.json"
    other = run_cell(job_of(named, tmp_path, fast, tokenizer_sha256="other"))
    assert str(other.error).endswith("model.pt: its tokenizer is not that of the sweep; start the sweep again")
    # A node that shares no folder gets it with the checkpoint.
    assert {"model.pt", "tokenizer.json", "tokenizer_config.json"} <= set(packed_checkpoint(named))
    assert next(iter(packed_checkpoint(named))) == "model.pt"


def test_the_text_of_a_row_is_that_of_its_engine(built: Path) -> None:
    """Graphs that were judged in place of an engine have the same dtype and come later."""
    report = report_from_json((built / "report.json").read_text(encoding="utf-8"))
    row = next(row for row in report.speedup if row.bucket == "b1s64")
    (own,) = [one for one in having(report.parity, model="mod", target=row.target) if one.bucket == row.bucket]
    assert own.text is not None
    others = [one if one.target == row.target else changed(one, text=None) for one in report.parity]
    assert others != list(report.parity)
    only = changed(report, parity=tuple(others), speedup=(row,))
    (found,) = sweep_cell._rows(only)
    assert found.text == own.text


def test_a_process_that_dies_without_a_word(checkpoint: Path, fast: Path, tmp_path: Path) -> None:
    job = job_of(checkpoint, tmp_path, fast)
    found: list[CellEntry] = []
    thread = threading.Thread(target=lambda: found.append(run_cell(job)))
    thread.start()
    wait_until(lambda: cells_below(psutil.Process()))
    cells_below(psutil.Process())[0].kill()
    thread.join(PATIENCE_S)
    (entry,) = found
    assert (entry.status, entry.exit_code) == ("failed", -signal.SIGKILL)
    assert str(entry.error).startswith("killed, as the kernel does when memory runs out")


def test_a_crash_shows_its_last_line(checkpoint: Path, fast: Path, tmp_path: Path) -> None:
    job = job_of(checkpoint, tmp_path, fast).model_copy(update={"config": {"buckets": "not a list"}})
    entry = run_cell(job)
    assert entry.exit_code == 1
    assert str(entry.error).startswith("ended with exit code 1 and no result; its last line: ")
    assert "Traceback" in job.log.read_text()


SCRIPT = """
import signal, sys
from pathlib import Path
from mod_export.sweep.cell import CellJob
from mod_export.sweep.cell import run_cell
# Whoever started the tests may have had this signal ignored, and that is inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)
run_cell(CellJob.model_validate_json(Path(sys.argv[1]).read_text()))
"""


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_a_cell_does_not_outlive_the_sweep(
    checkpoint: Path, fast: Path, tmp_path: Path, ending: signal.Signals
) -> None:
    job_file = tmp_path / "job.json"
    job_file.write_text(job_of(checkpoint, tmp_path, fast).model_dump_json())
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT, job_file], stderr=subprocess.DEVNULL)
    process = psutil.Process(parent.pid)
    wait_until(lambda: cells_below(process))
    (cell,) = cells_below(process)
    # From here on it watches its parent; before, it would fail or finish by itself if the parent were killed.
    wait_until(lambda: cell.num_threads() > 1)
    parent.send_signal(ending)
    parent.wait(PATIENCE_S)
    wait_until(lambda: not cell.is_running() or cell.status() == psutil.STATUS_ZOMBIE)
    assert not (tmp_path / "cells/one.json").exists()
    assert json.loads((tmp_path / "cells/one.job.json").read_text())["name"] == "one"


def test_perplexity_by_the_definition(model: Model) -> None:
    found = quality_of(model, 100, seed=3)
    assert found is not None
    assert found.tokens == 8200 >= QUALITY_TOKENS
    ids_RT = model.sample_ids(82, 101, 3)
    assert ids_RT is not None
    text_RT = torch.from_numpy(ids_RT)
    logits_RSV = model.module()(text_RT[:, :-1], torch.full((82,), 100))[0]
    probability = torch.softmax(logits_RSV.double(), -1).gather(-1, text_RT[:, 1:, None])
    assert found.perplexity == pytest.approx(float(torch.exp(-probability.log().mean())), rel=1e-6)
    assert found == quality_of(model, 100, seed=3)


def test_a_trained_model_knows_more_than_an_untrained_one(
    model: Model, tiny_spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_cell, "QUALITY_TOKENS", 1024)
    trained = quality_of(model_from_checkpoint(MOD_TRANSFORMER.demo_checkpoint()), 128, seed=0)
    untrained = quality_of(model, 128, seed=0)
    assert trained is not None
    assert untrained is not None
    assert trained.perplexity < 6 < 200 < untrained.perplexity
    assert trained.dense_perplexity != trained.perplexity
    # There is no text in its vocabulary, so it has no perplexity.
    save_checkpoint(tmp_path / "m.pt", random_checkpoint(dataclasses.replace(tiny_spec, vocab_size=100), 0))
    assert quality_of(model_from_checkpoint(tmp_path / "m.pt"), 64, seed=0) is None

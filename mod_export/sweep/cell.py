"""One cell, in its own process: a full build with another capacity, and the perplexity of the eager model.

    python -P -m mod_export.sweep.cell JOB.json

The job is plain JSON. Progress and errors go to stderr, which is the cell's log, and the row to the file that the job
names, whole or not at all. The process ends when its standard input does, so it does not outlive its parent process.
"""

from __future__ import annotations

import hashlib
import math
import os
import signal
import sys
import threading
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict
from rich.console import Console

from mod_export.config import BuildConfig
from mod_export.console import Progress
from mod_export.environment import describe_machine, source_digest
from mod_export.errors import BuildFolderError, CheckpointError, ModExportError, UsageError
from mod_export.results.report import BuildReport
from mod_export.sources.protocol import LoadedModel
from mod_export.sweep.schema import CellEntry, Measured, Quality

if TYPE_CHECKING:
    import torch

__all__ = ["QUALITY_TOKENS", "CellJob", "failed_cell", "machine_name", "main", "quality_of", "write_whole"]

GATE_FAILED = 4
QUALITY_TOKENS = 8192
"""Predicted tokens, at least. On the shipped model the perplexity then moves by about 1 % from seed to seed."""
LOGITS_BYTES = 2**26
"""Of one run of the model; longer rows are run one by one."""


class CellJob(BaseModel):
    """What a cell needs to know.

    Attributes:
        name: of the cell.
        checkpoint: model.pt or a folder, absolute.
        checkpoint_sha256: what its bytes must be.
        capacity: None keeps the checkpoint's own.
        batch, seq, target: of the cell; the configuration holds them as well.
        config: the cell's whole configuration, as JSON has it.
        code: digests of this package and of the architecture's, as the sweep knows them.
        command: of the sweep, as typed.
        root: the build folder, absolute.
        folder: the build folder as the sweep knows it.
        row: the file for the result, absolute.
        fingerprint: for the row.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    checkpoint: Path
    checkpoint_sha256: str
    capacity: float | None
    batch: int
    seq: int
    target: str
    config: dict[str, Any]
    code: dict[str, str]
    command: str
    root: Path
    folder: str
    row: Path
    fingerprint: str


def main() -> int:
    """Runs the job named on the command line; the exit code is that of a build, and the row says the same."""
    job = CellJob.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    _end_with_stdin()
    try:
        entry = _measured(job)
    except ModExportError as error:
        lines = [*str(error).splitlines(), *getattr(error, "__notes__", [])]
        print("error: " + "\n       ".join(lines), file=sys.stderr)  # noqa: T201
        entry = failed_cell(job, error.exit_code, "; ".join(lines))
    write_whole(job.row, entry.model_dump_json(indent=1) + "\n")
    return entry.exit_code


def failed_cell(job: CellJob, exit_code: int, error: str) -> CellEntry:
    """The row of a cell that could not be built."""
    return CellEntry(
        **_identity(job),
        k_by_layer={},
        status="failed",
        passed=False,
        exit_code=exit_code,
        error=error,
        machine=machine_name(),
    )


def write_whole(path: Path, data: str | bytes) -> None:
    """Replaces a file by renaming, so that it is there whole or not at all; its folder is made if need be.

    Raises:
        BuildFolderError: no space, or no right to write there.
    """
    beside = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(data.encode() if isinstance(data, str) else data)
        beside.replace(path)
    except OSError as error:
        raise BuildFolderError(
            f"{path}: cannot be written ({error.strerror}); free some space or name another folder with -o, and start "
            "the sweep again"
        ) from error


@cache
def machine_name() -> str:
    """What numbers of this machine are compared by: CPU, cores, GPU."""
    machine = describe_machine()
    return ", ".join(str(part) for part in (machine["cpu"], f"{machine['cores']} cores", machine["gpu"]) if part)


def _measured(job: CellJob) -> CellEntry:
    _check_code(job)
    config = BuildConfig.model_validate(job.config)

    # torch and the engines are loaded here, and so only in the process of a cell.
    from mod_export.pipeline import build
    from mod_export.sources.checkpoint import model_from_checkpoint

    model = model_from_checkpoint(job.checkpoint)
    if model.checkpoint_sha256 != job.checkpoint_sha256:
        raise CheckpointError(f"{job.checkpoint}: has changed since the sweep began; start the sweep again")
    if job.capacity is not None:
        model = model.with_capacity(job.capacity)
    progress = Progress(Console(stderr=True), 1)
    report = build(job.checkpoint, config, job.root, None, progress, job.command, job.capacity)
    k_by_layer = model.loaded.k_by_layer(job.seq)
    same = set(k_by_layer.values())
    passed = report.verdict.status == "pass"
    return CellEntry(
        **_identity(job),
        status="measured",
        passed=passed,
        reasons=report.verdict.reasons,
        exit_code=0 if passed else GATE_FAILED,
        k_by_layer=k_by_layer,
        k=same.pop() if len(same) == 1 else None,
        quality=quality_of(model.loaded, job.seq, config.seed),
        measured=_rows(report),
        machine=machine_name(),
        report_sha256=hashlib.sha256((job.root / "report.json").read_bytes()).hexdigest(),
    )


def _rows(report: BuildReport) -> tuple[Measured, ...]:
    latency = {(row.dtype, row.model): row for row in report.latency}
    text = {row.dtype: row.text for row in report.parity if (row.model, row.role) == ("mod", "forward")}
    return tuple(
        Measured(
            dtype=row.dtype,
            providers=latency[row.dtype, "mod"].providers,
            threads=latency[row.dtype, "mod"].threads,
            dense_ms=latency[row.dtype, "dense"].p50_ms,
            mod_ms=latency[row.dtype, "mod"].p50_ms,
            speedup=row,
            text=text.get(row.dtype),
        )
        for row in report.speedup
    )


def quality_of(loaded: LoadedModel, seq: int, seed: int) -> Quality | None:
    """Perplexity of a model and of its dense baseline, on the same rows of `seq` tokens.

    Every position predicts its next token, with the routing that the model has for a row of this length. None when the
    model's vocabulary has no text here.
    """
    rows = math.ceil(QUALITY_TOKENS / seq)
    ids_RT = loaded.sample_ids(rows, seq + 1, seed)
    if ids_RT is None:
        return None
    at_once = max(1, LOGITS_BYTES // (4 * seq * loaded.vocab_size))
    return Quality(
        tokens=rows * seq,
        perplexity=_perplexity(loaded, ids_RT, at_once),
        dense_perplexity=_perplexity(loaded.dense(), ids_RT, at_once),
    )


def _perplexity(loaded: LoadedModel, ids_RT: np.ndarray, at_once: int) -> float:
    import torch

    module, text_RT = loaded.module(), torch.from_numpy(ids_RT)
    with torch.no_grad():
        nats = math.fsum(_nats(module, text_RT[first : first + at_once]) for first in range(0, len(text_RT), at_once))
    mean = nats / (text_RT.shape[0] * (text_RT.shape[1] - 1))
    # What exp() cannot hold is no quality at all.
    return math.exp(mean) if mean < math.log(np.finfo(np.float64).max) else math.inf


def _nats(module: torch.nn.Module, text_BT: torch.Tensor) -> float:
    import torch

    ids_BS, next_BS = text_BT[:, :-1], text_BT[:, 1:]
    lengths_B = torch.full((len(ids_BS),), ids_BS.shape[1])
    (logits_BSV,) = module(ids_BS, lengths_B)
    loss = torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1).double(), next_BS.flatten(), reduction="sum")
    return float(loss)


def _check_code(job: CellJob) -> None:
    """All rows of a table must come from the same source code.

    Raises:
        UsageError: this installation is not the one that started the sweep.
    """
    other = [package for package, digest in job.code.items() if source_digest(package) != digest]
    if other:
        raise UsageError(
            f"{', '.join(other)}: not the source that the sweep was started with; install the same on every node, do "
            "not edit it while a sweep runs, and start the sweep again"
        )


def _identity(job: CellJob) -> dict[str, Any]:
    names = ("name", "capacity", "batch", "seq", "target", "folder", "fingerprint")
    return {name: getattr(job, name) for name in names}


def _end_with_stdin() -> None:
    def wait() -> None:
        # Not sys.stdin: Python, as it ends, wants the lock that a thread reading it would hold.
        while os.read(0, 1):
            pass
        # Ends all processes that were started from here, such as a vendor's builder: this process leads its group.
        os.killpg(os.getpgrp(), signal.SIGKILL)

    if os.getpgrp() == os.getpid():
        threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())

"""Runs one cell of a sweep in its own process: a full build with another capacity, and the eager model's perplexity.

    python -P -m mod_export.sweep.cell JOB.json

`run_cell` starts the process, waits for it, and reads its row; `main` runs in the process. The job is plain JSON.
Progress and errors go to stderr, which is the log of the cell. The row goes to the file that the job names, either
complete or not at all. The process ends when its standard input closes, so it does not outlive its parent process.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError
from rich.console import Console

from mod_export.config import BuildConfig
from mod_export.console import Progress
from mod_export.environment import describe_machine, source_digest
from mod_export.errors import GATE_FAILED, CheckpointError, ModExportError, UsageError
from mod_export.folder.files import write_whole
from mod_export.folder.manifest import open_folder
from mod_export.judge.text import text_ids
from mod_export.model.checkpoint import sha256_of
from mod_export.model.model import Model, token_ids
from mod_export.model.request import Request
from mod_export.model.tokenizer_files import TokenizerFiles
from mod_export.rows.report import BuildReport
from mod_export.runtime.logits import perplexity_of
from mod_export.sweep.schema import CellEntry, CellKey, Measured, Quality
from mod_export.types import having

if TYPE_CHECKING:
    import torch

QUALITY_TOKENS = 8192
"""Minimum number of predicted tokens. With it, the shipped model's perplexity varies by about 1 % between seeds."""
LOGITS_BYTES = 2**26
"""Limit for the logits of one run of the model; longer rows are run one by one."""
PATIENCE_S = 5
"""Seconds between SIGINT and SIGKILL when a cell is stopped."""
LOG_TAIL_BYTES = 4096


class CellJob(CellKey):
    """Everything that the process of a cell needs, as plain JSON; `config` is the whole configuration of its build."""

    checkpoint: Path
    """Absolute path of model.pt or of a folder."""
    checkpoint_sha256: str
    """Expected hash of the checkpoint."""
    tokenizer_sha256: str | None
    """Expected hash of the files of its tokenizer; null if it has none."""
    config: dict[str, Any]
    """The configuration as JSON data."""
    code: dict[str, str]
    """Package -> digest of its source when the sweep started, for this package and the architecture's."""
    command: str
    """Command line of the sweep, as typed."""
    root: Path
    """Absolute path of the build folder."""
    row: Path
    """Absolute path of the file for the result."""

    @property
    def log(self) -> Path:
        """Path of the file that receives the standard error of the cell."""
        return self.row.with_suffix(".log")


CellRunner = Callable[[Sequence[CellJob]], Generator[CellEntry]]
"""Runs cells, and yields the row of each cell when it ends, in any order."""


def finished_cell(job: CellJob, *, here: bool) -> CellEntry | None:
    """Returns the row of an earlier run, if its fingerprint is the same and its report is unchanged; otherwise None.

    With `here`, the row must be from an equal machine. On a cluster it is unknown which node would measure the cell.
    """
    entry = _row(job)
    # A cell of which only a part was measured is run again.
    if entry is None or entry.status != "measured" or not entry.complete or (here and entry.machine != machine_name()):
        return None
    report = job.root / "report.json"
    if not report.is_file() or hashlib.sha256(report.read_bytes()).hexdigest() != entry.report_sha256:
        return None
    return entry


def run_locally(jobs: Sequence[CellJob]) -> Generator[CellEntry]:
    """Runs cells on this machine, one at a time, so that no cell disturbs the latency of another."""
    for job in jobs:
        yield run_cell(job)


def run_cell(job: CellJob) -> CellEntry:
    """Runs one cell in its own process, and returns its row even if it failed.

    The process leads its own process group. The whole group is killed when this function returns or is interrupted.
    """
    job_file = job.row.with_suffix(".job.json")
    write_whole(job_file, job.model_dump_json(indent=1) + "\n", "-o")
    job.row.unlink(missing_ok=True)
    begin = time.perf_counter()
    # -P: files of the current folder must not be imported in place of packages.
    arguments = [sys.executable, "-P", "-m", "mod_export.sweep.cell", str(job_file)]
    with job.log.open("wb") as log:
        process = subprocess.Popen(  # noqa: S603
            arguments, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code = process.wait()
        finally:
            _stop(process)
    entry = _row(job) or failed_cell(job, code, _how_it_ended(code, job.log))
    entry = entry.model_copy(update={"seconds": round(time.perf_counter() - begin, 3)})
    write_whole(job.row, entry.model_dump_json(indent=1) + "\n", "-o")
    return entry


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Sends SIGINT, like Ctrl-C, and later SIGKILL to the process group. Neither damages a build folder."""
    assert process.stdin is not None
    with contextlib.suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdin.close()


def _row(job: CellJob) -> CellEntry | None:
    try:
        entry = CellEntry.model_validate_json(job.row.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    return entry if entry.fingerprint == job.fingerprint else None


def _how_it_ended(code: int, log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()
    last_line = f"; its last line: {lines[-1]}" if lines else ""
    if code == -signal.SIGKILL:
        return f"killed, as the kernel does when memory runs out{last_line}"
    ended = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code} and no result"
    return ended + last_line


def failed_cell(job: CellJob, exit_code: int, error: str) -> CellEntry:
    """Returns the row of a cell that could not be built."""
    return CellEntry(
        **job.model_dump(include=set(CellKey.model_fields)),
        k_by_layer={},
        status="failed",
        passed=False,
        exit_code=exit_code,
        error=error,
        machine=machine_name(),
    )


def digest_of_tokenizer(tokenizer: TokenizerFiles | None) -> str | None:
    """Returns the SHA-256 of names and contents of the files of a tokenizer; None if there is no tokenizer."""
    if tokenizer is None:
        return None
    digest = hashlib.sha256()
    for name, content in sorted(tokenizer.contents.items()):
        digest.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()


@cache
def machine_name() -> str:
    """CPU, cores and GPU of this machine; only results with equal names are compared."""
    machine = describe_machine()
    return ", ".join(str(part) for part in (machine["cpu"], f"{machine['cores']} cores", machine["gpu"]) if part)


def main() -> int:
    """Runs the job named on the command line; returns the exit code of a build, which is also in the row."""
    job = CellJob.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    _end_with_stdin()
    try:
        entry = _measured(job)
    except ModExportError as error:
        lines = [*str(error).splitlines(), *getattr(error, "__notes__", [])]
        print("error: " + "\n       ".join(lines), file=sys.stderr)  # noqa: T201
        entry = failed_cell(job, error.exit_code, "; ".join(lines))
    write_whole(job.row, entry.model_dump_json(indent=1) + "\n", "-o")
    return entry.exit_code


def _measured(job: CellJob) -> CellEntry:
    _check_unchanged(job)
    config = BuildConfig.model_validate(job.config)

    # Imported here, so that torch and the engines are loaded only in the process of a cell.
    from mod_export.pipeline.stages import build

    request = Request.checkpoint(job.checkpoint, capacity=job.capacity)
    model, _ = request.models()
    tokenizer, _ = request.tokenizer()
    if digest_of_tokenizer(tokenizer) != job.tokenizer_sha256:
        raise CheckpointError(f"{job.checkpoint}: its tokenizer is not that of the sweep; start the sweep again")
    progress = Progress(Console(stderr=True), 1)
    report = build(lambda: (model, None), config, job.root, progress, job.command, job.capacity, tokenizer)
    k_by_layer = next(graph.k_by_layer for graph in open_folder(job.root, verify=False).graphs if graph.model == "mod")
    distinct_k = set(k_by_layer.values())
    passed = report.verdict.status == "pass"
    return CellEntry(
        **job.model_dump(include=set(CellKey.model_fields)),
        status="measured",
        complete=not report.failed,
        passed=passed,
        reasons=report.verdict.reasons,
        exit_code=0 if passed else GATE_FAILED,
        k_by_layer=k_by_layer,
        k=distinct_k.pop() if len(distinct_k) == 1 else None,
        quality=quality_of(model, job.seq, config.seed),
        measured=_rows(report),
        machine=machine_name(),
        report_sha256=hashlib.sha256((job.root / "report.json").read_bytes()).hexdigest(),
    )


def _rows(report: BuildReport) -> tuple[Measured, ...]:
    latency = {row.setting: row for row in report.latency}
    # Graphs that were judged in place of an engine have rows too, of targets of their own.
    text = {row.setting: row.text for row in having(report.parity, model="mod", role="forward")}
    return tuple(
        Measured(
            dtype=row.dtype,
            providers=latency[row.setting].providers,
            threads=latency[row.setting].threads,
            dense_ms=latency[row.setting.of("dense")].p50_ms,
            mod_ms=latency[row.setting].p50_ms,
            speedup=row,
            text=text.get(row.setting),
        )
        for row in report.speedup
    )


def quality_of(model: Model, seq: int, seed: int) -> Quality | None:
    """Perplexity of a model and of its dense baseline, on the same rows of `seq` tokens.

    Every position predicts the next token, with the model's routing for a row of this length. Returns None if no
    held-out text suits the model's vocabulary.
    """
    rows, dense = math.ceil(QUALITY_TOKENS / seq), model.dense()
    assert dense is not None, "the grid has no cells for a model without a dense baseline"
    ids_RT = text_ids(model, rows, seq + 1, seed)
    if ids_RT is None:
        return None
    at_once = max(1, LOGITS_BYTES // (4 * seq * token_ids(model).vocab_size))
    return Quality(
        tokens=rows * seq,
        perplexity=_perplexity(model, ids_RT, at_once),
        dense_perplexity=_perplexity(dense, ids_RT, at_once),
    )


def _perplexity(model: Model, ids_RT: np.ndarray, at_once: int) -> float:
    import torch

    module, text_RT = model.module(), torch.from_numpy(ids_RT)
    with torch.no_grad():
        nats = math.fsum(_nats(module, text_RT[first : first + at_once]) for first in range(0, len(text_RT), at_once))
    mean = nats / (text_RT.shape[0] * (text_RT.shape[1] - 1))
    return perplexity_of(mean)


def _nats(module: torch.nn.Module, text_BT: torch.Tensor) -> float:
    import torch

    ids_BS, next_BS = text_BT[:, :-1], text_BT[:, 1:]
    lengths_B = torch.full((len(ids_BS),), ids_BS.shape[1])
    (logits_BSV,) = module(ids_BS, lengths_B)
    loss = torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1).double(), next_BS.flatten(), reduction="sum")
    return float(loss)


def _check_unchanged(job: CellJob) -> None:
    """Checks that source code and checkpoint are those of the sweep, because all rows of a table must share them.

    Raises:
        UsageError: the source code differs from that of the sweep.
        CheckpointError: the checkpoint has changed.
    """
    changed = [package for package, digest in job.code.items() if source_digest(package) != digest]
    if changed:
        raise UsageError(
            f"{', '.join(changed)}: not the source that the sweep was started with; install the same on every node, do "
            "not edit it while a sweep runs, and start the sweep again"
        )
    if sha256_of(job.checkpoint) != job.checkpoint_sha256:
        raise CheckpointError(f"{job.checkpoint}: has changed since the sweep began; start the sweep again")


def _end_with_stdin() -> None:
    def wait() -> None:
        # Not sys.stdin: a thread that reads it holds a lock that Python needs at exit.
        while os.read(0, 1):
            pass
        # This process leads its group, so this also kills its child processes, such as a vendor's builder.
        os.killpg(os.getpgrp(), signal.SIGKILL)

    if os.getpgrp() == os.getpid():
        threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())

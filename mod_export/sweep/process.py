"""The process of a cell: start it, wait for it, end it with the sweep, read its result."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from pydantic import ValidationError

from mod_export.sweep.cell import CellJob, failed_cell, machine_name, write_whole
from mod_export.sweep.schema import CellEntry

__all__ = ["CellRunner", "finished_cell", "log_of", "run_cell", "run_locally"]


CellRunner = Callable[[Sequence[CellJob]], Generator[CellEntry]]
"""Runs cells wherever it does, and yields the row of each as it ends, in any order."""

PATIENCE_S = 5
"""Between asking a cell to stop and making it stop."""
LOG_TAIL_BYTES = 4096


def log_of(job: CellJob) -> Path:
    """The file that a cell's standard error goes to."""
    return job.row.with_name(job.row.name.removesuffix(".json") + ".log")


def finished_cell(job: CellJob, *, here: bool) -> CellEntry | None:
    """The row of an earlier run, if it was measured from the same and its report is whole.

    Args:
        job: of the cell.
        here: whether only rows of this machine count. On a cluster there is no knowing which node would measure it.
    """
    entry = _row(job)
    if entry is None or entry.status != "measured" or (here and entry.machine != machine_name()):
        return None
    report = job.root / "report.json"
    if not report.is_file() or hashlib.sha256(report.read_bytes()).hexdigest() != entry.report_sha256:
        return None
    return entry


def run_locally(jobs: Sequence[CellJob]) -> Generator[CellEntry]:
    """On this machine, one after the other, so that no cell disturbs another's latency."""
    for job in jobs:
        yield run_cell(job)


def run_cell(job: CellJob) -> CellEntry:
    """Runs one cell in a process of its own and returns its row, whatever became of it.

    The process is started in a process group of its own, which is ended as a whole when this function is left early.
    """
    job_file = job.row.with_name(job.row.name.removesuffix(".json") + ".job.json")
    write_whole(job_file, job.model_dump_json(indent=1) + "\n")
    job.row.unlink(missing_ok=True)
    begin = time.perf_counter()
    # -P: files of the current folder must not stand in for packages.
    arguments = [sys.executable, "-P", "-m", "mod_export.sweep.cell", str(job_file)]
    with log_of(job).open("wb") as log:
        process = subprocess.Popen(  # noqa: S603
            arguments, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code = process.wait()
        finally:
            _stop(process)
    entry = _row(job) or failed_cell(job, code, _how_it_ended(code, log_of(job)))
    entry = entry.model_copy(update={"seconds": round(time.perf_counter() - begin, 3)})
    write_whole(job.row, entry.model_dump_json(indent=1) + "\n")
    return entry


def _stop(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C would, and then for good. A build folder survives either."""
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

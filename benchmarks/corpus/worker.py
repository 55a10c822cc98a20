"""Runs one entry in its own process. The fork server imports the common packages once for all processes, because the
imports take two fifths of a small model's time.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.corpus.entry import Entry
from benchmarks.corpus.table import ENTRIES
from benchmarks.corpus.work import Row, described, run

SECONDS = 240
"""Time limit for one target; a process with several targets gets this time for each."""
_stopping = threading.Event()
PRELOADED = ["torch._dynamo", "torch._inductor", "torch.onnx", "transformers", "onnx", "onnxruntime", "onnxscript"]


def work(name: str, targets: Sequence[str], scratch: Path) -> None:
    """Runs in the new process: writes a line for each target to rows.jsonl, and the output to log.txt."""
    os.setsid()  # A new process group, so that the children are killed together with this process.
    with (scratch / "log.txt").open("w") as log:
        os.dup2(log.fileno(), sys.__stdout__.fileno())
        os.dup2(log.fileno(), sys.__stderr__.fileno())
    tempfile.tempdir = str(scratch)
    warnings.simplefilter("ignore")  # The packages warn about their own code.
    torch.set_num_threads(1)
    rows = run(ENTRIES[name], targets)
    (scratch / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run_apart(entry: Entry, targets: Sequence[str], seconds: float = SECONDS) -> list[Row]:
    """Returns a row for each target. If the process dies or runs out of time, each target runs again alone."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="corpus-") as scratch:
        reason = _ended(entry.name, targets, Path(scratch), seconds * len(targets))
        rows = Path(scratch) / "rows.jsonl"
        if not reason:
            return [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    if len(targets) > 1 and not _stopping.is_set():
        return [row for target in targets for row in run_apart(entry, [target], seconds)]
    taken = round(time.monotonic() - begin, 1)
    return [described(entry, targets[0]) | {"status": "error", "sentence": reason, "seconds": taken}]


def _ended(name: str, targets: Sequence[str], scratch: Path, seconds: float) -> str:
    """Returns why the process left no rows, or an empty text if it left them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=work, args=(name, list(targets), scratch))
    process.start()
    try:
        process.join(seconds)
        late = process.is_alive()
    finally:
        if process.is_alive() and process.pid:
            _kill(process.pid)
            process.join()
    log = scratch / "log.txt"
    last = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []) or [""]
    code = process.exitcode or 0
    if late:
        return f"stopped after {seconds:g} s: {last[-1]}"
    if code < 0:
        return f"signal {signal.Signals(-code).name}: {last[-1]}"
    return f"exit {code}: {last[-1]}" if code else ""


def stop() -> None:
    """Kills every child process that runs an entry, and keeps their targets from being tried again."""
    _stopping.set()
    for process in multiprocessing.active_children():
        if process.pid:
            _kill(process.pid)


def _kill(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:  # The process has not called setsid yet.
        os.kill(leader, signal.SIGKILL)

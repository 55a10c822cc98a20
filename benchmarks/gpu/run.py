"""Everything that a machine with an NVIDIA GPU can show, in runs of eight minutes: what `make gpu` runs.

    python -m benchmarks.gpu.run [--results DIR] [--docs DIR] [--minutes N] [--again]

Each step has its own process with a time limit, and leaves a row: its results, why it was skipped, or how it failed.
Steps that ran are kept, so a second start continues; --again repeats everything. Writes gpu.json, and gpu.md from it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu.plan import SHOWN_LINES, SPEC, Step, planned, why_not
from benchmarks.gpu.render import render
from mod_export.engines import ENGINES
from mod_export.engines.trt_worker import cuda_devices
from mod_export.environment import describe_machine
from mod_export.errors import GATE_FAILED
from mod_export.types import Availability
from mod_models.checkpoint import random_checkpoint, save_checkpoint

LEFT = "left"
"""Status of a step for which no time was left."""
PROBE_SECONDS = 120
LEAST_SECONDS = 20
"""A step does not start if less time is left."""

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--results", type=Path, default=Path("build/gpu"))
    add("--docs", type=Path, default=Path("docs"))
    add("--minutes", type=float, default=7.5, help="after which nothing more is begun (%(default)s)")
    add("--again", action="store_true", help="do again what was done before, too")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    devices = cuda_devices()
    if not devices:
        print("make gpu: no NVIDIA GPU is here (the CUDA driver finds no device); run it on a machine that has one",
              file=sys.stderr)  # fmt: skip
        return 2
    if options.again:
        shutil.rmtree(options.results, ignore_errors=True)
    (options.results / "steps").mkdir(parents=True, exist_ok=True)
    checkpoint = options.results / "model.pt"
    if not checkpoint.exists():
        save_checkpoint(checkpoint, random_checkpoint(SPEC, 0))
    steps = planned(devices[0], checkpoint)
    availability = availability_of_all({step.target for step in steps if step.target})
    rows = run_all(steps, availability, options.results, begin + 60 * options.minutes)
    content = summary(rows, availability, devices)
    text = json.dumps(content, indent=1) + "\n"
    (options.results / "gpu.json").write_text(text, encoding="utf-8")
    (options.docs / "gpu.json").write_text(text, encoding="utf-8")
    render(options.docs)
    return 1 if any(row["status"] in ("failed", LEFT) for row in rows) else 0


def availability_of(name: str) -> Availability:
    """Asks a target what it can do here. A vendor's library of a wrong version can crash the process."""
    return ENGINES[name].availability()


def availability_of_all(names: Iterable[str]) -> dict[str, Availability]:
    """Probes targets at the same time: each probe imports torch, which takes some seconds of the device's time."""
    with ThreadPoolExecutor() as threads:
        ordered = sorted(names)
        return dict(zip(ordered, threads.map(_availability_apart, ordered), strict=True))


def _availability_apart(name: str) -> Availability:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(availability_of, name).result(PROBE_SECONDS)
        except Exception as error:  # The other targets can still run.
            reason = f"the probe failed: {type(error).__name__}: {error}"
            return Availability(builds=False, runs=False, reason=reason)


def run_all(
    steps: Sequence[Step], availability: Mapping[str, Availability], results: Path, deadline: float
) -> list[Row]:
    """Returns a row for every step, in order. A step that ran before keeps its row; the others run now."""
    rows: list[Row] = []
    for number, step in enumerate(steps, 1):
        kept = results / "steps" / f"{step.name}.json"
        if kept.exists():
            rows.append(json.loads(kept.read_text(encoding="utf-8")))
            print(f"[{number}/{len(steps)}] {step.title}: done before", flush=True)
            continue
        ran = {row["name"]: row["status"] == "ran" for row in rows}
        reason = why_not(step, availability, ran)
        if reason:
            row = _row(step, "skipped", reason)
        elif deadline - time.monotonic() < LEAST_SECONDS:
            row = _row(step, LEFT, "the time was over; start again to go on")
        else:
            row = run_step(step, results, min(step.seconds, deadline - time.monotonic()))
        if row["status"] == "ran":
            # The file appears only when it is complete, because a step with a file is not repeated.
            part = kept.with_suffix(".part")
            part.write_text(json.dumps(row), encoding="utf-8")
            part.replace(kept)
        rows.append(row)
        shown = row["reason"] or f"{row['seconds']:.0f} s"
        print(f"[{number}/{len(steps)}] {step.title}: {row['status']}, {shown}", flush=True)
    return rows


def run_step(step: Step, results: Path, seconds: float) -> Row:
    """Runs a step's command, and reads its results. A failure becomes a row too."""
    folder = results / step.name
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in step.files.items():
        (folder / name).write_text(content, encoding="utf-8")
    begin = time.monotonic()
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        # A new session, so that the processes that the command starts can be killed with it.
        process = subprocess.Popen(
            step.command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=_environment()
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return _row(step, "failed", f"stopped after {seconds:.0f} s: {_end_of(folder)}", seconds)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    taken = time.monotonic() - begin
    if code not in (0, GATE_FAILED):
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
        return _row(step, "failed", f"{how}: {_end_of(folder)}", taken)
    try:
        return _row(step, "ran", "", taken, step.collect(folder))
    except Exception as error:  # Unreadable results become a failed row; they must not end the run.
        return _row(step, "failed", f"what it left cannot be read: {type(error).__name__}: {error}", taken)


def _environment() -> dict[str, str]:
    """Makes the paths in PYTHONPATH absolute, because a step runs in its own folder. Output is unbuffered, so that
    the log of a stopped step is complete.
    """
    paths = os.environ.get("PYTHONPATH", "")
    return {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(str(Path(path).resolve()) for path in paths.split(os.pathsep) if path),
    }


def _row(step: Step, status: str, reason: str, seconds: float = 0.0, found: Mapping[str, Any] | None = None) -> Row:
    return {
        "name": step.name, "title": step.title, "target": step.target, "status": status, "reason": reason,
        "seconds": round(seconds, 1), "found": dict(found or {}),
    }  # fmt: skip


def _end_of(folder: Path) -> str:
    lines = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    return " | ".join([line.strip() for line in lines if line.strip()][-SHOWN_LINES:]) or "it said nothing"


def summary(rows: Sequence[Row], availability: Mapping[str, Availability], devices: Sequence[str]) -> dict[str, Any]:
    """Returns the content of gpu.json."""
    machine = describe_machine()
    kept = ("gpu", "cpu", "cores", "memory_bytes", "python", "torch", "onnx", "onnxruntime", "tensorrt", "tensorrt_rtx")
    return {
        "schema": 1,
        "machine": {**{name: machine[name] for name in kept}, "architectures": list(devices)},
        "targets": {
            name: {"builds": available.builds, "runs": available.runs, "reason": available.reason}
            for name, available in availability.items()
        },
        "steps": list(rows),
    }


if __name__ == "__main__":
    sys.exit(main())

"""ONNX Runtime's profile, a file of events in Chrome's trace format, summed up: one line for each kernel of a run."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from mod_export.artifacts import Kernel
from mod_export.errors import EngineError

__all__ = ["kernels_from_trace"]

SUFFIX = "_kernel_time"
US_PER_MS = 1000


def kernels_from_trace(path: Path, runs: int) -> tuple[Kernel, ...]:
    """Kernels of the last `runs` runs of a session, in the order in which they first ran.

    Raises:
        EngineError: not a profile of ONNX Runtime, or of fewer runs.
    """
    try:
        events = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EngineError(f"{path.name}: ONNX Runtime's profile is damaged ({error}); measure again") from error
    begins = sorted(event["ts"] for event in events if event["name"] == "model_run")[-runs:]
    if len(begins) < runs:
        raise EngineError(f"{path.name}: ONNX Runtime's profile holds {len(begins)} runs, expected {runs}")
    kernels = [event for event in events if event["cat"] == "Node" and event["name"].endswith(SUFFIX)]
    operators: dict[str, str] = {}
    taken: dict[str, list[float]] = defaultdict(lambda: [0.0] * runs)
    for event in sorted(kernels, key=lambda event: event["ts"]):
        run = _run_of(event, begins)
        if run is not None:
            name = event["name"].removesuffix(SUFFIX)
            operators.setdefault(name, event["args"]["op_name"])
            taken[name][run] += event["dur"] / US_PER_MS
    return tuple(Kernel(name=name, operator=operators[name], ms=min(ms_by_run)) for name, ms_by_run in taken.items())


def _run_of(event: dict[str, Any], begins: list[float]) -> int | None:
    """Which run an event belongs to; None for those before the first that counts."""
    before = sum(begin <= event["ts"] for begin in begins)
    return before - 1 if before else None

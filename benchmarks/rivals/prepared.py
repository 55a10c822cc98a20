"""Prepares the files that routes are opened from. A step writes them once, in its own process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mod_export.measure.turns import Action, RouteError, Worker

Steps = Mapping[str, tuple[str | None, Callable[..., None]]]
"""Name -> (the step that it needs, if any; the function that writes its files, given a subject and the folder)."""


def prepare(steps: Steps, wanted: Iterable[str], subject: Any, folder: Path) -> dict[str, str]:
    """Runs the wanted steps and the steps that they need, unless they were done before. Returns the reason for every
    step that failed or that needs a failed one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}

    def do(name: str) -> str:
        if name in failed:
            return failed[name]
        done = folder / f"{name}.done"
        if done.exists():
            return ""
        before, write = steps[name]
        reason = do(before) if before else ""
        reason = reason or done_apart(folder / "prepared.log", write, subject, folder)
        if reason:
            failed[name] = reason
        else:
            done.write_text(json.dumps(name), encoding="utf-8")
        return reason

    for name in wanted:
        do(name)
    return failed


def done_apart(log: Path, action: Action, *args: Any) -> str:
    """Performs an action in its own process. Returns why it failed, or an empty text."""
    worker = Worker(log, _nothing_first, action)
    try:
        worker.opened()
        worker.ask("do", *args)
    except RouteError as error:
        return str(error)
    finally:
        worker.close()
    return ""


def _nothing_first(action: Action) -> Mapping[str, Action]:
    def do(*args: Any) -> None:
        action(*args)

    return {"do": do}

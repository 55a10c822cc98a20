"""Small builds in a workspace, in this process and in another one."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mod_export.folder.workspace import Workspace

STEPS = ("one", "two", "three")


def writing(text: str = "content") -> Callable[[Sequence[Path]], Any]:
    def make(paths: Sequence[Path]) -> dict[str, int]:
        for path in paths:
            path.write_text(text, encoding="utf-8")
        return {"files": len(paths)}

    return make


def build(root: Path, steps: Sequence[str] = STEPS, **inputs: Any) -> dict[str, bool]:
    """Runs a whole build of some steps with one output each; returns for each step whether it was reused."""
    with Workspace(root) as workspace:
        done = {
            name: workspace.step(name, {"of": name, **inputs}, [f"parts/{name}.txt"], writing(name)) for name in steps
        }
        workspace.close({"made": list(steps)})
    return {name: step.reused for name, step in done.items()}


def files_of(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def in_process(root: Path, code: str, wait_for: str = "", **options: Any) -> subprocess.Popen[str]:
    """Starts Python on `code`, in which `root` is the build folder, and waits until it has printed `wait_for`."""
    lines = [
        "import os, signal, sys, time",
        "from pathlib import Path",
        "from mod_export.folder.workspace import Workspace",
    ]
    # The parent of the tests may ignore this signal, and the process would inherit that.
    lines.append("signal.signal(signal.SIGINT, signal.default_int_handler)")
    script = "\n".join([*lines, "root = Path(sys.argv[1])", textwrap.dedent(code)])
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    assert process.stdout is not None
    if wait_for:
        found = process.stdout.readline().strip()
        assert found == wait_for, process.communicate()
    return process

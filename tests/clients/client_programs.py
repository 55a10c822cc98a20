"""What tests of client programs share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).parents[2] / ".venv" / "clients" / "bin"
"""Environment of the clients (`make clients`), which pin other versions of libraries than the project."""
Run = Callable[..., str]
"""Runs a program of the clients' environment, and returns what it prints."""


def results_in(folder: Path) -> dict[str, dict[str, Any]]:
    """Task -> figures, as lm-eval writes them below its output folder."""
    (file,) = folder.rglob("results_*.json")
    found: dict[str, dict[str, Any]] = json.loads(file.read_text())["results"]
    return found

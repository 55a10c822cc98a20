"""Openers and steps for tests. A new process imports them by the name of this module."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def doubles(start: int) -> dict[str, Callable[..., Any]]:
    """Returns steps that double a number, fail, or end their process."""
    if start < 0:
        raise ValueError(f"start: expected 0 or more, got {start}")
    return {"double": lambda value: 2 * value + start, "fail": lambda: 1 / 0, "exit": lambda: sys.exit(3)}


def first(subject: str, folder: Path) -> None:
    """Writes a line."""
    _write("1", subject, folder)


def second(subject: str, folder: Path) -> None:
    """Writes another line."""
    _write("2", subject, folder)


def _write(text: str, subject: str, folder: Path) -> None:
    if subject == "wrong":
        raise ValueError(text)
    with (folder / "written").open("a", encoding="utf-8") as file:
        file.write(text)

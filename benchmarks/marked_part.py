"""Parts of a page that a command measures and writes, between two marks."""

from __future__ import annotations

from pathlib import Path


def marks(command: str) -> tuple[str, str]:
    """First and last line of the part that `command` writes."""
    return f"<!-- measured by {command}: begin -->", f"<!-- measured by {command}: end -->"


def replace_part(page: Path, command: str, lines: list[str]) -> None:
    """Replaces the text between the marks of `command` and leaves the rest of the page as it is."""
    begin, end = marks(command)
    head, rest = page.read_text(encoding="utf-8").split(begin)
    tail = rest.split(end)[1]
    text = "\n".join(lines)
    page.write_text(f"{head}{begin}\n{text}\n{end}{tail}", encoding="utf-8")

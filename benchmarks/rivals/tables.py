"""Markdown tables, summaries and figures for both parts of the benchmark's page."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Found = dict[str, Any]
"""Measured values of one cell."""
Summary = Callable[[Sequence[float]], float]
OURS, RIVAL, ROUTED = "#5b7db1", "#8a8f98", "#0b6e4f"
BUSY = 0.1
"""Share of the machine that other processes may use before a cell is marked."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *lines]) + "\n"


def mark(one: Found) -> str:
    """Returns a star if other processes used the machine."""
    return "*" if one["other_load"] > BUSY else ""


def threads_of(one: Found) -> str:
    return f"{one['threads']}{mark(one)}"


def failures(found: Sequence[Found]) -> list[str]:
    """Returns a line with the reason for every route that has no time in some cell."""
    places: dict[tuple[str, str], list[str]] = {}
    for cell in found:
        for name, route in cell["routes"].items():
            if route["failed"]:
                places.setdefault((name, route["failed"]), []).append(f"{cell['name']} at {cell['threads']} threads")
    return [f"* No time of {name} ({', '.join(where)}): {reason}" for (name, reason), where in places.items()]


def medians(values: Sequence[float]) -> float:
    return statistics.median(values)


def names_in(found: Sequence[Found]) -> list[str]:
    """Returns the routes, ours first, otherwise in the order of their measurement."""
    seen = {name: route["ours"] for cell in found for name, route in cell["routes"].items()}
    return sorted(seen, key=lambda name: not seen[name])


def bars(path: Path, groups: Sequence[tuple[str, Sequence[tuple[str, float, str]]]], title: str) -> None:
    """Draws horizontal bars in named groups: (label, length, colour)."""
    plot = _plot()
    count = sum(len(rows) + 1 for _, rows in groups)
    figure, axis = plot.subplots(figsize=(9, 0.8 + 0.22 * count), layout="constrained")
    at, ticks = 0.0, []
    for group, rows in groups:
        axis.text(0, at, group, fontsize=9, fontweight="bold", va="center")
        for label, length, colour in rows:
            at += 1
            axis.barh(at, length, 0.8, color=colour)
            axis.text(length, at, f" {length:,.3g}", fontsize=8, va="center")
            ticks.append((at, label))
        at += 1.5
    axis.set_yticks([place for place, _ in ticks], [label for _, label in ticks], fontsize=8)
    axis.invert_yaxis()
    axis.margins(y=0.01)
    axis.set_title(title, fontsize=10)
    figure.savefig(path, metadata={"Date": None})
    plot.close(figure)


def _plot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "mod-export"  # The same figure gives the same bytes.
    matplotlib.rcParams["svg.fonttype"] = "none"  # Text stays text.
    from matplotlib import pyplot

    return pyplot

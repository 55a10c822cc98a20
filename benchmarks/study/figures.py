"""The figures of docs/training.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

mpl.use("Agg")
STYLE = {
    "figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "font.size": 9, "legend.frameon": False, "svg.hashsalt": "mod-export", "svg.fonttype": "none",
}  # fmt: skip
MAPPED = ("MoD 12.5 %", "MoD 50 %", "MoD 12.5 %, every block")
COLUMNS = 64
"""Bytes in a line of the map."""
SHADES = ("#f4f4f4", "#cfe3f5", "#9cc8ec", "#62a7dd", "#2f80c4", "#12599a", "#083a6b")

Results = dict[str, list[dict[str, Any]]]


def draw_all(runs: Results, folder: Path) -> None:
    """Draws every figure that the results allow, as study-*.svg and study-map.png."""
    with mpl.rc_context(STYLE):
        _curves(runs, folder / "study-curves.svg")
        _scores(runs, folder / "study-scores.svg")
        _entropy(runs, folder / "study-entropy.svg")
        _map(runs, folder / "study-map.png")


def draw_pair(runs: list[dict[str, Any]], path: Path) -> None:
    """Draws the held-out loss of each run of `make pair` against the share of its budget. A model has one colour."""
    names = list(dict.fromkeys(run["name"] for run in runs))
    with mpl.rc_context(STYLE):
        _, axes = plt.subplots(figsize=(6.5, 3.6))
        for run in runs:
            share, bits = zip(*run["curve"], strict=True)
            label = f"{run['name']}, seed {run['seed']}"
            axes.plot(share, bits, color=f"C{names.index(run['name'])}", alpha=1 / (1 + run["seed"]), label=label)
        axes.set_xlabel("share of the training FLOPs")
        axes.set_ylabel("held-out bits per byte")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:.1f}")
        axes.yaxis.set_minor_formatter("{x:.1f}")
        axes.legend()
        _save(path)


def _save(path: Path) -> None:
    plt.tight_layout()
    # Without a date, so that the same results give the same file.
    plt.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close()


def _curves(runs: Results, path: Path) -> None:
    _, axes = plt.subplots(figsize=(8.5, 4.4))
    for number, (name, many) in enumerate(runs.items()):
        for run in many:
            per_step = run["training_flops"] / run["steps"] / 1e12
            x = [point["step"] * per_step for point in run["curve"]]
            y = [point["bits_per_byte"] for point in run["curve"]]
            axes.plot(x, y, color=f"C{number}", lw=1.4, label=name if run is many[0] else None, alpha=0.85)
    axes.set_xlabel("training TFLOP")
    axes.set_ylabel("held-out bits per byte")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:.1f}")
    axes.yaxis.set_minor_formatter("{x:.1f}")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    _save(path)


def _scores(runs: Results, path: Path) -> None:
    routed = {name: many[0] for name, many in runs.items() if "scores" in many[0]}
    _, grid = plt.subplots((len(routed) + 1) // 2, 2, figsize=(7.5, 1.7 * ((len(routed) + 1) // 2)), squeeze=False)
    for axes, (name, run) in zip(grid.flat, routed.items(), strict=False):
        for site, scores in run["scores"].items():
            axes.hist(scores, bins=80, histtype="step", density=True, label=f"layer {site}")
        axes.set_title(name, fontsize=9)
        axes.set_yticks([])
        axes.legend(fontsize=6)
    for axes in grid.flat[len(routed) :]:
        axes.axis("off")
    _save(path)


def _entropy(runs: Results, path: Path) -> None:
    _, axes = plt.subplots(figsize=(8.5, 3.6))
    for name, many in runs.items():
        if "share_by_entropy" in many[0]:
            axes.plot(many[0]["entropy_bins"], many[0]["share_by_entropy"], "o-", ms=3, lw=1.2, label=name)
    axes.set_xlabel("entropy of the next byte, bits (tenths of the tokens)")
    axes.set_ylabel("share of routed blocks that run it")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    _save(path)


def _map(runs: Results, path: Path) -> None:
    """Draws one text once for each model. The shade of a byte is the share of routed blocks that ran it."""
    maps = {name: runs[name][0]["map"] for name in MAPPED if name in runs}
    if not maps:
        return
    lines = max(-(-len(entry["ids"]) // COLUMNS) for entry in maps.values())
    figure = (COLUMNS * 0.14, len(maps) * (lines * 0.3 + 0.35))
    _, grid = plt.subplots(len(maps), 1, figsize=figure, squeeze=False)
    for axes, (name, entry) in zip(grid.flat, maps.items(), strict=True):
        layers = entry["layers"]
        for position, byte in enumerate(entry["ids"]):
            count = sum(position in positions for positions in layers.values())
            _cell(axes, position, byte, round(count / len(layers) * (len(SHADES) - 1)))
        axes.set_xlim(0, COLUMNS)
        axes.set_ylim(lines, 0)
        axes.axis("off")
        axes.set_title(f"{name}: the darker, the more of {len(layers)} routed blocks ran the byte", fontsize=9)
    _save(path)


def _cell(axes: Axes, position: int, byte: int, count: int) -> None:
    row, column = divmod(position, COLUMNS)
    shade = SHADES[count]
    axes.add_patch(plt.Rectangle((column, row), 1, 1, color=shade, lw=0))
    letter = {10: "\\n", 32: "\u00b7"}.get(byte, chr(byte) if 32 < byte < 127 else "\u2423")
    # Matplotlib would read a plain $ as the start of a formula.
    letter = letter.replace("$", r"\$")
    colour = "white" if count > 2 else "#222222"
    axes.text(column + 0.5, row + 0.5, letter, ha="center", va="center", family="monospace", fontsize=7, color=colour)

"""Writes the part of docs/training.md that `run.py` measures, and its figure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from benchmarks.marked_part import replace_part

FIGURE = "retrofit.svg"
MARKERS = {"cheapest": "o", "deepest": "^"}
"""Which layers are routed -> marker of their points."""
COLUMNS = (
    "routed", "layers", "capacity", "skipped tokens", "routers", "tokens run", "untrained", "perplexity",
    "against dense", "bits per byte", "predictor accuracy", "predicted (FLOPs)", "measured speed-up",
)  # fmt: skip
LEFT = {("kept", "none"): "keep keys", ("absent", "linear"): "run an adapter", ("kept", "linear"): "both"}
"""Declarations of what skipped tokens leave -> how the table says it."""


def render(results: Path, docs: Path, names: Sequence[str], about: Mapping[str, Any]) -> None:
    """Replaces the text between the marks in `docs`/training.md. Ways without a result are left out."""
    paths = [results / name / "result.json" for name in names]
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]
    untouched = json.loads((results / "untouched.json").read_text(encoding="utf-8"))
    (docs / "figures").mkdir(parents=True, exist_ok=True)
    _draw(rows, untouched, docs / "figures" / FIGURE)
    replace_part(docs / "training.md", "make retrofit", _measured(rows, untouched, about))


def _measured(rows: Sequence[Mapping[str, Any]], untouched: Mapping[str, Any], about: Mapping[str, Any]) -> list[str]:
    tokens = about["steps"] * about["batch"] * about["seq"]
    dense = next((row for row in rows if row["parts"] == "dense"), None)
    perplexity, bits = f"{untouched['perplexity']:.2f}", f"{untouched['bits_per_byte']:.3f}"
    return [
        f"Model `{about['model']}`, text: {about['text']}. Every variant has the same budget: "
        f"{about['steps']:,} steps of {about['batch']} rows of {about['seq']} tokens, {tokens:,} tokens.",
        "Perplexity is held-out; the predictors decide. *Untrained*: perplexity after the fit, or the removal, and",
        "before the first step. *Against dense* compares with the dense model that was trained as long. *Blocks",
        "removed* is the control: the dense model without its cheapest blocks. It and every model that routes learn",
        "from the dense model as given. *Tokens run*: mean share over all attentions and MLPs. Speed-up over the whole",
        "dense model: whole rows on one thread of ONNX Runtime.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
        f"| {' | '.join(['dense, as given', '', '', '', '', '100%', '', perplexity, '', bits, '', '1', '1'])} |",
        *(_row(row, dense) for row in rows),
        "",
        f"![Perplexity against measured speed-up](figures/{FIGURE})",
    ]


def _row(row: Mapping[str, Any], dense: Mapping[str, Any] | None) -> str:
    perplexity = math.exp(row["next_token_loss"])
    against = "" if dense is None else f"{math.exp(row['next_token_loss'] - dense['next_token_loss']) - 1:+.1%}"
    numbers = [f"{perplexity:.2f}", against, f"{row['bits_per_byte']:.3f}"]
    if row["speed"] is None:
        return f"| {' | '.join(['dense, trained as long', '', '', '', '', '100%', '', *numbers, '', '1', '1'])} |"
    speed = row["speed"]
    low, high = speed["ci95"]
    failed = "" if speed["status"] == "pass" else ", a gate failed"
    removed = row["parts"] == "removed"
    cells = [
        "blocks removed" if removed else row["parts"],
        f"{len(row['layers'])} {row['route'].split(':')[0]}",
        "" if removed else f"{row['capacity']:g}",
        _left(row),
        "" if removed else row["routers"],
        f"{row['tokens_run']:.0%}",
        "" if row["untrained_perplexity"] is None else f"{row['untrained_perplexity']:.2f}",
        *numbers,
        "" if row["predictor_accuracy"] is None else f"{row['predictor_accuracy']:.1%}",
        f"{speed['predicted_flops']:.2f}",
        f"{speed['measured']:.2f} [{low:.2f}, {high:.2f}]{failed}",
    ]
    return f"| {' | '.join(cells)} |"


def _left(row: Mapping[str, Any]) -> str:
    return LEFT.get((row["skipped_keys"], row["adapter"]), "")


def _kind(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Returns what decides the colour of a row in the figure."""
    return row["parts"], _left(row), row["routers"]


def _draw(rows: Sequence[Mapping[str, Any]], untouched: Mapping[str, Any], path: Path) -> None:
    mpl.rcParams["svg.hashsalt"] = "retrofit"
    _, both = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True)
    about = ("share of attention and MLP run", "measured speed-up over the dense baseline")
    for axes, label, of in zip(both, about, (lambda row: row["tokens_run"], _speed), strict=True):
        axes.plot([1], [untouched["perplexity"]], "kx", label="dense, as given")
        kinds = dict.fromkeys(map(_kind, rows))
        for number, (part, left, routers) in enumerate(kinds):
            for row in (row for row in rows if _kind(row) == (part, left, routers)):
                at = (of(row), math.exp(row["next_token_loss"]))
                if row["speed"] is None:
                    axes.plot(*at, "o", color=f"C{number}", label="dense, trained as long")
                    continue
                layers = row["route"].split(":")[0]
                name = f"{layers} blocks removed" if part == "removed" else f"{part}, {layers} layers"
                name += f", skipped tokens {left}" if left else ""
                label_of = f"{name}, routers learn" if routers == "learned" else name
                axes.plot(*at, MARKERS[layers], color=f"C{number}", label=label_of)
                note = f"{len(row['layers'])}" if part == "removed" else f"{row['capacity']:g}"
                axes.annotate(note, at, xytext=(6, 3), textcoords="offset points", fontsize=8)
        axes.set_xlabel(label)
        axes.margins(x=0.2)  # Room for the labels beside the points.
    both[0].set_ylabel("held-out perplexity")
    both[0].set_yscale("log")
    both[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    both[0].yaxis.set_major_formatter(ScalarFormatter())
    both[0].yaxis.set_minor_formatter(NullFormatter())
    both[0].invert_xaxis()
    # Points that differ only in capacity share one legend entry.
    entries = dict(zip(*reversed(both[1].get_legend_handles_labels()), strict=True))
    both[1].legend(entries.values(), entries.keys(), fontsize=8)
    plt.tight_layout()
    plt.savefig(path, metadata={"Date": None})
    plt.close()


def _speed(row: Mapping[str, Any]) -> float:
    return 1.0 if row["speed"] is None else row["speed"]["measured"]

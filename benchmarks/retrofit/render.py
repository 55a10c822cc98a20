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
    "training tokens", "routed", "layers", "capacity", "skipped tokens", "routers", "rows: perplexity",
    "rows: against dense", "rows: speed-up (FLOPs)", "text: perplexity", "text: against dense", "text: tokens run",
    "text: speed-up",
)  # fmt: skip
USES = {"whole_rows": "whole rows, top-k selects", "text": "one text, predictors decide"}
"""The two ways to use a model -> heading of its half of the figure."""
LEFT = {("kept", "none"): "keep keys", ("absent", "linear"): "run an adapter", ("kept", "linear"): "both"}
"""Declarations of what skipped tokens leave -> how the table says it."""
Row = Mapping[str, Any]


def render(results: Path, docs: Path, about: Mapping[str, Any]) -> None:
    """Replaces the text between the marks in `docs`/training.md by all results of a folder, ordered by their number of
    training tokens, and then as `about["names"]` orders the names of the ways.
    """
    order = list(about["names"])
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in results.glob("*/result.json")]
    rows.sort(key=lambda row: (row["tokens"], row["seed"], order.index(row["name"])))
    untouched = json.loads((results / "untouched.json").read_text(encoding="utf-8"))
    (docs / "figures").mkdir(parents=True, exist_ok=True)
    _draw(rows, untouched, docs / "figures" / FIGURE)
    replace_part(docs / "training.md", "make retrofit", _measured(rows, untouched, about))


def _measured(rows: Sequence[Row], untouched: Row, about: Mapping[str, Any]) -> list[str]:
    dense_of = {(row["tokens"], row["seed"]): row for row in rows if row["parts"] == "dense"}
    perplexity = f"{math.exp(untouched['next_token_loss']):.2f}"
    as_given = ["0", "dense, as given", "", "", "", "", perplexity, "", "1", perplexity, "", "100%", "1"]
    return [
        f"Model `{about['model']}`, text: {about['text']}, in rows of {about['seq']} tokens. Perplexity of a token is",
        "held-out. *Rows*: top-k selects in every row. *Text*: the predictors decide, and a text has the slots of a",
        f"window of {about['window']:,} tokens. *Tokens run*: mean share over the routed parts. *Against dense*: the",
        "dense model that was trained as long. *Blocks removed* is the control: the dense model without its cheapest",
        "blocks. It and every model that routes learn from the dense model as given. Speed-ups are over the whole",
        "dense model, on one thread of ONNX Runtime, and measured once for each variant.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
        f"| {' | '.join(as_given)} |",
        *(_row(row, dense_of.get((row["tokens"], row["seed"]))) for row in rows),
        "",
        f"![Perplexity against measured speed-up](figures/{FIGURE})",
    ]


def _row(row: Row, dense: Row | None) -> str:
    def quality(use: str) -> list[str]:
        loss = row[use]["next_token_loss"]
        against = "" if dense is None else f"{math.exp(loss - dense[use]['next_token_loss']) - 1:+.1%}"
        return [f"{math.exp(loss):.2f}", against]

    removed, speed = row["parts"] == "removed", row["speed"]
    what = {"removed": "blocks removed", "dense": "dense, trained as long"}.get(row["parts"], row["parts"])
    cells = [f"{row['tokens']:,}", what]
    if speed is None:
        cells += ["", "", "", "", *quality("whole_rows"), "1", *quality("text"), "100%", "1"]
        return f"| {' | '.join(cells)} |"
    predicted, failed = speed["whole_rows"]["predicted_flops"], "" if speed["status"] == "pass" else ", a gate failed"
    cells += [
        f"{len(row['layers'])} {row['route'].split(':')[0]}",
        "" if removed else f"{row['capacity']:g}",
        _left(row),
        "" if removed else row["routers"],
        *quality("whole_rows"),
        f"{_interval(speed['whole_rows'])} ({predicted:.2f}){failed}",
        *quality("text"),
        "" if removed else f"{row['text']['ran']:.0%}",
        _interval(speed["text"]),
    ]
    return f"| {' | '.join(cells)} |"


def _interval(speed: Row) -> str:
    low, high = speed["ci95"]
    return f"{speed['measured']:.2f} [{low:.2f}, {high:.2f}]"


def _left(row: Row) -> str:
    return LEFT.get((row["skipped_keys"], row["adapter"]), "")


def _kind(row: Row) -> str:
    """Returns the label in the figure of rows that differ only in capacity and training."""
    if row["parts"] == "dense":
        return "dense, trained as long"
    layers = row["route"].split(":")[0]
    if row["parts"] == "removed":
        return f"{layers} blocks removed"
    left = f", skipped tokens {_left(row)}" if _left(row) else ""
    return f"{row['parts']}, {layers} layers{left}{', routers learn' if row['routers'] == 'learned' else ''}"


def _draw(rows: Sequence[Row], untouched: Row, path: Path) -> None:
    mpl.rcParams["svg.hashsalt"] = "retrofit"
    _, both = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True)
    kinds = list(dict.fromkeys(map(_kind, rows)))
    budgets = sorted({row["tokens"] for row in rows})
    for axes, (use, title) in zip(both, USES.items(), strict=True):
        axes.plot([1], [math.exp(untouched["next_token_loss"])], "kx", label="dense, as given")
        for row in rows:
            at = (1.0 if row["speed"] is None else row["speed"][use]["measured"], math.exp(row[use]["next_token_loss"]))
            # The more training, the larger the point.
            size = 5 + 3 * budgets.index(row["tokens"])
            marker, color = MARKERS.get(row["route"].split(":")[0], "s"), f"C{kinds.index(_kind(row))}"
            axes.plot(*at, marker, color=color, markersize=size, label=_kind(row))
            if row["speed"] is not None:
                note = f"{len(row['layers'])}" if row["parts"] == "removed" else f"{row['capacity']:g}"
                axes.annotate(note, at, xytext=(6, 3), textcoords="offset points", fontsize=8)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("measured speed-up over the dense model")
        axes.margins(x=0.2)  # Room for the labels beside the points.
    both[0].set_ylabel("held-out perplexity")
    both[0].set_yscale("log")
    both[0].yaxis.set_major_locator(LogLocator(subs=(1, 1.2, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)))
    both[0].yaxis.set_major_formatter(ScalarFormatter())
    both[0].yaxis.set_minor_formatter(NullFormatter())
    # Points that differ only in capacity and training share one legend entry.
    entries = dict(zip(*reversed(both[1].get_legend_handles_labels()), strict=True))
    both[1].legend(entries.values(), entries.keys(), fontsize=8)
    plt.tight_layout()
    plt.savefig(path, metadata={"Date": None})
    plt.close()

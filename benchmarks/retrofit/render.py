"""Writes the part of docs/training.md that `run.py` measures, and its figure, from the samples.

`python -m benchmarks.retrofit.render docs` does so without a measurement.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from benchmarks.marked_part import marks, replace_part
from benchmarks.retrofit.ways import ABOUT, ANSWERS, AS_GIVEN, SAMPLES, SPEEDS
from mod_models.train.fit import FIT_TOKENS

FIGURE = "retrofit.svg"
COLUMNS = (
    "training tokens", "model", "seeds", "rows: perplexity", "rows: against dense", "rows: speed-up (FLOPs)",
    "text: perplexity", "text: against dense", "text: tokens run", "text: speed-up (tokens run, bytes)",
)  # fmt: skip
USES = {
    "whole_rows": "whole rows, top-k selects",
    "text": "one text, predictors decide",
}
"""The two ways to use a model -> heading of its half of the figure."""
PARTS = {"mlp": "MLPs", "attention": "attentions", "block": "blocks", "separate": "attentions and MLPs"}
COLORS = 10
"""Number of Matplotlib's colours."""
MARKERS = {True: "o^", False: "sD"}
"""Whether a model routes -> its markers, one for each round through the colours."""
Sample = Mapping[str, Any]
Answers = Mapping[str, Mapping[str, Any]]
"""Task -> its figures, the standard error of its accuracy, and the number of questions."""


def render(samples: Path, docs: Path) -> None:
    """Replaces the text between the marks in `docs`/training.md by a table of all samples of a folder, in the order of
    their training tokens. Samples that differ only in their seed share a line. A page that does not exist is written.
    """
    about = json.loads((samples / ABOUT).read_text(encoding="utf-8"))
    speeds = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (samples / SPEEDS).glob("*.json")}
    found: list[Sample] = []
    for path in sorted(samples.glob("*-*.json")):
        one = json.loads(path.read_text(encoding="utf-8"))
        # A run of several hours may have been stopped before the shape was timed.
        found.append({**one, "stem": path.stem, "speed": speeds.get(one["shape"])})
    found.sort(
        key=lambda sample: (sample["tokens"], sample["kind"] != "dense", sample["dense_first"], _speed(sample, "text"))
    )
    lines: dict[tuple[int, str], list[Sample]] = {}
    for sample in found:
        lines.setdefault((sample["tokens"], sample["name"]), []).append(sample)
    (docs / "figures").mkdir(parents=True, exist_ok=True)
    _draw(list(lines.values()), about[AS_GIVEN], docs / "figures" / FIGURE)
    page = docs / "training.md"
    if not page.exists():
        page.write_text("\n".join(marks("make retrofit")) + "\n", encoding="utf-8")
    answers = {
        path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted((samples / ANSWERS).glob("*.json"))
    }
    table = _answers_table(list(lines.values()), answers)
    replace_part(page, "make retrofit", [*_measured(list(lines.values()), about), *table])


def _measured(lines: Sequence[Sequence[Sample]], about: Mapping[str, Any]) -> list[str]:
    dense_of = {(line[0]["tokens"], sample["seed"]): sample for line in lines for sample in line if _is_dense(sample)}
    perplexity = f"{math.exp(about[AS_GIVEN]['next_token_loss']):.2f}"
    as_given = ["0", "dense, as given", "", perplexity, "", "1", perplexity, "", "100%", "1"]
    return [
        f"Model `{about['model']}`, text: {about['text']}, in rows of {about['seq']} tokens. Perplexity of a token is",
        "held-out: the mean over seeds, and the smallest and largest. *Rows*: top-k selects in every row. *Text*: the",
        f"predictors decide, and a text has the slots of a window of {about['window']:,} tokens. *Tokens run*: mean",
        "share over the routed parts. *Against dense*: the dense model that was trained on as many tokens with the",
        "same seed. Models without blocks or with narrower MLPs are controls: smaller dense models. *With a teacher*:",
        "distilled from the dense model as given; after *dense for the first* tokens, from the model so trained.",
        f"Narrower MLPs, fitted routers and adapters are first fitted to {FIT_TOKENS:,} more tokens.",
        "Speed-ups are over the whole dense model, on one thread of ONNX Runtime, and measured once for each shape.",
        "Texts are timed on held-out text too; in brackets the share of their tokens that run, and the speed-up that",
        "the bytes of weights and cache predict.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
        f"| {' | '.join(as_given)} |",
        *(_line(line, dense_of) for line in lines),
        "",
        f"![Perplexity against measured speed-up](figures/{FIGURE})",
    ]


def _answers_table(lines: Sequence[Sequence[Sample]], answers: Mapping[str, Answers]) -> list[str]:
    """Returns a table of the tasks that models were asked, the mean over seeds; nothing if none was."""
    asked = [(task, of["questions"]) for tasks in answers.values() for task, of in tasks.items()]
    columns = sorted(set(asked), key=asked.index)
    if not columns:
        return []
    rows = [["0", "dense, as given", *_accuracies([answers[AS_GIVEN]], columns)]] if AS_GIVEN in answers else []
    for line in lines:
        found = [answers[sample["stem"]] for sample in line if sample["stem"] in answers]
        rows += [[f"{line[0]['tokens']:,}", label(line[0]), *_accuracies(found, columns)]] if found else []
    titles = [f"{task} ({questions:,} questions)" for task, questions in columns]
    return [
        "",
        "Share of the questions of lm-eval's tasks that are answered right, with its standard error (*text*):",
        "",
        f"| training tokens | model | {' | '.join(titles)} |",
        "|---" * (2 + len(titles)) + "|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _accuracies(found: Sequence[Answers], columns: Sequence[tuple[str, int]]) -> list[str]:
    cells = []
    for task, questions in columns:
        of_task = [answers[task] for answers in found if task in answers and answers[task]["questions"] == questions]
        accuracy = [of["figures"]["acc"] for of in of_task]
        # Other seeds answer the same questions, so they make the error no smaller.
        error = max((of["standard_error"] for of in of_task), default=0)
        cells.append(f"{sum(accuracy) / len(accuracy):.1%} ± {error:.1%}" if of_task else "")
    return cells


def _is_dense(sample: Sample) -> bool:
    return bool(sample["kind"] == "dense")


def _line(line: Sequence[Sample], dense_of: Mapping[tuple[int, int], Sample]) -> str:
    """Returns the line of a table of samples that differ only in their seed."""

    def quality(use: str) -> list[str]:
        losses = {sample["seed"]: sample[use]["next_token_loss"] for sample in line}
        dense = [dense_of.get((line[0]["tokens"], seed)) for seed in losses]
        # A rise over some of the seeds would not fit the perplexity over all of them.
        rises = [
            math.expm1(loss - of[use]["next_token_loss"]) for loss, of in zip(losses.values(), dense, strict=True) if of
        ]
        of_all = rises if len(rises) == len(losses) else []
        return [_spread([math.exp(loss) for loss in losses.values()], ".2f"), _spread(of_all, "+.1%")]

    one, seeds = line[0], str(len(line))
    cells = [f"{one['tokens']:,}", label(one), seeds]
    if _is_dense(one):
        return f"| {' | '.join([*cells, *quality('whole_rows'), '1', *quality('text'), '100%', '1'])} |"
    ran = [sample["text"]["ran"] for sample in line]
    rows, text = ("", "") if one["speed"] is None else _speeds(one["speed"])
    share = "100%" if None in ran else f"{sum(ran) / len(ran):.0%}"
    return f"| {' | '.join([*cells, *quality('whole_rows'), rows, *quality('text'), share, text])} |"


def _speeds(speed: Sample) -> tuple[str, str]:
    """Returns the cells of the speed-ups of whole rows and of text."""
    rows, text = speed["whole_rows"], speed["text"]
    failed = ", a gate failed" if speed["status"] == "fail" else ""
    ran = "" if text["ran"] is None else f"{text['ran']:.0%}, "
    return (
        f"{_interval(rows)} ({rows['predicted_flops']:.2f}){failed}",
        f"{_interval(text)} ({ran}{text['predicted_bytes']:.2f})",
    )


def _spread(values: Sequence[float], form: str) -> str:
    """Returns the mean, and the smallest and largest of several values."""
    if not values:
        return ""
    mean = format(sum(values) / len(values), form)
    return mean if len(values) == 1 else f"{mean} ({min(values):{form}} to {max(values):{form}})"


def label(sample: Sample) -> str:
    """Returns what a model is, in words."""
    if _is_dense(sample):
        return "dense, trained as long"
    after = f"; dense for the first {sample['dense_first']:.0%} of the tokens" if sample["dense_first"] else ""
    after += "; with a teacher" if sample["taught"] else ""
    layers = len(sample["layers"])
    form, _, number = sample["route"].partition(":")
    if sample["kind"] == "removed":
        return f"without the {f'{layers} {form} blocks' if layers > 1 else f'{form} block'}{after}"
    if sample["kind"] == "narrowed":
        return f"narrower MLPs: {sample['share']:.0%} of the neurons{after}"
    which = f"the {layers} {form} layers" if form in ("cheapest", "deepest") else f"{layers} layers"
    which = f"all {layers} layers" if (form, number) == ("every", "1") else which
    left = ["keep keys"] if sample["skipped_keys"] == "kept" else []
    if sample["adapter"] != "none":
        gated = sample["adapter"] == "gated"
        left.append(f"run {sample['adapter_share']:.0%} of the neurons" if gated else "run a linear map")
    learned = "; routers learn" if sample["routers"] == "learned" else ""
    tokens = f"{PARTS[sample['kind']]} of {which} run {sample['share']:.0%}"
    skipped = f", skipped tokens {' and '.join(left)}" if left else ""
    return f"{tokens}{skipped}{learned}{after}"


def _speed(sample: Sample, use: str) -> float:
    return 1.0 if sample["speed"] is None else float(sample["speed"][use]["measured"])


def _interval(speed: Sample) -> str:
    low, high = speed["ci95"]
    return f"{speed['measured']:.2f} [{low:.2f}, {high:.2f}]"


def _draw(lines: Sequence[Sequence[Sample]], untouched: Sample, path: Path) -> None:
    mpl.rcParams["svg.hashsalt"] = "retrofit"
    _, both = plt.subplots(1, 2, figsize=(10, 6), sharey=True)
    labels = list(dict.fromkeys(label(line[0]) for line in lines))
    budgets = sorted({line[0]["tokens"] for line in lines})
    for axes, (use, title) in zip(both, USES.items(), strict=True):
        axes.plot([1], [math.exp(untouched["next_token_loss"])], "kx", label="dense, as given")
        for line in [line for line in lines if _is_dense(line[0]) or line[0]["speed"]]:
            perplexities = [math.exp(sample[use]["next_token_loss"]) for sample in line]
            middle = sum(perplexities) / len(perplexities)
            # The mean of equal numbers can be a rounding error away from them.
            spread = [[max(0.0, middle - min(perplexities))], [max(0.0, max(perplexities) - middle)]]
            # The more training, the larger the point.
            size, number = 4 + 3 * budgets.index(line[0]["tokens"]), labels.index(label(line[0]))
            # Ten colours; the eleventh model has the first colour and another marker.
            color, marker = f"C{number % COLORS}", MARKERS[line[0]["kind"] in PARTS][number // COLORS % 2]
            axes.errorbar(
                _speed(line[0], use), middle, yerr=spread, fmt=marker, color=color, markersize=size,
                label=label(line[0]),
            )  # fmt: skip
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("measured speed-up over the dense model")
        axes.margins(x=0.15)
    both[0].set_ylabel("held-out perplexity")
    both[0].set_yscale("log")
    both[0].yaxis.set_major_locator(LogLocator(subs=(1, 1.2, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)))
    both[0].yaxis.set_major_formatter(ScalarFormatter())
    both[0].yaxis.set_minor_formatter(NullFormatter())
    # Points that differ only in training share one entry of the legend, which is below both halves.
    entries = dict(zip(*reversed(both[1].get_legend_handles_labels()), strict=True))
    plt.figlegend(entries.values(), entries.keys(), fontsize=8, loc="lower center")
    plt.tight_layout(rect=(0, 0.03 + 0.03 * len(entries), 1, 1))
    plt.savefig(path, metadata={"Date": None})
    plt.close()


if __name__ == "__main__":
    render(Path(sys.argv[1]) / SAMPLES, Path(sys.argv[1]))

"""Writes the part of docs/training.md that `run.py` measures, and its figures."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.marked_part import replace_part
from benchmarks.study.figures import draw_all
from benchmarks.study.models import BATCH, BUDGET, DENSE, SEEDS, SEQ, STUDIED, flops_of_row
from mod_models.train import TrainConfig

Results = dict[str, list[dict[str, Any]]]


def render(results: Path, docs: Path) -> None:
    """Replaces the text between the marks in `docs`/training.md, and `docs`/figures/study-*.

    Models without a finished run in `results` are left out.
    """
    runs = read_runs(results)
    times = json.loads((results / "step_times.json").read_text(encoding="utf-8"))
    (docs / "figures").mkdir(parents=True, exist_ok=True)
    draw_all(runs, docs / "figures")
    lines = [*_intro(runs), *_claims(runs), *_table(runs, times), *_figures()]
    replace_part(docs / "training.md", "make study", lines)


def read_runs(results: Path) -> Results:
    """Returns name -> finished runs in the order of their seeds. Names are in the order of the study."""
    finished = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*/result.json"))]
    by_name = {studied.name: [run for run in finished if run["name"] == studied.name] for studied in STUDIED}
    return {name: sorted(many, key=lambda run: run["seed"]) for name, many in by_name.items() if many}


def _intro(runs: Results) -> list[str]:
    text = f"""\
`make study` trains the models of the Mixture-of-Depths paper for {_flops(BUDGET)} each, forward and backward, as
PyTorch's flop counter counts a step with its auxiliary losses and the full square of attention scores. So a model with
cheaper steps gets more of them. Width {DENSE.d_model}, {DENSE.n_layers} blocks, bytes of the Python standard library's
source, {BATCH} rows of {SEQ} a step, AdamW at {TrainConfig().learning_rate:g} with warm-up and cosine; {len(runs)}
models, {len(SEEDS)} seeds. No model is near the end of its training, which explains much of the differences, and the
paper's models have 60 M to 3 B parameters, so its results need not agree with these.
"""
    return [*text.splitlines(), ""]


def _table(runs: Results, times: dict[str, Any]) -> list[str]:
    columns = (
        "model", "loss, each seed", "steps", "forward FLOPs", "forward time", "step time", "predictor accuracy",
        "by predictor",
    )  # fmt: skip
    about = (
        "Loss is held-out bits per byte. *By predictor*: the predictor decides instead of top-k, as at generation.\n"
        "FLOPs and times are relative to the dense model. Times: one thread, models interleaved; median (smallest to\n"
        "largest)."
    )
    lines = [about, "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    dense = flops_of_row(DENSE, training=False)
    for name, many in runs.items():
        accuracies = [run["predictor_accuracy"] for run in many if run["predictor_accuracy"] is not None]
        causal = [run["predictor_bits_per_byte"] for run in many if "predictor_bits_per_byte" in run]
        cells = [
            name,
            ", ".join(f"{run['bits_per_byte']:.3f}" for run in many),
            f"{many[0]['steps']:,}",
            f"{many[0]['forward_flops'] / dense:.2f}",
            _ratio(times, name, "forward"),
            _ratio(times, name, "step"),
            f"{statistics.mean(accuracies):.1%}" if accuracies else "",
            ", ".join(f"{value:.3f}" for value in causal),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    names: dict[str, list[str]] = {}
    for studied in STUDIED:
        if studied.name in runs:
            names.setdefault(studied.about, []).append(f"*{studied.name}*")
    return [*lines, "", *(f"* {', '.join(many)}: {what}." for what, many in names.items()), ""]


def _ratio(times: dict[str, Any], name: str, kind: str) -> str:
    ratios = [model / dense for model, dense in zip(times[name][kind], times["dense"][kind], strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _claims(runs: Results) -> list[str]:
    lines = ["| claim of the paper | here: bits per byte for each seed |", "|---|---|"]
    lines += [f"| {claim} | {answer} |" for claim, answer in _answers(runs) if answer]
    verdicts = (
        "A number is the loss of the first model minus that of the second. "
        "A claim holds if all are negative, and does\nnot hold if none is."
    )
    return [*lines, "", verdicts, ""]


def _answers(runs: Results) -> list[tuple[str, str]]:
    mod, every = "MoD 12.5 %", "MoD 12.5 %, every block"
    accuracy = [run["predictor_accuracy"] for many in runs.values() for run in many if run["predictor_accuracy"]]
    gap = [
        run["predictor_bits_per_byte"] - run["bits_per_byte"]
        for many in runs.values()
        for run in many
        if "predictor_bits_per_byte" in run
    ]
    entropy = [run["entropy_correlation"] for run in runs.get(mod, [])]
    return [
        ("learned routing is better than stochastic routing", _against(runs, mod, "stochastic MoD 12.5 %")),
        (
            "learned selection alone is better, with learned weights in both",
            _against(runs, mod, "MoD 12.5 %, random choice"),
        ),
        ("MoD at 12.5 % is better than dense at equal training FLOPs", _against(runs, mod, "dense")),
        ("routing every other block is better than routing every block", _against(runs, mod, every)),
        ("12.5 % is the best capacity: against 25 %", _against(runs, mod, "MoD 25 %")),
        ("12.5 % is the best capacity: against 50 %", _against(runs, mod, "MoD 50 %")),
        ("MoD and MoE add up: staged MoDE against MoE", _against(runs, "staged MoDE", "MoE")),
        ("integrated MoDE is better than staged", _against(runs, "integrated MoDE", "staged MoDE")),
        (
            "a predictor predicts top-k's selection with an accuracy of 97 % and more",
            f"{min(accuracy):.1%} to {max(accuracy):.1%} over models and seeds" if accuracy else "",
        ),
        (
            "deciding by the predictor costs little",
            f"{min(gap):+.3f} to {max(gap):+.3f}" if gap else "",
        ),
        (
            "blocks run the tokens after which the next token is hard to predict",
            "correlation of the share of blocks that run a token with the entropy of the next token: "
            + ", ".join(f"{value:+.2f}" for value in entropy)
            if entropy
            else "",
        ),
    ]


def _against(runs: Results, name: str, other_name: str) -> str:
    """Says whether the loss of `name` is below that of `other_name` on every seed. Pairs runs by their order."""
    if name not in runs or other_name not in runs:
        return ""
    pairs = zip(runs[name], runs[other_name], strict=False)
    differences = [a["bits_per_byte"] - b["bits_per_byte"] for a, b in pairs]
    better = sum(difference < 0 for difference in differences)
    verdict = {len(differences): "holds", 0: "does not hold"}.get(better, "undecided")
    return f"{verdict}: {', '.join(f'{difference:+.3f}' for difference in differences)}"


def _figures() -> list[str]:
    shown = (
        ("study-curves.svg", "Held-out loss against training FLOPs"),
        ("study-scores.svg", "Router scores"),
        ("study-entropy.svg", "Share of routed blocks that run a token, against the entropy of the next token"),
        ("study-map.png", "Which layers ran which byte of a text"),
    )
    return [line for file, title in shown for line in (f"![{title}](figures/{file})", "")][:-1]


def _flops(value: float) -> str:
    return f"{value / 1e12:g} TFLOP"

"""Writes docs/results.md and its figures from the measured results.

python -m benchmarks.rivals.render [RESULTS] [DOCS]

It copies the samples to docs/benchmarks/, and can also make the page from that folder. A folder NAME in it has the
samples of another machine (`--beside NAME` of `make bench`), which get a table of their own.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks.rivals.cases import KINDS, SIZES, VOCABULARY
from benchmarks.rivals.render_text import TEXT_RATIOS, against, text_beside, text_figure, text_tables
from benchmarks.rivals.routes import ANCHOR, PRECISIONS
from benchmarks.rivals.tables import (
    OURS,
    RIVAL,
    ROUTED,
    Found,
    Summary,
    bars,
    failures,
    medians,
    names_in,
    table,
    threads_of,
)

SUMMARY = [
    "precision",
    "whole rows: MoD / dense",
    "MoD / rival",
    "one text: MoD / dense",
    "MoD / rival",
    "eight texts: MoD / dense",
    "MoD / rival",
]
WORSE, ROUNDING = 2, 1e-4
"""A rival has the same quality if its error is at most WORSE times ours, or at most ROUNDING."""
HEAD = """# Results

Compare mod-export with other runtimes on your CPU:

    make bench                                                         # whole rows, and text with initial weights
    make bench ARGS="--text-model build/smollm2 --text english.txt"    # also text of a dense checkpoint of `convert`
    make bench ARGS="--only 'rows-M-s512-*,text-*-int4-*'"             # some cells; `--list` names them
    make bench ARGS="--beside NAME"                                    # of another machine, in tables below

It installs the rivals, compiles llama.cpp, resumes after an interruption, and writes this page
(`benchmarks/rivals/render.py`; do not edit). [benchmarks/](benchmarks) has all samples, and the text that each program
wrote.

Other results: [model classes](corpus.md), [planted faults and false alarms](evidence.md#planted-faults),
[a server under load](text.md#under-load), [training, and routers in a trained dense model](training.md),
[dead ends](LOG.md).

## Summary

{summary}
Numbers are speed-ups: above 1, the Mixture-of-Depths (MoD) model of mod-export is faster. *MoD / dense* compares it
with its dense baseline, *MoD / rival* with the fastest rival, whatever the rival's quality. In whole rows the rival
runs the MoD model too; in text it runs the dense model, because the rivals that write text have no other. A range
covers all cases and numbers of threads.

## How it is measured

* **Machine.** {machines}. {versions}.
* **Time.** A *route* is a program, or a way to run the model, in a process of its own. In every round each route runs
  once, in a new random order, after a pause in which the thread pools of the others go to sleep. Times are medians of
  at least {rounds} rounds after a warm-up round. Compare ratios within a table, not times between tables: other work on
  the machine slows down all routes of a round alike, and tables may be of different days and machines. The
  float32 engine of `ort-cpu`, where a table has it, shows how fast its machine was.
* **Quality**, compared with eager float32 PyTorch. *Next token*: share of positions with the same most probable next
  token; with initial weights it does not predict that of trained weights. *Error*: root mean square of the error of the
  logits divided by that of the logits, over the nine tenths of the tokens with the smallest error, because two router
  scores within rounding of each other may select another token. *Perplexity*: ratio, on English text.
* **A star** at the number of threads: other processes used more than a tenth of the machine before this cell was
  sampled.
"""
ROWS = f"""## Whole rows

Milliseconds for one prefill, dense / MoD. *Ours : rival* is the time of the fastest mod-export route divided by that of
the fastest rival (below 1: ours is faster); *minima* is this ratio for the fastest rounds. *Same quality* is the ratio
to the fastest rival whose error is at most {WORSE} times ours, if that is another rival.

* **Models.** Llama-like decoders with initial weights: S d=256 L=8, M d=512 L=12, L d=1024 L=16; heads of width 64,
  half as many key and value heads, SwiGLU of 2.75 d, vocabulary {VOCABULARY:,} unless the case says otherwise. MoD
  routes every other block at 12.5 %; dense has no routers. `--cases` measures other sizes and shapes. Size 1B has the
  shape of Llama-3.2-1B.
* **mod-export**: the engines that `mod-export build` writes and `mod_export.load` runs, for each target.
* **ONNX Runtime**: `torch.onnx.export` at opset 23, default settings; *dynamic*: `quantize_dynamic`, by channel;
  *MatMulNBits*: `matmul_nbits_quantizer`, blocks of 32, `accuracy_level` 4.
* **OpenVINO**: that export on the CPU, set for latency, with a hint of float32 or bfloat16; *our graph*: the portable
  graph of `mod-export build` instead; *weights*: `nncf.compress_weights` (int8 by channel, int4 in groups of 64),
  activations quantized at run time; *quantized*: `nncf.quantize`, weights and activations.
* **torch.compile**: the eager model, weights frozen. All rivals select with `torch.topk`.
"""
QUALITY = """### Quality of whole rows

The smallest agreement and the largest error over all cases:
"""
RATES = """### Speed-up and FLOPs

The fastest mod-export route. Roofline, dense and MoD are in GFLOP/s; FLOPs leave out the scores that a causal mask
hides. The roofline is that of float32 matrix products of a dense block's sizes on ONNX Runtime, in the same rounds.
Efficiency is the speed-up divided by the ratio of the FLOPs.
"""
OTHERS = "## Other machines\n"
OTHER_ROWS = "Whole rows: milliseconds of the fastest mod-export route and of the fastest rival, dense / MoD.\n"
OTHER_ROWS_HEAD = ["machine", "case", "threads", "precision", "mod-export", "rival", "ours : rival", "MoD speed-up"]
OTHER_TEXTS = "Text: tokens per second of our fastest engines and of the fastest rival, and ratios of these.\n"
OTHER_TEXTS_HEAD = ["machine", "model", "precision", *TEXT_RATIOS, "dense", "MoD", "rival"]
FIGURES = {
    "rows": "![Time of whole rows by route and precision](figures/latency.svg)\n",
    "text": "![Tokens per second by program and precision](figures/text.svg)\n",
}


def render(results: Path, docs: Path) -> None:
    """Writes results.md and its figures in the folder `docs`, if anything was measured."""
    rows, texts = (_read(results, kind) for kind in ("rows", "text"))
    if not rows and not texts:
        return
    figures = docs / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    parts = [_head(rows, texts)]
    if rows:
        _rows_figure(rows, figures / "latency.svg")
        parts += [ROWS, FIGURES["rows"], *_row_tables(rows)]
    if texts:
        text_figure(texts, figures / "text.svg")
        parts += text_tables(texts, FIGURES["text"])
    others = {path.name: path for base in (docs / "benchmarks", results) for path in base.glob("*/")}
    other_rows = [_beside(name, cell) for name in sorted(others) for cell in _read(others[name], "rows")]
    other_texts = [
        [_machine(name, cell), *line]
        for name in sorted(others)
        for cell in _read(others[name], "text")
        for line in text_beside(cell)
    ]
    if other_rows or other_texts:
        parts.append(OTHERS)
    if other_rows:
        parts += [OTHER_ROWS, table(OTHER_ROWS_HEAD, other_rows)]
    if other_texts:
        parts += [OTHER_TEXTS, table(OTHER_TEXTS_HEAD, other_texts)]
    (docs / "results.md").write_text("\n".join(parts), encoding="utf-8")
    keep(results, docs / "benchmarks")


def keep(results: Path, samples: Path) -> None:
    """Replaces the files of a folder of samples, which may have folders of other machines."""
    if results.resolve() == samples.resolve():
        return
    samples.mkdir(parents=True, exist_ok=True)
    for path in samples.glob("*.json"):
        path.unlink()
    for path in sorted([*results.glob("rows-*.json"), *results.glob("text-*.json")]):
        shutil.copyfile(path, samples / path.name)


def _read(results: Path, kind: str) -> list[Found]:
    cells = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob(f"{kind}-*.json"))]
    for cell in cells:
        cell["name"] = cell["model"] if kind == "text" else case_name(cell)
    return sorted(
        cells, key=_place if kind == "rows" else lambda cell: (not cell["trained"], cell["name"], cell["threads"])
    )


def _place(cell: Found) -> tuple[object, ...]:
    return list(SIZES).index(cell["size"]), cell["vocab"], cell["batch"], cell["seq"], cell["threads"]


def case_name(one: Found) -> str:
    batch = f", batch {one['batch']}" if one["batch"] > 1 else ""
    vocabulary = f", vocabulary {one['vocab']:,}" if one["vocab"] != VOCABULARY else ""
    return f"{one['size']}, {one['seq']:,} tokens{batch}{vocabulary}"


def time_of(one: Found, kind: str, name: str, summary: Summary = medians) -> float | None:
    """Returns the milliseconds of a route, or None if it was not measured or failed."""
    route = one["routes"].get(name)
    return None if route is None or route["failed"] else summary(route["ms"][kind])


def fastest(
    one: Found, kind: str, *, ours: bool, summary: Summary = medians, most_error: float = math.inf
) -> tuple[str, float] | None:
    """Returns name and time of the fastest route of the cell's precision, ours or a rival's, with an error of at most
    `most_error`.
    """
    times = {
        name: time_of(one, kind, name, summary)
        for name, route in one["routes"].items()
        if route["ours"] == ours and route["precision"] == one["precision"] and not _exceeds(route, kind, most_error)
    }
    known = {name: time for name, time in times.items() if time is not None}
    return min(known.items(), key=lambda item: item[1], default=None)


def _exceeds(route: Found, kind: str, most_error: float) -> bool:
    return not route["failed"] and route["quality"][kind]["error"] > most_error


def _head(rows: Sequence[Found], texts: Sequence[Found]) -> str:
    cells = [*rows, *texts]
    machines = sorted({f"{cell['machine']['cpu']}, {cell['machine']['cores']} cores" for cell in cells})
    versions = sorted({(name, version) for cell in cells for name, version in cell["versions"].items()})
    rounds = min(len(ms) for ms in _samples(cells))
    return HEAD.format(
        summary=table(SUMMARY, filter(any, (_in_short(precision, rows, texts) for precision in PRECISIONS))),
        rounds=rounds,
        machines="; ".join(machines),
        versions=", ".join(f"{name} {version}" for name, version in versions),
    )


def _samples(cells: Sequence[Found]) -> Iterator[Sequence[float]]:
    for cell in cells:
        for route in cell["routes"].values():
            yield from route.get("ms", {}).values()
            yield from (batch["tokens_per_s"] for batch in route.get("batches", {}).values())


def _in_short(precision: str, rows: Sequence[Found], texts: Sequence[Found]) -> list[str]:
    """Returns a line of the summary; an empty one if nothing was measured in this precision."""
    gains: list[list[float]] = [[] for _ in SUMMARY[1:]]
    for cell in rows:
        dense, mod, rival = (
            fastest(cell, kind, ours=ours) for kind, ours in (("dense", True), ("mod", True), ("mod", False))
        )
        if cell["precision"] == precision and dense and mod:
            gains[0].append(dense[1] / mod[1])
            if rival:
                gains[1].append(rival[1] / mod[1])
    for cell in texts:
        for at, batch in enumerate(("1", "8")):
            if cell["precision"] == precision and (compared := against(cell, batch)):
                gains[2 + 2 * at].append(compared.mod / compared.dense)
                gains[3 + 2 * at].append(compared.mod / compared.rival)
    return [precision, *map(_range, gains)] if any(gains) else []


def _range(values: Sequence[float]) -> str:
    ends = [f"{end:.2f}" for end in (min(values), max(values))] if values else []
    return " to ".join(dict.fromkeys(ends))


def _row_tables(cells: Sequence[Found]) -> Iterator[str]:
    measured = [precision for precision in PRECISIONS if any(cell["precision"] == precision for cell in cells)]
    qualities = []
    for precision in measured:
        chosen = [cell for cell in cells if cell["precision"] == precision]
        names = names_in(chosen)
        yield f"### Whole rows in {precision}\n"
        yield _times(chosen, names)
        yield "\n".join([*failures(chosen), ""])
        # The anchor has its quality among the routes of float32.
        shown = [name for name in names if not name.startswith(f"{ANCHOR}, ")]
        qualities += [[precision, name, *_quality(chosen, name)] for name in shown]
    yield QUALITY
    kinds = ("dense", "MoD")
    yield table(
        ["precision", "route", *(f"next token, {kind}" for kind in kinds), *(f"error, {kind}" for kind in kinds)],
        qualities,
    )
    yield RATES
    yield table(
        ["precision", "case", "threads", "roofline", "dense", "MoD", "speed-up", "efficiency"],
        [_rates(cell) for precision in measured for cell in cells if cell["precision"] == precision],
    )


def _machine(name: str, cell: Found) -> str:
    return f"{name} ({cell['machine']['cpu']})"


def _beside(name: str, cell: Found) -> list[str]:
    """Returns the line of a cell that was measured on the other machine of this name."""
    fastest_ms = {
        ours: [time[1] if time else None for time in (fastest(cell, kind, ours=ours) for kind in KINDS)]
        for ours in (True, False)
    }
    dense, mod = fastest_ms[True]
    return [
        _machine(name, cell),
        cell["name"],
        threads_of(cell),
        cell["precision"],
        *(" / ".join(map(_shown, ms)) for ms in fastest_ms.values()),
        _of_kinds(cell, _ratio),
        f"{dense / mod:.2f}" if dense and mod else "",
    ]


def _times(cells: Sequence[Found], names: Sequence[str]) -> str:
    columns = {
        "ours : rival": [_of_kinds(cell, _ratio) for cell in cells],
        "minima": [_of_kinds(cell, partial(_ratio, summary=min)) for cell in cells],
        "same quality": [_of_kinds(cell, _ratio_to_equal) for cell in cells],
    }
    columns = {title: cells for title, cells in columns.items() if any(cells)}
    return table(
        ["case", "threads", *names, *columns],
        [
            [cell["name"], threads_of(cell), *(_both(cell, name) for name in names), *cells]
            for cell, *cells in zip(cells, *columns.values(), strict=True)
        ],
    )


def _both(cell: Found, name: str) -> str:
    """Returns the times of the dense and of the MoD model."""
    return " / ".join(shown for kind in KINDS if (shown := _shown(time_of(cell, kind, name))))


def _of_kinds(cell: Found, ratio: Callable[[Found, str], tuple[float, str] | None]) -> str:
    """Returns a ratio for the dense and for the MoD model; a dash where there is none."""
    ratios = [ratio(cell, kind) for kind in KINDS]
    return " / ".join(f"{pair[0]:.2f}" if pair else "-" for pair in ratios) if any(ratios) else ""


def _ratio(cell: Found, kind: str, worse: float = math.inf, summary: Summary = medians) -> tuple[float, str] | None:
    """Returns the time of our fastest route divided by that of the fastest rival, and the rival's name. A rival's error
    must be at most `worse` times ours, or at most ROUNDING.
    """
    ours = fastest(cell, kind, ours=True, summary=summary)
    if ours is None:
        return None
    error = max(cell["routes"][ours[0]]["quality"][kind]["error"] * worse, ROUNDING)
    rival = fastest(cell, kind, ours=False, summary=summary, most_error=error)
    return None if rival is None else (ours[1] / rival[1], rival[0])


def _ratio_to_equal(cell: Found, kind: str) -> tuple[float, str] | None:
    """Returns the ratio to the fastest rival of the same quality, or None if it is the fastest of all."""
    ratio = _ratio(cell, kind, WORSE)
    return None if ratio == _ratio(cell, kind) else ratio


def _quality(cells: Sequence[Found], name: str) -> list[str]:
    """Returns the smallest agreement and the largest error over all cases, for both kinds."""
    qualities = [cell["routes"][name]["quality"] for cell in cells if cell["routes"].get(name, {}).get("quality")]
    if not qualities:
        return [""] * 4
    least = [f"{min(quality[kind]['agreement'] for quality in qualities):.2%}" for kind in KINDS]
    return [*least, *(f"{max(quality[kind]['error'] for quality in qualities):.2g}" for kind in KINDS)]


def _rates(cell: Found) -> list[str]:
    roofline = float(cell["gemm_flops"]) / medians(cell["gemm_ms"]) / 1e6
    row = [cell["precision"], cell["name"], threads_of(cell), f"{roofline:.0f}"]
    times = {kind: fastest(cell, kind, ours=True) for kind in KINDS}
    ms = {kind: time[1] for kind, time in times.items() if time}
    if len(ms) < len(KINDS):
        return [*row, *[""] * 4]
    rates = [f"{cell['needed_flops'][kind] / ms[kind] / 1e6:.0f}" for kind in KINDS]
    gain, ideal = ms["dense"] / ms["mod"], cell["needed_flops"]["dense"] / cell["needed_flops"]["mod"]
    return [*row, *rates, f"{gain:.2f}x", f"{gain / ideal:.2f}"]


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}"


def _rows_figure(cells: Sequence[Found], path: Path) -> None:
    """Draws both kinds of all routes of the first case, at its largest number of threads, for each precision."""
    case = cells[0]["name"]
    most = max(cell["threads"] for cell in cells if cell["name"] == case)
    groups = []
    for precision in PRECISIONS:
        for cell in cells:
            if (cell["name"], cell["precision"], cell["threads"]) == (case, precision, most):
                rows = [
                    (
                        f"{name}, {kind}",
                        time,
                        (ROUTED if kind == "mod" else OURS) if cell["routes"][name]["ours"] else RIVAL,
                    )
                    for name in names_in([cell])
                    if not name.startswith(ANCHOR) or precision == "float32" or name == ANCHOR
                    for kind in KINDS
                    if (time := time_of(cell, kind, name)) is not None
                ]
                groups.append((precision, rows))
    bars(path, groups, f"Milliseconds: {case}, {most} threads")


if __name__ == "__main__":
    render(*(Path(path) for path in (sys.argv[1:] or ("build/benchmarks", "docs"))))

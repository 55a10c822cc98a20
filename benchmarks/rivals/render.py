"""Writes docs/benchmarks.md and its figures from the measured results.

python -m benchmarks.rivals.render [RESULTS] [DOCS]

It copies the samples to docs/benchmarks/, and can also make the page from that folder.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.rivals.cases import KINDS
from benchmarks.rivals.render_text import text_figure, text_tables
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

WORSE, ROUNDING = 2, 1e-4
"""A rival has the same quality if its error is at most WORSE times ours, or at most ROUNDING."""
HEAD = """# Benchmarks

`make bench` compares mod-export with other runtimes on a CPU: the time of whole rows (one prefill), and tokens per
second of text, at each precision, on one and on all cores. `benchmarks/rivals/render.py` writes this page; do not edit.

    make bench ARGS="--text-model build/smollm2 --text english.txt"    # a dense checkpoint of `mod-export convert`
    make bench ARGS="--only 'rows-M-s512-*,text-*-int4-*'"             # some cells; `--list` names them

It installs the rivals, compiles llama.cpp, keeps every finished cell, and resumes after an interruption.

* **Method.** Each route (a program, or a way to run the model) has its own process, because thread pools of several
  libraries in one process disturb each other. In every round each route runs once, in a new random order, after a pause
  in which the other thread pools go to sleep. Times are medians of at least {rounds} rounds after a warm-up round. The
  float32 engine of `ort-cpu` runs in every table, for comparison. Compare ratios within a table, not times: other work
  on the machine slows down all routes of a round alike.
* **Quality.** *Next token*: share of positions with the same most probable next token as eager float32 PyTorch.
  *Error*: root mean square of the error of the logits divided by that of the logits, over the nine tenths of the tokens
  with the smallest error (two router scores within rounding of each other may select another token). *Perplexity*:
  divided by that of eager float32, on English text. Initial weights have no perplexity, and their next tokens do not
  predict those of trained weights.
* **Samples** of every cell, and what each program wrote: [benchmarks/](benchmarks), one JSON file for each.
* **A star** at the number of threads: other processes used more than a tenth of the machine before this cell was
  sampled.
* **Machine.** {cpu}, {cores} cores. {versions}.
"""
ROWS = f"""## Whole rows

* **mod-export**: what `mod-export build` writes and `mod_export.load` serves, for each target.
* **ONNX Runtime**: `torch.onnx.export` at opset 23 with its own optimiser, default settings; *dynamic*:
  `quantize_dynamic`, by channel; *MatMulNBits*: `matmul_nbits_quantizer`, blocks of 32, `accuracy_level` 4.
* **OpenVINO**: its CPU plug-in on that export, set for latency, with a hint of float32 or bfloat16; *our graph*: the
  same on the portable graph of `mod-export build`; *weights*: `nncf.compress_weights` (int8 by channel, int4 in groups
  of 64), activations quantized at run time; *quantized*: `nncf.quantize`, weights and activations.
* **torch.compile**: the eager model, weights frozen. All rivals select with `torch.topk`.
* **Models.** Llama-like decoders with initial weights: S d=256 L=8, M d=512 L=12, L d=1024 L=16, heads of width 64,
  half as many key and value heads, SwiGLU of 2.75 d. In MoD every other block is routed at 12.5 %; dense has no
  routers.
* **Cases.** M with 512 tokens, and cases that change one thing: fewer tokens, more tokens, a larger vocabulary. The
  tables have those that were measured; `--cases` measures any combination of size, length, batch and vocabulary.
* **Columns.** *Ours / rival*: time of the fastest mod-export route divided by that of the fastest rival (below 1: ours
  is faster); in brackets the ratio of minima. *Same quality*: the ratio to the fastest rival whose error is at most
  {WORSE} times ours, if that is another rival.
"""
RATES = """### Speed-up over dense, and from one core to all

Numbers of the fastest mod-export route. Roofline, dense and MoD are in GFLOP/s. FLOPs leave out the half of the scores
that a causal mask hides. The roofline is that of float32 matrix products of a dense block's sizes on ONNX Runtime, in
the same rounds. Efficiency: speed-up over the dense baseline divided by the ratio of their FLOPs. Scaling: time at one
thread divided by this time.
"""
FIGURES = {
    "rows": "![Time of whole rows by route and precision](figures/latency.svg)\n",
    "text": "![Tokens per second by program and precision](figures/text.svg)\n",
}


def render(results: Path, docs: Path) -> None:
    """Writes benchmarks.md and its figures in the folder `docs`, if anything was measured."""
    rows, texts = (_read(results, kind) for kind in ("rows", "text"))
    if not rows and not texts:
        return
    figures = docs / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    parts = [_head([*rows, *texts])]
    if rows:
        _rows_figure(rows, figures / "latency.svg")
        parts += [ROWS, FIGURES["rows"], *_row_tables(rows)]
    if texts:
        text_figure(texts, figures / "text.svg")
        parts += text_tables(texts, FIGURES["text"])
    (docs / "benchmarks.md").write_text("\n".join(parts), encoding="utf-8")
    _keep(results, docs / "benchmarks")


def _keep(results: Path, samples: Path) -> None:
    """Replaces the folder of samples by those of the page's cells."""
    if results.resolve() == samples.resolve():
        return
    shutil.rmtree(samples, ignore_errors=True)
    samples.mkdir()
    for path in sorted([*results.glob("rows-*.json"), *results.glob("text-*.json")]):
        shutil.copyfile(path, samples / path.name)


def _read(results: Path, kind: str) -> list[Found]:
    cells = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob(f"{kind}-*.json"))]
    for cell in cells:
        cell["name"] = cell["model"] if kind == "text" else case_name(cell)
    return sorted(
        cells, key=_place if kind == "rows" else lambda cell: (cell["name"] == "M", cell["name"], cell["threads"])
    )


def _place(one: Found) -> tuple[object, ...]:
    return "XSML".index(one["size"]), one["vocab"], one["batch"], one["seq"], one["threads"]


def case_name(one: Found) -> str:
    batch = f", batch {one['batch']}" if one["batch"] > 1 else ""
    return f"{one['size']}, {one['seq']:,} tokens{batch}, vocabulary {one['vocab']:,}"


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


def _head(found: Sequence[Found]) -> str:
    machine = found[0]["machine"]
    versions = sorted({(name, version) for one in found for name, version in one["versions"].items()})
    rounds = min(len(ms) for ms in _samples(found))
    return HEAD.format(
        rounds=rounds,
        cpu=machine["cpu"],
        cores=machine["cores"],
        versions=", ".join(f"{name} {version}" for name, version in versions),
    )


def _samples(found: Sequence[Found]) -> Iterator[Sequence[float]]:
    for one in found:
        for route in one["routes"].values():
            yield from route.get("ms", {}).values()
            yield from (batch["tokens_per_s"] for batch in route.get("batches", {}).values())


def _row_tables(found: Sequence[Found]) -> Iterator[str]:
    for precision in PRECISIONS:
        chosen = [one for one in found if one["precision"] == precision]
        if chosen:
            yield from _precision(precision, chosen)
    yield RATES
    yield table(
        ["precision", "case", "threads", "roofline", "dense", "MoD", "speed-up", "efficiency", "scaling dense", "MoD"],
        [_rates(one, found) for precision in PRECISIONS for one in found if one["precision"] == precision],
    )


def _precision(precision: str, found: Sequence[Found]) -> Iterator[str]:
    names = names_in(found)
    yield f"### Whole rows in {precision}\n"
    yield "Milliseconds:\n"
    yield table(
        ["case", "threads", "model", *names, "ours / rival", "same quality"],
        [
            [
                one["name"],
                threads_of(one),
                kind,
                *(_shown(time_of(one, kind, name)) for name in names),
                (ratio := _ratio(one, kind)),
                "" if (equal := _ratio(one, kind, WORSE)) == ratio else equal,
            ]
            for one in found
            for kind in KINDS
        ],
    )
    yield table(
        ["route", *(f"next token, {kind}" for kind in KINDS), *(f"error, {kind}" for kind in KINDS)],
        [[name, *_quality(found, name)] for name in names],
    )
    yield "\n".join([*failures(found), ""])


def _ratio(one: Found, kind: str, worse: float = math.inf) -> str:
    found = []
    for summary in (medians, min):
        own = fastest(one, kind, ours=True, summary=summary)
        if own is None:
            return ""
        error = max(one["routes"][own[0]]["quality"][kind]["error"] * worse, ROUNDING)
        other = fastest(one, kind, ours=False, summary=summary, most_error=error)
        if other is None:
            return ""
        found.append((own[1] / other[1], other[0]))
    return f"{found[0][0]:.2f} ({found[1][0]:.2f}), {found[0][1]}"


def _quality(found: Sequence[Found], name: str) -> list[str]:
    """Returns the smallest agreement and the largest error over all cases, for both kinds."""
    qualities = [one["routes"][name]["quality"] for one in found if one["routes"].get(name, {}).get("quality")]
    if not qualities:
        return [""] * 4
    least = [f"{min(one[kind]['agreement'] for one in qualities):.2%}" for kind in KINDS]
    return [*least, *(f"{max(one[kind]['error'] for one in qualities):.2g}" for kind in KINDS)]


def _rates(one: Found, found: Sequence[Found]) -> list[str]:
    roofline = float(one["gemm_flops"]) / medians(one["gemm_ms"]) / 1e6
    times = {kind: fastest(one, kind, ours=True) for kind in KINDS}
    if None in times.values():
        return [one["precision"], one["name"], threads_of(one), f"{roofline:.0f}", *[""] * 6]
    ms = {kind: time[1] for kind, time in times.items() if time}
    rates = [f"{one['needed_flops'][kind] / ms[kind] / 1e6:.0f}" for kind in KINDS]
    gain, ideal = ms["dense"] / ms["mod"], one["needed_flops"]["dense"] / one["needed_flops"]["mod"]
    single = next(
        (cell for cell in found
         if (cell["name"], cell["precision"], cell["threads"]) == (one["name"], one["precision"], 1)), None
    )  # fmt: skip
    scaling = [""] * len(KINDS)
    if single is not None and one["threads"] > 1:
        before = {kind: fastest(single, kind, ours=True) for kind in KINDS}
        scaling = [f"{time[1] / ms[kind]:.2f}x" for kind, time in before.items() if time]
    gains = [f"{gain:.2f}x", f"{gain / ideal:.2f}"]
    return [one["precision"], one["name"], threads_of(one), f"{roofline:.0f}", *rates, *gains, *scaling]


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}"


def _rows_figure(found: Sequence[Found], path: Path) -> None:
    """Draws both kinds of all routes of the first case, at its largest number of threads, for each precision."""
    case = found[0]["name"]
    most = max(cell["threads"] for cell in found if cell["name"] == case)
    groups = []
    for precision in PRECISIONS:
        for cell in found:
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
    render(*(Path(given) for given in (sys.argv[1:] or ("build/benchmarks", "docs"))))

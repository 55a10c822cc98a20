"""docs/benchmarks.md and its figures, from what was measured.

python tests/benchmarks/render.py [RESULTS] [DOCS]
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from measure_case import LAST
from routes import OURS, OURS_INT8, ROUTES

RIVALS = tuple(route for route in ROUTES if route not in (OURS, OURS_INT8))
SHORT = {
    "torch.onnx.export, ONNX Runtime": "plain ORT",
    "torch.onnx.export, OpenVINO": "OpenVINO",
    "torch.compile": "torch.compile",
}
KINDS = ("dense", "mod")
COLOURS = {OURS: "#0b6e4f", **dict(zip(RIVALS, ("#8a8f98", "#5b7db1", "#c98b3c"), strict=True))}

Found = dict[str, Any]
Summary = Callable[[Sequence[float]], float]

HEAD = """# Benchmarks

The results of `make bench`: the time of one prefill, by route, for models with initial weights. Written by
`tests/benchmarks/render.py`; do not edit.

* **Routes.** *mod-export*: what `mod-export build` makes for `ort-cpu`, run as `mod_export.load` runs it. *plain ORT*:
  `torch.onnx.export` at opset 23 with its own optimiser, on ONNX Runtime with default settings. *OpenVINO*: its CPU
  plug-in on the same file, float32, set for latency. *torch.compile*: the eager model, with default settings. Dense and
  MoD models run the same code, and all routes the same weights and tokens. Their logits agree (90th percentile of the
  largest difference of a token, over all cases: {difference:.1e}).
* **Models.** Llama-like decoders: S d=256 L=8, M d=512 L=12, L d=1024 L=16, heads of width 64, half as many key and
  value heads, SwiGLU of 2.75 d; MoD with every other block routed at 12.5 %, `dense` without routers.
* **Method.** One process for each case, {threads} thread. In every round each route runs once, in a new random order.
  Times are medians of at least five rounds after one round of warm-up, or minima where the heading says so. Compare
  ratios, not times: machines differ, and other work on the same machine slows down all routes of a round alike.
* **Roofline.** Matrix products of the sizes of a dense block, on ONNX Runtime, in the same rounds: {gemm:.0f} GFLOP/s
  in the median over cases. *Needed* FLOPs leave out the half of the scores that a causal mask hides. A MoD block
  multiplies an eighth of the rows. Matrix products of that size are slower, but are compared with the same roofline.
* **Efficiency.** Measured speed-up over the dense baseline on the same route, divided by predicted (FLOPs), which is
  the ratio of the needed FLOPs.
* **Cases.** {cases} were measured for this page; `make bench` measures 36, and continues after an interruption.
* **Machine.** {cpu}, {cores} cores. {versions}.
"""
FIGURES = """![Latency by route, divided by that of mod-export](figures/latency.svg)

![GFLOP/s of mod-export beside the roofline](figures/gflops.svg)
"""
VARIANTS = """## int8, and `outputs = "last"`

Speed of int8 weights against float32, and time of graphs that return the last token's logits over that of all logits. \
What int8 does to quality is measured on trained weights: see [numerics.md](numerics.md)."""


def render(results: Path, docs: Path) -> None:
    """Writes docs/benchmarks.md and docs/figures/, if anything was measured."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))]
    found.sort(key=lambda one: ("SML".index(one["size"]), one["vocab"], one["batch"], one["seq"]))
    if not found:
        return
    figures = docs / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    _latency_figure(found, figures / "latency.svg")
    _rate_figure(found, figures / "gflops.svg")
    (docs / "benchmarks.md").write_text("\n".join([_head(found), FIGURES, *_tables(found)]), encoding="utf-8")


def case_name(one: Found) -> str:
    return f"{one['size']}, {one['seq']:,} tokens, batch {one['batch']}, vocabulary {one['vocab']:,}"


def ratio(one: Found, kind: str, above: str, below: str, summary: Summary = statistics.median) -> float:
    """Time of one route over that of another."""
    return summary(one["ms"][kind][above]) / summary(one["ms"][kind][below])


def best_rival(one: Found, kind: str, summary: Summary = statistics.median) -> str:
    return min(RIVALS, key=lambda route: summary(one["ms"][kind][route]))


def _head(found: Sequence[Found]) -> str:
    machine = found[0]["machine"]
    versions = sorted({(name, version) for one in found for name, version in one["versions"].items()})
    return HEAD.format(
        difference=max(max(one["largest_difference"].values()) for one in found),
        threads=" or ".join(str(count) for count in sorted({one["threads"] for one in found})),
        gemm=statistics.median(_roofline(one) for one in found),
        cases=len(found),
        cpu=machine["cpu"],
        cores=machine["cores"],
        versions=", ".join(f"{name} {version}" for name, version in versions),
    )


def _tables(found: Sequence[Found]) -> Iterator[str]:
    by_kind = [(one, kind) for one in found for kind in KINDS]
    rivals = [SHORT[rival] for rival in RIVALS]
    yield _table(
        "## Time of mod-export divided by that of a rival (below 1: mod-export is faster)",
        ["case", "model", *(f"/ {rival}" for rival in rivals), "/ fastest rival", "minima"],
        [[case_name(one), kind, *_against_rivals(one, kind)] for one, kind in by_kind],
    )
    yield _table(
        "## Milliseconds, median (fastest)",
        ["case", "model", "mod-export", *rivals, "rounds"],
        [[case_name(one), kind, *_times(one["ms"][kind])] for one, kind in by_kind],
    )
    yield _table(
        "## GFLOP/s of mod-export, needed FLOPs only, and efficiency",
        ["case", "roofline", "dense", "MoD", "speed-up over dense", "predicted (FLOPs)", "efficiency"],
        [[case_name(one), *_rates(one)] for one in found],
    )
    yield _table(VARIANTS, ["case", "model", "int8 speed", "last / all"], [
        [case_name(one), kind, f"{1 / ratio(one, kind, OURS_INT8, OURS):.2f}x", f"{ratio(one, kind, LAST, OURS):.2f}"]
        for one, kind in by_kind
    ])  # fmt: skip


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([title, "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|", *lines]) + "\n"


def _against_rivals(one: Found, kind: str) -> list[str]:
    best, fastest = best_rival(one, kind), best_rival(one, kind, min)
    ratios = [f"{ratio(one, kind, OURS, rival):.2f}" for rival in RIVALS]
    return [
        *ratios,
        f"{ratio(one, kind, OURS, best):.2f} ({SHORT[best]})",
        f"{ratio(one, kind, OURS, fastest, min):.2f}",
    ]


def _times(taken: dict[str, list[float]]) -> list[str]:
    shown = [taken[route] for route in (OURS, *RIVALS)]
    return [*(f"{statistics.median(ms):,.4g} ({min(ms):,.4g})" for ms in shown), str(len(taken[OURS]))]


def _rates(one: Found) -> list[str]:
    roofline = _roofline(one)
    ideal = one["needed_flops"]["dense"] / one["needed_flops"]["mod"]
    gain = statistics.median(one["ms"]["dense"][OURS]) / statistics.median(one["ms"]["mod"][OURS])
    rates = [f"{_rate(one, kind):.0f} ({_rate(one, kind) / roofline:.0%})" for kind in KINDS]
    return [f"{roofline:.0f}", *rates, f"{gain:.2f}x", f"{ideal:.2f}x", f"{gain / ideal:.2f}"]


def _rate(one: Found, kind: str) -> float:
    return float(one["needed_flops"][kind]) / statistics.median(one["ms"][kind][OURS]) / 1e6


def _roofline(one: Found) -> float:
    return float(one["gemm_flops"]) / statistics.median(one["gemm_ms"]) / 1e6


def _latency_figure(found: Sequence[Found], path: Path) -> None:
    plot = _plot()
    figure, axes = plot.subplots(1, 2, figsize=(11, 1.3 + 0.42 * len(found)), sharey=True, layout="constrained")
    for axis, kind in zip(axes, KINDS, strict=True):
        for index, one in enumerate(found):
            for step, route in enumerate((OURS, *RIVALS)):
                length = ratio(one, kind, route, OURS)
                axis.barh(index + 0.2 * step, length, 0.18, color=COLOURS[route], label=SHORT.get(route, route))
        axis.axvline(1, color="#0b6e4f", linewidth=0.8)
        axis.set_title(f"{kind}: time, mod-export = 1")
        axis.set_yticks([index + 0.3 for index in range(len(found))], [_label(one) for one in found])
    axes[0].invert_yaxis()
    handles, labels = axes[0].get_legend_handles_labels()
    count = 1 + len(RIVALS)
    figure.legend(handles[:count], labels[:count], loc="outside lower center", ncols=count, fontsize=9)
    _save(figure, path)


def _rate_figure(found: Sequence[Found], path: Path) -> None:
    plot = _plot()
    figure, axis = plot.subplots(figsize=(9, 1.3 + 0.34 * len(found)), layout="constrained")
    for index, one in enumerate(found):
        axis.barh(index, _rate(one, "dense"), 0.34, color="#5b7db1", label="dense")
        axis.barh(index + 0.36, _rate(one, "mod"), 0.34, color="#0b6e4f", label="MoD")
        limit = [_roofline(one)] * 2
        axis.plot(limit, [index - 0.25, index + 0.6], color="black", linewidth=1.4, label="roofline")
    axis.set_yticks([index + 0.18 for index in range(len(found))], [_label(one) for one in found])
    axis.invert_yaxis()
    axis.set_title("GFLOP/s of mod-export, needed FLOPs only")
    handles, labels = axis.get_legend_handles_labels()
    kept = dict(zip(labels, handles, strict=True))
    figure.legend(list(kept.values()), list(kept), loc="outside lower center", ncols=len(kept), fontsize=9)
    _save(figure, path)


def _label(one: Found) -> str:
    return f"{one['size']} s{one['seq']} b{one['batch']} v{one['vocab'] // 1000}k"


def _plot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "mod-export"  # The same figures give the same bytes.
    matplotlib.rcParams["svg.fonttype"] = "none"  # Text stays text.
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    _plot().close(figure)


if __name__ == "__main__":
    render(*(Path(given) for given in (sys.argv[1:] or ("build/benchmarks", "docs"))))

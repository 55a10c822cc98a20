"""Renders the part of docs/results.md about programs that write text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rivals.routes import PRECISIONS
from benchmarks.rivals.tables import OURS, RIVAL, ROUTED, Found, bars, failures, medians, names_in, table, threads_of

BATCHES = ("1", "8")
TEXT = """## Text

Tokens per second after the first token, for one text and for eight at once, and milliseconds until the first token of
one text, greedy. All programs have the same dense weights, as a Hugging Face folder or as a GGUF file in float32.
{models}

Programs:

* **mod-export**: `mod_export.load_generator`, caches as long as the request, as in the other programs. The MoD model
  routes every other block. Its routers are random, and its predictors are calibrated so that as many tokens run as
  declared. Its text means nothing, so only its speed is shown;
  [training](training.md#measured-on-smollm2-135m) has the quality of such a model after training.
* **llama.cpp** through `llama-cpp-python`, compiled for this processor: F32, BF16, Q8_0 and Q4_0 of its own
  `llama_model_quantize`; cache in float16, its default.
* **onnxruntime-genai**: its model builder, `accuracy_level` 4 and blocks of 32 in int8 and int4.
* **OpenVINO GenAI**: its reader of GGUF files (float16), `nncf.compress_weights` for int8 and int4, paged attention, a
  whole batch of prompts at once, prefix cache off; with int8 and int4 weights, default precision hint and cache.
* **transformers**: eager. llama.cpp and OpenVINO GenAI have no MoD models.
* **Ratios** of tokens per second: above 1, the first is faster. Dense and MoD are our fastest. *Predicted* is MoD /
  dense by bytes, for one text: the weights that a dense step reads divided by those that a MoD step reads, with the
  measured share of tokens in each routed layer.
"""

TEXT_RATIOS = ["threads", "texts", "fastest rival", "dense / rival", "MoD / rival", "MoD / dense"]


@dataclass(frozen=True)
class Compared:
    """Tokens per second of our fastest engines and of the fastest rival."""

    dense: float
    mod: float
    rival: float
    rival_name: str


def text_tables(found: Sequence[Found], figure: str) -> Iterator[str]:
    """Yields all paragraphs and tables of this part."""
    models = dict.fromkeys(_model(cell) for cell in found)
    yield TEXT.format(models="Models:\n\n" + "\n".join(f"* {model}" for model in models))
    yield figure
    for precision in PRECISIONS:
        chosen = [cell for cell in found if cell["precision"] == precision]
        if not chosen:
            continue
        yield f"### Text in {precision}\n"
        for name in dict.fromkeys(cell["name"] for cell in chosen):
            yield from _tables_of_model([cell for cell in chosen if cell["name"] == name])
        yield "\n".join([*failures(chosen), ""])


def _tables_of_model(cells: Sequence[Found]) -> Iterator[str]:
    """Yields the tables of one model and precision. Each number of threads has columns of its own."""
    threads = [f"{threads_of(cell)} thread{'s' if cell['threads'] > 1 else ''}" for cell in cells]
    yield f"{cells[0]['name']}, tokens per second:\n"
    yield table(
        [
            "program",
            *(f"{count}, {of}" for count in ("1 text", "8 texts") for of in threads),
            *(f"first token, ms, {of}" for of in threads),
            "next token",
            "perplexity",
        ],
        [[name, *_shown(cells, name)] for name in names_in(cells)],
    )
    yield "Ratios of tokens per second:\n"
    yield table(
        [*TEXT_RATIOS, "predicted"],
        [row for cell in cells for batch in BATCHES if (row := _ratios(cell, batch))],
    )


def text_beside(cell: Found) -> Iterator[list[str]]:
    """Yields a line for each number of texts of a cell that was measured on another machine."""
    for batch in BATCHES:
        ratios, rates = _ratios(cell, batch), against(cell, batch)
        if ratios and rates:
            speeds = (rates.dense, rates.mod, rates.rival)
            yield [cell["name"], cell["precision"], *ratios[: len(TEXT_RATIOS)], *map(_speed, speeds)]


def _model(cell: Found) -> str:
    weights = "trained" if cell["trained"] else "initial weights"
    model = f"d={cell['d_model']} L={cell['n_layers']}, vocabulary {cell['vocab']:,}, {weights}"
    request = f"prompts of {cell['prompt']:,} tokens, {cell['new']:,} written, window {cell['window']:,}"
    judged = f"next tokens of {cell['judged']:,} compared"
    return f"**{cell['name']}**: {model}; MoD at {cell['capacity']:.1%}; {request}; {judged}"


def _shown(cells: Sequence[Found], name: str) -> list[str]:
    """Returns the speeds of a program in all cells, and its quality in the first in which it ran."""
    routes = [cell["routes"].get(name) for cell in cells]
    speeds = [_measured(route, batch, "tokens_per_s") for batch in BATCHES for route in routes]
    first = [_measured(route, "1", "first_ms") for route in routes]
    route = next((route for route in routes if route and not route["failed"]), None)
    if route is None or route["kind"] == "mod":
        return [*speeds, *first, "", ""]
    quality = route["quality"]
    perplexity = f"{quality['perplexity_ratio']:.3f}" if cells[0]["trained"] else ""
    return [*speeds, *first, f"{quality['agreement']:.1%}", perplexity]


def _measured(route: dict[str, Any] | None, batch: str, what: str) -> str:
    if route is None:
        return ""
    if route["failed"]:
        return "none"
    return _speed(float(medians(route["batches"][batch][what])))


def _speed(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def against(one: Found, batch: str) -> Compared | None:
    """Returns our engines of the cell's precision beside the fastest rival, or None if one of the three is missing."""
    rates = {
        name: float(medians(route["batches"][batch]["tokens_per_s"]))
        for name, route in one["routes"].items()
        if not route["failed"] and route["precision"] == one["precision"]
    }
    routes = {name: one["routes"][name] for name in rates}
    dense, mod = (
        max((rates[name] for name, route in routes.items() if route["ours"] and route["kind"] == kind), default=None)
        for kind in ("dense", "mod")
    )
    rivals = {name: rate for name, rate in rates.items() if not routes[name]["ours"]}
    if not rivals or dense is None or mod is None:
        return None
    best = max(rivals, key=lambda name: rivals[name])
    return Compared(dense, mod, rivals[best], best)


def _ratios(cell: Found, batch: str) -> list[str] | None:
    rates = against(cell, batch)
    if rates is None:
        return None
    predicted = f"{cell['predicted_bytes']:.2f}" if batch == "1" and cell["predicted_bytes"] else ""
    ratios = (rates.dense / rates.rival, rates.mod / rates.rival, rates.mod / rates.dense)
    return [threads_of(cell), batch, rates.rival_name, *(f"{ratio:.2f}" for ratio in ratios), predicted]


def text_figure(found: Sequence[Found], path: Path) -> None:
    """Draws tokens per second of one text for the first model, at its largest number of threads, for each precision."""
    model = found[0]["name"]
    most = max(cell["threads"] for cell in found if cell["name"] == model)
    groups = []
    for precision in PRECISIONS:
        for cell in found:
            if (cell["name"], cell["precision"], cell["threads"]) == (model, precision, most):
                rows = [
                    (name, medians(route["batches"]["1"]["tokens_per_s"]), _colour(route))
                    for name in names_in([cell])
                    if not (route := cell["routes"][name])["failed"] and route["precision"] == precision
                ]
                groups.append((precision, rows))
    bars(path, groups, f"Tokens per second: {model}, one text, {most} threads")


def _colour(route: dict[str, Any]) -> str:
    if not route["ours"]:
        return RIVAL
    return ROUTED if route["kind"] == "mod" else OURS

"""Renders the part of docs/benchmarks.md about programs that write text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rivals.routes import PRECISIONS
from benchmarks.rivals.tables import OURS, RIVAL, ROUTED, Found, bars, failures, medians, names_in, table, threads_of

TEXT = """## Text

Tokens per second after the first token, of one text and of eight at once, with a prompt of {prompt} tokens and {new}
tokens written, greedy; and milliseconds until the first token of one text. All programs have the same dense weights, as
a Hugging Face folder or as a GGUF file in float32. {models}

* **mod-export**: `mod-export build` and `mod_export.load_generator`, window {window}, caches as long as the request, as
  in the other programs. In the Mixture-of-Depths model every other block is routed; its routers are random, and its
  predictors are calibrated so that as many tokens run as declared. Its text means nothing, so only its speed is shown
  ([training](training.md#measured-on-smollm2-135m) has the quality of such a model after training).
* **llama.cpp** through `llama-cpp-python`, compiled for this processor: F32, BF16, Q8_0 and Q4_0 of its own
  `llama_model_quantize`; the cache in float16, its default.
* **onnxruntime-genai**: its model builder, `accuracy_level` 4 and blocks of 32 in int8 and int4.
* **OpenVINO GenAI**: its reader of GGUF files (float16), `nncf.compress_weights` for int8 and int4, paged attention, a
  whole batch of prompts at once, prefix cache off. With int8 and int4 weights, precision hint and cache are its
  defaults.
* **transformers**: eager. llama.cpp and OpenVINO GenAI have no MoD models.
* **Ratios** are the tokens per second of our dense or MoD model divided by those of the fastest rival (above 1: ours
  is faster), and of our MoD model divided by those of our dense model. *Predicted* is the last one by bytes: the
  weights that a step of the dense model reads divided by those of the MoD model, for one text, with the measured share
  of tokens in each routed layer.
"""


def text_tables(found: Sequence[Found], figure: str) -> Iterator[str]:
    """Yields all paragraphs and tables of this part."""
    models = "; ".join(dict.fromkeys(_model(cell) for cell in found))
    first = found[0]
    yield TEXT.format(prompt=first["prompt"], new=first["new"], window=first["window"], models=f"Models: {models}.")
    yield figure
    for precision in PRECISIONS:
        chosen = [cell for cell in found if cell["precision"] == precision]
        if not chosen:
            continue
        yield f"### Text in {precision}\n"
        yield table(
            [
                "model",
                "threads",
                "program",
                "tokens/s, 1 text",
                "8 texts",
                "first token, ms",
                "next token",
                "perplexity",
            ],
            [
                [cell["name"], threads_of(cell), name, *_shown(cell, cell["routes"][name])]
                for cell in chosen
                for name in names_in([cell])
            ],
        )
        yield "Ratios of tokens per second:\n"
        yield table(
            ["model", "threads", "texts", "fastest rival", "dense / rival", "MoD / rival", "MoD / dense", "predicted"],
            [row for cell in chosen for batch in ("1", "8") if (row := _against(cell, batch))],
        )
        yield "\n".join([*failures(chosen), ""])


def _model(one: Found) -> str:
    weights = "trained" if one["trained"] else "initial weights"
    return (
        f"{one['name']} (d={one['d_model']} L={one['n_layers']}, vocabulary {one['vocab']:,}, {weights}; "
        f"MoD at {one['capacity']:.1%})"
    )


def _shown(one: Found, route: dict[str, Any]) -> list[str]:
    if route["failed"]:
        return ["none"] * 3 + [""] * 2
    speeds = [f"{medians(route['batches'][batch]['tokens_per_s']):,.3g}" for batch in ("1", "8")]
    first_ms = f"{medians(route['batches']['1']['first_ms']):,.3g}"
    if route["kind"] == "mod":
        return [*speeds, first_ms, "", ""]
    quality = route["quality"]
    perplexity = f"{quality['perplexity_ratio']:.3f}" if one["trained"] else ""
    return [*speeds, first_ms, f"{quality['agreement']:.1%}", perplexity]


def _against(one: Found, batch: str) -> list[str] | None:
    rates = {
        name: medians(route["batches"][batch]["tokens_per_s"])
        for name, route in one["routes"].items()
        if not route["failed"] and route["precision"] == one["precision"]
    }
    ours = {
        kind: max((rates[name] for name, route in one["routes"].items()
                   if name in rates and route["ours"] and route["kind"] == kind), default=None)
        for kind in ("dense", "mod")
    }  # fmt: skip
    rivals = {name: rate for name, rate in rates.items() if not one["routes"][name]["ours"]}
    if not rivals or None in ours.values():
        return None
    best = max(rivals, key=lambda name: rivals[name])
    dense, mod = (float(rate) for rate in ours.values() if rate is not None)
    predicted = f"{one['predicted_bytes']:.2f}" if batch == "1" and one["predicted_bytes"] else ""
    return [
        one["name"], threads_of(one), batch, best, f"{dense / rivals[best]:.2f}", f"{mod / rivals[best]:.2f}",
        f"{mod / dense:.2f}", predicted,
    ]  # fmt: skip


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

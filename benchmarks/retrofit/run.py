"""Retrofits a dense model in several ways, measures each, and writes its table into docs/training.md: `make retrofit`.

    python -m benchmarks.retrofit.run [--model DIR] [--data PATH] [--results DIR] [--docs DIR] [--steps N] ...

Nothing is downloaded: `--model` is a dense checkpoint on this machine, such as `mod-export convert` writes. A run that
was stopped continues: each way, number of tokens and seed has its own folder, and resumes from its last evaluation. A
run whose result is among the samples (DOCS/retrofit) is not repeated, so several machines can share the work. The table
shows all samples.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks.retrofit.controls import narrowed, without
from benchmarks.retrofit.render import render
from benchmarks.retrofit.ways import (
    ABOUT,
    AS_GIVEN,
    DENSE,
    GRID,
    SAMPLES,
    SEEDS,
    SPEEDS,
    Way,
    config_of,
    steps_of_dense,
)
from mod_models import probe
from mod_models.checkpoint import Checkpoint, load_checkpoint
from mod_models.generation_spec import for_generation
from mod_models.train import PRECISIONS, RECOMPUTED, TrainConfig
from mod_models.train.corpus import Corpus, read_corpus, tokenizer_beside
from mod_models.train.evaluation import held_out
from mod_models.train.fit import fitted, rows_to_fit
from mod_models.train.losses import LossModule
from mod_models.train.parallel import Workers
from mod_models.train.retrofit import LEARNED, layers_of, retrofitted, routed_spec
from mod_models.train.run import fingerprint_of, train
from mod_models.transformer import Transformer

RANKING = "probe.json"
"""Beside the samples: the costs of skipping layers, from which the cheapest are taken."""
SETTINGS = ("seq", "window", "batch", "learning_rate", "precision", "eval_batches", "probe_rows")
"""Options that all samples of a folder share."""
SPEED = """\
# One engine, one thread, whole rows and one text: what the table's speed-ups are measured with. Texts are as long as
# where perplexity is measured, and have the slots of the same window.
buckets = [[1, {seq}]]
targets = ["ort-cpu"]
outputs = "last"

[latency]
min_speedup = 0.0

[generation]
build = "always"
window = {window}
prompts = [{seq}]
caches = [{seq}]
batches = [1]
compared_texts = 0
measured_texts = 16
measured_tokens = 96
"""
TEXT = "held_out.txt"
"""Beside the trained models: the held-out text, on which speed is measured too."""


def run_way(way: Way, given: argparse.Namespace, corpus: Corpus) -> str:
    """Trains and measures one way, as far as its results are not there; returns a line to show. A shape is built and
    timed once. The dense model is what speeds are compared with.
    """
    name = folder_name(way, given)
    sample, speed = samples_of(given) / f"{name}.json", samples_of(given) / SPEEDS / f"{way.shape}.json"
    if sample.exists() and (speed.exists() or way == DENSE):
        return f"{name}: done before"
    layers = trained(way, given, corpus)
    folder = given.results / name
    if not sample.exists():
        result = {
            **asdict(way),
            "name": way.name,
            "shape": way.shape,
            "layers": layers,
            "seed": given.seed,
            "tokens": tokens_of(given),
            **judged(load_checkpoint(folder / "model.pt"), config_of(way, given), corpus, given.window),
        }
        _write(sample, result)
    if not speed.exists() and way != DENSE:
        _write(speed, speed_of(way, folder, given, corpus))
    return f"{name}: {json.loads(sample.read_text())['whole_rows']['bits_per_byte']:.3f} bits/byte"


def _write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def samples_of(given: argparse.Namespace) -> Path:
    """Returns the folder of the samples, from which the page is made."""
    return Path(given.docs) / SAMPLES


def tokens_of(given: argparse.Namespace) -> int:
    """Returns the number of tokens that every way is trained on, with those of its dense model."""
    return int(given.steps * given.batch * given.seq)


def folder_name(way: Way, given: argparse.Namespace) -> str:
    """Returns the name of the folder of a run, and of its sample."""
    return f"{way.name}-{tokens_of(given)}" + (f"-seed{given.seed}" if given.seed else "")


def trained(way: Way, given: argparse.Namespace, corpus: Corpus) -> tuple[int, ...]:
    """Trains a way in its folder, unless that has been done, after the dense model that it follows; returns the layers
    that route or are removed.

    Raises:
        RuntimeError: the folder holds a model that was trained in another way.
    """
    folder = given.results / folder_name(way, given)
    dense = load_checkpoint(given.model)
    layers: tuple[int, ...] = ()
    if way.routes or way.kind == "removed":
        text = way.route.format(half=dense.spec.n_layers // 2).replace("cheapest", str(samples_of(given) / RANKING))
        layers = layers_of(text, dense.spec.n_layers, way.kind if way.routes else "block")
    done, described = folder / "trained", json.dumps(asdict(way))
    if done.exists():
        if done.read_text(encoding="utf-8") != described:
            raise RuntimeError(f"{folder}: was trained in another way; name another folder with --results")
        return layers
    if way.dense_first:
        before_it = argparse.Namespace(**{**vars(given), "steps": steps_of_dense(way, given.steps)})
        trained(DENSE, before_it, corpus)
        dense = load_checkpoint(given.results / folder_name(DENSE, before_it) / "model.pt")
    config = config_of(way, given)
    initial = started(way, dense, layers, config, corpus)
    # A model that routes has its own dense form for a teacher.
    teacher = dense if way.has_teacher and not way.routes else None
    for event in train(initial.spec, config, folder, initial=initial, corpus=corpus, teacher=teacher):
        if event.text:
            print(f"{folder.name}: {event.text}", flush=True)
    done.write_text(described, encoding="utf-8")
    return layers


def started(way: Way, dense: Checkpoint, layers: tuple[int, ...], config: TrainConfig, corpus: Corpus) -> Checkpoint:
    """Returns the weights that a way starts from."""
    if way == DENSE:
        return dense
    if way.kind == "removed":
        return without(dense, layers)
    if way.kind == "narrowed":
        return narrowed(dense, way.share, rows_to_fit(corpus, config))
    spec = routed_spec(
        dense.spec, layers, way.share, way.kind, "predictor", skipped_keys=way.skipped_keys, adapter=way.adapter,
        adapter_share=way.adapter_share, routers=way.routers, calibrated=config.calibrate > 0,
    )  # fmt: skip
    begin = retrofitted(dense, spec, config.seed)
    if way.routers == LEARNED and way.adapter == "none":
        return begin
    return fitted(begin, rows_to_fit(corpus, config)).checkpoint


def judged(checkpoint: Checkpoint, config: TrainConfig, corpus: Corpus, window: int) -> dict[str, Any]:
    """Measures the held-out loss of whole rows, in which top-k selects, and of texts, in which predictors decide and a
    text has the slots of the window.
    """
    model, spec = checkpoint.module(), checkpoint.spec
    if spec.routing is None:
        losses = numbers_of(model, config, corpus)
        return {"whole_rows": losses, "text": losses}
    by_rank = replace(spec, routing=replace(spec.routing, selection="topk"))
    return {
        name: numbers_of(Transformer(its_spec).sharing(model), config, corpus)
        for name, its_spec in (("whole_rows", by_rank), ("text", for_generation(spec, window)))
    }


def numbers_of(model: Transformer, config: TrainConfig, corpus: Corpus) -> dict[str, float | None]:
    """Returns the held-out loss of a token in nats, bits per byte, and, where tokens choose, the mean share of tokens
    that ran in the routed parts.
    """
    metrics = held_out(LossModule(model.eval(), config), corpus.held_out, config, Workers())
    ran = [share for name, share in metrics.items() if name.startswith("tokens_run/")]
    numbers = {name: metrics[name] for name in ("next_token_loss", "bits_per_byte")}
    return {**numbers, "ran": sum(ran) / len(ran) if ran else None}


def speed_of(way: Way, folder: Path, given: argparse.Namespace, corpus: Corpus) -> dict[str, Any]:
    """Builds the model in `folder` in its own process, and returns the speed-ups of whole rows and of one text from the
    report, and the status of its verdict.

    A model that routes is compared with its own dense baseline, and a smaller one with the given dense model.
    """
    settings = SPEED.format(seq=given.seq, window=given.window)
    (folder / "speed.toml").write_text(settings, encoding="utf-8")
    text = (given.results / TEXT).resolve()
    text.write_text(read_back(corpus), encoding="utf-8")
    command = [sys.executable, "-m", "mod_export", "build", "model.pt", "-c", "speed.toml", "-o", "build", "-q"]
    command += ["--text", str(text)]
    command += [] if way.routes else ["--baseline", str(given.model.resolve())]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    # Code 4 means that a gate failed. Such a build has a report, which says so.
    if ran.returncode not in (0, 4):
        raise RuntimeError(f"{folder}: {' '.join(command)} ended with {ran.returncode}: {ran.stderr}")
    report = json.loads((folder / "build" / "report.json").read_text(encoding="utf-8"))
    (row,) = report["speedup"]
    (steps,) = report["generation"]["decode"]
    selected = list(steps["selected"].values())
    return {
        "whole_rows": {name: row[name] for name in ("measured", "ci95", "predicted_flops")},
        "text": {
            **{name: steps["compared"][name] for name in ("measured", "ci95", "predicted_bytes")},
            "texts": steps["texts"],
            "ran": sum(selected) / len(selected) if selected else None,
        },
        "status": report["verdict"]["status"],
    }


def read_back(corpus: Corpus) -> str:
    """Returns the held-out tokens of a corpus as text."""
    ids_N = corpus.held_out.id_N
    if corpus.tokenizer is None:
        return bytes(ids_N.tolist()).decode(errors="replace")
    from tokenizers import Tokenizer

    return str(Tokenizer.from_file(str(corpus.tokenizer)).decode(ids_N.tolist()))


def before(given: argparse.Namespace, corpus: Corpus) -> None:
    """Evaluates the dense model as given and runs the probe, once for each folder of samples.

    Raises:
        RuntimeError: the samples or the trained models have other settings.
    """
    dense = load_checkpoint(given.model)
    settings = {
        "model": (given.model.parent if given.model.is_file() else given.model).name,
        "weights": fingerprint_of(dense),
        "text": corpus.name if given.data is None else given.data.name,
        "tokens of the text": corpus.fingerprint,
        **{name: vars(given)[name] for name in SETTINGS},
    }
    about = samples_of(given) / ABOUT
    for path, option in ((about, "--docs"), (given.results / ABOUT, "--results")):
        if not path.exists():
            continue
        known = json.loads(path.read_text(encoding="utf-8"))
        changed = [name for name, value in settings.items() if known[name] != value]
        if changed:
            raise RuntimeError(f"{path}: differs in {', '.join(changed)}; name another folder with {option}")
    samples_of(given).mkdir(parents=True, exist_ok=True)
    given.results.mkdir(parents=True, exist_ok=True)
    (given.results / ABOUT).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    if not about.exists():
        numbers = numbers_of(dense.module(), config_of(DENSE, given), corpus)
        about.write_text(json.dumps({**settings, AS_GIVEN: numbers}, indent=1) + "\n", encoding="utf-8")
    ranking = samples_of(given) / RANKING
    if not ranking.exists():
        options = ["--seq", str(given.seq), "--batch", "1", "--batches", str(given.probe_rows), "--out", str(ranking)]
        probe.main([str(given.model), *options, *(["--data", str(given.data)] if given.data is not None else [])])
        # A sample names the model, not where it lies on one machine.
        found = {**json.loads(ranking.read_text(encoding="utf-8")), "checkpoint": settings["model"]}
        ranking.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None, grid: Sequence[Way] = GRID) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, default=Path("build/smollm2"), help="a dense checkpoint (%(default)s)")
    add("--data", type=Path, help="text to train on; without it this Python's sources")
    add("--results", type=Path, default=Path("build/retrofit"))
    add("--docs", type=Path, default=Path("docs"))
    # With these defaults, a way of 135 M parameters takes ten minutes on two cores, build included, and 5 GB.
    add("--steps", type=int, default=60)
    add("--batch", type=int, default=4)
    add("--micro-batch", type=int, default=0, help="rows at a time, for less memory (default: all of them)")
    add("--seq", type=int, default=256)
    add("--recompute", choices=RECOMPUTED, default="none", help="less memory, more time (%(default)s)")
    add("--precision", choices=PRECISIONS, default="float32", help="of products (%(default)s)")
    add("--learning-rate", type=float, default=3e-4, help="routers and predictors get 10 times as much (%(default)s)")
    add("--eval-batches", type=int, default=16)
    add("--window", type=int, default=1024, help="of the text engines, in tokens (%(default)s)")
    add("--seed", type=int, default=0)
    add("--only", default="*", metavar="PATTERN", help="ways whose names fit, such as 'mlp-*-0.5-*' (%(default)s)")
    add("--probe-rows", type=int, default=4)
    options = parser.parse_args(arguments)
    if not options.model.exists():
        parser.error(f"{options.model}: no such checkpoint; make one of a dense model with mod-export convert")
    chosen = [way for way in grid if fnmatch(way.name, options.only)]
    if not chosen:
        parser.error(f"--only {options.only}: fits none of {', '.join(way.name for way in grid)}")
    if options.steps < 2 or not 0 <= options.seed < SEEDS:
        parser.error(f"--steps, --seed: expected at least 2 steps and a seed below {SEEDS}")
    corpus = read_corpus(options.data, tokenizer_beside(options.model))
    before(options, corpus)
    for number, way in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {run_way(way, options, corpus)}", flush=True)
        render(samples_of(options), options.docs)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

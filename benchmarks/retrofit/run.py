"""Retrofits a dense model in several ways, measures each, and writes its table into docs/training.md: `make retrofit`.

    python -m benchmarks.retrofit.run [--model DIR] [--data PATH] [--results DIR] [--docs DIR] [--steps N] ...

Nothing is downloaded: `--model` is a dense checkpoint on this machine, such as `mod-export convert` writes. A run that
was stopped continues: each way and number of tokens has its own folder, and resumes from its last evaluation. The table
shows all results of the folder.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks.retrofit.render import render
from mod_models import probe
from mod_models.checkpoint import Checkpoint, load_checkpoint
from mod_models.generation_spec import for_generation
from mod_models.train import PRECISIONS, RECOMPUTED, TrainConfig
from mod_models.train.corpus import TOKENIZER, Corpus, read_corpus
from mod_models.train.evaluation import held_out
from mod_models.train.fit import fitted, rows_to_fit
from mod_models.train.losses import LossModule
from mod_models.train.parallel import Workers
from mod_models.train.retrofit import FITTED, LEARNED, layers_of, retrofitted, routed_spec
from mod_models.train.run import train
from mod_models.transformer import Transformer

SPEED = """\
# One engine, one thread, whole rows and one text: what the table's speed-ups are measured with.
buckets = [[1, {seq}]]
targets = ["ort-cpu"]
outputs = "last"

[latency]
min_speedup = 0.0

[generation]
build = "always"
window = {window}
prompts = [{seq}]
batches = [1]
compared_texts = 0
"""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to retrofit: which part of which layers (`{half}` is half of them) routes, at which capacity.

    `parts` is `dense` for the dense model trained as long, and `removed` for the dense model without the blocks that
    `route` names, which every token skips.
    """

    parts: str
    route: str
    capacity: float
    skipped_keys: str = "absent"
    adapter: str = "none"
    routers: str = FITTED

    @property
    def routes(self) -> bool:
        """Whether tokens are routed at all."""
        return self.parts not in ("dense", "removed")

    @property
    def name(self) -> str:
        left = [name for name in (self.skipped_keys, self.adapter, self.routers) if name not in USUAL]
        name = f"{self.parts}-{self.route.replace(':', '-')}-{self.capacity}".replace("-{half}", "")
        return "-".join([name, *left])


USUAL = ("absent", "none", FITTED)
"""Values that are not in the name of a way."""
DENSE = Way("dense", "none", 1.0)
GRID = (
    DENSE,
    Way("removed", "cheapest:3", 0.0),
    Way("block", "cheapest:{half}", 0.75, skipped_keys="kept", adapter="linear"),
    Way("mlp", "cheapest:{half}", 0.5, adapter="linear"),
    Way("removed", "cheapest:5", 0.0),
    Way("block", "cheapest:{half}", 0.5, skipped_keys="kept", adapter="linear"),
    Way("mlp", "cheapest:{half}", 0.5, adapter="linear", routers=LEARNED),
    Way("block", "cheapest:{half}", 0.75, skipped_keys="kept"),
    Way("block", "cheapest:{half}", 0.75, skipped_keys="kept", routers=LEARNED),
    Way("mlp", "cheapest:{half}", 0.25, adapter="linear"),
    Way("attention", "cheapest:{half}", 0.5, skipped_keys="kept"),
    Way("block", "cheapest:{half}", 0.75),
    Way("mlp", "cheapest:{half}", 0.5),
    Way("block", "deepest:{half}", 0.75, skipped_keys="kept", adapter="linear"),
)
"""Ways in the order of their training. Controls, and ways to compare with them, come first, in case the run is stopped.
"""


def config_of(way: Way, given: argparse.Namespace) -> TrainConfig:
    """Returns the settings of a way. Every way has the same budget and the same batches.

    All ways but `DENSE` are distilled from the unchanged dense model. Only a model that routes has predictors to
    calibrate, and only routers that learn begin at capacity 1.
    """
    return TrainConfig(
        steps=given.steps, batch=given.batch, micro_batch=given.micro_batch, seq=given.seq,
        learning_rate=given.learning_rate, router_learning_rate=10 * given.learning_rate, weight_decay=0.0,
        warmup=max(1, given.steps // 20), eval_every=max(1, given.steps // 2), eval_batches=given.eval_batches,
        log_every=max(1, given.steps // 40), recompute=given.recompute, precision=given.precision,
        anneal=0.5 if way.routes and way.routers == LEARNED else 0.0, distill=0.0 if way == DENSE else 1.0,
        calibrate=8 if way.routes else 0, seed=given.seed,
    )  # fmt: skip


def run_way(way: Way, given: argparse.Namespace, corpus: Corpus) -> str:
    """Trains and measures one way, unless that has been done; returns a line to show."""
    folder: Path = given.results / folder_name(way, given)
    done = folder / "result.json"
    if done.exists():
        return f"{folder.name}: done before"
    dense = load_checkpoint(given.model)
    config, removed = config_of(way, given), way.parts == "removed"
    layers: tuple[int, ...] = ()
    if way != DENSE:
        text = way.route.format(half=dense.spec.n_layers // 2).replace("cheapest", str(given.results / "probe.json"))
        layers = layers_of(text, dense.spec.n_layers, "block" if removed else way.parts)
    trained = folder / "trained"
    if not trained.exists():
        initial = started(way, dense, layers, config, corpus)
        teacher = dense if removed else None
        for event in train(initial.spec, config, folder, initial=initial, corpus=corpus, teacher=teacher):
            if event.text:
                print(f"{folder.name}: {event.text}", flush=True)
        trained.touch()
    result = {
        **asdict(way),
        "name": way.name,
        "layers": layers,
        "seed": given.seed,
        "tokens": tokens_of(given),
        **judged(load_checkpoint(folder / "model.pt"), config, corpus, given.window),
        "speed": None if way == DENSE else speed_of(way, folder, given, given.model if removed else None),
    }
    done.write_text(json.dumps(result), encoding="utf-8")
    return f"{folder.name}: {result['whole_rows']['bits_per_byte']:.3f} bits/byte"


def tokens_of(given: argparse.Namespace) -> int:
    """Returns the number of tokens that every way is trained on."""
    return int(given.steps * given.batch * given.seq)


def folder_name(way: Way, given: argparse.Namespace) -> str:
    """Returns the name of the folder of a run."""
    return f"{way.name}-{tokens_of(given)}" + (f"-seed{given.seed}" if given.seed else "")


def started(way: Way, dense: Checkpoint, layers: tuple[int, ...], config: TrainConfig, corpus: Corpus) -> Checkpoint:
    """Returns the weights that a way starts from."""
    if way == DENSE:
        return dense
    if way.parts == "removed":
        return without(dense, layers)
    spec = routed_spec(
        dense.spec, layers, way.capacity, way.parts, "predictor", skipped_keys=way.skipped_keys, adapter=way.adapter,
        routers=way.routers,
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


def without(dense: Checkpoint, layers: Collection[int]) -> Checkpoint:
    """Removes these blocks from a dense model; later ones move up."""
    kept = [layer for layer in range(dense.spec.n_layers) if layer not in layers]
    new_of = {f"layers.{old}.": f"layers.{new}." for new, old in enumerate(kept)}
    weights = {}
    for name, tensor in dense.weights.items():
        prefix = re.match(r"layers\.\d+\.", name)
        if prefix is None:
            weights[name] = tensor
        elif prefix[0] in new_of:
            weights[new_of[prefix[0]] + name.removeprefix(prefix[0])] = tensor
    return Checkpoint(spec=replace(dense.spec, n_layers=len(kept)), weights=weights)


def speed_of(way: Way, folder: Path, given: argparse.Namespace, baseline: Path | None = None) -> dict[str, Any]:
    """Builds the model in `folder` in its own process, and returns the speed-ups of whole rows and of one text from the
    report. A way is timed once: longer training changes no shape, and hardly the share of the tokens that run.

    It is compared with its own dense baseline, or with the dense model `baseline`.
    """
    timed = given.results / f"{way.name}.speed.json"
    if timed.exists():
        return dict(json.loads(timed.read_text(encoding="utf-8")))
    settings = SPEED.format(seq=given.seq, window=given.window)
    (folder / "speed.toml").write_text(settings, encoding="utf-8")
    command = [sys.executable, "-m", "mod_export", "build", "model.pt", "-c", "speed.toml", "-o", "build", "-q"]
    command += [] if baseline is None else ["--baseline", str(baseline.resolve())]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    # Code 4 means that a gate failed. Such a build has a report, which says so.
    if ran.returncode not in (0, 4):
        raise RuntimeError(f"{folder}: {' '.join(command)} ended with {ran.returncode}: {ran.stderr}")
    report = json.loads((folder / "build" / "report.json").read_text(encoding="utf-8"))
    (row,) = report["speedup"]
    (steps,) = report["generation"]["decode"]
    speed = {
        "whole_rows": {name: row[name] for name in ("measured", "ci95", "predicted_flops")},
        "text": {name: steps["compared"][name] for name in ("measured", "ci95")},
        "status": report["verdict"]["status"],
    }
    timed.write_text(json.dumps(speed), encoding="utf-8")
    return speed


def before(given: argparse.Namespace, corpus: Corpus) -> None:
    """Runs the probe and evaluates the unchanged dense model, once for each folder of results."""
    ranking, untouched = given.results / "probe.json", given.results / "untouched.json"
    if not ranking.exists():
        options = ["--seq", str(given.seq), "--batch", "1", "--batches", str(given.probe_rows), "--out", str(ranking)]
        data = ["--data", str(given.data)] if given.data is not None else []
        if probe.main([str(given.model), *options, *data]):
            raise RuntimeError(f"{given.model}: the probe failed")
    if not untouched.exists():
        numbers = numbers_of(load_checkpoint(given.model).module(), config_of(DENSE, given), corpus)
        untouched.write_text(json.dumps(numbers), encoding="utf-8")


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
    options.results.mkdir(parents=True, exist_ok=True)
    tokenizer = options.model / TOKENIZER
    corpus = read_corpus(options.data, tokenizer if tokenizer.is_file() else None)
    before(options, corpus)
    about = {
        "model": options.model.name,
        "text": corpus.name if options.data is None else options.data.name,
        "names": [way.name for way in grid],
        "seq": options.seq,
        "window": options.window,
    }
    for number, way in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {run_way(way, options, corpus)}", flush=True)
        render(options.results, options.docs, about)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Trains a dense and a routed model from scratch for the same number of training FLOPs: what `make pair` runs.

    python -m benchmarks.pair.run [--tokens N] [--width D] [--layers N] [--vocabulary V] [--seeds N] ...

The models of `make study` stop long before they are fully trained. These two read about ten tokens for each parameter,
in a vocabulary of their own. The text is the Python source of the standard library and of packages that every developer
of this project has installed, so nothing is downloaded. A run that was stopped continues, and a run whose result is
among the samples is not repeated, so several machines can share the work.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import shutil
import sysconfig
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer

from benchmarks.marked_part import replace_part
from benchmarks.study.figures import draw_pair
from benchmarks.study.models import flops_of_row
from mod_models.checkpoint import Checkpoint, read_plain
from mod_models.spec import ModelSpec, RoutingSpec
from mod_models.train import TrainConfig
from mod_models.train.corpus import END_OF_TEXT, SKIPPED, TOKENIZER, Corpus, read_corpus
from mod_models.train.evaluation import evaluate
from mod_models.train.run import train
from mod_models.transformer import Transformer

PACKAGES = ("torch", "transformers", "sympy", "scipy", "numpy")
"""Installed packages whose sources are the text, beside the standard library's. All have permissive licences."""
TOKENIZED = 2**24
"""Bytes of text from which the vocabulary is made."""
NAMES = ("dense", "MoD 12.5 %")
HELD_OUT_BATCHES = 64


@dataclass(frozen=True, slots=True)
class Pair:
    """Two models and their budget.

    Attributes:
        dense: spec of the dense model.
        mod: the same model, with every other block routed.
        flops: training FLOPs of each, what the dense model needs for its tokens.
        seq: tokens in a row.
        batch: rows in a step.
        learning_rate: peak rate of AdamW.
        precision: dtype of the matrix products in training; the trained models are evaluated in float32.
    """

    dense: ModelSpec
    mod: ModelSpec
    flops: float
    seq: int
    batch: int
    learning_rate: float
    precision: str

    def to_dict(self) -> dict[str, Any]:
        """Returns the pair as plain data, as it stands in a sample."""
        plain = {**asdict(self), "dense": self.dense.to_dict(), "mod": self.mod.to_dict()}
        as_stored: dict[str, Any] = json.loads(json.dumps(plain))
        return as_stored

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Pair:
        """Reads a pair from a sample. Specs may lack what was added to specs since the sample was written."""
        return cls(**{**plain, **{name: ModelSpec.from_dict(plain[name]) for name in ("dense", "mod")}})

    def spec(self, name: str) -> ModelSpec:
        """Returns the spec of one of NAMES."""
        return dict(zip(NAMES, (self.dense, self.mod), strict=True))[name]

    def config(self, name: str, seed: int) -> TrainConfig:
        """Returns the settings of a run, with as many steps as its FLOPs pay for."""
        steps = max(2, round(self.flops / (self.batch * flops_of_row(self.spec(name), training=True, seq=self.seq))))
        return TrainConfig(
            steps=steps, batch=self.batch, seq=self.seq, learning_rate=self.learning_rate, seed=seed,
            precision=self.precision, warmup=max(1, steps // 40), eval_every=max(1, steps // 16),
            log_every=max(1, steps // 200),
        )  # fmt: skip


def pair_of(given: argparse.Namespace) -> Pair:
    """Returns the pair that the options describe."""
    heads = given.width // 64
    dense = ModelSpec(
        vocab_size=given.vocabulary, d_model=given.width, n_layers=given.layers, n_heads=heads,
        n_kv_heads=max(1, heads // 3), d_head=64, d_ff=-(-given.width * 8 // 3 // 32) * 32, max_positions=given.seq,
    )  # fmt: skip
    mod = replace(dense, routing=RoutingSpec(predictor_hidden=given.width // 4))
    flops = given.tokens / given.seq * flops_of_row(dense, training=True, seq=given.seq)
    return Pair(dense, mod, flops, given.seq, given.batch, given.learning_rate, given.precision)


def gather(text: Path) -> None:
    """Copies the sources to the folder `text`, once.

    Raises:
        FileNotFoundError: a package is not installed.
    """
    if text.exists():
        return
    partial = text.with_name(f"{text.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    paths = sysconfig.get_paths()
    roots = [Path(paths["stdlib"]), *(Path(paths["purelib"]) / name for name in PACKAGES)]
    for root in roots:
        if not root.is_dir():
            raise FileNotFoundError(f"{root}: this package is part of the text, and is not installed; make install")
        for source in sorted(root.rglob("*.py")):
            relative = source.relative_to(root)
            if SKIPPED.isdisjoint(relative.parts):
                target = partial / root.name / relative
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
    partial.rename(text)


def make_tokenizer(text: Path, vocabulary: int, path: Path) -> None:
    """Makes a byte-level BPE vocabulary from every n-th file of the text, once."""
    if path.exists():
        return
    files = sorted(text.rglob("*.py"))
    size = sum(file.stat().st_size for file in files)
    tokenizer = ByteLevelBPETokenizer()
    sample = [str(file) for file in files[:: max(1, size // TOKENIZED)]]
    tokenizer.train(sample, vocab_size=vocabulary, special_tokens=[END_OF_TEXT[0]], show_progress=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))


def run_one(pair: Pair, results: Path, samples: Path, name: str, seed: int, corpus: Corpus | None = None) -> str:
    """Trains and measures one model on one thread, unless its result is among the samples; returns a line to show.

    Raises:
        ValueError: the result is that of another pair, or the samples come from another text.
    """
    torch.set_num_threads(1)
    stem = f"{'dense' if name == 'dense' else 'mod'}-seed{seed}"
    folder, sample = results / stem, samples / f"{stem}.json"
    if sample.exists():
        if Pair.from_dict(json.loads(sample.read_text(encoding="utf-8"))["pair"]) != pair:
            raise ValueError(f"{sample}: was measured with other options; name another folder with --samples")
        return f"{name}, seed {seed}: done before"
    corpus = corpus or read_corpus(results / "text", results / TOKENIZER)
    for other in samples.glob("*.json"):
        if json.loads(other.read_text(encoding="utf-8"))["text"] != corpus.fingerprint:
            raise ValueError(f"{other}: was trained on the sources of another Python or of other packages")
    spec, config = pair.spec(name), pair.config(name, seed)
    for _ in train(spec, config, folder, corpus=corpus):
        pass
    result = {
        "name": name,
        "seed": seed,
        "steps": config.steps,
        "tokens": config.steps * config.batch * config.seq,
        "parameters": sum(parameter.numel() for parameter in Transformer(spec).parameters()),
        "forward_flops": flops_of_row(spec, training=False, seq=pair.seq),
        "curve": _curve(folder / "log.csv", config.steps),
        **_measured(folder, spec, config, corpus),
        "pair": pair.to_dict(),
        "text": corpus.fingerprint,
    }
    samples.mkdir(parents=True, exist_ok=True)
    sample.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return f"{name}, seed {seed}: {result['bits_per_byte']:.4f} bits/byte"


def _measured(folder: Path, spec: ModelSpec, config: TrainConfig, corpus: Corpus) -> dict[str, Any]:
    """Returns bits per byte as trained, and for a model with predictors also when they decide, as in generation."""
    config = replace(config, eval_batches=HELD_OUT_BATCHES, precision="float32")
    weights = read_plain(folder / "state.pt")["model"]
    metrics = evaluate(Checkpoint(spec=spec, weights=weights).module(), config, corpus)
    measured = {"bits_per_byte": metrics["bits_per_byte"], "perplexity": metrics["perplexity"]}
    if spec.routing is not None:
        causal = replace(spec, routing=replace(spec.routing, selection="predictor"))
        decided = evaluate(Checkpoint(spec=causal, weights=weights).module(), config, corpus)
        accuracies = list(metrics["predictor_accuracy"].values())  # type: ignore[attr-defined]  # Site -> share.
        measured["predictor_bits_per_byte"] = decided["bits_per_byte"]
        measured["predictor_accuracy"] = sum(accuracies) / len(accuracies)
    return measured


def _curve(log: Path, steps: int) -> list[tuple[float, float]]:
    """Returns (share of the budget, held-out bits per byte) of every evaluation."""
    with log.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    column = "held_out_bits_per_byte"
    return [(int(row["step"]) / steps, float(row[column])) for row in rows if row.get(column)]


def render(pair: Pair, samples: Path, docs: Path) -> None:
    """Replaces the part of `docs`/training.md between the marks, and the figure beside it."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in samples.glob("*.json")]
    runs.sort(key=lambda run: (run["seed"], NAMES.index(run["name"])))
    columns = (
        "model", "seed", "parameters", "tokens", "forward FLOPs", "bits per byte", "perplexity of a token",
        "predictors decide", "predictor accuracy",
    )  # fmt: skip
    lines = [
        f"{pair.flops / 1e12:.0f} TFLOP for each model, {pair.dense.n_layers} blocks of width {pair.dense.d_model},",
        f"a byte-level BPE vocabulary of {pair.dense.vocab_size:,}, {pair.batch} rows of {pair.seq} tokens in a step,",
        f"AdamW at {pair.learning_rate:g} with warm-up and cosine, {pair.precision}. The text is the source of",
        f"Python's library, {', '.join(PACKAGES)}. Bits per byte are held-out, over {HELD_OUT_BATCHES} batches, in",
        "float32.",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    dense = flops_of_row(pair.dense, training=False, seq=pair.seq)
    for run in runs:
        cells = [
            run["name"], str(run["seed"]), f"{run['parameters'] / 1e6:.2f} M", f"{run['tokens'] / 1e6:.1f} M",
            f"{run['forward_flops'] / dense:.2f}", f"{run['bits_per_byte']:.4f}", f"{run['perplexity']:.3f}",
            f"{run['predictor_bits_per_byte']:.4f}" if "predictor_bits_per_byte" in run else "",
            f"{run['predictor_accuracy']:.1%}" if "predictor_accuracy" in run else "",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "![Held-out bits per byte against the share of the training FLOPs](figures/pair.svg)"]
    (docs / "figures").mkdir(parents=True, exist_ok=True)
    draw_pair(runs, docs / "figures" / "pair.svg")
    replace_part(docs / "training.md", "make pair", lines)


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the options of the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--results", type=Path, default=Path("build/pair"))
    add("--samples", type=Path, default=Path("docs/pair"), help="folder of results, which are kept (%(default)s)")
    add("--docs", type=Path, default=Path("docs"))
    add("--tokens", type=float, default=30e6, help="that the dense model sees; the other gets its FLOPs (%(default)g)")
    add("--width", type=int, default=192, help="a multiple of 64 (%(default)s)")
    add("--layers", type=int, default=8)
    add("--vocabulary", type=int, default=2048)
    add("--seq", type=int, default=256)
    add("--batch", type=int, default=8)
    add("--learning-rate", type=float, default=2e-3)
    add("--precision", default="bfloat16")
    add("--seeds", type=int, default=2)
    add("--workers", type=int, default=2, help="models that are trained at once, each on one thread (%(default)s)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    pair = pair_of(options)
    gather(options.results / "text")
    make_tokenizer(options.results / "text", options.vocabulary, options.results / TOKENIZER)
    jobs = [(name, seed) for seed in range(options.seeds) for name in NAMES]
    with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(run_one, pair, options.results, options.samples, name, seed) for name, seed in jobs]
        for number, future in enumerate(as_completed(running), 1):
            print(f"[{number}/{len(jobs)}] {future.result()}", flush=True)
            render(pair, options.samples, options.docs)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

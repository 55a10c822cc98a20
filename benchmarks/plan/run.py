"""Compares what `mod-export plan` predicts with what a build measures (`make plan`).

    make plan                            # a dense model of 40 M parameters, routed in several ways; half an hour
    make plan ARGS="--size S --way block:0.5"

A dense model with initial weights is routed as `plan` proposes, with predictors that are set so that they select as
many tokens as the capacity says. Each way is built for ONNX Runtime in float32 on one thread, in a process of its own,
and measured against its dense baseline: prompts of 512 tokens, and steps that write 1 and 8 texts. Prints a table of
predictions and measurements, and writes it to OUT.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch

from benchmarks.rivals.cases import SIZES
from mod_export.errors import GATE_FAILED
from mod_export.measure.gain import Gain, Machine, gain_of, machine_of
from mod_export.model.transformer import TransformerModel
from mod_export.report.tables import table_lines
from mod_export.rows.report import BuildReport, report_from_json
from mod_export.types import Bucket
from mod_models.checkpoint import Checkpoint, random_checkpoint, save_checkpoint
from mod_models.spec import ModelSpec
from mod_models.train.retrofit import calibrate, layers_of, retrofitted, routed_spec

PROMPT, WINDOW = 512, 1024
TEXTS = (1, 8)
VOCABULARY = 8192
ROUTE = "every:2"
CONFIG = f"""
targets = ["ort-cpu"]
buckets = [[1, {PROMPT}]]
outputs = "last"
[latency]
min_speedup = 0.0
[generation]
window = {WINDOW}
batches = {list(TEXTS)}
prompts = [128]
compared_texts = 0
"""


@dataclass(frozen=True)
class Way:
    """A way to route: the routed part, the capacity, and whether skipped tokens keep their keys and values."""

    parts: str
    capacity: float
    keys: str = "absent"

    def __str__(self) -> str:
        return f"{self.parts}:{self.capacity:g}" + (":kept" if self.keys == "kept" else "")

    @classmethod
    def of(cls, text: str) -> Way:
        """Parses `block:0.125`, `mlp:0.5` or `block:0.5:kept`."""
        parts, capacity, *keys = text.split(":")
        return cls(parts, float(capacity), *keys)


WAYS = ("block:0.125", "block:0.25", "block:0.5", "block:0.5:kept", "mlp:0.25", "block:0.75")


@dataclass(frozen=True)
class Comparison:
    """A prediction and what was measured.

    Attributes:
        what: the prompt, or the number of texts.
        predicted: dense time / routed time.
        measured: the same, measured, with its 95 % interval.
        selected: share of the tokens that ran in the routed parts.
    """

    what: str
    predicted: float
    measured: tuple[float, float, float]
    selected: float

    @property
    def cells(self) -> list[str]:
        """The cells of a row."""
        ratio, low, high = self.measured
        return [self.what, f"{self.predicted:.2f}x", f"{ratio:.2f}x [{low:.2f}, {high:.2f}]", f"{self.selected:.0%}",
                f"{(ratio - 1) / (self.predicted - 1):.0%}" if self.predicted > 1 else "-"]  # fmt: skip


HEAD = ("routing", "what", "predicted", "measured", "selected", "of the gain")


def routed(dense: Checkpoint, way: Way) -> Checkpoint:
    """Returns the routed model, whose predictors select about as many tokens as the capacity says."""
    layers = layers_of(ROUTE, dense.spec.n_layers, way.parts)
    spec = routed_spec(dense.spec, layers, way.capacity, way.parts, "predictor", skipped_keys=way.keys)
    module = retrofitted(dense, spec, 0).module()
    ids = np.random.default_rng(0).integers(0, dense.spec.vocab_size, (4, 1, WINDOW))
    calibrate(module, torch.from_numpy(ids))
    return Checkpoint(spec=spec, weights={name: tensor.clone() for name, tensor in module.state_dict().items()})


def built(checkpoint: Checkpoint, folder: Path) -> BuildReport:
    """Builds and measures a model in a process of its own.

    Raises:
        RuntimeError: the build failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_checkpoint(folder / "model.pt", checkpoint)
    (folder / "build.toml").write_text(CONFIG, encoding="utf-8")
    command = ["build", folder / "model.pt", "-c", folder / "build.toml", "-o", folder / "build", "-q"]
    done = subprocess.run([sys.executable, "-m", "mod_export", *command], capture_output=True, text=True)
    # Parity of texts of initial weights is of no interest here; what was built is measured all the same.
    if done.returncode not in (0, GATE_FAILED):
        raise RuntimeError(f"{folder}: the build ended with {done.returncode}\n{done.stderr[-2000:]}")
    return report_from_json((folder / "build/report.json").read_text(encoding="utf-8"))


def compared(report: BuildReport, gain: Gain, capacity: float) -> list[Comparison]:
    """Returns the comparisons of one way."""
    (whole,) = report.speedup
    found = [Comparison(f"prompt of {PROMPT}", gain.prefill, (whole.measured, *whole.ci95), capacity)]
    for row in report.generation.decode:
        assert row.compared is not None
        share = float(np.mean(list(row.selected.values())))
        texts = Bucket.named(row.bucket).batch
        what = "1 text" if texts == 1 else f"{texts} texts"
        found.append(Comparison(what, gain.texts[texts], (row.compared.measured, *row.compared.ci95), share))
    return found


@click.command()
@click.option("--size", type=click.Choice(list(SIZES)), default="M", show_default=True)
@click.option("--way", "ways", multiple=True, help=f"PART:CAPACITY[:kept]; default: {', '.join(WAYS)}.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/plan"), show_default=True)
def main(size: str, ways: Sequence[str], out: Path) -> None:
    """Compare predictions with measurements."""
    dense = random_checkpoint(ModelSpec(vocab_size=VOCABULARY, max_positions=WINDOW, **SIZES[size]), 0)
    machine: Machine = machine_of("this", None, None, None)
    print(f"{machine.name}: {machine.flops / 1e9:,.0f} GFLOP/s, {machine.bandwidth / 1e9:.1f} GB/s", flush=True)
    cells = []
    for way in map(Way.of, ways or WAYS):
        checkpoint = routed(dense, way)
        model = TransformerModel(checkpoint)
        baseline = model.dense()
        assert baseline is not None
        # Steps are timed at positions spread over the whole window, so the cache holds half of it on average.
        gain = gain_of(model, baseline, machine, 1, PROMPT, WINDOW // 2, TEXTS)
        rows = compared(built(checkpoint, out / str(way).replace(":", "-")), gain, way.capacity)
        cells += [[str(way), *row.cells] for row in rows]
        print("\n".join(table_lines(HEAD, cells[-len(rows) :], numbers_from=2)), flush=True)
    (out / "plan.txt").write_text("\n".join(table_lines(HEAD, cells, numbers_from=2)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

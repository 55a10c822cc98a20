"""Trains every model of the study, measures it, and writes docs/training.md: what `make study` runs.

    python -m benchmarks.study.run [--results DIR] [--docs DIR] [--budget FLOPS] [--workers N]

A run that was stopped continues: each model has its own folder, and resumes from its last evaluation.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from benchmarks.study.measure import measured
from benchmarks.study.models import BUDGET, SEEDS, STUDIED, Studied, config_of, flops_of_row
from benchmarks.study.render import render
from benchmarks.study.step_times import step_times
from mod_models.train.run import train


def folder_of(results: Path, studied: Studied, seed: int) -> Path:
    """Folder in which one run keeps its state."""
    name = "".join(letter if letter.isalnum() else "-" for letter in studied.name)
    return results / f"{name}-seed{seed}"


def train_one(results: Path, name: str, seed: int, budget: float) -> str:
    """Trains and measures one model on one thread, unless that has been done; returns a line to show."""
    torch.set_num_threads(1)
    studied = next(studied for studied in STUDIED if studied.name == name)
    folder = folder_of(results, studied, seed)
    done = folder / "result.json"
    if done.exists():
        return f"{name}, seed {seed}: done before"
    config = config_of(studied, seed, budget)
    begin = time.monotonic()
    for _ in train(studied.spec, config, folder):
        pass
    result: dict[str, Any] = {
        "name": name,
        "seed": seed,
        "steps": config.steps,
        "forward_flops": flops_of_row(studied.spec, training=False),
        "training_flops": config.steps * config.batch * flops_of_row(studied.spec, training=True),
        "curve": _curve(folder / "log.csv"),
        **measured(folder, studied.spec),
    }
    done.write_text(json.dumps(result), encoding="utf-8")
    return f"{name}, seed {seed}: {result['bits_per_byte']:.3f} bits/byte, {time.monotonic() - begin:.0f} s"


def _curve(log: Path) -> list[dict[str, float]]:
    """(step, held-out bits per byte) of every evaluation."""
    with log.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    column = "held_out_bits_per_byte"
    return [{"step": int(row["step"]), "bits_per_byte": float(row[column])} for row in rows if row.get(column)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path("build/study"))
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    parser.add_argument("--budget", type=float, default=BUDGET, help="training FLOPs of each model (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="models that are trained at once (%(default)s)")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    # The first seed of all models comes first, so that a stopped study has every model once.
    jobs = [(studied.name, seed) for seed in SEEDS for studied in STUDIED]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=context) as pool:
        running = [pool.submit(train_one, options.results, name, seed, options.budget) for name, seed in jobs]
        for number, future in enumerate(as_completed(running), 1):
            print(f"[{number}/{len(jobs)}] {future.result()}", flush=True)
    times = options.results / "step_times.json"
    if not times.exists():
        times.write_text(json.dumps(step_times()), encoding="utf-8")
    render(options.results, options.docs)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

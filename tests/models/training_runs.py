"""A tiny training run, and the files in its folder."""

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tiny_models import make_spec

from mod_models.train import TrainConfig
from mod_models.train.log import Event
from mod_models.train.run import train

SPEC = make_spec(vocab_size=256, d_model=16, predictor_hidden=4, layers=(0, 2), capacity=0.25, max_positions=32)
CONFIG = TrainConfig(steps=12, batch=2, seq=16, warmup=3, eval_every=5, eval_batches=2, log_every=2)


def lines(events: Iterable[Event]) -> list[str]:
    """Lines of progress."""
    return [event.text for event in events if event.text]


def finish(folder: Path, config: TrainConfig = CONFIG, **options: Any) -> list[str]:
    return lines(train(SPEC, config, folder, **options))


def state(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "state.pt", weights_only=True)


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "log.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def evaluations(folder: Path) -> list[dict[str, str]]:
    return [row for row in rows(folder) if row["held_out_bits_per_byte"]]

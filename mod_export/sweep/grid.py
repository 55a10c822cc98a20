"""Turns the axes of a sweep into the cells of its grid, and checks all of them before the first is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

from mod_export.config import BuildConfig
from mod_export.engines import ENGINES
from mod_export.errors import CheckpointError, ConfigError, TargetError
from mod_export.model.model import Model, token_ids
from mod_export.pipeline.plan import check_names
from mod_export.types import Bucket

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The axes as typed. Each string may hold several values separated by commas. An empty axis means the default."""

    capacities: Sequence[str] = ()
    seqs: Sequence[str] = ()
    batches: Sequence[str] = ()
    targets: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One build of the grid. If `capacity` is None, the checkpoint's own schedule of capacities per layer is used."""

    capacity: float | None
    bucket: Bucket
    target: str

    @property
    def name(self) -> str:
        """Name in file names, such as c0.125-b1s512-ort-cpu."""
        capacity = "own" if self.capacity is None else f"c{float(self.capacity)!r}".removesuffix(".0")
        return f"{capacity}-{self.bucket.name}-{self.target}"


def cells_of(model: Model, config: BuildConfig, axes: Axes, *, here: bool) -> tuple[Cell, ...]:
    """Returns every cell, ordered by target, batch, length and capacity. `config` and `model` fill empty axes.

    With `here`, the cells run on this machine, which must support the targets.

    Raises:
        CheckpointError: the model has no routed layers, or no dense baseline.
        ConfigError: values are not numbers, or the model does not accept them; it lists all of them.
        TargetError: a target is unknown, or cannot be measured on this machine.
    """
    if not (model.routes_depth and model.has_capacity):
        raise CheckpointError(f"{model.name}: no layer is routed by a capacity that could be swept")
    if model.dense() is None:
        raise CheckpointError(
            f"{model.name}: has no dense baseline of its own, beside which every cell of a sweep is timed"
        )
    problems: list[str] = []
    capacities = _numbers("--capacity", axes.capacities, float, "a number above 0", problems)
    seqs = _numbers("--seq", axes.seqs, int, "a whole number of at least 1", problems)
    batches = _numbers("--batch", axes.batches, int, "a whole number of at least 1", problems)
    longest = token_ids(model).max_positions
    problems += [f"--seq {seq}: longer than the model's {longest} positions" for seq in seqs if seq > longest]
    for capacity in capacities:
        try:
            model.with_capacity(capacity)
        except ValueError as error:
            problems.append(f"--capacity {capacity:g}: {error}")
    if problems:
        raise ConfigError(problems)
    model_capacity: list[float | None] = [model.capacity]
    targets = _targets(axes.targets, config, here=here)
    return tuple(
        Cell(capacity=capacity, bucket=bucket, target=target)
        for target, bucket, capacity in product(
            targets, _buckets(config, longest, batches, seqs), capacities or model_capacity
        )
    )


def _numbers(
    option: str, texts: Sequence[str], kind: Callable[[str], Number], expected: str, problems: list[str]
) -> list[Number]:
    numbers = set()
    for text in _split(texts):
        try:
            number = kind(text)
        except ValueError:
            number = kind("0")
        # Not "<= 0": this also refuses NaN.
        if not number > 0:
            problems.append(f"{option}: expected {expected}, got {text!r}")
        numbers.add(number)
    return [] if problems else sorted(numbers)


def _split(texts: Sequence[str]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def _buckets(config: BuildConfig, longest: int, batches: Sequence[int], seqs: Sequence[int]) -> list[Bucket]:
    """The buckets of the configuration, or the product of batches and lengths if an axis is given."""
    configured = config.bucket_list(longest)
    if not batches and not seqs:
        return list(configured)
    crossed = product(batches or {bucket.batch for bucket in configured}, seqs or {bucket.seq for bucket in configured})
    return sorted(Bucket(batch, seq) for batch, seq in crossed)


def _targets(requested: Sequence[str], config: BuildConfig, *, here: bool) -> list[str]:
    wanted = list(dict.fromkeys(_split(requested))) or list(config.targets)
    check_names(wanted)
    if wanted and not here:
        return wanted
    availability = {name: ENGINES[name].availability() for name in wanted or ENGINES}
    able = [name for name, status in availability.items() if status.builds and status.runs]
    refused = [f"{name}: {status.reason}" for name, status in availability.items() if name not in able]
    if not able or (wanted and refused):
        raise TargetError("a sweep builds and measures, which cannot be done here for " + "; ".join(refused))
    return wanted or able[:1]

"""From the axes of a sweep to the cells of its grid, all of them checked before the first one is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

from mod_export.config import BuildConfig
from mod_export.engines import ENGINES
from mod_export.errors import CheckpointError, ConfigError, TargetError
from mod_export.model.model import Model, token_ids
from mod_export.model.protocol import AdjustableCapacity
from mod_export.pipeline.plan import check_names
from mod_export.types import Bucket

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The axes as they were typed: every text may hold several values with commas between. Empty: the default."""

    capacities: Sequence[str] = ()
    seqs: Sequence[str] = ()
    batches: Sequence[str] = ()
    targets: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One build of the grid. `capacity` is None where the checkpoint's own per-layer schedule stays."""

    capacity: float | None
    bucket: Bucket
    target: str

    @property
    def name(self) -> str:
        """As it stands in file names: c0.125-b1s512-ort-cpu."""
        capacity = "own" if self.capacity is None else f"c{float(self.capacity)!r}".removesuffix(".0")
        return f"{capacity}-{self.bucket.name}-{self.target}"


def cells_of(model: Model, config: BuildConfig, axes: Axes, *, here: bool) -> tuple[Cell, ...]:
    """Every cell, by target, batch, length and capacity; `config` and `model` give what `axes` leave open.

    `here` says that the cells run on this machine, so that its targets decide.

    Raises:
        CheckpointError: a model without routed layers, or without a dense baseline.
        ConfigError: values that are no numbers, or that the model cannot take, all of them at once.
        TargetError: an unknown target, or one that cannot be measured on this machine.
    """
    if not (model.routes_depth and isinstance(model.loaded, AdjustableCapacity)):
        raise CheckpointError(f"{model.name}: no layer is routed by a capacity that could be swept")
    if "dense" not in model.kinds:
        raise CheckpointError(
            f"{model.name}: has no dense baseline of its own, beside which every cell of a sweep is timed"
        )
    problems: list[str] = []
    capacities = _numbers("--capacity", axes.capacities, float, "a number above 0", problems)
    seqs = _numbers("--seq", axes.seqs, int, "a whole number of at least 1", problems)
    batches = _numbers("--batch", axes.batches, int, "a whole number of at least 1", problems)
    longest = token_ids(model.loaded).max_positions
    problems += [f"--seq {seq}: longer than the model's {longest} positions" for seq in seqs if seq > longest]
    for capacity in capacities:
        try:
            model.loaded.with_capacity(capacity)
        except ValueError as error:
            problems.append(f"--capacity {capacity:g}: {error}")
    if problems:
        raise ConfigError(problems)
    own: list[float | None] = [model.capacity]
    targets = _targets(axes.targets, config, here=here)
    return tuple(
        Cell(capacity=capacity, bucket=bucket, target=target)
        for target, bucket, capacity in product(targets, _buckets(config, longest, batches, seqs), capacities or own)
    )


def _numbers(
    option: str, texts: Sequence[str], kind: Callable[[str], Number], expected: str, problems: list[str]
) -> list[Number]:
    found = set()
    for text in _split(texts):
        try:
            number = kind(text)
        except ValueError:
            number = kind("0")
        # Not "<= 0": NaN is no number of tokens either.
        if not number > 0:
            problems.append(f"{option}: expected {expected}, got {text!r}")
        found.add(number)
    return [] if problems else sorted(found)


def _split(texts: Sequence[str]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def _buckets(config: BuildConfig, longest: int, batches: Sequence[int], seqs: Sequence[int]) -> list[Bucket]:
    """The configuration's buckets as they are, or crossed with the axis that was given."""
    own = config.bucket_list(longest)
    if not batches and not seqs:
        return list(own)
    crossed = product(batches or {bucket.batch for bucket in own}, seqs or {bucket.seq for bucket in own})
    return sorted(Bucket(batch, seq) for batch, seq in crossed)


def _targets(requested: Sequence[str], config: BuildConfig, *, here: bool) -> list[str]:
    wanted = list(dict.fromkeys(_split(requested))) or list(config.targets)
    check_names(wanted)
    if wanted and not here:
        return wanted
    found = {name: ENGINES[name].availability() for name in wanted or ENGINES}
    able = [name for name, one in found.items() if one.builds and one.runs]
    refused = [f"{name}: {one.reason}" for name, one in found.items() if name not in able]
    if not able or (wanted and refused):
        raise TargetError("a sweep builds and measures, which cannot be done here for " + "; ".join(refused))
    return wanted or able[:1]

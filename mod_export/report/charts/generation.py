"""Writing text: milliseconds of a step beside those that memory takes for its bytes, and who ran in which layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mod_export.artifacts import ModelKind, is_expert
from mod_export.report.charts.axis import Tick, length_axis
from mod_export.report.generation_entries import DecodeEntry, GenerationEntry
from mod_export.report.generation_summary import Steps

__all__ = ["LayerBar", "LayersRan", "StepBar", "StepChart", "layers_ran", "step_charts"]

CLOCK_MS = 1e-6
MODELS: tuple[ModelKind, ...] = ("dense", "mod")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBar:
    """One model: where its bar ends, and where memory would be done; None where there is no number to draw."""

    model: ModelKind
    ms: float
    bound_ms: float | None
    end: float | None
    bound: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChart:
    """One decode bucket, the dense model first, on an axis that starts at 0."""

    steps: Steps
    row: DecodeEntry
    bars: tuple[StepBar, ...]
    ticks: tuple[Tick, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBar:
    """One routed layer: shares of the tokens in percent, and their places.

    `lost` is the width of those that chose to run and found no place, behind those that ran; `room` is where all places
    of a text would be taken.
    """

    site: str
    ran_percent: float
    overflow: int
    end: float | None
    lost: float
    room: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersRan:
    """Held-out text read one token at a time, one bar for each routed layer."""

    bars: tuple[LayerBar, ...]
    ticks: tuple[Tick, ...]


def step_charts(found: Sequence[Steps]) -> tuple[StepChart, ...]:
    """One for each decode bucket that was timed."""
    return tuple(_step_chart(steps, steps.row) for steps in found if steps.row is not None)


def _step_chart(steps: Steps, row: DecodeEntry) -> StepChart:
    bound_ms: dict[ModelKind, float] = row.bound_ms or {}
    axis = length_axis([*row.ms.values(), *bound_ms.values()], smallest=CLOCK_MS)
    bars = tuple(
        StepBar(
            model=model,
            ms=row.ms[model],
            bound_ms=bound_ms.get(model),
            end=axis.place(row.ms[model]),
            bound=axis.place(bound_ms.get(model)),
        )
        for model in MODELS
    )
    return StepChart(steps=steps, row=row, bars=bars, ticks=axis.ticks)


def layers_ran(found: GenerationEntry) -> LayersRan | None:
    """None where no text was read, or nothing is routed. Experts are left out."""
    quality, places = found.quality, found.capacity or {}
    sites = [site for site in (quality.ran if quality else ()) if not is_expert(site)]
    if quality is None or not sites:
        return None
    room = {site: 100 * places[site] / quality.window for site in sites if site in places}
    ran = {site: 100 * quality.ran[site] for site in sites}
    wanted = {site: 100 * quality.wanted[site] for site in sites}
    axis = length_axis([*ran.values(), *wanted.values(), *room.values()], smallest=1.0)
    bars = tuple(
        LayerBar(
            site=site,
            ran_percent=ran[site],
            overflow=quality.overflow[site],
            end=axis.place(ran[site]),
            lost=max(0.0, (axis.place(wanted[site]) or 0.0) - (axis.place(ran[site]) or 0.0)),
            room=axis.place(room.get(site)),
        )
        for site in sites
    )
    return LayersRan(bars=bars, ticks=axis.ticks)

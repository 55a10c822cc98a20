"""Parity on logarithmic axes: errors between noise and gate, and for each layer flips between bound and margin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mod_export.report.charts.axis import Tick, log_axis
from mod_export.report.parity_entries import LayerAgreement, ParityEntry
from mod_export.report.summary import allowed_error

__all__ = ["ErrorChart", "ErrorMark", "LayerMark", "LayersChart", "error_chart", "layers_chart"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorMark:
    """The largest error of one engine's logits; None where there is no number that can be drawn."""

    row: ParityEntry
    at: float | None
    mean: float | None
    noise: float | None
    gate: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorChart:
    """All engines on one axis."""

    marks: tuple[ErrorMark, ...]
    ticks: tuple[Tick, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMark:
    """One routed layer: what counts as a near-tie, the worst flip, and the smallest margin."""

    layer: LayerAgreement
    bound: float | None
    flip: float | None
    margin: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersChart:
    """The routed layers of one engine on one axis. Without `ticks` there is nothing to draw."""

    row: ParityEntry
    marks: tuple[LayerMark, ...]
    ticks: tuple[Tick, ...]


def error_chart(rows: Sequence[ParityEntry]) -> ErrorChart:
    """Largest and mean error, the reference's own rounding, and the gate."""
    numbers = [n for row in rows for n in (row.error.max_abs, row.error.mean_abs, row.noise, allowed_error(row))]
    axis = log_axis(numbers)
    marks = tuple(
        ErrorMark(
            row=row,
            at=axis.place(row.error.max_abs),
            mean=axis.place(row.error.mean_abs),
            noise=axis.place(row.noise),
            gate=axis.place(allowed_error(row)),
        )
        for row in rows
    )
    return ErrorChart(marks=marks, ticks=axis.ticks)


def layers_chart(row: ParityEntry) -> LayersChart:
    """Right of the bound a flip is a fault, left of it a near-tie; a margin right of the bound cannot flip at all."""
    layers = row.routing.layers
    numbers = [n for layer in layers for n in (layer.score_bound, layer.worst_flip, layer.min_margin)]
    axis = log_axis(numbers)
    marks = tuple(
        LayerMark(
            layer=layer,
            bound=axis.place(layer.score_bound),
            flip=axis.place(layer.worst_flip),
            margin=axis.place(layer.min_margin),
        )
        for layer in layers
    )
    drawn = any(place is not None for mark in marks for place in (mark.bound, mark.flip, mark.margin))
    return LayersChart(row=row, marks=marks, ticks=axis.ticks if drawn else ())

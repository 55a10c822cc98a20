"""Charts of cost: FLOPs by part, time by part, and the roofline from which time is predicted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from mod_export.measure.profile import Gap, by_engine, gap_of
from mod_export.report.charts import (
    CLOCK_MS,
    MODELS,
    Axis,
    Lane,
    axis_from_zero,
    axis_of_logarithm,
    dot,
    html,
    lanes_chart,
    line,
    name_of,
    part_class,
    part_text,
    plot,
    stack,
)
from mod_export.report.wording import (
    flops_text,
    ms_text,
    threads_text,
)
from mod_export.rows.cost import CostRow, PartRow, Roofline
from mod_export.types import ModelKind, Setting


def flops_figures(rows: Sequence[CostRow]) -> dict[str, Markup]:
    """Returns bucket -> chart of FLOPs by part, the dense model first, on an axis that starts at 0."""
    buckets = dict.fromkeys(row.bucket for row in rows)
    return {bucket: _flops_figure([row for row in rows if row.bucket == bucket]) for bucket in buckets}


def _flops_figure(rows: Iterable[CostRow]) -> Markup:
    ordered = sorted(rows, key=lambda row: MODELS.index(row.model))
    most = max(1, *(row.flops for row in ordered))
    axis = Axis(low=0, high=most, ticks=(), scale=lambda flops: 100 * flops / most)
    return lanes_chart(
        (
            Lane(
                name=html("{} <b>{}</b>", name_of(row.model), _flops_of(row)),
                told=f"{name_of(row.model)}: {_flops_of(row)}; "
                + ", ".join(f"{part_text(part)} {flops_text(n)}" for part, n in row.flops_by_part.items() if n),
                height=30,
                marks=[stack(row.flops_by_part.items(), axis, 4, 22)],
            )
            for row in ordered
        ),
        axis,
    )


def _flops_of(row: CostRow) -> str:
    return f"{flops_text(row.flops)}, not all" if row.not_counted else flops_text(row.flops)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeFigure:
    """Time by part in one setting. `rows` are part -> model -> row, for a table.

    `gap` says how much each part adds to the difference of measured and predicted speed-up; None if the profiles or
    counts do not cover every part of both engines. `not_counted` is the number of nodes of both engines that no
    prediction includes.
    """

    setting: Setting
    chart: Markup
    measured_ms: Mapping[str, float]
    rows: Mapping[str, Mapping[ModelKind, PartRow]]
    profilers: tuple[str, ...]
    gap: Gap | None
    not_counted: int


def time_figures(rows: Sequence[PartRow]) -> tuple[TimeFigure, ...]:
    """Returns one figure for each setting that has parts: predicted above measured, dense before MoD."""
    engines = by_engine(rows)
    return tuple(
        _time_figure(setting, {model: engines.get(setting.of(model), {}) for model in MODELS})
        for setting in dict.fromkeys(engine.of("mod") for engine in engines)
    )


def _time_figure(setting: Setting, engines: Mapping[ModelKind, Mapping[str, PartRow]]) -> TimeFigure:
    times: list[tuple[ModelKind, str, dict[str, float]]] = []
    for model, by_part in engines.items():
        predicted = {part: row.predicted_ms for part, row in by_part.items()}
        measured = {part: row.measured_ms for part, row in by_part.items() if row.measured_ms is not None}
        times += [(model, "predicted", predicted), (model, "measured", measured)]
    times = [(model, how, parts) for model, how, parts in times if parts]
    axis = axis_from_zero((sum(parts.values()) for _, _, parts in times), smallest=CLOCK_MS, unit=" ms")
    lanes = (
        Lane(
            name=html("{}, {} <b>{} ms</b>", name_of(model), how, ms_text(sum(parts.values()))),
            told=f"{name_of(model)} {how}: {ms_text(sum(parts.values()))} ms; "
            + ", ".join(f"{part_text(part)} {ms_text(ms)} ms" for part, ms in parts.items()),
            height=26,
            marks=[stack(parts.items(), axis, 3, 20, faint=how == "predicted")],
        )
        for model, how, parts in times
    )
    rows = [row for by_part in engines.values() for row in by_part.values()]
    return TimeFigure(
        setting=setting,
        chart=lanes_chart(lanes, axis),
        measured_ms={name_of(model): sum(parts.values()) for model, how, parts in times if how == "measured"},
        rows={
            row.part: {model: by_part[row.part] for model, by_part in engines.items() if row.part in by_part}
            for row in rows
        },
        profilers=tuple(dict.fromkeys(row.profiler for row in rows if row.profiler)),
        gap=gap_of(engines["dense"], engines["mod"]),
        not_counted=sum(row.not_counted for row in rows),
    )


def roofline_figures(roofs: Iterable[Roofline], parts: Sequence[PartRow]) -> tuple[Markup, ...]:
    """Returns the limits of each dtype and what the parts of engines reached, both axes logarithmic.

    A part without FLOPs, bytes or measured time is not drawn.
    """
    return tuple(_roofline_figure(roof, [part for part in parts if part.dtype == roof.dtype]) for roof in roofs)


def _roofline_figure(roof: Roofline, parts: Sequence[PartRow]) -> Markup:
    reached = [
        (part, part.flops / part.bytes, part.flops / part.measured_ms / 1e6)
        for part in parts
        if part.flops > 0 and part.bytes > 0 and part.measured_ms is not None and 0 < part.measured_ms < math.inf
    ]
    ridge = roof.gemm_gflops / roof.bandwidth_gbs
    x = axis_of_logarithm([ridge / 10, ridge * 10, *(intensity for _, intensity, _ in reached)], "{:g}")
    lowest = x.low * roof.bandwidth_gbs
    y = axis_of_logarithm([lowest, roof.gemm_gflops, *(gflops for _, _, gflops in reached)], "{:g}")
    ends = [(x.low, lowest), (ridge, roof.gemm_gflops), (x.high, roof.gemm_gflops)]
    corners = [(x.clamped(intensity), y.clamped(gflops)) for intensity, gflops in ends]
    roof_lines = (line("roof", start, end) for start, end in itertools.pairwise(corners))
    dots = (
        dot(
            part_class(part.part) + (" hollow" if part.model == "dense" else ""),
            x.place(intensity),
            f"{100 - y.clamped(gflops):.2f}%",
            5,
            f"{part.setting} {name_of(part.model)} {part_text(part.part)}: {gflops:.1f} GFLOP/s at "
            f"{intensity:.1f} FLOP/byte",
        )
        for part, intensity, gflops in reached
    )
    limits = f"{roof.gemm_gflops:.1f} GFLOP/s, {roof.bandwidth_gbs:.1f} GB/s"
    about = (roof.dtype, threads_text(roof.threads), limits, roof.method, roof.measured_at)
    hollow = any(part.model == "dense" for part, _, _ in reached)
    both = f" Filled: {name_of('mod')}; hollow: dense." if hollow else ""
    return plot(
        caption=html("{}, {}: {}; {}, {}.{}", *about, both),
        told=f"Roofline of {roof.dtype}: {limits}, with {len(reached)} parts of engines",
        x=x,
        y=y,
        x_name="FLOP per byte",
        y_name="GFLOP/s",
        marks=[*roof_lines, *dots],
    )

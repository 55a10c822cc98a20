"""The charts of report.html in three sections: speed, parity and routing, and cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from mod_export.measure.profile import Gap, by_engine, gap_of
from mod_export.report.charts import (
    CLOCK_MS,
    CURSOR,
    HALF,
    MODELS,
    Axis,
    Lane,
    axis_around,
    axis_from_zero,
    axis_of_logarithm,
    bar,
    dot,
    flat,
    glyph,
    html,
    key,
    lanes_chart,
    legend,
    line,
    name_of,
    part_class,
    part_text,
    plot,
    stack,
    stretched,
    upright,
)
from mod_export.report.summary import SettingResults
from mod_export.report.wording import (
    agreement_text,
    error_text,
    flops_text,
    interval_text,
    ms_text,
    ratio_text,
    threads_text,
)
from mod_export.rows.correctness import MapLayer, OutputParity, ParityRow, RoutingMap
from mod_export.rows.cost import CostRow, PartRow, Roofline
from mod_export.rows.speed import DecodeRow, GenerationReport, LatencyRow, SpeedupRow
from mod_export.types import ModelKind, Setting, Site, is_expert

STRIP_PLACES = 500
"""Number of places on an axis. Samples at the same place are drawn as one line."""
MOST_BINS = 200
"""Largest number of bins. With more samples, only the smallest and the largest sample of each bin are drawn."""
NARROWEST, WIDEST = 0.05, 0.5
"""Least and largest distance from the median, as a share of it, that the chart of samples in order shows."""
MOST_TOKENS = 512
"""Largest number of tokens that the page shows; report.json has all of them."""
SHADES = 4
"""Number of shades that show in how many routed layers a token ran, beside the shade for none."""


# Speed: speed-up with its interval, every sample of latency, and the steps of generation


def speedup_figure(rows: Sequence[SpeedupRow]) -> Markup:
    """Returns a chart of all settings on one axis: measured speed-up, interval, two predictions, control and gate."""
    axis = axis_around([1.0, *(number for row in rows for number in _speedup_numbers(row))], "{:g}x".format)
    lanes = (
        Lane(
            name=html("{}<br><b>{}</b>", row.setting, interval_text(row)),
            told=_speedup_in_words(row),
            height=48,
            marks=[
                upright("one", axis.place(1.0), 0, "100%"),
                upright("gate", axis.place(row.gate), 4, 44),
                flat("control", axis.place(row.control.ci99[0]), axis.place(row.control.ci99[1]), 40),
                flat("interval", axis.place(row.ci95[0]), axis.place(row.ci95[1]), 20),
                dot("point", axis.place(row.measured), 20, 5),
                dot("predicted", axis.place(row.predicted_flops), 20, 8),
                dot("predicted roofline", axis.place(row.predicted_roofline), 20, 8),
            ],
        )
        for row in rows
    )
    signs = [
        (glyph(flat("interval", 0, 100, 7), dot("point", HALF, "50%", 4)), "measured, 95 % interval"),
        (glyph(dot("predicted", HALF, "50%", 5)), "predicted (FLOPs)"),
        (glyph(dot("predicted roofline", HALF, "50%", 5)), "predicted (roofline)"),
        (glyph(flat("control", 0, 100, 7)), "control, 99 % interval"),
        (glyph(upright("one", HALF, 0, "100%")), "1x, no gain"),
        (glyph(upright("gate", HALF, 0, "100%")), "gate"),
    ]
    return legend(signs) + lanes_chart(lanes, axis)


def _speedup_numbers(row: SpeedupRow) -> Iterable[float | None]:
    return (row.measured, *row.ci95, row.predicted_flops, row.predicted_roofline, row.gate, *row.control.ci99)


def _speedup_in_words(row: SpeedupRow) -> str:
    predictions = (("FLOPs", row.predicted_flops), ("the roofline", row.predicted_roofline))
    known = [f"by {source} {ratio_text(ratio)}" for source, ratio in predictions if ratio is not None]
    predicted = f"; predicted {', '.join(known)}" if known else ""
    return (
        f"{row.setting}: speed-up {interval_text(row)}, {row.verdict}{predicted}; control "
        f"{ratio_text(row.control.measured)}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyFigure:
    """The samples of one setting: their distribution, and their values round after round.

    `bins` are, for each model drawn in order, (number of the first sample, number of the last, smallest, largest).
    Numbers start at 1, milliseconds are text. `low` and `high` bound the drawing in order, as shares of a model's own
    median.
    """

    setting: Setting
    rows: tuple[LatencyRow, ...]
    distribution: Markup
    in_order: Markup
    bins: tuple[tuple[tuple[int, int, str, str], ...], ...]
    low: float
    high: float

    @property
    def flagged(self) -> bool:
        """Whether a reader should look at the samples."""
        return any(row.flags for row in self.rows)


def latency_figures(settings: Iterable[SettingResults]) -> tuple[LatencyFigure, ...]:
    """Returns one figure for each setting that was sampled, the dense model first."""
    return tuple(_latency_figure(entry.setting, rows) for entry in settings if (rows := entry.of(LatencyRow)))


def _latency_figure(setting: Setting, measured: Iterable[LatencyRow]) -> LatencyFigure:
    rows = tuple(sorted(measured, key=lambda row: MODELS.index(row.model)))
    axis = axis_from_zero((sample for row in rows for sample in row.samples_ms), smallest=CLOCK_MS, unit=" ms")
    drawn = [row for row in rows if row.samples_ms and row.p50_ms > 0]
    shares = [sample / row.p50_ms for row in drawn for sample in row.samples_ms if math.isfinite(sample)]
    low = min(1 - NARROWEST, max(1 - WIDEST, min(shares, default=1.0)))
    high = max(1 + NARROWEST, min(1 + WIDEST, max(shares, default=1.0)))
    in_order = lanes_chart((_lane_in_order(row, low, high) for row in drawn), None) if drawn else Markup()
    return LatencyFigure(
        setting=setting,
        rows=rows,
        distribution=lanes_chart((_distribution_lane(row, axis) for row in rows), axis),
        in_order=in_order,
        bins=tuple(_bins(row) for row in drawn),
        low=low,
        high=high,
    )


def _distribution_lane(row: LatencyRow, axis: Axis) -> Lane:
    """Returns a lane with a bar up to the median, a thin line for each sample, and ticks at p90 and p99."""
    median = axis.place(row.p50_ms)
    places = {round(place * STRIP_PLACES / 100) for place in map(axis.place, row.samples_ms) if place is not None}
    strip = "".join(f"M{100 * place / STRIP_PLACES:g} 0v1" for place in sorted(places))
    return Lane(
        name=html("{}{} <b>{} ms</b>", key(row.model), name_of(row.model), ms_text(row.p50_ms)),
        told=f"{name_of(row.model)}: median {ms_text(row.p50_ms)} ms, 90th percentile {ms_text(row.p90_ms)} ms, 99th "
        f"{ms_text(row.p99_ms)} ms, {len(row.samples_ms):,} samples",
        height=40,
        marks=[
            bar(f"bar {row.model}", 0, median, 6, 20),
            stretched([(f"sample {row.model}", strip)], (100, 1), 6, 20),
            upright(f"median {row.model}", median, 2, 30),
            upright("quantile", axis.place(row.p90_ms), 29, 38),
            upright("quantile", axis.place(row.p99_ms), 29, 38),
        ],
    )


def _lane_in_order(row: LatencyRow, low: float, high: float) -> Lane:
    """Returns a lane with a curve through the extremes of every bin. Samples outside the drawing are drawn at its edge
    and counted.
    """

    def height(sample: float) -> float:
        return 100 - 100 * (min(high, max(low, sample / row.p50_ms)) - low) / (high - low)

    count = len(row.samples_ms)
    points = []
    for first, end in _edges(count):
        finite = [(index, row.samples_ms[index]) for index in range(first, end) if math.isfinite(row.samples_ms[index])]
        extremes = {min(finite, key=lambda pair: pair[1]), max(finite, key=lambda pair: pair[1])} if finite else set()
        points += [(100 * (index + 0.5) / count, height(sample)) for index, sample in sorted(extremes)]
    beyond = sum(not low <= sample / row.p50_ms <= high for sample in row.samples_ms)
    outside = html("<br><small>{} outside, drawn at the edge</small>", beyond) if beyond else ""
    path = "M" + "L".join(f"{x:.4g} {y:.4g}" for x, y in points) if points else ""
    return Lane(
        name=html("{}{} in order{}", key(row.model), name_of(row.model), outside),
        told=f"{name_of(row.model)}: {count:,} samples in order, drift {100 * row.drift:+.1f} %",
        height=56,
        marks=[
            stretched([("grid", f"M0 {height(row.p50_ms):.4g}H100"), (f"series {row.model}", path)], (100, 100), 0, 56),
            CURSOR,
        ],
        data=name_of(row.model),
    )


def _bins(row: LatencyRow) -> tuple[tuple[int, int, str, str], ...]:
    def rank(sample: float) -> tuple[bool, float]:
        return math.isnan(sample), sample

    return tuple(
        (
            first + 1,
            end,
            ms_text(min(row.samples_ms[first:end], key=rank)),
            ms_text(max(row.samples_ms[first:end], key=rank)),
        )
        for first, end in _edges(len(row.samples_ms))
    )


def _edges(count: int) -> Iterable[tuple[int, int]]:
    bins = min(count, MOST_BINS)
    return itertools.pairwise(count * index // bins for index in range(bins + 1))


def step_figure(steps: SettingResults) -> Markup:
    """Returns a chart of a decode step's time, and of the time that memory takes for its bytes; empty if not timed."""
    row, bucket = steps.written, steps.setting.bucket
    if not isinstance(row, DecodeRow):
        return Markup()
    bound_ms: Mapping[ModelKind, float] = row.predicted_ms or {}
    axis = axis_from_zero([*row.ms.values(), *bound_ms.values()], smallest=CLOCK_MS, unit=" ms")
    texts = f"{bucket.batch} text{'' if bucket.batch == 1 else 's'} of {bucket.seq} tokens"
    lanes = []
    for model in (kind for kind in MODELS if kind in row.ms):
        ms, bound = ms_text(row.ms[model]), bound_ms.get(model)
        memory = "" if bound is None else f", memory takes {ms_text(bound)} ms for its bytes"
        lanes.append(
            Lane(
                name=html("{} <b>{} ms</b>, {:,.0f} tokens/s", name_of(model), ms, row.tokens_per_second[model]),
                told=f"{name_of(model)}, {texts}: {ms} ms a step{memory}",
                height=32,
                marks=[
                    bar(f"bar {model}", 0, axis.place(row.ms[model]), 6, 20),
                    upright(f"median {model}", axis.place(row.ms[model]), 6, 26),
                    upright("bound", axis.place(bound), 2, 30),
                ],
            )
        )
    return lanes_chart(lanes, axis)


def step_legend(*, alone: bool) -> Markup:
    """Returns the common legend of all `step_figure`s; with `alone`, without the dense baseline."""
    models: list[ModelKind] = ["mod"] if alone else ["dense", "mod"]
    memory = (glyph(upright("bound", HALF, 0, "100%")), "predicted (bytes)")
    return legend([*((key(model), name_of(model)) for model in models), memory])


# Parity and routing: errors, flips by layer, the layers that each token ran in, and overflow


def error_figure(rows: Sequence[ParityRow]) -> Markup:
    """Returns a chart of the errors of all engines, with the rounding error of the reference and the gate. Further
    outputs have lanes of their own, because each has its own gate.
    """
    outputs: list[tuple[str, bool, ParityRow | OutputParity]] = []
    for row in rows:
        engine = f"{row.setting} {name_of(row.model)}"
        outputs.append((engine, row.passed, row))
        outputs += [(f"{engine}, {o.name}", o.error.max_abs <= o.allowed_max_abs, o) for o in row.further_outputs]
    axis = axis_of_logarithm(
        [n for _, _, o in outputs for n in (o.error.max_abs, o.error.mean_abs, o.rounding_error, o.allowed_max_abs)]
    )
    lanes = []
    for name, passed, output in outputs:
        rounding = "" if output.rounding_error is None else f"rounding error {error_text(output.rounding_error)}, "
        lanes.append(
            Lane(
                name=html("{}", name),
                told=f"{name}: largest error {error_text(output.error.max_abs)}, mean error "
                f"{error_text(output.error.mean_abs)}, {rounding}gate {error_text(output.allowed_max_abs)}",
                height=26,
                marks=[
                    upright("bound", axis.place(output.rounding_error), 3, 23),
                    upright("gate", axis.place(output.allowed_max_abs), 1, 25),
                    dot("mean", axis.place(output.error.mean_abs), 13, 3.5),
                    dot("point" if passed else "point bad", axis.place(output.error.max_abs), 13, 4.5),
                ],
            )
        )
    signs = [
        (glyph(dot("point", HALF, "50%", 4.5)), "largest error"),
        (glyph(dot("mean", HALF, "50%", 3.5)), "mean error"),
        (glyph(upright("bound", HALF, 0, "100%")), "rounding error of the reference"),
        (glyph(upright("gate", HALF, 0, "100%")), "gate"),
    ]
    return legend(signs) + lanes_chart(lanes, axis)


def layers_legend() -> Markup:
    """Returns the common legend of all `layers_figure`s."""
    signs = [
        (glyph(upright("bound", HALF, 0, "100%")), "bound of the scores"),
        (glyph(dot("mean", HALF, "50%", 4)), "largest flip, a near-tie"),
        (glyph(dot("point bad", HALF, "50%", 5)), "largest flip, a fault"),
        (glyph(dot("predicted", HALF, "50%", 5)), "smallest margin from the edge of the selection"),
    ]
    return legend(signs)


def layers_figure(row: ParityRow) -> Markup:
    """Returns a chart of the routing sites. A flip to the right of the bound is a fault, to the left a near-tie. A
    margin to the right of the bound cannot flip.

    Empty if no layer has a distance to draw.
    """
    layers = row.routing.layers
    axis = axis_of_logarithm([n for site in layers for n in (site.score_bound, site.worst_flip, site.min_margin)])
    lanes, drawn = [], False
    for layer in layers:
        places = [axis.place(n) for n in (layer.score_bound, layer.min_margin, layer.worst_flip)]
        drawn = drawn or any(place is not None for place in places)
        distances = [
            f", {name} {error_text(n)}"
            for name, n in (
                ("bound", layer.score_bound),
                ("largest flip", layer.worst_flip),
                ("smallest margin", layer.min_margin),
            )
            if n is not None
        ]
        lanes.append(
            Lane(
                name=html("layer {} <b>{}</b>", layer.layer, agreement_text(layer)),
                told=f"layer {layer.layer}: routing agreement {agreement_text(layer)}, {layer.near_ties} near-ties, "
                f"{layer.faults} faults{''.join(distances)}",
                height=26,
                marks=[
                    upright("bound", places[0], 2, 24),
                    dot("predicted", places[1], 13, 6),
                    dot("point bad" if layer.faults else "mean", places[2], 13, 4),
                ],
            )
        )
    return lanes_chart(lanes, axis) if drawn else Markup()


@dataclass(frozen=True, slots=True, kw_only=True)
class MapToken:
    """A position: the layers that ran it, and its score in each routed layer, NaN if the score is not known."""

    position: int
    text: str
    layers: tuple[Site, ...]
    scores: tuple[float, ...]
    shade: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMap:
    """One text: its first tokens out of `total`, and `chart` with a lane of positions for each layer.

    `skipped` counts the tokens of the whole text that no routed layer ran. `numbered` says that tokens are not text and
    are shown as numbers.
    """

    bucket: str
    total: int
    skipped: int
    tokens: tuple[MapToken, ...]
    layers: tuple[Site, ...]
    chart: Markup

    @property
    def numbered(self) -> bool:
        return all(token.text.isdecimal() for token in self.tokens)


def token_maps(maps: Sequence[RoutingMap]) -> tuple[TokenMap, ...]:
    """Returns one map for each text."""
    return tuple(_token_map(routing_map) for routing_map in maps if routing_map.tokens)


def _token_map(routing_map: RoutingMap) -> TokenMap:
    routed = [(layer.layer, set(layer.routed)) for layer in routing_map.layers]
    tokens = []
    for position, text in enumerate(routing_map.tokens[:MOST_TOKENS]):
        layers = tuple(layer for layer, positions in routed if position in positions)
        scores = tuple(_score(layer, position) for layer in routing_map.layers)
        shade = math.ceil(SHADES * len(layers) / len(routing_map.layers)) if layers else 0
        tokens.append(MapToken(position=position, text=text, layers=layers, scores=scores, shade=shade))
    ran = {position for _, positions in routed for position in positions}
    return TokenMap(
        bucket=routing_map.bucket,
        total=len(routing_map.tokens),
        skipped=len(routing_map.tokens) - len(ran & set(range(len(routing_map.tokens)))),
        tokens=tuple(tokens),
        layers=tuple(layer.layer for layer in routing_map.layers),
        chart=lanes_chart((_positions_lane(layer, len(tokens)) for layer in routing_map.layers), None, "positions"),
    )


def _score(layer: MapLayer, position: int) -> float:
    score = layer.scores[position] if position < len(layer.scores) else None
    return math.nan if score is None else score


def _positions_lane(layer: MapLayer, count: int) -> Lane:
    positions = [position for position in sorted(set(layer.routed)) if position < count]
    runs: list[list[int]] = []
    for position in positions:
        if runs and runs[-1][1] == position:
            runs[-1][1] += 1
        else:
            runs.append([position, position + 1])
    path = "".join(f"M{first} 0h{end - first}v1h{first - end}z" for first, end in runs)
    return Lane(
        name=html("layer {} <b>k = {:,}</b>", layer.layer, layer.k),
        told=f"layer {layer.layer} ran {len(positions)} of the {count} positions shown",
        height=18,
        marks=[stretched([("lane-back", f"M0 0h{count}v1H0z"), ("ran", path)], (count, 1), 0, 18), CURSOR],
        data=str(layer.layer),
    )


def executed_figure(generation: GenerationReport) -> Markup:
    """Returns a chart of each routed layer: the share of the tokens that it ran, the share that overflowed, and the
    share that its slots allow.

    Empty if no text was read, or if only experts are routed.
    """
    quality, slots = generation.quality, generation.capacity or {}
    sites = [site for site in (quality.selected if quality else ()) if not is_expert(site)]
    if quality is None or not sites:
        return Markup()
    share_of_slots = {site: 100 * slots[site] / quality.window for site in sites if site in slots}
    ran = {site: 100 * quality.selected[site] for site in sites}
    wanted = {site: max(ran[site], 100 * quality.wanted[site]) for site in sites}
    axis = axis_from_zero([*wanted.values(), *share_of_slots.values()], smallest=1.0, unit=" %")
    lanes = []
    for site in sites:
        overflow = quality.overflow[site]
        also = html(", {:,} overflowed", overflow) if overflow else ""
        end = axis.place(ran[site])
        lanes.append(
            Lane(
                name=html("layer {} <b>{:.1f} %</b>{}", site, ran[site], also),
                told=f"layer {site}: {ran[site]:.1f} % of the tokens ran, {overflow:,} found no slot",
                height=26,
                marks=[
                    bar("ran", 0, end, 5, 16),
                    bar("lost", end, axis.place(wanted[site]), 5, 16) if overflow else Markup(),
                    upright("bound", axis.place(share_of_slots.get(site)), 2, 24),
                ],
            )
        )
    slot = glyph(upright("bound", HALF, 0, "100%"))
    signs = [(key("mod"), "ran"), (key("lost"), "overflow: selected, and no slot was free"), (slot, "slots")]
    return legend(signs) + lanes_chart(lanes, axis)


# Cost: FLOPs by part, time by part, and the roofline from which time is predicted


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

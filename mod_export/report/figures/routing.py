"""Charts of parity and routing: errors, flips by layer, the layers that each token ran in, and overflow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from mod_export.report.charts import (
    CURSOR,
    HALF,
    Lane,
    axis_from_zero,
    axis_of_logarithm,
    bar,
    dot,
    glyph,
    html,
    key,
    lanes_chart,
    legend,
    name_of,
    stretched,
    upright,
)
from mod_export.report.wording import (
    agreement_text,
    error_text,
)
from mod_export.rows.correctness import MapLayer, OutputParity, ParityRow, RoutingMap
from mod_export.rows.speed import GenerationReport
from mod_export.types import Site, is_expert

MOST_TOKENS = 512
"""Largest number of tokens that the page shows; report.json has all of them."""
SHADES = 4
"""Number of shades that show in how many routed layers a token ran, beside the shade for none."""


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

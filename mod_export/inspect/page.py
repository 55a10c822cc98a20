"""A model as one self-contained page: FLOPs by layer and part, tables, the routing of a text."""

from __future__ import annotations

import json

from markupsafe import Markup

from mod_export.benchmark.model_parts import NODE_PARTS
from mod_export.inspect.layers import (
    Layers,
    flops_of,
    flops_sentence,
    flops_table,
    part_name,
    routing_table,
    share_of,
)
from mod_export.inspect.routed_text import RoutedText
from mod_export.report.charts import (
    Lane,
    axis_from_zero,
    html,
    key,
    lanes_chart,
    legend,
    part_class,
    stack,
)
from mod_export.report.pages import render_page
from mod_export.report.parity_figures import token_maps
from mod_export.report.wording import causality_text, flops_text
from mod_export.results.structure import RoutingMap
from mod_export.sources.checkpoint import Model
from mod_export.sources.protocol import LayerCost

__all__ = ["MOST_SITES", "flops_chart", "flops_scale", "render_html"]

SCALES = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"), (1.0, "FLOP"))
"""FLOPs, and what so many are called; the largest first."""
MOST_SITES = 64
"""Routing sites in the map of a text: many layers of many experts would be more than a browser shows well."""


def render_html(model: Model, layers: Layers, routed: RoutedText | None) -> str:
    """The whole page; `routed` is the text whose map it shows."""
    return render_page(
        __package__,
        "inspect.html.j2",
        model=model,
        causality=causality_text(model.loaded.looks_ahead),
        layers=layers,
        own=layers.mod[layers.largest],
        baseline=None if layers.dense is None else layers.dense[layers.largest],
        chart=flops_chart(layers),
        sentence=flops_sentence(layers),
        tables=[("Routing and memory", routing_table(layers)), ("FLOPs by part", flops_table(layers))],
        routed=routed,
        maps=token_maps([_shortened(routed.map)]) if routed else (),
        hidden_sites=max(0, len(routed.map.layers) - MOST_SITES) if routed else 0,
        spec_json=json.dumps(dict(model.loaded.spec), indent=2),
    )


def flops_scale(flops: float) -> tuple[float, str]:
    """FLOPs of the unit that suits so many, and its name: (1e9, "GFLOP")."""
    return next((scale for scale in SCALES if flops >= scale[0]), SCALES[-1])


def flops_chart(layers: Layers) -> Markup:
    """FLOPs of the largest bucket by layer and part; above each layer, paler, those of the dense baseline."""
    own = layers.mod[layers.largest]
    baseline = own if layers.dense is None else layers.dense[layers.largest]
    counted = [index for index, row in enumerate(own.rows) if row.flops]
    most = max(flops_of(costs.rows[index]) for costs in (own, baseline) for index in counted)
    size, unit = flops_scale(most)
    axis = axis_from_zero([most / size], smallest=1.0, unit=f" {unit}")
    lanes = []
    for index in counted:
        row, dense = own.rows[index], baseline.rows[index]
        marks = [stack(_parts(row, size), axis, 4, 15)]
        if layers.dense is not None:
            marks = [stack(_parts(dense, size), axis, 3, 9, faint=True), stack(_parts(row, size), axis, 14, 15)]
        share = "" if layers.dense is None else html(" <b>{}</b>", share_of(layers, layers.largest, index))
        routed = html(" <small>{}</small>", row.routed) if row.routed else ""
        name = f"layer {row.name}" if row.name.isdecimal() else row.name
        lanes.append(
            Lane(
                name=html("{}{}{}", name, share, routed),
                told=f"{name}: {_told(row, None if layers.dense is None else dense)}",
                height=22 if layers.dense is None else 32,
                marks=marks,
            )
        )
    parts = dict.fromkeys([*own.flops_by_part, *baseline.flops_by_part])
    return legend((key(part_class(part)), part_name(part)) for part in parts) + lanes_chart(lanes, axis)


def _told(row: LayerCost, dense: LayerCost | None) -> str:
    parts = ", ".join(f"{part_name(part)} {flops_text(flops)}" for part, flops in row.flops.items() if flops)
    beside = "" if dense is None else f"; {flops_text(flops_of(dense))} in the dense baseline"
    return f"{flops_text(flops_of(row))}{beside}: {parts or 'nothing'}"


def _shortened(found: RoutingMap) -> RoutingMap:
    return found.model_copy(update={"layers": found.layers[:MOST_SITES]})


def _parts(row: LayerCost, size: float) -> list[tuple[str, float]]:
    """In units of `size` FLOPs; parts with a colour of their own first."""
    others = [part for part in row.flops if part not in NODE_PARTS]
    ordered = [*(part for part in NODE_PARTS if part in row.flops), *others]
    return [(part, row.flops[part] / size) for part in ordered]

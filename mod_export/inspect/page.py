"""Renders a model as one self-contained page: FLOPs by layer and part, tables, and the routing of a text."""

from __future__ import annotations

import json

from markupsafe import Markup

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
from mod_export.measure.parts import NODE_PARTS
from mod_export.model.model import LayerCost, Model
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
from mod_export.report.figures.routing import token_maps
from mod_export.report.pages import render_page
from mod_export.report.wording import causality_text, flops_text

SCALES = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"), (1.0, "FLOP"))
"""(FLOPs, name of the unit), largest first."""
MOST_SITES = 64
"""Maximum number of routing sites in the map of a text: browsers cannot show many layers of many experts well."""


def render_html(model: Model, layers: Layers, routed: RoutedText | None) -> str:
    """Returns the page. It shows the routing map of `routed`, if given."""
    assert model.looks_ahead is not None, "the caller asks for layers first"
    sites = routed.map.layers if routed else ()
    return render_page(
        __package__,
        "inspect.html.j2",
        model=model,
        causality=causality_text(model.looks_ahead),
        layers=layers,
        own=layers.own,
        baseline=layers.baseline,
        chart=flops_chart(layers),
        sentence=flops_sentence(layers),
        tables=[("Routing and memory", routing_table(layers)), ("FLOPs by part", flops_table(layers))],
        routed=routed,
        maps=token_maps([routed.map.model_copy(update={"layers": sites[:MOST_SITES]})]) if routed else (),
        hidden_sites=max(0, len(sites) - MOST_SITES),
        spec_json=json.dumps(dict(model.spec), indent=2),
    )


def flops_scale(flops: float) -> tuple[float, str]:
    """Returns the unit that suits a number of FLOPs, such as (1e9, "GFLOP")."""
    return next((scale for scale in SCALES if flops >= scale[0]), SCALES[-1])


def flops_chart(layers: Layers) -> Markup:
    """Draws the FLOPs of the largest bucket by layer and part, with a paler bar of the dense baseline above each."""
    size, unit = flops_scale(layers.most_flops)
    axis = axis_from_zero([layers.most_flops / size], smallest=1.0, unit=f" {unit}")
    lanes = []
    for index, row, dense in layers.drawn:
        name = f"layer {row.name}" if row.name.isdecimal() else row.name
        parts = ", ".join(f"{part_name(part)} {flops_text(flops)}" for part, flops in row.flops.items() if flops)
        marks, share, beside = [stack(_parts(row, size), axis, 4, 15)], "", ""
        if dense is not None:
            marks = [stack(_parts(dense, size), axis, 3, 9, faint=True), stack(_parts(row, size), axis, 14, 15)]
            share = html(" <b>{}</b>", share_of(layers, layers.largest, index))
            beside = f"; {flops_text(flops_of(dense))} in the dense baseline"
        routed = html(" <small>{}</small>", row.routed) if row.routed else ""
        lanes.append(
            Lane(
                name=html("{}{}{}", name, share, routed),
                told=f"{name}: {flops_text(flops_of(row))}{beside}: {parts or 'nothing'}",
                height=22 if dense is None else 32,
                marks=marks,
            )
        )
    return legend((key(part_class(part)), part_name(part)) for part in layers.parts) + lanes_chart(lanes, axis)


def _parts(row: LayerCost, size: float) -> list[tuple[str, float]]:
    """(part, FLOPs in units of `size`), starting with the parts that have their own colour."""
    others = [part for part in row.flops if part not in NODE_PARTS]
    ordered = [*(part for part in NODE_PARTS if part in row.flops), *others]
    return [(part, row.flops[part] / size) for part in ordered]

"""Draws a model as PNG: FLOPs by layer and part beside the dense baseline, and the routing of a text below."""

from __future__ import annotations

import io
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mod_export.errors import UsageError
from mod_export.inspect.layers import Layers, flops_sentence, part_name
from mod_export.inspect.page import flops_scale
from mod_export.inspect.routed_text import SKIPPED, Lane, RoutedText, lanes_of, token_marks
from mod_export.model.model import Model
from mod_export.report.pages import light_colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, CHART_HEIGHT, LANE_HEIGHT = 13.0, 4.6, 0.16
"""Sizes in inches."""
DOTS = 130
"""Dots per inch."""
PIECE = 128
"""Number of tokens in one row of the map."""
BAR = 0.4
"""Width of a bar, as a fraction of the distance between two layers."""


def check_matplotlib() -> None:
    """Checks that matplotlib can be imported.

    Raises:
        UsageError: it cannot be imported.
    """
    try:
        import_module("matplotlib")
    except ImportError as error:
        raise UsageError(
            f"--png draws with matplotlib, which cannot be imported here ({error}); install mod-export[figures], or "
            "use --html, which needs nothing more"
        ) from error


def render_png(model: Model, layers: Layers, routed: RoutedText | None) -> bytes:
    """Returns the picture; without `routed` only the chart.

    Raises:
        UsageError: matplotlib is not installed.
    """
    check_matplotlib()
    from matplotlib.figure import Figure

    lanes = lanes_of(routed.map) if routed else ()
    pieces = -(-len(routed.map.tokens) // PIECE) if routed else 0
    row = LANE_HEIGHT * (len(lanes) + 2.5)
    colours = light_colours()
    heights = [CHART_HEIGHT, *([0.35] if pieces else []), *[row] * pieces]
    # Not pyplot: it looks for a window system and keeps a reference to the figure.
    figure = Figure(figsize=(WIDTH, sum(heights)), dpi=DOTS, facecolor=colours["card"], layout="constrained")
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _flops(axes[0], model, layers, colours)
    if routed:
        _head(axes[1], routed, colours)
        for index, piece in enumerate(axes[2:]):
            _piece(piece, routed, lanes, index * PIECE, colours)
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def _flops(axes: Axes, model: Model, layers: Layers, colours: Any) -> None:
    size, unit = flops_scale(layers.most_flops)
    mod, dense = [row for _, row, _ in layers.drawn], [row for *_, row in layers.drawn if row]
    for rows, offset, alpha in ((dense, -BAR / 2, 0.45), (mod, BAR / 2 if dense else 0.0, 1.0)):
        positions, floor = [index + offset for index in range(len(rows))], [0.0] * len(rows)
        for part in layers.parts if rows else ():
            heights = [row.flops.get(part, 0) / size for row in rows]
            label = part_name(part) if rows is mod else None
            colour = colours.get(part, colours["other"])
            axes.bar(positions, heights, BAR * 0.95, floor, color=colour, alpha=alpha, label=label, linewidth=0)
            floor = [below + height for below, height in zip(floor, heights, strict=True)]
    axes.set_xticks(range(len(mod)), [row.name for row in mod])
    axes.set_xlim(-0.6, len(mod) - 0.4)
    axes.set_ylim(0, 1.06 * layers.most_flops / size)
    axes.set_ylabel(unit)
    axes.grid(axis="y", color=colours["line"])
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    beside = "; left and pale: the dense baseline" if dense else ""
    title = f"{model.name}: FLOPs of {layers.largest.name} by layer and part{beside}"
    axes.set_title(title, loc="left", parse_math=False)
    axes.set_xlabel(flops_sentence(layers), color=colours["soft"])
    axes.legend(frameon=False, ncols=len(layers.parts), loc="lower left", bbox_to_anchor=(0, 1.08), borderaxespad=0)


def _head(axes: Axes, routed: RoutedText, colours: Any) -> None:
    axes.axis("off")
    cut = f"; {routed.left_out:,} more are left out" if routed.left_out else ""
    summary = f"Routing of {routed.source}, {len(routed.map.tokens):,} tokens{cut}"
    text = f"{summary}; coloured where a layer, or an expert, ran one"
    axes.text(0, 0.5, text, color=colours["ink"], fontsize=12, va="center", parse_math=False, transform=axes.transAxes)


def _piece(axes: Axes, routed: RoutedText, lanes: tuple[Lane, ...], start: int, colours: Any) -> None:
    """Draws one row of the map: tokens on top, and below them a lane for each site or group of experts."""
    tokens = token_marks(routed.map)[start : start + PIECE]
    axes.set_xlim(0, PIECE)
    axes.set_ylim(len(lanes) + 1, 0)
    axes.tick_params(length=0, labelsize=7, labelcolor=colours["soft"])
    axes.spines[:].set_visible(False)
    axes.set_xticks([])
    middles = [index + 0.5 for index in range(len(lanes) + 1)]
    axes.set_yticks(middles, [f"{start:,}", *(lane.name for lane in lanes)])
    for column, token in enumerate(tokens):
        axes.text(column + 0.5, 0.5, token, family="monospace", fontsize=7, ha="center", va="center", parse_math=False)
    for index, lane in enumerate(lanes):
        marks = lane.marks[start : start + PIECE]
        axes.broken_barh([(0, len(tokens))], (index + 1.1, 0.8), color=colours["wash"], linewidth=0)
        ran = [(column, 1) for column, mark in enumerate(marks) if mark != SKIPPED]
        axes.broken_barh(ran, (index + 1.1, 0.8), color=colours["shade-3" if lane.experts else "mod"], linewidth=0)
        if lane.experts:
            for column, mark in enumerate(marks):
                if mark != SKIPPED:
                    axes.text(column + 0.5, index + 1.5, mark, family="monospace", fontsize=6, ha="center", va="center")

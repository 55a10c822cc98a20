"""The charts of every page, as SVG inside the page: axes, marks, and two kinds of chart that use them.

`lanes_chart` has one row for each thing that is compared, all on one horizontal axis. `plot` has two axes. Horizontal
places are percentages, so a chart fits a phone without shrinking its labels. Colours are classes of page.css, which has
a light and a dark scheme. Every chart says in words what it shows, for readers who do not see it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from mod_export.measure.parts import NODE_PARTS
from mod_export.report.wording import printable
from mod_export.types import ModelKind

MODELS: tuple[ModelKind, ...] = ("dense", "mod")
"""Order of the models in every chart."""
_ROUTES: ContextVar[bool] = ContextVar("_ROUTES", default=True)
CURSOR = Markup('<line class="cursor" x1="0" x2="0" y1="0" y2="100%" visibility="hidden"/>')
"""Line at the position that the reader points at; the script of the page moves it."""
CLOCK_MS = 1e-6
"""Resolution of the clock that times everything. No axis of milliseconds is shorter."""
HALF = 50.0
"""Middle of a glyph, in percent."""
MOST_STEPS = 5
MOST_DECADES = 7
SMALLEST_DECADE = -18
ZERO_WIDTH = 12.0
"""Percent of a logarithmic axis that is reserved for zero, which has no logarithm."""
CHARACTER = 2.8
"""Percent of a plot's width that one character of a label takes on a phone."""
LISTED_MARGIN = 6.0
"""Percent of an axis of listed values that stays free at either end."""


def name_of(kind: ModelKind) -> str:
    """Returns the name of a model on the page. Only a model that skips something is called MoD."""
    if kind == "dense":
        return "dense"
    return "MoD" if _ROUTES.get() else "model"


@contextlib.contextmanager
def page_about(*, routes: bool) -> Iterator[None]:
    """Sets, while a page is made, whether its model skips anything, so that all figures call it by the right name."""
    token = _ROUTES.set(routes)
    try:
        yield
    finally:
        _ROUTES.reset(token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Maps values to places between 0 (the value `low`) and 100 (`high`)."""

    low: float
    high: float
    ticks: tuple[tuple[str, float], ...]
    """Label and place of each tick."""
    scale: Callable[[float], float]
    """Function from a finite value to its place; NaN if the value has none."""

    def place(self, value: float | None) -> float | None:
        """Returns the place of a value; None if the value is not finite, or if this axis has no place for it."""
        if value is None or not math.isfinite(value):
            return None
        place = self.scale(value)
        return None if math.isnan(place) else place

    def clamped(self, value: float) -> float:
        """Returns the place of a finite value, or the nearer end of the axis if the value lies outside."""
        return min(100.0, max(0.0, self.scale(value)))


def axis_from_zero(values: Iterable[float | None], *, smallest: float, unit: str = "") -> Axis:
    """Returns an axis for bars: from 0 to the largest value or, if that is less, to `smallest`."""
    longest = max([smallest, *_finite(values)])
    step = _step(longest)
    return _linear(0, math.ceil(longest / step), step, "{:g}".format, unit)


def axis_around(values: Iterable[float | None], text: Callable[[float], str]) -> Axis:
    """Returns an axis for differences: its ticks enclose all finite values, and it need not start at 0."""
    finite = _finite(values) or [1.0]
    low, high = min(finite), max(finite)
    step = _step((high - low) or abs(high) or 1.0)
    first, last = math.floor(low / step), math.ceil(high / step)
    return _linear(first, max(last, first + 1), step, text)


def axis_of_logarithm(values: Iterable[float | None], text: str = "{:.0e}") -> Axis:
    """Returns an axis of whole decades around all finite values that are not negative. Zero has its own place at the
    left.
    """
    finite = [value for value in _finite(values) if value >= 0]
    decades = [max(SMALLEST_DECADE, math.log10(value)) for value in finite if value > 0]
    low = math.floor(min(decades, default=0.0))
    high = max(low + 1, math.ceil(max(decades, default=0.0)))
    start = ZERO_WIDTH if 0.0 in finite else 0.0

    def scale(value: float) -> float:
        if value <= 0:
            return 0.0 if value == 0 else math.nan
        return start + (100 - start) * (max(SMALLEST_DECADE, math.log10(value)) - low) / (high - low)

    every = math.ceil((high - low) / MOST_DECADES)
    labelled = [10.0**decade for decade in range(low, high + 1, every)]
    ticks = [("0", 0.0)] * bool(start) + [(text.format(value), scale(value)) for value in labelled]
    return Axis(low=10.0**low, high=10.0**high, ticks=tuple(ticks), scale=scale)


def axis_of_listed(values: Iterable[float]) -> Axis:
    """Returns a logarithmic axis for values that are chosen in ratios, such as capacities. Its ticks are the values,
    without those whose labels would touch. 0 gets the place of half the smallest other value.
    """
    ordered = sorted(set(values))
    least = min((value for value in ordered if value > 0), default=1.0)

    def logarithm(value: float) -> float:
        return math.log2(value if value > 0 else least / 2)

    low, high = logarithm(ordered[0]), logarithm(ordered[-1])

    def scale(value: float) -> float:
        share = (logarithm(value) - low) / (high - low) if low < high else 0.5
        return LISTED_MARGIN + (100 - 2 * LISTED_MARGIN) * share

    ticks: list[tuple[str, float]] = []
    for value in ordered:
        text, at = f"{value:g}", scale(value)
        # Labels are centred, with the width of a character between two.
        if not ticks or at - ticks[-1][1] >= CHARACTER * (1 + (len(text) + len(ticks[-1][0])) / 2):
            ticks.append((text, at))
    return Axis(low=ordered[0], high=ordered[-1], ticks=tuple(ticks), scale=scale)


def html(template: str, *values: Any) -> Markup:
    """Inserts values from elsewhere into our own markup: they are escaped, and control characters are made visible."""
    return Markup(template).format(*map(_safe, values))  # noqa: S704 - the template is a literal of this package.


def bar(kind: str, left: float | None, right: float | None, top: float, height: float) -> Markup:
    """Returns a bar between two places; nothing if one of them is missing. `kind` is a class of page.css."""
    if left is None or right is None:
        return Markup()
    shape = '<rect class="{}" x="{}%" y="{}" width="{}%" height="{}"/>'
    return html(shape, kind, _at(left), top, _at(right - left), height)


def stack(parts: Iterable[tuple[str, float]], axis: Axis, top: float, height: float, *, faint: bool = False) -> Markup:
    """Returns the parts of a model side by side from 0 on, each in its colour. Sizes that are not finite count as 0."""
    bars, left = [], 0.0
    for part, size in parts:
        right = left + (size if math.isfinite(size) else 0.0)
        if right > left:
            kind = part_class(part) + (" faint" if faint else "")
            bars.append(bar(kind, axis.place(left), axis.place(right), top, height))
        left = right
    return Markup().join(bars)


def upright(kind: str, x: float | None, top: float, bottom: float | str) -> Markup:
    """Returns a vertical line at a place; nothing if the place is missing."""
    if x is None:
        return Markup()
    return html('<line class="{0}" x1="{1}%" x2="{1}%" y1="{2}" y2="{3}"/>', kind, _at(x), top, bottom)


def flat(kind: str, left: float | None, right: float | None, y: float) -> Markup:
    """Returns a horizontal line between two places; nothing if one of them is missing."""
    if left is None or right is None:
        return Markup()
    return html('<line class="{0}" x1="{1}%" x2="{2}%" y1="{3}" y2="{3}"/>', kind, _at(left), _at(right), y)


def dot(kind: str, x: float | None, y: float | str, radius: float, title: str = "") -> Markup:
    """Returns a circle at a place; nothing if the place is missing. `title` is shown when the reader points at it."""
    if x is None:
        return Markup()
    tooltip = html("<title>{}</title>", title) if title else Markup()
    return html('<circle class="{}" cx="{}%" cy="{}" r="{}">{}</circle>', kind, _at(x), y, radius, tooltip)


def line(kind: str, start: tuple[float, float], end: tuple[float, float], title: str = "") -> Markup:
    """Returns a line of a plot between two points (x, y), which are percentages from the lower left corner."""
    tooltip = html("<title>{}</title>", title) if title else Markup()
    numbers = (_at(start[0]), _at(100 - start[1]), _at(end[0]), _at(100 - end[1]))
    return html('<line class="{}" x1="{}%" y1="{}%" x2="{}%" y2="{}%">{}</line>', kind, *numbers, tooltip)


def stretched(paths: Iterable[tuple[str, str]], box: tuple[int, int], top: float, height: float) -> Markup:
    """Returns paths, given as (class, path), in a box (width, height) that is stretched to the width of a lane."""
    drawn = Markup().join(html('<path class="{}" d="{}"/>', kind, path) for kind, path in paths)
    shape = '<svg x="0" y="{}" width="100%" height="{}" viewBox="0 0 {} {}" preserveAspectRatio="none">{}</svg>'
    return html(shape, top, height, *box, drawn)


def part_text(part: str) -> str:
    """Returns the name of a part of a model, for people."""
    return part.replace("_", " ")


def part_class(part: str) -> str:
    """Returns the class of page.css with the colour of a part of a model. Unknown parts have the colour of `other`."""
    return f"part-{part if part in NODE_PARTS else 'other'}"


def key(kind: str) -> Markup:
    """Returns a small square in the colour of a model or a part."""
    return html('<span class="key {}"></span>', kind)


def glyph(*marks: Markup) -> Markup:
    """Returns a small drawing for a legend."""
    return html("<svg>{}</svg>", Markup().join(marks))


def legend(entries: Iterable[tuple[Markup, str]]) -> Markup:
    """Returns the legend of a chart, from pairs of (key or glyph, words)."""
    drawn = Markup().join(html("<span>{}{}</span>\n", sign, words) for sign, words in entries)
    return html('<p class="legend" aria-hidden="true">{}</p>\n', drawn)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One row of a chart, with its name beside the drawing."""

    name: Markup
    told: str
    """The drawing in words."""
    height: int
    """Height in pixels."""
    marks: Sequence[Markup]
    data: str = ""
    """Data for the script of the page: the value of the attribute `data-lane`."""


def lanes_chart(lanes: Iterable[Lane], axis: Axis | None, kind: str = "") -> Markup:
    """Returns lanes below each other, on one axis if there is one. `kind` is a class for the whole chart."""
    grid = Markup().join(upright("grid", at, 0, "100%") for _, at in axis.ticks) if axis else Markup()
    drawn = Markup().join(
        html(
            '<div class="lane"{}><div class="name">{}</div>'
            '<div class="plot"><svg height="{}" role="img" aria-label="{}">{}</svg></div></div>\n',
            html(' data-lane="{}"', lane.data) if lane.data else "",
            lane.name,
            lane.height,
            lane.told,
            Markup().join([grid, *lane.marks]),
        )
        for lane in lanes
    )
    scale = '<div class="lane scale"><div class="name"></div><div class="plot">{}</div></div>\n'
    foot = html(scale, _labels(axis, "axis", "left")) if axis else ""
    return html('<div class="chart{}">\n{}{}</div>\n', f" {kind}" if kind else "", drawn, foot)


def plot(*, caption: Markup, told: str, x: Axis, y: Axis, x_name: str, y_name: str, marks: Iterable[Markup]) -> Markup:
    """Returns a chart of two axes. Places of marks are percentages, those of `line` from the lower left corner."""
    uprights = (line("grid", (at, 0), (at, 100)) for _, at in x.ticks)
    levels = (line("grid", (0, at), (100, at)) for _, at in y.ticks)
    return html(
        '<figure>\n<figcaption>{}</figcaption>\n<div class="y-name" aria-hidden="true">{}</div>\n'
        '<div class="frame">{}<svg role="img" aria-label="{}">{}</svg></div>\n{}\n'
        '<div class="x-name" aria-hidden="true">{}</div>\n</figure>\n',
        caption,
        y_name,
        _labels(y, "upright-axis", "bottom"),
        told,
        Markup().join([*uprights, *levels, *marks]),
        _labels(x, "axis x-axis", "left"),
        x_name,
    )


def _labels(axis: Axis, kind: str, edge: str) -> Markup:
    spans = (html('<span style="{}:{}%">{}</span>', edge, _at(at), text) for text, at in axis.ticks)
    return html('<div class="{}" aria-hidden="true">{}</div>', kind, Markup().join(spans))


def _linear(first: int, last: int, step: float, text: Callable[[float], str], unit: str = "") -> Axis:
    low, high = first * step, last * step
    ticks = [(text(index * step), 100 * (index - first) / (last - first)) for index in range(first, last + 1)]
    ticks[-1] = (ticks[-1][0] + unit, 100.0)
    return Axis(low=low, high=high, ticks=tuple(ticks), scale=lambda value: 100 * (value - low) / (high - low))


def _step(span: float) -> float:
    """Returns a round distance of ticks, such that at most MOST_STEPS of them fit into `span`."""
    size = 10.0 ** math.floor(math.log10(span))
    return next(step for step in (size / 5, size / 2, size, 2 * size, 5 * size) if span / step <= MOST_STEPS)


def _finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _at(place: float) -> str:
    """Formats a place to a hundredth of a percent of the chart's width, which is finer than any screen."""
    return f"{place:.2f}".rstrip("0").rstrip(".")


def _safe(value: Any) -> Any:
    return value if isinstance(value, Markup | int | float) else printable(str(value), keep="\n")

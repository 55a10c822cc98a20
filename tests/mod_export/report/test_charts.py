"""Axes, marks, and the two kinds of charts."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup
from report_pages import Page, drawn, told

from mod_export.measure.parts import NODE_PARTS
from mod_export.report.charts import (
    CHARACTER,
    MOST_DECADES,
    MOST_STEPS,
    ZERO_WIDTH,
    Axis,
    Lane,
    axis_around,
    axis_from_zero,
    axis_of_listed,
    axis_of_logarithm,
    bar,
    dot,
    flat,
    html,
    lanes_chart,
    line,
    plot,
    stack,
    upright,
)
from mod_export.report.pages import light_colours

numbers = st.floats(min_value=1e-3, max_value=1e4)


@given(st.lists(numbers, min_size=1, max_size=8))
def test_an_axis_around_values_holds_all_of_them_at_their_places(values: list[float]) -> None:
    axis = axis_around(values, "{:g}x".format)
    for value in values:
        place = axis.place(value)
        assert place is not None
        assert -1e-6 <= place <= 100 + 1e-6
        assert axis.low + place / 100 * (axis.high - axis.low) == pytest.approx(value, abs=1e-9 * abs(axis.high))
    assert [axis.ticks[0][1], axis.ticks[-1][1]] == [0.0, 100.0]
    assert 2 <= len(axis.ticks) <= MOST_STEPS + 2


@given(st.lists(st.floats(min_value=0, max_value=1e6), max_size=20))
def test_an_axis_from_zero_fits_and_names_its_unit(values: list[float]) -> None:
    axis = axis_from_zero(values, smallest=1e-6, unit=" ms")
    assert axis.ticks[0] == ("0", 0)
    assert axis.ticks[-1][0].endswith(" ms")
    assert len(axis.ticks) <= MOST_STEPS + 1
    assert all(0 <= (axis.place(value) or 0) <= 100 + 1e-9 for value in values)


@given(st.lists(st.floats(min_value=1e-18, max_value=1e12), min_size=1, max_size=8))
def test_a_logarithmic_axis_keeps_order_and_labels_decades(values: list[float]) -> None:
    axis = axis_of_logarithm(values)
    places = [axis.place(value) for value in sorted(values)]
    assert all(place is not None and -1e-9 <= place <= 100 + 1e-9 for place in places)
    assert places == sorted(places)  # type: ignore[type-var]  # None is ruled out above.
    assert 2 <= len(axis.ticks) <= MOST_DECADES + 2
    assert all(label.startswith("1e") for label, _ in axis.ticks)


def test_zero_has_a_place_of_its_own_on_a_logarithmic_axis() -> None:
    axis = axis_of_logarithm([0.0, 1e-6, 1e-2])
    assert axis.ticks[:2] == (("0", 0.0), ("1e-06", ZERO_WIDTH))
    assert [axis.place(value) for value in (0.0, 1e-6, 1e-2, -1.0)] == [0.0, ZERO_WIDTH, 100.0, None]
    assert axis_of_logarithm([1e-6]).ticks[0] == ("1e-06", 0.0)


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_what_is_not_finite_has_no_place(value: float | None) -> None:
    for axis in (
        axis_around([value], str), axis_of_logarithm([value]), axis_from_zero([value], smallest=1.0),
        axis_of_listed([1.0, 2.0]),
    ):  # fmt: skip
        assert axis.place(value) is None
        assert 0 <= axis.clamped(1.0) <= 100
    assert [axis_around([1.0, 2.0], str).clamped(one) for one in (0.0, 1.5, 9.0)] == pytest.approx([0.0, 50.0, 100.0])


def test_listed_values_stand_at_equal_ratios() -> None:
    axis = axis_of_listed([16, 8, 64, 8])
    assert [label for label, _ in axis.ticks] == ["8", "16", "64"]
    small, middle, large = (at for _, at in axis.ticks)
    assert large - middle == pytest.approx(2 * (middle - small))
    assert axis_of_listed([3]).ticks == (("3", 50.0),)
    assert [axis_of_listed([0, 8, 16]).place(value) for value in (0, 8, 16)] == pytest.approx([6.0, 50.0, 94.0])


def test_labels_of_listed_values_stay_apart() -> None:
    ticks = axis_of_listed(range(8, 48)).ticks
    edges = [(at - CHARACTER * len(text) / 2, at + CHARACTER * len(text) / 2) for text, at in ticks]
    assert len(edges) > 4
    assert all(left[1] < right[0] for left, right in pairwise(edges))


def test_a_mark_without_a_place_is_not_drawn() -> None:
    assert [bar("a", 0, None, 1, 2), upright("a", None, 1, 2), flat("a", None, 3, 1), dot("a", None, 1, 1)] == [""] * 4


def test_stacked_parts_touch_and_have_their_colours() -> None:
    marks = stack([("mlp", 3.0), ("routing", math.nan), ("head", 0.0), ("convolution", 1.0)], AXIS, 1, 2)
    assert drawn(marks, "part-mlp") == [{"x": 0.0, "y": 1.0, "width": 75.0, "height": 2.0}]
    assert drawn(marks, "part-other") == [{"x": 75.0, "y": 1.0, "width": 25.0, "height": 2.0}]
    assert marks.count("<rect") == 2


def test_text_from_elsewhere_is_escaped_and_visible() -> None:
    assert html("<b>{}</b>{}{:,}", "<i>\x1b\u202e", Markup("<br>"), 1234) == "<b>&lt;i&gt;\\x1b\\u202e</b><br>1,234"
    assert dot("a", 1, 2, 3, title="<x>").count("<title>&lt;x&gt;</title>") == 1


def test_lanes_are_told_and_share_an_axis() -> None:
    lane = Lane(name=html("{}", "<n>"), told='a "b"', height=20, marks=[upright("gate", 50, 1, 2)], data="x")
    chart = lanes_chart([lane, lane], AXIS, "wide")
    assert told(chart) == ['a "b"'] * 2
    assert len(drawn(chart, "grid")) == 4
    assert Page(chart).text.split() == ["<n>", "<n>", "04"]
    assert chart.count('data-lane="x"') == 2
    assert chart.startswith('<div class="chart wide">')


def test_a_plot_counts_from_its_lower_left_corner() -> None:
    marks = [line("one", (0, 25), (100, 75))]
    chart = plot(caption=html("<b>c</b>"), told="t", x=AXIS, y=AXIS, x_name="k", y_name="ms", marks=marks)
    assert drawn(chart, "one") == [{"x1": 0.0, "y1": 75.0, "y2": 25.0}]
    assert told(chart) == ["t"]
    assert 'style="bottom:100%">4' in chart


AXIS = Axis(low=0, high=4, ticks=(("0", 0.0), ("4", 100.0)), scale=lambda value: 25 * value)


def test_every_part_has_a_colour_on_light_paper() -> None:
    colours = light_colours()
    assert all(re.fullmatch("#[0-9a-f]{6}", colours[part]) for part in NODE_PARTS)
    assert len({colours[part] for part in NODE_PARTS}) == len(NODE_PARTS)
    assert colours["card"] == "#fff"

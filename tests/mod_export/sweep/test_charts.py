"""Where marks lie: percentages of the plot from its lower left corner."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from mod_export.sweep.charts import CHARACTER, Plot, front_plot, speedup_plots, stair_plot
from mod_export.sweep.findings import points_of, stairs
from mod_export.sweep.schema import SweepReport


def all_of(plot: Plot) -> list[float]:
    places = [at for _, at in (*plot.x_ticks, *plot.y_ticks)]
    for series in plot.series:
        for mark in series.marks:
            places += [mark.x, mark.y, mark.low or 0.0, mark.high or 0.0]
        places += [at for line in series.lines for at in line]
    return places + [line[1] for line in (plot.level, plot.limit) if line]


def test_everything_lies_in_the_plot(whole: SweepReport) -> None:
    found = whole.findings
    plots = [*speedup_plots(points_of(whole.cells)), *map(stair_plot, found.stairs), *map(front_plot, found.fronts)]
    assert len(plots) == 5
    for plot in plots:
        assert all(-1e-9 <= at <= 100 + 1e-9 for at in all_of(plot)), plot.title


def test_speedups_over_capacity(whole: SweepReport) -> None:
    (plot,) = speedup_plots(points_of(whole.cells))
    assert [series.name for series in plot.series] == ["seq 128", "seq 512"]
    short = plot.series[0]
    assert [mark.strong for mark in short.marks] == [True, True, False]
    assert short.marks[1].x - short.marks[0].x == pytest.approx((short.marks[2].x - short.marks[1].x) / 2)
    assert len(short.lines) == 2
    assert plot.level is not None
    assert short.marks[2].y < plot.level[1] < short.marks[0].y


def test_over_length_where_there_is_one_capacity(cell: Any) -> None:
    (plot,) = speedup_plots(points_of([cell(8, seq=64), cell(16, seq=128)]))
    assert plot.x_name == "sequence length"
    assert [label for label, _ in plot.x_ticks] == ["64", "128"]
    assert [series.name for series in plot.series] == ["capacity 0.125"]


def test_a_single_cell(cell: Any) -> None:
    (plot,) = speedup_plots(points_of([cell(8)]))
    assert plot.series[0].marks[0].x == 50.0
    assert plot.series[0].lines == ()


def test_k_of_zero_has_a_place(cell: Any) -> None:
    cells = [cell(0, 2.5, capacity=0.001), cell(8, 2.0), cell(16, 1.5)]
    report_marks = [mark for series in _stair(cells).series for mark in series.marks]
    assert [mark.x for mark in report_marks] == pytest.approx([6.0, 50.0, 94.0])


def test_a_step_is_joined_and_its_largest_k_is_filled(cell: Any) -> None:
    first, second = _stair([cell(8, 2.0), cell(16, 2.0), cell(32, 1.0)]).series
    assert [mark.strong for mark in first.marks] == [False, True]
    assert len(first.lines) == 1
    assert [mark.strong for mark in second.marks] == [True]


def test_labels_stay_apart(cell: Any) -> None:
    plot = _stair([cell(k, 2.0 - 0.01 * k) for k in range(8, 48)])
    edges = [(at - CHARACTER * len(text) / 2, at + CHARACTER * len(text) / 2) for text, at in plot.x_ticks]
    assert len(edges) > 4
    assert all(one[1] < other[0] for one, other in pairwise(edges))


def test_the_front_is_joined_and_the_dense_twin_is_a_limit(whole: SweepReport) -> None:
    plot = front_plot(whole.findings.fronts[0])
    (series,) = plot.series
    assert [mark.strong for mark in series.marks] == [True, True, False]
    assert len(series.lines) == 1
    assert plot.limit is not None
    assert series.marks[0].x < plot.limit[1] < series.marks[2].x


def _stair(cells: Any) -> Plot:
    (found,) = stairs(points_of(cells))
    return stair_plot(found)

from __future__ import annotations

import math

import pytest

from mod_export.report import BuildReport
from mod_export.report.charts.generation import layers_ran, step_charts
from mod_export.report.generation_summary import steps_of


def test_bars_and_bytes_stand_on_one_axis(report: BuildReport) -> None:
    assert report.generation is not None
    charts = step_charts(steps_of(report.generation))
    assert [chart.steps.batch for chart in charts] == [1, 8]
    for chart, row in zip(charts, report.generation.decode, strict=True):
        (low, _), (high, _) = chart.ticks[0], chart.ticks[-1]
        assert low == 0
        assert row.bound_ms is not None
        assert [bar.model for bar in chart.bars] == ["dense", "mod"]
        for bar in chart.bars:
            assert bar.end == pytest.approx(100 * row.ms[bar.model] / high)
            assert bar.bound == pytest.approx(100 * row.bound_ms[bar.model] / high)


def test_what_memory_takes_may_be_unknown(report: BuildReport) -> None:
    assert report.generation is not None
    row = report.generation.decode[0].model_copy(update={"bound_ms": None, "ms": {"mod": math.nan, "dense": 1.0}})
    (chart,) = step_charts(steps_of(report.generation.model_copy(update={"decode": (row,), "parity": ()})))
    assert [(bar.end, bar.bound) for bar in chart.bars] == [(100, None), (None, None)]


def test_what_found_no_place_stands_behind_what_ran(report: BuildReport) -> None:
    assert report.generation is not None
    found = layers_ran(report.generation)
    assert found is not None
    first, second = found.bars
    end = found.ticks[-1][0]
    assert (first.site, first.overflow, first.lost) == ("1", 0, 0.0)
    assert (second.site, second.overflow) == ("3", 50)
    assert second.lost == pytest.approx(100 * (14.89 - 12.45) / end)
    assert second.room == pytest.approx(100 * 12.5 / end)


def test_there_are_no_layers_without_text_or_routing(report: BuildReport) -> None:
    assert report.generation is not None
    quality = report.generation.quality
    assert quality is not None
    assert layers_ran(report.generation.model_copy(update={"quality": None})) is None
    experts = {"0.expert0": 0.5}
    only = quality.model_copy(update={"wanted": experts, "ran": experts, "overflow": {"0.expert0": 1}})
    assert layers_ran(report.generation.model_copy(update={"quality": only})) is None

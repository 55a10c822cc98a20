"""Where the rest went: contributions add up to the gap, whatever was measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_rows import changed, part_row

from mod_export.benchmark.explain import gaps_of
from mod_export.results.cost import PartRow
from mod_export.types import ModelKind

milliseconds = st.floats(min_value=0.01, max_value=1000)
times = st.dictionaries(
    st.sampled_from(["mlp", "attention", "routing", "other"]), st.tuples(milliseconds, milliseconds)
)


def row(model: ModelKind, part: str, predicted: float, measured: float | None) -> PartRow:
    return part_row(bucket="b1s64", model=model, part=part, predicted_ms=predicted, measured_ms=measured)


PARTS = (
    row("dense", "mlp", 8.0, 8.0),
    row("dense", "attention", 4.0, 6.0),
    row("mod", "mlp", 4.0, 4.0),
    row("mod", "attention", 2.0, 2.0),
    row("mod", "routing", 0.0, 1.0),
)


def test_each_part_and_what_it_adds() -> None:
    (gap,) = gaps_of(PARTS)
    assert (gap.target, gap.bucket, gap.dtype) == ("ort-cpu", "b1s64", "float32")
    assert gap.measured == pytest.approx(14 / 7)
    assert gap.predicted == pytest.approx(12 / 6)
    found = {one.part: one for one in gap.rows}
    assert list(found) == ["mlp", "attention", "routing"]
    # As long as predicted: nothing. 2 ms more of the dense engine's: up. 1 ms more of the MoD engine's: down, twice.
    assert [one.contribution for one in gap.rows] == pytest.approx([0.0, 2 / 7, -2 / 7])
    assert (found["attention"].ratio, found["attention"].predicted_ratio) == (3.0, 2.0)
    assert (found["routing"].dense_ms, found["routing"].dense_predicted_ms, found["routing"].ratio) == (0.0, 0.0, 0.0)
    assert found["routing"].predicted_ratio is None


@given(dense=times.filter(bool), mod=times.filter(bool))
def test_the_contributions_add_up_to_the_gap(
    dense: dict[str, tuple[float, float]], mod: dict[str, tuple[float, float]]
) -> None:
    both: tuple[tuple[ModelKind, dict[str, tuple[float, float]]], ...] = (("dense", dense), ("mod", mod))
    rows = [row(model, part, *found) for model, parts in both for part, found in parts.items()]
    (gap,) = gaps_of(rows)
    whole = sum(one.contribution for one in gap.rows)
    largest = max(abs(one.contribution) for one in gap.rows)
    assert whole == pytest.approx(gap.measured - gap.predicted, rel=1e-9, abs=1e-9 * (1 + largest))


def test_settings_stand_apart() -> None:
    others = [changed(one, target="inductor", measured_ms=2.0) for one in PARTS]
    assert [gap.target for gap in gaps_of([*PARTS, *others])] == ["ort-cpu", "inductor"]
    assert gaps_of([*PARTS, *others])[0] == gaps_of(PARTS)[0]


def test_without_both_profiles_there_is_no_gap() -> None:
    assert gaps_of(PARTS[:2]) == ()
    assert gaps_of([changed(one, measured_ms=None) if one.model == "mod" else one for one in PARTS]) == ()
    assert gaps_of([changed(one, predicted_ms=0.0) for one in PARTS]) == ()
    assert gaps_of([]) == ()

"""A result is stored in a manifest and in report.json, and reads back as an equal value."""

from __future__ import annotations

import json
import math

import pytest
from pydantic import ValidationError
from sample_rows import changed, cost_row, latency_row, parity_row, part_row, precision_row, speedup_row

from mod_export.rows.base import Result, setting_fields
from mod_export.rows.correctness import Located, OutputParity, ParityRow, worst_error
from mod_export.types import Bucket, Setting

LOCATED = Located(layer="layers.1", operator=None, input="text", error=0.5, allowed=None)
ROWS = [
    parity_row(located=LOCATED, ties_exact=False), latency_row((1.5, 2.5), p50_ci95=(1.0, 2.0), flags=("busy",)),
    speedup_row(), precision_row(), cost_row(), part_row(measured_ms=None), speedup_row(role="decode"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: type(row).__name__)
def test_a_row_survives_a_manifest_and_a_report(row: Result) -> None:
    stored = json.loads(json.dumps(row.model_dump(mode="json")))
    assert type(row).model_validate(stored) == row
    assert type(row).model_validate_json(row.model_dump_json()) == row


def test_numbers_that_are_not_finite_survive_too() -> None:
    for number in (math.nan, math.inf, -math.inf):
        text = parity_row(kl=number).model_dump_json()
        assert repr(ParityRow.model_validate_json(text).kl) == repr(number)
        assert repr(ParityRow.model_validate(json.loads(text)).kl) == repr(number)
        assert repr(float(json.loads(text)["kl"])) == repr(number)


def test_rows_are_frozen_and_closed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        cost_row().flops = 3
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        cost_row(surprise=1)


def test_rows_name_their_setting() -> None:
    row = parity_row(role="decode", model="dense")
    assert row.setting == Setting(
        target="ort-cpu", dtype="float32", model="dense", role="decode", bucket=Bucket(1, 512)
    )
    assert speedup_row(role="decode").setting == row.setting.of("mod")
    assert {**setting_fields(row.setting)} == {name: getattr(row, name) for name in setting_fields(row.setting)}


def test_the_worst_error_of_all_outputs() -> None:
    first = parity_row().error
    further = [
        OutputParity(name=str(size), error=changed(first, max_abs=size), rounding_error=None, allowed_max_abs=1.0)
        for size in (0.5, math.nan, 0.25)
    ]
    row = parity_row(further_outputs=(further[0], further[2]))
    assert row.errors == (first, further[0].error, further[2].error)
    assert first.max_abs < 0.25
    assert worst_error(row.errors) == further[0].error
    assert worst_error(parity_row(further_outputs=tuple(further)).errors) is further[1].error
    assert worst_error(()) is None


def test_where_a_row_differs_is_said_as_far_as_it_is_known() -> None:
    statement = "differs first in layers.1: differs by 0.5 from a fresh export, which should give the same bits"
    assert str(LOCATED) == statement
    assert str(changed(LOCATED, operator="MatMul m", error=None)) == "differs first in layers.1, MatMul m"

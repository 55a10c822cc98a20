"""docs/report.schema.json and docs/report.md agree with what is written."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from sample_rows import changed

from mod_export.rows.docs import report_page, report_schema, write_docs
from mod_export.rows.report import BuildReport

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    published = json.loads((DOCS / "report.schema.json").read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(published)
    return Draft202012Validator(published)


def problems(validator: Draft202012Validator, data: Any) -> list[str]:
    return [error.json_path for error in validator.iter_errors(data)]


def test_the_published_files_are_those_of_the_code(tmp_path: Path) -> None:
    write_docs(tmp_path)
    for name in ("report.md", "report.schema.json"):
        assert (DOCS / name).read_text(encoding="utf-8") == (tmp_path / name).read_text(encoding="utf-8"), "make docs"


def test_reports_are_valid(
    validator: Draft202012Validator, report: BuildReport, failed_report: BuildReport, built: Path
) -> None:
    real = json.loads((built / "report.json").read_text(encoding="utf-8"))
    assert real["parity"]
    strange = [
        changed(report, parity=(changed(report.parity[0], kl=number),)) for number in (math.nan, math.inf, -math.inf)
    ]
    stored = [json.loads(valid_report.to_json()) for valid_report in (report, failed_report, *strange)]
    newer = stored[0] | {"added_later": {"x": 1}}
    assert [problems(validator, data) for data in (real, *stored, newer)] == [[]] * 7


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"schema_version": 1}, "$.schema_version"),
        ({"verdict": {"status": "maybe", "reasons": []}}, "$.verdict.status"),
        ({"targets": [{"target": "x", "available": "yes", "reason": "", "ran": False}]}, "$.targets[0].available"),
        ({"cost": [{"model": "mod"}]}, "$.cost[0]"),
    ],
)
def test_what_is_no_report_is_not_valid(
    validator: Draft202012Validator, report: BuildReport, change: dict[str, Any], where: str
) -> None:
    assert where in problems(validator, json.loads(report.to_json()) | change)


def test_every_field_is_explained() -> None:
    page, schema = report_page(), report_schema()
    for part in (schema, *schema["$defs"].values()):
        for field in part.get("properties", {}):
            assert re.search(rf"^## {field}$|\b{field}(\[\])?[`.]", page, flags=re.MULTILINE), field

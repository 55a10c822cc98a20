"""report.json reads back as it was written, and errors explain what cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mod_export.errors import BuildFolderError
from mod_export.rows.report import SCHEMA_VERSION, BuildReport, report_from_json

GOLDEN = Path(__file__).parent / "goldens" / "report-schema.json"


def test_a_report_reads_back_equal_from_standard_json(report: BuildReport, failed_report: BuildReport) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    for written in (report, failed_report):
        text = written.to_json()
        assert report_from_json(text) == written
        assert text.endswith("}\n")
        assert json.loads(text, parse_constant=refuse)["schema_version"] == SCHEMA_VERSION


def test_no_field_that_users_read_is_missing() -> None:
    """The golden file only grows: renaming or removing a field needs a new schema version."""
    schema = BuildReport.model_json_schema()
    found = {"BuildReport": schema["properties"]}
    found |= {name: part["properties"] for name, part in schema["$defs"].items() if "properties" in part}
    for name, fields in json.loads(GOLDEN.read_text(encoding="utf-8")).items():
        assert sorted(set(fields) - set(found[name])) == [], name


NO_JSON = r"^b/report\.json: damaged: not valid JSON \(.+\); build again$"
NO_REPORT = r"^b/report\.json: not a report of mod-export: schema_version is missing; build again$"
ANOTHER = r"^b/report\.json: schema_version {!r}, this mod-export reads 2; read it with the mod-export that"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, NO_JSON) for text in ("", "{", '{"schema_version": 1', "[" * 10_000)),
        *((text, NO_REPORT) for text in ("[]", "{}", '"schema_version"')),
        *((json.dumps({"schema_version": version}), ANOTHER.format(version)) for version in (1, 3, "2", None, 1.5)),
    ],
)
def test_what_is_no_report_of_this_version_is_named(text: str, message: str) -> None:
    with pytest.raises(BuildFolderError, match=message) as caught:
        report_from_json(text, "b/report.json")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"surprise": 1}, r"written by another version: surprise: Extra inputs are not permitted;"),
        ({"targets": [{"name": "x"}] * 3}, r"targets\.0\.target: Field required; .*; and 10 more; build again$"),
    ],
)
def test_damaged_fields_are_named_and_counted(report: BuildReport, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BuildFolderError, match=message):
        report_from_json(json.dumps(json.loads(report.to_json()) | changes))

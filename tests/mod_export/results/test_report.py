"""report.json: what is written is what is read, and what cannot be read is explained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mod_export.errors import BuildFolderError
from mod_export.results.report import SCHEMA_VERSION, BuildReport, report_from_json

GOLDEN = Path(__file__).parent / "goldens" / "report-schema.json"


def damaged(report: BuildReport, **changes: Any) -> str:
    return json.dumps(json.loads(report.to_json()) | changes)


def test_a_report_reads_back_equal(report: BuildReport, failed_report: BuildReport) -> None:
    for one in (report, failed_report):
        assert report_from_json(one.to_json()) == one


def test_the_json_is_standard_and_ends_with_a_newline(report: BuildReport) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = report.to_json()
    assert text.endswith("}\n")
    assert json.loads(text, parse_constant=refuse)["schema_version"] == SCHEMA_VERSION


def test_no_field_that_users_read_is_missing() -> None:
    """The golden only grows: a field that is renamed or removed needs a new schema version."""
    schema = BuildReport.model_json_schema()
    found = {"BuildReport": schema["properties"]}
    found |= {name: part["properties"] for name, part in schema["$defs"].items() if "properties" in part}
    for name, fields in json.loads(GOLDEN.read_text(encoding="utf-8")).items():
        assert sorted(set(fields) - set(found[name])) == [], name


@pytest.mark.parametrize("text", ["", "{", '{"schema_version": 1', "[" * 10_000])
def test_what_is_not_json_is_damaged(text: str) -> None:
    with pytest.raises(BuildFolderError, match=r"^b/report\.json: damaged: not valid JSON \(.+\); build again$"):
        report_from_json(text, "b/report.json")


@pytest.mark.parametrize("text", ["[]", "{}", "3", '"schema_version"'])
def test_what_is_no_report_is_named(text: str) -> None:
    message = r"^report\.json: not a report of mod-export: schema_version is missing; build again$"
    with pytest.raises(BuildFolderError, match=message):
        report_from_json(text)


@pytest.mark.parametrize("version", [1, 3, "2", None, 1.5])
def test_another_schema_version_is_refused(report: BuildReport, version: object) -> None:
    message = rf"^report\.json: schema_version {version!r}, this mod-export reads 2; read it with the mod-export that"
    with pytest.raises(BuildFolderError, match=message):
        report_from_json(damaged(report, schema_version=version))


def test_damaged_fields_are_named_and_counted(report: BuildReport) -> None:
    with pytest.raises(
        BuildFolderError, match=r"written by another version: surprise: Extra inputs are not permitted;"
    ):
        report_from_json(damaged(report, surprise=1))
    with pytest.raises(BuildFolderError, match=r"targets\.0\.target: Field required; .*; and 10 more; build again$"):
        report_from_json(damaged(report, targets=[{"name": "x"}] * 3))


def test_the_exit_code_is_that_of_unusable_input() -> None:
    with pytest.raises(BuildFolderError) as caught:
        report_from_json("")
    assert caught.value.exit_code == 2

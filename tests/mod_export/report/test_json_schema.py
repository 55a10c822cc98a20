"""docs/report.schema.json and docs/report.md: what is published is what is written."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from mod_export.report import BuildReport
from mod_export.report.json_schema import report_schema

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    published = json.loads((DOCS / "report.schema.json").read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(published)
    return Draft202012Validator(published)


def problems(validator: Draft202012Validator, data: Any) -> list[str]:
    return [error.json_path for error in validator.iter_errors(data)]


def fields(schema: dict[str, Any], node: dict[str, Any], path: str) -> Iterator[str]:
    """Every field below a node, lists as `name[]`."""
    choices = [node, *node.get("anyOf", ())]
    named = next((one["$ref"].rpartition("/")[2] for one in choices if "$ref" in one), None)
    if named is not None and named != "Number":
        node = schema["$defs"][named]
    if "properties" in node:
        for name, part in node["properties"].items():
            yield from fields(schema, part, f"{path}.{name}" if path else name)
    elif "properties" in schema["$defs"].get(node.get("items", {}).get("$ref", "").rpartition("/")[2], {}):
        yield from fields(schema, node["items"], f"{path}[]")
    else:
        yield path


def test_the_published_schema_is_that_of_the_code() -> None:
    assert json.loads((DOCS / "report.schema.json").read_text(encoding="utf-8")) == report_schema(), "run: make schema"


def test_the_module_prints_the_published_file() -> None:
    command = [sys.executable, "-m", "mod_export.report.json_schema"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == (DOCS / "report.schema.json").read_text(encoding="utf-8")


def test_a_report_of_a_real_build_is_valid(validator: Draft202012Validator, built: Path) -> None:
    data = json.loads((built / "report.json").read_text(encoding="utf-8"))
    assert data["parity"]
    assert problems(validator, data) == []


def test_reports_with_every_field_are_valid(
    validator: Draft202012Validator, report: BuildReport, failed_report: BuildReport
) -> None:
    for one in (report, failed_report):
        assert problems(validator, json.loads(one.to_json())) == []


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_valid(
    validator: Draft202012Validator, report: BuildReport, number: float
) -> None:
    row = report.parity[0]
    broken = row.model_copy(update={"error": row.error.model_copy(update={"max_abs": number}), "kl": number})
    data = json.loads(report.model_copy(update={"parity": (broken,)}).to_json())
    assert problems(validator, data) == []


def test_older_and_newer_reports_are_valid(validator: Draft202012Validator, report: BuildReport) -> None:
    data = json.loads(report.to_json())
    for name in ("structure", "causality", "routing_maps", "roofline", "parts", "command"):
        del data[name]
    for row in data["speedup"]:
        del row["verdict"], row["control"], row["reason"], row["predicted_roofline"]
    data["added_later"] = {"x": 1}
    assert problems(validator, data) == []


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"schema_version": 2}, "$.schema_version"),
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
    schema = report_schema()
    page = (DOCS / "report.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, flags=re.DOTALL | re.MULTILINE))
    explained = {
        (name, field)
        for name, text in sections.items()
        for cell in re.findall(r"^\| (`.*?) \|", text, flags=re.MULTILINE)
        for field in re.findall(r"`([^`]+)`", cell)
    }
    wanted = set()
    for path in fields(schema, schema, ""):
        head, _, rest = path.partition(".")
        name = head.removesuffix("[]")
        # Rows of parity are explained once.
        rest = "parity" if path.startswith("generation.parity[].") else rest
        wanted.add((name, rest) if name in sections else ("Head", path))
    assert explained == wanted

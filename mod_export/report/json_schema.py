"""The JSON Schema of report.json, for whoever reads reports without this package: docs/report.schema.json.

`python -m mod_export.report.json_schema` prints it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from mod_export.report.schema import SCHEMA_VERSION, BuildReport

__all__ = ["report_schema"]

NUMBER = "Number"
NAMESPACES = ("properties", "$defs")
"""Keywords whose keys are names and not keywords."""


def report_schema() -> dict[str, Any]:
    """JSON Schema, draft 2020-12, of every report of this schema version, older and newer ones included.

    What was added after the first report is not required, and unknown fields are allowed, because fields are added
    without a new version. Numbers may be the strings that stand for what is not finite.
    """
    made = _published(BuildReport.model_json_schema())
    definitions = made.pop("$defs")
    number = {
        "description": "A number; JSON has no other way to write one that is not finite.",
        "anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"report.json of mod-export, schema version {SCHEMA_VERSION}",
        **made,
        "$defs": dict(sorted({**definitions, NUMBER: number}.items())),
    }


def _published(node: Any) -> Any:
    if isinstance(node, list):
        return [_published(item) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "number":
        return {"$ref": f"#/$defs/{NUMBER}"}
    dropped = {"title"} | ({"additionalProperties"} if node.get("additionalProperties") is False else set())
    return {
        key: {name: _published(part) for name, part in item.items()} if key in NAMESPACES else _published(item)
        for key, item in node.items()
        if key not in dropped
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(report_schema(), indent=2) + "\n")

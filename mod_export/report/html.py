"""One self-contained HTML page: no script, no network, no font but the reader's own.

Text is escaped by the template engine, a content security policy forbids everything but the page's own styles, and
charts are inline SVG whose coordinates are percentages, so they fit a phone without shrinking their labels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import tomli_w
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from pydantic import JsonValue

from mod_export.measure.cost import PARTS
from mod_export.report.charts import flops_charts, latency_charts, speedup_chart
from mod_export.report.schema import BuildReport
from mod_export.report.summary import deployments, gains, settings_of, untried_targets
from mod_export.report.wording import (
    agreement_text,
    bytes_text,
    count_text,
    difference_text,
    error_text,
    flops_text,
    interval_text,
    ms_text,
    printable,
    ratio_text,
    share_text,
    threads_text,
    value_text,
)

__all__ = ["render_html"]


def render_html(report: BuildReport, *, command: str | None = None) -> str:
    """The report as one page. `command` is what was typed to build, by default what the report itself says."""
    template = _environment().from_string(files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8"))
    settings, found = settings_of(report), gains(report)
    page = template.render(
        report=report,
        command=command or report.command,
        config_toml=tomli_w.dumps(_without_null(report.config)),
        spec_json=json.dumps(report.model.spec, indent=2),
        settings=settings,
        gains=found,
        difference=difference_text(found.routed - found.agreed, found.faults),
        deployments=deployments(report),
        untried=untried_targets(report),
        speedup=speedup_chart(report.speedup),
        latency=latency_charts(settings),
        flops=flops_charts(report.cost),
        parts=list(PARTS),
        total_bytes=sum(artifact.bytes for artifact in report.artifacts),
        near_ties=" or ".join(dict.fromkeys(f"{row.gate.near_tie:g}" for row in report.parity)),
    )
    return page.lstrip() + "\n"


def _environment() -> Environment:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_cleaned
    )
    environment.filters |= {
        "agreement": agreement_text,
        "bytes": bytes_text,
        "count": count_text,
        "error": error_text,
        "flops": flops_text,
        "interval": interval_text,
        "ms": ms_text,
        "ratio": ratio_text,
        "share": share_text,
        "thousands": "{:,}".format,
        "threads": threads_text,
        "value": value_text,
    }
    return environment


def _cleaned(value: Any) -> Any:
    """Takes control characters and the like out of what came from outside; markup of our own passes."""
    return printable(value, keep="\n") if isinstance(value, str) and not isinstance(value, Markup) else value


def _without_null(value: Mapping[str, JsonValue]) -> dict[str, Any]:
    """TOML has no null: a key that is absent says the same."""
    return {
        key: _without_null(item) if isinstance(item, dict) else item for key, item in value.items() if item is not None
    }

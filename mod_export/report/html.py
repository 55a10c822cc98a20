"""One self-contained HTML page: no network, no font but the reader's own, one small script.

Text is escaped by the template engine. The content security policy allows the page's own styles, and the one script
whose hash it names. Everything can be read without the script, which lets a reader point at a sample or a token.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import tomli_w
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from pydantic import JsonValue

from mod_export.measure.cost import PARTS
from mod_export.report.charts.cost import COLOURED, flops_charts, roofline_charts, time_charts
from mod_export.report.charts.latency import latency_charts
from mod_export.report.charts.parity import error_chart, layers_chart
from mod_export.report.charts.routing import token_maps
from mod_export.report.charts.speedup import speedup_chart
from mod_export.report.deployment import deployments
from mod_export.report.precision import precisions
from mod_export.report.schema import BuildReport
from mod_export.report.summary import (
    agreement_by_input,
    allowed_error,
    broken_controls,
    gains,
    samplings,
    settings_of,
    untried_targets,
)
from mod_export.report.wording import (
    agreement_text,
    bytes_text,
    ci_text,
    count_text,
    difference_text,
    error_text,
    flops_text,
    interval_text,
    ms_text,
    percent_text,
    place_text,
    printable,
    ratio_text,
    setting_text,
    share_text,
    threads_text,
    token_text,
    value_text,
    verdicts_text,
)

__all__ = ["render_html"]


def render_html(report: BuildReport, *, command: str | None = None) -> str:
    """The report as one page. `command` is what was typed to build, by default what the report itself says."""
    settings, found = settings_of(report), gains(report)
    script = _part("page.js")
    page = (
        _environment()
        .get_template("page.html.j2")
        .render(
            report=report,
            command=command or report.command,
            config_toml=tomli_w.dumps(_without_null(report.config)),
            spec_json=json.dumps(report.model.spec, indent=2),
            style=Markup(_part("page.css")),  # noqa: S704 - a file of this package.
            script=Markup(script),  # noqa: S704 - a file of this package.
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            settings=settings,
            gains=found,
            difference=difference_text(found.routed - found.agreed, found.faults),
            samplings=samplings(report),
            broken_controls=broken_controls(report),
            deployments=deployments(report),
            untried=untried_targets(report),
            speedup=speedup_chart(report.speedup),
            precision=precisions(report),
            latency=latency_charts(settings),
            errors=error_chart(report.parity),
            layers=[layers_chart(row) for row in report.parity if row.routing.layers],
            maps=token_maps(report.routing_maps),
            flops=flops_charts(report.cost),
            times=time_charts(report.parts),
            rooflines=roofline_charts(report.roofline, report.parts),
            total_bytes=sum(artifact.bytes for artifact in report.artifacts),
        )
    )
    return page.lstrip() + "\n"


def _part(name: str) -> str:
    return files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_cleaned,
    )
    environment.globals |= {"models": {"mod": "MoD", "dense": "dense"}, "parts": list(PARTS), "coloured": COLOURED}
    environment.filters |= {
        "agreement": agreement_text,
        "allowed": allowed_error,
        "by_input": agreement_by_input,
        "at": place_text,
        "bytes": bytes_text,
        "ci": ci_text,
        "count": count_text,
        "error": error_text,
        "flops": flops_text,
        "interval": interval_text,
        "ms": ms_text,
        "percent": percent_text,
        "ratio": ratio_text,
        "setting": setting_text,
        "share": share_text,
        "thousands": "{:,}".format,
        "threads": threads_text,
        "token": token_text,
        "value": value_text,
        "verdicts": verdicts_text,
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

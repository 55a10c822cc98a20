"""report.html: one self-contained page, as `pages` makes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tomli_w
from pydantic import JsonValue

from mod_export.report.charts.cost import flops_charts, roofline_charts, time_charts
from mod_export.report.charts.generation import layers_ran, step_charts
from mod_export.report.charts.latency import latency_charts
from mod_export.report.charts.parity import error_chart, layers_chart
from mod_export.report.charts.routing import token_maps
from mod_export.report.charts.speedup import speedup_chart
from mod_export.report.deployment import deployments
from mod_export.report.generation_summary import layers_text, overflow_text, prompts_of, steps_of
from mod_export.report.pages import page_from_template
from mod_export.report.precision import precisions
from mod_export.report.schema import BuildReport
from mod_export.report.summary import broken_controls, gains, samplings, settings_of, untried_targets
from mod_export.report.wording import difference_text

__all__ = ["render_html"]


def render_html(report: BuildReport, *, command: str | None = None) -> str:
    """The report as one page. `command` is what was typed to build, by default what the report itself says."""
    settings, found = settings_of(report), gains(report)
    written = report.generation
    steps = steps_of(written) if written else ()
    return page_from_template(
        "page.html.j2",
        report=report,
        command=command or report.command,
        config_toml=tomli_w.dumps(_without_null(report.config)),
        spec_json=json.dumps(report.model.spec, indent=2),
        settings=settings,
        gains=found,
        difference=difference_text(found.routed - found.agreed, found.faults),
        samplings=samplings(report),
        broken_controls=broken_controls(report),
        deployments=deployments(report),
        untried=untried_targets(report),
        speedup=speedup_chart(report.speedup),
        precision=precisions(report),
        places=layers_text(written) if written else "",
        steps=steps,
        step_charts=step_charts(steps),
        prompts=prompts_of(written) if written else (),
        overflow=overflow_text(written.quality) if written and written.quality else "",
        layers_ran=layers_ran(written) if written else None,
        latency=latency_charts(settings),
        errors=error_chart(report.parity),
        layers=[layers_chart(row) for row in report.parity if row.routing.layers],
        maps=token_maps(report.routing_maps),
        flops=flops_charts(report.cost),
        times=time_charts(report.parts),
        rooflines=roofline_charts(report.roofline, report.parts),
        total_bytes=sum(artifact.bytes for artifact in report.artifacts),
    )


def _without_null(value: Mapping[str, JsonValue]) -> dict[str, Any]:
    """TOML has no null: a key that is absent says the same."""
    return {
        key: _without_null(item) if isinstance(item, dict) else item for key, item in value.items() if item is not None
    }

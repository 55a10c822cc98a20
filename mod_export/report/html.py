"""report.html: everything that a build found, as one page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tomli_w
from pydantic import JsonValue

from mod_export.report.cost_figures import flops_figures, roofline_figures, time_figures
from mod_export.report.generation import layers_text, overflow_text, prompts_of, steps_of
from mod_export.report.pages import render_page
from mod_export.report.parity_figures import error_figure, executed_figure, layers_figure, layers_legend, token_maps
from mod_export.report.speed_figures import latency_figures, speedup_figure, step_figure, step_legend
from mod_export.report.summary import (
    broken_controls,
    deployments,
    forward_parity,
    gains,
    precisions,
    samplings,
    settings_of,
    untried_targets,
)
from mod_export.report.wording import difference_text
from mod_export.results.report import BuildReport

__all__ = ["render_html"]


def render_html(report: BuildReport, *, command: str | None = None) -> str:
    """The report as one page. `command` is what was typed to build, by default what the report itself says."""
    settings, found = settings_of(report), gains(report)
    written = report.generation
    steps, parity = steps_of(report), forward_parity(report)
    return render_page(
        __package__,
        "templates/report.html.j2",
        report=report,
        parity=parity,
        token_parity=[row for row in report.parity if row.role != "forward"],
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
        speedup=speedup_figure(report.speedup),
        precision=precisions(report),
        slots=layers_text(written) if written else "",
        all_steps=steps,
        step_charts=[(one, one.row, step_figure(one, one.row)) for one in steps if one.row],
        step_legend=step_legend(),
        prompts=prompts_of(report),
        overflow=overflow_text(written.quality) if written and written.quality else "",
        executed=executed_figure(written) if written else "",
        latency=latency_figures(settings),
        errors=error_figure(parity),
        layers=[(row, layers_figure(row)) for row in parity if row.routing.layers],
        layers_legend=layers_legend(),
        maps=token_maps(report.routing_maps),
        flops=flops_figures(report.cost),
        times=time_figures(report.parts),
        rooflines=roofline_figures(report.roofline, report.parts),
        total_bytes=sum(artifact.bytes for artifact in report.artifacts),
    )


def _without_null(value: Mapping[str, JsonValue]) -> dict[str, Any]:
    """TOML has no null: a key that is absent says the same."""
    return {
        key: _without_null(item) if isinstance(item, dict) else item for key, item in value.items() if item is not None
    }

"""report.html, and the frame that it shares with the pages of sweep and inspect.

A page is self-contained: no network, the reader's own fonts, one small script. The template engine escapes text. The
content security policy allows the page's own styles and the one script whose hash it names. Everything can be read
without the script, which lets a reader point at a sample or a token.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import tomli_w
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup
from pydantic import JsonValue

from mod_export.measure.parts import PARTS
from mod_export.report import summary, tables, text, wording
from mod_export.report.charts import name_of, page_about, part_class, part_text
from mod_export.report.figures import cost, routing, speed
from mod_export.rows.report import BuildReport
from mod_export.types import QUANTIZED, Setting

DARK = "@media screen and (prefers-color-scheme: dark)"


def render_html(report: BuildReport) -> str:
    """Returns the report as one page."""
    compared = any(artifact.model == "dense" for artifact in report.artifacts)
    with page_about(routes=compared or any(row.routing.layers for row in report.parity)):
        return _rendered(report)


def _rendered(report: BuildReport) -> str:
    settings, steps, prompts = (summary.settings_of(report, role) for role in ("forward", "decode", "prefill"))
    whole, written = summary.parity_rows(report, forward=True), summary.parity_rows(report, forward=False)
    totals, generation, alone = summary.gains(report), report.generation, report.not_compared is not None
    timed = tables.timed_columns(report.not_compared)
    return render_page(
        __package__,
        "templates/report.html.j2",
        report=report,
        parity=whole,
        parity_table=tables.table_of((tables.NAMED, *tables.PARITY), whole),
        written_parity=written,
        written_parity_table=tables.table_of((tables.NAMED, *tables.PARITY), written),
        config_toml=tomli_w.dumps(_without_null(report.config)),
        spec_json=json.dumps(report.model.spec, indent=2),
        settings=settings,
        gains=totals,
        difference=wording.difference_text(totals.routed - totals.agreed, totals.faults),
        samplings=summary.samplings(report),
        causality=report.model.reads_tokens or any(row.suffixes for row in report.causality),
        deployments=summary.deployments(report),
        chosen=summary.chosen(report),
        unjudged=summary.is_unjudged(report),
        untried=summary.untried_targets(report),
        speedup=speed.speedup_figure(report.speedup),
        speedup_table=tables.table_of((tables.NAMED, *tables.COMPARED), [entry for entry in settings if entry.speed]),
        precision_table=tables.table_of(tables.PRECISION, summary.precisions(report.precision, report.parity)),
        slots=wording.slots_text(generation.capacity or {}) if generation else "",
        steps_table=tables.table_of((tables.NAMED, *tables.STEPS_JUDGED, *timed.steps), steps),
        step_charts=[(entry, speed.step_figure(entry)) for entry in steps if entry.written],
        step_legend=speed.step_legend(alone=alone),
        prompts_table=tables.table_of((tables.NAMED, tables.OUTCOME, *timed.prompts), prompts),
        generation_lines=text.generation_lines(generation, steps) if generation else (),
        executed=routing.executed_figure(generation) if generation else "",
        latency=speed.latency_figures(settings),
        errors=routing.error_figure(whole),
        layers=[(row, routing.layers_figure(row)) for row in whole if row.routing.layers],
        given_routing=summary.given_routing(whole),
        left_out=(*summary.left_out_lines(whole), *report.not_run.values()),
        no_sites=wording.NO_SITES if summary.lacks_sites(whole) else None,
        layers_legend=routing.layers_legend(),
        maps=routing.token_maps(report.routing_maps),
        flops=cost.flops_figures(report.cost),
        uncounted=summary.uncounted(report),
        uncompared=summary.uncompared(report),
        failures=tables.table_of(tables.FAILURES, report.failed),
        times=cost.time_figures(report.parts),
        rooflines=cost.roofline_figures(report.roofline, report.parts),
        named_text=None if report.text is None else wording.named_text(report.text),
        total_bytes=sum(artifact.bytes for artifact in report.artifacts),
    )


def _without_null(value: Mapping[str, JsonValue]) -> dict[str, Any]:
    """Leaves out keys without a value, because TOML has no null."""
    return {
        key: _without_null(item) if isinstance(item, dict) else item for key, item in value.items() if item is not None
    }


def render_page(package: str, template: str, *, script: str | None = None, **values: Any) -> str:
    """Renders `template`, a file of `package` that extends shell.html.j2, with `values`. `script` replaces page.js."""
    return _template(package, template).render(**_shell(script), **values).lstrip() + "\n"


def light_colours() -> Mapping[str, str]:
    """Returns name -> #rrggbb or #rgb of page.css's light scheme, so that figures elsewhere look like a page's."""
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6})\b", _part("page.css").split(DARK)[0]))


def _shell(script: str | None) -> dict[str, Any]:
    script = _part("page.js") if script is None else script
    return {
        "style": Markup(_part("page.css")),  # noqa: S704 - a file of this package.
        "script": Markup(script),  # noqa: S704 - a file of this package.
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }


def _part(name: str) -> str:
    return files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


@cache
def _template(package: str, name: str) -> Template:
    return _environment().from_string(files(package).joinpath(name).read_text(encoding="utf-8"))


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
    environment.globals |= {"name_of": name_of, "parts": list(PARTS), "quantized": QUANTIZED}
    environment.filters |= {
        name.removesuffix("_text"): function for name, function in vars(wording).items() if name.endswith("_text")
    }
    environment.filters |= {
        "by_input": summary.agreement_by_input,
        "part": part_text,
        "part_class": part_class,
        "thousands": "{:,}".format,
    }
    return environment


def _cleaned(value: Any) -> Any:
    """Makes control characters in text from elsewhere visible. Our own markup passes unchanged."""
    outside = isinstance(value, str | Setting) and not isinstance(value, Markup)
    return wording.printable(str(value), keep="\n") if outside else value

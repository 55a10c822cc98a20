"""sweep.html: one self-contained page without script and without network, in the manner of report.html."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from mod_export.report.wording import count_text, interval_text, ms_text, printable, ratio_text, value_text
from mod_export.sweep.charts import front_plot, speedup_plots, stair_plot
from mod_export.sweep.findings import points_of
from mod_export.sweep.schema import SweepReport
from mod_export.sweep.text import (
    capacity_text,
    fidelity_text,
    front_text,
    length_lines,
    perplexity_text,
    setting_text,
    share_of,
    step_text,
)

__all__ = ["render_html"]


def render_html(report: SweepReport) -> str:
    """The sweep as one page."""
    template = _environment().from_string(files(__package__).joinpath("sweep.html.j2").read_text(encoding="utf-8"))
    found = report.findings
    page = template.render(
        report=report,
        found=found,
        lengths=length_lines(found.break_even_length),
        failed=[cell for cell in report.cells if cell.status == "failed"],
        missed=[cell for cell in report.cells if cell.status == "measured" and not cell.passed],
        speedups=speedup_plots(points_of(report.cells)),
        stairs=[(stair, stair_plot(stair)) for stair in found.stairs],
        fronts=[(front, front_plot(front)) for front in found.fronts],
    )
    return page.lstrip() + "\n"


def _environment() -> Environment:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_cleaned
    )
    environment.filters |= {
        "capacity": share_of,
        "capacity_text": capacity_text,
        "count": count_text,
        "fidelity": fidelity_text,
        "front": front_text,
        "interval": interval_text,
        "ms": ms_text,
        "perplexity": perplexity_text,
        "ratio": ratio_text,
        "setting": setting_text,
        "step": step_text,
        "value": value_text,
    }
    return environment


def _cleaned(value: Any) -> Any:
    """Takes control characters and the like out of what came from outside; markup of our own passes."""
    return printable(value, keep="\n") if isinstance(value, str) and not isinstance(value, Markup) else value

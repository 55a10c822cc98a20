"""The build report: text for a console, versioned JSON for scripts, one HTML page for everybody else.

Everything here returns or prints text. Files are written by the caller, beside and renamed into place.
"""

from __future__ import annotations

from mod_export.report.html import render_html
from mod_export.report.schema import SCHEMA_VERSION, BuildReport, report_from_json
from mod_export.report.text import print_report, render_text

__all__ = ["SCHEMA_VERSION", "BuildReport", "print_report", "render_html", "render_text", "report_from_json"]

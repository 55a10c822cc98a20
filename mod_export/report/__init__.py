"""Renders a build report as text for a console and as one HTML page.

The functions here return or print text. Callers write the files, as temporary files that are renamed into place.
"""

from __future__ import annotations

from mod_export.report.pages import render_html
from mod_export.report.text import print_report, render_text

__all__ = ["print_report", "render_html", "render_text"]

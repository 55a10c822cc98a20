"""Rendering of a build report: text for a console, and one HTML page.

Everything here returns or prints text. Files are written by the caller, beside and renamed into place.
"""

from __future__ import annotations

from mod_export.report.pages import render_html
from mod_export.report.text import print_report, render_text

__all__ = ["print_report", "render_html", "render_text"]

"""The sample reports, for every test of their rendering."""

from __future__ import annotations

from sample_report import failed_report, report

__all__ = ["failed_report", "report"]

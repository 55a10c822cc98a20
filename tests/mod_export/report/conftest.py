"""Sample reports for all tests of rendering."""

from __future__ import annotations

from sample_report import alone_report, failed_report, report

__all__ = ["alone_report", "failed_report", "report"]

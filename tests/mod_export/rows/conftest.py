"""Sample reports for tests of how they are stored."""

from __future__ import annotations

from sample_report import failed_report, report

__all__ = ["failed_report", "report"]

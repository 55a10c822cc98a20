"""Size, speed and quality of narrower engines, in words."""

from __future__ import annotations

from mod_export.report import render_html, render_text
from mod_export.report.summary import precision_lines, precisions
from mod_export.results.report import BuildReport

ROW = {
    "target": "ort-cpu", "bucket": "b1s512", "dtype": "float32", "model": "mod", "bytes": 6 * 2**20,
    "float32_bytes": 13 * 2**20, "p50_ms": 280.0, "float32_p50_ms": 401.0, "measured": 1.43, "ci95": [1.42, 1.46],
    "verdict": "faster",
}  # fmt: skip


def with_row(report: BuildReport, **changes: object) -> BuildReport:
    """The row is about an engine that the report's parity knows."""
    return BuildReport.model_validate(report.model_dump(mode="json") | {"precision": [ROW | changes]})


def test_a_report_without_other_dtypes_says_nothing(report: BuildReport) -> None:
    assert precision_lines(report) == []
    assert "Lower precision" not in render_html(report)


def test_what_stands_beside_float32(report: BuildReport) -> None:
    (line,) = precision_lines(with_row(report))
    assert line.startswith(
        "ort-cpu b1s512 float32 mod: 6.0 MiB instead of 13.0 MiB, 1.43x [1.42, 1.46] as fast as float32"
    )
    assert "not shipped" not in line
    page = render_html(with_row(report))
    assert "Lower precision" in page
    assert "1.43x [1.42, 1.46]" in page
    assert line in render_text(with_row(report), "folder")


def test_an_engine_that_was_not_judged(report: BuildReport) -> None:
    (one,) = precisions(with_row(report, dtype="int8"))
    assert (one.passed, one.agreement, one.perplexity) == (None, "-", "-")


def test_what_missed_its_gates_is_not_shipped(failed_report: BuildReport) -> None:
    failed = next(row for row in failed_report.parity if not row.passed)
    about = {"target": failed.target, "bucket": failed.bucket, "dtype": failed.dtype, "model": failed.model}
    (line,) = precision_lines(with_row(failed_report, **about))
    assert line.endswith(", missed its gates: not shipped")

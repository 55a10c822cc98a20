"""Narrower dtypes beside float32: size, speed and quality of an engine in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mod_export.report.latency_entries import PrecisionEntry
from mod_export.report.parity_entries import ParityEntry
from mod_export.report.schema import BuildReport
from mod_export.report.wording import bytes_text, interval_text, setting_text, share_text

__all__ = ["Precision", "precision_lines", "precisions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """A row with what was found about the same engine's quality, in words; a dash where nothing was."""

    row: PrecisionEntry
    passed: bool | None
    agreement: str = "-"
    perplexity: str = "-"
    reference: str = ""


def precisions(report: BuildReport) -> tuple[Precision, ...]:
    """One for each row of `precision`, in their order."""
    return tuple(_precision(row, report.parity) for row in report.precision)


def precision_lines(report: BuildReport) -> list[str]:
    """One line for each of them, for a console."""
    return [", ".join(_parts(one)) for one in precisions(report)]


def _parts(one: Precision) -> list[str]:
    row = one.row
    parts = [
        f"{setting_text(row)} {row.model}: {bytes_text(row.bytes)} instead of {bytes_text(row.float32_bytes)}",
        f"{interval_text(row)} as fast as float32",
    ]
    if one.reference:
        parts += [f"same next token on text {one.agreement}", f"perplexity {one.perplexity} {one.reference}"]
    return [*parts, "missed its gates: not shipped"] if one.passed is False else parts


def _precision(row: PrecisionEntry, parity: Sequence[ParityEntry]) -> Precision:
    key = (row.target, row.bucket, row.dtype, row.model)
    judged = next((one for one in parity if (one.target, one.bucket, one.dtype, one.model) == key), None)
    if judged is None:
        return Precision(row=row, passed=None)
    text = judged.text
    if text is None or text.own_perplexity is None or text.next_token_agreement is None:
        return Precision(row=row, passed=judged.passed)
    return Precision(
        row=row,
        passed=judged.passed,
        agreement=share_text(text.next_token_agreement),
        perplexity=f"{text.perplexity:.4f}",
        reference=f"(PyTorch {text.own_perplexity:.4f})",
    )

"""What `mod-export validate` and `mod-export bench` print: rows, what must be known beside them, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from mod_export.report.generation import quality_text
from mod_export.report.summary import Precision, precision_text
from mod_export.report.tables import table_lines
from mod_export.report.text import disturbance_lines, reason_lines
from mod_export.report.wording import (
    agreement_text,
    error_text,
    interval_text,
    ms_text,
    printable,
    ratio_interval_text,
    ratio_text,
    share_text,
)
from mod_export.results.generation import DecodeRow, FirstTokenRow, QualityRow, TextsRow
from mod_export.results.latency import Control, LatencyRow, PrecisionRow, SpeedupRow
from mod_export.results.parity import ParityRow
from mod_export.results.report import Verdict
from mod_export.results.structure import CausalityRow, StructureRow

__all__ = ["render_precision", "render_prompts", "render_speedup", "render_steps", "render_validation", "text_lines"]

VALIDATED = (
    "target", "role", "bucket", "dtype", "model", "parity", "routing agreement", "near-ties", "max error",
    "rounding error", "next token", "KL", "perplexity", "ties", "causal",
)  # fmt: skip
SPEEDUPS = (
    "target", "bucket", "dtype", "dense ms", "MoD ms", "speed-up [95 %]", "verdict", "control [99 %]",
    "predicted (FLOPs)", "efficiency", "gate",
)  # fmt: skip
STEPS = (
    "token by token", "rows x cache", "dtype", "dense tokens/s", "MoD tokens/s", "speed-up [95 %]",
    "predicted (bytes)", "efficiency",
)  # fmt: skip

PROMPTS = ("first token", "prompt", "dtype", "dense ms", "MoD ms", "speed-up [95 %]")


def render_validation(
    structure: Sequence[StructureRow],
    parity: Sequence[ParityRow],
    causality: Sequence[CausalityRow],
    verdict: Verdict,
    notes: Sequence[str] = (),
) -> str:
    """One line for each candidate that ran, what was found in the files, and the verdict with every reason."""
    causal = {row.engine_key: row.causal for row in causality if row.suffixes}
    rows = [_validated(row, causal.get(row.engine_key)) for row in parity]
    beside = [*_files(structure), *notes, *_statements(causality)]
    return _text([*table_lines(VALIDATED, rows), "", *beside, ""], verdict)


def render_speedup(latency: Sequence[LatencyRow], speedup: Sequence[SpeedupRow], verdict: Verdict) -> str:
    """One line for each comparison, reasons and disturbances, then the verdict."""
    median = {row.engine_key: row.p50_ms for row in latency}
    rows = [
        (
            row.target,
            row.bucket,
            row.dtype,
            ms_text(median[*row.pair_key, "dense"]),
            ms_text(median[*row.pair_key, "mod"]),
            interval_text(row),
            row.verdict,
            _control(row.control),
            ratio_text(row.predicted_flops),
            f"{row.efficiency:.2f}",
            "-" if row.gate is None else f"{ratio_text(row.gate)} {'pass' if row.passed else 'FAIL'}",
        )
        for row in speedup
    ]
    remarks = [*reason_lines(speedup), *disturbance_lines(latency)]
    return _text([*table_lines(SPEEDUPS, rows), "", *map(printable, remarks), *([""] if remarks else [])], verdict)


def render_steps(rows: Sequence[DecodeRow]) -> str:
    """One line for each decode bucket; nothing where nothing writes text."""
    if not rows:
        return ""
    cells = [
        (
            row.target,
            row.bucket,
            row.dtype,
            f"{row.tokens_per_second['dense']:,.0f}",
            f"{row.tokens_per_second['mod']:,.0f}",
            ratio_interval_text(row.measured, row.ci95),
            ratio_text(row.predicted_bytes),
            f"{row.efficiency:.2f}",
        )
        for row in rows
    ]
    return "\n" + "\n".join(table_lines(STEPS, cells)) + "\n"


def render_prompts(rows: Sequence[FirstTokenRow]) -> str:
    """One line for each prefill bucket; nothing where nothing writes text."""
    if not rows:
        return ""
    cells = [
        (
            row.target,
            f"{row.tokens:,} tokens",
            row.dtype,
            ms_text(row.ms["dense"]),
            ms_text(row.ms["mod"]),
            ratio_interval_text(row.measured, row.ci95),
        )
        for row in rows
    ]
    return "\n" + "\n".join(table_lines(PROMPTS, cells)) + "\n"


def render_precision(rows: Sequence[PrecisionRow]) -> str:
    """One line for each engine of a narrower dtype beside its float32 counterpart."""
    lines = [printable(precision_text(Precision(row=row, passed=None))) for row in rows]
    return "\n" + "\n".join(lines) + "\n" if lines else ""


def text_lines(texts: Sequence[TextsRow], quality: Sequence[QualityRow]) -> list[str]:
    """What was found about texts that are written token by token; nothing where nothing writes text."""
    identical, compared = (sum(counts) for counts in ([row.identical for row in texts], [row.texts for row in texts]))
    lines = [f"texts: {identical:,} of {compared:,} are those of eager PyTorch, token for token"] if compared else []
    return [*lines, *map(quality_text, quality)]


def _validated(row: ParityRow, causal: bool | None) -> tuple[str, ...]:
    return (
        row.target,
        row.role,
        row.bucket,
        row.dtype,
        row.model,
        "pass" if row.passed else "FAIL",
        agreement_text(row.routing),
        str(row.routing.near_ties),
        error_text(row.error.max_abs),
        "-" if row.rounding_error is None else error_text(row.rounding_error),
        share_text(row.next_token_agreement),
        error_text(row.kl),
        "-" if row.text is None else f"{row.text.perplexity:.4f}",
        _word(row.ties_exact),
        _word(causal),
    )


def _control(control: Control) -> str:
    return f"{control.measured:.3f}x [{control.ci99[0]:.3f}, {control.ci99[1]:.3f}]"


def _files(structure: Sequence[StructureRow]) -> list[str]:
    paths = {row.path for row in structure}
    failed = {row.path for row in structure if not row.passed}
    if failed:
        return [f"files: {len(failed)} of {len(paths)} are not what they must be, see below"]
    if not paths:
        return []
    return [f"files: all {len(paths)} are as they were built; weights are the checkpoint's, bit for bit"]


def _statements(causality: Sequence[CausalityRow]) -> list[str]:
    """One statement for each model: that of an engine that looks ahead, if one does."""
    rows = sorted(causality, key=lambda row: row.causal)
    by_model = {kind: [row for row in rows if row.model == kind] for kind in ("mod", "dense")}
    return [
        f"{kind}: {found[0].statement} ({found[0].target} {found[0].bucket})"
        for kind, found in by_model.items()
        if found
    ]


def _text(lines: Sequence[str], verdict: Verdict) -> str:
    reasons = [f"  - {printable(reason)}" for reason in verdict.reasons]
    return "\n".join([*lines, *reasons, verdict.status.upper()]) + "\n"


def _word(found: bool | None) -> str:
    return {None: "-", True: "yes", False: "NO"}[found]

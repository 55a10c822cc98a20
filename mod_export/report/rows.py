"""The tables of `mod-export validate` and `mod-export bench`: rows of one kind, without a whole report around them."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from mod_export.measure.latency import LatencyRow
from mod_export.measure.statistics import SpeedupRow
from mod_export.measure.verdict import Verdict
from mod_export.report.latency_entries import SpeedupEntry
from mod_export.report.parity_entries import ParityEntry
from mod_export.report.text import HEAD
from mod_export.report.wording import (
    agreement_text,
    error_text,
    interval_text,
    ms_text,
    printable,
    ratio_text,
    share_text,
)
from mod_export.validate.parity import ParityRow

__all__ = ["render_parity", "render_speedup"]

UNBOUNDED = 10_000


def render_parity(rows: Sequence[ParityRow], verdict: Verdict) -> str:
    """One line for each engine that ran, then the verdict."""
    table = _table(
        "target", "bucket", "dtype", "model", "parity", "routed alike", "near-ties", "max error", "next token"
    )
    for row in rows:
        entry = ParityEntry.model_validate(row)
        table.add_row(
            row.target,
            row.bucket,
            row.dtype,
            row.model,
            "pass" if row.passed else "FAIL",
            agreement_text(entry.routing),
            str(entry.routing.near_ties),
            error_text(entry.error.max_abs),
            share_text(entry.next_token_agreement),
        )
    return _text(table, verdict)


def render_speedup(latency: Sequence[LatencyRow], speedup: Sequence[SpeedupRow], verdict: Verdict) -> str:
    """One line for each comparison, then the verdict."""
    median = {(row.target, row.bucket, row.dtype, row.model): row.p50_ms for row in latency}
    table = _table(
        "target", "bucket", "dtype", "dense ms", "MoD ms", "speed-up [95 %]", "FLOPs say", "efficiency", "gate"
    )
    for row in speedup:
        key = (row.target, row.bucket, row.dtype)
        table.add_row(
            *key,
            ms_text(median[*key, "dense"]),
            ms_text(median[*key, "mod"]),
            interval_text(SpeedupEntry.model_validate(row)),
            ratio_text(row.predicted_flops),
            f"{row.efficiency:.2f}",
            "-" if row.gate is None else f"{ratio_text(row.gate)} {'pass' if row.passed else 'FAIL'}",
        )
    return _text(table, verdict)


def _table(*heads: str) -> Table:
    table = Table(*heads, box=HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for column in table.columns:
        column.no_wrap = True
    return table


def _text(table: Table, verdict: Verdict) -> str:
    file = io.StringIO()
    console = Console(file=file, width=UNBOUNDED, color_system=None)
    console.print(table)
    lines = [*(f"  - {printable(reason)}" for reason in verdict.reasons), verdict.status.upper()]
    rows = [line.rstrip() for line in file.getvalue().splitlines()]
    return "\n".join([*rows, "", *lines]) + "\n"

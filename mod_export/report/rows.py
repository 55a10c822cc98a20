"""What `mod-export bench` prints: speed-ups with verdict and control, without a whole report around them."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from mod_export.measure.decoding import DecodeRow
from mod_export.measure.latency import LatencyRow
from mod_export.measure.statistics import SpeedupRow
from mod_export.measure.verdict import Verdict
from mod_export.report.latency_entries import Control, LatencyEntry, SpeedupEntry
from mod_export.report.remarks import disturbance_lines, reason_lines
from mod_export.report.tables import HEAD
from mod_export.report.wording import interval_text, ms_text, printable, ratio_text

__all__ = ["render_speedup", "render_steps"]

UNBOUNDED = 10_000


def render_speedup(latency: Sequence[LatencyRow], speedup: Sequence[SpeedupRow], verdict: Verdict) -> str:
    """One line for each comparison, what must be known beside it, then the verdict."""
    median = {(row.target, row.bucket, row.dtype, row.model): row.p50_ms for row in latency}
    table = _table(
        "target", "bucket", "dtype", "dense ms", "MoD ms", "speed-up [95 %]", "verdict", "control [99 %]", "FLOPs say",
        "efficiency", "gate",
    )  # fmt: skip
    entries = [SpeedupEntry.model_validate(row) for row in speedup]
    for row in entries:
        key = (row.target, row.bucket, row.dtype)
        table.add_row(
            *key,
            ms_text(median[*key, "dense"]),
            ms_text(median[*key, "mod"]),
            interval_text(row),
            row.verdict or "-",
            _control(row.control),
            ratio_text(row.predicted_flops),
            f"{row.efficiency:.2f}",
            "-" if row.gate is None else f"{ratio_text(row.gate)} {'pass' if row.passed else 'FAIL'}",
        )
    remarks = [*reason_lines(entries), *disturbance_lines([LatencyEntry.model_validate(row) for row in latency])]
    return _text(table, remarks, verdict)


def render_steps(rows: Sequence[DecodeRow]) -> str:
    """One line for each decode bucket; nothing where nothing writes text."""
    if not rows:
        return ""
    table = _table(
        "token by token", "texts x cache", "dtype", "dense tokens/s", "MoD tokens/s", "speed-up [95 %]", "bytes say",
        "efficiency",
    )  # fmt: skip
    for row in rows:
        low, high = row.ci95
        table.add_row(
            row.target,
            row.bucket,
            row.dtype,
            f"{row.tokens_per_second['dense']:,.0f}",
            f"{row.tokens_per_second['mod']:,.0f}",
            f"{row.speedup:.2f}x [{low:.2f}, {high:.2f}]",
            ratio_text(row.bound),
            f"{row.efficiency:.2f}",
        )
    return "\n" + "\n".join(_lines(table)) + "\n"


def _control(control: Control | None) -> str:
    return "-" if control is None else f"{control.measured:.3f}x [{control.ci99[0]:.3f}, {control.ci99[1]:.3f}]"


def _table(*heads: str) -> Table:
    table = Table(*heads, box=HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for column in table.columns:
        column.no_wrap = True
    return table


def _text(table: Table, remarks: Sequence[str], verdict: Verdict) -> str:
    lines = [*(f"  - {printable(reason)}" for reason in verdict.reasons), verdict.status.upper()]
    beside = [*map(printable, remarks), ""] if remarks else []
    return "\n".join([*_lines(table), "", *beside, *lines]) + "\n"


def _lines(table: Table) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=UNBOUNDED, color_system=None).print(table)
    return [line.rstrip() for line in file.getvalue().splitlines()]

"""What `mod-export validate` prints: files, parity, causality, and the verdict."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from mod_export.measure.verdict import Verdict
from mod_export.report.parity_entries import ParityEntry
from mod_export.report.tables import HEAD
from mod_export.report.wording import agreement_text, error_text, printable, share_text
from mod_export.validate.causality import CausalityRow
from mod_export.validate.rows import ParityRow
from mod_export.validate.structure import StructureRow

__all__ = ["render_validation"]

UNBOUNDED = 10_000


def render_validation(
    structure: Sequence[StructureRow],
    parity: Sequence[ParityRow],
    causality: Sequence[CausalityRow],
    verdict: Verdict,
    notes: Sequence[str] = (),
) -> str:
    """One line for each candidate that ran, what was found in the files, and the verdict with every reason."""
    table = Table(
        "target", "bucket", "dtype", "model", "parity", "routed alike", "near-ties", "max error", "rounding",
        "next token", "KL", "perplexity", "ties", "causal",
        box=HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0),
    )  # fmt: skip
    for column in table.columns:
        column.no_wrap = True
    causal = {(row.target, row.bucket, row.dtype, row.model): row.causal for row in causality if row.suffixes}
    for row in parity:
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
            "-" if entry.noise is None else error_text(entry.noise),
            share_text(entry.next_token_agreement),
            "-" if entry.kl is None else error_text(entry.kl),
            "-" if entry.text is None else f"{entry.text.perplexity:.4f}",
            _word(entry.ties_exact),
            _word(causal.get((row.target, row.bucket, row.dtype, row.model))),
        )
    return (
        "\n".join([*_lines(table), "", *_files(structure), *notes, *_statements(causality), "", *_verdict(verdict)])
        + "\n"
    )


def _lines(table: Table) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=UNBOUNDED, color_system=None).print(table)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def _files(structure: Sequence[StructureRow]) -> list[str]:
    paths = {row.path for row in structure}
    failed = {row.path for row in structure if not row.passed}
    if failed:
        return [f"files: {len(failed)} of {len(paths)} are not what they must be, see below"]
    return (
        [f"files: all {len(paths)} are as they were built; weights are the checkpoint's, bit for bit"] if paths else []
    )


def _statements(causality: Sequence[CausalityRow]) -> list[str]:
    """One statement for each model, of the engine that says most."""
    rows = sorted(causality, key=lambda row: row.causal)
    by_model = {kind: [row for row in rows if row.model == kind] for kind in ("mod", "dense")}
    return [
        f"{kind}: {found[0].statement} ({found[0].target} {found[0].bucket})"
        for kind, found in by_model.items()
        if found
    ]


def _verdict(verdict: Verdict) -> list[str]:
    return [*(f"  - {printable(reason)}" for reason in verdict.reasons), verdict.status.upper()]


def _word(found: bool | None) -> str:
    return {None: "-", True: "yes", False: "NO"}[found]

"""Token by token, on a console: how fast text is written, whether it is the right text, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mod_export.report.generation_entries import DecodeEntry, GenerationEntry, QualityEntry
from mod_export.report.generation_summary import (
    Prompts,
    Steps,
    layers_text,
    overflow_text,
    prompts_of,
    range_text,
    steps_of,
)
from mod_export.report.tables import QUIET, fitted_table, judged_text
from mod_export.report.wording import bytes_text, ms_text, ratio_interval_text, ratio_text, threads_text

__all__ = ["generation_parts"]

STEPS = (
    "target", "bucket", "dtype", "parity", "texts alike", "tokens routed", "dense tok/s", "MoD tok/s",
    "speed-up [95 %]", "verdict", "bytes say", "efficiency",
)  # fmt: skip
STEPS_STACKED = ((0, 1, 2), (3, 4, 5), (6, 7, 9), (8, 10, 11))
PROMPTS = ("target", "prompt", "dtype", "parity", "dense ms", "MoD ms", "speed-up [95 %]", "verdict")
PROMPTS_STACKED = ((0, 1, 2), (3,), (4, 5), (6, 7))
FIRST_NUMBER = 4
TITLE = "Token by token"


def generation_parts(
    found: GenerationEntry | None, clean: Callable[[str], str], console: Console
) -> list[Table | Text]:
    """The section; nothing for a report of before there was one."""
    if found is None:
        return []
    if found.window is None:
        return [Text.assemble((TITLE, "bold"), f"  not built: {clean(found.reason)}"), Text()]
    steps, prompts = steps_of(found), prompts_of(found)
    parts: list[Table | Text] = [Text.assemble((TITLE, "bold"), f"  {_about(found)}"), Text()]
    if steps:
        rows = [[Text(head) for head in STEPS], *(_step_cells(one, clean) for one in steps)]
        parts += [fitted_table(rows, FIRST_NUMBER, STEPS_STACKED, console), Text()]
    if prompts:
        rows = [[Text(head) for head in PROMPTS], *(_prompt_cells(one, clean) for one in prompts)]
        parts += [fitted_table(rows, FIRST_NUMBER, PROMPTS_STACKED, console), Text()]
    failed = [row for row in found.parity if not row.passed]
    for row in failed:
        where = f"{row.target} {row.bucket} {row.dtype} {row.model}"
        parts += [Text(f"  - {clean(where)}: {clean(reason)}") for reason in row.reasons or ("failed",)]
    parts += [Text()] if failed else []
    return [*parts, *(Text(clean(line), style=QUIET) for line in _lines(found, steps)), Text()]


def _about(found: GenerationEntry) -> str:
    layers = layers_text(found)
    about = f"texts of up to {found.window:,} tokens, prompt and answer"
    return f"{about}; places of a text: {layers}" if layers else f"{about}; no routed layers"


def _step_cells(one: Steps, clean: Callable[[str], str]) -> list[Text]:
    row = one.row
    return [
        Text(clean(one.target)),
        Text(clean(one.bucket)),
        Text(one.dtype),
        _outcome(one.parity_passed),
        Text(_alike(one)),
        Text(range_text(row.share) if row else "-"),
        Text(f"{row.tokens_per_second['dense']:,.0f}" if row else "-"),
        Text(f"{row.tokens_per_second['mod']:,.0f}" if row else "-"),
        Text(ratio_interval_text(row.speedup, row.ci95) if row else "-"),
        Text(one.verdict or "-"),
        Text(ratio_text(row.bound) if row else "-"),
        Text(f"{row.efficiency:.2f}" if row else "-"),
    ]


def _prompt_cells(one: Prompts, clean: Callable[[str], str]) -> list[Text]:
    row = one.row
    return [
        Text(clean(one.target)),
        Text(f"{one.tokens:,} tokens"),
        Text(one.dtype),
        _outcome(one.parity_passed),
        Text(ms_text(row.ms["dense"]) if row else "-"),
        Text(ms_text(row.ms["mod"]) if row else "-"),
        Text(ratio_interval_text(row.speedup, row.ci95) if row else "-"),
        Text(one.verdict or "-"),
    ]


def _outcome(passed: bool | None) -> Text:
    return judged_text({None: "-", True: "pass", False: "FAIL"}[passed], passed)


def _alike(one: Steps) -> str:
    if not one.compared:
        return "-"
    return f"all {one.equal:,}" if one.equal == one.compared else f"{one.equal:,} of {one.compared:,}"


def _lines(found: GenerationEntry, steps: Sequence[Steps]) -> list[str]:
    """What the numbers hold for."""
    lines = []
    timed = [one.row for one in steps if one.row]
    if timed:
        positions = " or ".join(f"{count:,}" for count in sorted({row.positions for row in timed}))
        threads = " or ".join(threads_text(count) for count in sorted({row.threads for row in timed}))
        one = steps[-1]
        lines += [
            f"{one.bucket}: {one.batch:,} text{'s' if one.batch > 1 else ''} at once, of up to {one.tokens:,} tokens; "
            f"tok/s: of all of them, mean over {positions} positions, in turns with the dense twin, {threads}",
            "bytes say: weights and cache that a step has to read, dense / MoD; efficiency: speed-up / that",
            *map(_memory, timed),
        ]
    if found.first_token:
        lines.append("prompt: median time from a prompt of so many tokens to the token after it")
    lines += _texts(found, steps)
    return [*lines, _quality(found.quality)]


def _memory(row: DecodeEntry) -> str:
    kept, routed = row.kv_bytes, row.routed_kv_bytes
    line = f"keys and values {row.target} {row.bucket}: {bytes_text(kept['mod'])}, dense {bytes_text(kept['dense'])}"
    if not routed["dense"]:
        return line
    return f"{line}; of routed layers {bytes_text(routed['mod'])}, dense {bytes_text(routed['dense'])}"


def _texts(found: GenerationEntry, steps: Sequence[Steps]) -> list[str]:
    if not found.texts:
        return []
    of_each = " or ".join(f"{count:,}" for count in sorted({row.tokens // max(1, row.texts) for row in found.texts}))
    line = f"texts alike: greedy, {of_each} new tokens each, MoD and dense, against eager PyTorch from the same prompts"
    return [
        line,
        *(
            f"{row.target} {row.bucket} {row.dtype} {row.model}: {row.texts - row.equal:,} of {row.texts:,} texts are "
            f"not PyTorch's, the first from new token {row.first_difference} on"
            for one in steps
            for row in one.texts
            if row.equal < row.texts
        ),
    ]


def _quality(quality: QualityEntry | None) -> str:
    if quality is None:
        return "quality: not measured, there is no text here for this model's vocabulary"
    return (
        f"quality: perplexity {quality.perplexity:.4f} deciding one token at a time, {quality.own_perplexity:.4f} by "
        f"the checkpoint's own selection, on {quality.tokens:,} held-out tokens; {overflow_text(quality)}"
    )

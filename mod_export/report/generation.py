"""What was found about writing text, bucket by bucket, and the section about it on a console."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mod_export.report.tables import QUIET, fitted_table, judged_text
from mod_export.report.wording import bytes_text, ms_text, ratio_interval_text, ratio_text, setting_text, threads_text
from mod_export.results.base import PairKey
from mod_export.results.generation import DecodeRow, FirstTokenRow, GenerationReport, QualityRow, TextsRow
from mod_export.results.latency import SpeedVerdict
from mod_export.results.parity import ParityRow
from mod_export.results.report import BuildReport
from mod_export.types import Role, is_expert

__all__ = [
    "Prompts",
    "Steps",
    "generation_parts",
    "layers_text",
    "overflow_text",
    "prompts_of",
    "range_text",
    "steps_of",
    "verdict_of",
]


STEPS = (
    "target", "bucket", "dtype", "parity", "identical texts", "selected tokens", "dense tok/s", "MoD tok/s",
    "speed-up [95 %]", "verdict", "predicted (bytes)", "efficiency",
)  # fmt: skip
STEPS_STACKED = ((0, 1, 2), (3, 4, 5), (6, 7, 9), (8, 10, 11))
PROMPTS = ("target", "prompt", "dtype", "parity", "dense ms", "MoD ms", "speed-up [95 %]", "verdict")
PROMPTS_STACKED = ((0, 1, 2), (3,), (4, 5), (6, 7))
FIRST_NUMBER = 4
TITLE = "Token by token"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    target: str
    dtype: str
    role: str
    bucket: str
    parity: tuple[ParityRow, ...]

    @property
    def parity_passed(self) -> bool | None:
        """Whether all parity rows passed, those of the dense baseline included; None when there are none."""
        return all(row.passed for row in self.parity) if self.parity else None

    @property
    def batch(self) -> int:
        """Texts at once."""
        return _shape(self.bucket)[0]

    @property
    def tokens(self) -> int:
        """Of the cache of a text, or of a prompt."""
        return _shape(self.bucket)[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps(_Judged):
    """One decode bucket; `row` is None where nothing was timed."""

    row: DecodeRow | None
    texts: tuple[TextsRow, ...]

    @property
    def compared(self) -> int:
        """Texts that PyTorch continued too, of both models."""
        return sum(row.texts for row in self.texts)

    @property
    def identical(self) -> int:
        """Those that are the same."""
        return sum(row.identical for row in self.texts)

    @property
    def verdict(self) -> SpeedVerdict | None:
        """Of the step's time."""
        return verdict_of(self.row.ci95) if self.row else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts(_Judged):
    """One prefill bucket; `row` is None where nothing was timed."""

    row: FirstTokenRow | None

    @property
    def verdict(self) -> SpeedVerdict | None:
        """Of the time to the first token."""
        return verdict_of(self.row.ci95) if self.row else None


def verdict_of(ci95: tuple[float, float]) -> SpeedVerdict:
    """What follows from an interval of dense / MoD: nothing where it covers 1, or is not a number."""
    low, high = ci95
    if low > 1 and high > 1:
        return "faster"
    return "not faster" if low < 1 and high < 1 else "inconclusive"


def steps_of(report: BuildReport) -> tuple[Steps, ...]:
    """Every decode bucket that has a row of any kind."""
    found = report.generation or GenerationReport()
    parity, rows = _parity(report, "decode"), {row.pair_key: row for row in found.decode}
    texts: dict[PairKey, list[TextsRow]] = {}
    for row in found.texts:
        texts.setdefault(row.pair_key, []).append(row)
    return tuple(
        Steps(**_named(key), parity=parity.get(key, ()), row=rows.get(key), texts=tuple(texts.get(key, ())))
        for key in dict.fromkeys([*parity, *rows, *texts])
    )


def prompts_of(report: BuildReport) -> tuple[Prompts, ...]:
    """Every prefill bucket that has a row of any kind."""
    parity = _parity(report, "prefill")
    rows = {row.pair_key: row for row in report.generation.first_token} if report.generation else {}
    return tuple(
        Prompts(**_named(key), parity=parity.get(key, ()), row=rows.get(key)) for key in dict.fromkeys([*parity, *rows])
    )


def range_text(share: Mapping[str, float]) -> str:
    """Shares of tokens that were selected in routed layers, without experts: 8.3 to 12.5 %; a dash without routing."""
    found = [100 * part for site, part in share.items() if not is_expert(site)]
    if not found:
        return "-"
    low, high = f"{min(found):.1f}", f"{max(found):.1f}"
    return f"{low} %" if low == high else f"{low} to {high} %"


def layers_text(found: GenerationReport) -> str:
    """How many tokens of a text each routed layer selects: 64 in layers 1, 3, 5, 7; empty where nothing routes."""
    layers: dict[int, list[str]] = {}
    for site, k in (found.capacity or {}).items():
        if not is_expert(site):
            layers.setdefault(k, []).append(site)
    return "; ".join(f"{k:,} in layer{'s' if len(of) > 1 else ''} {', '.join(of)}" for k, of in layers.items())


def overflow_text(quality: QualityRow) -> str:
    """How often each layer had no free slot left."""
    lost = {site: count for site, count in quality.overflow.items() if count}
    if not lost:
        return "every token that wanted a slot found one"
    layers = ", ".join(f"{count:,} in {'' if is_expert(site) else 'layer '}{site}" for site, count in lost.items())
    return f"tokens that found no free slot: {layers}"


def _parity(report: BuildReport, role: Role) -> dict[PairKey, tuple[ParityRow, ...]]:
    """Rows of one role, those of both models together."""
    found: dict[PairKey, tuple[ParityRow, ...]] = {}
    for row in report.parity:
        if row.role == role:
            found[row.pair_key] = (*found.get(row.pair_key, ()), row)
    return found


def _named(key: PairKey) -> dict[str, str]:
    return dict(zip(("target", "dtype", "role", "bucket"), key, strict=True))


def _shape(bucket: str) -> tuple[int, int]:
    batch, seq = re.findall(r"\d+", bucket)
    return int(batch), int(seq)


def generation_parts(report: BuildReport, clean: Callable[[str], str], console: Console) -> list[Table | Text]:
    """The section; nothing where the model writes no text."""
    found = report.generation
    if found is None:
        return []
    if found.window is None:
        return [Text.assemble((TITLE, "bold"), f"  not built: {clean(found.reason)}"), Text()]
    steps, prompts = steps_of(report), prompts_of(report)
    parts: list[Table | Text] = [Text.assemble((TITLE, "bold"), f"  {_about(found)}"), Text()]
    if steps:
        rows = [[Text(head) for head in STEPS], *(_step_cells(one, clean) for one in steps)]
        parts += [fitted_table(rows, FIRST_NUMBER, STEPS_STACKED, console), Text()]
    if prompts:
        rows = [[Text(head) for head in PROMPTS], *(_prompt_cells(one, clean) for one in prompts)]
        parts += [fitted_table(rows, FIRST_NUMBER, PROMPTS_STACKED, console), Text()]
    failed = [row for row in report.parity if row.role != "forward" and not row.passed]
    for row in failed:
        parts += [Text(f"  - {clean(row.name)} {row.model}: {clean(reason)}") for reason in row.reasons]
    parts += [Text()] if failed else []
    return [*parts, *(Text(clean(line), style=QUIET) for line in _lines(found, steps)), Text()]


def _about(found: GenerationReport) -> str:
    layers = layers_text(found)
    about = f"texts of up to {found.window:,} tokens, prompt and answer"
    return f"{about}; slots of a text: {layers}" if layers else f"{about}; no routed layers"


def _step_cells(one: Steps, clean: Callable[[str], str]) -> list[Text]:
    row = one.row
    return [
        Text(clean(one.target)),
        Text(clean(one.bucket)),
        Text(one.dtype),
        _outcome(one.parity_passed),
        Text(_identical(one)),
        Text(range_text(row.selected) if row else "-"),
        Text(f"{row.tokens_per_second['dense']:,.0f}" if row else "-"),
        Text(f"{row.tokens_per_second['mod']:,.0f}" if row else "-"),
        Text(ratio_interval_text(row.measured, row.ci95) if row else "-"),
        Text(one.verdict or "-"),
        Text(ratio_text(row.predicted_bytes) if row else "-"),
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
        Text(ratio_interval_text(row.measured, row.ci95) if row else "-"),
        Text(one.verdict or "-"),
    ]


def _outcome(passed: bool | None) -> Text:
    return judged_text({None: "-", True: "pass", False: "FAIL"}[passed], passed)


def _identical(one: Steps) -> str:
    if not one.compared:
        return "-"
    return f"all {one.identical:,}" if one.identical == one.compared else f"{one.identical:,} of {one.compared:,}"


def _lines(found: GenerationReport, steps: Sequence[Steps]) -> list[str]:
    """What the numbers hold for."""
    lines = []
    timed = [one.row for one in steps if one.row]
    if timed:
        positions = " or ".join(f"{count:,}" for count in sorted({row.positions for row in timed}))
        threads = " or ".join(threads_text(count) for count in sorted({row.threads for row in timed}))
        one = steps[-1]
        lines += [
            f"{one.bucket}: {one.batch:,} text{'s' if one.batch > 1 else ''} at once, of up to {one.tokens:,} tokens; "
            f"tok/s: of all of them, mean over {positions} positions, interleaved with the "
            f"dense baseline, {threads}",
            "predicted (bytes): weights and cache that a step has to read, dense / MoD; "
            "efficiency: speed-up / predicted",
            *map(_memory, timed),
        ]
    if found.first_token:
        lines.append("prompt: median time from a prompt of so many tokens to the token after it")
    lines += _texts(found, steps)
    return [*lines, quality_text(found.quality)]


def _memory(row: DecodeRow) -> str:
    kept, routed = row.kv_bytes, row.routed_kv_bytes
    line = f"keys and values {row.target} {row.bucket}: {bytes_text(kept['mod'])}, dense {bytes_text(kept['dense'])}"
    if not routed["dense"]:
        return line
    return f"{line}; of routed layers {bytes_text(routed['mod'])}, dense {bytes_text(routed['dense'])}"


def _texts(found: GenerationReport, steps: Sequence[Steps]) -> list[str]:
    if not found.texts:
        return []
    of_each = " or ".join(f"{count:,}" for count in sorted({row.tokens // max(1, row.texts) for row in found.texts}))
    line = f"identical texts: greedy, {of_each} new tokens each, MoD and dense, compared with eager PyTorch"
    return [
        line,
        *(
            f"{setting_text(row)} {row.model}: {row.texts - row.identical:,} of {row.texts:,} texts "
            f"differ from PyTorch's, the first from new token {row.first_difference} on"
            for one in steps
            for row in one.texts
            if row.identical < row.texts
        ),
    ]


def quality_text(quality: QualityRow | None) -> str:
    """What selecting one token at a time costs in perplexity."""
    if quality is None:
        return "quality: not measured, there is no text here for this model's vocabulary"
    return (
        f"quality: perplexity {quality.perplexity:.4f} selecting one token at a time, {quality.own_perplexity:.4f} by "
        f"the checkpoint's own selection, on {quality.tokens:,} held-out tokens; {overflow_text(quality)}"
    )

"""Results as text: the report on a console, and the output of `mod-export validate` and `bench`.

Colour and width follow the terminal, and NO_COLOR is honoured. Without a terminal, lines never wrap. The text is ASCII
except for names that come from elsewhere.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import IO, TypeVar

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from mod_export.report import result_tables as shown
from mod_export.report.charts import MODELS
from mod_export.report.summary import (
    Found,
    chosen,
    gains,
    given_routing,
    lacks_sites,
    left_out_lines,
    parity_of,
    precisions,
    settings_of,
    uncompared,
    uncounted,
    untried_targets,
)
from mod_export.report.tables import BAD, GOOD, QUIET, UNBOUNDED, Column, fitted_table, lines_of, table_of
from mod_export.report.wording import (
    NO_SITES,
    agreement_text,
    bytes_text,
    count_text,
    difference_text,
    printable,
    quality_text,
    served_text,
    slots_text,
    threads_text,
)
from mod_export.rows.base import PairRow
from mod_export.rows.correctness import CausalityRow, ParityRow, StructureRow
from mod_export.rows.report import BuildReport, Target, Verdict
from mod_export.rows.speed import (
    DecodeRow,
    GenerationReport,
    LatencyRow,
    PrecisionRow,
    QualityRow,
    SpeedupRow,
    TextsRow,
)

Cleaner = Callable[[str], str]
Parts = list[Table | Text]
Row = TypeVar("Row")
TIMED = 8
"""Number of columns of PRECISION that `bench` fills; the others judge."""
NOT_COMPARED = "not compared: "
"""Prefix of the reason why there is no comparison."""


def print_report(report: BuildReport, folder: str, file: IO[str] | None = None) -> None:
    """Prints the report of a build folder to `file`, by default to stdout."""
    file = sys.stdout if file is None else file
    console = Console(file=file)
    if console.is_terminal:
        _print(report, folder, console, console.encoding)
    else:
        file.write(render_text(report, folder, encoding=console.encoding))


def render_text(
    report: BuildReport, folder: str, *, width: int = UNBOUNDED, color: bool = False, encoding: str = "utf-8"
) -> str:
    """Returns the report as text for a file of this encoding, by default without colour and without wrapping."""
    file = io.StringIO()
    console = Console(
        file=file,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
    )
    _print(report, folder, console, encoding)
    return "".join(line.rstrip() + "\n" for line in file.getvalue().splitlines())


def _print(report: BuildReport, folder: str, console: Console, encoding: str) -> None:
    clean = partial(printable, encoding=encoding)
    parts: Parts = [_headline(report, clean), Text()]
    settings = settings_of(report, "forward")

    def fitted(columns: Sequence[Column[Row]], rows: Iterable[Row], stacks: Sequence[Sequence[int]]) -> Parts:
        return [fitted_table(table_of(columns, rows), stacks, console, clean), Text()]

    if settings:
        if report.not_compared is None:
            parts += fitted(shown.WHOLE_TEXTS, settings, shown.STACKS)
        else:
            parts += fitted((*shown.JUDGED, *shown.ALONE), settings, shown.ALONE_STACKS)
        parts += [*_quiet(_conditions(report), clean), Text()]
    if report.not_compared is not None:
        parts += [Text(clean(f"{NOT_COMPARED}{report.not_compared}")), Text()]
    if lonely := uncompared(report):
        parts += [*(Text(clean(f"{NOT_COMPARED}{line}")) for line in lonely), Text()]
    if missing := uncounted(report):
        parts += [
            *_quiet([f"FLOPs not counted: {names}; nothing is predicted from the others" for names in missing], clean),
            Text(),
        ]
    if report.precision:
        parts += [Text("Lower precision", "bold"), Text()]
        parts += fitted(shown.PRECISION, precisions(report), shown.PRECISION_STACKS)
    parts += _generation(report, clean, fitted)
    if choices := chosen(report):
        parts += [*_quiet([f"served where no target is named: {served_text(row)}" for row in choices], clean), Text()]
    parts += _not_run(untried_targets(report), clean)
    parts += _verdict(report, folder, clean)
    console.print(Group(*parts), highlight=False, markup=False, emoji=False)


def _quiet(lines: Sequence[str], clean: Cleaner) -> list[Text]:
    return [Text(clean(line), style=QUIET) for line in lines]


def _headline(report: BuildReport, clean: Cleaner) -> Text:
    model = report.model
    about = f"  {clean(model.architecture)}, {count_text(model.parameters)} parameters"
    return Text.assemble(
        (clean(model.name), "bold"), about, (f", checkpoint {clean(model.checkpoint_sha256[:12])}", QUIET)
    )


def _conditions(report: BuildReport) -> list[str]:
    """Lists the conditions under which the numbers hold."""
    lines = []
    parity = parity_of(report, forward=True)
    if parity:
        kinds = ", ".join(dict.fromkeys(kind for row in parity for kind in row.inputs))
        references = ", ".join(dict.fromkeys(row.reference for row in parity))
        what = "a logit" if all(row.next_token_agreement is not None for row in parity) else "each output"
        lines.append(
            f"parity: against {references}, on inputs {kinds}; max error of {what}{given_routing(parity)}"
            + (", the worse of MoD and dense" if report.not_compared is None else "")
        )
        lines += [f"not judged: {line}" for line in left_out_lines(parity)]
        totals = gains(report)
        inputs = ", ".join(f"{batch.input} {agreement_text(batch)}" for batch in totals.by_input)
        differences = difference_text(totals.routed - totals.agreed, totals.faults)
        lines += [f"routing agreement: {inputs}; {differences}"] if inputs else []
        if lacks_sites(parity):
            lines += [f"routing agreement: {NO_SITES}", *(f"no routing site: {seen}" for seen in report.unfollowed)]
    if report.config.get("outputs") == "last":
        lines.append('outputs: last, the logits of each row\'s last token; `outputs = "logits"` returns all')
    if report.latency:
        lines += _sampled(report.latency, "samples" if report.not_compared else "interleaved samples")
    gated = [row for row in report.speedup if row.gate is not None]
    if report.speedup:
        gate = f"; gate {gated[0].gate:.2f}x at {gated[0].bucket}" if gated else "; no gate on speed-up"
        lines.append(f"speed-up: median dense / median MoD, with a 95 % bootstrap interval{gate}")
        lines.append(f"control: {_control(report.speedup)}")
    return [*lines, *_reasons(report.speedup), *_disturbances(report.latency)]


def _sampled(rows: Sequence[LatencyRow], samples: str) -> list[str]:
    """Lists what each target ran on and its number of samples, which varies: sampling ends when a comparison is
    settled.
    """
    counts: dict[tuple[str, tuple[str, ...], int], list[int]] = {}
    for row in rows:
        counts.setdefault((row.target, row.providers, row.threads), []).append(len(row.samples_ms))
    return [
        f"latency: {target} on {', '.join(providers)}, {threads_text(threads)}, "
        f"{min(sizes):,}{f' to {max(sizes):,}' if max(sizes) > min(sizes) else ''} {samples}"
        for (target, providers, threads), sizes in counts.items()
    ]


def _control(rows: Sequence[SpeedupRow]) -> str:
    """Says in how many settings the control covers 1, and how far the worst one is from 1. `rows` is not empty."""
    controls = [row.control for row in rows]
    covering = sum(control.covers_one for control in controls)
    worst = max(controls, key=lambda control: abs(control.measured - 1))
    settings = "setting" if len(controls) == 1 else "settings"
    return (
        f"the interval of the MoD engine against itself covers 1 in {covering} of {len(controls)} {settings}; "
        f"farthest from it {worst.measured:.3f}x [{worst.ci99[0]:.3f}, {worst.ci99[1]:.3f}]"
    )


def _reasons(rows: Sequence[SpeedupRow]) -> list[str]:
    return [f"{row.setting}: {row.verdict}: {row.reason}" for row in rows if row.reason is not None]


def _disturbances(rows: Sequence[LatencyRow]) -> list[str]:
    """Returns one line for each flag; a flag of both models of a setting gets a single line."""
    models: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for flag in row.flags:
            models.setdefault((str(row.setting), flag), []).append(row.model)
    return [
        f"{setting}: {flag}" if len(named) > 1 else f"{setting} {named[0]}: {flag}"
        for (setting, flag), named in models.items()
    ]


def _generation(report: BuildReport, clean: Cleaner, fitted: Callable[..., Parts]) -> Parts:
    """Returns the section about writing text; empty if the model does not read tokens."""
    generation = report.generation
    if generation is None:
        return []
    title = ("Token by token", "bold")
    if generation.window is None:
        return [Text.assemble(title, f"  not built: {clean(generation.reason)}"), Text()]
    slots = slots_text(generation.capacity or {})
    about = f"texts of up to {generation.window:,} tokens, prompt and answer"
    parts: Parts = [
        Text.assemble(title, f"  {about}; {f'slots of a text: {slots}' if slots else 'no routed layers'}"),
        Text(),
    ]
    steps, prompts = settings_of(report, "decode"), settings_of(report, "prefill")
    alone = report.not_compared is not None
    if steps:
        times, stacks = (shown.STEPS_ALONE, shown.STEPS_ALONE_STACKS) if alone else (shown.STEPS_TIMED, shown.STACKS)
        parts += fitted((*shown.SETTING, *shown.STEPS_JUDGED, *times), steps, stacks)
    if prompts:
        times, stacks = (
            (shown.PROMPTS_ALONE, shown.PROMPTS_ALONE_STACKS) if alone else (shown.PROMPTS_TIMED, shown.PROMPTS_STACKS)
        )
        parts += fitted((*shown.PROMPTS, shown.OUTCOME, *times), prompts, stacks)
    failed = [row for row in parity_of(report, forward=False) if not row.passed]
    parts += [Text(clean(f"  - {row.setting} {row.model}: {reason}")) for row in failed for reason in row.reasons]
    parts += [Text()] if failed else []
    return [*parts, *_quiet(generation_lines(generation, steps), clean), Text()]


def generation_lines(found: GenerationReport, steps: Sequence[Found]) -> list[str]:
    """Lists the conditions of the tables of steps and prompts, and the results about the texts."""
    lines = []
    timed = [entry.written for entry in steps if isinstance(entry.written, DecodeRow)]
    if timed:
        positions = " or ".join(f"{count:,}" for count in sorted({row.positions for row in timed}))
        threads = " or ".join(threads_text(count) for count in sorted({row.threads for row in timed}))
        bucket = steps[-1].setting.bucket
        texts = f"{bucket.batch:,} text{'s' if bucket.batch > 1 else ''}"
        compared = any(row.compared is not None for row in timed)
        beside = ", interleaved with the dense baseline" if compared else ""
        lines += [
            f"{bucket.name}: {texts} at once, of up to {bucket.seq:,} tokens; tok/s: of all of them, mean over "
            f"{positions} positions{beside}, {threads}"
        ]
        if compared:
            lines += [
                "predicted (bytes): weights and cache that a step has to read, dense / MoD; "
                "efficiency: speed-up / predicted"
            ]
        lines += map(_memory, timed)
    if found.first_token:
        lines.append("prompt: median time from a prompt of so many tokens to the token after it")
    if found.texts:
        each = " or ".join(f"{count:,}" for count in sorted({row.tokens // max(1, row.texts) for row in found.texts}))
        both = "MoD and dense, " if len({row.model for row in found.texts}) > 1 else ""
        lines.append(f"identical texts: greedy, {each} new tokens each, {both}compared with eager PyTorch")
    lines += [
        f"{row.setting} {row.model}: {row.texts - row.identical:,} of {row.texts:,} texts "
        f"differ from PyTorch's, the first from new token {row.first_difference} on; {row.same / row.tokens:.0%} of "
        "the new tokens come before a difference"
        for row in found.texts
        if row.identical < row.texts
    ]
    return [*lines, quality_text(found.quality)]


def _memory(row: DecodeRow) -> str:
    kept = row.kv_bytes
    line = f"keys and values {row.target} {row.bucket}: {bytes_text(kept['mod'])}"
    if row.compared is None:
        return line
    line, routed = f"{line}, dense {bytes_text(kept['dense'])}", row.compared.routed_kv_bytes
    if not routed["dense"]:
        return line
    return f"{line}; of routed layers {bytes_text(routed['mod'])}, dense {bytes_text(routed['dense'])}"


def _not_run(untried: Mapping[str, Sequence[Target]], clean: Cleaner) -> list[Text]:
    lines = []
    for state, targets in untried.items():
        claim = ", but not run here: no claim is made about these" if state == "built" else ""
        width = max(len(target.target) for target in targets)
        lines += [
            Text(f"{state}{claim}", style="bold"),
            *(Text(f"  {clean(target.target):<{width}}  {clean(target.reason)}") for target in targets),
            Text(),
        ]
    return lines


def _verdict(report: BuildReport, folder: str, clean: Cleaner) -> list[Text]:
    reasons = [Text(f"  - {clean(reason)}") for reason in report.verdict.reasons]
    if report.verdict.status == "pass":
        return [Text.assemble(("PASS", GOOD), f"  every gate met: {clean(folder)}")]
    count = f"{len(reasons)} reason{'s' if len(reasons) != 1 else ''}"
    return [*reasons, Text.assemble(("FAIL", BAD), f"  {count}, listed above: {clean(folder)}")]


def render_validation(
    structure: Sequence[StructureRow],
    parity: Sequence[ParityRow],
    causality: Sequence[CausalityRow],
    texts: Sequence[TextsRow],
    quality: Sequence[QualityRow],
    verdict: Verdict,
    notes: Sequence[str] = (),
) -> str:
    """Returns one line for each candidate that ran, the results about files, and the verdict with every reason."""
    causal = {row.setting: row.causal for row in causality if row.suffixes}
    columns: tuple[Column[ParityRow], ...] = (
        shown.SETTING[0],
        shown.ROLE,
        *shown.SETTING[1:],
        *shown.PARITY,
        Column("ties", lambda row: _word(row.ties_exact), number=False),
        Column("causal", lambda row: _word(causal.get(row.setting)), number=False),
    )
    identical, compared = sum(row.identical for row in texts), sum(row.texts for row in texts)
    written = [f"texts: {identical:,} of {compared:,} are those of eager PyTorch, token for token"] if compared else []
    beside = [*_files(structure), *notes, *written, *map(quality_text, quality), *_statements(causality)]
    return _text([*lines_of(table_of(columns, parity)), "", *beside, "", *_outcome(verdict)])


def render_bench(rows: Sequence[PairRow], verdict: Verdict, not_compared: str | None = None) -> str:
    """Returns one line for each comparison of whole texts, reasons and disturbances, the verdict, and other times.

    `not_compared` says why there are no comparisons; then there is one line for each engine.
    """
    whole, prompts, steps = (
        [entry for entry in settings_of(rows, role) if entry.ms("mod") is not None]
        for role in ("forward", "prefill", "decode")
    )
    if not_compared is None:
        times, written, read = (*shown.TIMES, *shown.COMPARED), shown.STEPS_TIMED, shown.PROMPTS_TIMED
    else:
        times, written, read = shown.ALONE, shown.STEPS_ALONE, shown.PROMPTS_ALONE
    remarks = [
        *([] if not_compared is None else [f"{NOT_COMPARED}{not_compared}"]),
        *_reasons([row for row in rows if isinstance(row, SpeedupRow)]),
        *_disturbances([row for row in rows if isinstance(row, LatencyRow)]),
    ]
    narrow = [(row, None) for row in rows if isinstance(row, PrecisionRow)]
    lines = [
        *lines_of(table_of((*shown.SETTING, *times), whole)),
        "",
        *remarks,
        *([""] if remarks else []),
    ]
    lines += _outcome(verdict)
    for title, table in (
        ("lower precision", table_of(shown.PRECISION[:TIMED], narrow)),
        ("token by token", table_of((*shown.SETTING, *written), steps)),
        ("first token", table_of((*shown.PROMPTS, *read), prompts)),
    ):
        lines += ["", title, *lines_of(table)] if table.rows else []
    return _text(lines)


def _files(structure: Sequence[StructureRow]) -> list[str]:
    paths = {row.path for row in structure}
    failed = {row.path for row in structure if not row.passed}
    if failed:
        return [f"files: {len(failed)} of {len(paths)} are not what they must be, see below"]
    if not paths:
        return []
    rounded = ", or rounded from them" if any("rounded" in what for row in structure for what in row.checked) else ""
    return [f"files: all {len(paths)} are as they were built; weights are the checkpoint's, bit for bit{rounded}"]


def _statements(causality: Sequence[CausalityRow]) -> list[str]:
    """Returns one statement for each model: that of an engine that looks ahead, if there is one."""
    rows = sorted(causality, key=lambda row: row.causal)
    by_model = {kind: [row for row in rows if row.model == kind] for kind in reversed(MODELS)}
    return [
        f"{kind}: {tested[0].statement} ({tested[0].target} {tested[0].bucket})"
        for kind, tested in by_model.items()
        if tested
    ]


def _outcome(verdict: Verdict) -> list[str]:
    return [*(f"  - {reason}" for reason in verdict.reasons), verdict.status.upper()]


def _text(lines: Sequence[str]) -> str:
    return "".join(f"{printable(line)}\n" for line in lines)


def _word(found: bool | None) -> str:
    return {None: "-", True: "yes", False: "NO"}[found]

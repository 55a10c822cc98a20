"""Results as text: the report on a console, and the output of `mod-export validate` and `bench`.

Colour and width follow the terminal, and NO_COLOR is honoured. Without a terminal, lines never wrap. The text is ASCII
except for names that come from elsewhere.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from statistics import fmean
from typing import IO, TypeVar

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from mod_export.report import summary, tables, wording
from mod_export.report.charts import MODELS, name_of
from mod_export.rows.base import PairRow
from mod_export.rows.correctness import CausalityRow, ParityRow, StructureRow
from mod_export.rows.report import BuildReport, Target, Verdict
from mod_export.rows.speed import (
    DecodeRow,
    GenerationReport,
    LatencyRow,
    PrecisionRow,
    QualityRow,
    RivalRow,
    SpeedupRow,
    TextsRow,
)
from mod_export.types import is_expert

Row = TypeVar("Row")
Line = str | tuple[tuple[str, str], ...]
"""A line of text, plain or in pieces, each with its style."""
Part = Line | tables.ResultTable
NOT_COMPARED = "not compared: "
"""Prefix of the reason why there is no comparison."""
RIVALS_TITLE = "other programs, each in a process of its own, in turns"


def print_report(report: BuildReport, folder: str, file: IO[str] | None = None) -> None:
    """Prints the report of a build folder to `file`, by default to stdout."""
    file = sys.stdout if file is None else file
    console = Console(file=file)
    if console.is_terminal:
        _print(_report(report, folder), console, console.encoding)
    else:
        file.write(render_text(report, folder, encoding=console.encoding))


def render_text(
    report: BuildReport, folder: str, *, width: int = tables.UNBOUNDED, color: bool = False, encoding: str = "utf-8"
) -> str:
    """Returns the report as text for a file of this encoding, by default without colour and without wrapping."""
    return render_parts(_report(report, folder), width=width, color=color, encoding=encoding)


def render_parts(
    parts: Iterable[Part], *, width: int = tables.UNBOUNDED, color: bool = False, encoding: str = "utf-8"
) -> str:
    """Returns lines and tables as text for a file of this encoding, by default without colour and without wrapping."""
    file = io.StringIO()
    console = Console(
        file=file,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
    )
    _print(parts, console, encoding)
    return "".join(line.rstrip() + "\n" for line in file.getvalue().splitlines())


def _print(parts: Iterable[Part], console: Console, encoding: str) -> None:
    def shown(part: Part) -> Table | Text:
        if isinstance(part, str):
            return Text(clean(part))
        if isinstance(part, tables.ResultTable):
            return tables.fitted_table(part, console, clean)
        return Text.assemble(*((clean(text), style) for text, style in part))

    clean = partial(wording.printable, encoding=encoding)
    console.print(Group(*map(shown, parts)), highlight=False, markup=False, emoji=False)


def sections(*sections: Sequence[Part]) -> list[Part]:
    """Returns the parts of all sections that are not empty, with an empty line after each."""
    return [part for section in sections if section for part in (*section, "")]


def _fitted(columns: Sequence[tables.Column[Row]], rows: Sequence[Row], stacks: tables.Stacks) -> list[Part]:
    return [tables.table_of(columns, rows, stacks)] if rows else []


def _quiet(lines: Iterable[str]) -> list[Line]:
    return [((line, tables.QUIET),) for line in lines]


def _report(report: BuildReport, folder: str) -> list[Part]:
    """Returns the whole report of a build folder."""
    model, settings = report.model, summary.settings_of(report, "forward")
    timed = tables.timed_columns(report.not_compared)
    about = f"  {model.architecture}, {wording.count_text(model.parameters)} parameters"
    headline = ((model.name, "bold"), (about, ""), (f", checkpoint {model.checkpoint_sha256[:12]}", tables.QUIET))
    not_counted = [
        f"FLOPs not counted: {names}; nothing is predicted from the others" for names in summary.uncounted(report)
    ]
    return [
        *sections(
            [headline],
            _fitted((*tables.SETTING, *tables.JUDGED, *timed.whole), settings, timed.whole_stacks),
            _quiet(_conditions(report)) if settings else (),
            [] if report.not_compared is None else [f"{NOT_COMPARED}{report.not_compared}"],
            [f"{NOT_COMPARED}{line}" for line in summary.uncompared(report)],
            _quiet(not_counted),
            [(("Lower precision", "bold"),)] if report.precision else (),
            _fitted(tables.PRECISION, summary.precisions(report.precision, report.parity), tables.PRECISION_STACKS),
        ),
        *_generation(report, timed),
        *sections(
            _quiet(f"served where no target is named: {wording.served_text(row)}" for row in summary.chosen(report)),
            *(_not_run(state, targets) for state, targets in summary.untried_targets(report).items()),
        ),
        *(_unjudged(folder) if summary.is_unjudged(report) else _verdict(report.verdict, folder)),
    ]


def _conditions(report: BuildReport) -> list[str]:
    """Lists the conditions under which the numbers hold."""
    lines = []
    parity = summary.parity_rows(report, forward=True)
    if parity:
        kinds = ", ".join(dict.fromkeys(kind for row in parity for kind in row.inputs))
        references = ", ".join(dict.fromkeys(row.reference for row in parity))
        only_logits = all(row.next_token_agreement is not None and not row.further_outputs for row in parity)
        value_name = "a logit" if only_logits else "any output"
        lines.append(
            f"parity: against {references}, on inputs {kinds}; max error of {value_name}{summary.given_routing(parity)}"
            + (", the worse of MoD and dense" if report.not_compared is None else "")
        )
        lines += [f"not judged: {line}" for line in summary.left_out_lines(parity)]
        lines += report.not_run.values()
        totals = summary.gains(report)
        inputs = ", ".join(f"{batch.input} {wording.agreement_text(batch)}" for batch in totals.by_input)
        differences = wording.difference_text(totals.routed - totals.agreed, totals.faults)
        lines += [f"routing agreement: {inputs}; {differences}"] if inputs else []
        if summary.lacks_sites(parity):
            lines += [
                f"routing agreement: {wording.NO_SITES}",
                *(f"no routing site: {seen}" for seen in report.unfollowed),
            ]
    if report.text is not None:
        lines.append(f"texts: from {wording.named_text(report.text)}")
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
        f"latency: {target} on {', '.join(providers)}, {wording.threads_text(threads)}, "
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


def _generation(report: BuildReport, timed: tables.Timed) -> list[Part]:
    """Returns the section about writing text; empty if the model does not read tokens."""
    generation, title = report.generation, ("Token by token", "bold")
    if generation is None:
        return []
    if generation.window is None:
        return sections([(title, (f"  not built: {generation.reason}", ""))])
    slots = wording.slots_text(generation.capacity or {})
    about = f"  texts of up to {generation.window:,} tokens, prompt and answer; "
    steps, prompts = summary.settings_of(report, "decode"), summary.settings_of(report, "prefill")
    failed = [row for row in summary.parity_rows(report, forward=False) if not row.passed]
    return sections(
        [(title, (about + (f"slots of a text: {slots}" if slots else "no routed layers"), ""))],
        _fitted((*tables.SETTING, *tables.STEPS_JUDGED, *timed.steps), steps, timed.steps_stacks),
        _fitted((*tables.PROMPT_SETTING, tables.OUTCOME, *timed.prompts), prompts, timed.prompts_stacks),
        [f"  - {row.setting} {row.model}: {reason}" for row in failed for reason in row.reasons],
        _quiet(generation_lines(generation, steps)),
    )


def generation_lines(generation: GenerationReport, steps: Sequence[summary.SettingResults]) -> list[str]:
    """Lists the conditions of the tables of steps and prompts, and the results about the texts."""
    lines = []
    timed = [entry.step for entry in steps if entry.step]
    if timed:
        positions = " or ".join(f"{count:,}" for count in sorted({row.positions for row in timed}))
        threads = " or ".join(wording.threads_text(count) for count in sorted({row.threads for row in timed}))
        bucket = steps[-1].setting.bucket
        texts = f"{bucket.batch:,} text{'s' if bucket.batch > 1 else ''}"
        compared = any(row.compared is not None for row in timed)
        beside = ", interleaved with the dense baseline" if compared else ""
        lines += [
            f"{bucket.name}: {texts} at once, of up to {bucket.seq:,} tokens; tok/s: of all of them, mean over "
            f"{positions} positions in {wording.timed_texts(timed)}{beside}, {threads}"
        ]
        if compared:
            lines += [
                "predicted (bytes): weights and cache that a step has to read, dense / MoD; "
                "efficiency: speed-up / predicted"
            ]
        lines += map(_memory, timed)
        lines += dict.fromkeys(line for row in timed if (line := _read_anyway(row)))
    if generation.first_token:
        lines.append("prompt: median time from a prompt of so many tokens to the token after it")
    if generation.texts:
        each = " or ".join(
            f"{count:,}" for count in sorted({row.tokens // max(1, row.texts) for row in generation.texts})
        )
        both = "MoD and dense, " if len({row.model for row in generation.texts}) > 1 else ""
        lines.append(f"identical texts: greedy, {each} new tokens each, {both}compared with eager PyTorch")
    lines += [
        f"{row.setting} {row.model}: {row.texts - row.identical:,} of {row.texts:,} texts "
        f"differ from PyTorch's, the first from new token {row.first_difference} on; {row.same / row.tokens:.0%} of "
        "the new tokens come before a difference"
        for row in generation.texts
        if row.identical < row.texts
    ]
    return [*lines, wording.quality_text(generation.quality)]


def _memory(row: DecodeRow) -> str:
    kv_bytes = row.kv_bytes
    line = f"keys and values {row.target} {row.bucket}: {wording.bytes_text(kv_bytes['mod'])}"
    if row.compared is None:
        return line
    line, routed = f"{line}, dense {wording.bytes_text(kv_bytes['dense'])}", row.compared.routed_kv_bytes
    if not routed["dense"]:
        return line
    return f"{line}; of routed layers {wording.bytes_text(routed['mod'])}, dense {wording.bytes_text(routed['dense'])}"


def _read_anyway(row: DecodeRow) -> str:
    """Says how few rows run in the routed layers of a step of several texts, and how often their weights are read all
    the same. Empty for one text, for which the two are equal, and if no layer is routed: experts have no such steps.
    """
    sites = [site for site in row.executed if not is_expert(site)]
    if row.setting.bucket.batch == 1 or not sites:
        return ""
    rows, steps = (fmean(shares[site] for site in sites) for shares in (row.selected, row.executed))
    return (
        f"routed layers {row.target} {row.bucket} {row.dtype}: {rows:.0%} of the rows run; the weights are read in "
        f"{steps:.0%} of the steps, those in which any row runs"
    )


def _not_run(state: str, targets: Sequence[Target]) -> list[Part]:
    claim = ", but not run here: no claim is made about these" if state == "built" else ""
    width = max(len(target.target) for target in targets)
    return [((f"{state}{claim}", "bold"),), *(f"  {target.target:<{width}}  {target.reason}" for target in targets)]


def _unjudged(folder: str) -> list[Part]:
    commands = f"`mod-export validate {folder}` judges it, `mod-export bench {folder}` times it"
    return [(("NOT JUDGED", "bold"), (f"  built without evidence: {commands}", ""))]


def _verdict(verdict: Verdict, folder: str) -> list[Part]:
    reasons = [f"  - {reason}" for reason in verdict.reasons]
    if verdict.status == "pass":
        return [(("PASS", tables.GOOD), (f"  every gate met: {folder}", ""))]
    count = f"{len(reasons)} reason{'s' if len(reasons) != 1 else ''}"
    return [*reasons, (("FAIL", tables.BAD), (f"  {count}, listed above: {folder}", ""))]


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
    columns: tuple[tables.Column[ParityRow], ...] = (
        tables.TARGET,
        tables.ROLE,
        tables.BUCKET,
        tables.DTYPE,
        *tables.PARITY,
        tables.Column("ties", lambda row: _word(row.ties_exact), number=False),
        tables.Column("causal", lambda row: _word(causal.get(row.setting)), number=False),
    )
    identical, compared = sum(row.identical for row in texts), sum(row.texts for row in texts)
    written = [f"texts: {identical:,} of {compared:,} are those of eager PyTorch, token for token"] if compared else []
    beside = [*_files(structure), *notes, *written, *map(wording.quality_text, quality), *_statements(causality)]
    return render_parts([tables.table_of(columns, parity), "", *beside, "", *_outcome(verdict)])


def render_bench(
    rows: Sequence[PairRow], verdict: Verdict, not_compared: str | None = None, rivals: Sequence[RivalRow] = ()
) -> str:
    """Returns one line for each comparison of whole rows, reasons and disturbances, the verdict, and other times.

    `not_compared` says why there are no comparisons; then there is one line for each engine. `rivals` are other
    programs that were timed too.
    """
    whole, prompts, steps = (
        [entry for entry in summary.settings_of(rows, role) if entry.ms("mod") is not None]
        for role in ("forward", "prefill", "decode")
    )
    timed = tables.timed_columns(not_compared)
    remarks = [
        *([] if not_compared is None else [f"{NOT_COMPARED}{not_compared}"]),
        *_reasons([row for row in rows if isinstance(row, SpeedupRow)]),
        *_disturbances([row for row in rows if isinstance(row, LatencyRow)]),
    ]
    parts = [*sections([tables.table_of((*tables.SETTING, *timed.bench), whole)], remarks), *_outcome(verdict)]
    narrow = summary.precisions(row for row in rows if isinstance(row, PrecisionRow))
    for title, table in (
        ("lower precision", tables.table_of(tables.PRECISION_TIMED, narrow)),
        ("token by token", tables.table_of((*tables.SETTING, *timed.steps), steps)),
        ("first token", tables.table_of((*tables.PROMPT_SETTING, *timed.prompts), prompts)),
    ):
        parts += ["", title, table] if table.rows else []
    if rivals:
        timed_rows = [row for row in rivals if row.reason is None]
        reasons = [
            f"{row.bucket} {name_of(row.model)} {row.program}: {row.reason}" for row in rivals if row.reason is not None
        ]
        busiest = max(row.other_load for row in rivals)
        load = f"while all of them waited, others took up to {100 * busiest:.0f} % of the machine's CPU time"
        parts += ["", RIVALS_TITLE, tables.table_of(tables.RIVAL_COLUMNS, timed_rows), *reasons, load]
    return render_parts(parts)


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


def _word(answer: bool | None) -> str | None:
    return None if answer is None else "yes" if answer else "NO"

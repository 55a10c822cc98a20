"""The report on a console: for a person at a terminal, and for a log.

Colour and width follow the terminal, NO_COLOR is honoured, and what is not a terminal gets lines that never wrap.
The text is ASCII but for names that came in from outside.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import IO

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from mod_export.report.generation import generation_parts
from mod_export.report.summary import (
    Setting,
    Untried,
    forward_parity,
    gains,
    precision_lines,
    settings_of,
    untried_targets,
)
from mod_export.report.tables import BAD, GOOD, QUIET, UNBOUNDED, fitted_table, judged_text
from mod_export.report.wording import (
    agreement_text,
    count_text,
    difference_text,
    error_text,
    interval_text,
    ms_text,
    printable,
    ratio_text,
    setting_text,
    threads_text,
)
from mod_export.results.latency import LatencyRow, SpeedupRow
from mod_export.results.report import BuildReport

__all__ = ["control_text", "disturbance_lines", "print_report", "reason_lines", "render_text"]

COLUMNS = (
    "target", "bucket", "dtype", "parity", "routing agreement", "max error", "dense ms", "MoD ms",
    "speed-up [95 %]", "verdict", "predicted (FLOPs)", "efficiency",
)  # fmt: skip
FIRST_NUMBER = 4
STACKS = ((0, 1, 2), (3, 4, 5), (6, 7, 9), (8, 10, 11))
"""Which columns stand on top of each other where the terminal is too narrow for all of them."""
Cleaner = Callable[[str], str]


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
    """The report as text, without colour and without wrapping unless asked for, for a file of this encoding."""
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
    parts: list[Table | Text] = [_headline(report, clean), Text()]
    settings = settings_of(report)
    if settings:
        parts += [_table(settings, clean, console), Text(), *_conditions(report, clean), Text()]
    parts += generation_parts(report, clean, console)
    parts += _not_run(untried_targets(report), clean)
    parts += _verdict(report, folder, clean)
    console.print(Group(*parts), highlight=False, markup=False, emoji=False)


def _headline(report: BuildReport, clean: Cleaner) -> Text:
    model = report.model
    about = f"  {clean(model.architecture)}, {count_text(model.parameters)} parameters"
    return Text.assemble(
        (clean(model.name), "bold"), about, (f", checkpoint {clean(model.checkpoint_sha256[:12])}", QUIET)
    )


def _table(settings: Sequence[Setting], clean: Cleaner, console: Console) -> Table:
    rows = [[Text(head) for head in COLUMNS], *(_cells(setting, clean) for setting in settings)]
    return fitted_table(rows, FIRST_NUMBER, STACKS, console)


def _cells(setting: Setting, clean: Cleaner) -> list[Text]:
    dense, mod, speedup = setting.of_model("dense"), setting.of_model("mod"), setting.speedup
    return [
        Text(clean(setting.target)),
        Text(clean(setting.bucket)),
        Text(setting.dtype),
        judged_text({None: "-", True: "pass", False: "FAIL"}[setting.parity_passed], setting.parity_passed),
        Text(agreement_text(setting.routing) if setting.routing else "-"),
        Text(error_text(setting.error.max_abs) if setting.error else "-"),
        Text(ms_text(dense.p50_ms) if dense else "-"),
        Text(ms_text(mod.p50_ms) if mod else "-"),
        judged_text(interval_text(speedup), speedup.passed) if speedup else Text("-"),
        Text(speedup.verdict if speedup else "-"),
        Text(ratio_text(speedup.predicted_flops) if speedup else "-"),
        Text(f"{speedup.efficiency:.2f}" if speedup else "-"),
    ]


def _conditions(report: BuildReport, clean: Cleaner) -> list[Text]:
    """The conditions that the numbers hold for."""
    lines = []
    parity = forward_parity(report)
    if parity:
        kinds = ", ".join(dict.fromkeys(kind for row in parity for kind in row.inputs))
        references = ", ".join(dict.fromkeys(row.reference for row in parity))
        lines.append(
            f"parity: against {references}, on inputs {kinds}; max error of a logit given the same routing, "
            "the worse of MoD and dense"
        )
        found = gains(report)
        inputs = ", ".join(f"{batch.input} {agreement_text(batch)}" for batch in found.by_input)
        differences = difference_text(found.routed - found.agreed, found.faults)
        lines += [f"routing agreement: {inputs}; {differences}"] if inputs else []
    if report.latency:
        lines += _sampled(report.latency)
    gated = [row for row in report.speedup if row.gate is not None]
    if report.speedup:
        gate = f"; gate {gated[0].gate:.2f}x at {gated[0].bucket}" if gated else "; no gate on speed-up"
        lines.append(f"speed-up: median dense / median MoD, with a 95 % bootstrap interval{gate}")
        lines.append(f"control: {control_text(report.speedup)}")
    lines += precision_lines(report)
    lines += [*reason_lines(report.speedup), *disturbance_lines(report.latency)]
    return [Text(clean(line), style=QUIET) for line in lines]


def _sampled(rows: Sequence[LatencyRow]) -> list[str]:
    """On what each target ran, and how many samples were taken: sampling ends when a comparison is settled."""
    counts: dict[tuple[str, tuple[str, ...], int], list[int]] = {}
    for row in rows:
        counts.setdefault((row.target, row.providers, row.threads), []).append(len(row.samples_ms))
    return [
        f"latency: {target} on {', '.join(providers)}, {threads_text(threads)}, "
        f"{_range(min(found), max(found))} interleaved samples"
        for (target, providers, threads), found in counts.items()
    ]


def _range(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _not_run(untried: Sequence[Untried], clean: Cleaner) -> list[Text]:
    lines = []
    for built, title in ((True, "built, but not run here: no claim is made about these"), (False, "not built")):
        chosen = [target for target in untried if target.built is built]
        if chosen:
            width = max(len(target.target) for target in chosen)
            lines += [
                Text(title, style="bold"),
                *(Text(f"  {clean(target.target):<{width}}  {clean(target.reason)}") for target in chosen),
                Text(),
            ]
    return lines


def _verdict(report: BuildReport, folder: str, clean: Cleaner) -> list[Text]:
    reasons = [Text(f"  - {clean(reason)}") for reason in report.verdict.reasons]
    if report.verdict.status == "pass":
        return [Text.assemble(("PASS", GOOD), f"  every gate met: {clean(folder)}")]
    count = f"{len(reasons)} reason{'s' if len(reasons) != 1 else ''}"
    return [*reasons, Text.assemble(("FAIL", BAD), f"  {count}, listed above: {clean(folder)}")]


def control_text(rows: Sequence[SpeedupRow]) -> str:
    """In how many settings the control covers 1, and how far from 1 the worst one is, of one or more rows."""
    controls = [row.control for row in rows]
    covering = sum(control.covers_one for control in controls)
    worst = max(controls, key=lambda control: abs(control.measured - 1))
    settings = "setting" if len(controls) == 1 else "settings"
    return (
        f"the interval of the MoD engine against itself covers 1 in {covering} of {len(controls)} {settings}; "
        f"farthest from it {worst.measured:.3f}x [{worst.ci99[0]:.3f}, {worst.ci99[1]:.3f}]"
    )


def reason_lines(rows: Sequence[SpeedupRow]) -> list[str]:
    """One line for each setting that is not faster, or inconclusive."""
    return [f"{setting_text(row)}: {row.verdict}: {row.reason}" for row in rows if row.reason is not None]


def disturbance_lines(rows: Sequence[LatencyRow]) -> list[str]:
    """One line for each flag; what holds for both models of a setting is said once."""
    models: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for flag in row.flags:
            models.setdefault((setting_text(row), flag), []).append(row.model)
    return [
        f"{setting}: {flag}" if len(named) > 1 else f"{setting} {named[0]}: {flag}"
        for (setting, flag), named in models.items()
    ]

"""Tables: each column is defined once, for terminals, logs and pages.

`table_of` fills a table from columns. A terminal or log gets a table whose columns are stacked if it is too narrow for
all of them side by side (`fitted_table`). A page gets the same cells (`macros.html.j2`).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from mod_export.report.charts import name_of
from mod_export.report.summary import JudgedPrecision, SettingResults
from mod_export.report.wording import (
    agreement_text,
    bytes_text,
    ci_text,
    error_text,
    interval_text,
    ms_text,
    range_text,
    ratio_and_interval,
    ratio_text,
    share_text,
)
from mod_export.rows.base import FailedRow
from mod_export.rows.correctness import OutputParity, ParityRow, TextQuality
from mod_export.rows.speed import LatencyRow, RivalRow, SpeedupRow, SpeedVerdict, StepsCompared
from mod_export.types import HasSetting, ModelKind

UNBOUNDED = 100_000
"""Width of a console that never wraps."""
HEAD = box.Box("    \n    \n -- \n    \n    \n -- \n    \n    \n", ascii=True)
"""A rule below the head, and another one above the total if there is one."""
GOOD, BAD, QUIET = "green", "bold red", "dim"
Stacks = tuple[tuple[int, ...], ...]
State = Literal["", "pass", "fail", "warn", "none"]
"""State of a cell that judges something; also a class of page.css."""
STYLES: dict[State, str] = {"pass": GOOD, "fail": BAD}
Row = TypeVar("Row", contravariant=True)


@dataclass(frozen=True, slots=True)
class Cell:
    """Text of a cell. `note` is small print beside the text, on pages only; `state` gives the cell a colour."""

    text: str
    note: str = ""
    state: State = ""


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """Name of a column, and the function that makes its cell from a row: None for a dash. Numbers are aligned to the
    right.
    """

    name: str
    cell: Callable[[Row], Cell | str | None]
    number: bool = True


@dataclass(frozen=True, slots=True)
class ResultTable:
    """Heads, whether each column holds numbers, and the cells.

    `stacks` are the columns that stand on top of each other on a narrow terminal; empty if they always stand side by
    side.
    """

    heads: tuple[str, ...]
    numbers: tuple[bool, ...]
    rows: tuple[tuple[Cell, ...], ...]
    stacks: Stacks = ()


def table_of(columns: Sequence[Column[Row]], rows: Iterable[Row], stacks: Stacks = ()) -> ResultTable:
    """Returns a table with one line for each row."""
    return ResultTable(
        tuple(column.name for column in columns),
        tuple(column.number for column in columns),
        tuple(tuple(_cell(column.cell(row)) for column in columns) for row in rows),
        stacks,
    )


def _cell(cell: Cell | str | None) -> Cell:
    return cell if isinstance(cell, Cell) else Cell("-" if cell is None else cell)


def table_lines(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers_from: int | None = None,
    total: Sequence[str] | None = None,
) -> list[str]:
    """Returns lines of plain text from heads and cells. The column `numbers_from` and all after it are aligned to the
    right; `total` is a last row below a rule.
    """
    first = len(columns) if numbers_from is None else numbers_from
    return _lines(_table(columns, rows, [index >= first for index in range(len(columns))], total))


def fitted_table(table: ResultTable, console: Console, clean: Callable[[str], str]) -> Table:
    """Returns a table for a console, stacked if the console is too narrow. `clean` makes text from elsewhere safe for
    this console.
    """
    rows = [[Text(clean(cell.text), style=STYLES.get(cell.state, "")) for cell in row] for row in table.rows]
    wide = _table(table.heads, rows, table.numbers)
    needed = Measurement.get(console, console.options.update(width=UNBOUNDED), wide).maximum
    if not table.stacks or needed <= console.width:
        return wide
    head, *body, last = [_stacked(row, table.stacks) for row in [[Text(name) for name in table.heads], *rows]]
    for row in body:
        row[0].append("\n")
    return _table(head, [*body, last], [False] * len(table.stacks))


def _stacked(row: Sequence[Text], stacks: Sequence[Sequence[int]]) -> list[Text]:
    # All cells get the same height, because a table aligns heads at the bottom and cells at the top.
    height = max(len(stack) for stack in stacks)
    cells = [[*(row[index] for index in stack), *[Text()] * (height - len(stack))] for stack in stacks]
    return [Text("\n").join(lines) for lines in cells]


def _table(
    columns: Sequence[str | Text],
    rows: Sequence[Sequence[str | Text]],
    numbers: Sequence[bool],
    total: Sequence[str] | None = None,
) -> Table:
    table = Table(
        box=HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold",
        show_footer=total is not None,
    )
    for head, foot, number in zip(columns, total or [""] * len(columns), numbers, strict=True):
        justify = "right" if number else "left"
        table.add_column(_text(head), _text(foot), no_wrap=True, justify=justify)  # type: ignore[arg-type]  # A str to mypy.
    for row in rows:
        table.add_row(*map(_text, row))
    return table


def _text(cell: str | Text) -> Text:
    # A str may come from elsewhere, and rich would read [brackets] in it as its own markup.
    return Text(cell) if isinstance(cell, str) else cell


def _lines(table: Table) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=UNBOUNDED, color_system=None).print(table, highlight=False, markup=False, emoji=False)
    return [line.rstrip() for line in file.getvalue().splitlines()]


# The columns of all tables of results: on the console, in `validate` and `bench`, and on the page

VERDICTS: dict[SpeedVerdict, State] = {"faster": "pass", "not faster": "fail", "inconclusive": "warn"}


def _if_known(number: float | None, text: Callable[[float], str]) -> str | None:
    return None if number is None else text(number)


def _outcome(passed: bool | None) -> Cell | None:
    return None if passed is None else Cell("pass", state="pass") if passed else Cell("FAIL", state="fail")


def _verdict(verdict: SpeedVerdict) -> Cell:
    return Cell(verdict, state=VERDICTS[verdict])


def _against(row: RivalRow) -> str | None:
    return None if row.measured is None or row.ci95 is None else ratio_and_interval(row.measured, row.ci95)


def _judged_speedup(row: SettingResults) -> Cell | None:
    if row.speedup is None:
        return None
    passed = row.speedup.passed
    return Cell(interval_text(row.speedup), state="" if passed is None else "pass" if passed else "fail")


def _ms(kind: ModelKind, name: str | None = None) -> Column[SettingResults]:
    return Column(name or f"{name_of(kind)} ms", lambda row: _if_known(row.ms(kind), ms_text))


def _rate(kind: ModelKind, name: str | None = None) -> Column[SettingResults]:
    return Column(
        name or f"{name_of(kind)} tok/s",
        lambda row: _if_known(row.step.tokens_per_second.get(kind), "{:,.0f}".format) if row.step else None,
    )


def _alone(text: Callable[[LatencyRow], str]) -> Callable[[SettingResults], str | None]:
    """Returns a cell function that shows the latency of the MoD model."""
    return lambda row: text(latency) if (latency := row.latency("mod")) else None


def _of_whole_rows(text: Callable[[SpeedupRow], Cell | str | None]) -> Callable[[SettingResults], Cell | str | None]:
    return lambda row: text(row.speedup) if row.speedup else None


def _of_steps(text: Callable[[StepsCompared], str]) -> Callable[[SettingResults], str | None]:
    return lambda row: text(row.step.compared) if row.step and row.step.compared else None


def _identical(row: SettingResults) -> str | None:
    identical, compared = row.texts
    if not compared:
        return None
    return f"all {identical:,}" if identical == compared else f"{identical:,} of {compared:,}"


def _gate(row: SpeedupRow) -> Cell | None:
    if row.gate is None:
        return None
    return Cell(f"{ratio_text(row.gate)} {'pass' if row.passed else 'FAIL'}", state="pass" if row.passed else "fail")


def _control(row: SpeedupRow) -> Cell:
    low, high = row.control.ci99
    text = f"{row.control.measured:.3f}x [{low:.3f}, {high:.3f}]"
    return Cell(text) if row.control.covers_one else Cell(f"{text} not 1", state="fail")


TARGET: Column[HasSetting] = Column("target", lambda row: row.setting.target, number=False)
BUCKET: Column[HasSetting] = Column("bucket", lambda row: row.setting.bucket.name, number=False)
DTYPE: Column[HasSetting] = Column("dtype", lambda row: row.setting.dtype, number=False)
ROLE: Column[HasSetting] = Column("role", lambda row: row.setting.role, number=False)
MODEL: Column[HasSetting] = Column("model", lambda row: name_of(row.setting.model), number=False)
PROMPT: Column[SettingResults] = Column("prompt", lambda row: f"{row.setting.bucket.seq:,} tokens", number=False)
SETTING = (TARGET, BUCKET, DTYPE)
PROMPT_SETTING = (TARGET, PROMPT, DTYPE)
NAMED: Column[HasSetting] = Column("setting", lambda row: str(row.setting), number=False)
"""Replaces SETTING and ROLE on pages."""
OUTCOME: Column[SettingResults] = Column("parity", lambda row: _outcome(row.parity_passed), number=False)
JUDGED: tuple[Column[SettingResults], ...] = (
    OUTCOME,
    Column("routing agreement", lambda row: agreement_text(row.routing) if row.routing else None),
    Column("max error", lambda row: error_text(row.error.max_abs) if row.error else None),
)
STEPS_JUDGED: tuple[Column[SettingResults], ...] = (OUTCOME, Column("identical texts", _identical))
TIMES = (_ms("dense"), _ms("mod"))
SPEEDUP: Column[SettingResults] = Column("speed-up [95 %]", lambda row: interval_text(row.speed) if row.speed else None)
VERDICT: Column[SettingResults] = Column(
    "verdict", lambda row: _verdict(row.speed.verdict) if row.speed else None, number=False
)
PREDICTED: Column[SettingResults] = Column(
    "predicted (FLOPs)", _of_whole_rows(lambda row: _if_known(row.predicted_flops, ratio_text))
)
EFFICIENCY: Column[SettingResults] = Column(
    "efficiency", _of_whole_rows(lambda row: _if_known(row.efficiency, "{:.2f}".format))
)
COMPARED: tuple[Column[SettingResults], ...] = (
    SPEEDUP,
    VERDICT,
    Column("control [99 %]", _of_whole_rows(_control)),
    PREDICTED,
    Column("predicted (roofline)", _of_whole_rows(lambda row: _if_known(row.predicted_roofline, ratio_text))),
    EFFICIENCY,
    Column("gate", _of_whole_rows(_gate), number=False),
)
ALONE: tuple[Column[SettingResults], ...] = (
    Column("ms [95 %]", _alone(lambda row: f"{ms_text(row.p50_ms)} {ci_text(row.p50_ci95)}".rstrip())),
    Column("p90 ms", _alone(lambda row: ms_text(row.p90_ms))),
    Column("p99 ms", _alone(lambda row: ms_text(row.p99_ms))),
)
SELECTED: Column[SettingResults] = Column(
    "selected tokens", lambda row: range_text(row.step.selected) if row.step else None
)


class Timed(NamedTuple):
    """The columns about time, and the columns that stand on top of each other on a narrow terminal."""

    whole: tuple[Column[SettingResults], ...]
    """The columns for whole rows, which follow SETTING and JUDGED."""
    bench: tuple[Column[SettingResults], ...]
    """The columns for whole rows in `bench`, which follow SETTING."""
    steps: tuple[Column[SettingResults], ...]
    """The columns for steps, which follow SETTING and STEPS_JUDGED."""
    prompts: tuple[Column[SettingResults], ...]
    """The columns for prompts, which follow PROMPT_SETTING and OUTCOME."""
    whole_stacks: Stacks
    steps_stacks: Stacks
    prompts_stacks: Stacks


WITH_BASELINE = Timed(
    whole=(*TIMES, Column("speed-up [95 %]", _judged_speedup), VERDICT, PREDICTED, EFFICIENCY),
    bench=(*TIMES, *COMPARED),
    steps=(
        SELECTED,
        _rate("dense"),
        _rate("mod"),
        SPEEDUP,
        VERDICT,
        Column("predicted (bytes)", _of_steps(lambda row: ratio_text(row.predicted_bytes))),
        Column("efficiency", _of_steps(lambda row: f"{row.efficiency:.2f}")),
    ),
    prompts=(*TIMES, SPEEDUP, VERDICT),
    whole_stacks=((0, 1, 2), (3, 4, 5), (6, 7, 9), (8, 10, 11)),
    steps_stacks=((0, 1, 2), (3, 4, 5), (6, 7, 9), (8, 10, 11)),
    prompts_stacks=((0, 1, 2), (3,), (4, 5), (6, 7)),
)
WITHOUT_BASELINE = Timed(
    whole=ALONE,
    bench=ALONE,
    steps=(SELECTED, _ms("mod", "ms a token"), _rate("mod", "tok/s")),
    prompts=(_ms("mod", "ms"),),
    whole_stacks=((0, 1, 2), (3, 4, 5), (6, 7, 8)),
    steps_stacks=((0, 1, 2), (3, 4), (5, 6, 7)),
    prompts_stacks=((0, 1, 2), (3,), (4,)),
)


def timed_columns(not_compared: str | None) -> Timed:
    """Returns the columns of a build, given the reason why it has no comparison."""
    return WITH_BASELINE if not_compared is None else WITHOUT_BASELINE


def _gated(number: float | None, gate: float, text: Callable[[float], str]) -> Cell | None:
    """Returns a cell with a number and its gate; None if the output of the model is not logits."""
    return None if number is None else Cell(text(number), f"gate {text(gate)}")


def _errors(row: ParityRow) -> Cell:
    """Returns a cell with the errors and gates of all outputs of the model, in order."""
    outputs: list[ParityRow | OutputParity] = [row, *row.further_outputs]
    gates = ", ".join(error_text(output.allowed_max_abs) for output in outputs)
    return Cell(", ".join(error_text(output.error.max_abs) for output in outputs), f"gate {gates}")


def _perplexity(row: ParityRow) -> Cell | None:
    """Returns a cell with the perplexity and that of PyTorch with which the gate compares it."""
    if row.text is None:
        return None
    return Cell(f"{row.text.perplexity:.4f}", f"PyTorch {row.text.expected_perplexity(row.dtype):.4f}")


def _quality(text: Callable[[TextQuality], str]) -> Callable[[JudgedPrecision], str | None]:
    return lambda row: text(row.parity.text) if row.parity and row.parity.text else None


PARITY: tuple[Column[ParityRow], ...] = (
    MODEL,
    Column("parity", lambda row: _outcome(row.passed), number=False),
    Column("tokens", lambda row: Cell(f"{row.tokens:,}", f"float64 {row.rounding_tokens:,}")),
    Column("routing agreement", lambda row: agreement_text(row.routing)),
    Column("near-ties", lambda row: f"{row.routing.near_ties:,}"),
    Column("max error", _errors),
    Column("rounding error", lambda row: _if_known(row.rounding_error, error_text)),
    Column("mean error", lambda row: error_text(row.error.mean_abs)),
    Column("next token", lambda row: _gated(row.next_token_agreement, row.gate.next_token_agreement, share_text)),
    Column("KL", lambda row: _gated(row.kl, row.gate.max_kl, error_text)),
    Column("perplexity", _perplexity),
)
PRECISION_TIMED: tuple[Column[JudgedPrecision], ...] = (
    TARGET,
    BUCKET,
    DTYPE,
    MODEL,
    Column("size", lambda row: bytes_text(row.row.bytes)),
    Column("float32 size", lambda row: bytes_text(row.row.float32_bytes)),
    Column("speed against float32 [95 %]", lambda row: interval_text(row.row)),
    Column("verdict", lambda row: _verdict(row.row.verdict), number=False),
)
"""The columns of PRECISION that `bench` fills."""
PRECISION: tuple[Column[JudgedPrecision], ...] = (
    *PRECISION_TIMED,
    Column("same next token", _quality(lambda text: share_text(text.next_token_agreement))),
    Column("perplexity", _quality(lambda text: f"{text.perplexity:.4f}")),
    Column("eager perplexity", _quality(lambda text: f"{text.own_perplexity:.4f}")),
    Column("parity", lambda row: _outcome(row.parity.passed if row.parity else None), number=False),
)
PRECISION_STACKS: Stacks = ((0, 1, 2), (3, 4, 5), (6, 7), (8, 9, 10), (11,))
RIVAL_COLUMNS: tuple[Column[RivalRow], ...] = (
    Column("bucket", lambda row: row.bucket, number=False),
    Column("model", lambda row: name_of(row.model), number=False),
    Column("program", lambda row: row.program, number=False),
    Column("version", lambda row: row.version, number=False),
    Column("dtype", lambda row: row.dtype, number=False),
    Column("ms", lambda row: None if row.p50_ms is None else ms_text(row.p50_ms)),
    Column("rival / ours [95 %]", _against),
    Column("difference", lambda row: None if row.error is None else error_text(row.error)),
)
FAILURES: tuple[Column[FailedRow], ...] = (
    Column("what", lambda row: row.what, number=False),
    Column("stage", lambda row: row.stage, number=False),
    Column("reason", lambda row: row.reason, number=False),
)

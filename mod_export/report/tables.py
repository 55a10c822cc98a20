"""Tables: each column is defined once, for terminals, logs and pages.

`table_of` fills a table from columns. A log gets lines that never wrap (`lines_of`). A terminal gets a table whose
columns are stacked if it is too narrow for all of them side by side (`fitted_table`). A page gets the same cells
(`macros.html.j2`).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

UNBOUNDED = 10_000
"""Width of a console that never wraps."""
HEAD = box.Box("    \n    \n -- \n    \n    \n -- \n    \n    \n", ascii=True)
"""A rule below the head, and another one above the total if there is one."""
GOOD, BAD, QUIET = "green", "bold red", "dim"
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
    """Name of a column, and the function that makes its cell from a row. Numbers are aligned to the right."""

    name: str
    cell: Callable[[Row], Cell | str]
    number: bool = True


@dataclass(frozen=True, slots=True)
class ResultTable:
    """Heads, which of the columns hold numbers, and the cells."""

    heads: tuple[str, ...]
    numbers: tuple[bool, ...]
    rows: tuple[tuple[Cell, ...], ...]


def table_of(columns: Sequence[Column[Row]], rows: Iterable[Row]) -> ResultTable:
    """Returns a table with one line for each row."""
    cells = (tuple(column.cell(row) for column in columns) for row in rows)
    return ResultTable(
        tuple(column.name for column in columns),
        tuple(column.number for column in columns),
        tuple(tuple(Cell(cell) if isinstance(cell, str) else cell for cell in line) for line in cells),
    )


def judged(passed: bool | None) -> Cell:
    """Returns the outcome of gates; a dash if nothing was judged."""
    return Cell("-") if passed is None else Cell("pass", state="pass") if passed else Cell("FAIL", state="fail")


def lines_of(table: ResultTable) -> list[str]:
    """Returns a table as lines of plain text, as wide as it needs to be."""
    return _lines(_table(table.heads, [[Text(cell.text) for cell in row] for row in table.rows], table.numbers))


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


def fitted_table(
    table: ResultTable, stacks: Sequence[Sequence[int]], console: Console, clean: Callable[[str], str]
) -> Table:
    """Returns a table for a terminal. `stacks` are the columns that stand on top of each other if the console is too
    narrow for all of them. `clean` makes text from elsewhere safe for this console.
    """
    rows = [[Text(clean(cell.text), style=STYLES.get(cell.state, "")) for cell in row] for row in table.rows]
    wide = _table(table.heads, rows, table.numbers)
    if Measurement.get(console, console.options.update(width=UNBOUNDED), wide).maximum <= console.width:
        return wide
    head, *body, last = [_stacked(row, stacks) for row in [[Text(name) for name in table.heads], *rows]]
    for row in body:
        row[0].append("\n")
    return _table(head, [*body, last], [False] * len(stacks))


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

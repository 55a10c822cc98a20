"""Tables as text: one look on every terminal, in files and in logs, for the report, the sweep and inspect.

`table_lines` never wraps. `fitted_table` stacks columns where the terminal is too narrow for them side by side.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

__all__ = ["BAD", "GOOD", "HEAD", "QUIET", "UNBOUNDED", "fitted_table", "judged_text", "table_lines"]

UNBOUNDED = 10_000
"""Columns of a console that never wraps."""
HEAD = box.Box("    \n    \n -- \n    \n    \n -- \n    \n    \n", ascii=True)
"""A rule below the head, and another above the total where there is one."""
GOOD, BAD, QUIET = "green", "bold red", "dim"
Cell = str | Text


def table_lines(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers_from: int | None = None,
    total: Sequence[str] | None = None,
) -> list[str]:
    """A table as lines of plain text, as wide as it needs to be.

    Args:
        columns: heads.
        rows: as many cells each as there are columns.
        numbers_from: the first column that is aligned to the right, as are all after it.
        total: a last row below a rule.
    """
    table = _table(columns, rows, numbers_from, total)
    file = io.StringIO()
    Console(file=file, width=UNBOUNDED, color_system=None).print(table, highlight=False, markup=False, emoji=False)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def fitted_table(
    rows: Sequence[Sequence[Text]], numbers_from: int, stacks: Sequence[Sequence[int]], console: Console
) -> Table:
    """A table for a terminal.

    Args:
        rows: the first one is the head; all have the same number of cells.
        numbers_from: the first column that is aligned to the right, as are all after it.
        stacks: which columns stand on top of each other where the console is too narrow for all of them.
        console: that it will be printed on.
    """
    table = _table(rows[0], rows[1:], numbers_from)
    if Measurement.get(console, console.options.update(width=UNBOUNDED), table).maximum <= console.width:
        return table
    head, *body, last = [_stacked(row, stacks) for row in rows]
    for row in body:
        row[0].append("\n")
    return _table(head, [*body, last], numbers_from=len(stacks))


def judged_text(text: str, passed: bool | None) -> Text:
    """In the colour of an outcome; None has none."""
    return Text(text, style={None: "", True: GOOD, False: BAD}[passed])


def _stacked(row: Sequence[Text], stacks: Sequence[Sequence[int]]) -> list[Text]:
    # All of one height, because a table aligns heads at the bottom and cells at the top.
    height = max(len(stack) for stack in stacks)
    cells = [[*(row[index] for index in stack), *[Text()] * (height - len(stack))] for stack in stacks]
    return [Text("\n").join(lines) for lines in cells]


def _table(
    columns: Sequence[Cell],
    rows: Sequence[Sequence[Cell]],
    numbers_from: int | None,
    total: Sequence[Cell] | None = None,
) -> Table:
    table = Table(
        box=HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold",
        show_footer=total is not None,
    )
    first = len(columns) if numbers_from is None else numbers_from
    for index, (head, foot) in enumerate(zip(columns, total or [""] * len(columns), strict=True)):
        justify = "right" if index >= first else "left"
        table.add_column(_text(head), _text(foot), no_wrap=True, justify=justify)  # type: ignore[arg-type]  # A str to mypy.
    for row in rows:
        table.add_row(*map(_text, row))
    return table


def _text(cell: Cell) -> Text:
    # What is no Text yet may come from outside, and rich would read [brackets] in it as its own markup.
    return Text(cell) if isinstance(cell, str) else cell

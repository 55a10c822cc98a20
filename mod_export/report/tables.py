"""Tables of a console that stay readable where the terminal is narrow."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

__all__ = ["BAD", "GOOD", "HEAD", "QUIET", "UNBOUNDED", "fitted_table", "judged_text"]

UNBOUNDED = 10_000
HEAD = box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
GOOD, BAD, QUIET = "green", "bold red", "dim"
Stacks = Sequence[Sequence[int]]
"""Which columns stand on top of each other where the terminal is too narrow for all of them."""


def fitted_table(rows: Sequence[Sequence[Text]], numbers_from: int, stacks: Stacks, console: Console) -> Table:
    """A table of `rows`, the first of which is its head; columns from `numbers_from` on hold numbers."""
    table = _filled(rows, numbers_from)
    if Measurement.get(console, console.options.update(width=UNBOUNDED), table).maximum <= console.width:
        return table
    head, *body, last = [_stacked(row, stacks) for row in rows]
    for row in body:
        row[0].append("\n")
    return _filled([head, *body, last], numbers_from=len(stacks))


def judged_text(text: str, passed: bool | None) -> Text:
    """In the colour of an outcome; None has none."""
    return Text(text, style={None: "", True: GOOD, False: BAD}[passed])


def _stacked(row: Sequence[Text], stacks: Stacks) -> list[Text]:
    # All of one height, because a table aligns heads at the bottom and cells at the top.
    height = max(len(stack) for stack in stacks)
    cells = [[*(row[index] for index in stack), *[Text()] * (height - len(stack))] for stack in stacks]
    return [Text("\n").join(lines) for lines in cells]


def _filled(rows: Sequence[Sequence[Text]], numbers_from: int) -> Table:
    table = Table(box=HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for index, head in enumerate(rows[0]):
        table.add_column(head, no_wrap=True, justify="right" if index >= numbers_from else "left")
    for row in rows[1:]:
        table.add_row(*row)
    return table

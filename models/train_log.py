"""What a run tells: log.csv, TensorBoard's files beside it when asked for, and its progress on the screen.

Rows of the log hold nothing that depends on time, so that a resumed run leaves the log of an uninterrupted one.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mod_models.checkpoint import written_beside
from mod_models.train_config import TrainError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

LOGS = ("csv", "tensorboard")
HELD_OUT = "held_out_"


class Log:
    """Appends rows to log.csv in `folder`; a row for a training step may also hold an evaluation."""

    def __init__(self, folder: Path, step: int, kind: str = "csv") -> None:
        """Goes on after the row of `step`, 0 for a new run: one that was killed left rows that come again.

        `kind` is one of LOGS; `tensorboard` writes the same numbers to the folder `tensorboard` as well.

        Raises:
            TrainError: log.csv is something else, or the package tensorboard is missing.
            OSError: the disk cannot be written to, or is full.
        """
        self.path = folder / "log.csv"
        self.columns: list[str] = []
        kept = self._rows_until(step)
        if kept:
            with written_beside(self.path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerows([self.columns, *kept])
        else:
            self.path.unlink(missing_ok=True)
            self.columns = []
        self.board: SummaryWriter | None = None
        if kind == "tensorboard":
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                missing = "--log tensorboard: needs the package tensorboard; pip install 'mod-export[train]'"
                raise TrainError(missing) from error
            # Rows that come again are in its files too; this tells it which to forget.
            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def _rows_until(self, step: int) -> list[list[str]]:
        if not self.path.exists():
            return []
        try:
            with self.path.open(newline="", encoding="utf-8") as file:
                rows = list(csv.reader(file))
            if rows and rows[0][0] != "step":
                raise ValueError(rows[0][0])
            self.columns = rows[0] if rows else []
            # The last line may be half a row.
            whole = [row for row in rows[1:] if len(row) == len(self.columns)]
            return [row for row in whole if int(row[0]) <= step]
        except (ValueError, LookupError, csv.Error) as error:
            raise TrainError(f"{self.path}: not the log of a training run; name another folder with --out") from error

    def write(
        self,
        step: int,
        trained: Mapping[str, float],
        metrics: Mapping[str, float],
        held_out: Mapping[str, float] | None = None,
    ) -> None:
        """One row, on disk when this returns; every row has the same names.

        `held_out` is an evaluation: `bits_per_byte`, `next_token_loss` and the same metrics, in columns that begin
        with HELD_OUT and are empty in other rows.

        Raises:
            OSError: the disk cannot be written to, or is full.
        """
        evaluated = {HELD_OUT + name: value for name, value in (held_out or {}).items()}
        numbers = {**trained, **metrics, **evaluated}
        if not self.columns:
            later = (HELD_OUT + name for name in ("bits_per_byte", "next_token_loss", *metrics))
            self.columns = ["step", *trained, *metrics, *later]
            with self.path.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerow(self.columns)
        with self.path.open("a", newline="", encoding="utf-8") as file:
            # repr of a float is the shortest text that reads back as the same number.
            row = {"step": step, **{name: repr(value) for name, value in numbers.items()}}
            csv.DictWriter(file, self.columns, restval="", lineterminator="\n").writerow(row)
        if self.board is not None:
            for name, value in numbers.items():
                self.board.add_scalar(name, value, step)
            self.board.flush()

    def close(self) -> None:
        """Closes TensorBoard's file; log.csv is never left open."""
        if self.board is not None:
            self.board.close()


class Event(NamedTuple):
    """One piece of progress.

    Attributes:
        step: how many steps are done.
        steps: how many there are.
        text: a line to show; empty where only the number of steps has changed.
        brief: a few words for the bar, instead of `text`; empty where the line is to stay on the screen.
    """

    step: int
    steps: int
    text: str = ""
    brief: str = ""


def show(events: Iterator[Event]) -> None:
    """Consumes the events of a run: a bar on standard error where that is a terminal, else lines on standard output."""
    if sys.stderr.isatty():
        _show_bar(events)
        return
    for event in events:
        if event.text:
            print(event.text, flush=True)


def _show_bar(events: Iterator[Event]) -> None:
    columns = (
        TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("")
        for event in events:
            progress.update(task, completed=event.step, total=event.steps, description=event.brief or None)
            if event.text and not event.brief:
                progress.console.print(event.text, markup=False, highlight=False)

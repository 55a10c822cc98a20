"""Output of a run: log.csv, optional TensorBoard files beside it, and progress on the screen.

Rows of the log hold no times, so that the log of a resumed run equals that of an uninterrupted run.
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
from mod_models.train import TrainError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

LOGS = ("csv", "tensorboard")
HELD_OUT = "held_out_"


class Log:
    """Writer of log.csv in `folder`; the row of a training step may also hold an evaluation."""

    def __init__(self, folder: Path, step: int, kind: str = "csv") -> None:
        """Deletes the rows after `step` (0 for a new run), because the resumed run writes them again.

        `kind` is one of LOGS; `tensorboard` writes the same numbers to the folder `tensorboard` as well.

        Raises:
            TrainError: log.csv is not the log of a run, or the package tensorboard is missing.
            OSError: the disk is full or not writable.
        """
        self.path = folder / "log.csv"
        self.columns: list[str] = []
        rows = self._rows_until(step)
        if rows:
            with written_beside(self.path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerows([self.columns, *rows])
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
            # TensorBoard's files also hold the repeated rows; `purge_step` makes it ignore them.
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
            # The last line may be incomplete.
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
        """Writes one row to the disk; every call must have the same names, except that `held_out` may be missing.

        `held_out` is an evaluation: `bits_per_byte`, `next_token_loss` and the same metrics. Its columns begin with
        HELD_OUT and are empty in rows without one.

        Raises:
            OSError: the disk is full or not writable.
        """
        evaluated = {HELD_OUT + name: value for name, value in (held_out or {}).items()}
        numbers = {**trained, **metrics, **evaluated}
        if not self.columns:
            later = (HELD_OUT + name for name in ("bits_per_byte", "next_token_loss", *metrics))
            self.columns = ["step", *trained, *metrics, *later]
            with self.path.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerow(self.columns)
        with self.path.open("a", newline="", encoding="utf-8") as file:
            # repr of a float is the shortest text that parses to the same number.
            row = {"step": step, **{name: repr(value) for name, value in numbers.items()}}
            csv.DictWriter(file, self.columns, restval="", lineterminator="\n").writerow(row)
        if self.board is not None:
            for name, value in numbers.items():
                self.board.add_scalar(name, value, step)
            self.board.flush()

    def close(self) -> None:
        """Closes TensorBoard's file. log.csv is closed after every row."""
        if self.board is not None:
            self.board.close()


class Event(NamedTuple):
    """A report of progress.

    Attributes:
        step: number of finished steps.
        steps: number of all steps.
        text: a line to show; empty if only the number of steps has changed.
        brief: short text for the progress bar, instead of `text`; empty if the line must stay on the screen.
    """

    step: int
    steps: int
    text: str = ""
    brief: str = ""


def show(events: Iterator[Event]) -> None:
    """Shows the events of a run: a bar on standard error if that is a terminal, else lines on standard output."""
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

"""Shows the progress of a build: a line on stderr for each finished stage, and a live line if stderr is a terminal."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.status import Status

from mod_export.rows.report import Stage


class Progress:
    """Observer of a build. `verbosity` -1 prints nothing, 0 prints stages, 1 also prints every step. The end of its
    `with` block removes the live line, even after an error.
    """

    def __init__(self, console: Console, verbosity: int) -> None:
        self._console = console
        self._verbosity = verbosity
        self._status: Status | None = None
        self._stage = ""
        self._steps = 0

    def stage_started(self, name: str) -> None:
        self._stage, self._steps = name, 0
        if self._verbosity >= 0 and self._console.is_terminal:
            self._status = self._console.status(name)
            self._status.start()

    def step_started(self, name: str) -> None:
        self._steps += 1
        if self._status is not None:
            self._status.update(f"{self._stage}  {name}")
        if self._verbosity > 0:
            self._console.print(f"    {name}", highlight=False, markup=False)

    def stage_finished(self, stage: Stage) -> None:
        self._stop()
        if self._verbosity < 0:
            return
        steps = f"{self._steps} steps" if self._steps > 1 else ""
        steps += f"{', ' if steps else ''}{stage.failed} failed" if stage.failed else ""
        memory = f"{stage.peak_rss_bytes / 2**20:.0f} MiB" if stage.peak_rss_bytes else ""
        self._console.print(
            f"* {stage.name + ' ':<9}{stage.status:<7}{stage.seconds:>8.1f} s  {memory:>9}  {steps}".rstrip(),
            highlight=False,
            markup=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

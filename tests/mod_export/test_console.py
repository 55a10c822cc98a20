"""Output of a running build, if stderr is a file and if it is a terminal."""

from __future__ import annotations

import contextlib
import io

import pytest
from rich.console import Console

from mod_export.console import Progress
from mod_export.rows.report import Stage

BUILT = Stage(name="onnx", status="built", seconds=21.04, peak_rss_bytes=448 * 2**20)
REUSED = Stage(name="passes", status="reused", seconds=0.0, peak_rss_bytes=None)
LOST = Stage(name="engines", status="built", seconds=1.0, peak_rss_bytes=None, failed=3)


def shown(verbosity: int, *, terminal: bool = False) -> str:
    """Output of a stage with two steps and of one without any."""
    file = io.StringIO()
    with Progress(Console(file=file, force_terminal=terminal, width=80, color_system=None), verbosity) as progress:
        progress.stage_started("onnx")
        progress.step_started("graph/mod-b1s64")
        progress.step_started("graph/[dense]")
        progress.stage_finished(BUILT)
        progress.stage_started("passes")
        progress.stage_finished(REUSED)
        progress.stage_started("engines")
        progress.stage_finished(LOST)
    return file.getvalue()


LINES = [
    "* onnx     built      21.0 s    448 MiB  2 steps",
    "* passes   reused      0.0 s",
    "* engines  built       1.0 s             3 failed",
]
STEPS = ["    graph/mod-b1s64", "    graph/[dense]"]


@pytest.mark.parametrize(("verbosity", "lines"), [(-1, []), (0, LINES), (1, [*STEPS, *LINES])])
def test_a_line_for_each_stage_and_every_step_when_asked_for(verbosity: int, lines: list[str]) -> None:
    assert shown(verbosity).splitlines() == lines


def test_a_terminal_has_a_live_line_that_goes_away() -> None:
    assert shown(-1, terminal=True) == ""
    text = shown(0, terminal=True)
    assert "onnx" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 3  # The cursor is hidden and shown again.
    assert "* onnx     built      21.0 s    448 MiB  2 steps\n" in text


def test_an_error_takes_the_live_line_away() -> None:
    file = io.StringIO()
    with (
        contextlib.suppress(KeyboardInterrupt),
        Progress(Console(file=file, force_terminal=True, width=80), 0) as progress,
    ):
        progress.stage_started("capture")
        raise KeyboardInterrupt
    assert file.getvalue().count("\x1b[?25h") == 1

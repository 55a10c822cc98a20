"""The sweep on a console."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console
from sample_rows import changed

from mod_export.rows.correctness import TextQuality
from mod_export.sweep.schema import CellEntry, SweepReport
from mod_export.sweep.show import SweepProgress, fidelity_text, perplexity_text, render_text


def test_everything_that_follows(whole: SweepReport) -> None:
    text = render_text(whole, "out")
    lines = text.splitlines()
    assert lines[0] == "tiny  mod_transformer, 45.00 k parameters, checkpoint abababababab"
    assert lines[4].split() == [
        "ort-cpu", "float32", "b1s128", "pass", "0.0625", "8", "10.0", "5.56", "1.80x", "[1.78,", "1.82]", "1.80x",
        "9.000", "-",
    ]  # fmt: skip
    for line in (
        "  ort-cpu float32 batch 1 seq 128: faster than dense up to capacity 0.125 (k 16); "
        "the next, 0.5, is not shown to be",
        "  ort-cpu float32 batch 1 seq 512: faster than dense up to capacity 0.5 (k 256); every capacity tried",
        "  ort-cpu float32 batch 1 capacity 0.0625, 0.125: faster than dense from seq 128 on; every length tried",
        "  ort-cpu float32 batch 1 capacity 0.5: faster than dense from seq 512 on; 128 is not shown to be",
        "  ort-cpu float32 batch 1 seq 128: k 8 costs the same as k 16",
        "    k 8, 16: 5.56 to 5.59 ms, the same within the intervals; choose 16",
        "    k 64: 10.5 ms",
        "  ort-cpu float32 batch 1 seq 512: every k tried has a latency of its own: none can be raised without cost",
        "    capacity 0.125: 1.79x, perplexity 7.000",
        "    not on the front: capacity 0.5",
        "PASS  6 of 6 cells measured, every gate met: out/sweep.html",
    ):
        assert line in lines


def test_failures_say_why_and_where(
    cell: Any, failed: CellEntry, missed: CellEntry, report_of: Callable[..., SweepReport]
) -> None:
    lines = render_text(report_of(cell(8, 0.9), failed, missed), "out").splitlines()
    for line in (
        "c0.125-b2s128-ort-cpu failed: stage <onnx>: refused",
        "  log: out/cells/c0.125-b2s128-ort-cpu.log",
        "c9-wrong: ort-cpu b1s128 float32 mod: parity: wrong",
        "  ort-cpu float32 batch 1 seq 128: at no capacity in the grid faster than dense",
        "note: left out, because a gate was not met: c9-wrong",
        "FAIL  of 3 cells 1 could not be built, 1 missed a gate: out/sweep.html",
    ):
        assert line in lines


def test_one_cell_has_little_to_say(cell: Any, report_of: Callable[..., SweepReport]) -> None:
    text = render_text(report_of(cell(8, capacity=None), name="a\x1b[2Jb"), "out")
    assert " own " in text
    assert "which k to choose" not in text
    assert "speed against quality" not in text
    assert "\x1b" not in text


def test_perplexity(cell: Any) -> None:
    assert [perplexity_text(value) for value in (3.5649, 1234.5, 1.23e9)] == ["3.565", "1,234.500", "1.2e+09"]
    text = TextQuality(
        tokens=100, perplexity=4.2, reference_perplexity=4.0, own_perplexity=4.2, next_token_agreement=1.0
    )
    row = changed(cell(8).measured[0], text=text)
    assert fidelity_text(row) == "1.05000"
    assert fidelity_text(changed(row, dtype="int8")) == "1.00000", "it selects other tokens than given"


@pytest.mark.parametrize(("verbosity", "shown"), [(-1, 0), (0, 4), (1, 7)])
def test_progress(cell: Any, failed: CellEntry, missed: CellEntry, verbosity: int, shown: int) -> None:
    file = io.StringIO()
    progress = SweepProgress(Console(file=file, width=40), verbosity, "out")
    progress.planned(4, 1)
    for entry in (cell(8, name="x", seconds=1.0), failed, missed):
        progress.cell_finished(entry)
    lines = [" ".join(line.split()) for line in file.getvalue().splitlines()]
    assert len(lines) == shown
    for line in (
        "4 cells, 1 of them finished before",
        "* 2/4 x measured 1.0 s float32 2.00x [1.98, 2.02]",
        "* 3/4 c0.125-b2s128-ort-cpu failed 0.0 s stage <onnx>: refused",
        "* 4/4 c9-wrong gate failed 0.0 s float32 9.00x [8.98, 9.02]",
    ):
        assert (line in lines) is (verbosity >= 0)
    assert ("out/cells/x.log" in lines) is (verbosity > 0)

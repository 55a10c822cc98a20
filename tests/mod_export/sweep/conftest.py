"""Cells as a sweep measures them, with latencies and perplexities chosen by a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sample_rows import speedup_row

from mod_export.measure.statistics import verdict_of
from mod_export.sweep.findings import findings_of
from mod_export.sweep.schema import CellEntry, Measured, Quality, SweepModel, SweepReport

MakeCell = Callable[..., CellEntry]


def _cell(
    k: int,
    speedup: float = 2.0,
    *,
    width: float = 0.02,
    seq: int = 128,
    dense_ms: float = 10.0,
    perplexity: float | None = None,
    **changes: Any,
) -> CellEntry:
    ci95 = (speedup - width, speedup + width)
    row = Measured(
        dtype="float32",
        providers=("CPUExecutionProvider",),
        threads=1,
        dense_ms=dense_ms,
        mod_ms=dense_ms / speedup,
        speedup=speedup_row(
            speedup, bucket=f"b1s{seq}", ci95=ci95, predicted_flops=speedup, gate=None, passed=None,
            verdict=verdict_of(ci95, 0.02),
        ),
        text=None,
    )  # fmt: skip
    quality = None if perplexity is None else Quality(tokens=8192, perplexity=perplexity, dense_perplexity=40.0)
    fields: dict[str, Any] = {
        "name": f"c{k / seq:g}-b1s{seq}-ort-cpu", "capacity": k / seq, "batch": 1, "seq": seq, "target": "ort-cpu",
        "k_by_layer": {1: k, 3: k}, "k": k, "status": "measured", "passed": True, "exit_code": 0, "quality": quality,
        "measured": (row,), "machine": "a CPU, 2 cores", "folder": "cells/x", "fingerprint": "f",
    }  # fmt: skip
    return CellEntry(**{**fields, **changes})


@pytest.fixture
def cell() -> MakeCell:
    """Makes a measured cell from k, speed-up, half the width of its interval, length, dense latency and perplexity."""
    return _cell


@pytest.fixture
def failed() -> CellEntry:
    """A cell that could not be built."""
    return _cell(
        16, status="failed", passed=False, exit_code=3, error="stage <onnx>: refused", measured=(),
        name="c0.125-b2s128-ort-cpu", batch=2,
    )  # fmt: skip


@pytest.fixture
def missed() -> CellEntry:
    """A cell that was built and misses a gate."""
    return _cell(
        16, 9.0, passed=False, exit_code=4, reasons=("ort-cpu b1s128 float32 mod: parity: wrong",), name="c9-wrong"
    )


@pytest.fixture
def report_of() -> Callable[..., SweepReport]:
    """Makes the report of a sweep from cells."""

    def make(*cells: CellEntry, name: str = "tiny", notes: tuple[str, ...] = ()) -> SweepReport:
        return SweepReport(
            schema_version=1,
            command="mod-export sweep tiny.pt --capacity 0.125,0.5",
            model=SweepModel(
                name=name, architecture="mod_transformer", parameters=45_000, checkpoint_sha256="ab" * 32,
                capacity=0.125, spec={},
            ),
            environment={"cpu": "a CPU", "gpu": None},
            config={},
            planned=len(cells),
            cells=cells,
            findings=findings_of(cells, cells, notes),
        )  # fmt: skip

    return make


@pytest.fixture
def whole(report_of: Callable[..., SweepReport]) -> SweepReport:
    """A sweep with two lengths, three capacities, a flat step, a break-even and a front."""
    return report_of(
        _cell(8, 1.80, perplexity=9.0), _cell(16, 1.79, perplexity=7.0), _cell(64, 0.95, perplexity=8.0),
        _cell(32, 2.20, seq=512, dense_ms=40.0, perplexity=6.0),
        _cell(64, 2.00, seq=512, dense_ms=40.0, perplexity=5.0),
        _cell(256, 1.20, seq=512, dense_ms=40.0, perplexity=4.5),
    )  # fmt: skip

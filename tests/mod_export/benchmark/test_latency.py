"""Latency rows of real sessions: what is summed up, when sampling ends, and what is flagged."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from small_sessions import FEEDS, Session

from mod_export.benchmark.latency import latency_rows, samples_by_round
from mod_export.benchmark.statistics import quantile_interval
from mod_export.config import LatencyOptions
from mod_export.engines.protocol import Runner
from mod_export.errors import EngineError
from mod_export.results.latency import LatencyRow
from mod_export.types import Bucket, ModelKind, Setting

SETTING = Setting(target="ort-cpu", dtype="float32", model="mod", role="forward", bucket=Bucket(1, 4))


def options(**fields: Any) -> LatencyOptions:
    quick = {
        "samples": 8,
        "max_samples": 8,
        "warmup": 1,
        "max_warmup": 4,
        "bootstrap": 100,
        "min_speedup": 1.0,
        "precision": 1.0,
    }
    return LatencyOptions(**quick | fields)


def rows_of(runners: dict[ModelKind, Runner], **fields: Any) -> tuple[LatencyRow, ...]:
    gate = fields.pop("gate", None)
    return latency_rows(runners, FEEDS, SETTING, options(**fields), seed=0, gate=gate)


def sleeping(*ms: float, runs: int = 4) -> Session:
    """A session whose runs take about this long; of several durations each lasts for so many runs, in turn."""
    return Session([], "sleeping", before_run=lambda number: time.sleep(ms[number // runs % len(ms)] / 1000))


def test_rows_hold_every_sample_and_what_follows_from_them() -> None:
    log: list[str] = []
    rows = rows_of({"dense": Session(log, "dense"), "mod": Session(log, "mod")})
    assert [row.model for row in rows] == ["dense", "mod"]
    assert 2 <= rows[0].warmup <= 4
    assert len(log) == 2 * rows[0].warmup + 2 * 8
    for row in rows:
        assert (row.target, row.bucket, row.dtype) == ("ort-cpu", "b1s4", "float32")
        assert (row.providers, row.threads) == (("CPUExecutionProvider",), 1)
        assert len(row.samples_ms) == 8
        assert min(row.samples_ms) > 0
        assert row.p50_ms == np.median(row.samples_ms)
        assert (row.p90_ms, row.p99_ms) == tuple(np.percentile(row.samples_ms, (90, 99)))
        assert row.mean_ms == np.mean(row.samples_ms)
        assert row.stdev_ms == np.std(row.samples_ms, ddof=1)
        assert row.cv == row.stdev_ms / row.mean_ms
        assert row.p50_ci95 == quantile_interval(np.array(row.samples_ms), 0.5)
        assert row.p90_ci95 is row.p99_ci95 is None
        assert row.conditions is not None
        assert samples_by_round(row).shape == (4, 2)
        assert samples_by_round(row).reshape(-1).tolist() == list(row.samples_ms)
    assert rows[0].conditions == rows[1].conditions


def counts(rows: Sequence[LatencyRow]) -> set[int]:
    return {len(row.samples_ms) for row in rows}


def test_sampling_ends_when_the_comparison_is_settled() -> None:
    clear: dict[ModelKind, Runner] = {"dense": sleeping(6), "mod": sleeping(1)}
    (count,) = counts(rows_of(clear, max_samples=128))
    assert count < 128


def open_question() -> dict[ModelKind, Runner]:
    """Both are fast and slow, eight to one, for different stretches: which rounds are drawn decides who is faster."""
    return {"dense": sleeping(0.5, 4), "mod": sleeping(0.5, 4, runs=6)}


def test_more_samples_are_taken_while_noise_leaves_it_open() -> None:
    assert counts(rows_of(open_question(), max_samples=32)) == {32}


def test_a_gate_that_is_not_settled_needs_more_samples_too() -> None:
    # Faster for certain, by 7 to 40, and the gate lies between.
    pair: dict[ModelKind, Runner] = {"dense": sleeping(2, 8), "mod": sleeping(0.2)}
    assert counts(rows_of(pair, max_samples=32, gate=15.0)) == {32}


def test_a_ratio_that_is_not_known_well_enough_needs_more_samples_too() -> None:
    pair: dict[ModelKind, Runner] = {"dense": sleeping(2, 8), "mod": sleeping(0.2)}
    assert counts(rows_of(pair, max_samples=32, precision=0.01)) == {32}


def test_the_time_budget_ends_it_but_not_before_the_least_number() -> None:
    assert counts(rows_of(open_question(), max_samples=100_000, max_seconds=0.0)) == {8}


def test_a_single_model_is_sampled_as_often_as_asked() -> None:
    (row,) = rows_of({"mod": Session([], "mod")}, samples=9, max_samples=500)
    assert len(row.samples_ms) == 12
    assert row.model == "mod"


def test_a_warm_up_that_does_not_settle_is_said() -> None:
    # The clock counts nanoseconds: no two runs take exactly as long.
    rows = rows_of({"dense": sleeping(0.1), "mod": sleeping(0.1)}, warmup_tolerance=0.0, max_warmup=5)
    assert [(row.stable, row.warmup) for row in rows] == [(False, 5)] * 2
    assert all("not stable after 5 rounds of warm-up" in row.flags for row in rows)


def test_drift_and_outliers_are_said() -> None:
    def late(number: int) -> None:
        time.sleep(0.001 if number < 30 else 0.004)

    def sometimes(number: int) -> None:
        time.sleep(0.05 if number % 8 == 7 else 0.002)

    dense, mod = rows_of(
        {"dense": Session([], "dense", before_run=late), "mod": Session([], "mod", before_run=sometimes)},
        samples=48,
        max_samples=48,
    )
    assert any(flag.startswith("drift: the last third of the samples is ") for flag in dense.flags), dense
    assert any(flag.endswith(" % slower than the first") for flag in dense.flags)
    assert dense.drift is not None
    assert dense.drift > 1
    assert mod.outliers >= 5
    assert any(flag.endswith(" of 48 samples are outliers") for flag in mod.flags), mod


def test_different_conditions_are_not_compared() -> None:
    runners: dict[ModelKind, Runner] = {"dense": Session([], "dense", threads=4), "mod": Session([], "mod", threads=1)}
    message = (
        r"ort-cpu b1s4 float32: latency can only be compared under the same conditions, but the engines run "
        r"dense on CPUExecutionProvider with 4 threads; mod on CPUExecutionProvider with 1 threads\. Load all"
    )
    with pytest.raises(EngineError, match=message):
        rows_of(runners)

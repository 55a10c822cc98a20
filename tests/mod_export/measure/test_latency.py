"""Latency rows of real sessions and engines: their summaries, when sampling ends, and their flags."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx
import onnxruntime as ort  # noqa: TID253 - a test may load what it tests on.
import pytest

from mod_export.config import BuildConfig, LatencyOptions
from mod_export.engines.protocol import Runner
from mod_export.errors import EngineError
from mod_export.folder.manifest import open_folder
from mod_export.measure.latency import latency_rows, measure_latency, measure_precision, precision_pairs
from mod_export.measure.statistics import quantile_interval
from mod_export.model.model import tokens_sample
from mod_export.rows.speed import LatencyRow
from mod_export.types import KINDS, Bucket, Engine, ModelKind, Setting, by_setting, pairs_of

FEEDS = {"x": np.ones((2, 4), np.float32), "lengths": np.array([4], np.int64)}
SETTING = Setting(target="ort-cpu", dtype="float32", model="mod", role="forward", bucket=Bucket(1, 4))
QUICK = {
    "samples": 8,
    "max_samples": 8,
    "warmup": 1,
    "max_warmup": 4,
    "bootstrap": 100,
    "precision": 1.0,
    "max_seconds": 600.0,
}


def rows_of(runners: dict[ModelKind, Runner], gate: float | None = None, **fields: Any) -> tuple[LatencyRow, ...]:
    options = LatencyOptions(min_speedup=1.0, **QUICK | fields)
    return latency_rows(runners, FEEDS, SETTING, options, seed=0, gate=gate)


class Session:
    """A session on a tiny graph that records its inputs and requested outputs; `before_run` may take time."""

    providers = ("CPUExecutionProvider",)
    outputs = ("routed_0", "logits")

    def __init__(
        self, threads: int = 1, inputs: str = "float[2,4] x", before_run: Callable[[int], object] = lambda number: None
    ) -> None:
        graph = f"g ({inputs}) => (int64[2] routed_0, float[2,4] logits) {{ routed_0 = Shape(x) logits = Add(x, x) }}"
        model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 23]> {graph}')
        self._session = ort.InferenceSession(model.SerializeToString(), providers=list(self.providers))
        self.inputs = tuple(item.name for item in self._session.get_inputs())
        self.threads, self._before_run = threads, before_run
        self.asked: list[tuple[tuple[str, ...], Sequence[str] | None]] = []

    def run(self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        self._before_run(len(self.asked))
        self.asked.append((tuple(feeds), outputs))
        wanted = list(outputs or self.outputs)
        return dict(zip(wanted, self._session.run(wanted, dict(feeds)), strict=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None


def sleeping(*ms: float, runs: int = 4) -> Session:
    """Returns a session whose runs take about this long; several durations take turns, each for `runs` runs."""
    return Session(before_run=lambda number: time.sleep(ms[number // runs % len(ms)] / 1000))


def test_rows_hold_every_sample_and_what_follows_from_them() -> None:
    dense, mod = Session(), Session(inputs="float[2,4] x, int64[1] lengths")
    rows = rows_of({"dense": dense, "mod": mod})
    assert [row.model for row in rows] == ["dense", "mod"]
    assert 2 <= rows[0].warmup <= 4
    # Each session gets the inputs that it has, and is asked only for the model's own output.
    assert dense.asked == [(("x",), ["logits"])] * (rows[0].warmup + 8)
    assert mod.asked == [(("x", "lengths"), ["logits"])] * (rows[0].warmup + 8)
    for row in rows:
        assert row.setting == SETTING.of(row.model)
        assert (row.providers, row.threads) == (("CPUExecutionProvider",), 1)
        assert len(row.samples_ms) == 8
        assert min(row.samples_ms) > 0
        # np.median averages the two middle samples, p50_ms interpolates them: they may round differently.
        assert row.p50_ms == pytest.approx(np.median(row.samples_ms))
        assert (row.p90_ms, row.p99_ms) == tuple(np.percentile(row.samples_ms, (90, 99)))
        assert row.mean_ms == np.mean(row.samples_ms)
        assert row.stdev_ms == np.std(row.samples_ms, ddof=1)
        assert row.cv == row.stdev_ms / row.mean_ms
        assert row.p50_ci95 == quantile_interval(np.array(row.samples_ms), 0.5)
        assert row.p90_ci95 is row.p99_ci95 is None
    assert rows[0].conditions == rows[1].conditions


def pair(kind: str) -> dict[ModelKind, Runner]:
    """`clear`: mod is six times as fast. `open`: both are fast and slow (8:1) in stretches of different length, so the
    drawn rounds decide which is faster. `wide`: mod is certainly faster, by 7 to 40.
    """
    if kind == "clear":
        return {"dense": sleeping(6), "mod": sleeping(1)}
    if kind == "open":
        return {"dense": sleeping(0.5, 4), "mod": sleeping(0.5, 4, runs=6)}
    return {"dense": sleeping(2, 8), "mod": sleeping(0.2)}


@pytest.mark.parametrize(
    ("kind", "fields", "samples"),
    [
        ("clear", {"max_samples": 128}, {8, 16, 32, 64}),
        ("open", {"max_samples": 32}, {32}),
        ("wide", {"max_samples": 32, "gate": 15.0}, {32}),
        ("wide", {"max_samples": 32, "precision": 0.01}, {32}),
        ("open", {"max_samples": 100_000, "max_seconds": 0.0}, {8}),
    ],
    ids=["settled", "noise", "gate not settled", "ratio not known well enough", "time budget"],
)
def test_sampling_ends_when_the_comparison_is_settled(kind: str, fields: dict[str, Any], samples: set[int]) -> None:
    (count,) = {len(row.samples_ms) for row in rows_of(pair(kind), **fields)}
    assert count in samples


@pytest.mark.parametrize(
    ("alone", "fields", "samples"),
    [
        (sleeping(2), {"max_samples": 128, "precision": 0.5}, {8, 16, 32, 64}),
        (sleeping(1, 8), {"max_samples": 32, "precision": 0.01}, {32}),
        (sleeping(1, 8), {"max_samples": 100_000, "max_seconds": 0.0, "precision": 0.01}, {8}),
    ],
    ids=["known", "not known well enough", "time budget"],
)
def test_alone_sampling_ends_when_the_median_is_known(
    alone: Session, fields: dict[str, Any], samples: set[int]
) -> None:
    (row,) = rows_of({"mod": alone}, **fields)
    assert len(row.samples_ms) in samples
    assert (row.model, row.p50_ms) == ("mod", pytest.approx(np.median(row.samples_ms)))
    assert row.p50_ci95 == quantile_interval(np.array(row.samples_ms), 0.5)


def test_a_warm_up_that_does_not_settle_drift_and_outliers_are_said() -> None:
    def late(number: int) -> None:
        time.sleep(0.0005 if number < 30 else 0.02)

    def sometimes(number: int) -> None:
        # Long enough that the other runs are alike next to it, even where other programs delay them.
        time.sleep(0.1 if number % 8 == 7 else 0.001)

    # The clock counts nanoseconds, so no two runs take equally long.
    unsettled = {"warmup_tolerance": 0.0, "max_warmup": 5, "samples": 48, "max_samples": 48}
    dense, mod = rows_of({"dense": Session(before_run=late), "mod": Session(before_run=sometimes)}, **unsettled)
    assert [(row.stable, row.warmup) for row in (dense, mod)] == [(False, 5)] * 2
    assert all("not stable after 5 rounds of warm-up" in row.flags for row in (dense, mod))
    (drift,) = [flag for flag in dense.flags if flag.startswith("drift: the last third of the samples is ")]
    assert drift.endswith(" % slower than the first")
    assert dense.drift > 1
    assert mod.outliers >= 5
    assert any(flag.endswith(" of 48 samples are outliers") for flag in mod.flags), mod


def test_a_warm_up_that_was_cut_off_says_nothing_about_stability() -> None:
    # Medians that differ by a factor of up to two agree.
    short = {"warmup": 3, "warmup_tolerance": 1.0, "max_seconds": 0.0}
    for row in rows_of({"dense": sleeping(5), "mod": sleeping(5)}, **short):
        assert (row.stable, row.warmup) == (False, 4)
        assert "warm-up was cut off after 4 rounds, by latency.max_seconds" in row.flags


def test_different_conditions_are_not_compared() -> None:
    runners: dict[ModelKind, Runner] = {"dense": Session(threads=4), "mod": Session(threads=1)}
    message = (
        r"ort-cpu b1s4 float32: latency can only be compared under the same conditions, but the engines run "
        r"dense on CPUExecutionProvider with 4 threads; mod on CPUExecutionProvider with 1 threads\. Load all"
    )
    with pytest.raises(EngineError, match=message):
        rows_of(runners)


def test_which_engines_are_compared() -> None:
    mod, dense = (
        Engine(target="ort-cpu", model=kind, bucket=Bucket(1, 64), dtype="float32", path="p") for kind in KINDS
    )
    # A model and its dense baseline differ in nothing else.
    assert pairs_of([dense, mod]) == {mod.setting: {"mod": mod, "dense": dense}}
    unlike = [
        replace(dense, target="inductor"), replace(dense, bucket=Bucket(2, 64)), replace(dense, dtype="float16"), mod,
    ]  # fmt: skip
    assert pairs_of([mod, *unlike]) == {}
    assert by_setting([dense, mod]) == pairs_of([dense, mod])
    assert by_setting([mod, *unlike]) == {mod.setting: {"mod": mod}}
    assert by_setting([dense]) == {}
    # Every other dtype is paired with its float32 counterpart, but not with that of another GPU.
    narrow = [replace(engine, dtype="int8") for engine in (mod, dense)]
    assert precision_pairs([mod, dense, *narrow]) == list(zip(narrow, (mod, dense), strict=True))
    assert precision_pairs([mod, dense]) == precision_pairs(narrow) == []
    assert precision_pairs([replace(mod, arch="sm89"), narrow[0]]) == []


def test_engines_of_a_folder_are_measured(built: Path, built_copy: Path, config: BuildConfig) -> None:
    engines = next(iter(pairs_of(open_folder(built, verify=False).engines).values()))
    feeds = tokens_sample(256, engines["mod"].bucket, 0)
    rows = measure_latency(built, engines, feeds, config)
    assert [row.setting for row in rows] == [engines["mod"].setting, engines["dense"].setting]
    for row in rows:
        # Samples come in whole blocks of four rounds, with two samples each.
        assert (row.threads, len(row.samples_ms), row.providers) == (1, 8, ("CPUExecutionProvider",))
        assert row.warmup >= 2
        assert min(row.samples_ms) > 0
    (alone,) = measure_latency(built, {"mod": engines["mod"]}, feeds, config)
    assert (alone.setting, len(alone.samples_ms)) == (engines["mod"].setting, 8)
    # An engine compared with itself is equally large and fast.
    wide = engines["mod"]
    narrow = measure_precision(built, replace(wide, dtype="int8"), wide, feeds, config)
    assert narrow.setting == replace(wide.setting, dtype="int8")
    assert narrow.bytes == narrow.float32_bytes == sum((built / path).stat().st_size for path in wide.files)
    assert narrow.ci95[0] <= narrow.measured <= narrow.ci95[1]
    assert 0.2 < narrow.measured < 5
    assert narrow.float32_p50_ms / narrow.p50_ms == narrow.measured

    (built_copy / engines["dense"].path).write_bytes(b"nonsense")
    with pytest.raises(EngineError, match=r"dense-b1s64-float32\.onnx: ONNX Runtime refuses this graph"):
        measure_latency(built_copy, engines, feeds, config)

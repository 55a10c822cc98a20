"""Rows of parts: sums over nodes, predictions node by node, shares."""

from __future__ import annotations

import pytest

from mod_export.benchmark.cost import Work
from mod_export.benchmark.profile import Profiled, part_rows, roofline_ms
from mod_export.results.cost import Roofline
from mod_export.types import Bucket, Engine

ENGINE = Engine(target="ort-cpu", model="mod", bucket=Bucket(1, 64), dtype="float32", path="engine.onnx")
ROOFLINE = Roofline(
    dtype="float32", threads=1, gemm_gflops=100.0, bandwidth_gbs=10.0, method="by hand", measured_at="never"
)
WORK = (
    Work(part="mlp", flops=300_000_000, bytes=1_000, nodes=("a", "b")),
    # Bound by memory: the FLOPs of the others do not hide it.
    Work(part="mlp", flops=1_000, bytes=5_000_000, nodes=("c",)),
    Work(part="norms", flops=0, bytes=1_000_000, nodes=("d",)),
)


def test_a_part_is_the_sum_of_its_nodes() -> None:
    mlp, norms = part_rows(ENGINE, WORK, ROOFLINE, None)
    assert (mlp.part, mlp.flops, mlp.bytes) == ("mlp", 600_001_000, 5_002_000)
    assert mlp.predicted_ms == pytest.approx(2 * 3.0 + 0.5)
    assert (norms.part, norms.flops, norms.bytes) == ("norms", 0, 1_000_000)
    assert norms.predicted_ms == pytest.approx(0.1)
    assert (mlp.target, mlp.bucket, mlp.dtype, mlp.model) == ("ort-cpu", "b1s64", "float32", "mod")
    assert mlp.measured_ms is mlp.share is mlp.profiler is None


def test_a_profile_adds_what_was_measured() -> None:
    profiled = Profiled(profiler="a profiler", ms_by_part={"mlp": 6.0, "other": 2.0})
    rows = {row.part: row for row in part_rows(ENGINE, WORK, ROOFLINE, profiled)}
    assert list(rows) == ["mlp", "norms", "other"]
    assert [(row.measured_ms, row.share) for row in rows.values()] == [(6.0, 0.75), (0.0, 0.0), (2.0, 0.25)]
    assert {row.profiler for row in rows.values()} == {"a profiler"}
    assert (rows["other"].flops, rows["other"].bytes, rows["other"].predicted_ms) == (0, 0, 0.0)


def test_a_profile_without_kernels_has_no_shares() -> None:
    rows = part_rows(ENGINE, WORK, ROOFLINE, Profiled(profiler="a profiler", ms_by_part={}))
    assert [row.share for row in rows] == [None, None]


def test_an_engine_takes_the_sum_of_its_parts() -> None:
    found = roofline_ms(part_rows(ENGINE, WORK, ROOFLINE, None))
    assert found == {("ort-cpu", "float32", "forward", "b1s64", "mod"): pytest.approx(6.6)}

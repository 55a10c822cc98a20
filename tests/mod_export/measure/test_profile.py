"""Time by part: sums over nodes, predictions for each node, shares, and each part's contribution to the speed-up."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_rows import part_row

from mod_export.config import BuildConfig
from mod_export.engines import ENGINES
from mod_export.measure.profile import Profiled, by_engine, can_profile, gap_of, part_rows
from mod_export.pipeline.benchmark import profile
from mod_export.pipeline.build import Build
from mod_export.rows.cost import CostRow, PartRow, Roofline, Work
from mod_export.types import Bucket, Engine

ENGINE = Engine(target="ort-cpu", model="mod", bucket=Bucket(1, 64), dtype="float32", path="engine.onnx")
ROOFLINE = Roofline(
    dtype="float32", threads=1, gemm_gflops=100.0, bandwidth_gbs=10.0, method="by hand", measured_at="never"
)
WORK = (
    Work(part="mlp", flops=300_000_000, bytes=1_000, nodes=("a", "b")),
    # This node is bound by memory: the FLOPs of the others do not hide it.
    Work(part="mlp", flops=1_000, bytes=5_000_000, nodes=("c",)),
    Work(part="norms", flops=0, bytes=1_000_000, nodes=("d",)),
)


def test_a_part_is_the_sum_of_its_nodes() -> None:
    mlp, norms = part_rows(ENGINE, WORK, ROOFLINE, None)
    assert (mlp.setting, mlp.part, mlp.flops, mlp.bytes) == (ENGINE.setting, "mlp", 600_001_000, 5_002_000)
    assert (norms.part, norms.flops, norms.bytes) == ("norms", 0, 1_000_000)
    assert (mlp.predicted_ms, norms.predicted_ms) == pytest.approx((2 * 3.0 + 0.5, 0.1))
    assert mlp.measured_ms is mlp.share is mlp.profiler is None


def test_a_profile_adds_what_was_measured() -> None:
    profiled = Profiled(profiler="a profiler", ms_by_part={"mlp": 6.0, "other": 2.0})
    found = part_rows(ENGINE, WORK, ROOFLINE, profiled)
    rows = by_engine(found)[ENGINE.setting]
    assert tuple(rows.values()) == found
    assert list(rows) == ["mlp", "norms", "other"]
    assert [(row.measured_ms, row.share) for row in rows.values()] == [(6.0, 0.75), (0.0, 0.0), (2.0, 0.25)]
    assert {row.profiler for row in rows.values()} == {"a profiler"}
    assert (rows["other"].flops, rows["other"].bytes, rows["other"].predicted_ms) == (0, 0, 0.0)
    nothing = part_rows(ENGINE, WORK, ROOFLINE, Profiled(profiler="a profiler", ms_by_part={}))
    assert [row.share for row in nothing] == [None, None]


milliseconds = st.floats(min_value=0.01, max_value=1000)
times = st.dictionaries(
    st.sampled_from(["mlp", "attention", "routing", "other"]), st.tuples(milliseconds, milliseconds), min_size=1
)
DENSE = {"mlp": (8.0, 8.0), "attention": (4.0, 6.0)}
MOD = {"mlp": (4.0, 4.0), "attention": (2.0, 2.0), "routing": (0.0, 1.0)}


def parts(found: dict[str, tuple[float, float]]) -> dict[str, PartRow]:
    """Rows by part, from (predicted, measured)."""
    return {part: part_row(part=part, predicted_ms=ms[0], measured_ms=ms[1]) for part, ms in found.items()}


def test_each_part_and_what_it_adds() -> None:
    gap = gap_of(parts(DENSE), parts(MOD))
    assert gap is not None
    assert (gap.measured, gap.predicted) == (14 / 7, 12 / 6)
    # The MLP takes as long as predicted: no contribution. Attention of the dense engine takes 2 ms more: the speed-up
    # rises. Routing of the MoD engine takes 1 ms more: the speed-up falls, by twice as much per ms.
    assert gap.contributions == pytest.approx({"mlp": 0.0, "attention": 2 / 7, "routing": -2 / 7})


@given(dense=times, mod=times)
def test_the_contributions_add_up_to_the_gap(
    dense: dict[str, tuple[float, float]], mod: dict[str, tuple[float, float]]
) -> None:
    gap = gap_of(parts(dense), parts(mod))
    assert gap is not None
    largest = max(abs(contribution) for contribution in gap.contributions.values())
    total = sum(gap.contributions.values())
    assert total == pytest.approx(gap.measured - gap.predicted, rel=1e-9, abs=1e-9 * (1 + largest))


def test_without_both_profiles_there_is_no_gap() -> None:
    unmeasured = {part: row.model_copy(update={"measured_ms": None}) for part, row in parts(MOD).items()}
    unpredicted = {part: row.model_copy(update={"predicted_ms": 0.0}) for part, row in parts(MOD).items()}
    assert [gap_of(parts(DENSE), mod) for mod in ({}, unmeasured, unpredicted)] == [None] * 3


def profiled(root: Path, config: BuildConfig, runs: int) -> Build:
    config = config.model_copy(update={"cost": config.cost.model_copy(update={"profile_runs": runs})})
    context = Build.open(root, config, (), verify=True)
    profile(context)
    return context


def test_a_finished_folder_has_its_cost_model(built: Path, config: BuildConfig) -> None:
    context = profiled(built, config, 2)
    parts = context.rows(PartRow)
    assert [(one.dtype, one.threads) for one in context.rows(Roofline)] == [("float32", 1)]
    assert {(row.bucket, row.model) for row in parts} == {(one.bucket.name, one.model) for one in context.engines}
    for engine in context.engines:
        rows = [row for row in parts if (row.bucket, row.model) == (engine.bucket.name, engine.model)]
        assert ("routing" in {row.part for row in rows}) is (engine.model == "mod")
        assert sum(row.share or 0.0 for row in rows) == pytest.approx(1.0)
        assert all(row.predicted_ms > 0 and (row.measured_ms or 0) > 0 for row in rows)
        costs = {(row.model, row.bucket): row.flops for row in context.rows(CostRow)}
        assert sum(row.flops for row in rows) == costs[engine.model, engine.bucket.name]
        assert all(str(row.profiler).startswith("ONNX Runtime 1.") for row in rows)
    # Without runs only the prediction remains.
    unmeasured = profiled(built, config, 0).rows(PartRow)
    assert len(unmeasured) == len(parts)
    assert {(row.measured_ms, row.share, row.profiler) for row in unmeasured} == {(None, None, None)}
    assert [name for name in ENGINES if can_profile(replace(ENGINE, target=name))] == ["ort-cpu", "inductor"]


SERVER = """
import json, sys
for name in ("torch", "onnx", "onnx_ir", "safetensors"):
    sys.modules[name] = None  # As if it were not installed.
from pathlib import Path
from mod_export.rows.cost import PartRow, Roofline
from mod_export.pipeline.build import Build
from mod_export.pipeline.benchmark import profile
context = Build.open(Path(sys.argv[1]), None, (), verify=True)
profile(context)
print(len(context.rows(Roofline)), all(row.measured_ms for row in context.rows(PartRow)))
"""


def test_a_server_needs_onnx_runtime_only(built: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SERVER, str(built)], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout == "1 True\n"

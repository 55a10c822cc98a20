"""Which engines run here: those of a target that runs, and of this GPU's architecture where they are built for one."""

from __future__ import annotations

import pytest

from mod_export.artifacts import Availability, Bucket, Engine, engine_stem

RTX = Availability(builds=True, runs=True, reason="TensorRT-RTX", arch="sm89")


def engine(arch: str | None) -> Engine:
    return Engine(target="t", model="mod", bucket=Bucket(1, 8), dtype="float16", path="p", arch=arch)


@pytest.mark.parametrize(("arch", "runs"), [(None, True), ("sm89", True), ("sm120", False)])
def test_an_engine_runs_on_its_own_architecture(arch: str | None, runs: bool) -> None:
    assert RTX.can_run(engine(arch)) is runs


def test_nothing_runs_where_the_target_does_not() -> None:
    absent = Availability(builds=True, runs=False, reason="no CUDA device")
    assert not absent.can_run(engine(None))
    assert absent.refusal([engine("sm89")]) == "no CUDA device"


def test_a_refusal_names_both_architectures() -> None:
    assert RTX.refusal([engine("sm86"), engine("sm120")]) == "built for sm86, sm120, and the GPU here is sm89"
    assert RTX.refusal([engine("sm86"), engine("sm89")]) == ""


def test_stem_of_an_engine() -> None:
    assert engine_stem("mod", Bucket(1, 512), "float16", "sm89") == "mod-b1s512-float16-sm89"
    assert engine_stem("dense", Bucket(2, 64), "float32") == "dense-b2s64-float32"

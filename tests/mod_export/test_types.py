"""Which engines run here: those of a target that runs, and of this GPU's architecture where they are built for one."""

from __future__ import annotations

import pytest

from mod_export.types import Availability, Bucket, Engine, Setting

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
    engine = Engine(target="tensorrt", model="mod", bucket=Bucket(1, 512), dtype="float16", path="p", arch="sm89")
    assert engine.stem == "mod-b1s512-float16-sm89"
    step = Setting(target="ort-cpu", dtype="float32", model="dense", role="decode", bucket=Bucket(2, 64))
    assert step.name == "dense-decode-b2s64-float32"
    assert (str(step), str(engine.setting)) == ("ort-cpu decode b2s64 float32", "tensorrt b1s512 float16")
    assert step.of("mod").model == "mod"

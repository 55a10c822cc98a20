from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mod_models.architecture import LoadedTransformer
from mod_models.checkpoint import Checkpoint, random_checkpoint
from mod_models.spec import ModelSpec, RoutingSpec

from mod_export import plan as plan_module
from mod_export.artifacts import Bucket, Variant
from mod_export.config import BuildConfig, config_from_toml
from mod_export.engine import ENGINES
from mod_export.errors import BuildFolderError, CheckpointError, ConfigError, TargetError
from mod_export.model import Model
from mod_export.plan import check_names, make_plan


def model_of(spec: ModelSpec, name: str = "other") -> Model:
    loaded = LoadedTransformer(random_checkpoint(spec, 0))
    return Model(name=name, architecture="mod_transformer", loaded=loaded, checkpoint_sha256="0" * 64)


def with_targets(*targets: str) -> BuildConfig:
    return config_from_toml(None, {"targets": targets, "buckets": ((2, 64), (1, 128))})


def test_a_plan_names_everything_that_will_be_built(model: Model, tmp_path: Path) -> None:
    plan = make_plan(model, None, with_targets("inductor", "ort-cpu"), tmp_path)
    assert plan.buckets == (Bucket(1, 128), Bucket(2, 64))
    assert list(plan.targets) == ["ort-cpu", "inductor"]
    assert set(plan.availability) == set(ENGINES)
    assert list(plan.cells()) == [(kind, bucket) for bucket in plan.buckets for kind in ("mod", "dense")]
    variants = list(plan.variants())
    assert len(variants) == 8
    assert variants[0][1:] == (Variant(dtype="float32"), "mod", Bucket(1, 128))


def test_the_dense_twin_is_the_default_baseline(model: Model, tiny_spec: ModelSpec, tmp_path: Path) -> None:
    twin = make_plan(model, None, with_targets("ort-cpu"), tmp_path)
    assert twin.loaded("mod") is model.loaded
    assert twin.loaded("dense").spec == tiny_spec.dense().to_dict()
    assert twin.weights_of("mod") == twin.weights_of("dense") == "weights"
    other = model_of(replace(tiny_spec.dense(), n_layers=2))
    given = make_plan(model, other, with_targets("ort-cpu"), tmp_path)
    assert given.loaded("dense") is other.loaded
    assert given.loaded("mod") is model.loaded
    assert (given.weights_of("mod"), given.weights_of("dense")) == ("weights", "weights-baseline")


def test_without_targets_everything_that_can_build_is_built(model: Model, config: BuildConfig, tmp_path: Path) -> None:
    plan = make_plan(model, None, config.model_copy(update={"targets": ()}), tmp_path)
    assert list(plan.targets) == [name for name, found in plan.availability.items() if found.builds]


def test_a_dense_model_has_nothing_to_compare(tiny_spec: ModelSpec, config: BuildConfig, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="flat: no layer is routed, so there is nothing to compare with a dense"):
        make_plan(model_of(tiny_spec.dense(), "flat"), None, config, tmp_path)


@pytest.mark.parametrize("layers", [(0,), (1, 3)])
def test_a_baseline_is_dense(
    model: Model, tiny_spec: ModelSpec, config: BuildConfig, tmp_path: Path, layers: tuple[int, ...]
) -> None:
    routed = model_of(replace(tiny_spec, routing=RoutingSpec(layers=layers)))
    with pytest.raises(CheckpointError, match="baseline other: has routed layers; a baseline is a dense model"):
        make_plan(model, routed, config, tmp_path)


def test_a_baseline_does_the_same_job(model: Model, tiny_spec: ModelSpec, config: BuildConfig, tmp_path: Path) -> None:
    other = model_of(replace(tiny_spec.dense(), vocab_size=100, max_positions=64))
    message = (
        "baseline other: has a vocabulary of 100 instead of 256 and positions up to 64 instead of 256, "
        "so it does not do the same job"
    )
    with pytest.raises(CheckpointError, match=message):
        make_plan(model, other, config, tmp_path)


def test_an_unknown_target_has_a_nearest_name(model: Model, config: BuildConfig, tmp_path: Path) -> None:
    known = "known: ort-cpu, ort-cuda, inductor, tensorrt, tensorrt-rtx"
    with pytest.raises(TargetError, match=f"unknown target 'ort-cp', did you mean 'ort-cpu'.; {known}"):
        check_names(["inductor", "ort-cp"])
    with pytest.raises(TargetError, match=f"unknown target 'zzz'; {known}"):
        make_plan(model, None, config.model_copy(update={"targets": ("zzz",)}), tmp_path)


def test_a_target_that_cannot_build_here_is_refused_with_its_reason(model: Model, tmp_path: Path) -> None:
    refused = [name for name, engine in ENGINES.items() if not engine.availability().builds]
    if not refused:
        pytest.skip("every target can build here")
    reason = ENGINES[refused[0]].availability().reason
    with pytest.raises(TargetError) as caught:
        make_plan(model, None, with_targets("ort-cpu", refused[0]), tmp_path)
    assert str(caught.value) == f"cannot build here for {refused[0]}: {reason}"


def test_no_target_can_build(
    model: Model, config: BuildConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = {name: engine for name, engine in ENGINES.items() if not engine.availability().builds}
    if not refused:
        pytest.skip("every target can build here")
    monkeypatch.setattr(plan_module, "ENGINES", refused)
    name = next(iter(refused))
    with pytest.raises(TargetError, match=f"no target can build on this machine: {name}: "):
        make_plan(model, None, config.model_copy(update={"targets": ()}), tmp_path)


def test_what_a_target_cannot_take_is_said_before_any_work(model: Model, tmp_path: Path) -> None:
    if not ENGINES["tensorrt-rtx"].availability().builds:
        pytest.skip("TensorRT-RTX is not installed")
    config = config_from_toml(None, {"targets": ("tensorrt-rtx",), "buckets": ((1, 64), (2, 64))})
    options = config.target.tensorrt_rtx.model_copy(update={"architectures": ("sm89", "sm1")})
    config = config.model_copy(update={"target": config.target.model_copy(update={"tensorrt_rtx": options})})
    with pytest.raises(ConfigError) as caught:
        make_plan(model, None, config, tmp_path)
    assert [problem.partition(": ")[0] for problem in caught.value.problems] == [
        "target tensorrt-rtx, bucket b1s64",
        "target tensorrt-rtx, bucket b2s64",
    ]
    assert all("sm1" in problem for problem in caught.value.problems)


def test_a_bucket_that_is_too_long(model: Model, tmp_path: Path) -> None:
    config = config_from_toml(None, {"targets": ("ort-cpu",), "buckets": ((1, 512),)})
    with pytest.raises(ConfigError, match="buckets: 1 x 512 is longer than the model's 256 positions"):
        make_plan(model, None, config, tmp_path)


def test_a_disk_without_room(tiny_spec: ModelSpec, tmp_path: Path) -> None:
    huge = Checkpoint(spec=tiny_spec, weights={"embedding.weight": torch.empty(1).expand(2**50)})
    model = Model(
        name="huge", architecture="mod_transformer", loaded=LoadedTransformer(huge), checkpoint_sha256="0" * 64
    )
    root = tmp_path / "deep" / "build"
    with pytest.raises(
        BuildFolderError, match=r"build: needs about 4294967\d{3} MiB, \d+ MiB are free; free some"
    ):
        make_plan(model, None, with_targets("ort-cpu"), root)
    assert list(tmp_path.iterdir()) == []

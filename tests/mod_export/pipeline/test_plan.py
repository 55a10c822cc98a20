"""What is refused before any work is done, and the contents of a plan."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packages import WithoutBaseline

from mod_export.config import BuildConfig
from mod_export.engines import ENGINES
from mod_export.errors import BuildFolderError, ConfigError, TargetError
from mod_export.model.model import Model, Origin
from mod_export.model.transformer import TransformerModel
from mod_export.pipeline.plan import GenerationPlan, Plan, _targets, make_plan
from mod_export.types import Availability, Bucket, Unavailable
from mod_models.checkpoint import Checkpoint, random_checkpoint
from mod_models.spec import ModelSpec, RoutingSpec


def model_of(spec: ModelSpec, name: str = "m") -> Model:
    return model_with(random_checkpoint(spec, 0), name)


def model_with(checkpoint: Checkpoint, name: str = "m") -> Model:
    model = TransformerModel(checkpoint)
    model.origin = Origin(name=name, architecture="mod_transformer", checkpoint_sha256="0" * 64)
    return model


def updated(config: BuildConfig, **fields: Any) -> BuildConfig:
    return BuildConfig.model_validate(config.model_dump(by_alias=True) | fields)


def test_a_plan(model: Model, config: BuildConfig, tmp_path: Path) -> None:
    plan = make_plan(model, None, config, tmp_path / "out")
    assert plan.buckets == (Bucket(1, 64), Bucket(2, 32))
    assert list(plan.targets) == ["ort-cpu"]
    assert list(plan.availability) == list(ENGINES)
    assert [(graph.path, graph.role) for graph in plan.graphs] == [
        (f"graphs/{kind}-{bucket.name}.onnx", "forward") for bucket in plan.buckets for kind in ("mod", "dense")
    ]
    assert [(builder.name, variant.dtype, graph) for builder, variant, graph in plan.engines()] == [
        ("ort-cpu", "float32", graph) for graph in plan.graphs
    ]
    assert plan.weights_path("mod", "int8") == plan.weights_path("dense", "int8") == "graphs/weights-int8.data"
    assert plan.models["dense"].k_by_layer(64) == {}
    assert not (tmp_path / "out").exists()


WRITES = RoutingSpec(predictor_hidden=2)


def test_what_is_returned_where_nothing_is_said(config: BuildConfig, tiny_spec: ModelSpec, tmp_path: Path) -> None:
    """Logits larger than 16 MiB are not returned unless the configuration asks for them."""
    for vocab_size, batch, expected in ((2**16, 1, "logits"), (2**16 + 1, 1, "last"), (2**16, 2, "last")):
        model = model_of(replace(tiny_spec, vocab_size=vocab_size, d_model=8, n_heads=1, n_kv_heads=1))
        sized = updated(config, buckets=[[1, 8], [batch, 64]])
        assert sized.outputs == "auto"
        plan = make_plan(model, None, sized, tmp_path)
        assert plan.config.outputs == expected
        assert {graph.outputs for graph in plan.graphs if graph.role == "forward"} == {expected}
        for outputs in ("logits", "none"):
            assert make_plan(model, None, updated(sized, outputs=outputs), tmp_path).config.outputs == outputs


def generating(config: BuildConfig, **fields: Any) -> BuildConfig:
    return updated(config, generation=fields)


def buckets_of(plan: Plan, role: str) -> list[Bucket]:
    return [graph.bucket for graph in plan.graphs if (graph.model, graph.role) == ("mod", role)]


def test_what_writes_text(config: BuildConfig, tiny_spec: ModelSpec, tmp_path: Path) -> None:
    model = model_of(replace(tiny_spec, routing=WRITES))
    complete = make_plan(model, None, config, tmp_path)
    plan = complete.generation
    assert isinstance(plan, GenerationPlan)
    assert plan.window == 256
    assert buckets_of(complete, "prefill") == [Bucket(1, 32), Bucket(1, 128)]
    assert buckets_of(complete, "decode") == [Bucket(1, 256), Bucket(8, 256)]
    assert {builder.name for builder, _, graph in complete.engines() if graph.role != "forward"} == {"ort-cpu"}
    assert {kind: model_of_kind.window for kind, model_of_kind in plan.models.items()} == {"mod": 256, "dense": 256}
    assert plan.models["mod"].capacity == {1: 32, 3: 32}
    assert plan.models["dense"].capacity == {}

    chosen = generating(config, window=100, slack=3, prompts=[60, 20, 60], caches=[100, 50], batches=[4, 2])
    complete = make_plan(model, None, chosen, tmp_path)
    plan = complete.generation
    assert isinstance(plan, GenerationPlan)
    assert buckets_of(complete, "prefill") == [Bucket(1, 20), Bucket(1, 60)]
    assert buckets_of(complete, "decode") == [Bucket(2, 50), Bucket(2, 100), Bucket(4, 50), Bucket(4, 100)]
    assert set(plan.models["mod"].capacity.values()) == {12 + 3}


def test_why_nothing_writes_text(config: BuildConfig, tiny_spec: ModelSpec, tmp_path: Path) -> None:
    never = "it was built with generation.build = never; build it again with auto"
    for routing, fields, reason in (
        (RoutingSpec(), {}, "routing.selection=topk: whether a token is among the k best depends on tokens after it"),
        (WRITES, {"build": "never"}, never),
        (RoutingSpec(), {"build": "never"}, never),
    ):
        plan = make_plan(model_of(replace(tiny_spec, routing=routing)), None, generating(config, **fields), tmp_path)
        assert isinstance(plan.generation, Unavailable)
        assert plan.generation.reason.startswith(reason)


def test_without_a_baseline_it_writes_alone(config: BuildConfig, tiny_spec: ModelSpec, tmp_path: Path) -> None:
    checkpoint = random_checkpoint(replace(tiny_spec, routing=WRITES), 0)
    model = WithoutBaseline(checkpoint)
    plan = make_plan(model, None, config, tmp_path)
    assert (list(plan.models), {graph.model for graph in plan.graphs}) == (["mod"], {"mod"})
    assert isinstance(plan.generation, GenerationPlan)
    assert list(plan.generation.models) == ["mod"]
    beside = make_plan(model, model_of(checkpoint.spec.dense(), "base"), config, tmp_path).generation
    assert isinstance(beside, GenerationPlan)
    assert list(beside.models) == ["mod", "dense"]


@pytest.mark.skipif(not ENGINES["tensorrt-rtx"].availability().builds, reason="needs TensorRT-RTX")
def test_targets_that_do_not_write(config: BuildConfig, tiny_spec: ModelSpec, tmp_path: Path) -> None:
    model = model_of(replace(tiny_spec, routing=WRITES))
    updated_config = updated(config, targets=["tensorrt-rtx"])
    reason = "it was built for tensorrt-rtx, and generation.targets are ort-cpu, openvino"
    assert make_plan(model, None, updated_config, tmp_path).generation == Unavailable(reason)
    with pytest.raises(ConfigError, match=f"generation.build: always, but this model .*: {reason}"):
        make_plan(model, None, generating(updated_config, build="always"), tmp_path)


SHORT = (
    'is too short, because a step writes the token after another one; give at least 2, or generation.build = "never"'
)
LONGER = "is longer than the window of 40; shorten it, or give a longer window"


@pytest.mark.parametrize(
    ("routing", "fields", "problems"),
    [
        (
            RoutingSpec(),
            {"build": "always"},
            ["generation.build: always, but this model cannot generate token by token: routing.selection=topk: "],
        ),
        (
            WRITES,
            {"window": 40, "prompts": [41, 8], "caches": [40, 90]},
            [f"generation.prompts: 41 {LONGER}", f"generation.caches: 90 {LONGER}"],
        ),
        (WRITES, {"window": 257}, ["generation: "]),
        (
            WRITES,
            {"window": 40, "prompts": [8], "caches": [1, 40, 90]},
            [f"generation.caches: 90 {LONGER}", f"generation.caches: 1 {SHORT}"],
        ),
        (WRITES, {"window": 1, "prompts": [1]}, [f"generation.window: 1 {SHORT}"]),
    ],
    ids=["always", "longer than the window", "longer than the model", "a cache for one token", "a text of one token"],
)
def test_generation_that_cannot_be_built(
    config: BuildConfig,
    tiny_spec: ModelSpec,
    tmp_path: Path,
    routing: RoutingSpec,
    fields: dict[str, Any],
    problems: list[str],
) -> None:
    """All problems are reported at once, these and others."""
    invalid = updated(generating(config, **fields), buckets=[[1, 64], [10**9, 64]])
    with pytest.raises(ConfigError) as caught:
        make_plan(model_of(replace(tiny_spec, routing=routing)), None, invalid, tmp_path)
    expected = ["buckets: 1000000000 x 64 has ", *problems]
    found = caught.value.problems
    assert [problem[: len(start)] for problem, start in zip(found, expected, strict=True)] == expected


def test_a_baseline_has_weights_of_its_own_and_writes_with_them(
    config: BuildConfig, tiny_spec: ModelSpec, tmp_path: Path
) -> None:
    baseline = model_of(tiny_spec.dense(), "base")
    plan = make_plan(model_of(replace(tiny_spec, routing=WRITES)), baseline, config, tmp_path)
    assert plan.models["dense"] is baseline
    assert plan.weights_path("mod", "float32") == "graphs/weights-float32.data"
    assert plan.weights_path("dense", "float32") == "graphs/weights-baseline-float32.data"
    weights = plan.generating("dense").whole_rows.weights
    assert weights["norm.weight"] is baseline.weights["norm.weight"]


def test_no_targets_named_takes_all_that_build_here(model: Model, config: BuildConfig, tmp_path: Path) -> None:
    plan = make_plan(model, None, updated(config, targets=[]), tmp_path)
    assert list(plan.targets) == [name for name, found in plan.availability.items() if found.builds]


def test_a_model_without_depth_routing_is_built_once_and_has_no_gain_to_reach(
    config: BuildConfig, tiny_spec: ModelSpec, tmp_path: Path
) -> None:
    """Its dense baseline would be the model itself. With another model as its baseline, there is a gain to reach."""
    dense, demanding = model_of(tiny_spec.dense()), updated(config, latency={"min_speedup": 1.1})
    alone = make_plan(dense, None, config, tmp_path)
    assert (list(alone.models), {graph.model for graph in alone.graphs}) == (["mod"], {"mod"})
    assert alone.config.latency.min_speedup == 0
    beside = make_plan(dense, dense, demanding, tmp_path)
    assert (list(beside.models), beside.config.latency.min_speedup) == (["mod", "dense"], 1.1)
    with pytest.raises(
        ConfigError, match=r"latency\.min_speedup: a speed-up of 1\.1 is demanded, and there is no dense"
    ):
        make_plan(dense, None, demanding, tmp_path)


NOTHING = {name: Availability(builds=False, runs=False, reason=f"no {name} here") for name in ENGINES}


def test_targets_that_cannot_build(config: BuildConfig) -> None:
    message = "cannot build here for ort-cpu: no ort-cpu here; tensorrt: no tensorrt here"
    with pytest.raises(TargetError, match=message):
        _targets(updated(config, targets=["ort-cpu", "tensorrt"]), NOTHING)
    reasons = "; ".join(f"{name}: no {name} here" for name in ENGINES)
    with pytest.raises(TargetError, match=f"no target can build on this machine: {reasons}"):
        _targets(updated(config, targets=[]), NOTHING)


def test_what_a_target_cannot_take(model: Model, config: BuildConfig, tmp_path: Path) -> None:
    found = ENGINES["tensorrt-rtx"].availability()
    if not found.builds:
        pytest.skip(found.reason)
    options = config.model_dump(by_alias=True)["target"]
    options["tensorrt-rtx"]["architectures"] = ["sm10"]
    invalid = updated(config, targets=["tensorrt-rtx"], target=options)
    with pytest.raises(ConfigError) as caught:
        make_plan(model, None, invalid, tmp_path)
    # There is one line for all buckets.
    (line,) = str(caught.value).splitlines()
    assert "target.tensorrt-rtx.architectures: TensorRT-RTX has no plans for sm10; it builds for " in line


def test_no_room(config: BuildConfig, tiny_spec: ModelSpec, tmp_path: Path) -> None:
    # A view that claims 2**60 numbers but stores one.
    vast = torch.zeros(1).expand(2**30, 2**30)
    small = random_checkpoint(tiny_spec, 0)
    model = model_with(replace(small, weights={**small.weights, "vast": vast}))
    needed = 2**60 * 4 // 2**20 + 4
    with pytest.raises(BuildFolderError) as caught:
        make_plan(model, None, config, tmp_path / "not/yet")
    assert re.fullmatch(
        rf".*/not/yet: needs about {needed} MiB, \d+ MiB are free; free some space, name another folder with -o, "
        "or build for fewer targets",
        str(caught.value),
    )
    assert not (tmp_path / "not").exists()


def test_room_that_a_build_has_taken_already(
    built: Path, model: Model, config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk does not stop a build whose files are there."""
    usage = shutil.disk_usage(built)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=0))
    make_plan(model, None, config, built)
    with pytest.raises(BuildFolderError, match="0 MiB are free"):
        make_plan(model, None, config, built.parent / "empty")

"""The inputs of a step change with everything that its result depends on, also where nobody would look for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from build_folders import WAS_QUIET, Silent, changed
from sample_rows import latency_row

from mod_export import environment
from mod_export.config import BuildConfig, config_from_toml
from mod_export.engines import ENGINES
from mod_export.engines.ort_attention import AttentionShape
from mod_export.environment import source_digest
from mod_export.folder.manifest import TOKENIZER
from mod_export.folder.workspace import Step, Workspace
from mod_export.judge.candidates import Candidate
from mod_export.measure import conditions
from mod_export.model.model import Model
from mod_export.model.request import Request
from mod_export.pipeline import passes, roles
from mod_export.pipeline.benchmark import benchmark
from mod_export.pipeline.build import Build
from mod_export.pipeline.engines import build_engines
from mod_export.pipeline.graphs import capture, onnx
from mod_export.pipeline.plan import make_plan
from mod_export.pipeline.roles import ROLES
from mod_export.pipeline.stages import build
from mod_export.rows.base import Result
from mod_export.rows.speed import LatencyRow
from mod_export.types import DTYPES, KINDS, Bucket, Engine, by_setting
from mod_models.checkpoint import random_checkpoint, save_checkpoint
from mod_models.spec import ModelSpec

ROUTER = "layers.1.router.projection.weight"


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_engine_needs_every_weights_file_that_it_reads(dtype: Any) -> None:
    weights = f"graphs/weights-baseline-{dtype}.data"
    engine = Engine(
        target="ort-cuda", model="mod", bucket=Bucket(1, 64), dtype=dtype, path="engines/a", weights=weights
    )
    beside = ["graphs/weights-baseline-float32.data"] if dtype in ("float16", "bfloat16") else []
    assert engine.files == ("engines/a", weights, *beside)
    assert replace(engine, weights=None).files == ("engines/a",)


@pytest.mark.slow
def test_an_engine_in_16_bits_is_built_again_if_a_tensor_changes_that_stays_float32(
    tiny_spec: ModelSpec, tmp_path: Path
) -> None:
    available = ENGINES["openvino"].availability()
    if not available.builds:
        pytest.skip(available.reason)
    spec = replace(tiny_spec, n_layers=2)
    first = random_checkpoint(spec, 0)
    rounded_weights = dict(first.weights)
    rounded_weights[ROUTER] = first.weights[ROUTER].to(torch.bfloat16).float()
    # The other routers differ from these by less than bfloat16 can hold.
    signs = torch.where(torch.arange(rounded_weights[ROUTER].numel()) % 2 == 0, 1.0, -1.0)
    close_weights = dict(rounded_weights)
    close_weights[ROUTER] = rounded_weights[ROUTER] * (1 + 0.0015 * signs.reshape(rounded_weights[ROUTER].shape))
    assert torch.equal(close_weights[ROUTER].to(torch.bfloat16).float(), rounded_weights[ROUTER])
    (tmp_path / "c.toml").write_text(
        'buckets = [[1, 16]]\ntargets = ["openvino"]\n[target.openvino]\ndtypes = ["bfloat16"]\n'
        '[generation]\nbuild = "never"\n'
    )
    for name, weights in (("a", rounded_weights), ("b", close_weights)):
        save_checkpoint(tmp_path / f"{name}.pt", replace(first, weights=weights))
        request = Request.checkpoint(tmp_path / f"{name}.pt")
        config = config_from_toml(tmp_path / "c.toml")
        build(request.models, config, tmp_path / "out", Silent(), "mod-export build", evidence=False)
        blob = (tmp_path / "out/engines/openvino/mod-b1s16-bfloat16.blob").read_bytes()
        assert weights[ROUTER].numpy().tobytes() in blob, name


@pytest.mark.parametrize(
    "option", ["target/ort-cuda/cuda_graph", "target/ort-cuda/device", "target/inductor-cuda/device"]
)
def test_results_depend_on_options_that_act_when_an_engine_is_loaded(
    option: str, built_copy: Path, model: Model, config: BuildConfig
) -> None:
    _, target, name = option.split("/")
    value = 1 if name == "device" else False
    engine = Engine(
        target=target, model="mod", bucket=Bucket(1, 64), dtype="float32",
        path="engines/ort-cpu/mod-b1s64-float32.onnx", weights="graphs/weights-float32.data",
    )  # fmt: skip
    candidate = Candidate(engine.setting, engine.path, engine.weights, None, engine)
    inputs = []
    for asked in (config, changed(config, {option: value})):
        with Workspace(built_copy) as workspace:
            started = Build.start(make_plan(model, None, asked, built_copy), workspace, lambda name: None)
            inputs.append((started.timing_inputs([engine]), started.judging_inputs(candidate)))
    for before, after in zip(*inputs, strict=True):
        assert before != after


def timed(root: Path, config: BuildConfig, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Any]:
    """Returns the inputs of every step that would time engines of this folder; nothing is timed."""
    opened = Build.open(root, config, (), verify=False)
    inputs: dict[str, Any] = {}

    def note(row: type[Result], name: str, depends: Mapping[str, Any], *how: object) -> list[Result]:
        inputs[name] = depends
        return []

    monkeypatch.setattr(opened, "timed_step", note)
    for role, stages in ROLES.items():
        for setting, engines in by_setting(opened.runnable(role)).items():
            stages.time(opened, setting, engines)
    return inputs


@pytest.mark.parametrize("field", ["latency/resolution", "latency/max_seconds"])
def test_times_of_every_role_depend_on_how_they_are_measured(
    field: str, written: Path, writing_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = timed(written, writing_config, monkeypatch)
    after = timed(written, changed(writing_config, {field: 0.5}), monkeypatch)
    assert {name.partition("/")[0] for name in before} == {"latency", "first_token", "decode"}
    assert before.keys() == after.keys()
    assert not [name for name in before if before[name] == after[name]]


def test_times_depend_on_the_cores_that_the_process_may_use(
    written: Path, writing_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container with a quota has the processor of its host."""
    found = []
    for cores in (1, 2):
        # The affinity of a process is part of its environment, so the test replaces it.
        monkeypatch.setattr(environment, "usable_cores", lambda cores=cores: cores)
        found.append(timed(written, writing_config, monkeypatch))
        found[-1] |= {"blocks": blocks_inputs(written, writing_config, monkeypatch)}
    before, after = found
    assert not [name for name in before if before[name] == after[name]]


def blocks_inputs(root: Path, config: BuildConfig, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Any]:
    """Returns the inputs of a step that would time attention in blocks of queries; nothing is timed."""
    opened = Build.open(root, config, (), verify=False)
    inputs: dict[str, Any] = {}

    def note(name: str, depends: Mapping[str, Any], *how: object) -> Step:
        inputs.update(depends)
        return Step(name=name, result={"chosen": 64})

    monkeypatch.setattr(opened, "step", note)
    assert passes._measured(opened, ENGINES["ort-cpu"], AttentionShape(1, 2, 2, 512, 8)) == 64
    assert inputs["versions"]["mod_export"] == source_digest("mod_export")
    return inputs


def busy_for(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Makes the machine count as busy: other processes take this share of its CPU time."""
    monkeypatch.setattr(conditions, "_share_of_others", lambda seconds, elapsed: share)


@pytest.mark.parametrize(("share", "sound", "again"), [(0.0, True, False), (0.6, True, True), (0.0, False, True)])
def test_times_that_the_machine_disturbed_are_taken_again(
    built_copy: Path,
    model: Model,
    config: BuildConfig,
    monkeypatch: pytest.MonkeyPatch,
    share: float,
    sound: bool,
    again: bool,
) -> None:
    monkeypatch.setattr(Build, "was_quiet", WAS_QUIET)
    busy_for(monkeypatch, share)
    taken: list[int] = []

    def take() -> list[LatencyRow]:
        taken.append(1)
        return [latency_row()]

    with Workspace(built_copy) as workspace:
        started = Build.start(make_plan(model, None, config, built_copy), workspace, lambda name: None)
        for _ in range(2):
            rows = started.timed_step(LatencyRow, "latency/x", {"a": 1}, take, lambda rows: sound)
            assert rows == [latency_row()]
    assert len(taken) == (2 if again else 1)
    assert [step.reused for step in started.steps] == [False, not again]


def test_a_latency_whose_control_failed_is_measured_again(
    built_copy: Path, model: Model, config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Workspace(built_copy) as workspace:
        started = Build.start(make_plan(model, None, config, built_copy), workspace, lambda name: None)
        for stage in (capture, onnx, passes.passes, build_engines, benchmark):
            stage(started)
        assert all(step.reused for step in started.steps)
        asked: list[LatencyRow] = []

        def doubt(rows: Sequence[LatencyRow], *how: object) -> bool:
            asked.extend(rows)
            return False

        monkeypatch.setattr(roles, "is_undisturbed", doubt)
        started.steps.clear()
        benchmark(started)
        assert {(row.bucket, row.model) for row in asked} == {(b, kind) for b in ("b1s64", "b2s32") for kind in KINDS}
        assert {step.name.partition("/")[0] for step in started.steps if not step.reused} == {"latency"}


def test_a_model_without_a_tokenizer_is_not_judged_on_that_of_an_earlier_build(
    written_copy: Path, tmp_path: Path, writing_model: Model, writing_config: BuildConfig
) -> None:
    with Workspace(written_copy) as workspace:
        workspace.step(TOKENIZER, {}, [TOKENIZER], lambda paths: paths[0].write_text("{}"))
        plan = make_plan(writing_model, None, writing_config, written_copy)
        started = Build.start(plan, workspace, lambda name: None)
        assert started.text_source is not None  # bytes
        assert started.text_inputs["tokenizer"] is None

"""The inputs of a step change with everything that its result depends on, also where nobody would look for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from build_folders import Silent, changed

from mod_export.config import BuildConfig, config_from_toml
from mod_export.engines import ENGINES
from mod_export.folder.manifest import TOKENIZER
from mod_export.folder.workspace import Workspace
from mod_export.judge.candidates import Candidate
from mod_export.model.model import Model
from mod_export.model.request import Request
from mod_export.pipeline.build import Build
from mod_export.pipeline.plan import make_plan
from mod_export.pipeline.roles import ROLES
from mod_export.pipeline.stages import build
from mod_export.types import DTYPES, Bucket, Engine, by_setting
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
    monkeypatch.setattr(opened, "measure", lambda row, name, depends, make: inputs.update({name: depends}))
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


def test_a_model_without_a_tokenizer_is_not_judged_on_that_of_an_earlier_build(
    written_copy: Path, tmp_path: Path, writing_model: Model, writing_config: BuildConfig
) -> None:
    with Workspace(written_copy) as workspace:
        workspace.step(TOKENIZER, {}, [TOKENIZER], lambda paths: paths[0].write_text("{}"))
        plan = make_plan(writing_model, None, writing_config, written_copy)
        started = Build.start(plan, workspace, lambda name: None)
        assert started.text_of is None
        assert started.text_inputs["tokenizer"] is None

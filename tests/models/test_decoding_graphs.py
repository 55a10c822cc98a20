"""The static graphs of prefill and steps: ONNX Runtime gives what the eager model gives, and runs nothing skipped."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort  # noqa: TID253 - a test may load what it tests on.
import pytest
import torch
from generating import WINDOW, generating_model, texts
from torch import Tensor

from mod_export.export.capture import captured
from mod_export.export.onnx_export import OPSET, TRANSLATIONS
from mod_models.cache import cache_layout
from mod_models.generate import Session
from mod_models.spec import ModelSpec, Site
from mod_models.step import Prefill, Step, prefill_outputs, step_inputs, step_outputs
from mod_models.transformer import Transformer

TOLERANCE = 2e-5
KINDS = ["experts in routed MLPs", "MLP routed", "compact positions"]


def exported(module: Transformer, inputs: dict[str, Tensor], outputs: list[str], path: Path) -> onnx.ModelProto:
    """Checked to be static and sound, and saved; what its routing sites selected comes after its own outputs."""
    found = captured(module, tuple(inputs.values()), "test")
    program = found.program
    assert not program.range_constraints
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        converted = torch.onnx.export(
            program, dynamo=True, opset_version=OPSET, custom_translation_table=TRANSLATIONS, verbose=False,
            input_names=list(inputs), output_names=[*outputs, *found.routed],
        )  # fmt: skip
    converted.save(str(path))
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    for value in values_of(model.graph):
        assert not [dim for dim in value.type.tensor_type.shape.dim if dim.dim_param], value.name
    return model


def values_of(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    yield from (*graph.input, *graph.output, *graph.value_info)
    for branch in branches_of(graph):
        yield from values_of(branch)


def branches_of(graph: onnx.GraphProto) -> list[onnx.GraphProto]:
    return [one.g for node in graph.node for one in node.attribute if one.type == onnx.AttributeProto.GRAPH]


def step_of(
    model: Transformer, rows: int, path: Path, slots: dict[Site, int] | None = None, *, skip: bool = True
) -> tuple[Step, onnx.ModelProto]:
    step = Step(model.spec, rows, WINDOW, slots, skip=skip).sharing(model)
    inputs = dict(zip(step_inputs(model.spec, WINDOW), random_state(model.spec, rows, 0), strict=True))
    return step, exported(step, inputs, step_outputs(model.spec), path)


def random_state(spec: ModelSpec, rows: int, seed: int) -> list[Tensor]:
    """Tokens, positions, and any finite cache."""
    generator = torch.Generator().manual_seed(seed)
    layout = cache_layout(spec, rows, WINDOW)
    cache = [torch.randn(one.shape, generator=generator) for one in layout if one.layer is not None]
    cache += [torch.randint(0, 6, one.shape, generator=generator) for one in layout if one.layer is None]
    ids_B = torch.randint(0, spec.vocab_size, (rows,), generator=generator)
    return [ids_B, torch.randint(0, WINDOW, (rows,), generator=generator), *cache]


def close(found: list[np.ndarray], expected: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.numpy().dtype
        np.testing.assert_allclose(one, other.numpy(), rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_prompts_and_steps_in_onnx_runtime(name: str, tmp_path: Path) -> None:
    """A text from its prompt to its last token, the cache carried from graph to graph."""
    model, ids_1S = generating_model(name, torch.float32), texts(1)
    prefill = Prefill(model.spec, WINDOW).sharing(model)
    inputs = {"input_ids": ids_1S[:, :6], "lengths": torch.tensor([6])}
    graph = exported(prefill, inputs, prefill_outputs(model.spec, WINDOW), tmp_path / "prefill.onnx").graph
    assert not branches_of(graph)
    step_of(model, 1, tmp_path / "step.onnx")
    prompts, steps = (ort.InferenceSession(tmp_path / f"{name}.onnx") for name in ("prefill", "step"))

    eager = Session(model, WINDOW)
    expected = eager.read(ids_1S[:, :6], torch.tensor([4]))
    names = prefill_outputs(model.spec, WINDOW)
    feeds = {"input_ids": ids_1S[:, :6].numpy(), "lengths": np.array([4])}
    found = dict(zip(names, prompts.run(names, feeds), strict=True))
    np.testing.assert_allclose(found["logits"], expected.numpy(), rtol=0, atol=TOLERANCE)
    cache = {one.name: found[one.name] for one in cache_layout(model.spec, 1, WINDOW)}
    for t in range(4, WINDOW):
        feeds = {"input_ids": ids_1S[0, t : t + 1].numpy(), "positions": np.array([t]), **cache}
        out = dict(zip(step_outputs(model.spec), steps.run(None, feeds), strict=True))
        expected = eager.write(ids_1S[:, t])
        np.testing.assert_allclose(out["logits"], expected.numpy(), rtol=0, atol=TOLERANCE)
        for layer, slot in enumerate(out["slots"][0]):
            for part in ("keys", "values") if slot >= 0 else ():
                cache[f"{part}_{layer}"][0, :, slot] = out[f"{part}_row_{layer}"][0]
        cache["counts"] = out["new_counts"]
    assert cache["counts"].tolist() == eager.cache["counts"].tolist()


@pytest.mark.parametrize(
    ("slots", "skip"),
    [({0: 2, 2: 1}, True), pytest.param({0: 2, 2: 1}, False, marks=pytest.mark.slow)],
    ids=["fixed slots", "without conditions"],
)
def test_four_rows_in_onnx_runtime(slots: dict[Site, int] | None, skip: bool, tmp_path: Path) -> None:
    model = generating_model("predictor", torch.float32)
    step, graph = step_of(model, 4, tmp_path / "step.onnx", slots, skip=skip)
    assert len(branches_of(graph.graph)) == (4 if skip else 0)
    session = ort.InferenceSession(tmp_path / "step.onnx")
    ran = set()
    for seed in range(8):
        given = random_state(model.spec, 4, seed)
        given[1][seed % 4] = -1
        feeds = dict(zip(step_inputs(model.spec, WINDOW), [tensor.numpy() for tensor in given], strict=True))
        expected = step(*given)
        close(session.run(None, feeds), expected)
        ran |= {int(number) for number in expected[-1].sum(0)}
    assert 0 in ran
    assert max(ran) == 2


@pytest.mark.parametrize("name", ["predictor", pytest.param("routed apart by predictors", marks=pytest.mark.slow)])
def test_a_skipped_block_is_not_run(name: str, tmp_path: Path) -> None:
    """ONNX Runtime's own profile lists every node that it ran: those of a branch are there when it was chosen."""
    model = generating_model(name, torch.float32)
    step, graph = step_of(model, 1, tmp_path / "step.onnx")
    conditions = [node for node in graph.graph.node if node.op_type == "If"]
    n_sites = len(step.sites)
    assert len(conditions) == n_sites
    for condition in conditions:
        branches = {one.name: one.g for one in condition.attribute}
        products = [node for node in branches["then_branch"].node if node.op_type == "MatMul"]
        assert products
        assert {node.op_type for node in branches["else_branch"].node} <= {"Identity", "Constant", "ConstantOfShape"}
    outside = {node.op_type: 0 for node in graph.graph.node}
    for node in graph.graph.node:
        outside[node.op_type] += 1
    seen = set()
    for seed in range(13):
        given = random_state(model.spec, 1, seed)
        if seed == 12:
            given[-1][:] = WINDOW  # All slots are used.
        feeds = dict(zip(step_inputs(model.spec, WINDOW), [tensor.numpy() for tensor in given], strict=True))
        ran_at = step(*given)[-1][0].tolist()
        expected = outside["MatMul"] + sum(
            [node.op_type for node in branch.node].count("MatMul")
            for condition, ran in zip(conditions, ran_at, strict=True)
            for branch in [one.g for one in condition.attribute if one.name == "then_branch" and ran]
        )
        assert products_run(tmp_path / "step.onnx", feeds, tmp_path / f"run{seed}") == expected
        seen.add(tuple(ran_at))
    assert any(all(ran_at) for ran_at in seen)
    assert any(not any(ran_at) for ran_at in seen)


def products_run(path: Path, feeds: dict[str, np.ndarray], profile: Path) -> int:
    """How many MatMul nodes ran once, in every graph and branch."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_profiling, options.profile_file_prefix = True, str(profile)
    session = ort.InferenceSession(path, options)
    session.run(None, feeds)
    events = json.loads(Path(session.end_profiling()).read_text())
    return sum(event.get("args", {}).get("op_name") == "MatMul" for event in events)


def test_weights_keep_their_names() -> None:
    """One file of weights serves prompts and steps: what they hold is the model's, by its own names, in no branch."""
    model = generating_model("predictor", torch.float32)
    prefill = Prefill(model.spec, WINDOW).sharing(model)
    step = Step(model.spec, 1, WINDOW).sharing(model)
    assert {*prefill.state_dict()} == {*step.state_dict()} == {*model.state_dict()}
    for name, tensor in model.state_dict().items():
        assert step.state_dict()[name].data_ptr() == tensor.data_ptr() == prefill.state_dict()[name].data_ptr()
    given = random_state(model.spec, 1, 0)
    with torch.no_grad():
        program = torch.export.export(step, tuple(given))
    assert {*program.state_dict} == {*model.state_dict()}


@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_is_one_graph_for_every_token(rows: int) -> None:
    """Captured whole and once: no break, no other graph for another token, slot or length."""
    model = generating_model("predictor", torch.float32)
    step = Step(model.spec, rows, WINDOW, dict.fromkeys([0, 2], (rows + 1) // 2)).sharing(model)
    graphs = []

    def count(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=False, backend=count)
    ran = set()
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(8):
            given = random_state(model.spec, rows, seed)
            expected = step(*given)
            close([tensor.numpy() for tensor in compiled(*given)], expected)
            ran |= set(expected[-1][:, 0].tolist())
    torch._dynamo.reset()
    assert len(graphs) == 1
    assert ran == {True, False}

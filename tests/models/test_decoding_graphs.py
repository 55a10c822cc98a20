"""The static graphs of prefill and steps: ONNX Runtime agrees with the eager model, and runs no skipped block."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort  # noqa: TID253 - a test may load what it tests on.
import pytest
import torch
from generating import WINDOW, generating_model
from step_graphs import step_graph, step_graph_of
from tiny_models import make_spec
from torch import Tensor

from mod_models.cache import COUNTS, cache_layout, step_inputs
from mod_models.spec import ModelSpec
from mod_models.step import DecodeStep, Prefill, slots_of_step

TOLERANCE = 2e-5


def branches_of(graph: onnx.GraphProto) -> list[onnx.GraphProto]:
    return [item.g for node in graph.node for item in node.attribute if item.type == onnx.AttributeProto.GRAPH]


def step_of(name: str, rows: int, path: Path, *, skip: bool = True) -> tuple[DecodeStep, onnx.GraphProto]:
    """Makes a step with a fair share of slots, and its graph, which is saved and checked to be static and sound."""
    model = generating_model(name, torch.float32)
    step = DecodeStep(model.spec, rows, WINDOW, slots_of_step(model.spec, rows, WINDOW), skip=skip).sharing(model)
    proto = ir.to_proto(step_graph(name, rows, "fair", skip=skip))
    onnx.checker.check_model(proto, full_check=True)
    for graph in (proto.graph, *branches_of(proto.graph)):
        for value in (*graph.input, *graph.output, *graph.value_info):
            assert not [dim for dim in value.type.tensor_type.shape.dim if dim.dim_param], value.name
    onnx.save(proto, path)
    return step, proto.graph


def random_state(spec: ModelSpec, rows: int, seed: int) -> list[Tensor]:
    """Random tokens, positions, and finite cache."""
    generator = torch.Generator().manual_seed(seed)
    layout = cache_layout(spec, rows, WINDOW)
    cache = [torch.randn(tensor.shape, generator=generator) for tensor in layout if tensor.name != COUNTS]
    cache += [torch.randint(0, 6, tensor.shape, generator=generator) for tensor in layout if tensor.name == COUNTS]
    ids_B = torch.randint(0, spec.vocab_size, (rows,), generator=generator)
    return [ids_B, torch.randint(0, WINDOW, (rows,), generator=generator), *cache]


def close(found: list[np.ndarray], expected: tuple[Tensor, ...]) -> None:
    for array, reference in zip(found, expected, strict=True):
        assert array.dtype == reference.numpy().dtype
        np.testing.assert_allclose(array, reference.numpy(), rtol=0, atol=TOLERANCE)


def test_a_step_of_one_row_computes_nothing_twice_and_chooses_nothing() -> None:
    """A small operator costs about as much as the work of a narrow layer. The norm that the router reads is that of the
    part, and a row that runs does not need the value of a row that does not.
    """
    spec = make_spec(
        parts="mlp", selection="predictor", predictor_hidden=2, router_input="normed", skipped_result="adapter",
        adapter="gated", adapter_hidden=3, gate="ones",
    )  # fmt: skip
    graph, dense = (ir.to_proto(step_graph_of(one)).graph for one in (spec, replace(spec, routing=None)))
    more = Counter(node.op_type for node in graph.node) - Counter(node.op_type for node in dense.node)
    assert more["RMSNormalization"] == 0
    assert more["Less"] == more["Split"] == 1
    assert len(branches_of(graph)) == 2 * len(spec.routed_layers) > 0
    assert not {"RMSNormalization", "Where"} & {node.op_type for node in _joined(branches_of(graph)).node}
    several = _joined(branches_of(ir.to_proto(step_graph_of(spec, 3)).graph))
    assert [node.op_type for node in several.node].count("Where") == len(spec.routed_layers)


def _joined(graphs: list[onnx.GraphProto]) -> onnx.GraphProto:
    return onnx.GraphProto(node=[node for graph in graphs for node in graph.node])


@pytest.mark.slow
@pytest.mark.parametrize(
    "skip", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["fixed slots", "without conditions"]
)
def test_four_rows_in_onnx_runtime(skip: bool, tmp_path: Path) -> None:
    step, graph = step_of("predictor", 4, tmp_path / "step.onnx", skip=skip)
    assert len(branches_of(graph)) == (4 if skip else 0)
    session = ort.InferenceSession(tmp_path / "step.onnx")
    # Without conditions, the selection of rows is a routing site like any other, and returned as well.
    output_names = [output.name for output in graph.output if not output.name.startswith("routed_")]
    ran = set()
    for seed in range(8):
        state = random_state(step.spec, 4, seed)
        state[1][seed % 4] = -1
        feeds = dict(zip(step_inputs(step.spec, WINDOW), [tensor.numpy() for tensor in state], strict=True))
        expected = step(*state)
        close(session.run(output_names, feeds), expected)
        ran |= {int(number) for number in expected[-1].sum(0)}
    assert 0 in ran
    assert max(ran) == 2


@pytest.mark.parametrize("name", ["predictor", pytest.param("routed apart by predictors", marks=pytest.mark.slow)])
def test_a_skipped_block_is_not_run(name: str, tmp_path: Path) -> None:
    """ONNX Runtime's own profile lists every node that ran; nodes of a branch are in it if the branch was chosen."""
    step, graph = step_of(name, 1, tmp_path / "step.onnx")
    conditions = [node for node in graph.node if node.op_type == "If"]
    n_sites = len(step.sites)
    assert len(conditions) == n_sites
    for condition in conditions:
        branches = {attribute.name: attribute.g for attribute in condition.attribute}
        products = [node for node in branches["then_branch"].node if node.op_type == "MatMul"]
        assert products
        assert {node.op_type for node in branches["else_branch"].node} <= {"Identity", "Constant", "ConstantOfShape"}
    outside = [node.op_type for node in graph.node].count("MatMul")
    seen = set()
    for seed in range(13):
        state = random_state(step.spec, 1, seed)
        if seed == 12:
            state[-1][:] = WINDOW  # All slots are in use.
        feeds = dict(zip(step_inputs(step.spec, WINDOW), [tensor.numpy() for tensor in state], strict=True))
        ran_at = step(*state)[-1][0].tolist()
        expected = outside + sum(
            [node.op_type for node in branch.node].count("MatMul")
            for condition, ran in zip(conditions, ran_at, strict=True)
            for branch in [attribute.g for attribute in condition.attribute if attribute.name == "then_branch" and ran]
        )
        assert products_run(tmp_path / "step.onnx", feeds, tmp_path / f"run{seed}") == expected
        seen.add(tuple(ran_at))
    assert any(all(ran_at) for ran_at in seen)
    assert any(not any(ran_at) for ran_at in seen)


def products_run(path: Path, feeds: dict[str, np.ndarray], profile: Path) -> int:
    """Number of MatMul nodes that ran once, in all graphs and branches."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_profiling, options.profile_file_prefix = True, str(profile)
    session = ort.InferenceSession(path, options)
    session.run(None, feeds)
    events = json.loads(Path(session.end_profiling()).read_text())
    return sum(event.get("args", {}).get("op_name") == "MatMul" for event in events)


@pytest.mark.slow
def test_weights_keep_their_names() -> None:
    """One weights file serves prompts and steps: both hold the model's weights under its names, outside branches."""
    model = generating_model("predictor", torch.float32)
    prefill = Prefill(model.spec, WINDOW).sharing(model)
    step = DecodeStep(model.spec, 1, WINDOW).sharing(model)
    assert {*prefill.state_dict()} == {*step.state_dict()} == {*model.state_dict()}
    for name, tensor in model.state_dict().items():
        assert step.state_dict()[name].data_ptr() == tensor.data_ptr() == prefill.state_dict()[name].data_ptr()
    state = random_state(model.spec, 1, 0)
    with torch.no_grad():
        program = torch.export.export(step, tuple(state))
    assert {*program.state_dict} == {*model.state_dict()}


@pytest.mark.fast("3")
@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_is_one_graph_for_every_token(rows: int) -> None:
    """Each step is captured whole and once: no break, no other graph for another token, slot or length."""
    model = generating_model("predictor", torch.float32)
    step = DecodeStep(model.spec, rows, WINDOW, dict.fromkeys([0, 2], (rows + 1) // 2)).sharing(model)
    graphs = []

    def count(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=False, backend=count)
    ran = set()
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(8):
            state = random_state(model.spec, rows, seed)
            expected = step(*state)
            close([tensor.numpy() for tensor in compiled(*state)], expected)
            ran |= set(expected[-1][:, 0].tolist())
    torch._dynamo.reset()
    assert len(graphs) == 1
    assert ran == {True, False}

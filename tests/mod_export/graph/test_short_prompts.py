"""Graphs of short prompts: each routed layer runs one of several branches, which are rewritten like all nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import openvino  # noqa: TID253 - a test may load what it tests on.
import pytest
import torch
from generating import GENERATING, WINDOW, generating_model
from small_graphs import session
from step_graphs import prefill_graph, prefill_graph_of

from mod_export.engines import ENGINES
from mod_export.graph.nodes import branches_of
from mod_export.graph.rewrites import apply_rewrites
from mod_export.graph.target import check_limits
from mod_export.types import DType, TargetLimits
from mod_models.step import Prefill, narrow_slots, prefill_outputs

SEQ = 5
TEXTS = 40
ORT = replace(ENGINES["ort-cpu"].limits, query_blocks=((4, 2), (5, 2)))
RTX = ENGINES["tensorrt-rtx"].limits
WITHOUT: dict[str, tuple[TargetLimits, DType, set[str]]] = {
    "portable": (TargetLimits(name="portable", max_opset=23, branches=True), "float32", set()),
    "ort-cpu": (ORT, "float32", {"MatMul", "Split"}),
    "tensorrt-rtx": (RTX, "float32", {"Attention"}),
    "tensorrt-rtx in float16": (RTX, "float16", set()),
    "openvino": (ENGINES["openvino"].limits, "float32", set()),
}
"""Name -> limits, dtype, and operators that the rewrites leave in no branch."""
Run = Callable[[dict[str, np.ndarray]], Sequence[np.ndarray]]


def in_onnx_runtime(model: ir.Model) -> Run:
    opened = session(model)
    return lambda feeds: opened.run(None, feeds)


def in_openvino(model: ir.Model) -> Run:
    core = openvino.Core()
    compiled = core.compile_model(
        core.read_model(ir.to_proto(model).SerializeToString()), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    return lambda feeds: list(compiled(feeds).values())


RUNTIMES: defaultdict[str, Callable[[ir.Model], Run]] = defaultdict(lambda: in_onnx_runtime, openvino=in_openvino)
"""The runtime that runs the graph of a target in these tests."""


def branch_nodes(model: ir.Model) -> list[list[ir.Node]]:
    """The nodes of each branch that computes a routed part."""
    # Branches are not nested, because ONNX Runtime packs no weights in nested branches.
    assert not [node for node in model.graph.all_nodes() if branches_of(node) and node.graph is not model.graph]
    return [list(branch) for node in model.graph for branch in branches_of(node)]


@pytest.mark.parametrize("target", WITHOUT)
@pytest.mark.parametrize("name", ["predictor", pytest.param("routed apart by predictors", marks=pytest.mark.slow)])
def test_prompts_that_need_each_branch(name: str, target: str) -> None:
    """The eager model has no branches. Of two rows, the one that runs more tokens decides which branch runs."""
    limits, dtype, gone = WITHOUT[target]
    model = generating_model(name, torch.float32)
    with torch.device("meta"):
        eager = Prefill(model.spec, SEQ)
    eager = eager.sharing(model)
    graph = prefill_graph(name, SEQ, 2)
    apply_rewrites(graph, limits, dtype)
    check_limits(graph, limits, dtype)
    assert set(apply_rewrites(graph, limits, dtype).values()) <= {0}
    branches = branch_nodes(graph)
    # The last layer computes one token, without branches, except for attention that is routed apart.
    assert len(branches) == 2 * (len(eager.spec.k_by_layer(SEQ)) - 1)
    assert not {node.op_type for nodes in branches for node in nodes} & gone
    running, names = RUNTIMES[target](graph), prefill_outputs(model.spec, SEQ)
    (narrow,) = {*narrow_slots(model.spec, SEQ, WINDOW).values()}
    compared, most = 0, set()
    for seed in range(TEXTS):
        ids_BS = torch.randint(0, 16, (2, SEQ), generator=torch.Generator().manual_seed(seed))
        lengths_B = torch.tensor([1 + seed % SEQ, 1 + seed // 3 % SEQ])
        with torch.no_grad():
            expected = dict(zip(names, eager(ids_BS, lengths_B), strict=True))
        feeds = {"input_ids": ids_BS.numpy(), "lengths": lengths_B.numpy()}
        arrays = dict(zip([value.name for value in graph.graph.outputs], running(feeds), strict=True))
        if dtype == "float16" and not np.array_equal(arrays["wanted"], expected["wanted"].numpy()):
            continue  # A score is within rounding of 0.
        compared += 1
        most |= set(expected["counts"].max(0).values.tolist())
        for output in ("counts", "wanted"):
            np.testing.assert_array_equal(arrays[output], expected[output])
        tolerance = 2e-5 if dtype == "float32" else 3e-2
        np.testing.assert_allclose(arrays["last_logits"], expected["last_logits"], rtol=tolerance, atol=tolerance)
    assert compared > TEXTS // 2
    assert min(most) <= narrow < max(most)


@pytest.mark.parametrize("dtype", ["int4", pytest.param("int8", marks=pytest.mark.slow)])
def test_products_in_branches_are_rounded(dtype: DType) -> None:
    """Each branch has as many quantized products as the layer."""
    spec = replace(GENERATING["predictor"], d_model=32, d_ff=32, d_head=8)
    graph = prefill_graph_of(spec, SEQ)
    apply_rewrites(graph, ORT, dtype)
    for nodes in branch_nodes(graph):
        rounded = [node for node in nodes if node.op_type == "MatMulNBits"]
        # Products for queries, outputs, gate and up together, and down; keys and values are too narrow.
        assert len(rounded) == 4

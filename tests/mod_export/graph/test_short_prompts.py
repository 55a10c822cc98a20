"""Graphs of short prompts: each routed layer runs one of several branches, which are rewritten like all nodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
import torch
from generating import GENERATING, WINDOW, generating_model
from runtimes import RUNTIMES
from step_graphs import prefill_graph, prefill_graph_of

from mod_export.engines import ENGINES
from mod_export.graph.nodes import branches_of
from mod_export.graph.rewrites import apply_rewrites
from mod_export.graph.rewrites.cached_attention import is_cache
from mod_export.graph.target import check_limits
from mod_export.types import DType, TargetLimits
from mod_models.cache import COUNTS, cache_layout, prefill_outputs
from mod_models.step import Prefill, narrow_slots

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


def branch_nodes(model: ir.Model) -> list[list[ir.Node]]:
    """The nodes of each branch that computes a routed part."""
    # Branches are not nested, because ONNX Runtime packs no weights in nested branches.
    assert not [node for node in model.graph.all_nodes() if branches_of(node) and node.graph is not model.graph]
    return [list(branch) for node in model.graph for branch in branches_of(node)]


@pytest.mark.fast("predictor-openvino")
@pytest.mark.parametrize("target", WITHOUT)
@pytest.mark.parametrize(
    "name",
    [
        "predictor",
        "routed apart by predictors",
        pytest.param("several blocks by predictors", marks=pytest.mark.slow),
        pytest.param("several blocks, nested, threshold", marks=pytest.mark.slow),
    ],
)
def test_prompts_that_need_each_branch(name: str, target: str) -> None:
    """The eager model has no branches. Of two rows, the one that runs more tokens decides which branch runs."""
    limits, dtype, gone = WITHOUT[target]
    model = generating_model(name, torch.float32)
    with torch.device("meta"):
        eager = Prefill(model.spec, WINDOW)
    eager = eager.sharing(model)
    graph = prefill_graph(name, SEQ, 2)
    apply_rewrites(graph, limits, dtype)
    check_limits(graph, limits, dtype)
    assert set(apply_rewrites(graph, limits, dtype).values()) <= {0}
    branches = branch_nodes(graph)
    # The last layer computes one token, without branches, except for attention that is routed apart, and for a layer
    # that the router of a layer before decides about.
    last = 0 if "several" in name else 1
    assert len(branches) == 2 * (len(eager.spec.k_by_layer(SEQ)) - last)
    assert not {node.op_type for nodes in branches for node in nodes} & gone
    running, names = RUNTIMES[target](graph), prefill_outputs(model.spec)
    layout = cache_layout(model.spec, 2, WINDOW, SEQ)
    (narrow,) = {*narrow_slots(model.spec, SEQ, WINDOW).values()}
    compared, most = 0, set()
    for seed in range(TEXTS):
        generator = torch.Generator().manual_seed(seed)
        ids_BS = torch.randint(0, 16, (2, SEQ), generator=generator)
        lengths_B = torch.tensor([1 + seed % SEQ, 1 + seed // 3 % SEQ])
        # Some rows begin, others continue what the cache holds.
        position_B = torch.tensor([0, seed % (WINDOW - SEQ)])
        used_B = torch.tensor([0, min(int(position_B[1]), seed % 4)])
        cache = [
            used_B[:, None].expand(entry.shape).contiguous()
            if entry.name == COUNTS
            else torch.randn(entry.shape, generator=generator)
            for entry in layout
        ]
        with torch.no_grad():
            expected = dict(zip(names, eager(ids_BS, lengths_B, position_B, *cache), strict=True))
        feeds = {"input_ids": ids_BS.numpy(), "lengths": lengths_B.numpy(), "positions": position_B.numpy()}
        stored = {value.name: value.dtype.numpy() for value in graph.graph.inputs}
        feeds |= {
            entry.name: tensor.numpy().astype(stored[entry.name]) for entry, tensor in zip(layout, cache, strict=True)
        }
        arrays = dict(zip([value.name for value in graph.graph.outputs], running(feeds), strict=True))
        if dtype == "float16" and not np.array_equal(arrays["wanted"], expected["wanted"].numpy()):
            continue  # A score is within rounding of 0.
        compared += 1
        most |= set((expected["new_counts"] - used_B[:, None]).max(0).values.tolist())
        for output in ("new_counts", "wanted", "slots", "kept"):
            np.testing.assert_array_equal(arrays[output], expected[output])
        tolerance = 2e-5 if dtype == "float32" else 3e-2
        np.testing.assert_allclose(arrays["last_logits"], expected["last_logits"], rtol=tolerance, atol=tolerance)
        for output, rows_BGTE in expected.items():
            if is_cache(output):
                kept_BT = np.arange(rows_BGTE.shape[2]) < expected["kept"][:, int(output[-1])].numpy()[:, None]
                found, wanted = (rows * kept_BT[:, None, :, None] for rows in (arrays[output], rows_BGTE.numpy()))
                np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)
    assert compared > TEXTS // 2
    assert min(most) <= narrow < max(most)


@pytest.mark.slow
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

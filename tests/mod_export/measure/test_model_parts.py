"""Parts of nodes, on a real routed graph and rule by rule, and parts of kernels by the names that engines give them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import onnx_ir as ir
import pytest
from small_graphs import make_spec, parsed, portable_graph

from mod_export.config import BuildConfig
from mod_export.engines.ort import OrtCpu
from mod_export.folder.manifest import open_folder
from mod_export.measure.parts import NODE_PARTS, PARTS, ms_by_part, part_of_kernel, parts_of_nodes
from mod_export.model.model import tokens_sample
from mod_export.types import Kernel, Profile
from mod_models.spec import ExpertsSpec

ROUTED = make_spec(gate="sigmoid")


def operators_by_part(model: ir.Model) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for node, part in parts_of_nodes(model.graph).items():
        found.setdefault(part, Counter())[node.op_type] += 1
    return found


@pytest.mark.slow
def test_a_routed_graph_falls_into_its_parts() -> None:
    model = portable_graph(ROUTED, 2, 32)
    found = operators_by_part(model)
    assert set(found) == set(NODE_PARTS) - {"adapter", "experts", "other"}
    assert found["attention"] == {"Attention": 2}
    assert found["norms"] == {"RMSNormalization": 5}
    assert found["embedding"] == {"Gather": 1}
    assert found["mlp"] == {"MatMul": 6}
    assert found["head"] == {"MatMul": 1}
    # Routing is the selection, its write-back and the gate, the rows, and both rotary tables at the routed positions.
    expected = {"TopK": 2, "ScatterND": 1, "MatMul": 1, "Gather": 3}
    assert {name: found["routing"][name] for name in expected} == expected
    assert {"Where", "Add", "Mul"} <= set(found["routing"])
    assert {"Transpose", "Concat", "Sigmoid"} <= set(found["elementwise"])
    assert "TopK" not in found["elementwise"]
    assert "routing" not in operators_by_part(portable_graph(ROUTED.dense(), 2, 32))
    # Folded constants have no part.
    nodes, parts = list(model.graph), parts_of_nodes(model.graph)
    transposed = [node for node in nodes if node.op_type == "Transpose" and node not in parts]
    assert len(transposed) == len([node for node in nodes if node.op_type == "MatMul"])
    assert [part for part in NODE_PARTS if part in PARTS] == list(PARTS)


@pytest.mark.parametrize("choice", ["token", pytest.param("expert", marks=pytest.mark.slow)])
def test_experts_are_a_part_of_their_own(choice: str) -> None:
    experts = ExpertsSpec(n_experts=2, choice=choice, layers=(0,))
    spec = dataclasses.replace(make_spec(), routing=None, experts=experts)
    found = operators_by_part(portable_graph(spec, 2, 32))
    assert found["experts"]["MatMul"] == found["mlp"]["MatMul"] == 3
    # The softmax over experts is not attention.
    assert found["attention"] == {"Attention": 2}
    assert found["routing"]["MatMul"] == found["routing"]["Softmax"] == 1


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("g (float[2,3] x) => (float[2,3] y) { y = Softmax(x) }", "attention"),
        ("g (float[2,3,4] q, float[2,4,3] k) => (float[2,3,3] y) { s = MatMul(q, k) y = Mul(s, s) }", "attention"),
        ("g (float[2,3,4] q, float[2,4,3] k) => (float[3,2,3] y) { s = MatMul(q, k) y = Transpose <perm=[1,0,2]> (s) }",
         "elementwise"),
        ("g (float[2,3] x) => (float[2,3] y) { y = Mul(x, x) }", "elementwise"),
        ("g (float[2,3] x) => (bool[2,3] y) { y = Less(x, x) }", "routing"),
        ("g (int64[2,3] x) => (int64[2,3] y) { y = Add(x, x) }", "routing"),
        ("g (float[2,3] x) => (float[2,3] y) { n = CumSum(x, a) y = Exp(n) }", "routing"),
        ("g (float[2,3] x, int64[2] i) => (float[2,3] y) { y = Gather(x, i) }", "routing"),
        ("g (float[2,3] x) => (float[3,2] y) { y = Reshape(x, a) }", "elementwise"),
        ("g (float[2,4,3] x, float[2,4] z) => (float[2,4,3] y) { n = CumSum(z, a) g = Unsqueeze(n, a) y = Mul(x, g) }",
         "routing"),
        ("g (float[2,4,3] x, float[2,4,3] z) => (float[2,4,3] y) { n = CumSum(z, a) y = Mul(x, n) }", "elementwise"),
    ],
)  # fmt: skip
def test_rules(text: str, part: str) -> None:
    # `a` is the constant axis or shape that the operator expects there.
    constant = "<int64[2] a = {3, 2}>" if "Reshape" in text else "<int64[1] a = {2}>"
    constant = "<int64 a = {1}>" if "CumSum" in text and "Unsqueeze" not in text else constant
    head, _, body = text.partition("{")
    parts = parts_of_nodes(parsed(f"{head}{constant} {{{body}" if "(x, a)" in text or "(z, a)" in text else text).graph)
    assert next(found for node, found in parts.items() if node.outputs[0].name == "y") == part


NODES = {
    "node_linear": "attention_projections",
    "node_linear_1": "mlp",
    "node_silu": "elementwise",
    "/model/layers.0/norm": "norms",
    "node_index_select": "routing",
}


@pytest.mark.parametrize(
    ("name", "operator", "part"),
    [
        ("node_linear", "MatMul", "attention_projections"),
        ("node_silu/QuickGeluFusion/", "QuickGelu", "elementwise"),
        ("node_linear_1/MatMulAddFusion", "Gemm", "mlp"),
        ("fused node_linear_1", "FusedGemm", "mlp"),
        ("node_index_select_new_reshape", "Reshape", "routing"),
        # The origin takes precedence over the operator, and an absolute name keeps its slash.
        ("/model/layers.0/norm/Mul/LayerNormFusion/", "SimplifiedLayerNormalization", "norms"),
        ("node_linear_12", "MatMul", "other"),
        ("made_up", "SkipSimplifiedLayerNormalization", "norms"),
        ("made_up", "MultiHeadAttention", "attention"),
        ("made_up", "TopK", "routing"),
        ("made_up", "Gather", "other"),
        ("Memcpy_token_3", "MemcpyFromHost", "other"),
    ],
)
def test_kernels_of_onnx_runtime(name: str, operator: str, part: str) -> None:
    kernel = Kernel(name=name, operator=operator, ms=2.0)
    assert part_of_kernel(kernel, NODES) == part
    assert ms_by_part(Profile(profiler="by hand", runs=1, kernels=(kernel, kernel)), NODES) == {part: 4.0}


@pytest.mark.parametrize(
    ("name", "weights", "part"),
    [
        ("mm_out", "layers.0.attention.q_proj.weight", "attention_projections"),
        ("mm_out", "layers.1.router.projection.weight", "routing"),
        ("mm_out", "embedding.weight", "head"),
        ("mm_out", "", "other"),
        ("bmm_out", "", "attention"),
        ("_scaled_dot_product_flash_attention_for_cpu", "", "attention"),
        ("sort_stable", "", "routing"),
        ("add_embedding_mean_mul_pow_rsqrt_0", "embedding.weight layers.0.attention_norm.weight", "norms"),
        ("_unsafe_view_add_embedding_5", "embedding.weight", "embedding"),
        ("add_arange_index_select_mean_mul_pow_rsqrt_unsqueeze_view_7", "layers.1.mlp_norm.weight", "routing"),
        ("_unsafe_view_mul_silu_4", "", "elementwise"),
    ],
)
def test_kernels_of_inductor(name: str, weights: str, part: str) -> None:
    whole = f"cpp_fused_{name}" if name[-1].isdigit() else f"aoti_torch_cpu_{name}"
    kernel = Kernel(name=whole, operator=whole, weights=tuple(weights.split()), ms=1.0)
    assert part_of_kernel(kernel, {}) == part


def test_every_kernel_of_a_real_engine_has_its_part(built: Path, config: BuildConfig) -> None:
    folder = open_folder(built, verify=False)
    engine = next(item for item in folder.engines if item.model == "mod")
    profile = OrtCpu().profile(built, engine, config, 1, tokens_sample(256, engine.bucket, 0), 2)
    part_of_node = {name: item.part for item in folder.work[engine.path] for name in item.nodes}
    placed = {kernel.name: part_of_kernel(kernel, part_of_node) for kernel in profile.kernels}
    assert len(placed) > 60
    assert "other" not in placed.values()
    # ONNX Runtime fused these kernels, so their names are not in the graph.
    assert {part for name, part in placed.items() if name not in part_of_node} == {"elementwise", "routing"}

"""Parts of kernels, by the names that ONNX Runtime and AOTInductor really give them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mod_export.benchmark.latency import timing_feeds
from mod_export.benchmark.model_parts import ms_by_part, part_of_kernel
from mod_export.build_folder.manifest import open_folder
from mod_export.config import BuildConfig
from mod_export.engines.ort import OrtCpu
from mod_export.types import Bucket, Engine, Kernel, Profile

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
        ("node_linear_1", "MatMul", "mlp"),
        ("node_silu/QuickGeluFusion/", "QuickGelu", "elementwise"),
        ("node_linear_1/MatMulAddFusion", "Gemm", "mlp"),
        ("fused node_linear_1", "FusedGemm", "mlp"),
        ("/model/layers.0/norm/Mul/LayerNormFusion/", "SimplifiedLayerNormalization", "other"),
        ("node_linear_12", "MatMul", "other"),
        ("made_up", "SkipSimplifiedLayerNormalization", "norms"),
        ("made_up", "MultiHeadAttention", "attention"),
        ("made_up", "TopK", "routing"),
        ("made_up", "Gather", "other"),
        ("Memcpy_token_3", "MemcpyFromHost", "other"),
    ],
)
def test_kernels_of_onnx_runtime(name: str, operator: str, part: str) -> None:
    # The origin comes before the operator, and an absolute name keeps its slash.
    expected = "norms" if operator == "SimplifiedLayerNormalization" else part
    assert part_of_kernel(Kernel(name=name, operator=operator, ms=1.0), NODES) == expected


@pytest.mark.parametrize(
    ("name", "weights", "part"),
    [
        ("aoti_torch_cpu_mm_out", ("layers.0.attention.q_proj.weight",), "attention_projections"),
        ("aoti_torch_cpu_mm_out", ("layers.1.router.projection.weight",), "routing"),
        ("aoti_torch_cpu_mm_out", ("embedding.weight",), "head"),
        ("aoti_torch_cpu_mm_out", (), "other"),
        ("aoti_torch_cpu_bmm_out", (), "attention"),
        ("aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu", (), "attention"),
        ("aoti_torch_cpu_sort_stable", (), "routing"),
        ("cpp_fused_add_embedding_mean_mul_pow_rsqrt_0", ("embedding.weight", "layers.0.attention_norm.weight"),
         "norms"),
        ("cpp_fused__unsafe_view_add_embedding_5", ("embedding.weight",), "embedding"),
        ("cpp_fused_add_arange_index_select_mean_mul_pow_rsqrt_unsqueeze_view_7", ("layers.1.mlp_norm.weight",),
         "routing"),
        ("cpp_fused__unsafe_view_mul_silu_4", (), "elementwise"),
    ],
)  # fmt: skip
def test_kernels_of_inductor(name: str, weights: tuple[str, ...], part: str) -> None:
    assert part_of_kernel(Kernel(name=name, operator=name, weights=weights, ms=1.0), {}) == part


def test_milliseconds_are_summed_by_part() -> None:
    kernels = (
        Kernel(name="node_linear", operator="MatMul", ms=2.0),
        Kernel(name="node_silu/QuickGeluFusion/", operator="QuickGelu", ms=0.5),
        Kernel(name="node_silu", operator="Sigmoid", ms=0.25),
        Kernel(name="unknown", operator="Memcpy", ms=0.125),
    )
    found = ms_by_part(Profile(profiler="by hand", runs=1, kernels=kernels), NODES)
    assert found == {"attention_projections": 2.0, "elementwise": 0.75, "other": 0.125}


@pytest.mark.parametrize("bucket", [Bucket(1, 64), Bucket(2, 32)])
@pytest.mark.parametrize("model", ["mod", "dense"])
def test_every_kernel_of_a_real_engine_has_its_part(
    built: Path, config: BuildConfig, model: str, bucket: Bucket
) -> None:
    path = f"engines/ort-cpu/{model}-{bucket.name}-float32.onnx"
    engine = Engine(
        target="ort-cpu", model="mod", bucket=bucket, dtype="float32", path=path, weights="graphs/weights-float32.data"
    )
    work = open_folder(built).work[path]
    profile = OrtCpu().profile(built, engine, config, 1, timing_feeds(bucket, 256, 0), 2)
    part_of_node = {name: one.part for one in work for name in one.nodes}
    placed = {kernel.name: part_of_kernel(kernel, part_of_node) for kernel in profile.kernels}
    assert len(placed) > 60
    assert "other" not in placed.values()
    # Fused by ONNX Runtime: the names of these kernels are not in the graph.
    renamed = [name for name in placed if name not in part_of_node]
    assert renamed
    assert {placed[name] for name in renamed} == {"elementwise"}

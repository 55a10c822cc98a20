"""Stage passes: graphs of a target's own, and the proof that they compute the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import pytest
from build_folders import changed
from small_graphs import parsed

from mod_export.config import config_from_toml
from mod_export.engines import ENGINES
from mod_export.errors import GraphError, LimitError
from mod_export.folder.workspace import Step, Workspace
from mod_export.graph.rewrites import PORTABLE
from mod_export.model.checkpoint import model_from_checkpoint
from mod_export.model.transformer import TransformerModel
from mod_export.pipeline import graphs
from mod_export.pipeline import passes as stage
from mod_export.pipeline.build import Build
from mod_export.pipeline.graphs import capture, onnx, save_graph
from mod_export.pipeline.passes import check_memory, fixed_block, passes
from mod_export.pipeline.plan import make_plan
from mod_export.types import Bucket, Graph, Site, TargetLimits

TARGET = "ort-cuda"
"""A target that has its own float16 graphs, and needs no GPU before the stage that builds engines."""


@pytest.fixture
def context(small_folder: Path, small_copy: Path) -> Iterator[Build]:
    """Stages up to the portable graphs, all reused, for a target whose graphs are rewritten."""
    model, config = model_from_checkpoint(small_folder / "small.pt"), config_from_toml(small_folder / "small.toml")
    plan = replace(make_plan(model, None, config, small_copy), targets={TARGET: ENGINES[TARGET]})
    with Workspace(small_copy) as workspace:
        context = Build.start(plan, workspace, lambda name: None)
        capture(context)
        onnx(context)
        assert all(step.reused for step in context.steps if "float16" not in step.name)
        yield context


def rewritten(context: Build) -> list[Step]:
    context.steps.clear()
    passes(context)
    return context.steps


def test_only_what_differs_is_rewritten_and_it_is_proven(context: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target without wishes of its own runs the portable graph in float32."""
    monkeypatch.setattr(type(ENGINES[TARGET]), "limits", TargetLimits(name="a target of all operators", max_opset=26))
    steps = rewritten(context)
    assert [step.name for step in steps] == [
        "rewrite/ort-cuda/mod-b1s16-float16",
        "rewrite/ort-cuda/dense-b1s16-float16",
    ]
    for step in steps:
        assert step.result["passes"]["cast_floats"] > 0
        assert step.result["proof"].endswith(" on ONNX Runtime CPU")
        (path,) = step.outputs
        graph = ir.load(context.root / path)
        external = {
            value.const_value.location
            for value in graph.graph.initializers.values()
            if isinstance(value.const_value, ir.ExternalTensor)
        }
        assert "weights-float16.data" in external
    # Float32 engines are built from the portable graph itself.
    assert [graph.dtype for graph in context.graphs if graph.target == TARGET] == ["float16", "float16"]


def test_a_rewrite_that_changes_the_meaning_is_refused_and_leaves_other_dtypes(context: Build) -> None:
    context.config = changed(context.config, {"parity/float16/rounding_error": 0.0})
    message = (
        r"graphs/mod-b1s16\.ort-cuda\.float16\.onnx: the rewrite changed the meaning of the graph: "
        r"text: logits: max abs error .* given the same routing, allowed 0"
    )
    passes(context)
    assert [(row.stage, row.target, row.dtype, row.model) for row in context.failed] == [
        ("passes", TARGET, "float16", "mod"),
        ("passes", TARGET, "float16", "dense"),
    ]
    assert re.match(message, context.failed[0].reason)
    assert [(variant.dtype, graph.model) for _, variant, graph in context.planned()] == [
        ("float32", "mod"),
        ("float32", "dense"),
    ]
    assert not list((context.root / "graphs").glob("*float16.onnx"))
    assert not list(context.root.glob("graphs/.partial-*"))


def test_without_onnx_runtime_the_proof_says_so(context: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    # The stage sees an environment without ONNX Runtime.
    monkeypatch.setattr(stage, "package_version", lambda name: None)
    assert {step.result["proof"] for step in rewritten(context)} == {"not run: onnxruntime is not installed"}


def test_without_memory_the_proof_says_so(context: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "attention_bytes", lambda model: 2**60)
    proofs = {step.result["proof"] for step in rewritten(context)}
    assert proofs == {"not run: attention over 16 tokens needs about 1073741824 GiB on the CPU"}


def test_a_limit_of_the_target_is_an_error_before_its_parser_sees_the_graph(
    context: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    low = TargetLimits(name="an old target", max_opset=18)
    monkeypatch.setattr(type(ENGINES[TARGET]), "limits", low)
    with pytest.raises(LimitError, match=r"an old target cannot take this float.* graph: it is of opset 23"):
        passes(context)


def test_weights_that_the_file_does_not_hold_are_named(context: Build, tmp_path: Path) -> None:
    graph = context.plan.graphs[0]
    model = ir.load(context.root / graph.path)
    lost = ir.Value(name="layers.9.lost", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1]))
    model.graph.initializers.add(lost)
    with pytest.raises(
        GraphError, match=r"mod-b1s16\.onnx: no value for layers\.9\.lost in graphs/weights-float32\.data"
    ):
        save_graph(context, model, graph, tmp_path / "graph.onnx")
    assert not (tmp_path / "graph.onnx").exists()


def test_every_target_starts_from_the_portable_graph() -> None:
    for engine in ENGINES.values():
        if engine.from_onnx:
            assert engine.limits.max_opset >= PORTABLE.max_opset


def test_sites_that_the_spec_does_not_declare_are_refused(context: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherSpec(TransformerModel):
        def k_by_layer(self, seq: int) -> dict[Site, int]:
            return {1: 1}

    loaded = context.model("mod")
    assert isinstance(loaded, TransformerModel)
    monkeypatch.setattr(context, "model", lambda kind: OtherSpec(loaded.checkpoint))
    message = r"mod-b1s16\.onnx: marks the routing sites \{1: 2\}, and the spec declares \{1: 1\}$"
    with pytest.raises(GraphError, match=message):
        graphs._portable(context, context.plan.graphs[0])


LONG = Graph(
    path="g.onnx", model="mod", bucket=Bucket(1, 65_536), dtype="float32", target=None, k_by_layer={}
)  # fmt: skip


def attention(tokens: int) -> ir.Model:
    """Causal attention with one head over this many tokens."""
    size = f"float[1,1,{tokens},8]"
    return parsed(f"g ({size} q, {size} k, {size} v) => ({size} y) {{ y = Attention <is_causal: int = 1> (q, k, v) }}")


def test_scores_beyond_memory() -> None:
    message = (
        r"ort-cpu, mod b1s65536: attention over 65536 tokens holds about 1953 GiB of scores, \d+ GiB are free; "
        r"build this bucket for other targets \(--target\), or a shorter one"
    )
    with pytest.raises(LimitError, match=message):
        check_memory(ENGINES["ort-cpu"], LONG, attention(512_000))
    check_memory(ENGINES["ort-cpu"], LONG, attention(64))
    # This target never holds all scores.
    check_memory(ENGINES["inductor"], LONG, attention(512_000))


def test_longer_rows_have_larger_blocks() -> None:
    found = {tokens: fixed_block(ENGINES["openvino"].limits, tokens) for tokens in (1, 128, 4095, 4096, 2**20)}
    assert found == {1: 128, 128: 128, 4095: 128, 4096: 256, 2**20: 256}

"""References for a finished folder's graphs: the same graphs, exported again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from safetensors.torch import load_file, save_file

from mod_export.errors import BuildFolderError, GraphError
from mod_export.graph.weights import write_weights
from mod_export.pipeline import graphs as stage
from mod_export.pipeline.build import Build
from mod_export.pipeline.graphs import fresh_graph
from mod_export.types import DType, Graph

WEIGHTS = "graphs/weights-float32.data"
DENSE = "graphs/dense-b1s16.onnx"


@pytest.fixture
def context(small_copy: Path) -> Build:
    return Build.open(small_copy, None, (), verify=False)


def graph_at(context: Build, path: str) -> Graph:
    return next(graph for graph in context.graphs if graph.path == path)


def test_a_fresh_export_gives_the_bytes_of_the_build_and_is_made_once(context: Build) -> None:
    for target in ("", ".ort-cpu.float32"):
        graph = graph_at(context, DENSE.replace(".onnx", f"{target}.onnx"))
        assert fresh_graph(context, graph) == (context.root / graph.path).read_bytes()
    graph, again = graph_at(context, DENSE), Build.open(context.root, None, (), verify=False)
    assert fresh_graph(again, graph) is fresh_graph(context, graph)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_so_it_does_of_engines_that_write_text(written: Path, role: str) -> None:
    context = Build.open(written, None, (), verify=False)
    graph = next(graph for graph in context.graphs if (graph.role, graph.model, graph.target) == (role, "mod", None))
    assert fresh_graph(context, graph) == (written / graph.path).read_bytes()


def test_the_oldest_are_forgotten(context: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_at(context, DENSE)
    monkeypatch.setattr(stage, "_kept", {"older": b""})
    monkeypatch.setattr(stage, "MOST_KEPT", 1)
    assert list(stage._kept.values()) == [b""]
    assert [fresh_graph(context, graph)] == list(stage._kept.values())


def test_references_follow_the_weights_file(context: Build) -> None:
    """A weights file that stores its tensors elsewhere gives another graph than the cached one."""
    graph = graph_at(context, DENSE)
    before = fresh_graph(context, graph)
    tensors = load_file(context.root / WEIGHTS)
    save_file({**tensors, "aaa": tensors["norm.weight"].clone()}, context.root / WEIGHTS)
    assert fresh_graph(context, graph) != before


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_targets_graph_is_rewritten_like_the_builds_own(context: Build, dtype: DType) -> None:
    write_weights(context.root / "graphs/weights-float16.data", load_file(context.root / WEIGHTS), "float16")
    graph = replace(graph_at(context, DENSE.replace("dense", "mod")), target="tensorrt", dtype=dtype)
    model = ir.from_proto(onnx.load_from_string(fresh_graph(context, graph)))
    locations = {
        name: str(value.const_value.location)
        for name, value in model.graph.initializers.items()
        if isinstance(value.const_value, ir.ExternalTensor)
    }
    assert locations["layers.1.mlp.up_proj.weight"] == f"weights-{dtype}.data"
    assert locations["layers.1.router.projection.weight"] == "weights-float32.data"


def test_a_weights_file_that_is_not_there_or_holds_too_little(context: Build) -> None:
    graph = graph_at(context, DENSE)
    tensors = load_file(context.root / WEIGHTS)
    context.source(graph)  # The model is loaded first, because it reads the same file.
    save_file({name: tensor for name, tensor in tensors.items() if name != "norm.weight"}, context.root / WEIGHTS)
    with pytest.raises(GraphError, match=rf"dense-b1s16\.onnx: no value for norm\.weight in {WEIGHTS}"):
        fresh_graph(context, graph)
    (context.root / WEIGHTS).unlink()
    with pytest.raises(BuildFolderError, match="expected a regular file of weights"):
        fresh_graph(context, graph)

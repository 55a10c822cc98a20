from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mod_export.config import BuildConfig
from mod_export.errors import EngineError
from mod_export.folder.manifest import open_folder
from mod_export.judge import candidates as candidates_module
from mod_export.judge.candidates import Candidate, candidates_from_engines, candidates_from_graphs
from mod_export.types import Bucket, DType, Engine, Graph

B = Bucket(1, 64)


def graph_of(path: str, dtype: DType = "float32", target: str | None = None, bucket: Bucket = B) -> Graph:
    return Graph(path=path, model="mod", bucket=bucket, dtype=dtype, target=target, k_by_layer={1: 8})


def engine_of(path: str, target: str = "ort-cpu", dtype: DType = "float32") -> Engine:
    return Engine(target=target, model="mod", bucket=B, dtype=dtype, path=path, weights="graphs/weights-float32.data")


PORTABLE = graph_of("graphs/mod-b1s64.onnx")


def test_an_engine_that_is_a_graph_knows_which() -> None:
    cuda_graph = graph_of("graphs/mod-b1s64.ort-cuda.float16.onnx", "float16", "ort-cuda")
    engines = [
        engine_of("engines/ort-cpu/e.onnx"),
        engine_of("engines/ort-cuda/e.onnx", "ort-cuda", "float16"),
        engine_of("engines/inductor/e.pt2", "inductor"),
    ]
    first, second, third = candidates_from_engines(engines, [cuda_graph, PORTABLE])
    assert (first.graph, second.graph, third.graph) == (PORTABLE, cuda_graph, None)
    assert [candidate.engine for candidate in (first, second, third)] == engines
    assert (second.setting.target, second.setting.dtype, second.path, second.weights) == (
        "ort-cuda", "float16", "engines/ort-cuda/e.onnx", "graphs/weights-float32.data"
    )  # fmt: skip


def test_graphs_of_a_folder_that_no_engine_holds(built: Path) -> None:
    """Every engine of this folder is its target's graph, byte for byte, so portable graphs run separately."""
    manifest = open_folder(built)
    graphs = manifest.graphs
    engines = candidates_from_engines(manifest.engines, graphs)
    assert {one.graph and one.graph.path for one in engines} == {one.path for one in graphs if one.target == "ort-cpu"}

    def judged(hashes: dict[str, str]) -> dict[str, Candidate]:
        found = candidates_from_graphs(graphs, engines, lambda kind, dtype: f"{dtype}.data", lambda path: hashes[path])
        return {one.path: one for one in found}

    hashes = {path: entry.sha256 for path, entry in manifest.files.items()}
    portable = {one.path for one in graphs if one.target is None}
    assert judged(hashes).keys() == portable
    other = judged(hashes)["graphs/dense-b2s32.onnx"]
    assert (str(other.setting), other.setting.model) == ("portable b2s32 float32", "dense")
    # A graph that an engine contains is judged with the engine.
    same = hashes | {"graphs/dense-b2s32.onnx": hashes["engines/ort-cpu/dense-b2s32-float32.onnx"]}
    assert judged(same).keys() == portable - {"graphs/dense-b2s32.onnx"}


def graphs_only(*graphs: Graph) -> list[str]:
    return [
        candidate.setting.target
        for candidate in candidates_from_graphs(graphs, [], lambda kind, dtype: "w.data", lambda path: path)
    ]


def test_graphs_of_targets_that_cannot_run_here_are_run_in_their_place() -> None:
    """Without kernels for it, bfloat16 does not run, and graphs whose engine rounds activations say nothing of it."""
    half = graph_of("h.onnx", "float16", "tensorrt-rtx")
    assert graphs_only(PORTABLE, half, graph_of("b.onnx", "bfloat16", "tensorrt")) == ["portable", "tensorrt-rtx graph"]
    assert graphs_only(graph_of("i.onnx", "int8", "openvino"), graph_of("f.onnx", "float32", "openvino")) == [
        "openvino graph"
    ]


def test_without_onnx_runtime_no_graph_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    # Installed packages are part of the environment too.
    monkeypatch.setattr(candidates_module, "package_version", lambda name: None)
    assert graphs_only(PORTABLE) == []


def test_engines_and_graphs_are_opened_alike(folder: Path, candidate: Candidate, config: BuildConfig) -> None:
    setting = replace(candidate.setting, target="portable")
    alone = replace(candidate, setting=setting, path=candidate.graph.path, engine=None)
    feeds = {"input_ids": np.arange(32).reshape(2, 16), "lengths": np.array([16, 9])}
    zeros = {"layers.1.mlp.down_proj.weight": np.zeros((32, 48), np.float32)}
    results = []
    for weights in (None, zeros):
        for opened in (candidate, alone):
            with opened.open(folder, config, weights) as runner:
                results.append(runner.run(feeds)["logits"])
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[2], results[3])
    assert not np.array_equal(results[0], results[2])
    # Weights that replace others must exist in the graph.
    for opened in (candidate, alone):
        with pytest.raises(EngineError, match=r"ONNX Runtime refuses this graph: .*layers\.9\.weight"):
            opened.open(folder, config, {"layers.9.weight": np.zeros(3, np.float32)})

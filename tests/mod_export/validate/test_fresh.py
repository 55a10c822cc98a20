from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from safetensors.torch import load_file, save_file

from mod_export.build_folder.manifest import open_folder
from mod_export.errors import BuildFolderError, GraphError
from mod_export.export.weights import state_of, write_weights
from mod_export.sources.checkpoint import Model
from mod_export.types import DType, Graph
from mod_export.validate import fresh as fresh_module
from mod_export.validate.candidates import Candidate
from mod_export.validate.fresh import FreshGraphs, structure_of_export
from mod_export.validate.reference import Reference

WEIGHTS = "graphs/weights-float32.data"
ENGINE = "engines/ort-cpu/mod-b2s16-float32.onnx"


def test_a_fresh_export_gives_the_bytes_of_the_build(built: Path, model: Model) -> None:
    (graph,) = [graph for graph in open_folder(built, verify=False).graphs if graph.path == "graphs/mod-b1s64.onnx"]
    fresh = FreshGraphs(built).graph(graph, WEIGHTS, Reference(model.loaded))
    assert fresh == (built / graph.path).read_bytes()


def test_each_graph_is_exported_once(folder: Path, candidate: Candidate, reference: Reference) -> None:
    assert candidate.graph is not None
    first = FreshGraphs(folder).graph(candidate.graph, WEIGHTS, reference)
    assert FreshGraphs(folder).graph(candidate.graph, WEIGHTS, Reference(reference.loaded)) is first


def test_the_oldest_graphs_are_forgotten(
    folder: Path, candidate: Candidate, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fresh_module, "_kept", OrderedDict())
    monkeypatch.setattr(fresh_module, "MOST_KEPT", 1)
    assert candidate.graph is not None
    first = FreshGraphs(folder).graph(candidate.graph, WEIGHTS, reference)
    assert list(fresh_module._kept.values()) == [first]
    (folder / WEIGHTS).rename(folder / "graphs/baseline-float32.data")
    second = FreshGraphs(folder).graph(candidate.graph, "graphs/baseline-float32.data", reference)
    assert list(fresh_module._kept.values()) == [second]


def test_references_follow_the_weights_file(folder: Path, candidate: Candidate, reference: Reference) -> None:
    """Another file with its tensors at other places gives another graph, and not the one that is remembered."""
    assert candidate.graph is not None
    before = FreshGraphs(folder).graph(candidate.graph, WEIGHTS, reference)
    tensors = load_file(folder / WEIGHTS)
    save_file({**tensors, "aaa": tensors["norm.weight"].clone()}, folder / WEIGHTS)
    after = FreshGraphs(folder).graph(candidate.graph, WEIGHTS, reference)
    assert structure_of_export(folder, ENGINE, before).passed
    reasons = structure_of_export(folder, ENGINE, after).reasons
    assert reasons
    assert all("initializer" in reason or "more differences" in reason for reason in reasons)


def test_references_follow_the_name_of_the_weights_file(
    folder: Path, candidate: Candidate, reference: Reference
) -> None:
    """A baseline's twin can have the very sizes of another folder's twin, and its weights elsewhere."""
    assert candidate.graph is not None
    FreshGraphs(folder).graph(candidate.graph, WEIGHTS, reference)
    (folder / WEIGHTS).rename(folder / "graphs/baseline-float32.data")
    fresh = FreshGraphs(folder).graph(candidate.graph, "graphs/baseline-float32.data", reference)
    assert b"baseline-float32.data" in fresh
    assert b"weights-float32.data" not in fresh


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_targets_graph_is_rewritten_like_the_builds_own(
    folder: Path, reference: Reference, candidate: Candidate, dtype: DType
) -> None:
    assert candidate.graph is not None
    write_weights(folder / "graphs/weights-float16.data", state_of(reference.module), "float16")
    graph: Graph = replace(candidate.graph, target="tensorrt", dtype=dtype)
    model = ir.from_proto(
        onnx.load_from_string(FreshGraphs(folder).graph(graph, f"graphs/weights-{dtype}.data", reference))
    )
    held = {
        name: str(value.const_value.location)
        for name, value in model.graph.initializers.items()
        if isinstance(value.const_value, ir.ExternalTensor)
    }
    assert held["layers.1.mlp.up_proj.weight"] == f"weights-{dtype}.data"
    assert held["layers.1.router.projection.weight"] == "weights-float32.data"


def test_a_weights_file_that_is_not_there(folder: Path, candidate: Candidate, reference: Reference) -> None:
    assert candidate.graph is not None
    (folder / WEIGHTS).unlink()
    with pytest.raises(BuildFolderError, match="expected a regular file of weights"):
        FreshGraphs(folder).graph(candidate.graph, WEIGHTS, reference)


@pytest.mark.parametrize("lacking", ["norm.weight", None])
def test_a_weights_file_without_a_place(
    folder: Path, candidate: Candidate, reference: Reference, lacking: str | None
) -> None:
    assert candidate.graph is not None
    tensors = load_file(folder / WEIGHTS)
    save_file({name: one for name, one in tensors.items() if lacking and name != lacking}, folder / WEIGHTS)
    expected = rf"^{WEIGHTS}: no place for {lacking or 'embedding.weight, layers.0'}"
    with pytest.raises(GraphError, match=expected):
        FreshGraphs(folder).graph(candidate.graph, WEIGHTS, reference)


Change = Callable[[ir.Model], object]


@pytest.fixture
def reasons_of(folder: Path, candidate: Candidate, reference: Reference) -> Callable[[Change], tuple[str, ...]]:
    """How the engine's graph differs from a fresh export once it is changed."""

    def reasons(change: Change) -> tuple[str, ...]:
        assert candidate.graph is not None
        model = ir.load(folder / ENGINE)
        change(model)
        (folder / ENGINE).write_bytes(ir.to_proto(model).SerializeToString())
        row = structure_of_export(folder, ENGINE, FreshGraphs(folder).graph(candidate.graph, WEIGHTS, reference))
        assert (row.path, row.checked) == (ENGINE, ("what a fresh export gives",))
        assert row.passed == (not row.reasons)
        return row.reasons

    return reasons


Reasons = Callable[[Change], tuple[str, ...]]


def test_what_was_not_changed(reasons_of: Reasons) -> None:
    assert reasons_of(lambda model: None) == ()


def test_an_attribute(reasons_of: Reasons) -> None:
    def change(model: ir.Model) -> None:
        attention = [node for node in model.graph if node.op_type == "Attention"][1]
        attention.attributes["scale"] = ir.AttrFloat32("scale", 0.2500001)

    (reason,) = reasons_of(change)
    assert reason.startswith("not what a fresh export gives: node ")
    assert reason.endswith(" changed in layers.1")


def test_a_node_too_many_and_one_that_is_missing(reasons_of: Reasons) -> None:
    def change(model: ir.Model) -> None:
        add = [node for node in model.graph if node.op_type == "Add"][-1]
        add.name = "another"

    assert sorted(reason.split()[-3] for reason in reasons_of(change)) == ["added", "missing"]


def test_a_constant(reasons_of: Reasons) -> None:
    def change(model: ir.Model) -> None:
        name, value = next(
            (name, value)
            for name, value in model.graph.initializers.items()
            if value.dtype == ir.DataType.INT64 and not isinstance(value.const_value, ir.ExternalTensor)
        )
        assert value.const_value is not None
        value.const_value = ir.tensor(value.const_value.numpy() + np.int64(1), name=name)

    (reason,) = reasons_of(change)
    assert reason.startswith("not what a fresh export gives: initializer ")
    assert reason.endswith(" changed")


def test_shape_of_an_output_and_opset(reasons_of: Reasons) -> None:
    def change(model: ir.Model) -> None:
        model.graph.outputs[1].shape = ir.Shape([2, 5])
        model.opset_imports[""] = 22

    assert {reason.removeprefix("not what a fresh export gives: ") for reason in reasons_of(change)} >= {
        "opset changed", "input or output routed_0 changed"
    }  # fmt: skip


def test_only_the_first_few_are_named(reasons_of: Reasons) -> None:
    def change(model: ir.Model) -> None:
        for node in model.graph:
            node.name = f"{node.name}_renamed"

    reasons = reasons_of(change)
    assert len(reasons) == 5
    assert reasons[-1].startswith("not what a fresh export gives: and ")
    assert reasons[-1].endswith(" more differences")


@pytest.mark.parametrize("data", [None, b"", b"not a graph at all"])
def test_what_is_no_graph(folder: Path, data: bytes | None) -> None:
    fresh = (folder / ENGINE).read_bytes()
    (folder / ENGINE).unlink() if data is None else (folder / ENGINE).write_bytes(data)
    row = structure_of_export(folder, ENGINE, fresh)
    assert not row.passed
    assert row.reasons[0].startswith(f"{folder / ENGINE}: not a readable ONNX graph (")


def test_what_is_neither_node_nor_weight_is_another_file_still(folder: Path) -> None:
    fresh = (folder / ENGINE).read_bytes()
    model = onnx.load_from_string(fresh)
    model.producer_name = "somebody else"
    (folder / ENGINE).write_bytes(model.SerializeToString())
    row = structure_of_export(folder, ENGINE, fresh)
    assert row.reasons == ("not what a fresh export gives: bytes that are no node, input, output or initializer",)

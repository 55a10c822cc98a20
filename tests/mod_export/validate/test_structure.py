from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from graph_folders import write_graph
from safetensors.torch import load_file, save_file
from small_graphs import make_spec

from mod_export.build_folder.files import FileEntry
from mod_export.engines import ENGINES
from mod_export.export.nodes import NodeWriter
from mod_export.export.weights import digests_of_tensors, state_of
from mod_export.results.structure import StructureRow
from mod_export.types import Bucket, Graph
from mod_export.validate.candidates import Candidate
from mod_export.validate.reference import Reference
from mod_export.validate.structure import (
    structure_of_export,
    structure_of_file,
    structure_of_graph,
    structure_of_weights,
)

WEIGHTS = "graphs/weights-float32.data"
ENGINE = "engines/ort-cpu/mod-b2s16-float32.onnx"
DOWN, UP = "layers.1.mlp.down_proj.weight", "layers.1.mlp.up_proj.weight"


def entry_of(path: Path) -> FileEntry:
    data = path.read_bytes()
    return FileEntry(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def test_a_file_that_was_built(folder: Path) -> None:
    row = structure_of_file(folder, WEIGHTS, entry_of(folder / WEIGHTS))
    assert row == StructureRow(path=WEIGHTS, checked=("the bytes that were built",), passed=True, reasons=())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda path: path.unlink(), r"is missing or not a regular file"),
        (lambda path: path.write_bytes(b"short"), r"has 5 bytes, \d+ were written"),
        (lambda path: path.write_bytes(bytes(path.stat().st_size)), r"has been changed since it was built \(SHA-256"),
    ],
)
def test_a_file_that_was_not(folder: Path, change: Callable[[Path], object], reason: str) -> None:
    entry = entry_of(folder / WEIGHTS)
    change(folder / WEIGHTS)
    row = structure_of_file(folder, WEIGHTS, entry)
    assert not row.passed
    assert re.match(reason, row.reasons[0])


def weights_row(
    folder: Path, reference: Reference, change: Callable[[dict[str, torch.Tensor]], object]
) -> StructureRow:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
    return structure_of_weights(folder, WEIGHTS, digests_of_tensors(state_of(reference.module), "float32"))


def test_weights_are_the_checkpoints_bit_for_bit(folder: Path, reference: Reference) -> None:
    row = weights_row(folder, reference, lambda tensors: None)
    assert row.passed
    assert row.checked == (f"{len(state_of(reference.module))} tensors are the checkpoint's, bit for bit",)


def test_one_bit_of_one_weight(folder: Path, reference: Reference) -> None:
    def flip(tensors: dict[str, torch.Tensor]) -> None:
        tensors[DOWN].view(torch.int32)[3, 4] ^= 1

    row = weights_row(folder, reference, flip)
    assert (row.passed, row.reasons) == (False, (f"{DOWN}: not the checkpoint's values",))


def test_weights_missing_too_many_and_changed(folder: Path, reference: Reference) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in sorted(name for name in tensors if "attention" in name):
            tensors[name] *= 2
        tensors["extra"] = tensors.pop("norm.weight")

    row = weights_row(folder, reference, change)
    changed, missing, more = row.reasons
    listed = [f"layers.0.attention.{name}_proj.weight" for name in ("q", "k", "v", "o")]
    assert changed == f"layers.0.attention_norm.weight, {', '.join(listed[:3])} and 6 more: not the checkpoint's values"
    assert missing == "norm.weight: missing"
    assert more == "extra: not a tensor of the checkpoint"


def test_what_is_no_weights_file(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"not weights")
    row = structure_of_weights(folder, WEIGHTS, {"a": "0"})
    assert row.reasons == (f"{folder / WEIGHTS}: not a weights file, or damaged; delete it and build again",)
    (folder / WEIGHTS).unlink()
    row = structure_of_weights(folder, WEIGHTS, {"a": "0"})
    assert "expected a regular file of weights" in row.reasons[0]


Change = Callable[[ir.Model], object]


@pytest.fixture
def reasons_of(folder: Path, candidate: Candidate) -> Callable[[Change], tuple[str, ...]]:
    """What is found in the engine's graph once it is changed."""

    def reasons(change: Change) -> tuple[str, ...]:
        model = ir.load(folder / ENGINE)
        change(model)
        (folder / ENGINE).write_bytes(ir.to_proto(model).SerializeToString())
        row = structure_of_graph(folder, ENGINE, candidate.graph, 256, [WEIGHTS])
        assert row.passed == (not row.reasons)
        assert (row.path, row.checked[0]) == (ENGINE, "outputs")
        return row.reasons

    return reasons


Reasons = Callable[[Change], tuple[str, ...]]


def external(model: ir.Model, name: str) -> ir.ExternalTensor:
    tensor = model.graph.initializers[name].const_value
    return tensor


def point(model: ir.Model, name: str, offset: int | None, file: str = "weights-float32.data") -> None:
    """Makes a weight refer to another place."""
    tensor = external(model, name)
    value = model.graph.initializers[name]
    value.const_value = ir.ExternalTensor(file, offset, tensor.length, tensor.dtype, shape=value.shape, name=name)


def other_outputs(model: ir.Model) -> None:
    model.graph.outputs[0].shape = ir.Shape([2, 16, 255])
    model.graph.outputs[2].name = "routed_7"


def own_value(model: ir.Model) -> None:
    model.graph.initializers[DOWN].const_value = ir.tensor(np.zeros((32, 48), np.float32), name=DOWN)


def swapped(model: ir.Model) -> None:
    down, norm = external(model, DOWN).offset, external(model, "norm.weight").offset
    point(model, DOWN, norm)
    point(model, "norm.weight", down + 4)


def renamed(model: ir.Model) -> None:
    value = model.graph.initializers.pop(DOWN)
    value.name = "renamed"
    model.graph.initializers["renamed"] = value


def another_shape(model: ir.Model) -> None:
    model.graph.initializers[UP].shape = ir.Shape([32, 48])
    point(model, UP, external(model, UP).offset)


def cast(dtype: ir.DataType) -> Change:
    def change(model: ir.Model) -> None:
        router = next(node for node in model.graph if node.op_type == "MatMul")
        writer = NodeWriter(model.graph, router, "coarse")
        value = writer.op("Cast", router.inputs[0], to=int(dtype))
        router.replace_input_with(0, writer.op("Cast", value, to=1))

    return change


def coarse_scores(model: ir.Model) -> None:
    take = next(node for node in model.graph if node.op_type == "TopK" and node.attributes.get_int("largest", 1))
    writer = NodeWriter(model.graph, take, "coarse")
    take.replace_input_with(0, writer.op("Cast", take.inputs[0], to=10))


def foreign(model: ir.Model) -> None:
    next(node for node in model.graph if node.op_type == "Sigmoid").domain = "com.vendor"
    model.opset_imports["com.vendor"] = 1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            other_outputs,
            (
                "output logits has shape (2, 16, 255), expected (2, 16, 256)",
                "no output routed_1",
                "output routed_7 is not one of this model",
            ),
        ),
        (own_value, (f"{DOWN}: a value of its own in the graph instead of the shared weights",)),
        (
            swapped,
            (
                f"{DOWN}: refers to norm.weight in weights-float32.data",
                "norm.weight: refers to other bytes in weights-float32.data",
            ),
        ),
        (renamed, ("renamed: refers to weights-float32.data, which has no tensor of this name",)),
        (another_shape, (f"{UP}: is FLOAT (32, 48) in the graph and F32 (48, 32) in weights-float32.data",)),
        (
            lambda model: point(model, DOWN, 0, "stale.data"),
            (f"{DOWN}: refers to stale.data, which is no weights file of this folder",),
        ),
        *(
            (cast(dtype), (f": Cast computes in {dtype}, this graph is float32",))
            for dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)
        ),
        (coarse_scores, (": TopK compares FLOAT16 scores, expected float32",)),
        (foreign, ("com.vendor",)),
    ],
)
def test_what_is_wrong_in_a_graph(reasons_of: Reasons, change: Change, expected: tuple[str, ...]) -> None:
    reasons = reasons_of(change)
    for words in expected:
        assert any(words in reason for reason in reasons), reasons


def test_a_sound_graph(reasons_of: Reasons) -> None:
    assert reasons_of(lambda model: None) == ()


@pytest.mark.parametrize("data", [None, b"", b"not a graph at all", b"\x08\x0a"])
def test_what_is_no_graph(folder: Path, candidate: Candidate, data: bytes | None) -> None:
    (folder / ENGINE).unlink() if data is None else (folder / ENGINE).write_bytes(data)
    for row in (
        structure_of_graph(folder, ENGINE, candidate.graph, 256, [WEIGHTS]),
        structure_of_export(folder, ENGINE, (folder / candidate.graph.path).read_bytes()),
    ):
        assert not row.passed
        assert row.reasons[0].startswith(f"{folder / ENGINE}: not a readable ONNX graph (")


def test_a_graph_in_half_precision(tmp_path: Path) -> None:
    job = write_graph(tmp_path, make_spec(), Bucket(2, 16), ENGINES["tensorrt"].dialect, "float16")
    graph: Graph = replace(job.graph, target="tensorrt")
    weights = [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*.data"))]
    row = structure_of_graph(tmp_path, graph.path, graph, 40, weights)
    assert row.passed, row.reasons
    # The same graph, taken for one in float32.
    row = structure_of_graph(tmp_path, graph.path, replace(graph, dtype="float32"), 40, weights)
    assert any("computes in FLOAT16, this graph is float32" in reason for reason in row.reasons)


def test_weights_that_nobody_took_a_fingerprint_of(folder: Path, candidate: Candidate) -> None:
    row = structure_of_graph(folder, ENGINE, candidate.graph, 256, [])
    assert not row.passed
    assert any(
        reason.endswith(f"refers to {Path(WEIGHTS).name}, which is no weights file of this folder")
        for reason in row.reasons
    )


def test_a_function_in_the_graph(folder: Path, candidate: Candidate) -> None:
    proto = onnx.load(folder / ENGINE, load_external_data=False)
    body = [onnx.helper.make_node("Tanh", ["x"], ["y"])]
    opsets = [onnx.helper.make_opsetid("", 23)]
    proto.functions.append(onnx.helper.make_function("", "Sigmoid", ["x"], ["y"], body, opsets))
    (folder / ENGINE).write_bytes(proto.SerializeToString())
    row = structure_of_graph(folder, ENGINE, candidate.graph, 256, [WEIGHTS])
    assert any("holds a function" in reason and "Sigmoid" in reason for reason in row.reasons), row.reasons


@pytest.fixture
def differences_of(folder: Path) -> Callable[[Change], tuple[str, ...]]:
    """How the engine's graph differs from a fresh export once it is changed."""

    def reasons(change: Change) -> tuple[str, ...]:
        fresh = (folder / ENGINE).read_bytes()
        model = ir.load(folder / ENGINE)
        change(model)
        (folder / ENGINE).write_bytes(ir.to_proto(model).SerializeToString())
        row = structure_of_export(folder, ENGINE, fresh)
        assert (row.path, row.checked) == (ENGINE, ("what a fresh export gives",))
        assert row.passed == (not row.reasons)
        return row.reasons

    return reasons


def attribute(model: ir.Model) -> None:
    attention = [node for node in model.graph if node.op_type == "Attention"][1]
    attention.attributes["scale"] = ir.AttrFloat32("scale", 0.2500001)


def constant(model: ir.Model) -> None:
    name, value = next(
        (name, value)
        for name, value in model.graph.initializers.items()
        if value.dtype == ir.DataType.INT64 and not isinstance(value.const_value, ir.ExternalTensor)
    )
    value.const_value = ir.tensor(value.const_value.numpy() + np.int64(1), name=name)


def port_and_opset(model: ir.Model) -> None:
    model.graph.outputs[1].shape = ir.Shape([2, 5])
    model.opset_imports[""] = 22


def another_node(model: ir.Model) -> None:
    [node for node in model.graph if node.op_type == "Add"][-1].name = "another"


def all_nodes(model: ir.Model) -> None:
    for node in model.graph:
        node.name = f"{node.name}_renamed"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda model: None, []),
        (attribute, ["node .* changed in layers.1"]),
        (constant, ["initializer .* changed"]),
        (another_node, ["node .* added in", "node .* missing in"]),
        (port_and_opset, ["opset changed", "input or output routed_0 changed"]),
        # Only the first few are named.
        (all_nodes, ["node .* added in"] * 4 + ["and .* more differences"]),
    ],
)
def test_what_differs_from_a_fresh_export(differences_of: Reasons, change: Change, expected: list[str]) -> None:
    reasons = differences_of(change)
    assert len(reasons) >= len(expected)
    assert bool(reasons) == bool(expected)
    for words in expected:
        assert any(re.match(f"not what a fresh export gives: {words}", reason) for reason in reasons), reasons


def test_what_is_neither_node_nor_weight_is_another_file_still(folder: Path) -> None:
    fresh = (folder / ENGINE).read_bytes()
    model = onnx.load_from_string(fresh)
    model.producer_name = "somebody else"
    (folder / ENGINE).write_bytes(model.SerializeToString())
    row = structure_of_export(folder, ENGINE, fresh)
    assert row.reasons == ("not what a fresh export gives: bytes that are no node, input, output or initializer",)

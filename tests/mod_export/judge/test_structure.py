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

from benchmarks.faults.graph_surgery import Surgery, plant
from mod_export.engines import ENGINES
from mod_export.folder.files import FileEntry
from mod_export.graph.weights import Form, digests_of_tensors, state_of, write_weights
from mod_export.judge.candidates import Candidate
from mod_export.judge.reference import Reference
from mod_export.judge.structure import (
    structure_of_export,
    structure_of_file,
    structure_of_graph,
    structure_of_weights,
)
from mod_export.rows.correctness import StructureRow
from mod_export.types import Bucket, Graph

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


def flipped(tensors: dict[str, torch.Tensor]) -> None:
    tensors[DOWN].view(torch.int32)[3, 4] ^= 1


def changed_missing_and_surplus(tensors: dict[str, torch.Tensor]) -> None:
    for name in tensors:
        if "attention" in name:
            tensors[name] *= 2
    tensors["extra"] = tensors.pop("norm.weight")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda tensors: None, ()),
        # One bit of one weight.
        (flipped, (f"{DOWN}: not the checkpoint's values",)),
        (
            changed_missing_and_surplus,
            (
                "layers.0.attention_norm.weight, layers.0.attention.q_proj.weight, layers.0.attention.k_proj.weight, "
                "layers.0.attention.v_proj.weight and 6 more: not the checkpoint's values",
                "norm.weight: missing",
                "extra: not a tensor of the checkpoint",
            ),
        ),
    ],
)
def test_weights_are_the_checkpoints_bit_for_bit(
    folder: Path, reference: Reference, change: Callable[[dict[str, torch.Tensor]], None], expected: tuple[str, ...]
) -> None:
    tensors, state = load_file(folder / WEIGHTS), state_of(reference.module)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
    row = structure_of_weights(folder, WEIGHTS, digests_of_tensors(state, "float32"))
    assert (row.passed, row.reasons) == (not expected, expected)
    assert row.checked == (f"{len(state)} tensors are the checkpoint's, bit for bit",)


def test_rounded_weights_are_not_called_bit_for_bit(tmp_path: Path) -> None:
    state = {name: torch.ones(32, 32) for name in "abc"}
    forms: dict[str, set[Form]] = {"a": {"int8"}, "b": {"int4", "float"}}
    row = structure_of_weights(tmp_path, "w", write_weights(tmp_path / "w", state, "int4", forms))
    assert row.checked == (
        "2 tensors are the checkpoint's, bit for bit",
        "5 are its weights, rounded to 8 or 4 bits, their scales and zero points",
    )
    assert row.passed


def test_what_is_no_weights_file(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"not weights")
    row = structure_of_weights(folder, WEIGHTS, {"a": "0"})
    assert row.reasons == (f"{folder / WEIGHTS}: not a weights file, or damaged; delete it and build again",)
    (folder / WEIGHTS).unlink()
    row = structure_of_weights(folder, WEIGHTS, {"a": "0"})
    assert "expected a regular file of weights" in row.reasons[0]


Change = Callable[[Surgery], object]


@pytest.fixture
def row_of(folder: Path, candidate: Candidate) -> Callable[..., StructureRow]:
    """Changes the engine's graph, and returns the row about it."""

    def row(change: Change, weights: tuple[str, ...] = (WEIGHTS,)) -> StructureRow:
        plant(folder / ENGINE, change)
        row = structure_of_graph(folder, ENGINE, candidate.graph, weights)
        assert row.passed == (not row.reasons)
        assert (row.path, row.checked[0]) == (ENGINE, "outputs")
        return row

    return row


def point(s: Surgery, name: str, offset: int | None, file: str = "weights-float32.data") -> None:
    """Makes a weight refer to another place."""
    value = s.graph.initializers[name]
    tensor = value.const_value
    value.const_value = ir.ExternalTensor(file, offset, tensor.length, tensor.dtype, shape=value.shape, name=name)


def offset_of(s: Surgery, name: str) -> int:
    return s.graph.initializers[name].const_value.offset


def other_outputs(s: Surgery) -> None:
    s.graph.outputs[0].shape = ir.Shape([2, 16, 255])
    s.graph.outputs[2].name = "routed_7"


def swapped(s: Surgery) -> None:
    down, norm = offset_of(s, DOWN), offset_of(s, "norm.weight")
    point(s, DOWN, norm)
    point(s, "norm.weight", down + 4)


def renamed(s: Surgery) -> None:
    value = s.graph.initializers.pop(DOWN)
    value.name = "renamed"
    s.graph.initializers["renamed"] = value


def another_shape(s: Surgery) -> None:
    s.graph.initializers[UP].shape = ir.Shape([32, 48])
    point(s, UP, offset_of(s, UP))


def cast(dtype: ir.DataType) -> Change:
    return lambda s: s.rounded(s.node(0, "Attention", 0).inputs[0], dtype)


def foreign(s: Surgery) -> None:
    s.node(None, "Sigmoid", 0).domain = "com.vendor"
    s.model.opset_imports["com.vendor"] = 1


def function(s: Surgery) -> None:
    body = [onnx.helper.make_node("Tanh", ["x"], ["y"])]
    made = onnx.helper.make_function("", "Sigmoid", ["x"], ["y"], body, [onnx.helper.make_opsetid("", 23)])
    s.model.functions[("", "Sigmoid", "")] = ir.from_proto(made)


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
        (
            lambda s: s.embed(DOWN, np.zeros((32, 48), np.float32)),
            (f"{DOWN}: a value of its own in the graph instead of the shared weights",),
        ),
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
            lambda s: point(s, DOWN, 0, "stale.data"),
            (f"{DOWN}: refers to stale.data, which is no weights file of this folder",),
        ),
        *(
            (cast(dtype), (f": Cast computes in {dtype}, this graph is float32",))
            for dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
        ),
        (lambda s: s.feed(s.take(1), 0, "Cast", to=10), (": TopK compares FLOAT16 scores, expected float32",)),
        (foreign, ("com.vendor",)),
        (function, ("holds a function",)),
    ],
)
def test_what_is_wrong_in_a_graph(
    row_of: Callable[..., StructureRow], change: Change, expected: tuple[str, ...]
) -> None:
    reasons = row_of(change).reasons
    for words in expected:
        assert any(words in reason for reason in reasons), reasons


def test_a_sound_graph(row_of: Callable[..., StructureRow]) -> None:
    assert row_of(lambda s: None).passed
    # A file without digests is no weights file.
    (reason, *_) = row_of(lambda s: None, ()).reasons
    assert reason.endswith("refers to weights-float32.data, which is no weights file of this folder")


@pytest.mark.parametrize("data", [None, b"", b"not a graph at all", b"\x08\x0a"])
def test_what_is_no_graph(folder: Path, candidate: Candidate, data: bytes | None) -> None:
    (folder / ENGINE).unlink() if data is None else (folder / ENGINE).write_bytes(data)
    for row in (
        structure_of_graph(folder, ENGINE, candidate.graph, [WEIGHTS]),
        structure_of_export(folder, ENGINE, (folder / candidate.graph.path).read_bytes()),
    ):
        assert not row.passed
        assert row.reasons[0].startswith(f"{folder / ENGINE}: not a readable ONNX graph (")


def test_a_graph_in_half_precision(tmp_path: Path) -> None:
    job = write_graph(tmp_path, make_spec(), Bucket(2, 16), ENGINES["tensorrt"].limits, "float16")
    graph: Graph = replace(job.graph, target="tensorrt")
    weights = [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*.data"))]
    row = structure_of_graph(tmp_path, graph.path, graph, weights)
    assert row.passed, row.reasons
    # The same graph is checked as if it were float32.
    row = structure_of_graph(tmp_path, graph.path, replace(graph, dtype="float32"), weights)
    assert any("computes in FLOAT16, this graph is float32" in reason for reason in row.reasons)


def test_a_graph_whose_processor_had_no_bfloat16(tmp_path: Path) -> None:
    job = write_graph(tmp_path, make_spec(), Bucket(2, 16), ENGINES["openvino"].limits, "int8")
    weights = [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*.data"))]
    graph: Graph = replace(job.graph, target="openvino")
    assert structure_of_graph(tmp_path, graph.path, graph, weights).passed
    without = replace(graph, limits_of_machine={"quantized_beside": "float32"})
    row = structure_of_graph(tmp_path, graph.path, without, weights)
    assert any("computes in BFLOAT16, this graph is int8" in reason for reason in row.reasons)


def port_and_opset(s: Surgery) -> None:
    s.graph.outputs[1].shape = ir.Shape([2, 5])
    s.model.opset_imports[""] = 22


def all_nodes(s: Surgery) -> None:
    for node in s.graph:
        node.name = f"{node.name}_renamed"


def constant(s: Surgery) -> None:
    name = next(name for name, value in s.graph.initializers.items() if value.dtype == ir.DataType.INT64)
    s.embed(name, s.graph.initializers[name].const_value.numpy() + np.int64(1))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda s: None, []),
        (lambda s: s.set(s.node(1, "Attention", 0), scale=0.2500001), ["node .* changed in layers.1"]),
        (constant, ["initializer .* changed"]),
        (lambda s: setattr(s.nodes(None, "Add")[-1], "name", "another"), ["node .* added in", "node .* missing in"]),
        (port_and_opset, ["opset changed", "input or output routed_0 changed"]),
        # Only the first few are named.
        (all_nodes, ["node .* added in"] * 4 + ["and .* more differences"]),
    ],
)
def test_what_differs_from_a_fresh_export(folder: Path, change: Change, expected: list[str]) -> None:
    row = structure_of_export(folder, ENGINE, plant(folder / ENGINE, change))
    assert (row.path, row.checked) == (ENGINE, ("what a fresh export gives",))
    assert row.passed == (not row.reasons) == (not expected)
    assert len(row.reasons) >= len(expected)
    for words in expected:
        assert any(re.match(f"not what a fresh export gives: {words}", reason) for reason in row.reasons), row.reasons


def test_what_is_neither_node_nor_weight_is_another_file_still(folder: Path) -> None:
    fresh = plant(folder / ENGINE, lambda s: setattr(s.model, "producer_name", "somebody else"))
    row = structure_of_export(folder, ENGINE, fresh)
    assert row.reasons == ("not what a fresh export gives: bytes that are no node, input, output or initializer",)

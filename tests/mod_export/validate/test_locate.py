"""Where a fault is: planted into real graphs, and looked for with and without a view inside."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from mod_export.config import BuildConfig
from mod_export.errors import EngineError, GraphError
from mod_export.export.nodes import NodeWriter, module_of
from mod_export.results.parity import Located
from mod_export.validate import locate
from mod_export.validate.candidates import Candidate
from mod_export.validate.inputs import Batch
from mod_export.validate.locate import locate_by_depth, locate_in_graph
from mod_export.validate.reference import Reference

ENGINE = "engines/ort-cpu/mod-b2s16-float32.onnx"
Change = Callable[[ir.Model], object]


def change_engine(folder: Path, change: Change) -> bytes:
    """Plants a fault; returns the bytes that were right."""
    fresh = (folder / ENGINE).read_bytes()
    model = ir.load(folder / ENGINE)
    change(model)
    (folder / ENGINE).write_bytes(ir.to_proto(model).SerializeToString())
    return fresh


@pytest.fixture
def found(folder: Path, batches: list[Batch]) -> Callable[[Change], Located | None]:
    return lambda change: locate_in_graph(folder, ENGINE, change_engine(folder, change), batches)


Found = Callable[[Change], Located | None]


def nodes(model: ir.Model, layer: int, op_type: str) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == op_type and module_of(node) == f"layers.{layer}"]


def scaled(model: ir.Model, node: ir.Node, factor: float) -> None:
    """Multiplies what a node reads first."""
    value = node.inputs[0]
    writer = NodeWriter(model.graph, node, "fault")
    node.replace_input_with(0, writer.op("Mul", value, np.array(factor, np.float32)))


def last_product(layer: int, factor: float) -> Change:
    return lambda model: scaled(model, nodes(model, layer, "MatMul")[-1], factor)


def doubled_norm(model: ir.Model) -> None:
    """A norm of twice the stream is the same, but for rounding and epsilon."""
    scaled(model, next(node for node in model.graph if module_of(node) == "norm"), 2.0)


def skipped_layer(model: ir.Model) -> None:
    """The last norm reads what layer 1 was given: it is layer 1 that is missing, and not the norm that is wrong."""
    norm = next(node for node in model.graph if module_of(node) == "norm")
    norm.replace_input_with(0, nodes(model, 1, "MatMul")[0].inputs[0])


def scale(model: ir.Model) -> None:
    nodes(model, 1, "Attention")[0].attributes["scale"] = ir.AttrFloat32("scale", 0.5)


def longer_logits(model: ir.Model) -> None:
    logits = model.graph.outputs[0]
    last = logits.producer()
    writer = NodeWriter(model.graph, last, "fault")
    last.replace_input_with(0, writer.op("Concat", *[last.inputs[0]] * 2, axis=1))
    logits.shape = None


@pytest.mark.parametrize(
    ("change", "layer", "operator", "least", "most"),
    [
        (last_product(0, 1.0001), "layers.0", "MatMul .*, which reads ", 0, 1e-3),
        (last_product(1, 1.0001), "layers.1", "MatMul .*, which reads ", 0, 1e-3),
        # A single bit is enough.
        (last_product(1, 1 + 2.0**-23), "layers.1", "MatMul ", 0, 1e-4),
        (doubled_norm, "norm", "RMSNormalization ", 0, 1e-2),
        (skipped_layer, "layers.1", r"RMSNormalization .*, which reads .* \(layers\.1\)$", 0, 100),
        (scale, "layers.1", "Attention [^,]*$", 0, 100),
    ],
)
def test_the_first_node_that_differs(
    found: Found, change: Change, layer: str, operator: str, least: float, most: float
) -> None:
    row = found(change)
    assert (row.layer, row.allowed) == (layer, 0.0)
    assert re.match(operator, row.operator), row.operator
    assert least < row.error < most
    assert str(row) == (
        f"differs first in {layer}, {row.operator}: differs by {row.error:.3g} from a fresh export, which should give "
        "the same bits"
    )


def test_a_graph_that_is_right_has_no_place(found: Found) -> None:
    assert found(lambda model: None) is None


def test_differences_without_a_number(folder: Path, batches: list[Batch]) -> None:
    """What is not a number, and a value of another shape; the head is the embedding, transposed."""
    sound = (folder / ENGINE).read_bytes()
    changes = (lambda model: scaled(model, nodes(model, 0, "MatMul")[2], float("nan")), longer_logits)
    rows = []
    for change in changes:
        (folder / ENGINE).write_bytes(sound)
        rows.append(locate_in_graph(folder, ENGINE, change_engine(folder, change), batches))
    nan, shape = rows
    assert nan.layer == "layers.0"
    assert np.isnan(nan.error)
    assert (shape.layer, shape.error) == ("head", None)
    assert str(shape) == f"differs first in head, {shape.operator}"


def test_inputs_are_tried_in_turn_until_one_shows_it(folder: Path, batches: list[Batch]) -> None:
    """A fault of padding shows on padded rows only."""

    def change(model: ir.Model) -> None:
        less = next(node for node in model.graph if node.op_type == "Less")
        less.op_type = "LessOrEqual"

    fresh = change_engine(folder, change)
    full = [batch for batch in batches if batch.real_BS.all()]
    assert locate_in_graph(folder, ENGINE, fresh, full) is None
    row = locate_in_graph(folder, ENGINE, fresh, batches)
    assert row.input == "padded"


def test_many_values_are_compared_a_few_at_a_time(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate, "AT_ONCE", 3)
    row = found(lambda model: scaled(model, nodes(model, 1, "MatMul")[-1], 1.5))
    assert row.layer == "layers.1"


@pytest.mark.parametrize("data", [None, b"", b"not a graph at all"])
def test_what_is_no_graph(folder: Path, batches: list[Batch], data: bytes | None) -> None:
    fresh = (folder / ENGINE).read_bytes()
    (folder / ENGINE).unlink() if data is None else (folder / ENGINE).write_bytes(data)
    with pytest.raises(GraphError, match=r"mod-b2s16-float32\.onnx: not a readable ONNX graph \("):
        locate_in_graph(folder, ENGINE, fresh, batches)


def test_a_graph_that_does_not_run(folder: Path, batches: list[Batch]) -> None:
    def change(model: ir.Model) -> None:
        nodes(model, 1, "MatMul")[0].op_type = "NoSuchOperator"

    fresh = change_engine(folder, change)
    with pytest.raises(EngineError, match=r"values\.onnx: ONNX Runtime refuses this graph: .*NoSuchOperator"):
        locate_in_graph(folder, ENGINE, fresh, batches)


# By depth: the engine is asked for its logits only, with the weights of layers silenced.


@pytest.fixture
def by_depth(
    folder: Path, candidate: Candidate, reference: Reference, batches: list[Batch], config: BuildConfig
) -> Callable[[Change], Located | None]:
    def search(change: Change) -> Located | None:
        change_engine(folder, change)
        return locate_by_depth(folder, candidate.engine, reference, batches[:1], config)

    return search


@pytest.mark.parametrize("layer", [0, 1])
def test_the_layer_with_which_the_fault_appears(by_depth: Found, layer: int) -> None:
    row = by_depth(lambda model: scaled(model, nodes(model, layer, "MatMul")[-1], 1.5))
    assert (row.layer, row.operator, row.error) == (f"layers.{layer}", None, None)
    assert str(row) == f"differs first in layers.{layer}"


def test_a_fault_outside_the_layers(by_depth: Found) -> None:
    # A node computes the logits: they are no input of the graph.
    row = by_depth(lambda model: scaled(model, model.graph.outputs[0].producer(), 1.5))
    assert row.layer == "the model outside its layers, or the same in all of them"


def test_a_fault_that_these_inputs_do_not_show(by_depth: Found) -> None:
    assert by_depth(lambda model: None) is None


def test_an_engine_with_its_own_weights_cannot_be_asked(
    folder: Path, candidate: Candidate, reference: Reference, batches: list[Batch], config: BuildConfig
) -> None:
    plan = replace(candidate.engine, weights=None)
    assert locate_by_depth(folder, plan, reference, batches[:1], config) is None

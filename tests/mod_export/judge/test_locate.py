"""Faults are planted into real graphs, and located with and without the values inside the graphs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.faults.fault_table import f32
from benchmarks.faults.graph_surgery import Surgery, plant
from mod_export.config import BuildConfig
from mod_export.errors import EngineError, GraphError
from mod_export.judge import locate
from mod_export.judge.candidates import Candidate
from mod_export.judge.inputs import Batch
from mod_export.judge.locate import locate_in_graph
from mod_export.judge.parity import locate_by_depth
from mod_export.judge.reference import Reference
from mod_export.rows.correctness import Located

ENGINE = "engines/ort-cpu/mod-b2s16-float32.onnx"
Change = Callable[[Surgery], object]
Found = Callable[[Change], Located | None]


@pytest.fixture
def found(folder: Path, batches: list[Batch]) -> Found:
    return lambda change: locate_in_graph(folder, ENGINE, plant(folder / ENGINE, change), batches)


def last_product(layer: int, factor: float) -> Change:
    return lambda s: s.feed(s.node(layer, "MatMul", -1), 0, "Mul", f32(factor))


def doubled_norm(s: Surgery) -> None:
    """Doubles the input of the last norm, which changes only rounding and the effect of epsilon."""
    s.feed(s.node(None, "RMSNormalization", -1), 0, "Mul", f32(2.0))


def skipped_layer(s: Surgery) -> None:
    """The last norm reads an input of layer 1: then layer 1 is missing, and the norm itself is correct."""
    s.node(None, "RMSNormalization", -1).replace_input_with(0, s.node(1, "MatMul", 0).inputs[0])


def longer_logits(s: Surgery) -> None:
    last = s.output("logits").producer()
    last.replace_input_with(0, s.op(last, "Concat", [last.inputs[0]] * 2, {"axis": 1}))
    s.output("logits").shape = None


@pytest.mark.parametrize(
    ("change", "layer", "operator", "least", "most"),
    [
        (last_product(0, 1.0001), "layers.0", "MatMul .*, which reads ", 0, 1e-3),
        (last_product(1, 1.0001), "layers.1", "MatMul .*, which reads ", 0, 1e-3),
        # A single bit is enough.
        (last_product(1, 1 + 2.0**-23), "layers.1", "MatMul ", 0, 1e-4),
        (doubled_norm, "norm", "RMSNormalization ", 0, 1e-2),
        (skipped_layer, "layers.1", r"RMSNormalization .*, which reads .* \(layers\.1\)$", 0, 100),
        (lambda s: s.set(s.node(1, "Attention", 0), scale=0.5), "layers.1", "Attention [^,]*$", 0, 100),
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
    assert found(lambda s: None) is None


def test_differences_without_a_number(folder: Path, batches: list[Batch]) -> None:
    """One value is NaN, the other has another shape; the head is the transposed embedding."""
    fresh = plant(folder / ENGINE, lambda s: s.feed(s.node(0, "MatMul", 2), 0, "Mul", f32(np.nan)))
    nan = locate_in_graph(folder, ENGINE, fresh, batches)
    (folder / ENGINE).write_bytes(fresh)
    shape = locate_in_graph(folder, ENGINE, plant(folder / ENGINE, longer_logits), batches)
    assert nan.layer == "layers.0"
    assert np.isnan(nan.error)
    assert (shape.layer, shape.error) == ("head", None)
    assert str(shape) == f"differs first in head, {shape.operator}"


def test_inputs_are_tried_in_turn_until_one_shows_it(folder: Path, batches: list[Batch]) -> None:
    """A fault of padding shows on padded rows only."""
    fresh = plant(folder / ENGINE, lambda s: setattr(s.node(None, "Less", 0), "op_type", "LessOrEqual"))
    full = [batch for batch in batches if batch.real_BS.all()]
    assert locate_in_graph(folder, ENGINE, fresh, full) is None
    row = locate_in_graph(folder, ENGINE, fresh, batches)
    assert row.input == "padded"


def test_many_values_are_compared_a_few_at_a_time(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate, "AT_ONCE", 3)
    assert found(last_product(1, 1.5)).layer == "layers.1"


@pytest.mark.parametrize("data", [None, b"", b"not a graph at all"])
def test_what_is_no_graph(folder: Path, batches: list[Batch], data: bytes | None) -> None:
    fresh = (folder / ENGINE).read_bytes()
    (folder / ENGINE).unlink() if data is None else (folder / ENGINE).write_bytes(data)
    with pytest.raises(GraphError, match=r"mod-b2s16-float32\.onnx: not a readable ONNX graph \("):
        locate_in_graph(folder, ENGINE, fresh, batches)


def test_a_graph_that_does_not_run(folder: Path, batches: list[Batch]) -> None:
    fresh = plant(folder / ENGINE, lambda s: setattr(s.node(1, "MatMul", 0), "op_type", "NoSuchOperator"))
    with pytest.raises(EngineError, match=r"values\.onnx: ONNX Runtime refuses this graph: .*NoSuchOperator"):
        locate_in_graph(folder, ENGINE, fresh, batches)


# By depth: only the logits of the engine are read, while weights of layers are set to zero.


@pytest.fixture
def by_depth(
    folder: Path, candidate: Candidate, reference: Reference, batches: list[Batch], config: BuildConfig
) -> Callable[..., Located | None]:
    def search(change: Change, engine: Candidate = candidate) -> Located | None:
        plant(folder / ENGINE, change)
        return locate_by_depth(folder, engine, reference, batches[:1], config)

    return search


@pytest.mark.parametrize("layer", [0, 1])
def test_the_layer_with_which_the_fault_appears(by_depth: Found, layer: int) -> None:
    row = by_depth(last_product(layer, 1.5))
    assert (row.layer, row.operator, row.error) == (f"layers.{layer}", None, None)
    assert str(row) == f"differs first in layers.{layer}"


def test_a_fault_outside_the_layers(by_depth: Found) -> None:
    row = by_depth(lambda s: s.feed(s.output("logits").producer(), 0, "Mul", f32(1.5)))
    assert row.layer == "the model outside its layers, or the same in all of them"


def test_a_fault_that_these_inputs_do_not_show(by_depth: Found) -> None:
    assert by_depth(lambda s: None) is None


def test_an_engine_with_its_own_weights_cannot_be_asked(
    by_depth: Callable[..., Located | None], candidate: Candidate
) -> None:
    assert by_depth(last_product(0, 1.5), replace(candidate, weights=None)) is None

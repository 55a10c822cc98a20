"""Parity on real graphs: what is right passes, a near-tie is reported as one, planted faults are found and named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from small_graphs import portable_graph, session

from mod_export.config import config_from_toml
from mod_export.engines.ort_session import OrtRunner
from mod_export.export.nodes import NodeWriter, constant_array
from mod_export.results.parity import ParityRow
from mod_export.types import Bucket, Setting
from mod_export.validate.checks import judge
from mod_export.validate.inputs import Batch, parity_batches
from mod_export.validate.parity import compare_runner
from mod_export.validate.reference import Reference
from mod_models.architecture import LoadedTransformer
from mod_models.spec import ModelSpec

Judge = Callable[[ir.Model], ParityRow]
Change = Callable[[ir.Model], object]


def taking(model: ir.Model) -> list[ir.Node]:
    """The selections, in the order of the layers."""
    return [node for node in model.graph if node.op_type == "TopK" and node.attributes.get_int("largest", 1)]


def put_before(model: ir.Model, node: ir.Node, index: int, op_type: str, array: np.ndarray) -> None:
    """Puts one operation with a constant between a node and its input."""
    value = node.inputs[index]
    writer = NodeWriter(model.graph, node, "fault")
    node.replace_input_with(index, writer.op(op_type, value, array.astype(np.float32)))


def test_a_sound_graph_passes(graph: ir.Model, row_of: Judge) -> None:
    row = row_of(graph)
    assert row.passed, row.reasons
    assert row.inputs == ("padded", "random", "text", "ties")
    # The candidate rounds as the reference does.
    assert 0 < row.rounding_error < 1e-5
    assert 0 < row.error.mean_abs < row.error.rms < row.error.max_abs < 4 * row.rounding_error
    assert row.next_token_agreement == 1.0
    assert 0 <= row.kl < 1e-9
    assert row.text.tokens == 2 * 2 * 15
    assert row.text.perplexity > 1


def test_perplexity_is_the_models_own(
    graph: ir.Model, row_of: Judge, reference: Reference, batches: list[Batch]
) -> None:
    nll = []
    for batch in batches:
        if batch.kind == "text":
            logits_BSV = reference.free(batch).logits_BSV.astype(np.float64)
            log_p_BSV = logits_BSV - np.log(np.exp(logits_BSV).sum(-1, keepdims=True))
            nll += [-log_p_BSV[b, s - 1, batch.ids_BS[b, s]] for b in range(len(log_p_BSV)) for s in range(1, 16)]
    text = row_of(graph).text
    assert math.isclose(text.reference_perplexity, math.exp(np.mean(nll)), rel_tol=1e-9)
    assert math.isclose(text.perplexity, text.reference_perplexity, rel_tol=1e-5)


def test_routing_is_counted_by_layer_and_by_input(graph: ir.Model, row_of: Judge, batches: list[Batch]) -> None:
    routing = row_of(graph).routing
    slots = [sum(min(4, int(length)) for length in batch.lengths_B) for batch in batches]
    assert [layer.layer for layer in routing.layers] == [0, 1]
    assert all((layer.k, layer.routed, layer.faults) == (4, sum(slots), 0) for layer in routing.layers)
    assert routing.routed == 2 * sum(slots)
    assert [item.input for item in routing.by_input] == [batch.kind for batch in batches]
    assert [item.routed for item in routing.by_input] == [2 * slot for slot in slots]
    # Of one token over and over, all scores of the first layer are equal.
    assert routing.layers[0].min_margin == routing.min_margin == 0.0
    assert routing.layers[0].agreed == routing.layers[0].routed


def test_a_flipped_near_tie_is_reported_as_what_it_is(graph: ir.Model, row_of: Judge, spec: ModelSpec) -> None:
    sound = row_of(portable_graph(spec, 2, 16))
    # So little that it only decides between equal scores, of which it takes the later.
    put_before(graph, taking(graph)[0], 0, "Add", np.arange(16)[None] * 1e-7)
    row = row_of(graph)
    assert row.passed, row.reasons
    flipped = row.routing.routed - row.routing.agreed
    assert flipped > sound.routing.routed - sound.routing.agreed
    assert row.routing.layers[0].near_ties >= 2 * 8
    assert row.routing.layers[0].faults == 0
    # The reference was given the same choice, so that its logits say nothing else.
    assert row.error.max_abs < 1e-5


def behind(model: ir.Model, index: int, make: Callable[[NodeWriter, ir.Value], ir.Value]) -> None:
    """Puts a computation behind an output of the graph; its result takes the output's name and position."""
    value = model.graph.outputs[index]
    name, value.name = value.name, "inner"
    anchor = ir.node("Identity", [value])
    model.graph.append(anchor)
    made = make(NodeWriter(model.graph, anchor, "behind"), value)
    made.name = name
    model.graph.remove(anchor)
    model.graph.outputs[index] = made


def wrong_choice(model: ir.Model) -> None:
    put_before(model, taking(model)[1], 0, "Add", np.linspace(0, 50, 16)[None])


def wrong_gate(model: ir.Model) -> None:
    gates = [
        node
        for node in model.graph
        if node.op_type == "Unsqueeze" and node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.FLOAT
    ]
    put_before(model, gates[1], 0, "Mul", np.array([1.5]))


def swap(one: str, other: str) -> Change:
    def change(model: ir.Model) -> None:
        arrays = {name: constant_array(model.graph.initializers[name]) for name in (one, other)}
        for name, source in ((one, other), (other, one)):
            array = arrays[source]
            model.graph.initializers[name].const_value = ir.tensor(array.copy(), name=name)

    return change


def unsorted(model: ir.Model) -> None:
    take = taking(model)[1]
    ascending = next(use.node for use in take.outputs[1].uses()).outputs[0]
    name = ascending.name
    ir.convenience.replace_all_uses_with(ascending, take.outputs[1], replace_graph_outputs=True)
    ascending.name, take.outputs[1].name = "unused", name


def outside(model: ir.Model) -> None:
    behind(model, 2, lambda writer, value: writer.op("Add", value, np.array(9)))


def not_numbers(model: ir.Model) -> None:
    last = model.graph.outputs[0].producer()
    put_before(model, last, 0, "Mul", np.array([np.nan]))


def shorter(model: ir.Model) -> None:
    behind(model, 0, lambda writer, value: writer.op("Gather", value, np.arange(15), axis=1))


def one_more(model: ir.Model) -> None:
    more = ir.node("Identity", [model.graph.outputs[0]])
    model.graph.append(more)
    more.outputs[0].name, more.outputs[0].dtype = "hidden", ir.DataType.FLOAT
    more.outputs[0].shape = model.graph.outputs[0].shape
    model.graph.outputs.append(more.outputs[0])


@pytest.mark.parametrize(
    ("change", "expected", "absent"),
    [
        (
            wrong_choice,
            ("layer 1 routing: ", " tokens differ by more than a near-tie, the worst is "),
            ("logits", "layer 0"),
        ),
        (wrong_gate, ("logits: max abs error ",), ("layer",)),
        (
            swap("layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"),
            ("logits: max abs error ",),
            ("layer 0 routing: ",),
        ),
        (
            swap("layers.0.router.projection.weight", "layers.1.router.projection.weight"),
            ("layer 0 routing: ", "layer 1 routing: "),
            (),
        ),
        (
            lambda model: model.graph.outputs.pop(),
            ("random: layer 1 routing: the engine gives no routed positions, expected [2, 4]",),
            ("layer 0",),
        ),
        (unsorted, ("random: layer 1 routing: positions are not ascending, or not unique",), ("layer 0",)),
        (outside, ("layer 1 routing: positions from ", "in a row of 16"), ("layer 0",)),
        (
            not_numbers,
            (
                "random: logits: max abs error nan given the same routing",
                "random: logits: root mean square error nan given",
                "random: next token: divergence nan nats given",
                "next token: 0.0000% agree",
                "text: log perplexity is nan nats from the reference's",
            ),
            (),
        ),
        (shorter, ("outputs: the engine gives logits of shape [2, 15, 256], expected [2, 16, 256]", "error nan"), ()),
        (
            lambda model: model.graph.outputs.pop(0),
            ("outputs: the engine gives no logits, expected [2, 16, 256]", "error nan"),
            ("routing: ",),
        ),
        (one_more, ("outputs: the engine gives hidden, which this model does not have",), ("layer", "logits:")),
    ],
)
def test_a_fault_is_named(
    graph: ir.Model, row_of: Judge, change: Change, expected: tuple[str, ...], absent: tuple[str, ...]
) -> None:
    change(graph)
    row = row_of(graph)
    assert not row.passed
    for words in expected:
        assert any(words in reason for reason in row.reasons), row.reasons
    for words in absent:
        assert not any(words in reason for reason in row.reasons), row.reasons
    for layer in row.routing.layers:
        differs = any(f"layer {layer.layer} routing: " in reason and "differ" in reason for reason in row.reasons)
        assert (layer.faults > 0) == differs


def test_one_slot_too_few_is_named_with_its_layer(row_of: Judge, spec: ModelSpec) -> None:
    fewer = portable_graph(replace(spec, routing=replace(spec.routing, capacity=0.2)), 2, 16)
    row = row_of(fewer)
    assert not row.passed
    for layer in (0, 1):
        message = f"random: layer {layer} routing: the engine gives routed positions of shape [2, 3], expected [2, 4]"
        assert message in row.reasons
    assert row.routing.agreed == 0


def test_padding_is_not_compared(graph: ir.Model, row_of: Judge) -> None:
    """Whatever the logits of padding are, nobody reads them."""
    real = next(node.outputs[0] for node in graph.graph if node.op_type == "Less")

    def masked(writer: NodeWriter, value: ir.Value) -> ir.Value:
        return writer.op("Where", writer.op("Unsqueeze", real, [-1]), value, np.array(np.nan, np.float32))

    behind(graph, 0, masked)
    row = row_of(graph)
    assert row.passed, row.reasons


def test_a_dense_engine_has_no_routing_and_reads_no_lengths(loaded: LoadedTransformer) -> None:
    dense = loaded.dense()
    model = portable_graph(dense.checkpoint.spec, 2, 16)
    for name, value in model.graph.initializers.items():
        if name in dense.weights:
            value.const_value = ir.tensor(dense.weights[name].numpy(), name=name)
    model.graph.inputs.pop()
    with OrtRunner(session(model), "dense", 1) as runner:
        assert runner.inputs == ("input_ids",)
        found = compare_runner(runner, Reference(dense), parity_batches(dense, Bucket(2, 16), 0, 1))
    gate = config_from_toml(None).parity.float32
    setting = Setting(target="ort-cpu", dtype="float32", model="dense", role="forward", bucket=Bucket(2, 16))
    row = judge(found, gate, setting)
    assert row.passed, row.reasons
    assert (row.routing.layers, row.routing.routed, row.routing.min_margin) == ((), 0, None)


def test_rows_of_a_single_token_have_no_perplexity(loaded: LoadedTransformer, spec: ModelSpec) -> None:
    model = portable_graph(spec, 1, 1)
    with OrtRunner(session(model), "candidate", 1) as runner:
        found = compare_runner(runner, Reference(loaded), parity_batches(loaded, Bucket(1, 1), 0, 1, 2))
    assert "text" in {one.kind for one in found}
    assert all(one.text is None for one in found)
    gate = config_from_toml(None).parity.float32
    setting = Setting(target="ort-cpu", dtype="float32", model="mod", role="forward", bucket=Bucket(1, 1))
    row = judge(found, gate, setting)
    assert row.passed, row.reasons


def test_rounding_is_measured_on_one_input_of_each_kind_first(
    graph: ir.Model, reference: Reference, batches: list[Batch]
) -> None:
    with OrtRunner(session(graph), "candidate", 1) as runner:
        some, every = (compare_runner(runner, reference, batches, rounding) for rounding in ("some", "all"))
    assert [one.kind for one in some if one.rounding] == ["text", "random", "ties"]
    assert all(one.rounding for one in every)
    assert [one.error for one in some] == [one.error for one in every]

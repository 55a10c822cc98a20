"""Parity on real graphs: what is right passes, a near-tie is reported as one, planted faults are found and named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir
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


def taking(model: ir.Model) -> list[ir.Node]:
    """The selections, in the order of the layers."""
    return [node for node in model.graph if node.op_type == "TopK" and node.attributes.get_int("largest", 1)]


def put_before(model: ir.Model, node: ir.Node, index: int, op_type: str, array: np.ndarray) -> None:
    """Puts one operation with a constant between a node and its input."""
    value = node.inputs[index]
    assert value is not None
    assert value.dtype is not None
    writer = NodeWriter(model.graph, node, "fault")
    constant = writer.constant(f"fault_{node.name}", array.astype(np.float32))
    node.replace_input_with(index, writer.op(op_type, [value, constant], value.dtype, value.shape))


def test_a_sound_graph_passes(graph: ir.Model, row_of: Judge) -> None:
    row = row_of(graph)
    assert row.passed, row.reasons
    assert row.inputs == ("padded", "random", "text", "ties")
    # The candidate rounds as the reference does.
    assert row.rounding_error is not None
    assert 0 < row.rounding_error < 1e-5
    assert 0 < row.error.mean_abs < row.error.rms < row.error.max_abs < 4 * row.rounding_error
    assert row.next_token_agreement == 1.0
    assert 0 <= row.kl < 1e-9
    assert row.text is not None
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
    assert text is not None
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


def test_a_wrong_choice_is_a_fault_of_its_layer(graph: ir.Model, row_of: Judge) -> None:
    put_before(graph, taking(graph)[1], 0, "Add", np.linspace(0, 50, 16)[None])
    row = row_of(graph)
    assert not row.passed
    assert all("layer 1 routing: " in reason for reason in row.reasons)
    assert any(" tokens differ by more than a near-tie, the worst is " in reason for reason in row.reasons)
    assert row.routing.layers[1].faults > 0
    assert row.error.max_abs < 1e-5


def test_a_wrong_gate(graph: ir.Model, row_of: Judge) -> None:
    gates = [
        node
        for node in graph.graph
        if node.op_type == "Unsqueeze" and node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.FLOAT
    ]
    assert len(gates) == 2
    put_before(graph, gates[1], 0, "Mul", np.array([1.5]))
    row = row_of(graph)
    assert not row.passed
    assert any("logits: max abs error " in reason for reason in row.reasons)
    assert not any("layer" in reason for reason in row.reasons)


def swap(model: ir.Model, one: str, other: str) -> None:
    arrays = {name: constant_array(model.graph.initializers[name]) for name in (one, other)}
    for name, source in ((one, other), (other, one)):
        array = arrays[source]
        assert array is not None
        model.graph.initializers[name].const_value = ir.tensor(array.copy(), name=name)


def test_swapped_weights(graph: ir.Model, row_of: Judge) -> None:
    swap(graph, "layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight")
    row = row_of(graph)
    assert not row.passed
    assert any("logits: max abs error " in reason for reason in row.reasons)
    assert not any("layer 0 routing: " in reason for reason in row.reasons)


def test_swapped_routers_are_named_with_their_layers(graph: ir.Model, row_of: Judge) -> None:
    swap(graph, "layers.0.router.projection.weight", "layers.1.router.projection.weight")
    row = row_of(graph)
    for layer in (0, 1):
        assert any(f"layer {layer} routing: " in reason for reason in row.reasons)
        assert row.routing.layers[layer].faults > 0


def test_one_slot_too_few_is_named_with_its_layer(row_of: Judge, spec: ModelSpec) -> None:
    assert spec.routing is not None
    fewer = portable_graph(replace(spec, routing=replace(spec.routing, capacity=0.2)), 2, 16)
    row = row_of(fewer)
    assert not row.passed
    for layer in (0, 1):
        message = f"random: layer {layer} routing: the engine gives routed positions of shape [2, 3], expected [2, 4]"
        assert message in row.reasons
    assert row.routing.agreed == 0


def test_a_layer_that_does_not_say_what_it_routed(graph: ir.Model, row_of: Judge) -> None:
    graph.graph.outputs.pop()
    row = row_of(graph)
    assert "random: layer 1 routing: the engine gives no routed positions, expected [2, 4]" in row.reasons
    assert row.routing.layers[0].agreed == row.routing.layers[0].routed


def test_positions_in_the_order_of_their_scores(graph: ir.Model, row_of: Judge) -> None:
    take = taking(graph)[1]
    ascend = next(use.node for use in take.outputs[1].uses())
    ascending = ascend.outputs[0]
    name = ascending.name
    ir.convenience.replace_all_uses_with(ascending, take.outputs[1], replace_graph_outputs=True)
    ascending.name, take.outputs[1].name = "unused", name
    row = row_of(graph)
    assert "random: layer 1 routing: positions are not ascending, or not unique" in row.reasons
    assert not any("layer 0" in reason for reason in row.reasons)


def test_positions_outside_the_row(graph: ir.Model, row_of: Judge) -> None:
    for index, value in enumerate(graph.graph.outputs):
        if value.name == "routed_1":
            value.name = "inner"
            shifted = ir.node("Add", [value, NodeWriter(graph.graph, graph.graph[0], "").constant("n", np.int64(9))])
            shifted.outputs[0].name, shifted.outputs[0].dtype = "routed_1", ir.DataType.INT64
            shifted.outputs[0].shape = value.shape
            graph.graph.append(shifted)
            graph.graph.outputs[index] = shifted.outputs[0]
    row = row_of(graph)
    assert any("layer 1 routing: positions from " in reason and "in a row of 16" in reason for reason in row.reasons)


def test_logits_that_are_not_numbers(graph: ir.Model, row_of: Judge) -> None:
    last = graph.graph.outputs[0].producer()
    assert last is not None
    put_before(graph, last, 0, "Mul", np.array([np.nan]))
    row = row_of(graph)
    assert not row.passed
    assert any("random: logits: max abs error nan given the same routing" in reason for reason in row.reasons)
    assert any("random: logits: root mean square error nan given" in reason for reason in row.reasons)
    assert any("random: next token: divergence nan nats given" in reason for reason in row.reasons)
    assert any("next token: 0.0000% agree" in reason for reason in row.reasons)
    assert any("text: log perplexity is nan nats from the reference's" in reason for reason in row.reasons)
    assert math.isnan(row.error.max_abs)


def test_padding_is_not_compared(graph: ir.Model, row_of: Judge) -> None:
    # Whatever the logits of padding are, nobody reads them.
    logits = graph.graph.outputs[0]
    logits.name = "inner"
    real = next(node.outputs[0] for node in graph.graph if node.op_type == "Less")
    writer_anchor = ir.node("Identity", [logits])
    graph.graph.append(writer_anchor)
    writer = NodeWriter(graph.graph, writer_anchor, "pad")
    axis = writer.constant("last", np.array([-1], np.int64))
    mask = writer.op("Unsqueeze", [real, axis], ir.DataType.BOOL, (2, 16, 1))
    nan = writer.constant("nan", np.array(np.nan, np.float32))
    outer = writer.op("Where", [mask, logits, nan], ir.DataType.FLOAT, logits.shape)
    outer.name = "logits"
    graph.graph.remove(writer_anchor)
    graph.graph.outputs[0] = outer
    row = row_of(graph)
    assert row.passed, row.reasons


def test_logits_of_another_shape(graph: ir.Model, row_of: Judge) -> None:
    logits = graph.graph.outputs[0]
    logits.name = "inner"
    anchor = ir.node("Identity", [logits])
    graph.graph.append(anchor)
    writer = NodeWriter(graph.graph, anchor, "cut")
    first = writer.constant("first", np.arange(15))
    fewer = writer.op("Gather", [logits, first], ir.DataType.FLOAT, (2, 15, 256), {"axis": 1})
    fewer.name = "logits"
    graph.graph.remove(anchor)
    graph.graph.outputs[0] = fewer
    row = row_of(graph)
    assert "outputs: the engine gives logits of shape [2, 15, 256], expected [2, 16, 256]" in row.reasons
    assert math.isnan(row.error.max_abs)


def test_no_logits(graph: ir.Model, row_of: Judge) -> None:
    graph.graph.outputs.pop(0)
    row = row_of(graph)
    assert "outputs: the engine gives no logits, expected [2, 16, 256]" in row.reasons
    assert math.isnan(row.error.max_abs)
    assert row.routing.agreed == row.routing.routed


def test_an_output_too_many(graph: ir.Model, row_of: Judge) -> None:
    more = ir.node("Identity", [graph.graph.outputs[0]])
    graph.graph.append(more)
    more.outputs[0].name, more.outputs[0].dtype = "hidden", ir.DataType.FLOAT
    more.outputs[0].shape = graph.graph.outputs[0].shape
    graph.graph.outputs.append(more.outputs[0])
    row = row_of(graph)
    assert row.reasons == ("outputs: the engine gives hidden, which this model does not have",)


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

"""Parity on real graphs: correct graphs pass, near-ties are reported as such, planted faults are found and named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from small_graphs import portable_graph

from benchmarks.faults.fault_table import f32, gate_mul, i64
from benchmarks.faults.graph_surgery import Surgery
from mod_export.judge.inputs import Batch, parity_batches
from mod_export.judge.reference import Reference
from mod_export.model.transformer import TransformerModel
from mod_export.rows.correctness import ParityRow
from mod_export.types import Bucket
from mod_models.spec import ModelSpec

Judge = Callable[..., ParityRow]
Change = Callable[[Surgery], object]


def test_a_sound_graph_passes(graph: ir.Model, row_of: Judge) -> None:
    row = row_of(graph)
    assert row.passed, row.reasons
    assert row.inputs == ("padded", "random", "text", "ties")
    # The candidate's rounding error is like the reference's.
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
    # In a row of one repeated token, all scores of the first layer are equal.
    assert routing.layers[0].min_margin == routing.min_margin == 0.0
    assert routing.layers[0].agreed == routing.layers[0].routed


def test_a_flipped_near_tie_is_reported_as_what_it_is(graph: ir.Model, row_of: Judge, spec: ModelSpec) -> None:
    sound = row_of(portable_graph(spec, 2, 16))
    # The change is so small that it only decides between equal scores, in favour of the later token.
    s = Surgery(graph)
    s.feed(s.take(0), 0, "Add", f32(*np.arange(16) * 1e-7))
    row = row_of(graph)
    assert row.passed, row.reasons
    flipped = row.routing.routed - row.routing.agreed
    assert flipped > sound.routing.routed - sound.routing.agreed
    assert row.routing.layers[0].near_ties >= 2 * 8
    assert row.routing.layers[0].faults == 0
    # The reference gets the same selection, so its logits do not differ.
    assert row.error.max_abs < 1e-5


def wrong_choice(s: Surgery) -> None:
    s.feed(s.take(1), 0, "Add", f32(*np.linspace(0, 50, 16)))


def swap(one: str, other: str) -> Change:
    def change(s: Surgery) -> None:
        first, second = (s.graph.initializers[name].const_value.numpy() for name in (one, other))
        s.embed(one, second)
        s.embed(other, first)

    return change


def unsorted(s: Surgery) -> None:
    take = s.take(1)
    s.replace(next(use.node for use in take.outputs[1].uses()).outputs[0], take.outputs[1])


def outside(s: Surgery) -> None:
    """Changes the positions that the engine reports, not the tokens that it runs."""
    routed = s.output("routed_1")
    reported = s.op(s.output("logits").producer(), "Add", [routed, i64(9)])
    routed.name, reported.name = "inner", "routed_1"
    s.graph.outputs[s.graph.outputs.index(routed)] = reported


def shorter(s: Surgery) -> None:
    s.after(s.output("logits"), "Gather", np.arange(15), axis=1).shape = ir.Shape([2, 15, 256])


def one_more(s: Surgery) -> None:
    hidden = s.op(s.output("logits").producer(), "Identity", [s.node(None, "RMSNormalization", -1).outputs[0]])
    hidden.name = "hidden"
    s.graph.outputs.append(hidden)


@pytest.mark.parametrize(
    ("change", "expected", "absent"),
    [
        (
            wrong_choice,
            ("layer 1 routing: ", " tokens differ by more than a near-tie, the worst is "),
            ("logits", "layer 0"),
        ),
        (lambda s: s.feed(gate_mul(s), 0, "Mul", f32(1.5)), ("logits: max abs error ",), ("layer",)),
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
            lambda s: s.graph.outputs.pop(),
            ("text: layer 1 routing: the engine gives no routed positions, expected [2, 4], and on 14 more inputs",),
            ("layer 0",),
        ),
        (unsorted, ("text: layer 1 routing: positions are not ascending, or not unique, and on ",), ("layer 0",)),
        (outside, ("layer 1 routing: positions from ", "in a row of 16"), ("layer 0",)),
        (
            lambda s: s.feed(s.output("logits").producer(), 0, "Mul", f32(np.nan)),
            (
                "text: logits: max abs error nan given the same routing",
                "text: logits: root mean square error nan given",
                "text: next token: divergence nan nats given",
                "next token: 0.0000% agree",
                "text: log perplexity is nan nats from the reference's",
            ),
            (),
        ),
        (shorter, ("outputs: the engine gives logits of shape [2, 15, 256], expected [2, 16, 256]", "error nan"), ()),
        (
            lambda s: s.graph.outputs.pop(0),
            ("outputs: the engine gives no logits, expected [2, 16, 256]", "error nan"),
            ("routing: ",),
        ),
        (one_more, ("outputs: the engine gives hidden, which this model does not have",), ("layer", "logits:")),
    ],
)
def test_a_fault_is_named(
    graph: ir.Model, row_of: Judge, change: Change, expected: tuple[str, ...], absent: tuple[str, ...]
) -> None:
    change(Surgery(graph))
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
        message = f"text: layer {layer} routing: the engine gives routed positions of shape [2, 3], expected [2, 4]"
        assert f"{message}, and on 14 more inputs" in row.reasons
    assert row.routing.agreed == 0


def test_padding_is_not_compared(graph: ir.Model, row_of: Judge) -> None:
    """Logits of padding may have any value, because nothing reads them."""
    s = Surgery(graph)
    last = s.output("logits").producer()
    real_BS1 = s.op(last, "Unsqueeze", [s.node(None, "Less", 0).outputs[0], i64(-1)])
    real_BS1.shape = ir.Shape([2, 16, 1])
    poison_BS1 = s.op(last, "Where", [real_BS1, f32(0.0), f32(np.nan)])
    poison_BS1.dtype = ir.DataType.FLOAT
    s.after(s.output("logits"), "Add", poison_BS1)
    row = row_of(graph)
    assert row.passed, row.reasons


def test_a_dense_engine_has_no_routing_and_reads_no_lengths(row_of: Judge, loaded: TransformerModel) -> None:
    dense = loaded.dense()
    model = portable_graph(dense.checkpoint.spec, 2, 16)
    for name, value in model.graph.initializers.items():
        if name in dense.weights:
            value.const_value = ir.tensor(dense.weights[name].numpy(), name=name)
    model.graph.inputs.pop()
    assert [value.name for value in model.graph.inputs] == ["input_ids"]
    row = row_of(model, Reference(dense), parity_batches(dense, Bucket(2, 16), [], 0, 1))
    assert row.passed, row.reasons
    assert (row.routing.layers, row.routing.routed, row.routing.min_margin) == ((), 0, None)


def test_rows_of_a_single_token_have_no_perplexity(row_of: Judge, loaded: TransformerModel, spec: ModelSpec) -> None:
    row = row_of(portable_graph(spec, 1, 1), on=parity_batches(loaded, Bucket(1, 1), [1], 0, 1, 2))
    assert row.passed, row.reasons
    assert "text" in row.inputs
    assert row.text is None

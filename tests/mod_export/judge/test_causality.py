from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from small_graphs import make_spec, parsed, portable_graph, session

from mod_export.engines.ort_session import OrtRunner
from mod_export.judge.causality import cuts, probe_causality
from mod_export.judge.inputs import Batch
from mod_export.judge.reference import Reference
from mod_export.model.transformer import TransformerModel
from mod_export.rows.correctness import CausalityRow
from mod_export.types import Bucket, Setting
from mod_models.checkpoint import random_checkpoint

SETTING = Setting(target="ort-cpu", dtype="float32", model="mod", role="forward", bucket=Bucket(2, 16))
REFERENCE = Reference(TransformerModel(random_checkpoint(replace(make_spec(), vocab_size=256), seed=0)))
TEXT = Batch.of_tokens("text", np.random.default_rng(0).integers(0, 256, (2, 16)), np.array([16, 16]))


def probe(model: ir.Model, tolerance: float = 1e-5) -> CausalityRow:
    with OrtRunner(session(model), "candidate", 1) as runner:
        return probe_causality(runner, REFERENCE, TEXT, SETTING, suffixes=4, tolerance=tolerance, seed=0)


def running(function: str, batch: int = 2, seq: int = 16) -> ir.Model:
    """A graph of logits (B, S, 1) for a vocabulary of one; `function` computes y (B, S) from x, the ids as floats."""
    types = f"int64[{batch},{seq}] input_ids) => (float[{batch},{seq},1] logits"
    return parsed(
        f"g ({types}) {{ x = Cast <to: int = 1> (input_ids) axis = Constant <value_int: int = 1> () {function} "
        "last = Constant <value_ints: ints = [2]> () logits = Unsqueeze (y, last) }"
    )


def test_a_routed_model_looks_ahead(graph: ir.Model) -> None:
    row = probe(graph)
    assert not row.causal
    assert 0 <= row.earliest_change < 15
    assert row.largest_change > 1e-3
    assert row.statement == (
        "must not be used for autoregressive sampling: changing the end of a text changed logits from position "
        f"{row.earliest_change} on before the change, by up to {row.largest_change:.2g}; it scores whole texts"
    )


def test_its_dense_baseline_does_not(loaded: TransformerModel) -> None:
    row = probe(portable_graph(loaded.dense().checkpoint.spec, 2, 16))
    assert row.causal
    assert row.earliest_change is None
    assert row.largest_change < 1e-5
    assert row.statement == (
        "no logit before the change moved in 4 tries: nothing speaks against autoregressive sampling"
    )


STEPS = "steps = Constant <value_ints: ints = [2,3,4,5,6,7,8,9,10,11,12,13,14,15,15,15]> () "


@pytest.mark.parametrize(
    ("function", "earliest"),
    [
        ("y = CumSum (x, axis)", None),
        ("y = CumSum <reverse = 1> (x, axis)", 0),
        # Each token sees the two after it, and the earliest of the cuts, at 4, shows the earliest change.
        (STEPS + "y = Gather <axis = 1> (x, steps)", 2),
    ],
)
def test_the_earliest_change_is_that_of_any_ending(function: str, earliest: int | None) -> None:
    row = probe(running(function))
    assert (row.causal, row.earliest_change) == (earliest is None, earliest)
    assert (row.largest_change == 0.0) == row.causal


def test_changes_that_rounding_can_explain_are_none() -> None:
    ahead = running(
        "tiny = Constant <value_float: float = 0.001> () all = CumSum <reverse = 1> (x, axis) y = Mul (all, tiny)"
    )
    assert not probe(ahead, tolerance=1e-3).causal
    assert probe(ahead, tolerance=10.0).causal


def test_what_is_not_a_number_is_no_causal_answer() -> None:
    row = probe(running("zero = Sub (x, x) y = Div (zero, zero)"))
    assert not row.causal
    assert np.isnan(row.largest_change)


@pytest.mark.parametrize(
    ("seq", "count", "expected"),
    [(16, 4, [4, 7, 11, 15]), (512, 2, [128, 511]), (4, 9, [1, 2, 3]), (2, 4, [1]), (1, 4, []), (64, 1, [16])],
)
def test_cuts_are_spread_and_leave_something_on_both_sides(seq: int, count: int, expected: list[int]) -> None:
    assert cuts(seq, count) == expected


@pytest.mark.parametrize(("seq", "vocabulary", "tried"), [(16, 256, 9), (2, 256, 1), (1, 256, 0), (4, 1, 0)])
def test_a_row_says_how_many_endings_were_tried(seq: int, vocabulary: int, tried: int) -> None:
    """A single token has nothing before a change, and a vocabulary of one token has no other endings."""
    loaded = TransformerModel(random_checkpoint(replace(make_spec(), vocab_size=vocabulary), seed=0))
    batch = Batch.of_tokens("text", np.zeros((1, seq), np.int64), np.array([seq]))
    with OrtRunner(session(running("y = Identity (x)", 1, seq)), "candidate", 1) as runner:
        assert runner.inputs == ("input_ids",)  # An engine that reads no lengths gets none.
        row = probe_causality(runner, Reference(loaded), batch, SETTING, suffixes=9, tolerance=1e-5, seed=0)
    assert (row.causal, row.suffixes) == (True, tried)
    not_probed = "not probed: with a single token there is nothing before a change; ask a longer bucket"
    assert (row.statement == not_probed) == (tried == 0)

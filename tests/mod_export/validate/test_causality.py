from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from small_graphs import make_spec, parsed, portable_graph, session

from mod_export.engines.ort_session import OrtRunner
from mod_export.results.structure import CausalityRow
from mod_export.types import Bucket, Setting
from mod_export.validate.causality import cuts, probe_causality
from mod_export.validate.inputs import Batch
from mod_export.validate.reference import Reference
from mod_models.architecture import LoadedTransformer
from mod_models.checkpoint import random_checkpoint

SETTING = Setting(target="ort-cpu", dtype="float32", model="mod", role="forward", bucket=Bucket(2, 16))
REFERENCE = Reference(LoadedTransformer(random_checkpoint(replace(make_spec(), vocab_size=256), seed=0)))
TEXT = Batch("text", np.random.default_rng(0).integers(0, 256, (2, 16)), np.array([16, 16]))


def probe(model: ir.Model, *, tolerance: float = 1e-5, suffixes: int = 4, batch: Batch = TEXT) -> CausalityRow:
    with OrtRunner(session(model), "candidate", 1) as runner:
        return probe_causality(runner, REFERENCE, batch, SETTING, suffixes=suffixes, tolerance=tolerance, seed=0)


def running(function: str, batch: int = 2, seq: int = 16) -> ir.Model:
    """Logits of a vocabulary of one, from the ids x: float (B, S, 1)."""
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


def test_its_dense_baseline_does_not(loaded: LoadedTransformer) -> None:
    row = probe(portable_graph(loaded.dense().checkpoint.spec, 2, 16))
    assert row.causal
    assert row.earliest_change is None
    assert row.largest_change < 1e-5
    assert row.statement == (
        "no logit before the change moved in 4 tries: nothing speaks against autoregressive sampling"
    )


def test_a_sum_of_what_came_before_is_causal() -> None:
    row = probe(running("y = CumSum (x, axis)"))
    assert row.causal
    assert row.largest_change == 0.0


def test_a_sum_of_what_comes_after_is_not() -> None:
    row = probe(running("y = CumSum <reverse = 1> (x, axis)"))
    assert not row.causal
    assert row.earliest_change == 0


def test_the_earliest_change_is_that_of_any_ending() -> None:
    """Each token sees the two after it, so that the earliest cut shows the earliest change."""
    positions = running(
        "steps = Constant <value_ints: ints = [2,3,4,5,6,7,8,9,10,11,12,13,14,15,15,15]> () "
        "y = Gather <axis = 1> (x, steps)"
    )
    assert cuts(16, 4) == [4, 7, 11, 15]
    assert probe(positions).earliest_change == 2


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


def test_engines_that_read_no_lengths_are_fed_none(graph: ir.Model) -> None:
    assert "lengths" in {value.name for value in graph.graph.inputs}
    model = running("y = Identity (x)")
    assert [value.name for value in model.graph.inputs] == ["input_ids"]
    assert probe(model).causal


@pytest.mark.parametrize(
    ("seq", "count", "expected"),
    [(16, 4, [4, 7, 11, 15]), (512, 2, [128, 511]), (4, 9, [1, 2, 3]), (2, 4, [1]), (1, 4, []), (64, 1, [16])],
)
def test_cuts_are_spread_and_leave_something_on_both_sides(seq: int, count: int, expected: list[int]) -> None:
    assert cuts(seq, count) == expected


def test_a_row_says_how_many_endings_were_tried() -> None:
    assert probe(running("y = Identity (x)"), suffixes=9).suffixes == 9
    short = Batch("text", TEXT.ids_BS[:1, :2], np.array([2]))
    assert probe(running("y = Identity (x)", 1, 2), suffixes=9, batch=short).suffixes == 1


def test_a_single_token_says_nothing() -> None:
    row = probe(running("y = Identity (x)", 1, 1), batch=Batch("text", TEXT.ids_BS[:1, :1], np.array([1])))
    assert row.suffixes == 0
    assert row.statement == ("not probed: with a single token there is nothing before a change; ask a longer bucket")


def test_a_vocabulary_of_one_token_has_no_other_endings() -> None:
    lonely = Reference(LoadedTransformer(random_checkpoint(replace(make_spec(), vocab_size=1), seed=0)))
    text = Batch("text", np.zeros((1, 4), np.int64), np.array([4]))
    with OrtRunner(session(running("y = Identity (x)", 1, 4)), "candidate", 1) as runner:
        row = probe_causality(runner, lonely, text, SETTING, suffixes=4, tolerance=0.0, seed=0)
    assert row.suffixes == 0
    assert row.statement.startswith("not probed: ")

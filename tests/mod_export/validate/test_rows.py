from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from comparisons import GATE, GOOD, LAYER, TEXT, errors, with_noise, with_routing

from mod_export.results.parity import Gate, InputAgreement, LayerAgreement, ParityRow
from mod_export.types import Bucket, Setting
from mod_export.validate.parity import Comparison
from mod_export.validate.rows import failed_row, judge

SETTING = Setting(target="ort-cpu", dtype="float32", model="mod", role="forward", bucket=Bucket(2, 16))
ARTIFACT = "engines/e.onnx"


def row_of(*found: Comparison) -> ParityRow:
    return judge(found, GATE, SETTING, ARTIFACT)


def test_a_row_says_what_it_is_about() -> None:
    row = row_of(GOOD, replace(GOOD, kind="ties", text=None))
    assert row.passed
    assert row.reasons == ()
    assert (row.target, row.bucket, row.dtype, row.model, row.artifact) == (
        "ort-cpu", "b2s16", "float32", "mod", "engines/e.onnx"
    )  # fmt: skip
    assert row.reference == "eager float32"
    assert row.inputs == ("text", "ties")
    assert row.gate == Gate(**GATE.model_dump())
    assert (row.ties_exact, row.located, row.rounding_error) == (None, None, None)
    assert row.allowed_max_abs == GATE.max_abs


def test_nothing_compared_is_no_pass() -> None:
    row = row_of()
    assert not row.passed
    assert row.reasons == ("nothing was compared",)
    assert all(math.isnan(value) for value in row.error.model_dump().values())
    assert row.next_token_agreement == 0.0
    assert (row.inputs, row.text) == ((), None)


def test_what_could_not_be_run_has_failed() -> None:
    row = failed_row("cannot be run: no such file", GATE, SETTING, ARTIFACT)
    assert not row.passed
    assert row.reasons == ("cannot be run: no such file",)
    assert (row.artifact, row.inputs) == ("engines/e.onnx", ())


@pytest.mark.parametrize("order", [1, -1])
def test_the_worst_input_decides(order: int) -> None:
    bad = replace(GOOD, kind="random", error=errors(math.nan), shortfalls=np.array([0.0, 1.0]), kl=math.nan)
    row = row_of(*(GOOD, bad, replace(GOOD, kind="padded", error=errors(2.0)))[::order])
    assert not row.passed
    assert all(math.isnan(value) for value in row.error.model_dump().values())
    assert math.isnan(row.kl)
    assert row.next_token_agreement == 0.5
    assert {reason.split(":")[0] for reason in row.reasons} == {"random", "padded"}


def test_a_reason_is_given_once() -> None:
    bad = replace(GOOD, problems=("the engine gives routed_9, which this model does not have",))
    row = row_of(bad, replace(bad, kind="ties"))
    assert row.reasons == ("outputs: the engine gives routed_9, which this model does not have",)


def test_routing_is_summed_by_layer_and_by_input() -> None:
    one = with_routing(0.005, 0.005, 0.5)
    row = row_of(one, replace(GOOD, kind="ties", layers=(replace(LAYER, agreed=3, min_margin=None),)))
    third, fifth = row.routing.layers
    assert third == LayerAgreement(
        layer=3, k=2, routed=8, agreed=7, overflow=0, near_ties=0, faults=0, min_margin=0.5, score_bound=GATE.near_tie,
        worst_flip=None,
    )  # fmt: skip
    assert (fifth.layer, fifth.near_ties, fifth.faults, fifth.worst_flip) == (5, 2, 1, 0.5)
    routing = row.routing
    assert (routing.routed, routing.agreed, routing.near_ties, routing.min_margin) == (12, 11, 2, 0.5)
    assert routing.by_input == (
        InputAgreement(input="text", routed=8, agreed=8),
        InputAgreement(input="ties", routed=4, agreed=3),
    )


def test_bounds_are_those_of_the_measured_rounding() -> None:
    row = row_of(with_noise(1e-5, scores=1e-6))
    assert row.rounding_error == 1e-5
    assert row.allowed_max_abs == pytest.approx(16 * 1e-5)
    assert row.routing.layers[0].score_bound == pytest.approx(2 * 16 * 1e-6)


def test_a_dense_model_has_no_layers() -> None:
    row = row_of(replace(GOOD, layers=()))
    assert row.passed
    assert (row.routing.layers, row.routing.routed, row.routing.min_margin) == ((), 0, None)


def test_perplexity_is_of_all_text_together() -> None:
    row = row_of(GOOD, replace(GOOD, text=replace(TEXT, tokens=1, nll=4.0, reference_nll=4.0)))
    assert row.text is not None
    assert (row.text.tokens, row.text.next_token_agreement) == (10, 1.0)
    found = row.text.perplexity, row.text.reference_perplexity, row.text.own_perplexity
    assert found == pytest.approx((math.exp(2.2), math.exp(2.2), math.exp(3.6)))
    assert row_of(replace(GOOD, text=None)).text is None


@pytest.mark.parametrize(("nats", "perplexity"), [(9e3, math.inf), (math.inf, math.inf), (math.nan, math.nan)])
def test_a_perplexity_beyond_all_bounds_is_still_a_number_of_the_report(nats: float, perplexity: float) -> None:
    row = row_of(replace(GOOD, text=replace(TEXT, nll=nats)))
    assert row.text is not None
    assert row.text.perplexity == pytest.approx(perplexity, nan_ok=True)
    assert not row.passed

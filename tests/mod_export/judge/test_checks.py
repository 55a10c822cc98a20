"""The allowance for rounding, the table of checks, and the row that follows from both, on hand-made comparisons."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from comparisons import GATE, GOOD, SITE, TEXT, allowed_by, errors, with_error, with_rounding, with_routing

from mod_export.judge.checks import (
    CHECKS,
    Allowance,
    Comparison,
    LeftOut,
    allowance,
    check_coverage,
    check_divergence,
    check_error,
    check_next_token,
    check_outputs,
    check_perplexity,
    check_routing,
    failed_row,
    fails_anyway,
    judge,
)
from mod_export.judge.compare import ROUNDOFF
from mod_export.rows.correctness import Gate, InputAgreement, LayerAgreement, ParityRow
from mod_export.types import DTYPES, Bucket, DType, Setting

SETTING = Setting(target="ort-cpu", dtype="float32", model="mod", role="forward", bucket=Bucket(2, 16))
ARTIFACT = "engines/e.onnx"
Check = Callable[[Sequence[Comparison], Allowance], Sequence[str]]


def test_without_a_float64_run_the_fixed_tolerances_hold() -> None:
    for allowed in (allowance([GOOD], GATE, "float32"), allowance([], GATE, "float32")):
        assert (allowed.max_abs, allowed.rms, allowed.rounding) == (GATE.max_abs, None, None)
        assert allowed.next_token_slack == 0.0
    assert allowance([GOOD], GATE, "float32").scores == {3: GATE.near_tie}


def test_rounding_is_pooled_over_the_inputs_and_scaled_by_the_gates() -> None:
    allowed = allowance([with_rounding(1e-6), with_rounding(3e-6), with_rounding(2e-6)], GATE, "float32")
    assert allowed.rounding == 3e-6
    assert allowed.max_abs == pytest.approx(16 * 3e-6)
    assert allowed.rms == pytest.approx(4 * 3e-6)
    assert allowed.next_token_slack == pytest.approx(2 * 16 * 3e-6)
    # Inputs without a float64 run have the bounds of those with one, and more float64 runs only allow more.
    assert allowance([with_rounding(3e-6), GOOD], GATE, "float32").max_abs == allowed.max_abs


def test_each_site_has_the_bound_of_its_own_scores() -> None:
    """A row of one repeated token can have scores near zero, and rounds like any other."""
    first = (replace(SITE, site=1, rounding=1e-6, scale=1e-4), replace(SITE, rounding=5e-6))
    second = (replace(SITE, site=1, rounding=2e-6, scale=2.0), replace(SITE, rounding=4e-6))
    allowed = allowance([replace(with_rounding(1e-6), sites=sites) for sites in (first, second)], GATE, "float32")
    assert allowed.scores[1] == pytest.approx(2 * 16 * 2e-6)
    assert allowed.scores[3] == pytest.approx(2 * 16 * 5e-6)
    assert allowed.share(1, 1.0) == 0.5


def test_no_score_is_known_better_than_to_its_last_digits() -> None:
    """A linear router over a single feature rounds nothing, but its scores are still float32."""
    assert allowance([with_rounding(1e-6)], GATE, "float32").scores[3] == 2 * 16 * 2 * ROUNDOFF["float32"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_shorter_floats_round_in_proportion_to_their_unit(dtype: DType) -> None:
    coarser = {"float32": 1, "float16": 2**13, "bfloat16": 2**16, "int8": 2**17, "int4": 2**20}[dtype]
    gate = GATE.model_copy(update={"near_tie": 1e3})
    exact, allowed = (allowance([with_rounding(1e-6, scores=1e-6)], gate, kind) for kind in ("float32", dtype))
    assert allowed.max_abs == coarser * exact.max_abs
    assert allowed.rms == pytest.approx(coarser * 4e-6)
    assert allowed.scores[3] == coarser * exact.scores[3]
    # The most probable token is read from the reference's own float32 logits.
    assert allowed.next_token_slack == exact.next_token_slack
    # However large the rounding is, the limit of near-ties stays.
    assert allowance([with_rounding(1e-6, scores=0.1)], GATE, dtype).scores[3] == GATE.near_tie


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reference_that_is_not_finite_allows_nothing(bad: float, order: int) -> None:
    allowed = allowance([with_rounding(1e-6, 1e-6), with_rounding(bad, bad)][::order], GATE, "float32")
    assert all(math.isnan(value) for value in (allowed.max_abs, allowed.rms, allowed.scores[3]))


def test_the_mean_square_of_a_few_errors_is_luck() -> None:
    few = replace(GOOD, rounding=errors(1e-6), values=300)
    assert allowance([few, few, few], GATE, "float32").rms is None
    assert allowance([few, few, few, few], GATE, "float32").rms == pytest.approx(4e-6)


def reasons(check: Check, *found: Comparison) -> list[str]:
    return list(check(found, allowed_by(*found)))


NOISY = with_rounding(1e-5)
"""Differs by 1e-5 from float64, so an error of 16 times as much may be rounding, 4 times as much on average, and two
logits count as equal up to 2 x 16 x 1e-5."""


@pytest.mark.parametrize(
    ("check", "found"),
    [
        *((check, (good, good)) for check in CHECKS for good in (GOOD, with_rounding(1e-5, scores=1e-7))),
        # A value at its gate passes.
        (check_error, (with_error(1e-3),)),
        (check_error, (replace(NOISY, error=errors(3.9e-5).model_copy(update={"max_abs": 1.5e-4})),)),
        (check_routing, (with_routing(1e-2),)),
        (check_routing, (with_routing(0.0, 0.005),)),
        (check_next_token, (replace(GOOD, shortfalls=np.array([0.0] * 9 + [1.0])),)),
        (check_next_token, (replace(GOOD, shortfalls=np.array([0.0] * 8 + [1.0] * 2)), GOOD)),
        (check_next_token, (replace(NOISY, shortfalls=np.full(10, 3.1e-4)),)),
        (check_divergence, (replace(GOOD, divergences=np.full(8, 1e-3)),)),
        (check_perplexity, (replace(GOOD, text=None),)),
        # Over three times the text it is a third as much, which is less than log 1.01.
        (check_perplexity, (replace(GOOD, text=replace(TEXT, nll=18.2)), GOOD, GOOD)),
    ],
)
def test_what_holds_gives_no_reason(check: Check, found: tuple[Comparison, ...]) -> None:
    assert check in CHECKS
    assert reasons(check, *found) == []


@pytest.mark.parametrize(
    ("check", "found", "expected"),
    [
        (
            check_outputs,
            (GOOD, replace(GOOD, problems=("the engine gives no logits, expected [1, 4, 8]",))),
            ["outputs: the engine gives no logits, expected [1, 4, 8]"],
        ),
        (
            check_error,
            (replace(with_error(0.25), kind="padded"), GOOD),
            ["padded: logits: max abs error 0.25 given the same routing, allowed 0.001"],
        ),
        (
            check_error,
            (replace(NOISY, error=errors(4.1e-5).model_copy(update={"max_abs": 1.7e-4})),),
            [
                "text: logits: max abs error 0.00017 given the same routing, allowed 0.00016",
                "text: logits: root mean square error 4.1e-05 given the same routing, allowed 4e-05",
            ],
        ),
        (
            check_routing,
            (with_routing(0.0, 0.02, 0.3),),
            [
                "text: layer 5 routing: 2 tokens differ by more than a near-tie, the worst is 0.3 from the edge of the "
                "selection, allowed 0.01 of the layer's root mean square"
            ],
        ),
        (
            check_routing,
            (replace(GOOD, sites=(replace(SITE, inversions=(0.005, 0.02, 0.3)),)),),
            [
                "text: layer 3 routing: 2 neighbouring tokens are in the wrong order of score, the worst is 0.3 apart, "
                "allowed 0.01 of the layer's root mean square"
            ],
        ),
        # An invalid selection fails for any scores.
        (
            check_routing,
            (with_routing(malformed="positions are not ascending"),),
            ["text: layer 5 routing: positions are not ascending"],
        ),
        (
            check_next_token,
            (replace(GOOD, shortfalls=np.array([0.0] * 8 + [1.0] * 2)),),
            ["next token: 80.0000% agree given the same routing, at least 90.0000% must"],
        ),
        (
            check_next_token,
            (replace(NOISY, shortfalls=np.full(10, 3.3e-4)),),
            ["next token: 0.0000% agree given the same routing, at least 90.0000% must"],
        ),
        # Where rounding was not measured, there is no allowance.
        (
            check_next_token,
            (replace(GOOD, shortfalls=np.full(10, 1e-12)),),
            ["next token: 0.0000% agree given the same routing, at least 90.0000% must"],
        ),
        (
            check_divergence,
            (GOOD, replace(GOOD, kind="ties", divergences=np.array([0.0, 0.5]))),
            ["ties: next token: divergence 0.25 nats given the same routing, allowed 0.001"],
        ),
        # Perplexity may not move in either direction.
        *(
            (
                check_perplexity,
                (replace(GOOD, text=replace(TEXT, nll=TEXT.nll + more)),),
                [
                    "text: log perplexity is 0.0222 nats from the reference's given the same routing, allowed a factor "
                    "of 1.01"
                ],
            )
            for more in (0.2, -0.2)
        ),
    ],
)
def test_what_misses_its_gate_is_said(check: Check, found: tuple[Comparison, ...], expected: list[str]) -> None:
    assert reasons(check, *found) == expected


@pytest.mark.parametrize(
    ("check", "found"),
    [
        (check_error, with_error(math.nan)),
        (check_error, replace(with_rounding(1e-5), error=errors(1e-6).model_copy(update={"rms": math.nan}))),
        (check_error, with_rounding(math.nan)),
        (check_next_token, replace(GOOD, shortfalls=np.full(10, math.nan))),
        (check_next_token, replace(GOOD, shortfalls=np.full(10, math.inf))),
        (check_routing, with_routing(math.nan)),
        (check_routing, with_routing(math.inf)),
        (check_routing, replace(GOOD, sites=(replace(SITE, inversions=(math.nan,)),))),
        (check_divergence, replace(GOOD, divergences=np.array([0.0, math.nan]))),
        (check_perplexity, replace(GOOD, text=replace(TEXT, nll=math.nan))),
        (check_perplexity, replace(GOOD, text=replace(TEXT, nll=math.inf))),
    ],
)
def test_what_is_not_a_number_fails(check: Check, found: Comparison) -> None:
    messages = reasons(check, found)
    assert messages
    assert all(any(word in reason for word in ("nan", "inf", "0.0000% agree")) for reason in messages)


def test_a_nan_is_counted_with_the_others() -> None:
    (reason,) = reasons(check_routing, with_routing(0.5, math.nan))
    assert "2 tokens differ" in reason


def test_the_gates_are_those_of_the_configuration() -> None:
    strict = GATE.model_copy(update={"max_kl": 0.0, "max_perplexity_ratio": 1.0, "next_token_agreement": 1.0})
    allowed = replace(allowed_by(), gate=strict)
    assert check_divergence([GOOD], allowed)
    assert not check_perplexity([GOOD], allowed)
    assert check_next_token([replace(GOOD, shortfalls=np.array([0.0] * 99 + [1.0]))], allowed)


@pytest.mark.parametrize(
    ("agreed", "positions", "expected"),
    [
        (1980, 2000, []),
        # Chance decides how many differ: two standard deviations are 8.9 of 2,000.
        (1972, 2000, []),
        (1971, 2000, ["next token: 98.5500% agree on text, each with its own routing, at least 99.0000% must"]),
        (97, 100, []),
        (96, 100, ["next token: 96.0000% agree on text, each with its own routing, at least 99.0000% must"]),
    ],
)
def test_a_quantized_model_is_judged_by_what_it_makes_of_text(agreed: int, positions: int, expected: list[str]) -> None:
    """Random tokens do not count, and each model uses the routing that it selects."""
    gate = GATE.model_copy(update={"next_token_agreement": 0.99})
    text = replace(TEXT, positions=positions, agreed=agreed)
    comparisons = [replace(GOOD, text=text, shortfalls=np.full(10, 1.0))]
    assert list(check_next_token(comparisons, allowance(comparisons, gate, "int8"))) == expected


@pytest.mark.parametrize(
    ("dtype", "differ", "passes"), [("bfloat16", 1, True), ("bfloat16", 2, False), ("float32", 1, False)]
)
def test_in_16_bits_luck_decides_too_how_many_of_few_positions_differ(dtype: DType, differ: int, passes: bool) -> None:
    """The prompts of a prefill engine are an example: each has one next token."""
    gate = GATE.model_copy(update={"next_token_agreement": 0.95})
    comparisons = [replace(GOOD, text=None, shortfalls=np.array([1.0] * differ + [0.0] * (4 - differ)))]
    assert (list(check_next_token(comparisons, allowance(comparisons, gate, dtype))) == []) == passes


def test_the_divergence_of_a_quantized_model_is_its_mean_over_all_of_its_text() -> None:
    """It fails only if chance does not explain it; random tokens do not count."""
    low, high = replace(GOOD, divergences=np.full(10, 5e-4)), replace(GOOD, divergences=np.full(10, 2.5e-3))
    random = replace(GOOD, kind="random", divergences=np.full(10, 9.0), shortfalls=np.full(10, 1.0))
    for comparisons, mean, passes in (
        ([low, random], 5e-4, True),
        ([low, low, low, high, random], 1e-3, True),
        ([high, high, random], 2.5e-3, False),
        # One position in ten makes the whole mean, which may be chance with 10 positions, but not with 200.
        ([replace(GOOD, divergences=np.array([0.02] + [0.0] * 9))], 2e-3, True),
        ([replace(GOOD, divergences=np.array(([0.02] + [0.0] * 9) * 20))], 2e-3, False),
    ):
        setting = replace(SETTING, dtype="int8")
        row = judge(comparisons, GATE, setting)
        assert row.kl == pytest.approx(mean)
        assert row.passed == passes == (not fails_anyway(comparisons, GATE, setting))
        if not passes:
            assert row.reasons == (
                f"text: next token: divergence {mean:.3g} nats given the same routing, allowed 0.001",
            )
    # Without text, all other inputs count.
    assert check_divergence([random], allowance([random], GATE, "int8"))


def test_what_no_size_of_rounding_errors_explains_fails_anyway() -> None:
    wrong = replace(NOISY, error=errors(1e9))
    assert not fails_anyway([wrong], GATE, SETTING)
    assert fails_anyway([replace(NOISY, error=errors(math.nan))], GATE, SETTING)
    assert fails_anyway([replace(NOISY, problems=("no logits",))], GATE, SETTING)
    # Each output has an allowance of its own.
    assert fails_anyway([wrong, replace(NOISY, output="hidden", problems=("no hidden",))], GATE, SETTING)


def test_what_a_hundred_times_the_rounding_errors_explain_does_not_fail_anyway() -> None:
    for error, fails in ((4e-5, False), (3.9e-3, False), (4.1e-3, True)):
        wrong = replace(NOISY, error=errors(error))
        assert fails_anyway([wrong], GATE, SETTING, 100.0) == fails
    # Where an output was exact on the inputs that were measured, nothing is known of the others.
    exact = replace(with_rounding(0.0), error=errors(1.0))
    assert judge([exact], GATE, SETTING).passed is False
    assert not fails_anyway([exact], GATE, SETTING, 100.0)
    assert not fails_anyway([exact], GATE, SETTING)


def test_next_tokens_of_text_do_not_depend_on_rounding_if_each_model_routes_by_itself() -> None:
    disagrees = [replace(GOOD, text=replace(GOOD.text, agreed=0, positions=1000))]
    assert fails_anyway(disagrees, GATE, replace(SETTING, dtype="int8"))
    # In floats they are those given the same routing, as far as rounding can tell.
    assert not fails_anyway(disagrees, GATE, SETTING, 1.0)


def test_the_perplexity_of_a_quantized_model_is_held_against_the_models_own() -> None:
    comparisons = [replace(GOOD, text=replace(TEXT, nll=18.0, reference_nll=18.0, own_nll=9.0))]
    assert check_perplexity(comparisons, allowance(comparisons, GATE, "float32")) == []
    (reason,) = check_perplexity(comparisons, allowance(comparisons, GATE, "int8"))
    assert reason.startswith("text: log perplexity is 1 nats from the reference's, allowed a factor of ")


def row_of(*found: Comparison) -> ParityRow:
    return judge(found, GATE, SETTING, ARTIFACT)


def test_a_row_says_what_it_is_about() -> None:
    row = row_of(GOOD, replace(GOOD, kind="ties", text=None))
    assert (row.passed, row.reasons) == (True, ())
    assert (row.target, row.bucket, row.dtype, row.model, row.artifact) == (
        "ort-cpu", "b2s16", "float32", "mod", "engines/e.onnx"
    )  # fmt: skip
    assert row.reference == "eager float32"
    assert row.inputs == ("text", "ties")
    assert row.gate == Gate(**GATE.model_dump())
    assert (row.ties_exact, row.located, row.rounding_error) == (None, None, None)
    assert row.allowed_max_abs == GATE.max_abs
    # The bounds follow from the measured rounding.
    row = row_of(with_rounding(1e-5, scores=1e-6))
    assert (row.rounding_error, row.allowed_max_abs) == (1e-5, pytest.approx(16 * 1e-5))
    assert row.routing.layers[0].score_bound == pytest.approx(2 * 16 * 1e-6)


def test_nothing_compared_is_no_pass() -> None:
    for row, reason in (
        (row_of(), "nothing was compared"),
        (failed_row("cannot be run: no such file", GATE, SETTING, ARTIFACT), "cannot be run: no such file"),
    ):
        assert (row.passed, row.reasons, row.artifact) == (False, (reason,), ARTIFACT)
        assert all(math.isnan(value) for value in row.error.model_dump().values())
        assert (row.inputs, row.text, row.next_token_agreement) == ((), None, 0.0)


@pytest.mark.parametrize("order", [1, -1])
def test_the_worst_input_decides(order: int) -> None:
    bad = replace(
        GOOD, kind="random", error=errors(math.nan), shortfalls=np.array([0.0, 1.0]), divergences=np.array([math.nan])
    )
    row = row_of(*(GOOD, bad, replace(GOOD, kind="padded", error=errors(2.0)))[::order])
    assert not row.passed
    assert all(math.isnan(value) for value in row.error.model_dump().values())
    assert math.isnan(row.kl)
    assert row.next_token_agreement == 21 / 22
    assert {reason.split(":")[0] for reason in row.reasons} == {"random"}
    assert any("max abs error nan" in reason and "and on 1 more input" in reason for reason in row.reasons)


def test_tokens_in_the_wrong_order_are_counted_with_the_differences() -> None:
    row = row_of(replace(GOOD, sites=(replace(SITE, distances=(0.005, 0.005), inversions=(0.004, 0.5)),)))
    (layer,) = row.routing.layers
    assert (layer.near_ties, layer.faults, layer.worst_flip, row.routing.near_ties) == (3, 1, 0.5, 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reported_next_tokens_are_those_of_the_gate(dtype: DType) -> None:
    """Over all inputs, with the slack of rounding; of a quantized model on text with each model's own selection."""
    text = replace(NOISY, shortfalls=np.full(10, 1e-6), text=replace(TEXT, positions=50, agreed=49))
    padded = replace(NOISY, kind="padded", shortfalls=np.array([1.0]), text=None, tokens=1)
    row = judge([text, padded], GATE, replace(SETTING, dtype=dtype))
    expected = 49 / 50 if dtype in ("int8", "int4") else 10 / 11
    assert (row.passed, row.next_token_agreement) == (True, expected)
    assert row.next_token_agreement >= row.gate.next_token_agreement
    # In float32, where chance explains nothing, the row fails exactly if the number is below the gate.
    for wrong in (1, 2):
        shortfalls = np.array([0.0] * (10 - wrong) + [1.0] * wrong)
        row = judge([replace(GOOD, shortfalls=shortfalls)], GATE, SETTING)
        assert row.passed == (row.next_token_agreement >= row.gate.next_token_agreement) == (wrong == 1)


def test_rows_that_rounding_decides_are_why_too_few_are_left() -> None:
    """Rows of padding are left out too, but do not count."""
    padding = LeftOut(rows=6, because="mask declares these positions to be padding")
    decided = LeftOut(rows=9, because="rounding decides what aten.round gives there, in the reference itself")
    found = replace(GOOD, tokens=1, undetermined=9, left_out=(padding, decided))
    (reason,) = reasons(check_coverage, found)
    assert decided.because in reason
    assert padding.because not in reason


def test_a_reason_is_given_once() -> None:
    bad = replace(GOOD, problems=("the engine gives routed_9, which this model does not have",))
    row = row_of(bad, replace(bad, kind="ties"))
    assert row.reasons == ("outputs: the engine gives routed_9, which this model does not have",)


def test_routing_is_summed_by_layer_and_by_input() -> None:
    first = with_routing(0.005, 0.005, 0.5)
    row = row_of(first, replace(GOOD, kind="ties", sites=(replace(SITE, agreed=3, min_margin=None),)))
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


def test_perplexity_is_of_all_text_together() -> None:
    row = row_of(GOOD, replace(GOOD, text=replace(TEXT, tokens=1, nll=4.0, reference_nll=4.0)))
    assert (row.text.tokens, row.text.next_token_agreement) == (10, 1.0)
    perplexities = row.text.perplexity, row.text.reference_perplexity, row.text.own_perplexity
    assert perplexities == pytest.approx((math.exp(2.2), math.exp(2.2), math.exp(3.6)))
    assert row_of(replace(GOOD, text=None)).text is None
    # An infinite or undefined perplexity is still reported.
    for nats, perplexity in ((9e3, math.inf), (math.nan, math.nan)):
        row = row_of(replace(GOOD, text=replace(TEXT, nll=nats)))
        assert row.text.perplexity == pytest.approx(perplexity, nan_ok=True)
        assert not row.passed

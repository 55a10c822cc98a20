from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from mod_export.compare import ErrorNumbers, LayerRouting
from mod_export.config import ParityGate
from mod_export.validate.checks import CHECKS, check_error, check_next_token, check_routing
from mod_export.validate.parity import Comparison

Check = Callable[[Comparison, ParityGate], Sequence[str]]
GATE = ParityGate(max_abs=1e-3, near_tie=1e-2, next_token_agreement=0.9)
LAYER = LayerRouting(layer=3, k=2, routed=4, agreed=4, distances=(), min_margin=0.5)
GOOD = Comparison(
    kind="text",
    layers=(LAYER,),
    error=ErrorNumbers(max_abs=1e-4, mean_abs=1e-5, max_rel=1e-3),
    next_token_agreement=1.0,
)


def with_error(value: float) -> Comparison:
    return replace(GOOD, error=ErrorNumbers(max_abs=value, mean_abs=value, max_rel=value))


def with_routing(*distances: float, malformed: str = "") -> Comparison:
    return replace(GOOD, layers=(LAYER, replace(LAYER, layer=5, distances=distances, malformed=malformed)))


def test_the_table_holds_every_check() -> None:
    assert (check_routing, check_error, check_next_token) == CHECKS


@pytest.mark.parametrize("check", CHECKS)
def test_what_holds_gives_no_reason(check: Check) -> None:
    assert list(check(GOOD, GATE)) == []


def test_a_value_at_its_gate_holds() -> None:
    assert list(check_error(with_error(1e-3), GATE)) == []
    assert list(check_routing(with_routing(1e-2), GATE)) == []
    assert list(check_next_token(replace(GOOD, next_token_agreement=0.9), GATE)) == []


def test_an_error_above_its_gate() -> None:
    assert list(check_error(with_error(0.25), GATE)) == [
        "logits: max abs error 0.25 given the same routing, allowed 0.001"
    ]


def test_next_tokens_below_their_gate() -> None:
    assert list(check_next_token(replace(GOOD, next_token_agreement=0.8), GATE)) == [
        "next token: 80.0000% agree given the same routing, at least 90.0000% must"
    ]


def test_near_ties_may_be_routed_differently_and_nothing_else() -> None:
    assert list(check_routing(with_routing(0.0, 0.005), GATE)) == []
    assert list(check_routing(with_routing(0.0, 0.02, 0.3), GATE)) == [
        "layer 5 routing: 2 tokens differ by more than a near-tie, the worst is 0.3 from the k-th score, allowed 0.01"
    ]


def test_what_is_no_selection_fails_whatever_the_scores() -> None:
    assert list(check_routing(with_routing(malformed="positions are not ascending"), GATE)) == [
        "layer 5 routing: positions are not ascending"
    ]


@pytest.mark.parametrize(
    ("check", "found"),
    [
        (check_error, with_error(math.nan)),
        (check_next_token, replace(GOOD, next_token_agreement=math.nan)),
        (check_routing, with_routing(math.nan)),
        (check_routing, with_routing(math.inf)),
    ],
)
def test_what_is_not_a_number_fails(check: Check, found: Comparison) -> None:
    (reason,) = check(found, GATE)
    assert "nan" in reason or "inf" in reason


def test_the_worst_is_not_hidden_by_a_nan() -> None:
    (reason,) = check_routing(with_routing(0.5, math.nan), GATE)
    assert "2 tokens differ" in reason

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mod_export.judge.compare import (
    Judged,
    direction_of,
    divergences,
    error_between,
    farthest_from,
    next_token_shortfalls,
    routing_of_site,
    smallest,
)
from mod_export.runtime.logits import negative_log_likelihood

LIMIT = 1e6


def selected(score_BS: np.ndarray, lengths_B: np.ndarray, k: int) -> np.ndarray:
    """Selects token by token: the largest score first, of equal scores the earlier one; padding fills the rest."""
    rows = []
    for score_S, length in zip(score_BS.tolist(), lengths_B.tolist(), strict=True):
        left, chosen = list(range(length)), []
        while left and len(chosen) < k:
            best = left[0]
            for i in left[1:]:
                if score_S[i] > score_S[best]:
                    best = i
            left.remove(best)
            chosen.append(best)
        rows.append(sorted(chosen) + list(range(length, length + k - len(chosen))))
    return np.array(rows, dtype=np.int64)


def by_rank(score_BS: np.ndarray, lengths_B: np.ndarray) -> Judged:
    return Judged("rank", score_BS, np.arange(score_BS.shape[1]) < lengths_B[:, None])


def first_come(*score_S: float, length: int | None = None) -> Judged:
    """One row in which tokens choose by themselves."""
    score_BS = np.array([score_S], dtype=np.float32)
    return Judged("first_come", score_BS, np.arange(len(score_S))[None] < (length or len(score_S)))


@st.composite
def routings(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Scores (B, S) with many ties, lengths and k."""
    B, S = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    values = st.one_of(st.sampled_from([-1.0, 0.0, 0.5]), st.floats(-LIMIT, LIMIT, width=32))
    score_BS = draw(arrays.arrays(np.float32, (B, S), elements=values))
    lengths_B = np.array(draw(st.lists(st.integers(1, S), min_size=B, max_size=B)), dtype=np.int64)
    return score_BS, lengths_B, draw(st.integers(1, S))


@given(routings())
def test_what_follows_the_definition_agrees(case: tuple[np.ndarray, np.ndarray, int]) -> None:
    score_BS, lengths_B, k = case
    routing = routing_of_site(3, selected(score_BS, lengths_B, k), by_rank(score_BS, lengths_B))
    assert (routing.site, routing.k, routing.malformed) == (3, k, "")
    assert routing.agreed == routing.routed == sum(min(k, int(length)) for length in lengths_B)
    assert routing.distances == ()
    assert routing.min_margin is None or routing.min_margin >= 0
    assert (routing.min_margin is None) == all(k >= length for length in lengths_B)


@given(routings(), st.data())
def test_any_other_choice_is_counted(case: tuple[np.ndarray, np.ndarray, int], data: st.DataObject) -> None:
    score_BS, lengths_B, k = case
    index_BK = selected(score_BS, lengths_B, k)
    row = data.draw(st.integers(0, len(index_BK) - 1))
    free = sorted(set(range(score_BS.shape[1])) - set(index_BK[row].tolist()))
    if not free:
        return
    slot, token = data.draw(st.integers(0, k - 1)), data.draw(st.sampled_from(free))
    length = int(lengths_B[row])
    moved_real = index_BK[row, slot] < length
    index_BK[row, slot] = token
    index_BK[row].sort()
    routing = routing_of_site(0, index_BK, by_rank(score_BS, lengths_B))
    assert routing.agreed == routing.routed - int(moved_real)
    assert len(routing.distances) == int(moved_real) + int(token < length)
    assert all(distance >= 0 for distance in routing.distances)
    assert ("slots empty" in routing.malformed) == (moved_real and token >= length)


@pytest.mark.parametrize(
    ("scores", "length", "index", "expected"),
    [
        # Distances are from the k-th score.
        ([4.0, 3.0, 2.0, 1.0], 4, [0, 3], {"routed": 2, "agreed": 1, "distances": (0.0, 2.0), "min_margin": 1.0}),
        # Ties go to the earlier token.
        ([0.0] * 4, 4, [0, 1], {"agreed": 2, "distances": (), "min_margin": 0.0}),
        ([0.0] * 4, 4, [0, 2], {"agreed": 1, "distances": (0.0, 0.0), "min_margin": 0.0}),
        # Padding has no score.
        ([1.0, 2.0, 9.0, 9.0], 2, [0, 1, 2], {"routed": 2, "agreed": 2, "malformed": "", "min_margin": None}),
        # A position outside the row is infinitely far.
        ([3.0, 2.0, 1.0, 0.0], 4, [-2, 0], {"distances": (math.inf, 0.0)}),
    ],
)
def test_where_tokens_are_ranked(scores: list[float], length: int, index: list[int], expected: dict[str, Any]) -> None:
    routing = routing_of_site(0, np.array([index]), by_rank(np.array([scores], np.float32), np.array([length])))
    assert {name: getattr(routing, name) for name in expected} == expected


ORDER = "positions are not ascending, or not unique"
LEFT = "row 0 leaves 1 of 2 slots empty while tokens are left that could be chosen"


@pytest.mark.parametrize(
    ("index", "ranked", "choosing"),
    [
        ([1, 0], ORDER, ORDER),
        ([1, 1], ORDER, ORDER),
        ([-1, 0], ORDER, ORDER),
        ([-2, 0], "positions from -2 to 0 in a row of 4", "positions from -2 to 0 in a row of 4"),
        ([0, 4], "positions from 0 to 4 in a row of 4", "positions from 0 to 4 in a row of 4"),
        ([0, -1], LEFT, ""),
        ([0, 3], LEFT, "row 0 gives 1 slots to tokens that cannot be chosen"),
    ],
)
def test_what_is_no_selection_is_named(index: list[int], ranked: str, choosing: str) -> None:
    score_BS = np.array([[3.0, 2.0, 1.0, 0.0]], dtype=np.float32)
    assert routing_of_site(0, np.array([index]), by_rank(score_BS, np.array([3]))).malformed == ranked
    judged = first_come(1.0, 1.0, 1.0, 1.0, length=3)
    assert routing_of_site(0, np.array([index]), judged).malformed == choosing


@pytest.mark.parametrize(
    ("scores", "index", "agreed", "distances", "overflow"),
    [
        ([1.0, -1.0, 2.0, 3.0], [0, 2], 2, (), 1),
        ([-1.0, -1.0, 2.0, -3.0], [2, -1], 1, (), 0),
        # A token is taken that did not choose; the first one that found no slot is then no further difference.
        ([1.0, -0.25, 2.0, 3.0], [0, 1], 1, (0.25,), 1),
        # A token is left out that chose, for a later one.
        ([1.0, 0.5, 2.0, 3.0], [0, 2], 1, (0.5,), 2),
        # A slot is left empty although a token chose.
        ([1.0, -1.0, 0.125, -3.0], [0, -1], 1, (0.125,), 0),
        ([-1.0, -1.0, -1.0, -1.0], [-1, -1], 0, (), 0),
        # Exactly 0 does not choose.
        ([0.0, 1.0, -1.0, -1.0], [0, 1], 1, (0.0,), 0),
    ],
)
def test_where_tokens_choose(
    scores: list[float], index: list[int], agreed: int, distances: tuple[float, ...], overflow: int
) -> None:
    routing = routing_of_site("3.mlp", np.array([index]), first_come(*scores))
    assert (routing.site, routing.agreed, routing.distances, routing.overflow) == ("3.mlp", agreed, distances, overflow)
    assert routing.routed == min(2, sum(score > 0 for score in scores))
    assert routing.min_margin == min(map(abs, scores))
    assert routing.malformed == ""


@pytest.mark.parametrize(
    ("index", "direction", "inversions"),
    [
        ([1, 2, 0], 1, ()),
        ([0, 2, 1], -1, ()),
        ([2, 1, 0], 1, (1.0,)),
        ([0, 2, 1], 1, (2.0, 1.0)),
        ([1, 2, 0], -1, (1.0, 2.0)),
        # Without a direction, any order is right.
        ([2, 1, 0], 0, ()),
        # Tokens that cannot be selected come last, and equal scores are in any order.
        ([1, 2, 4], 1, ()),
        ([1, 4, 2], 1, (math.inf,)),
        ([0, 3, 5], 1, ()),
        ([3, 0, 5], 1, ()),
        # A position outside the row has no score; it is reported by itself.
        ([1, 9, 0], 1, ()),
    ],
)
def test_where_slots_are_in_the_order_of_scores(
    index: list[int], direction: int, inversions: tuple[float, ...]
) -> None:
    score_BS = np.array([[1.0, 4.0, 3.0, 1.0, 9.0, 9.0]], np.float32)
    judged = Judged("by_score", score_BS, np.array([[True] * 4 + [False] * 2]))
    assert routing_of_site(0, np.array([index]), judged, direction=direction).inversions == inversions
    # Rows that the reference does not determine have no order.
    undetermined = routing_of_site(0, np.array([index]), judged, judged_B=np.array([False]), direction=direction)
    assert undetermined.inversions == ()


@pytest.mark.parametrize(
    ("index", "direction"),
    [([[0, 1], [0, 1]], 1), ([[1, 0], [1, 0]], -1), ([[0, 1], [1, 0]], 0), ([[0], [0]], 0), ([[0, 1], [1, 2]], 1)],
)
def test_the_direction_of_the_slots_holds_for_every_row(index: list[list[int]], direction: int) -> None:
    """Equal scores are in both orders, a single slot as well."""
    score_BS = np.array([[3.0, 2.0, 1.0], [3.0, 2.0, 2.0]], np.float32)
    assert direction_of(np.array(index), Judged("by_score", score_BS, np.ones((2, 3), bool))) == direction


def test_a_score_that_is_not_a_number_is_in_no_order() -> None:
    judged = Judged("by_score", np.array([[3.0, np.nan]], np.float32), np.ones((1, 2), bool))
    (inversion,) = routing_of_site(0, np.array([[0, 1]]), judged, direction=1).inversions
    assert math.isnan(inversion)
    assert direction_of(np.array([[0, 1]]), judged) == 0


def test_a_row_in_which_nobody_can_be_chosen() -> None:
    judged = Judged("first_come", np.ones((1, 2), np.float32), np.zeros((1, 2), bool))
    assert routing_of_site(0, np.array([[-1]]), judged).routed == 0


@pytest.mark.parametrize(
    ("values", "least"), [([], None), ([2.0, 1.0], 1.0), ([1.0, math.nan], math.nan), ([math.nan, 1.0], math.nan)]
)
def test_smallest(values: list[float], least: float | None) -> None:
    assert smallest(values) == (least if least is None or not math.isnan(least) else pytest.approx(least, nan_ok=True))


@pytest.mark.parametrize(
    ("candidate", "reference", "expected"),
    [
        (
            np.array([[3.0, -4.5], [0.25, 0.0]], np.float32),
            np.array([[3.0, -4.0], [0.0, 0.0]], np.float32),
            {"max_abs": 0.5, "mean_abs": 0.1875, "max_rel": 0.2, "rms": math.sqrt((0.5**2 + 0.25**2) / 4)},
        ),
        # Against zeros, the relative error is absolute.
        (np.ones((1, 2), np.float32), np.zeros((1, 2), np.float32), {"max_abs": 1.0, "max_rel": 1.0}),
        # In low precision, the error is computed in float64.
        (np.array([[6e4]], np.float16), np.array([[-6e4]], np.float32), {"max_abs": 120_000.0}),
        *(
            (bad_NV, bad_NV, dict.fromkeys(("max_abs", "mean_abs", "max_rel", "rms"), math.nan))
            for bad_NV in (np.array([[bad, 1.0]], np.float32) for bad in (np.nan, np.inf))
        ),
    ],
)
def test_error_in_numbers(candidate: np.ndarray, reference: np.ndarray, expected: dict[str, float]) -> None:
    error = error_between(candidate, reference)
    assert {name: getattr(error, name) for name in expected} == pytest.approx(expected, nan_ok=True)


def test_logits_that_both_exclude_do_not_differ() -> None:
    candidate_NV = np.array([[-np.inf, 1.0, 2.5], [0.0, -np.inf, 1.0]], np.float32)
    reference_NV = np.array([[-np.inf, 1.0, 2.0], [0.0, -np.inf, 1.0]], np.float32)
    error = error_between(candidate_NV, reference_NV)
    assert (error.max_abs, error.max_rel) == (0.5, pytest.approx(0.5 / math.sqrt(6 / 6)))
    assert next_token_shortfalls(candidate_NV, reference_NV).tolist() == [0.0, 0.0]
    assert divergences(candidate_NV[1:], reference_NV[1:]).mean() == pytest.approx(0.0, abs=1e-15)
    assert divergences(candidate_NV, reference_NV).mean() > 0.01
    # A logit that only one side excludes is an error.
    for one_NV, other_NV in ((candidate_NV, candidate_NV[::-1]), (np.nan_to_num(candidate_NV), reference_NV)):
        assert error_between(one_NV, other_NV).max_abs == math.inf
    assert next_token_shortfalls(candidate_NV, candidate_NV[::-1]).tolist() == [math.inf, math.inf]


def test_rounding_of_scores() -> None:
    """The rounding error is that of real tokens, in the run that is farthest off; scores of padding do not count."""
    score_BS = np.array([[3.0, 4.0, 9.0], [1.0, 1.0, 1.0]], dtype=np.float32)
    exact_BS = score_BS + np.array([[0.0, 0.5, 99.0], [0.25, 0.0, 0.0]])
    index_BK, judged = np.array([[1], [0]]), by_rank(score_BS, np.array([2, 3]))
    routing = routing_of_site(0, index_BK, judged, exact_BS)
    assert (routing.rounding, routing.scale) == (0.5, pytest.approx(math.sqrt(12.5)))
    assert routing_of_site(0, index_BK, judged).rounding is None
    assert routing_of_site(0, index_BK, judged, score_BS.astype(np.float64)).rounding == 0.0
    assert routing_of_site(0, index_BK, judged, score_BS.astype(np.float64), score_BS + np.float32(1)).rounding == 1.0


@pytest.mark.parametrize("row", [0, 1])
def test_scores_that_are_not_numbers_stay_visible(row: int) -> None:
    """The bound of a score is then not a number, and allows nothing."""
    score_BS = np.array([[3.0, 2.0], [3.0, 2.0]], dtype=np.float32)
    bad_BS = score_BS.astype(np.float64)
    bad_BS[row, 1] = np.nan
    index_BK, lengths_B = np.array([[0], [0]]), np.array([2, 2])
    assert math.isnan(routing_of_site(0, index_BK, by_rank(score_BS, lengths_B), bad_BS).rounding)
    assert math.isnan(routing_of_site(0, index_BK, by_rank(bad_BS.astype(np.float32), lengths_B)).scale)


def test_the_farthest_of_several_runs() -> None:
    exact = np.array([0.0, 0.0, 0.0, 0.0])
    runs = [np.array([1.0, -2.0, np.nan, 1.0]), np.array([-3.0, 1.0, 5.0, np.nan]), np.array([2.0, 1.0, 5.0, 9.0])]
    np.testing.assert_array_equal(farthest_from(exact, runs[:1]), runs[0])
    np.testing.assert_array_equal(farthest_from(exact, runs), [-3.0, -2.0, np.nan, np.nan])


def test_shortfalls_of_the_next_token() -> None:
    reference_NV = np.array([[0.0, 1.0], [1.0, 0.25], [0.0, 1.0], [0.0, 1.0], [2.0, 2.0]], dtype=np.float32)
    candidate_NV = np.array([[0.0, 9.0], [0.0, 1.0], [np.nan, 1.0], [0.0, np.inf], [0.0, 1.0]], dtype=np.float32)
    shortfalls = next_token_shortfalls(candidate_NV, reference_NV)
    # Correct; 0.75 below the reference's choice; NaN; infinity; one of two equal choices of the reference.
    assert shortfalls.tolist() == [0.0, 0.75, math.inf, math.inf, 0.0]
    assert shortfalls.dtype == np.float64
    assert next_token_shortfalls(reference_NV, reference_NV).tolist() == [0.0] * 5
    # A reference that is not a number has no next token.
    assert not next_token_shortfalls(np.zeros((1, 2), np.float32), np.array([[np.nan, 1.0]], np.float32))[0] <= 0


def test_divergence_in_nats() -> None:
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.25, 0.5])
    expected = float(np.sum(p * np.log(p / q)))
    # Logits are known up to a constant, and large ones must not overflow.
    logits_NV = [np.log(values)[None].astype(np.float32) + shift for values, shift in ((q, 5000.0), (p, -3.0))]
    assert divergences(*logits_NV).mean() == pytest.approx(expected, rel=1e-3)
    assert (divergences(logits_NV[1], logits_NV[1]) == 0.0).all()
    for bad in (np.nan, np.inf):
        assert math.isnan(divergences(np.array([[bad, 0.0]]), np.zeros((1, 2)))[0])


@given(arrays.arrays(np.float32, (3, 4), elements=st.floats(-30, 30, width=32)), st.integers(0, 3))
def test_divergence_is_never_negative(logits_NV: np.ndarray, roll: int) -> None:
    assert (divergences(np.roll(logits_NV, roll, axis=0), logits_NV) >= -1e-12).all()


def test_negative_log_likelihood_of_the_tokens_that_have_one_before_them() -> None:
    p_BSV = np.array([[[0.5, 0.5], [0.25, 0.75], [0.9, 0.1]]])
    nll, tokens = negative_log_likelihood(np.log(p_BSV), np.array([[0, 1, 0]]))
    assert tokens == 2
    assert nll == pytest.approx(-math.log(0.5) - math.log(0.25))  # The first token and the last logits do not count.
    assert math.exp(nll / tokens) == pytest.approx(math.sqrt(2 * 4))

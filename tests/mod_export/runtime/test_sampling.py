"""From logits to tokens: what can be drawn and how often, counted over evenly spaced numbers instead of random ones."""

from __future__ import annotations

import math
import re
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax

from mod_export.errors import EngineError, UsageError
from mod_export.runtime.logits import Sampling, draw, probabilities, rng_of

MULTIPLIER = 0x2360ED051FC65DA44385DF649FCCF645
"""Multiplier of the state of PCG64 (O'Neill 2014)."""
LAST = 2**53 - 1
ROUNDING = 1e-12
"""Relative error of float64 sums."""

logit_lists = st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40)
samplings = st.builds(Sampling, st.floats(0.05, 20), st.integers(0, 45), st.floats(0.01, 1))


def array(values: Any) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def rng_at(number: int) -> np.random.Generator:
    """Returns a generator whose next `random()` is number / 2**53: its state is set to one step before."""
    bits = np.random.PCG64(0)
    state = bits.state
    increment = state["state"]["inc"]
    # If the upper half is zero, nothing is rotated and the lower half is the output.
    state["state"]["state"] = ((number << 11) - increment) * pow(MULTIPLIER, -1, 2**128) % 2**128
    bits.state = state
    return np.random.Generator(bits)


def counts(logits_V: np.ndarray, sampling: Sampling, draws: int) -> np.ndarray:
    """How often each token is drawn by the midpoints of `draws` equal parts of 0 to 1."""
    numbers = [(2 * i + 1) * 2**53 // (2 * draws) for i in range(draws)]
    return np.bincount([draw(logits_V, sampling, rng_at(u)) for u in numbers], minlength=len(logits_V))


@pytest.mark.parametrize("number", [0, 1, 2**52, LAST])
def test_the_generators_of_these_tests_give_what_they_are_set_to(number: int) -> None:
    assert rng_at(number).random() == number / 2**53


def test_what_is_kept_is_drawn_in_proportion() -> None:
    """An interval of length p contains p * 500 of the numbers, give or take one at its edges."""
    logits_V = np.log(array([0.1, 0.4, 0.2, 0.3]))
    for sampling, kept in [
        (Sampling(1.0), [0, 1, 2, 3]),
        (Sampling(1.0, top_k=2), [1, 3]),
        (Sampling(1.0, top_k=3), [1, 2, 3]),
        (Sampling(1.0, top_p=0.35), [1]),
        (Sampling(1.0, top_p=0.6), [1, 3]),
        (Sampling(1.0, top_p=0.75), [1, 2, 3]),
        (Sampling(1.0, top_p=0.95), [0, 1, 2, 3]),
        # 0.4 / 0.7 is 0.57.
        (Sampling(1.0, top_k=2, top_p=0.55), [1]),
        (Sampling(1.0, top_k=2, top_p=0.6), [1, 3]),
    ]:
        expected_V = np.zeros(4)
        expected_V[kept] = np.exp(logits_V[kept])
        expected_V /= expected_V.sum()
        assert np.abs(counts(logits_V, sampling, 500) - 500 * expected_V).max() <= 1
        np.testing.assert_allclose(probabilities(logits_V, sampling), expected_V, rtol=1e-6)


def test_top_p_0_keeps_the_most_probable_token() -> None:
    """Of (0.1, 0.4, 0.4, 0.1) it keeps the first 0.4. It is not greedy otherwise: each draw takes a number."""
    logits_V = np.log(array([0.1, 0.4, 0.4, 0.1]))
    for sampling in (Sampling(1.0, top_p=0), Sampling(9.0, top_p=0.0), Sampling(1.0, top_k=3, top_p=0)):
        assert probabilities(logits_V, sampling).tolist() == [0, 1, 0, 0]
        assert counts(logits_V, sampling, 50).tolist() == [0, 50, 0, 0]
    rng, other = rng_of(0, 0), rng_of(0, 0)
    draw(logits_V, Sampling(1.0, top_p=0), rng)
    other.random()
    assert rng.random() == other.random()


def test_a_random_seed_differs_each_time() -> None:
    assert len({rng_of(-1, 0).random() for _ in range(4)}) == 4
    assert rng_of(7, 0).random() == rng_of(7, 0).random()


@given(logits=logit_lists, sampling=samplings, number=st.integers(0, LAST))
def test_the_cuts_keep_the_fewest_of_the_largest_and_only_they_are_drawn(
    logits: list[float], sampling: Sampling, number: int
) -> None:
    logits_V = array(logits)
    before_V = softmax(np.array(logits) / sampling.temperature)
    found_V = probabilities(logits_V, sampling)
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    count = int(np.count_nonzero(found_V))
    assert 1 <= count <= min(sampling.top_k or len(logits), len(logits))
    assert set(np.flatnonzero(found_V)) == set(order[:count])
    allowed = before_V[order[: sampling.top_k or None]]
    share = allowed / allowed.sum()
    assert share[:count].sum() >= sampling.top_p - ROUNDING
    assert share[: count - 1].sum() < sampling.top_p + ROUNDING
    np.testing.assert_allclose(found_V[order[:count]], share[:count] / share[:count].sum(), rtol=1e-9)
    for u in (0, number, LAST):
        assert found_V[draw(logits_V, sampling, rng_at(u))] > 0


@given(tokens=st.integers(2, 60), number=st.integers(0, LAST), data=st.data())
def test_of_equal_logits_the_first_are_kept(tokens: int, number: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, tokens))
    logits_V = np.full(tokens, 1.5, dtype=np.float32)
    assert np.flatnonzero(probabilities(logits_V, Sampling(1.0, top_k=k))).tolist() == list(range(k))
    assert np.flatnonzero(probabilities(logits_V, Sampling(1.0, top_p=(k - 0.5) / tokens))).tolist() == list(range(k))
    assert draw(logits_V, Sampling(1.0, top_k=k), rng_at(number)) in {number * k // 2**53 + step for step in (-1, 0, 1)}
    logits_V[-1] = 2.0
    assert np.flatnonzero(probabilities(logits_V, Sampling(1.0, top_k=k))).tolist() == [*range(k - 1), tokens - 1]


def test_a_vocabulary_of_many_tokens_gets_the_same_nucleus_as_a_full_sort() -> None:
    logits_V = 4 * np.random.default_rng(0).standard_normal(50_000).astype(np.float32)
    before_V = softmax(logits_V.astype(np.float64))
    order_V = np.argsort(-before_V, kind="stable")
    for top_p in (0.1, 0.5, 0.9, 0.99, 0.999999, 1 - 2**-53):
        expected = order_V[: np.searchsorted(np.cumsum(before_V[order_V]), top_p) + 1]
        found = np.flatnonzero(probabilities(logits_V, Sampling(1.0, top_p=top_p)))
        assert set(found) <= set(expected)
        # If hardly anything is cut, rounding of the sum decides about the last ones.
        assert before_V[found].sum() >= top_p - ROUNDING
        assert top_p > 0.9999 or len(found) == len(expected)


def test_greedy_takes_the_first_of_the_largest_and_no_number_and_a_draw_takes_one() -> None:
    rng, untouched = rng_of(1, 2), rng_of(1, 2)
    assert draw(array([0, 3, 3, -np.inf]), Sampling(), rng) == 1
    assert draw(array([0, 3, 3]), Sampling(0, 1, 0.5), rng) == 1
    assert probabilities(array([0, 3, 3]), Sampling()).tolist() == [0, 1, 0]
    assert rng.random() == untouched.random()
    for sampling in (Sampling(1.0), Sampling(1.0, top_k=1), Sampling(0.5, 3, 0.1)):
        rng, other = rng_of(0, 0), rng_of(0, 0)
        assert isinstance(draw(array([1, 2, 3, 4]), sampling, rng), int)
        other.random()
        assert rng.random() == other.random()


@pytest.mark.parametrize("temperature", [1e-4, sys.float_info.min, math.ulp(0.0)])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits_V = array([-3e38, 1, 3, 3e-7, 2.5, -np.inf])
    for number in (0, LAST):
        assert draw(logits_V, Sampling(temperature), rng_at(number)) == 2
        assert draw(logits_V, Sampling(temperature, 4, 0.9), rng_at(number)) == 2
    assert draw(array([3e38, -3e38]), Sampling(temperature), rng_at(LAST)) == 0


def test_a_huge_temperature_forgets_all_but_the_order_and_what_is_impossible() -> None:
    logits_V = array([1, 4, -np.inf, 3, 2])
    hot = sys.float_info.max
    assert probabilities(logits_V, Sampling(hot)).tolist() == [0.25, 0.25, 0, 0.25, 0.25]
    for cut in ({"top_k": 2}, {"top_p": 0.5}):
        assert np.flatnonzero(probabilities(logits_V, Sampling(hot, **cut))).tolist() == [1, 3]
    for sampling in (Sampling(1.0), Sampling(1.0, top_k=4), Sampling(1.0, top_p=1 - 2**-53), Sampling(9.0, 4, 0.99)):
        assert counts(array([-np.inf, 0, -np.inf, 0, -np.inf]), sampling, 10).tolist() == [0, 5, 0, 5, 0]


@settings(max_examples=40)
@given(tokens=st.integers(1, 3000), seed=st.integers(0, 2**31 - 1))
def test_the_last_number_draws_the_last_token(tokens: int, seed: int) -> None:
    """However the sum is rounded, the search neither runs past the end nor stops before it."""
    logits_V = np.random.default_rng(seed).uniform(-1, 1, tokens).astype(np.float32)
    assert draw(logits_V, Sampling(1.0), rng_at(LAST)) == tokens - 1
    assert draw(logits_V, Sampling(1.0), rng_at(0)) == 0
    beyond_V = np.append(logits_V, array([-np.inf] * 3))
    assert draw(beyond_V, Sampling(1.0), rng_at(LAST)) == tokens - 1


def test_draws_stay_what_they_are() -> None:
    """Changing the text of a seed must be a deliberate decision."""
    logits_V = np.sin(np.arange(100)).astype(np.float32)
    rng = rng_of(1234, 0)
    assert [draw(logits_V, Sampling(0.8, 40, 0.95), rng) for _ in range(10)] == [96, 34, 90, 21, 27, 9, 21, 27, 95, 26]


OUT_OF_RANGE = {
    "temperature": (
        (-0.1, math.inf, math.nan, 10**400, "1", True),
        "a finite number of at least 0; 0 always takes the",
    ),
    "top_k": ((-1, 2.0, True), "a whole number of at least 0; 0 draws from all tokens$"),
    "top_p": ((-0.1, 1.5, math.nan, None, False), "a number from 0 to 1; 1 draws from all tokens$"),
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_settings_out_of_range(name: str) -> None:
    values, expected = OUT_OF_RANGE[name]
    for value in values:
        with pytest.raises(UsageError, match=f"^{name}: got {re.escape(repr(value))}, expected {expected}"):
            Sampling(**{name: value})
    for seed in (-2, 1.5, True):
        with pytest.raises(
            UsageError, match=rf"^seed: got {seed}, expected a whole number of at least 0; -1 draws a seed$"
        ):
            rng_of(seed, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("logits", "largest"), [([0, np.nan, 1], "nan"), ([0, np.inf, 1], "inf"), ([-np.inf] * 3, "-inf")]
)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)])
def test_logits_of_a_broken_engine(logits: list[float], largest: str, sampling: Sampling) -> None:
    expected = rf"^logits: the largest of 3 is {largest}, expected a finite number; look .* with `mod-export validate`$"
    with pytest.raises(EngineError, match=expected):
        draw(array(logits), sampling, rng_of(0, 0))

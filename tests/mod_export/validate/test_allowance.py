from __future__ import annotations

import math
from dataclasses import replace

import pytest
from comparisons import GATE, GOOD, LAYER, errors, with_noise

from mod_export.types import DTYPES, DType
from mod_export.validate.allowance import ROUNDOFF, allowance


def test_without_a_float64_run_the_fixed_tolerances_hold() -> None:
    found = allowance([GOOD], GATE, "float32")
    assert (found.max_abs, found.rms, found.noise) == (GATE.max_abs, None, None)
    assert found.scores == {3: GATE.near_tie}
    assert found.next_token_slack == 0.0


def test_inputs_without_a_float64_run_are_held_against_those_with_one() -> None:
    found = allowance([with_noise(1e-5), GOOD], GATE, "float32")
    assert found.max_abs == pytest.approx(16 * 1e-5)
    # More float64 runs only ever allow more, so a candidate that passes without them passes with them.
    assert allowance([with_noise(1e-5), with_noise(1e-6)], GATE, "float32").max_abs == found.max_abs
    assert allowance([with_noise(1e-5), with_noise(1e-4)], GATE, "float32").max_abs > found.max_abs


def test_nothing_compared() -> None:
    assert allowance([], GATE, "float32").max_abs == GATE.max_abs


def test_rounding_is_pooled_over_the_inputs_and_scaled_by_the_gates() -> None:
    found = allowance([with_noise(1e-6), with_noise(3e-6), with_noise(2e-6)], GATE, "float32")
    assert found.noise == 3e-6
    assert found.max_abs == pytest.approx(16 * 3e-6)
    assert found.rms == pytest.approx(4 * 3e-6)
    assert found.next_token_slack == pytest.approx(2 * 16 * 3e-6)


def test_each_layer_has_the_bound_of_its_own_scores() -> None:
    layers = (replace(LAYER, layer=1, noise=1e-6), replace(LAYER, layer=3, noise=5e-6))
    worse = (replace(LAYER, layer=1, noise=2e-6), replace(LAYER, layer=3, noise=4e-6))
    noisy = with_noise(1e-6)
    found = allowance([replace(noisy, layers=layers), replace(noisy, layers=worse)], GATE, "float32")
    assert found.scores[1] == pytest.approx(2 * 16 * 2e-6)
    assert found.scores[3] == pytest.approx(2 * 16 * 5e-6)


def test_no_score_is_known_better_than_to_its_last_digits() -> None:
    """A linear router over a single feature rounds nothing, and its scores are float32 all the same."""
    found = allowance([with_noise(1e-6, scores=0.0)], GATE, "float32")
    assert found.scores[3] == 2 * 16 * 2 * ROUNDOFF["float32"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_shorter_floats_round_in_proportion_to_their_unit(dtype: DType) -> None:
    coarser = {"float32": 1, "float16": 2**13, "bfloat16": 2**16, "int8": 2**17, "int4": 2**20}[dtype]
    gate = GATE.model_copy(update={"near_tie": 1e3})
    exact, found = (allowance([with_noise(1e-6, scores=1e-6)], gate, one) for one in ("float32", dtype))
    assert found.max_abs == coarser * exact.max_abs
    assert found.rms == pytest.approx(coarser * 4e-6)
    assert found.scores[3] == coarser * exact.scores[3]
    # Which token is the most probable is asked of the reference's own float32 logits.
    assert found.next_token_slack == exact.next_token_slack


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rounding_makes_a_near_tie_of_what_is_far_from_one(dtype: DType) -> None:
    found = allowance([with_noise(1e-6, scores=0.1)], GATE, dtype)
    assert found.scores[3] == GATE.near_tie


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reference_that_is_not_finite_allows_nothing(bad: float, order: int) -> None:
    found = allowance([with_noise(1e-6, 1e-6), with_noise(bad, bad)][::order], GATE, "float32")
    assert math.isnan(found.max_abs)
    assert found.rms is not None
    assert math.isnan(found.rms)
    assert math.isnan(found.scores[3])


def test_distances_are_measured_against_the_layer_and_not_their_own_row() -> None:
    """A row of one repeated token can have scores near zero, and rounds like any other."""
    quiet, loud = replace(LAYER, scale=1e-4, noise=1e-6), replace(LAYER, scale=2.0, noise=1e-6)
    noisy = with_noise(1e-6)
    found = allowance([replace(noisy, layers=(one,)) for one in (quiet, loud)], GATE, "float32")
    assert found.scores[3] == pytest.approx(2 * 16 * 1e-6)
    assert found.share(3, 1.0) == 0.5
    assert allowance([replace(noisy, layers=(replace(loud, noise=9.0),))], GATE, "float32").scores[3] == pytest.approx(
        2.0 * GATE.near_tie
    )


def test_the_mean_square_of_a_few_errors_is_luck() -> None:
    few = replace(GOOD, noise=errors(1e-6, count=300), error=errors(1e-6, count=300))
    assert allowance([few, few, few], GATE, "float32").rms is None
    assert allowance([few, few, few, few], GATE, "float32").rms == pytest.approx(4e-6)

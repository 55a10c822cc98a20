"""Numbers that a request adds to logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mod_export.errors import UsageError
from mod_export.runtime.generator import Generator
from mod_export.runtime.logits import Bias, Sampling, draw

pytestmark = pytest.mark.filterwarnings("ignore::mod_export.errors.UnverifiedWarning")


def test_the_bias_is_added_to_a_copy() -> None:
    logits_V = np.array([1, 2, 3], dtype=np.float32)
    biased_V = Bias({2: -1.5, 0: 0.25}, 3).added_to(logits_V)
    assert biased_V.dtype == np.float32
    assert (biased_V.tolist(), logits_V.tolist()) == ([1.25, 2, 1.5], [1, 2, 3])
    rng = np.random.default_rng(0)
    assert draw(Bias({2: -100}, 3).added_to(logits_V), Sampling(), rng) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_hundred_forces_or_excludes_a_token(generator: Generator, temperature: float) -> None:
    options: dict[str, Any] = {"temperature": temperature, "seed": 3}
    (forced,) = generator.generate("def", 8, logit_bias={65: 100}, **options)
    assert forced.ids == [65] * 8
    (free,) = generator.generate("def", 8, **options)
    excluded = dict.fromkeys(free.ids, -100)
    (without,) = generator.generate("def", 8, logit_bias=excluded, **options)
    assert not excluded.keys() & set(without.ids)


def test_log_probabilities_are_those_without_it(generator: Generator) -> None:
    (free,) = generator.generate("def", 1, logprobs=256)
    (forced,) = generator.generate("def", 1, logprobs=256, logit_bias={65: 100})
    assert forced.logprobs[0].top == free.logprobs[0].top
    assert forced.logprobs[0].logprob == dict(free.logprobs[0].top)[65]


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ({256: 1}, "logit_bias: got token 256, expected ids from 0 to 255"),
        ({-1: 1}, "logit_bias: got token -1, expected ids from 0 to 255"),
        ({"5": 1}, "logit_bias: got token '5', expected ids from 0 to 255"),
        ({True: 1}, "logit_bias: got token True, expected ids from 0 to 255"),
        ({5: 101}, "logit_bias: got 101 for token 5, expected a number from -100 to 100"),
        ({5: float("nan")}, "logit_bias: got nan for token 5, expected a number from -100 to 100"),
        ({5: "1"}, "logit_bias: got '1' for token 5, expected a number from -100 to 100"),
    ],
    ids=str,
)
def test_what_is_out_of_range(generator: Generator, bias: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        generator.texts("x", logit_bias=bias)

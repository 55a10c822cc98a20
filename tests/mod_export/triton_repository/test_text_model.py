"""From the tensors of a request to its text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from writing import WINDOW

import mod_export
from mod_export.errors import UsageError
from mod_export.runtime.generator import Generator
from mod_export.triton.text_model import texts_of


@pytest.fixture(scope="module")
def generator(written: Path) -> Iterator[Generator]:
    with mod_export.load_generator(written) as found:
        yield found


def strings(*texts: bytes) -> np.ndarray:
    return np.array(texts, dtype=np.object_)


def test_a_request_that_says_everything(generator: Generator) -> None:
    request = {
        "text": strings(b"ab"), "max_tokens": np.array([3]), "temperature": np.array([0.5]), "top_p": np.array([0.9]),
        "top_k": np.array([7]), "seed": np.array([11]), "stop": strings(b"x", "é".encode()),
    }  # fmt: skip
    (text,) = texts_of(generator, request)
    assert list(text.ids) == [97, 98]
    assert (text.max_new_tokens, text.sampling.temperature, text.sampling.top_p, text.sampling.top_k) == (
        3,
        0.5,
        0.9,
        7,
    )
    assert text.rng.random() == np.random.default_rng([11, 0]).random()


def test_what_is_left_out_is_the_models_own(generator: Generator) -> None:
    (one,), (two,) = (texts_of(generator, {"input_ids": np.array([5, 6, 7])}) for _ in range(2))
    assert list(one.ids) == [5, 6, 7]
    assert one.max_new_tokens == WINDOW - 3 + 1
    assert one.sampling.temperature == generator.defaults.temperature == 0
    assert one.rng.random() != two.rng.random()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "expected either text or input_ids, got neither"),
        ({"text": strings(b"a"), "input_ids": np.array([1])}, "expected either text or input_ids, got both"),
        ({"text": strings(b"a\xff")}, "text: expected UTF-8, got a byte that is not at position 1"),
        ({"text": strings(b"a"), "stop": strings(b"\xff")}, "stop: expected UTF-8"),
        ({"text": strings(b"")}, "prompt 0 is empty"),
        ({"text": strings(b"a"), "max_tokens": np.array([0])}, "max_new_tokens: expected a whole number"),
        ({"text": strings(b"a"), "seed": np.array([-2])}, "seed: got -2"),
        ({"text": strings(b"a"), "temperature": np.array([-1.0])}, "temperature: got -1.0"),
        ({"input_ids": np.array([256])}, "expected text, or token ids from 0 to 255, got 256"),
        ({"input_ids": np.ones(WINDOW + 1, dtype=np.int64)}, "is longer than the window of 48"),
    ],
)
def test_refusals(generator: Generator, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        texts_of(generator, given)

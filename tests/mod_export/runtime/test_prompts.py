"""Prompts are split into parts by their number of tokens alone, and the engines on one cache read any of them."""

from __future__ import annotations

import numpy as np
import pytest
from writing import WINDOW, prompts_of_lengths

from mod_export.runtime.generator import Generator
from mod_export.runtime.prompts import part_lengths


@pytest.mark.parametrize(
    ("tokens", "sizes", "parts"),
    [
        (0, [128, 32], []),
        (1, [128, 32], [1]),
        (32, [128, 32], [32]),
        (33, [128, 32], [32, 1]),
        (96, [128, 32], [32, 32, 32]),
        # Four parts of 32 tokens would compute as much as one of 128.
        (97, [128, 32], [97]),
        (128, [128, 32], [128]),
        (300, [128, 32], [128, 128, 32, 12]),
        (255, [128, 32], [128, 127]),
        (60, [128, 64, 32, 16], [60]),
        (44, [128, 64, 32, 16], [32, 12]),
        (30, [128, 64, 32, 16], [30]),
        (200, [100], [100, 100]),
        (199, [100], [100, 99]),
        (7, [5, 1], [5, 1, 1]),
    ],
)
def test_parts(tokens: int, sizes: list[int], parts: list[int]) -> None:
    assert part_lengths(tokens, sizes) == parts


@pytest.mark.parametrize("sizes", [[16, 8], [128, 32], [7, 3, 2], [12]])
def test_parts_begin_alike(sizes: list[int]) -> None:
    """Whole parts of the longest engine are the same for every longer text; none is longer than it."""
    for tokens in range(1, 400):
        parts = part_lengths(tokens, sizes)
        assert sum(parts) == tokens
        assert max(parts) <= sizes[0]
        assert parts[: tokens // sizes[0]] == [sizes[0]] * (tokens // sizes[0])
        computed = sum(min(size for size in sizes if size >= part) for part in parts)
        assert computed < tokens + sizes[-1] + sum(sizes[:-1])


def test_every_length_is_read_as_steps_read_it(generator: Generator) -> None:
    """Also after a state that was kept, at any position."""
    (ids,) = prompts_of_lengths([WINDOW])
    prompts = generator._reads()
    with generator._exclusive(generator.bucket_for(1, WINDOW)) as (decoder,):
        decoder.clear(0)
        for t, token in enumerate(ids):
            logits_V = decoder.step(np.array([token]), np.array([t]))[0]
            kept = prompts.read(ids[: t + 1])
            np.testing.assert_allclose(kept.logits_V, logits_V, rtol=0, atol=1e-4)
            np.testing.assert_array_equal(kept.count_N, decoder.cache["counts"][0])
            if t in (3, 17, 30):
                later = prompts.read(ids[t + 1 : t + 15], kept)
                whole = prompts.read(ids[: t + 15])
                assert later.length == whole.length == t + 15
                np.testing.assert_allclose(later.logits_V, whole.logits_V, rtol=0, atol=1e-4)

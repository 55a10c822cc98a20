"""Memory of a generator: its cache is all that it ever takes, however long the text."""

from __future__ import annotations

import gc

import psutil
import pytest
from writing import prompts_of_lengths

from mod_export.runtime.generate.generator import Generator

TOKENS = 5000
GROWTH = 3 * 2**20
"""Bytes of a text: itself, and what an allocator rounds up. What rolling reads again would be more."""


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
def test_a_long_text_takes_no_more_memory_than_a_short_one(generator: Generator, rows: int) -> None:
    process = psutil.Process()
    taken = []
    with generator.stream(prompts_of_lengths([9] * rows), TOKENS, rolling=True) as stream:
        for count, _ in enumerate(stream):
            if count % 500 == 499:
                gc.collect()
                taken.append(process.memory_info().rss)
    assert [len(one.ids) for one in stream.completions] == [TOKENS] * rows
    assert len(taken) >= 10 * rows
    # The first five hundred warm up.
    assert max(taken[1:]) - taken[1] < GROWTH * rows, taken
    assert sum(len(one.text) for one in stream.completions) > 0

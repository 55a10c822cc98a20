"""Requests that begin alike, and the comparison of their texts with and without kept prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from mod_export.runtime.rows import Completion

LARGE = 2**26


def same(one: Completion, other: Completion) -> bool:
    """Whether two texts are equal, with every log probability and count."""
    return replace(one, cached=0, first_token_s=None) == replace(other, cached=0, first_token_s=None)


def requests(seed: int) -> Iterator[tuple[list[list[int]], int, dict[str, Any]]]:
    """Yields requests as servers get them: prompts that begin alike, conversations that grow, contexts with choices."""
    rng = np.random.default_rng(seed)
    heads = [rng.integers(0, 256, length).tolist() for length in (4, 16, 24, 33)]
    for _ in range(14):
        head = heads[rng.integers(len(heads))]
        prompts = [[*head, *rng.integers(0, 256, rng.integers(1, 4)).tolist()] for _ in range(rng.integers(1, 4))]
        options: dict[str, Any] = {"temperature": float(rng.choice([0.0, 1.0])), "seed": int(rng.integers(9))}
        options["logprobs"] = [None, 0, 3][rng.integers(3)]
        if rng.random() < 0.4:
            options["prompt_logprobs"] = True
        yield prompts, int(rng.integers(1, 9)), options
        if rng.random() < 0.5:
            yield prompts, 3, options

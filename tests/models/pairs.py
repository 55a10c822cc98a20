"""Few combinations of many choices, among which every pair of choices is."""

from __future__ import annotations

import itertools
from collections.abc import Iterable


def pairwise(*choices: Iterable[str]) -> list[tuple[str, ...]]:
    """Rows with one of each `choices`, so that every two values of two choices stand together in some row.

    Greedy: of all combinations, each time the first one that has the most pairs that no row has yet.
    """
    rows = list(itertools.product(*choices))
    missing = {pair for row in rows for pair in _pairs(row)}
    found = []
    while missing:
        best = max(rows, key=lambda row: len(missing.intersection(_pairs(row))))
        missing.difference_update(_pairs(best))
        found.append(best)
    return found


def _pairs(row: tuple[str, ...]) -> set[tuple[tuple[int, str], tuple[int, str]]]:
    return set(itertools.combinations(enumerate(row), 2))

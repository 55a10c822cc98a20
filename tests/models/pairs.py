"""A few combinations of many choices that together contain every compatible pair."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

Row = dict[str, Any]


def pairwise(choices: Mapping[str, Sequence[Any]], sound: Callable[[Row], bool]) -> list[Row]:
    """Rows with one value of each choice. Greedy: each row begins with a pair that no row has yet, and adds others.

    Args:
        choices: name -> values.
        sound: whether these values, of some names or of all, are compatible. It may look only at pairs.
    """

    def chosen(row: Mapping[str, int]) -> Row:
        return {name: choices[name][number] for name, number in row.items()}

    numbers = {name: range(len(values)) for name, values in choices.items()}
    every = (
        {left: i, right: j}
        for left, right in itertools.combinations(choices, 2)
        for i, j in itertools.product(numbers[left], numbers[right])
    )
    missing = {frozenset(pair.items()): pair for pair in every if sound(chosen(pair))}
    draw, rows = Random(0), []
    while missing:
        row = dict(next(iter(missing.values())))
        for name in draw.sample(list(choices), len(choices)):
            if name in row:
                continue
            possible = [number for number in numbers[name] if sound(chosen({**row, name: number}))]
            covers = {n: sum(frozenset({(name, n), item}) in missing for item in row.items()) for n in possible}
            row[name] = max(draw.sample(possible, len(possible)), key=covers.__getitem__)
        for pair in itertools.combinations(row.items(), 2):
            missing.pop(frozenset(pair), None)
        rows.append(chosen(row))
    return rows

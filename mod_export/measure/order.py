"""Who takes the next turn: orders in which nobody always comes first and nobody always follows the same neighbour."""

from __future__ import annotations

import random
from collections.abc import Iterator

__all__ = ["block_of", "turns"]


def turns(count: int, seed: int) -> Iterator[tuple[int, ...]]:
    """Endless orders of the numbers below `count`, balanced over every `block_of(count)` of them.

    A block is a Williams design (Experimental designs balanced for the estimation of residual effects of treatments,
    1949): over its orders, everyone has every place equally often, and is followed by everyone else equally often.
    In each block, who is who and which order comes first are drawn at random.
    """
    rng = random.Random(seed)  # noqa: S311 - an order of turns is no secret.
    while True:
        name = rng.sample(range(count), count)
        block = [tuple(name[index] for index in order) for order in _williams(count)]
        yield from rng.sample(block, len(block))


def block_of(count: int) -> int:
    """How many orders in a row are balanced."""
    return len(_williams(count))


def _williams(count: int) -> list[tuple[int, ...]]:
    # 0, 1, n-1, 2, n-2 ...: the differences between neighbours are all different, whatever is added to the row.
    first = [(index + 1) // 2 if index % 2 else -(index // 2) for index in range(count)]
    square = [tuple((place + shift) % count for place in first) for shift in range(count)]
    return square if count % 2 == 0 else square + [order[::-1] for order in square]

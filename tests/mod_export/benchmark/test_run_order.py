"""Orders of turns: balanced places, balanced neighbours, different from block to block."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise

import pytest

from mod_export.benchmark.sampling import balanced_rounds, run_orders


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_block_balances_places_and_neighbours(count: int, seed: int) -> None:
    block = list(islice(run_orders(count, seed), balanced_rounds(count)))
    assert all(sorted(order) == list(range(count)) for order in block)
    places = Counter((place, turn) for order in block for place, turn in enumerate(order))
    neighbours = Counter(pair for order in block for pair in pairwise(order))
    assert len(places) == count * count
    assert len(set(places.values())) == 1
    assert len(neighbours) == count * (count - 1)
    assert len(set(neighbours.values())) <= 1


@pytest.mark.parametrize(("count", "block"), [(1, 2), (2, 2), (3, 6), (4, 4), (5, 10)])
def test_blocks_are_short(count: int, block: int) -> None:
    assert balanced_rounds(count) == block


def test_every_block_is_drawn_anew_and_follows_the_seed() -> None:
    orders = list(islice(run_orders(4, 0), 40))
    blocks = {tuple(orders[begin : begin + 4]) for begin in range(0, 40, 4)}
    assert len(blocks) > 5
    assert list(islice(run_orders(4, 0), 40)) == orders
    assert list(islice(run_orders(4, 1), 40)) != orders

"""Rounds: balanced orders, and samples of sessions. Nothing here depends on the speed of the machine."""

from __future__ import annotations

import gc
import math
import time
from collections import Counter
from collections.abc import Callable
from itertools import chain, islice, pairwise

import numpy as np
import pytest

from mod_export.config import LatencyOptions
from mod_export.errors import EngineError
from mod_export.measure.sampling import (
    Rounds,
    balanced_rounds,
    interleaved,
    planned_looks,
    run_orders,
)

OPTIONS = LatencyOptions(min_speedup=1.0)
NEVER, AT_ONCE = math.inf, -math.inf


@pytest.mark.parametrize(("count", "block"), [(1, 2), (3, 6), (4, 4), (6, 6)])
def test_a_block_balances_positions_and_neighbours(count: int, block: int) -> None:
    assert balanced_rounds(count) == block
    orders = list(islice(run_orders(count, 0), block))
    assert all(sorted(order) == list(range(count)) for order in orders)
    positions = Counter(chain.from_iterable(enumerate(order) for order in orders))
    neighbours = Counter(pair for order in orders for pair in pairwise(order))
    assert (len(positions), len(set(positions.values()))) == (count * count, 1)
    assert len(neighbours) == count * (count - 1)
    assert len(set(neighbours.values())) <= 1


def test_every_block_is_drawn_anew_and_follows_the_seed() -> None:
    orders = list(islice(run_orders(4, 0), 40))
    assert len({tuple(orders[begin : begin + 4]) for begin in range(0, 40, 4)}) > 5
    assert list(islice(run_orders(4, 0), 40)) == orders != list(islice(run_orders(4, 1), 40))


def logging(*names: str) -> tuple[list[str], list[Callable[[], object]]]:
    """Returns a log, and runs that append their names to it."""
    log: list[str] = []
    return log, [lambda name=name: log.append(name) for name in names]


def test_every_round_runs_every_engine_twice() -> None:
    log, runs = logging("dense", "mod")
    rounds = Rounds(runs, 0)
    assert rounds.block == 4
    rounds.sample(8)
    assert rounds.done == 8
    each = [tuple(log[begin : begin + 4]) for begin in range(0, len(log), 4)]
    assert len(set(each)) > 2
    # Every round is balanced, and so is every position over a block.
    for four in (*each, *zip(*each[:4], strict=True)):
        assert sorted(four) == ["dense", "dense", "mod", "mod"]
    assert all(rounds.samples_ms(engine).shape == (8, 2) for engine in (0, 1))


def test_a_sample_is_of_the_engine_and_run_that_it_is_filed_under() -> None:
    pauses: list[float] = []

    def pause() -> None:
        # Every run of the slow engine is slower than the one before.
        pauses.append(0.002 * (len(pauses) + 1))
        time.sleep(pauses[-1])

    rounds = Rounds([lambda: None, pause], 0)
    rounds.sample(4)
    slow_RT = rounds.samples_ms(1)
    assert sorted(slow_RT.reshape(-1)) == sorted(chain.from_iterable(np.sort(slow_RT, axis=1)))
    assert np.all(np.sort(slow_RT.reshape(-1)) >= 1000 * np.array(pauses))
    # The order of the two runs of a round is drawn at random, so the first is not always the earlier one.
    assert 0 < np.sum(slow_RT[:, 0] < slow_RT[:, 1]) < 4


@pytest.mark.parametrize(
    ("window", "tolerance", "most", "deadline", "warmup", "settles"),
    [
        # Runs that take no time: later windows are never a thousand times as slow for a hundred rounds.
        (3, 1000.0, 100, NEVER, range(6, 100), True),
        (1, -1.0, 5, NEVER, range(5, 6), False),
        (4, -1.0, 50, AT_ONCE, range(4, 5), False),
        (4, 1e9, 50, AT_ONCE, range(4, 5), False),
        (1, -1.0, 50, AT_ONCE, range(2, 3), False),
        (2, 1e9, 50, AT_ONCE, range(4, 5), True),
    ],
    ids=[
        "two windows agree",
        "never settles",
        "obeys the deadline",
        "two parts of windows say nothing",
        "shorter ones if asked",
        "two whole windows before the deadline",
    ],
)
def test_warm_up(window: int, tolerance: float, most: int, deadline: float, warmup: range, settles: bool) -> None:
    log, runs = logging("a", "b")
    rounds = Rounds(runs, 0)
    options = OPTIONS.model_copy(update={"warmup": window, "warmup_tolerance": tolerance, "max_warmup": most})
    assert rounds.warm_up(options, deadline) == (settles,) * 2
    assert rounds.warmup in warmup
    assert len(log) == 2 * rounds.warmup
    assert rounds.done == 0


def test_interleaved_runs_have_as_many_samples_as_asked() -> None:
    log, runs = logging("a", "b")
    rounds = interleaved(runs, OPTIONS.model_copy(update={"samples": 9, "warmup": 1, "max_warmup": 2}), 0)
    assert (rounds.warmup, rounds.done, len(log)) == (2, 8, 2 * 2 + 4 * 8)


def test_of_slow_engines_two_blocks_are_sampled_and_no_more_after_the_deadline() -> None:
    _, runs = logging("a", "b")
    rounds = Rounds(runs, 0)
    rounds.sample(20, AT_ONCE)
    assert rounds.done == 2 * rounds.block == 8
    rounds.sample(4, AT_ONCE)
    assert rounds.done == 8
    rounds.sample(4, NEVER)
    assert rounds.done == 12
    slow = interleaved(runs, OPTIONS.model_copy(update={"max_seconds": 0.0}), 0)
    assert (slow.warmup, slow.done) == (4, 8)


@pytest.mark.parametrize(
    ("samples", "most", "planned"),
    [
        (40, 640, (20, 40, 80, 160, 320)),
        (40, 100, (20, 40, 52)),
        (40, 8, (20,)),
        (5, 5, (4,)),
        (9, 17, (8, 12)),
    ],
)
def test_looks_are_few_and_at_whole_blocks(samples: int, most: int, planned: tuple[int, ...]) -> None:
    options = OPTIONS.model_copy(update={"samples": samples, "max_samples": most})
    assert planned_looks(options, 4) == planned


def failing() -> None:
    assert not gc.isenabled()
    raise EngineError("the device is gone")


@pytest.mark.parametrize("was_on", [True, False])
def test_the_garbage_collector_rests_and_then_is_as_before(was_on: bool) -> None:
    before = gc.isenabled()
    (gc.enable if was_on else gc.disable)()
    try:
        with pytest.raises(EngineError, match="the device is gone"):
            interleaved([failing], OPTIONS, 0)
        assert gc.isenabled() is was_on
    finally:
        (gc.enable if before else gc.disable)()

"""Rounds on real sessions of ONNX Runtime; nothing here depends on how fast the machine is."""

from __future__ import annotations

import gc
import math
import time
from itertools import chain

import numpy as np
import pytest
from small_sessions import FEEDS, Session

from mod_export.benchmark.sampling import Rounds, garbage_collector_off, planned_looks
from mod_export.config import LatencyOptions
from mod_export.errors import EngineError

OPTIONS = LatencyOptions(min_speedup=1.0)
NEVER, AT_ONCE = math.inf, -math.inf


def in_rounds(log: list[str], turns: int) -> list[list[str]]:
    return [log[begin : begin + turns] for begin in range(0, len(log), turns)]


def test_every_round_gives_every_runner_two_turns() -> None:
    log: list[str] = []
    rounds = Rounds([Session(log, "dense"), Session(log, "mod")], FEEDS, seed=0)
    assert rounds.block == 4
    rounds.sample(8)
    assert all(sorted(one) == ["dense", "dense", "mod", "mod"] for one in in_rounds(log, 4))
    assert len({tuple(one) for one in in_rounds(log, 4)}) > 2
    rounds.sample(4)
    assert rounds.done == 12
    for runner in (0, 1):
        assert rounds.samples_ms(runner).shape == (12, 2)
        assert rounds.samples_ms(runner).min() > 0


def test_over_a_block_every_place_is_shared_alike() -> None:
    log: list[str] = []
    rounds = Rounds([Session(log, "dense"), Session(log, "mod")], FEEDS, seed=0)
    rounds.sample(rounds.block)
    for place in range(4):
        assert sorted(one[place] for one in in_rounds(log, 4)) == ["dense", "dense", "mod", "mod"]


def test_a_sample_is_of_the_runner_and_turn_that_it_is_filed_under() -> None:
    pauses: list[float] = []

    def pause(number: int) -> None:
        # Every run of the slow session is slower than the one before.
        pauses.append(0.002 * (number + 1))
        time.sleep(pauses[-1])

    rounds = Rounds([Session([], "fast"), Session([], "slow", before_run=pause)], FEEDS, seed=0)
    rounds.sample(4)
    slow_RT = rounds.samples_ms(1)
    assert sorted(slow_RT.reshape(-1)) == sorted(chain.from_iterable(np.sort(slow_RT, axis=1)))
    assert np.all(np.sort(slow_RT.reshape(-1)) >= 1000 * np.array(pauses))
    # Which turn of a round is the first is drawn at random, and is not always the earlier one.
    assert 0 < np.sum(slow_RT[:, 0] < slow_RT[:, 1]) < 4


def test_the_order_follows_the_seed() -> None:
    def order(seed: int) -> list[str]:
        log: list[str] = []
        Rounds([Session(log, "a"), Session(log, "b")], FEEDS, seed=seed).sample(8)
        return log

    assert order(0) == order(0)
    assert len({tuple(order(seed)) for seed in range(4)}) > 1


def test_warm_up_ends_when_two_windows_agree() -> None:
    log: list[str] = []
    rounds = Rounds([Session(log, "a"), Session(log, "b")], FEEDS, seed=0)
    options = OPTIONS.model_copy(update={"warmup": 3, "warmup_tolerance": 1.0, "max_warmup": 100})
    # Later windows of a tiny session are never twice as slow for a hundred rounds.
    assert rounds.warm_up(options, NEVER) == (True, True)
    assert 6 <= rounds.warmup < 100
    assert len(log) == 2 * rounds.warmup
    assert rounds.done == 0


def test_warm_up_of_what_never_settles_ends_at_its_limit() -> None:
    rounds = Rounds([Session([], "a", before_run=lambda number: time.sleep(0.0001))], FEEDS, seed=0)
    options = OPTIONS.model_copy(update={"warmup": 1, "warmup_tolerance": 0.0, "max_warmup": 5})
    assert rounds.warm_up(options, NEVER) == (False,)
    assert rounds.warmup == 5


def test_warm_up_obeys_the_deadline_but_always_has_two_windows() -> None:
    rounds = Rounds([Session([], "a")], FEEDS, seed=0)
    rounds.warm_up(OPTIONS.model_copy(update={"warmup": 4, "warmup_tolerance": 0.0}), AT_ONCE)
    assert rounds.warmup == 8


def test_a_runner_is_fed_what_it_has_inputs_for() -> None:
    dense, mod = Session([], "dense"), Session([], "mod", lengths=True)
    Rounds([dense, mod], FEEDS, seed=0).sample(1)
    assert dense.fed == {("x",)}
    assert mod.fed == {("x", "lengths")}


def test_only_the_outputs_asked_for_are_fetched() -> None:
    some, every = Session([], "a"), Session([], "a")
    Rounds([some], FEEDS, seed=0, outputs=["z"]).sample(1)
    Rounds([every], FEEDS, seed=0).sample(1)
    assert (some.asked, every.asked) == ([["z"]] * 2, [None] * 2)


def test_progress_is_told_after_every_round() -> None:
    told: list[int] = []
    log: list[str] = []
    runners = [Session(log, "a"), Session(log, "b")]
    rounds = Rounds(runners, FEEDS, seed=0, after_round=lambda: told.append(len(log)))
    rounds.warm_up(OPTIONS.model_copy(update={"warmup": 1}), AT_ONCE)
    rounds.sample(3)
    assert told == [2, 4, 8, 12, 16]


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


@pytest.mark.parametrize("was_on", [True, False])
def test_the_garbage_collector_rests_and_then_is_as_before(was_on: bool) -> None:
    before = gc.isenabled()
    (gc.enable if was_on else gc.disable)()
    try:
        with garbage_collector_off():
            assert not gc.isenabled()
        assert gc.isenabled() is was_on
    finally:
        (gc.enable if before else gc.disable)()


def test_the_garbage_collector_comes_back_after_a_failing_run() -> None:
    def gone(number: int) -> None:
        raise EngineError("the device is gone")

    with pytest.raises(EngineError, match="the device is gone"), garbage_collector_off():
        Rounds([Session([], "a", before_run=gone)], FEEDS, seed=0).sample(1)
    assert gc.isenabled()

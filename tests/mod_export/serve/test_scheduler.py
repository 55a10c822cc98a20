"""The scheduler's thread: when each text begins, why one is refused, and how it ends."""

from __future__ import annotations

import itertools
import math
import random
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import PATIENCE_S, Events, held, submitted
from writing import WINDOW, prompts_of_lengths

from mod_export.errors import EngineError, UsageError
from mod_export.runtime.decoder import Decoder
from mod_export.runtime.generator import Generator, load_generator
from mod_export.runtime.prompts import Prompts
from mod_export.runtime.rows import RowText
from mod_export.serve.scheduler import (
    ClosingError,
    Ended,
    Event,
    QueueFullError,
    Scheduler,
    TextObserver,
    WaitedTooLongError,
)

ROWS = 3
SAMPLED = {"temperature": 1.3, "top_k": 50, "top_p": 0.95}


@pytest.fixture(scope="module")
def generator(written: Path) -> Iterator[Generator]:
    with load_generator(written) as found:
        yield found


@pytest.fixture
def scheduler(generator: Generator) -> Iterator[Scheduler]:
    """A scheduler with one engine, so that texts agree to the last bit."""
    with Scheduler(generator, ROWS) as found:
        yield found


def alone(scheduler: Scheduler, generator: Generator, prompt: list[int], tokens: int, **options: Any) -> list[int]:
    """Ids of a text that is written alone."""
    return submitted(scheduler, generator, [prompt], tokens, **options).completions()[0].ids


def test_texts_are_those_of_the_generator(scheduler: Scheduler, written: Path, generator: Generator) -> None:
    prompts = prompts_of_lengths([1, 4, 9, 17, 20])
    found = submitted(scheduler, generator, prompts, 20).completions()
    with load_generator(written) as other:
        expected = other.generate(prompts, 20)
    for row, text in enumerate(expected):
        done = found[row]
        assert (done.ids, done.text, done.finish, done.read) == (text.ids, text.text, text.finish, text.read)
        assert (done.ran, done.overflow) == (text.ran, text.overflow)


def test_a_seed_gives_the_same_text_alone_and_beside_seven_others(scheduler: Scheduler, generator: Generator) -> None:
    prompts = prompts_of_lengths([5, 2, 11, 17, 8, 3, 1, 13])
    options = [{**SAMPLED, "seed": seed} for seed in range(8)]
    expected = [alone(scheduler, generator, *one, **more) for one, more in zip(
        [(prompt, 12) for prompt in prompts], options, strict=True)]  # fmt: skip
    together = [
        submitted(scheduler, generator, [prompt], 12, **more) for prompt, more in zip(prompts, options, strict=True)
    ]
    assert [one.completions()[0].ids for one in together] == expected
    assert alone(scheduler, generator, prompts[0], 12, **SAMPLED, seed=99) != expected[0]


def test_every_request_has_its_own_settings(scheduler: Scheduler, generator: Generator) -> None:
    (prompt,) = prompts_of_lengths([5], seed=2)
    reference = submitted(scheduler, generator, [prompt], 30).completions()[0]
    end = len(reference.text) // 2
    stop = reference.text[end - 2 : end + 1]
    requests: list[dict[str, Any]] = [{"stop": [stop]}, {"stop": [reference.ids[7]]}, {**SAMPLED, "seed": 3}, {}]
    found = [submitted(scheduler, generator, [prompt], 30, **item) for item in requests]
    by_string, by_id, sampled, greedy = (item.completions()[0] for item in found)
    assert (by_string.text, by_string.finish) == (reference.text[: reference.text.index(stop)], "stop")
    assert by_id.ids == reference.ids[: reference.ids.index(reference.ids[7])]
    assert sampled.ids != greedy.ids == reference.ids


def test_a_late_short_text_ends_before_an_early_long_one(scheduler: Scheduler, generator: Generator) -> None:
    ends: list[str] = []
    early, late = prompts_of_lengths([4, 3])

    def ending(name: str, done: threading.Event) -> Any:
        def tell(event: Event) -> None:
            if isinstance(event, Ended):
                ends.append(name)
                done.set()

        return tell

    done = [threading.Event(), threading.Event()]
    with held(scheduler, generator, [[1]], 2):
        scheduler.submit(generator.texts([early], 40), ending("early and long", done[0]))
        scheduler.submit(generator.texts([late], 3), ending("late and short", done[1]))
    assert all(text.wait(PATIENCE_S) for text in done)
    assert ends == ["late and short", "early and long"]


def test_requests_take_turns(scheduler: Scheduler, generator: Generator) -> None:
    """A request with many texts does not make a later one wait for all of them."""
    began: list[str] = []

    class Began(TextObserver):
        def began(self, text: RowText, waited_s: float) -> None:
            assert waited_s >= 0
            began.append({1: "first", 2: "many", 3: "one", 4: "two"}[text.ids[0]])

    scheduler._observers = (Began(),)
    with held(scheduler, generator, [[1]], 2):
        many = submitted(scheduler, generator, [[2]] * 5, 6)
        single = submitted(scheduler, generator, [[3]], 6)
        two = submitted(scheduler, generator, [[4]] * 2, 6)
    for events in (many, single, two):
        events.completions()
    assert began == ["first", "many", "one", "two", "many", "two", "many", "many", "many"]


def test_texts_that_are_written_wait_for_one_prompt_at_a_time(scheduler: Scheduler, generator: Generator) -> None:
    """Between the first tokens of two prompts that came at once, the running text gets a token."""
    order: list[int] = []
    with held(scheduler, generator, [[1, 2, 3]], 30) as running:
        original_tell = running.tell
        others = [submitted(scheduler, generator, [prompt], 5) for prompt in prompts_of_lengths([16, 16])]
        running.tell = lambda event: (order.append(0), original_tell(event))[1]  # type: ignore[method-assign]
        assert running.job is not None
        running.job.tell = running.tell
        for number, events in enumerate(others, 1):

            def tell(event: Event, number: int = number, events: Events = events) -> None:
                order.append(number)
                events.tell(event)

            assert events.job is not None
            events.job.tell = tell
    for events in others:
        events.completions()
    running.completions()
    assert 0 in order[order.index(1) : order.index(2)]


def test_texts_that_are_written_go_on_after_each_part_of_a_prompt(scheduler: Scheduler, generator: Generator) -> None:
    """A prompt of three parts lets the running text write two tokens before its own first one."""
    order: list[str] = []
    with held(scheduler, generator, [[1, 2, 3]], 30) as running:
        (prompt,) = prompts_of_lengths([40])
        other = submitted(scheduler, generator, [prompt], 3)
        for name, events in (("running", running), ("other", other)):

            def tell(event: Event, name: str = name, events: Events = events) -> None:
                order.append(name)
                events.tell(event)

            assert events.job is not None
            events.job.tell = tell
    (done,) = other.completions().values()
    running.completions()
    assert order[: order.index("other")].count("running") >= 2
    assert done.ids == alone(scheduler, generator, prompt, 3)


def test_the_queue_is_bounded(generator: Generator) -> None:
    with Scheduler(generator, max_queue=2) as scheduler:
        assert scheduler.most_texts == 2 + ROWS
        with held(scheduler, generator, [[1]], 4):
            waiting = submitted(scheduler, generator, [[2]] * 4, 4)
            assert (scheduler.busy, scheduler.waiting) == (
                1,
                4,
            )  # Two of them get a row when the thread goes on.
            message = (
                "1 texts are being written, 4 wait for a row and at most 2 may, so there is no room for 1 more; try"
            )
            with pytest.raises(QueueFullError, match=message) as refused:
                scheduler.submit(generator.texts([[3]], 4), lambda _: None)
            assert refused.value.retry_after_s == math.ceil(5 / ROWS)
            with pytest.raises(QueueFullError):
                scheduler.check_room(1)
        assert len(waiting.completions()) == 4
        assert submitted(scheduler, generator, [[3]], 4).completions()[0].ids


def test_a_queue_of_none(generator: Generator) -> None:
    with Scheduler(generator, max_queue=0) as scheduler:
        found = submitted(scheduler, generator, [[1]] * ROWS, 4)
        assert len(found.completions()) == ROWS
        with pytest.raises(QueueFullError):
            scheduler.check_room(ROWS + 1)


def test_a_request_waits_no_longer_than_it_may(generator: Generator) -> None:
    with Scheduler(generator, max_wait_s=0.05) as scheduler:
        with held(scheduler, generator, [[1]] * ROWS, 4) as first:
            late = submitted(scheduler, generator, [[2]] * 2, 4)
            time.sleep(0.1)
        error = late.failure()
        assert isinstance(error, WaitedTooLongError)
        assert str(error) == "no row was free within 0.05 s; try again later"
        assert late.found.empty()
        assert len(first.completions()) == ROWS


def test_cancelled_in_a_row_and_in_the_queue(scheduler: Scheduler, generator: Generator) -> None:
    with held(scheduler, generator, [[1]] * ROWS, 40) as running:
        waiting = submitted(scheduler, generator, [[2]] * 2, 4)
        for events in (running, waiting):
            assert events.job is not None
            events.job.cancel()
            events.job.cancel()
    assert [completion.finish for completion in waiting.completions().values()] == ["cancelled"] * 2
    assert {completion.finish for completion in running.completions().values()} == {"cancelled"}
    assert scheduler.drain(PATIENCE_S)
    assert (scheduler.busy, scheduler.waiting) == (0, 0)


def test_draining_finishes_what_has_come_and_takes_nothing_more(generator: Generator) -> None:
    with Scheduler(generator) as scheduler:
        with held(scheduler, generator, [[1]] * 5, 4) as events:
            assert not scheduler.drain(0.01)
            for refused in (lambda: scheduler.check_room(1), lambda: submitted(scheduler, generator, [[1]], 1)):
                with pytest.raises(ClosingError, match="this server is shutting down and takes no more requests"):
                    refused()
        assert scheduler.drain(PATIENCE_S)
        assert [completion.finish for completion in events.completions().values()] == ["length"] * 5


def test_what_is_not_done_fails_when_it_is_closed(generator: Generator) -> None:
    with Scheduler(generator) as scheduler, held(scheduler, generator, [[1]], 40) as running:
        waiting = submitted(scheduler, generator, [[2]] * 9, 4)
        scheduler._stopping = True
    for events in (running, waiting):
        error = events.failure()
        assert isinstance(error, ClosingError)
        assert str(error) == "this server shut down before the request was done"
        assert events.found.empty()
    # Its rows are free for other texts.
    assert generator.generate([[1]], 2)[0].ids


def test_a_failed_step_fails_the_texts_in_rows_and_no_others(scheduler: Scheduler, generator: Generator) -> None:
    expected = alone(scheduler, generator, [5, 6], 6)
    with held(scheduler, generator, [[1]] * ROWS, 20) as running:
        waiting = submitted(scheduler, generator, [[5, 6]], 6)
        for name, array in generator._decoders[scheduler.bucket].cache.items():
            if name != "counts":
                array.fill(np.nan)
    error = running.failure()
    assert isinstance(error, EngineError)
    assert re.search(r"the logits of token \d+ of prompt \d are not finite", str(error))
    assert waiting.completions()[0].ids == expected
    assert scheduler.healthy


def test_an_engine_that_keeps_failing_is_not_healthy(
    scheduler: Scheduler, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise EngineError("no prompt can be read")

    with monkeypatch.context() as patch:
        patch.setattr(Prompts, "read_part", failing)
        for healthy in (True, True, False):
            error = submitted(scheduler, generator, [[1]], 3).failure()
            assert str(error) == "no prompt can be read"
            assert scheduler.healthy == healthy
    assert submitted(scheduler, generator, [[1]], 3).completions()
    assert scheduler.healthy


def test_an_engine_that_keeps_failing_is_not_healthy_if_others_work(
    scheduler: Scheduler, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first parts of each prompt are read, and then its last part, or the first step, fails."""
    (prompt,) = prompts_of_lengths([40])
    read_part = Prompts.read_part

    def fails(*_: object) -> np.ndarray:
        raise EngineError("it is broken")

    def fails_at_last(prompts: Prompts, part: tuple[int, ...]) -> np.ndarray:
        return fails() if prompts.position == 32 else read_part(prompts, part)

    for kind, name, broken in ((Decoder, "step", fails), (Prompts, "read_part", fails_at_last)):
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, broken)
            for healthy in (True, True, False):
                assert str(submitted(scheduler, generator, [prompt], 3).failure()) == "it is broken"
                assert scheduler.healthy == healthy
        assert submitted(scheduler, generator, [prompt], 3).completions()
        assert scheduler.healthy


def test_a_bug_leaves_nobody_waiting(generator: Generator) -> None:
    class BugError(Exception):
        pass

    def tell(event: Event) -> None:
        raise BugError("one")

    with Scheduler(generator) as scheduler:
        with held(scheduler, generator, [[1]], 30) as running:
            scheduler.submit(generator.texts([[2]], 4), tell)
            waiting = submitted(scheduler, generator, [[3]] * 9, 30)
        assert isinstance(running.failure(), BugError)
        assert isinstance(waiting.failure(), BugError)
        scheduler._thread.join(PATIENCE_S)
        assert not scheduler.healthy
        message = r"texts cannot be written any more \(BugError\('one'\)\); the server has to be started again"
        with pytest.raises(ClosingError, match=message):
            scheduler.check_room(1)


def test_a_decoder_that_cannot_be_opened_is_said_at_once(written: Path) -> None:
    with load_generator(written) as closed:
        pass
    with pytest.raises(UsageError, match="this generator is closed"), Scheduler(closed):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 4}, r"rows: no engine writes 4 texts at once; built: 1, 3 \(generation.batches\)"),
        ({"rows": 0}, "rows: no engine writes 0 texts at once"),
        ({"max_queue": -1}, "max_queue: expected at least 0, got -1"),
        ({"max_wait_s": 0.0}, "max_wait: expected a number of seconds above 0, got 0"),
        ({"max_wait_s": math.nan}, "max_wait: expected a number of seconds above 0, got nan"),
    ],
)
def test_bounds_out_of_range(generator: Generator, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Scheduler(generator, **options)


@pytest.mark.parametrize(("rows", "batches"), [(1, [1]), (2, [3]), (3, [3]), (None, [1, 3])])
def test_the_fewest_rows_that_are_enough(generator: Generator, rows: int | None, batches: list[int]) -> None:
    scheduler = Scheduler(generator, rows)
    assert [bucket.batch for bucket in scheduler.buckets] == batches
    assert scheduler.bucket.batch == batches[-1]


def test_a_text_moves_to_the_engine_of_more_rows_when_others_come(generator: Generator, written: Path) -> None:
    """A single text is written by the engine for one text; its cache, counts and remaining prompt move with it."""
    prompts = prompts_of_lengths([20, 5, 9], seed=4)
    with load_generator(written) as other:
        expected = [other.generate([prompt], 25)[0] for prompt in prompts]
    steps: list[int] = []
    with Scheduler(generator) as scheduler:
        took = Decoder.step

        def step(self: Decoder, *given: Any) -> np.ndarray:
            steps.append(self.batch)
            return took(self, *given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Decoder, "step", step)
            with held(scheduler, generator, [prompts[0]], 25) as first:
                others = [submitted(scheduler, generator, [prompt], 25) for prompt in prompts[1:]]
            found = [item.completions()[0] for item in (first, *others)]
            again = submitted(scheduler, generator, [prompts[1]], 25).completions()[0]
    for done, item in zip([*found, again], [*expected, expected[1]], strict=True):
        assert (done.ids, done.ran, done.overflow, done.read) == (item.ids, item.ran, item.overflow, item.read)
    # One row for the first text alone, three while others are there, and one after all have ended.
    assert [batch for batch, _ in itertools.groupby(steps)] == [1, 3, 1]


@pytest.mark.parametrize("seed", range(3))
def test_whatever_comes_every_text_ends_once(generator: Generator, seed: int) -> None:
    """Random requests from several threads, some of them cancelled: none is lost, and complete texts are correct."""
    rng = random.Random(seed)
    prompts = {n: prompts_of_lengths([n], seed=n)[0] for n in range(1, 12)}
    with Scheduler(generator, max_queue=1000) as scheduler:
        expected = {n: alone(scheduler, generator, prompt, 30) for n, prompt in prompts.items()}
        plans = [[(rng.randrange(1, 12), rng.randrange(1, 31), rng.choice((0, 0, 0.001, 0.01)), rng.randrange(1, 4))
                  for _ in range(12)] for _ in range(4)]  # fmt: skip
        problems: list[object] = []

        def client(plan: list[tuple[int, int, float, int]]) -> None:
            for n, tokens, cancelled_after, texts in plan:
                events = submitted(scheduler, generator, [prompts[n]] * texts, tokens)
                if cancelled_after:
                    time.sleep(cancelled_after)
                    assert events.job is not None
                    events.job.cancel()
                for completion in events.completions().values():
                    right = expected[n][: len(completion.ids)] == completion.ids
                    finished = completion.finish == "length" and len(completion.ids) == tokens
                    if not right or not (finished or (completion.finish == "cancelled" and cancelled_after)):
                        problems.append((n, tokens, completion))
                assert events.found.empty()

        threads = [threading.Thread(target=client, args=(plan,)) for plan in plans]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert problems == []
        assert (scheduler.busy, scheduler.waiting) == (0, 0)
        assert WINDOW > 30

"""Texts that are cancelled, closed in the middle, or written by several threads."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from writing import prompts_of_lengths

from mod_export.errors import EngineError, UsageError
from mod_export.model.model import GeneratingModel
from mod_export.runtime.generator import Generator, load_generator


def test_a_row_is_cancelled_and_the_others_go_on(generator: Generator, writer: GeneratingModel) -> None:
    prompts = prompts_of_lengths([3, 4, 5, 6])
    with generator.stream(prompts, 20) as stream:
        for piece in stream:
            if piece.row == 1 and len(stream.completions[1].ids) == 5:
                stream.cancel(1)
                stream.cancel(3)
    finishes = [completion.finish for completion in stream.completions]
    assert finishes == ["length", "cancelled", "length", "cancelled"]
    expected = [writer.write(prompt, 20) for prompt in prompts]
    assert [completion.ids for completion in stream.completions] == [expected[0], expected[1][:5], expected[2], []]
    # Tokens that were read before count.
    assert stream.completions[1].read == 4 + 4
    assert sum(stream.completions[1].ran.values()) > 0


def test_all_are_cancelled_from_another_thread(generator: Generator) -> None:
    with generator.stream(prompts_of_lengths([3, 4]), 40) as stream:
        for count, _ in enumerate(stream):
            if count == 6:
                thread = threading.Thread(target=stream.cancel)
                thread.start()
                thread.join()
    assert [completion.finish for completion in stream.completions] == ["cancelled"] * 2
    assert 7 <= sum(len(completion.ids) for completion in stream.completions) <= 9


def test_closing_in_the_middle_frees_the_generator(generator: Generator) -> None:
    prompts = prompts_of_lengths([3, 4, 5, 6])
    stream = generator.stream(prompts, 20)
    next(stream)
    with pytest.raises(UsageError, match="this generator is writing another text; finish or close that stream, or"):
        generator.generate(prompts, 1)
    with pytest.raises(UsageError, match="this generator is writing another text"):
        generator.prefix([1] * 20)
    stream.close()
    assert [completion.finish for completion in stream.completions] == ["cancelled"] * 4
    assert list(stream) == []
    assert [completion.finish for completion in generator.generate(prompts, 2)] == ["length"] * 4
    # A stream that was never read from occupies nothing.
    streams = [generator.stream([[1, 2]], 3) for _ in range(2)]
    first, second = (list(stream) for stream in streams)
    assert first == second != []


def test_two_generators_write_at_once(written: Path, generator: Generator) -> None:
    prompt = prompts_of_lengths([5])
    with load_generator(written) as other:
        pairs = list(zip(generator.stream(prompt, 20), other.stream(prompt, 20), strict=True))
        assert all(first_piece == second_piece for first_piece, second_piece in pairs)


def test_a_closed_generator_stays_closed(written: Path) -> None:
    with load_generator(written) as closed:
        assert closed.generate([[1, 2]], 2)[0].ids
    with pytest.raises(UsageError, match="this generator is closed; open another one with load_generator"):
        closed.generate([[1, 2]], 2)


def test_closing_waits_for_the_thread_that_writes(written: Path) -> None:
    """Closing waits, or the thread's next step is refused; either way nothing uses a closed session."""
    for _ in range(2):
        generator = load_generator(written)
        started, ends = threading.Event(), []

        def write(generator: Generator = generator, started: threading.Event = started, ends: list[str] = ends) -> None:
            try:
                for _ in generator.stream([[1, 2, 3]], 5000, rolling=True):
                    started.set()
            except EngineError as error:
                ends.append(str(error))

        thread = threading.Thread(target=write)
        thread.start()
        assert started.wait(30)
        generator.__exit__(None, None, None)
        thread.join(30)
        assert not thread.is_alive()
        assert ["the session is closed" in end for end in ends] == [True]

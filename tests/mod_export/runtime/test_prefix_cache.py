"""Texts that take what earlier texts have read are equal to the last bit to texts that read everything themselves."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from build_folders import rewrite_manifest
from prefix_requests import LARGE, requests, same

from mod_export.errors import EngineError, UsageError
from mod_export.runtime.cache import CachedBlock
from mod_export.runtime.decoder import Decoder
from mod_export.runtime.generator import Generator, load_generator
from mod_export.runtime.logits import Logprob, logprob_of
from mod_export.runtime.prefix_cache import BLOCK, Node, PrefixCache

STEPS = ("steps", 1, 48)
LOGITS = np.zeros(3, np.float32)


@pytest.fixture
def cached(written: Path) -> Iterator[Generator]:
    with load_generator(written, prefix_cache_bytes=LARGE) as found:
        yield found


@pytest.mark.fast("0", "1")
@pytest.mark.parametrize("seed", range(4))
def test_texts_are_bit_equal_with_and_without(generator: Generator, cached: Generator, seed: int) -> None:
    taken = 0
    for prompts, new, options in requests(seed):
        expected = generator.generate(prompts, new, **options)
        found = cached.generate(prompts, new, **options)
        assert all(map(same, found, expected))
        taken += sum(completion.cached for completion in found)
    assert taken > 10 * BLOCK
    assert cached.prefixes is not None
    assert 0 < cached.prefixes.used_bytes <= LARGE


def test_a_closed_generator_keeps_nothing(written: Path) -> None:
    """Its memory is free although Python may not have looked for cycles yet."""
    with load_generator(written, prefix_cache_bytes=LARGE) as closed:
        closed.generate([[*range(20)]], 2)
        assert closed.prefixes is not None
        assert closed.prefixes.used_bytes > 0
    assert closed.prefixes.used_bytes == 0


def test_a_long_conversation_reads_only_what_is_new(generator: Generator, cached: Generator) -> None:
    """Each turn reads the tokens after the last whole part of the longest engine, in parts."""
    history = list(range(18))
    taken = []
    for turn in range(3):
        with cached.stream([history], 4) as stream:
            list(stream)
        (answer,) = stream.completions
        (expected,) = generator.generate([history], 4)
        assert same(answer, expected)
        assert stream.steps == 3
        taken.append(answer.cached)
        history += [*answer.ids, 7 * turn, 1, 2, 3, 4]
    assert taken == [0, 16, 16]
    assert cached.generate([[*range(16), *range(16), 7]], 1)[0].cached == 16
    # A part is taken only where all before it were the same.
    assert cached.generate([[5, *range(1, 16), *range(16), 7]], 1)[0].cached == 0


def test_an_answer_is_read_again_in_parts(generator: Generator, cached: Generator) -> None:
    """Steps wrote its keys and values, and round differently from parts."""
    prompt = list(range(12))
    (answer,) = cached.generate([prompt], 20)
    longer = [*prompt, *answer.ids, 3]
    (found,), (expected,) = cached.generate([longer], 4), generator.generate([longer], 4)
    assert same(found, expected)
    assert found.cached == 0
    assert cached.generate([[*longer, 9]], 4)[0].cached == 32


def test_choices_of_one_prompt_read_it_once(cached: Generator) -> None:
    prompt = list(range(40, 50))
    texts = cached.generate([prompt] * 3, 2, temperature=1.0)
    assert [text.cached for text in texts] == [0, len(prompt), len(prompt)]


def test_a_scored_context_is_read_once_for_all_its_continuations(generator: Generator, cached: Generator) -> None:
    """As evaluations score the choices of a question: the context again and again, with another end."""
    context = list(range(60, 94))
    for choice in range(4):
        scored = {"prompt_logprobs": True, "logprobs": 1}
        (found,) = cached.generate([[*context, 200 + choice]], 0, **scored)
        (expected,) = generator.generate([[*context, 200 + choice]], 0, **scored)
        assert found.prompt_logprobs == expected.prompt_logprobs
        assert len(found.prompt_logprobs) == len(context)
        assert found.cached == (0 if choice == 0 else 32)


def test_more_alternatives_than_were_kept_are_read_again(generator: Generator, cached: Generator) -> None:
    prompt = list(range(40))
    for alternatives, taken in ((1, 0), (4, 0), (2, 32), (4, 32), (5, 0)):
        scored = {"prompt_logprobs": True, "logprobs": alternatives}
        (found,) = cached.generate([prompt], 1, **scored)
        (expected,) = generator.generate([prompt], 1, **scored)
        assert same(found, expected)
        assert found.cached == taken


def test_a_small_cache_keeps_the_newest(written: Path) -> None:
    with load_generator(written, prefix_cache_bytes=LARGE) as generator:
        generator.generate([list(range(16))], 1)
        assert generator.prefixes is not None
        one = generator.prefixes.used_bytes
    with load_generator(written, prefix_cache_bytes=int(2.5 * one)) as generator:
        taken = [generator.generate([[first] * 16], 1)[0].cached for first in (1, 2, 3, 1, 3, 1, 2)]
        assert taken == [0, 0, 0, 0, 16, 16, 0]
        assert generator.prefixes is not None
        assert generator.prefixes.used_bytes <= 2.5 * one


def node(cache: PrefixCache, parent: Node, token: int) -> Node | None:
    rows = {"keys_0": (np.arange(BLOCK), np.zeros((1, BLOCK, 25), np.float32))}
    return cache.add_block(parent, [token] * BLOCK, CachedBlock(rows, None, None, LOGITS))


def test_the_least_recently_used_goes_first_and_a_chain_from_its_end() -> None:
    cache = PrefixCache(10**9)
    start = cache.beginning(STEPS)
    assert start is not None
    before = cache.used_bytes
    one = node(cache, start, 1)
    assert one is not None
    size = cache.used_bytes - before
    cache.max_bytes = before + 3 * size
    two, three = node(cache, one, 2), node(cache, start, 3)
    assert two is not None
    assert three is not None
    both = [[1] * BLOCK, [2] * BLOCK, [0]]
    assert [found.length for found in cache.chain(start, both)] == [0, 16, 32]
    assert node(cache, start, 4) is not None  # Drops 3, which was used least recently.
    assert len(cache.chain(start, [[3] * BLOCK])) == 1
    assert node(cache, start, 5) is not None  # Drops 2, the end of the chain, before 1.
    assert [found.length for found in cache.chain(start, both)] == [0, 16]
    assert cache.used_bytes <= cache.max_bytes
    assert cache.add_block(two, [6] * BLOCK, CachedBlock({}, None, None, LOGITS)) is None  # What was before it is gone.


def test_what_is_larger_than_the_cache_is_not_kept() -> None:
    cache = PrefixCache(1000)
    start = cache.beginning(("parts", 0, 0))
    assert start is not None
    before = cache.used_bytes
    rows = {"keys_0": (np.arange(2), np.zeros((1, 2, 500), np.float32))}
    assert cache.add_block(start, (1, 2), CachedBlock(rows, None, None, LOGITS)) is None
    assert cache.used_bytes == before < 1000
    assert PrefixCache(before - 1).beginning(STEPS) is None


def test_a_block_is_replaced_by_one_with_more_log_probabilities() -> None:
    cache = PrefixCache(10**9)
    start = cache.beginning(STEPS)
    assert start is not None
    ids = [1] * BLOCK

    def scored(alternatives: int) -> CachedBlock:
        top = tuple((token, -1.0) for token in range(alternatives))
        return CachedBlock({}, None, None, LOGITS, (Logprob(1, -1.0, top),))

    sizes = []
    for alternatives in (1, 3, 2):
        cache.add_block(start, ids, scored(alternatives))
        assert len(cache.chain(start, [ids], 1)) == 2
        sizes.append(cache.used_bytes)
    assert len(cache.chain(start, [ids], 3)) == 2
    assert len(cache.chain(start, [ids], 4)) == 1
    # Alternatives take memory: what is dropped for a block that got larger is what was used least recently.
    assert sizes[0] < sizes[1] == sizes[2]
    other = cache.add_block(start, [2] * BLOCK, scored(1))
    assert other is not None
    cache.max_bytes = cache.used_bytes
    assert cache.add_block(start, [2] * BLOCK, scored(2)) is other
    assert (len(cache.chain(start, [ids])), len(cache.chain(start, [[2] * BLOCK], 2))) == (1, 2)
    assert cache.used_bytes <= cache.max_bytes


def parts_of(value: object) -> Iterator[object]:
    """Yields a value, and everything in it."""
    yield value
    for part in value if isinstance(value, tuple) else ():
        yield from parts_of(part)


def test_log_probabilities_take_memory() -> None:
    """Python's objects of a block's log probabilities can be larger than its keys and values."""
    cache = PrefixCache(10**9)
    start = cache.beginning(STEPS)
    assert start is not None
    logits_V = np.linspace(-9, 9, 300, dtype=np.float32)
    blocks = []
    for alternatives in (0, 5, 20):
        blocks.append(tuple(logprob_of(logits_V, 5, alternatives) for _ in range(BLOCK)))
        taken = sum({id(part): sys.getsizeof(part) for part in parts_of(blocks[-1])}.values())
        before = cache.used_bytes
        cache.add_block(start, [alternatives] * BLOCK, CachedBlock({}, None, None, LOGITS, blocks[-1]))
        assert 0.7 * taken < cache.used_bytes - before < 2 * taken + 1000


def test_nothing_is_kept_of_an_engine_that_failed(
    generator: Generator, cached: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = list(range(40))
    cached.generate([prompt], 2)
    step = Decoder.step

    def damaged(self: Decoder, ids_B: np.ndarray, position_B: np.ndarray) -> np.ndarray:
        logits_BV = step(self, ids_B, position_B)
        logits_BV[:] = np.nan
        return logits_BV

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "step", damaged)
        with pytest.raises(EngineError, match="are not finite"):
            cached.generate([prompt], 2)
    assert cached.prefixes is not None
    assert cached.prefixes.used_bytes == 0
    (found,), (expected,) = cached.generate([prompt], 2), generator.generate([prompt], 2)
    assert same(found, expected)
    assert found.cached == 0


def test_where_texts_depend_on_each_other_nothing_is_kept(written_copy: Path) -> None:
    rewrite_manifest(written_copy, lambda manifest: manifest["config"]["generation"].update(slots="fair"))
    with load_generator(written_copy, prefix_cache_bytes=LARGE) as generator:
        assert generator.prefixes is None


def test_a_negative_size_is_refused(written: Path) -> None:
    with pytest.raises(UsageError, match=r"^prefix_cache_bytes: expected at least 0, got -1$"):
        load_generator(written, prefix_cache_bytes=-1)

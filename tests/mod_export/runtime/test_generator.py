"""Texts of a build folder equal the eager model's, however they are batched, begun, cut or cancelled."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from build_folders import file_entry, rewrite_manifest
from observing import observed
from tokenizers import Tokenizer, decoders, models
from writing import WINDOW, prompts_of_lengths

from mod_export.environment import return_freed_memory
from mod_export.errors import UsageError
from mod_export.folder.manifest import GenerationFacts, open_folder
from mod_export.model.model import GeneratingModel, Model
from mod_export.runtime.decoder import Decoder
from mod_export.runtime.generator import Generator, load_generator
from mod_export.runtime.texts import Bytes
from mod_export.types import VACANT, Bucket, DType, Engine

LENGTHS = [1, 2, 3, 5, 8, 13, 16]
SAMPLED = {"temperature": 1.5, "top_k": 40, "top_p": 0.95, "seed": 7}


@pytest.mark.parametrize("length", [1, 8, 9, 17])
def test_greedy_text_is_the_eager_models(generator: Generator, writer: GeneratingModel, length: int) -> None:
    """Prompts have lengths of every bucket, and longer ones."""
    (prompt,) = prompts_of_lengths([length], seed=length)
    new = WINDOW + 1 - length
    (found,) = generator.generate([prompt], new)
    assert found.ids == writer.write(prompt, new)
    assert (found.finish, found.stop, found.prompt_ids) == ("length", None, tuple(prompt))
    assert found.read == WINDOW
    assert len(set(found.ids)) > 3


@pytest.mark.parametrize(("rows", "options"), [(2, {}), (7, SAMPLED)], ids=["greedy", "sampled"])
def test_rows_write_what_they_write_alone(generator: Generator, rows: int, options: dict[str, float]) -> None:
    """Prompts take turns if there are more than rows, and short texts leave while long ones continue."""
    prompts = prompts_of_lengths(LENGTHS[:rows])
    found = generator.generate(prompts, 20, stop=[17, 40, 99], **options)
    # The row of a text seeds its draws, so the text is put into the same row, behind others that end at once.
    alone = [
        generator.generate([*prompts_of_lengths([1] * row), prompt], 20, stop=[17, 40, 99], **options)[row]
        for row, prompt in enumerate(prompts)
    ]
    assert [text.ids for text in found] == [text.ids for text in alone]
    assert [(text.finish, text.stop, text.ran, text.overflow, text.read) for text in found] == [
        (text.finish, text.stop, text.ran, text.overflow, text.read) for text in alone
    ]
    if options:
        assert generator.generate(prompts, 20, **{**options, "seed": 8})[0].ids != found[0].ids


def test_what_ran_is_counted(generator: Generator, writing_model: Model, writer: GeneratingModel) -> None:
    (prompt,) = prompts_of_lengths([6], seed=3)
    (found,) = generator.generate([prompt], WINDOW - 5)
    assert set(found.ran) == set(found.overflow) == set(writer.sites)
    assert all(0 <= count <= writer.capacity[site] for site, count in found.ran.items())
    assert any(found.overflow.values())
    ids_1S = torch.tensor([[*prompt, *found.ids[:-1]]])
    with torch.no_grad():
        _, decided = observed(writer.whole_rows.module(), ids_1S, torch.tensor([ids_1S.shape[1]]))
    assert found.ran == {site: int(selection.live_BK.sum()) for site, selection in decided.items()}
    wanted = {site: int((selection.score_BS > 0).sum()) for site, selection in decided.items()}
    assert {site: found.ran[site] + found.overflow[site] for site in found.ran} == wanted


@pytest.mark.parametrize(("before", "after"), [(8, 0), (20, 6)])
def test_a_prefix_is_the_beginning_of_the_prompt(generator: Generator, before: int, after: int) -> None:
    """A long prefix is continued token by token; with an empty prompt the text starts right after it."""
    (text,) = prompts_of_lengths([before + after], seed=before)
    prefix = generator.prefix(text[:before])
    (found,) = generator.generate([text[before:]], 12, prefix=prefix)
    (expected,) = generator.generate([text], 12)
    assert found.ids == expected.ids
    assert found.prompt_ids == expected.prompt_ids
    assert (found.ran, found.overflow) == (expected.ran, expected.overflow)


def test_a_prefix_is_read_once(generator: Generator) -> None:
    """Rows that come one after the other also read it once."""
    (begin, *ends) = prompts_of_lengths([10, 1, 2, 3, 4])
    prefix = generator.prefix(begin)
    found = generator.generate(ends, 6, prefix=prefix)
    # Read tokens are the prefix, the prompt, and the new tokens except the last.
    assert [one.read for one in found] == [10 + len(end) + 5 for end in ends]
    assert [one.ids for one in found] == [one.ids for one in generator.generate([[*begin, *end] for end in ends], 6)]
    assert sum(row.nbytes for row in prefix.kept.rows.values()) < generator.cache_bytes(Bucket(1, WINDOW))


def test_stop_ids_end_a_text_and_are_not_part_of_it(generator: Generator) -> None:
    (prompt,) = prompts_of_lengths([5])
    (unstopped,) = generator.generate([prompt], 20)
    token = unstopped.ids[7]
    (found,) = generator.generate([prompt], 20, stop=[token])
    assert found.ids == unstopped.ids[: unstopped.ids.index(token)]
    assert (found.finish, found.stop) == ("stop", token)


def test_stop_strings_end_a_text_wherever_it_is_cut(generator: Generator) -> None:
    (unstopped,) = generator.generate(prompts_of_lengths([5], seed=2), 40)
    end = len(unstopped.text) // 2
    stop = unstopped.text[end - 2 : end + 1]
    (found,) = generator.generate([list(unstopped.prompt_ids)], 40, stop=[stop, "never"])
    assert found.text == unstopped.text[: unstopped.text.index(stop)]
    assert (found.finish, found.stop) == ("stop", stop)
    assert stop not in found.text
    assert bytes(found.ids).decode(errors="replace").endswith(stop)


def with_line_end(folder: Path, token: int, **config: bool) -> None:
    """Gives a model of 256 ids a tokenizer in which one id is the byte of a line end, as in Llama 2, and all others are
    words.
    """
    vocabulary = {"<0x0A>" if id_ == token else f"\u2581w{id_}": id_ for id_ in range(256)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    names = ("tokenizer.json", "tokenizer_config.json")
    tokenizer.save(str(folder / names[0]))
    (folder / names[1]).write_text(json.dumps(config))
    entries = {name: file_entry(folder / name) for name in names}
    rewrite_manifest(folder, lambda manifest: (manifest.update(tokenizer=names[0]), manifest["files"].update(entries)))


def test_a_stop_string_of_bytes_ends_a_text_with_its_last_token(generator: Generator, written_copy: Path) -> None:
    """Characters of byte tokens are not certain before another token follows, which must not be computed for that."""
    (unstopped,) = generator.generate(prompts_of_lengths([5], seed=2), 20)
    ids = unstopped.ids
    at = next(i for i, token in enumerate(ids) if i > 3 and token not in ids[:i])
    with_line_end(written_copy, ids[at])
    words = "".join(f" w{token}" for token in ids[:at])  # After a prompt, so with the space before the first.
    with load_generator(written_copy) as reading:
        # At the limit of tokens too, and where the line end is repeated until then.
        prompt: dict[str, Any] = {"prompts": [list(unstopped.prompt_ids)], "stop": ["\n"], "logprobs": 0}
        for limit, bias in ((20, {}), (at + 1, {}), (20, {ids[at]: 100.0})):
            with reading.stream(**prompt, max_new_tokens=limit, logit_bias=bias) as stream:
                pieces = list(stream)
            (found,) = stream.completions
            expected = [ids[at]] if bias else ids[: at + 1]
            assert (found.ids, found.finish, found.stop) == (expected, "stop", "\n")
            assert found.text == "".join(piece.text for piece in pieces) == ("" if bias else words)
            assert len(found.logprobs) == len(expected)
        (twice,) = reading.generate([[1]], 9, stop=["\n\n"], logit_bias={ids[at]: 100.0})
        assert (len(twice.ids), twice.text, twice.stop) == (2, "", "\n\n")


def test_a_stop_string_after_the_limit_of_tokens(generator: Generator) -> None:
    """Only the end of the text makes an incomplete character the one that stops it."""
    (found,) = generator.generate("a", 3, stop=["\N{REPLACEMENT CHARACTER}"], logit_bias={0xE2: 100.0})
    assert (found.finish, found.stop) == ("stop", "\N{REPLACEMENT CHARACTER}")
    (found,) = generator.generate("a", 1, stop=["\N{REPLACEMENT CHARACTER}"], logit_bias={0xE2: 100.0})
    assert (found.ids, found.text, found.finish) == ([0xE2], "", "stop")


def test_pieces_joined_are_the_text(generator: Generator) -> None:
    prompts = prompts_of_lengths([3, 5, 9, 2])
    pieces: dict[int, list] = {row: [] for row in range(4)}
    with generator.stream(prompts, 25, stop=["ab", "\N{REPLACEMENT CHARACTER}" * 9]) as stream:
        for piece in stream:
            pieces[piece.row].append(piece)
    for row, completion in enumerate(stream.completions):
        assert "".join(piece.text for piece in pieces[row]) == completion.text
        assert [piece.token for piece in pieces[row] if piece.token is not None] == completion.ids
        assert completion.text == bytes(completion.ids).decode(errors="replace")
        assert completion.first_token_s is not None
    assert stream.steps > 0
    assert 0 < stream.step_seconds < stream.seconds


def test_one_token(generator: Generator, writer: GeneratingModel) -> None:
    prompts = prompts_of_lengths([4, 16, 20])
    with generator.stream(prompts, 1) as stream:
        assert [piece.row for piece in stream if piece.token is not None] == [0, 1, 2]
    assert [completion.ids for completion in stream.completions] == [writer.write(prompt, 1) for prompt in prompts]
    assert stream.tokens_per_second is None


@pytest.mark.parametrize("length", [5, 20])
def test_the_rate_is_that_of_tokens_after_the_first(generator: Generator, length: int) -> None:
    """Prompts are read in parts of 16 or 8 tokens; the rate does not count them."""
    with generator.stream(prompts_of_lengths([length]), 25) as stream:
        tokens = sum(piece.token is not None for piece in stream)
    (done,) = stream.completions
    assert done.first_token_s is not None
    assert 0 < stream.prompt_seconds <= done.first_token_s
    assert tokens == 25
    assert stream.tokens_per_second == pytest.approx(24 / (stream.seconds - stream.prompt_seconds))
    assert stream.steps == 24


def test_text_is_its_bytes_and_ids_are_of_any_whole_type(generator: Generator) -> None:
    assert isinstance(generator.vocabulary, Bytes)
    text = "d\N{LATIN SMALL LETTER E WITH ACUTE}f f("
    ids = list(text.encode())
    prompts: list[Any] = [text, ids, [ids], np.array(ids), [np.array(ids, np.uint8)]]
    found = [generator.generate(prompt, np.int64(9))[0] for prompt in prompts]  # type: ignore[arg-type]
    assert all((completion.ids, completion.prompt_ids) == (found[0].ids, tuple(ids)) for completion in found)
    mixed = generator.generate(["def f(", [100, 101]], 3)
    assert [completion.prompt_ids for completion in mixed] == [tuple(b"def f("), (100, 101)]


def test_the_dense_baseline(written: Path, writing_model: Model, generator: Generator) -> None:
    baseline = writing_model.dense().generating(WINDOW)
    prompts = prompts_of_lengths([3, 12])
    with load_generator(written, model="dense") as dense:
        found = dense.generate(prompts, 12)
        assert [text.ids for text in found] == [baseline.write(prompt, 12) for prompt in prompts]
        assert [text.ids for text in found] != [text.ids for text in generator.generate(prompts, 12)]
        assert found[0].ran == {}
        assert dense.cache_bytes(Bucket(1, WINDOW)) == 3 * 2 * WINDOW * 2 * 8 * 4


def test_cache_bytes_are_what_is_allocated(generator: Generator) -> None:
    for bucket in generator.buckets:
        with generator._exclusive(bucket) as (decoder,):
            allocated = sum(array.nbytes for name, array in decoder.cache.items() if name != "counts")
            slot = bucket.batch * 2 * 2 * 8 * 4
            # Two routed layers have 18 slots, one layer has all; each has one more, for rows that keep nothing.
            assert generator.cache_bytes(bucket) == (2 * 18 + WINDOW) * slot
            assert allocated == sum(decoder.kv_bytes.values()) == generator.cache_bytes(bucket) + 3 * slot


def many_buckets(written: Path, target: str = "ort-cpu", dtype: DType = "float32") -> Generator:
    """A generator that opens no engines. They may be of any target, so their files are any of the folder."""
    decodes = [Bucket(b, c) for b in (1, 3, 8) for c in (16, 32)]
    manifest = open_folder(written, verify=False)
    path, weights, *_ = manifest.files
    engines = [
        Engine(target=target, model="mod", bucket=bucket, dtype=dtype, path=path, weights=weights, role="decode")
        for bucket in decodes
    ]
    facts = GenerationFacts(
        window=64, sites={"mod": (0, 2)}, capacity={0: 8, 2: 8}, kv_bytes={"mod": {16: 10, 32: 20}}, step_bytes={}
    )
    return Generator(written, manifest.model_copy(update={"generation": facts}), engines, 1)


def test_bucket_for(written: Path) -> None:
    """Takes the shortest cache, then the fewest rows, or the most rows if no bucket has enough. The longest cache may
    be shorter than the window that capacities are counted for.
    """
    generator = many_buckets(written)
    requests = [(1, 1), (2, 16), (3, 17), (4, 20), (8, 16), (9, 2)]
    found = [generator.bucket_for(texts, tokens) for texts, tokens in requests]
    assert [bucket.name for bucket in found] == ["b1s16", "b3s16", "b3s32", "b8s32", "b8s16", "b8s16"]
    assert [generator.cache_bytes(bucket) for bucket in found] == [10, 30, 60, 160, 80, 80]
    assert generator.window == 32
    with pytest.raises(UsageError, match="a text of 33 tokens, prompt and answer together, is longer than the window"):
        generator.bucket_for(1, 33)


@pytest.mark.parametrize(
    ("target", "dtype", "found"),
    [("openvino", "float32", 10), ("openvino", "bfloat16", 5), ("openvino", "int8", 5), ("openvino", "int4", 5),
     ("ort-cpu", "int8", 10), ("ort-cpu", "int4", 10)],
)  # fmt: skip
def test_cache_bytes_of_quantized_weights(written: Path, target: str, dtype: DType, found: int) -> None:
    """The cache has the dtype of everything beside the weights, which depends on the target."""
    assert many_buckets(written, target, dtype).cache_bytes(Bucket(1, 16)) == found


def rolled(writer: GeneratingModel, prompt: list[int], new: int) -> list[int]:
    """Text with rolling: only the second half of a full window is kept, and read as if it were the whole text."""
    text, written = list(prompt), []
    while len(written) < new:
        part = writer.write(text, min(WINDOW + 1 - len(text), new - len(written)))
        written += part
        text = [*text, *part][-(WINDOW // 2) :]
    return written


def test_rows_roll_when_they_are_full(generator: Generator, writer: GeneratingModel) -> None:
    """They continue from the second half; a prompt may fill the window. A text that does not fill it does not roll."""
    prompts = prompts_of_lengths([2, WINDOW, 41, 7], seed=5)
    found = generator.generate(prompts, 70, rolling=True)
    assert [completion.ids for completion in found] == [rolled(writer, prompt, 70) for prompt in prompts]
    assert {completion.finish for completion in found} == {"length"}
    # Halves that were read again are counted.
    assert all(completion.read > len(prompt) + 69 for completion, prompt in zip(found, prompts, strict=True))
    (alone,) = generator.generate([prompts[1]], 120, rolling=True)
    assert alone.ids == rolled(writer, prompts[1], 120)
    assert generator.generate([prompts[0]], 10, rolling=True)[0].ids == found[0].ids[:10]


def test_all_prompts_are_read_before_a_text_goes_on(generator: Generator) -> None:
    """So every step writes a token of each text, and none is spent on a part of the rows. The same holds for the prompt
    of a text that gets the row of another.
    """
    with generator.stream(prompts_of_lengths([41, 2, 33], seed=3), 8, ignore_eos=True) as stream:
        rows = [piece.row for piece in stream if piece.token is not None]
        assert stream.steps == 7
    assert rows == [0, 1, 2] * 8
    with generator.stream(prompts_of_lengths([2, 3, 4, 41], seed=3), 5, ignore_eos=True) as stream:
        rows = [piece.row for piece in stream if piece.token is not None]
        assert stream.bucket.batch == 3
        assert stream.steps == 8
    assert rows == [0, 1, 2] * 5 + [3] * 5


def test_rows_without_a_text_are_vacant_in_a_step(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """So attention reads next to nothing for them, and their counts are 0."""
    step, seen = Decoder.step, []

    def watched(decoder: Decoder, ids_B: np.ndarray, position_B: np.ndarray) -> np.ndarray:
        counts_BN = decoder.cache["counts"]
        seen.append((position_B.tolist(), [bool(counts_BN[b].any()) for b in np.flatnonzero(position_B < 0)]))
        return step(decoder, ids_B, position_B)

    monkeypatch.setattr(Decoder, "step", watched)
    for texts in (3, 2):  # The second request finds what the first one left in a row.
        generator.generate(prompts_of_lengths([20, 9, 30][-texts:], seed=3), 6, ignore_eos=True)
    idle = [[position for position in positions if position < 0] for positions, _ in seen]
    assert idle == [[]] * 5 + [[VACANT]] * 5
    assert not any(in_use for _, counts in seen for in_use in counts)


TOKENS = 5000
GROWTH = 3 * 2**20
"""Bytes of a text and what the allocator rounds up. Keeping what rolling reads again would need more."""


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
def test_a_long_text_takes_no_more_memory_than_a_short_one(generator: Generator, rows: int) -> None:
    process = psutil.Process()
    taken = []
    with generator.stream(prompts_of_lengths([9] * rows), TOKENS, rolling=True) as stream:
        for count, _ in enumerate(stream):
            if count % 500 == 499:
                gc.collect()
                return_freed_memory()
                taken.append(process.memory_info().rss)
    assert [len(completion.ids) for completion in stream.completions] == [TOKENS] * rows
    assert len(taken) >= 10 * rows
    # The first five hundred warm up.
    assert max(taken[1:]) - taken[1] < GROWTH * rows, taken
    assert sum(len(completion.text) for completion in stream.completions) > 0

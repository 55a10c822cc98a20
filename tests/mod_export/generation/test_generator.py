"""Texts of a build folder are the eager model's, however they are batched, begun, cut or cancelled."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from manifests import file_entry, rewrite_manifest
from writing import WINDOW, engine_path, prompts_of_lengths

from mod_export.artifacts import Bucket, Engine
from mod_export.config import config_from_toml
from mod_export.errors import BuildFolderError, EngineError, TargetError, UsageError
from mod_export.generation.decoder import Decoder
from mod_export.generation.generator import Generator, load_generator
from mod_export.generation.stream import Completion
from mod_export.generation.texts import Bytes
from mod_export.graph.weights_file import WeightsFile
from mod_export.memory import limited
from mod_export.model import Model
from mod_export.protocols import GeneratingModel

LENGTHS = [1, 2, 3, 5, 8, 13, 16]
SAMPLED = {"temperature": 1.5, "top_k": 40, "top_p": 0.95, "seed": 7}


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 17, 30])
def test_greedy_text_is_the_eager_models(generator: Generator, writer: GeneratingModel, length: int) -> None:
    """From prompts of every bucket, and longer than all of them."""
    (prompt,) = prompts_of_lengths([length], seed=length)
    new = WINDOW + 1 - length
    (found,) = generator.generate([prompt], new)
    assert found.ids == writer.write(prompt, new)
    assert (found.finish, found.stop, found.prompt_ids) == ("length", None, tuple(prompt))
    assert found.read == WINDOW
    assert len(set(found.ids)) > 3


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [2, 3, 7])
def test_rows_write_what_they_write_alone(generator: Generator, rows: int, options: dict[str, float]) -> None:
    """More prompts than rows take turns, and short texts leave while long ones go on."""
    prompts = prompts_of_lengths(LENGTHS[:rows])
    found = generator.generate(prompts, 20, stop=[17, 40, 99], **options)
    # A text draws with numbers of its row, so the text is put there: behind others that end at once.
    alone = [
        generator.generate([*prompts_of_lengths([1] * row), prompt], 20, stop=[17, 40, 99], **options)[row]
        for row, prompt in enumerate(prompts)
    ]
    assert [one.ids for one in found] == [one.ids for one in alone]
    assert [(one.finish, one.stop, one.ran, one.overflow, one.read) for one in found] == [
        (one.finish, one.stop, one.ran, one.overflow, one.read) for one in alone
    ]
    if options:
        assert generator.generate(prompts, 20, **{**options, "seed": 8})[0].ids != found[0].ids


def test_one_row_writes_what_three_write(written: Path) -> None:
    """By the other decode bucket."""
    prompts = prompts_of_lengths([4, 9])
    with load_generator(written) as generator:
        together = generator.generate(prompts, 24)
        assert [generator.generate(prompt, 24)[0].ids for prompt in prompts] == [one.ids for one in together]


def test_what_ran_is_counted(generator: Generator, writing_model: Model, writer: GeneratingModel) -> None:
    (prompt,) = prompts_of_lengths([6], seed=3)
    (found,) = generator.generate([prompt], WINDOW - 5)
    assert set(found.ran) == set(found.overflow) == set(writer.sites)
    assert all(0 <= count <= writer.capacity[site] for site, count in found.ran.items())
    assert any(found.overflow.values())
    ids_1S = np.array([[*prompt, *found.ids[:-1]]])
    module = writer.loaded.module()
    import torch

    with torch.no_grad():
        _, decided = module.trace(torch.from_numpy(ids_1S), torch.tensor([ids_1S.shape[1]]))
    assert found.ran == {site: int(one.live_BK.sum()) for site, one in decided.items()}
    wanted = {site: int((one.score_BS > 0).sum()) for site, one in decided.items()}
    assert {site: found.ran[site] + found.overflow[site] for site in found.ran} == wanted


@pytest.mark.parametrize(("before", "after"), [(1, 4), (8, 0), (16, 3), (20, 6)])
def test_a_prefix_is_the_beginning_of_the_prompt(generator: Generator, before: int, after: int) -> None:
    """A long one is read on token by token; an empty prompt goes on right after it."""
    (whole,) = prompts_of_lengths([before + after], seed=before)
    prefix = generator.prefix(whole[:before])
    (found,) = generator.generate([whole[before:]], 12, prefix=prefix)
    (expected,) = generator.generate([whole], 12)
    assert found.ids == expected.ids
    assert found.prompt_ids == expected.prompt_ids
    assert (found.ran, found.overflow) == (expected.ran, expected.overflow)


def test_a_prefix_is_read_once(generator: Generator) -> None:
    """By rows that come one after the other, too."""
    (begin, *ends) = prompts_of_lengths([10, 1, 2, 3, 4, 5])
    prefix = generator.prefix(begin)
    found = generator.generate(ends, 6, prefix=prefix)
    # What was read is prefix, prompt and the new tokens but for the last.
    assert [one.read for one in found] == [10 + len(end) + 5 for end in ends]
    assert [one.ids for one in found] == [one.ids for one in generator.generate([[*begin, *end] for end in ends], 6)]
    assert prefix.kept.nbytes < generator.cache_bytes(Bucket(1, WINDOW))


def test_stop_ids_end_a_text_and_are_not_part_of_it(generator: Generator) -> None:
    (prompt,) = prompts_of_lengths([5])
    (whole,) = generator.generate([prompt], 20)
    token = whole.ids[7]
    (found,) = generator.generate([prompt], 20, stop=[token])
    assert found.ids == whole.ids[: whole.ids.index(token)]
    assert (found.finish, found.stop) == ("stop", token)


def test_stop_strings_end_a_text_wherever_it_is_cut(generator: Generator) -> None:
    whole, end = _printable(generator)
    stop = whole.text[end - 2 : end + 1]
    (found,) = generator.generate([list(whole.prompt_ids)], 40, stop=[stop, "never"])
    assert found.text == whole.text[: whole.text.index(stop)]
    assert (found.finish, found.stop) == ("stop", stop)
    assert stop not in found.text
    assert bytes(found.ids).decode(errors="replace").endswith(stop)


def _printable(generator: Generator) -> tuple[Completion, int]:
    """A text, and a place in it that has two characters before it."""
    (found,) = generator.generate([prompts_of_lengths([5], seed=2)[0]], 40)
    return found, len(found.text) // 2


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
    assert [one.ids for one in stream.completions] == [writer.write(prompt, 1) for prompt in prompts]


def test_text_is_its_bytes(generator: Generator) -> None:
    assert isinstance(generator.vocabulary, Bytes)
    (text,) = generator.generate("d\N{LATIN SMALL LETTER E WITH ACUTE}f f(", 9)
    (ids,) = generator.generate(list("d\N{LATIN SMALL LETTER E WITH ACUTE}f f(".encode()), 9)
    (array,) = generator.generate(np.frombuffer("d\N{LATIN SMALL LETTER E WITH ACUTE}f f(".encode(), np.uint8), 9)
    assert text.ids == ids.ids == array.ids
    mixed = generator.generate(["def f(", [100, 101]], 3)
    assert [one.prompt_ids for one in mixed] == [tuple(b"def f("), (100, 101)]


def test_the_dense_twin(written: Path, writing_model: Model, generator: Generator) -> None:
    twin = writing_model.of_kind("dense").generating(WINDOW)
    prompts = prompts_of_lengths([3, 12])
    with load_generator(written, model="dense") as dense:
        found = dense.generate(prompts, 12)
        assert [one.ids for one in found] == [twin.write(prompt, 12) for prompt in prompts]
        assert [one.ids for one in found] != [one.ids for one in generator.generate(prompts, 12)]
        assert found[0].ran == {}
        assert dense.cache_bytes(Bucket(1, WINDOW)) == 3 * 2 * WINDOW * 2 * 8 * 4


@pytest.mark.parametrize("batch", [1, 3])
def test_cache_bytes_are_what_is_taken(generator: Generator, batch: int) -> None:
    bucket = Bucket(batch, WINDOW)
    with generator._taken(bucket) as decoder:
        taken = sum(array.nbytes for name, array in decoder.cache.items() if name != "counts")
        assert generator.cache_bytes(bucket) == taken == sum(decoder.kv_bytes.values())
        # Two routed layers of 18 slots, and one of all.
        assert taken == batch * (2 * 18 + WINDOW) * 2 * 2 * 8 * 4


def many_buckets(written: Path) -> Generator:
    """Opens nothing."""
    decodes = [Bucket(b, c) for b in (1, 3, 8) for c in (16, 32)]
    engines = [
        Engine(target="ort-cpu", model="mod", bucket=one, dtype="float32", path="p", weights="w", role="decode")
        for one in decodes
    ]
    about = {"kv_bytes": {"mod": {"16": 10, "32": 20}}, "sites": ["0", "2"], "window": 64}
    return Generator(written, engines, config_from_toml(None), about, 256, None)


@pytest.mark.parametrize(
    ("texts", "tokens", "bucket"),
    [(1, 1, (1, 16)), (2, 16, (3, 16)), (3, 17, (3, 32)), (4, 20, (8, 32)), (8, 16, (8, 16)), (9, 2, (8, 16))],
)
def test_bucket_for(written: Path, texts: int, tokens: int, bucket: tuple[int, int]) -> None:
    """The shortest cache first, then the fewest rows; where no bucket has enough rows, the most."""
    generator = many_buckets(written)
    assert generator.bucket_for(texts, tokens) == Bucket(*bucket)
    assert generator.cache_bytes(Bucket(*bucket)) == bucket[0] * (10 if bucket[1] == 16 else 20)


def test_a_text_is_as_long_as_the_longest_cache(written: Path) -> None:
    """Which may be shorter than the window that capacities are counted for."""
    generator = many_buckets(written)
    assert generator.window == 32
    with pytest.raises(UsageError, match="a text of 33 tokens, prompt and answer together, is longer than the window"):
        generator.bucket_for(1, 33)


def rolled(writer: GeneratingModel, prompt: list[int], new: int) -> list[int]:
    """What rolling means: a full window is forgotten but for its second half, which is read as if it were all."""
    text, written = list(prompt), []
    while len(written) < new:
        part = writer.write(text, min(WINDOW + 1 - len(text), new - len(written)))
        written += part
        text = [*text, *part][-(WINDOW // 2) :]
    return written


@pytest.mark.parametrize("length", [1, 30, 48])
def test_rolling_goes_on_from_the_second_half(generator: Generator, writer: GeneratingModel, length: int) -> None:
    (prompt,) = prompts_of_lengths([length], seed=5)
    (found,) = generator.generate([prompt], 120, rolling=True)
    assert found.ids == rolled(writer, prompt, 120)
    assert found.finish == "length"
    # The halves that were read again are counted.
    assert found.read > length + 119


def test_rows_roll_when_they_are_full(generator: Generator, writer: GeneratingModel) -> None:
    prompts = prompts_of_lengths([2, 20, 41, 7])
    found = generator.generate(prompts, 70, rolling=True)
    assert [one.ids for one in found] == [rolled(writer, prompt, 70) for prompt in prompts]


def test_a_short_text_that_may_roll_does_not(generator: Generator) -> None:
    (prompt,) = prompts_of_lengths([4])
    assert generator.generate([prompt], 10, rolling=True)[0].ids == generator.generate([prompt], 10)[0].ids


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "expected at least one prompt"),
        ("", {}, "prompt 0 is empty; expected at least one token"),
        ([[1], []], {}, "prompt 1 is empty; expected at least one token"),
        ([[256]], {}, "prompt 0: expected text, or token ids from 0 to 255, got 256"),
        ([[1], [5, -1]], {}, "prompt 1: expected text, or token ids from 0 to 255, got -1"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens: expected a whole number of at least 1, got 0"),
        ([[1]], {"max_new_tokens": True}, "max_new_tokens: expected a whole number of at least 1, got True"),
        ([[1]], {"max_new_tokens": 1.5}, "max_new_tokens: expected a whole number of at least 1, got 1.5"),
        (
            [[1]],
            {"max_new_tokens": 49},
            "a text of 49 tokens, prompt and answer together, is longer than the window of 48; ask for fewer new "
            "tokens, build a longer window (generation.window), or let the text roll (rolling=True, --roll), which "
            "goes on from its second half",
        ),
        (
            [[1] * 49],
            {"rolling": True},
            "a prompt of 49 tokens does not fit the window of 48, also where texts roll; give its last 48 tokens, or ",
        ),
        ([[1]], {"temperature": -1.0}, "temperature: got -1.0, expected a finite number of at least 0; "),
        ([[1]], {"top_k": -1}, "top_k: got -1, expected a whole number of at least 0; "),
        ([[1]], {"top_p": 0.0}, "top_p: got 0.0, expected a number above 0 and at most 1; "),
        ([[1]], {"seed": -1}, "seed: got -1, expected a whole number of at least 0"),
        ([[1]], {"stop": [""]}, "stop: got '', expected a string of at least one character; leave it out"),
        ([[1]], {"stop": "ab"}, "stop: got the string 'ab', expected a list of strings and ids; write ['ab']"),
    ],
)  # fmt: skip
def test_refused_before_the_first_token(
    generator: Generator, prompts: list, options: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        generator.stream(prompts, **{"max_new_tokens": 2, **options})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("length", [0, 48, 60])
def test_prefixes_that_leave_no_room(generator: Generator, length: int) -> None:
    with pytest.raises(UsageError, match=f"^a prefix has 1 to 47 tokens, got {length}$"):
        generator.prefix([1] * length)


def test_ids_that_stand_for_no_text(written_copy: Path) -> None:
    rewrite_manifest(written_copy, lambda manifest: manifest.update(tokenizer=None))
    with load_generator(written_copy) as generator:
        assert generator.vocabulary is None
        (found,) = generator.generate([[1, 2]], 4)
        assert (len(found.ids), found.text) == (4, "")
        with pytest.raises(UsageError, match="ids stand for no text; give prompts as ids, or build with a tokenizer"):
            generator.generate("text", 4)
        with pytest.raises(UsageError, match="stop: this model's ids stand for no text; give ids to stop at"):
            generator.generate([[1]], 4, stop=["x"])
        assert generator.generate([[1, 2]], 4, stop=[found.ids[1]])[0].finish == "stop"


def test_a_row_is_cancelled_and_the_others_go_on(generator: Generator, writer: GeneratingModel) -> None:
    prompts = prompts_of_lengths([3, 4, 5, 6])
    with generator.stream(prompts, 20) as stream:
        for piece in stream:
            if piece.row == 1 and len(stream.completions[1].ids) == 5:
                stream.cancel(1)
                stream.cancel(3)
    finishes = [one.finish for one in stream.completions]
    assert finishes == ["length", "cancelled", "length", "cancelled"]
    expected = [writer.write(prompt, 20) for prompt in prompts]
    assert [one.ids for one in stream.completions] == [expected[0], expected[1][:5], expected[2], []]
    # It counts what it read until then.
    assert stream.completions[1].read == 4 + 4
    assert sum(stream.completions[1].ran.values()) > 0


def test_all_are_cancelled_from_another_thread(generator: Generator) -> None:
    with generator.stream(prompts_of_lengths([3, 4]), 40) as stream:
        for count, _ in enumerate(stream):
            if count == 6:
                thread = threading.Thread(target=stream.cancel)
                thread.start()
                thread.join()
    assert [one.finish for one in stream.completions] == ["cancelled"] * 2
    assert 7 <= sum(len(one.ids) for one in stream.completions) <= 9


def test_closing_in_the_middle_frees_the_generator(generator: Generator) -> None:
    prompts = prompts_of_lengths([3, 4, 5, 6])
    stream = generator.stream(prompts, 20)
    next(stream)
    with pytest.raises(UsageError, match="this generator is writing another text; finish or close that stream, or"):
        generator.generate(prompts, 1)
    with pytest.raises(UsageError, match="this generator is writing another text"):
        generator.prefix([1] * 20)
    stream.close()
    assert [one.finish for one in stream.completions] == ["cancelled"] * 4
    assert list(stream) == []
    assert [one.finish for one in generator.generate(prompts, 2)] == ["length"] * 4


def test_two_generators_write_at_once(written: Path) -> None:
    prompt = prompts_of_lengths([5])
    with load_generator(written) as first, load_generator(written) as second:
        pairs = list(zip(first.stream(prompt, 20), second.stream(prompt, 20), strict=True))
        assert all(one == other for one, other in pairs)


def test_a_stream_that_nobody_reads_takes_nothing(generator: Generator) -> None:
    streams = [generator.stream([[1, 2]], 3) for _ in range(2)]
    first, second = (list(stream) for stream in streams)
    assert first == second != []


def test_no_memory_for_the_cache(written: Path) -> None:
    with load_generator(written) as generator:
        stream = generator.stream([[1]] * 3, 2)
        with limited(1), pytest.raises(UsageError, match=r"the cache of 3 texts of 48 tokens takes 0 MiB, 0 MiB are"):
            next(stream)
        assert generator.generate([[1]] * 3, 2)


def test_an_engine_that_was_damaged_is_refused(written_copy: Path) -> None:
    path = engine_path(written_copy, "mod-decode-b3s48-float32")
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(BuildFolderError, match="mod-decode-b3s48-float32"):
        load_generator(written_copy)
    load_generator(written_copy, model="dense")


def test_engines_that_missed_their_gates_are_refused(written_copy: Path) -> None:
    refused = {"engines/ort-cpu/mod-decode-b1s48-float32.onnx": ["text: logits differ"]}
    rewrite_manifest(written_copy, lambda manifest: manifest.update(refused=refused))
    with pytest.raises(TargetError, match=r"missed their gates and are not served \(text: logits differ\)"):
        load_generator(written_copy)
    load_generator(written_copy, model="dense")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"target": "tensorrt"}, TargetError, "holds no engines of 'tensorrt' that generate; built for ort-cpu"),
        ({"dtype": "float16"}, TargetError, "holds no float16 engines for ort-cpu that generate"),
        ({"model": "other"}, UsageError, "holds no engines of model 'other' that generate"),
    ],
)
def test_what_a_folder_does_not_hold(written: Path, arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load_generator(written, **arguments)


def test_folders_that_cannot_generate(built: Path, written_copy: Path) -> None:
    """The model chooses with the whole text before it; the way out is training, and what is possible is scoring."""
    with pytest.raises(UsageError) as caught:
        load_generator(built)
    said = str(caught.value)
    assert said.startswith(f"{built}: cannot generate: routing.selection=topk: whether a token is among the k best")
    assert "train the predictor beside it" in said
    assert "mod-export generate --selection topk-prefill" in said
    rewrite_manifest(written_copy, lambda manifest: manifest.pop("generation"))
    with pytest.raises(UsageError, match="cannot generate: it was built by an earlier mod-export"):
        load_generator(written_copy)


def poisoned(folder: Path, name: str, row: int) -> None:
    """NaN in a row of a weight, signed as if it had been built so."""
    (path,) = (folder / "graphs").glob("weights-float32.data")
    _, shape, offset, length = WeightsFile.open(path).entries[name]
    data = bytearray(path.read_bytes())
    width = length // shape[0]
    start = offset + row * width
    data[start : start + width] = np.full(width // 4, np.nan, np.float32).tobytes()
    path.write_bytes(data)
    relative = str(path.relative_to(folder))
    rewrite_manifest(folder, lambda manifest: manifest["files"][relative].update(file_entry(path)))


def test_logits_that_are_not_finite_stop_with_token_and_position(written_copy: Path, generator: Generator) -> None:
    """The embedding of a token that the text comes to is damaged."""
    prompts = prompts_of_lengths([2, 6], seed=4)
    whole = generator.generate(prompts, 20)[1].ids
    at = next(i for i, token in enumerate(whole) if token not in whole[:i] and i > 3)
    poisoned(written_copy, "embedding.weight", whole[at])
    message = (
        rf"the logits of token {at + 2} of prompt 0 are not finite, at position {6 + at + 1} of the text: the weights "
        "or the engine are damaged; mod-export validate looks for the place"
    )
    with load_generator(written_copy) as damaged:
        stream = damaged.stream([prompts[1]], 20)
        with pytest.raises(EngineError, match=message):
            list(stream)
        assert stream.completions[0].ids == whole[: at + 1]
        # The generator is free again, and texts without that token go on.
        assert damaged.generate([prompts[1]], at)[0].ids == whole[:at]
        with pytest.raises(EngineError, match="the logits of token 1 of prompt 0 are not finite, at position 2"):
            damaged.generate([[whole[at], 1]], 3)


def test_an_engine_that_is_no_step(written: Path) -> None:
    with load_generator(written) as generator:
        engine = generator._prefill[8]
        with generator._load(engine) as runner, pytest.raises(EngineError, match="expected input_ids, positions and"):
            Decoder(runner, 8, "prefill")


def test_a_prefix_belongs_to_the_engines_that_read_it(written: Path, generator: Generator) -> None:
    with load_generator(written, model="dense") as dense:
        prefix = dense.prefix([1, 2, 3])
    with pytest.raises(UsageError, match=r"^prefix: was read by engines/ort-cpu/dense-prefill-.*; read it again here"):
        generator.generate([[4]], 2, prefix=prefix)


def test_a_closed_generator_stays_closed(written: Path) -> None:
    with load_generator(written) as closed:
        assert closed.generate([[1, 2]], 2)[0].ids
    with pytest.raises(UsageError, match="this generator is closed; open another one with load_generator"):
        closed.generate([[1, 2]], 2)


def test_closing_waits_for_the_thread_that_writes(written: Path) -> None:
    """Or refuses it its next step: either way nobody runs what is gone."""
    for _ in range(5):
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


@pytest.mark.parametrize("extra", [[], [[5, 6], [7]]], ids=["alone", "with others"])
def test_a_prompt_that_fills_the_window_rolls(generator: Generator, extra: list[list[int]]) -> None:
    full = prompts_of_lengths([generator.window])[0]
    found = generator.generate([full, *extra], 20, rolling=True)
    assert [len(one.ids) for one in found] == [20] * (1 + len(extra))
    # The first token is that of the whole prompt.
    assert found[0].ids[0] == generator.generate([full], 1)[0].ids[0]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "expected a prompt or a list of prompts, got NoneType"),
        ([[1.5]], r"prompt 0: expected text, or token ids from 0 to 255, got 1\.5"),
        ([[1], [True]], "prompt 1: expected text, or token ids from 0 to 255, got True"),
    ],
)
def test_what_is_no_prompt(generator: Generator, prompts: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        generator.generate(prompts, 2)


def test_prompts_and_numbers_of_numpy(generator: Generator) -> None:
    expected = generator.generate([[1, 2, 3]], 3)[0].ids
    assert generator.generate([np.array([1, 2, 3])], np.int64(3))[0].ids == expected  # type: ignore[list-item,arg-type]
    assert generator.generate(np.array([1, 2, 3]), 3)[0].ids == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("stop", [[256], [-1], [1.5]])
def test_stops_that_are_none(generator: Generator, stop: list[Any]) -> None:
    with pytest.raises(UsageError, match=r"stop: expected strings and ids from 0 to 255, got "):
        generator.generate([[1]], 2, stop=stop)

"""Text and token ids: nothing that is shown depends on where a text was cut."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tokenizers.decoders import DecodeStream

from mod_export.errors import UsageError
from mod_export.runtime.generate.texts import Bytes, StopText, TokenizersFile, Vocabulary

TEXT = "the quick brown fox jumps over the lazy dog; \u00fcber \u20ac \U0001f600\n" * 50
END = "<|end|>"


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """A byte-level vocabulary of 280, as GPT-2's is made; loses nothing."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False, special_tokens=[END])
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


@pytest.fixture(scope="module")
def fallback() -> Tokenizer:
    """Words that begin with a space, and bytes for all else, as Llama's is made; ids 0 to 255 are the bytes."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581": 256, "\u2581a": 257, "b": 258}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def saved(tokenizer: Tokenizer, folder: Path) -> TokenizersFile:
    tokenizer.save(str(folder / "tokenizer.json"))
    return TokenizersFile(folder / "tokenizer.json")


@pytest.fixture(scope="module")
def byte_level_file(byte_level: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> TokenizersFile:
    return saved(byte_level, tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="module")
def fallback_file(fallback: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> TokenizersFile:
    return saved(fallback, tmp_path_factory.mktemp("fallback"))


def pieces(vocabulary: Vocabulary, ids: list[int]) -> list[str]:
    """What is shown after each token, and at last what is left."""
    reader = vocabulary.reader()
    return [*(reader.feed(token) for token in ids), reader.close()]


@given(text=st.text())
def test_texts_are_their_bytes(text: str) -> None:
    ids = Bytes().ids(text)
    assert bytes(ids) == text.encode()
    assert "".join(pieces(Bytes(), ids)) == text


@given(content=st.one_of(st.binary(), st.lists(st.sampled_from([0x41, 0x80, 0xC3, 0xE2, 0x82, 0xF0, 0x9F])).map(bytes)))
def test_bytes_of_any_kind_are_read_as_python_does(content: bytes) -> None:
    assert "".join(pieces(Bytes(), list(content))) == content.decode(errors="replace")


def test_a_character_is_shown_with_its_last_byte() -> None:
    assert pieces(Bytes(), list("a\u20acb".encode())) == ["a", "", "", "\u20ac", "b", ""]
    assert pieces(Bytes(), list("a\u20ac".encode()[:-1])) == ["a", "", "", "\ufffd"]


def test_what_bytes_cannot_stand_for() -> None:
    """Bytes of a command line that are no text are kept."""
    assert Bytes().ids("a\udcff") == [0x61, 0xFF]
    expected = r"^text: U\+D800 at character 1 is half of a surrogate pair, which no bytes stand for; leave it out$"
    with pytest.raises(UsageError, match=expected):
        Bytes().ids("a\ud800")
    for token in (-1, 256):
        expected = rf"^token {token}: expected a byte, 0 to 255; the model's .* not bytes, name its tokenizer\.json$"
        with pytest.raises(UsageError, match=expected):
            Bytes().reader().feed(token)


@given(text=st.text())
def test_texts_come_back_from_a_tokenizers_file(byte_level_file: TokenizersFile, text: str) -> None:
    assert "".join(pieces(byte_level_file, byte_level_file.ids(text))) == text


@given(ids=st.lists(st.integers(0, 285), max_size=30))
def test_tokens_of_any_kind_are_read_as_the_tokenizer_does(
    byte_level: Tokenizer, byte_level_file: TokenizersFile, ids: list[int]
) -> None:
    found = pieces(byte_level_file, ids)
    assert "".join(found) == byte_level.decode(ids, skip_special_tokens=False)
    stream = DecodeStream(skip_special_tokens=False)
    assert found[:-1] == [stream.step(byte_level, token) or "" for token in ids]


@given(text=st.text(st.sampled_from("ab \u00e9\u20ac\U0001f600\ufffd")))
def test_texts_come_back_where_words_begin_with_a_space(
    fallback: Tokenizer, fallback_file: TokenizersFile, text: str
) -> None:
    ids = fallback.encode(text.replace(" ", "\u2581"), add_special_tokens=False).ids
    assert "".join(pieces(fallback_file, ids)) == text.removeprefix(" ")


@given(ids=st.lists(st.one_of(st.sampled_from([0x41, 0xC3, 0xA9, 0xFF]), st.integers(0, 258)), max_size=20))
def test_a_text_goes_on_after_bytes_that_are_no_character(
    fallback: Tokenizer, fallback_file: TokenizersFile, ids: list[int]
) -> None:
    found = "".join(pieces(fallback_file, [*ids, 258]))
    assert found.endswith("b")
    # What was shown stays; only what an unreadable byte would have taken back differs.
    expected = fallback.decode([*ids, 258], skip_special_tokens=False)
    assert found == expected or "\ufffd" in expected


def test_bytes_that_make_others_unreadable_and_tokens_without_text(fallback_file: TokenizersFile) -> None:
    """A token without text does not make the next one the first."""
    assert pieces(fallback_file, [0x41, 0xFF, 258, 258]) == ["A", "", "\ufffdb", "b", ""]
    assert pieces(fallback_file, [257, 0xE2, 0x82]) == ["a", "", "", "\ufffd\ufffd"]
    assert pieces(fallback_file, [258, 999, 257]) == ["b", "", " a", ""]


def test_special_tokens_are_shown_and_read_but_not_added(
    byte_level: Tokenizer, byte_level_file: TokenizersFile
) -> None:
    end = byte_level.token_to_id(END)
    assert byte_level_file.ids(f"a{END}") == [*byte_level_file.ids("a"), end]
    assert pieces(byte_level_file, [end, *byte_level_file.ids("a")]) == [END, "a", ""]


def test_a_file_that_says_to_add_special_tokens_to_cut_and_to_pad(byte_level: Tokenizer, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(byte_level.to_str())
    special = [(END, tokenizer.token_to_id(END))]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=special)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=100)
    assert len(tokenizer.encode("a b c d").ids) == 100
    assert saved(tokenizer, tmp_path).ids("a b c d") == byte_level.encode("a b c d").ids


def test_a_text_that_the_tokenizer_refuses(byte_level_file: TokenizersFile, tmp_path: Path) -> None:
    words = saved(Tokenizer(models.WordLevel({"the": 0})), tmp_path)
    expected = r"^the tokenizer cannot read this text \(WordLevel error: Missing \[UNK\] token .* no token for$"
    with pytest.raises(UsageError, match=expected):
        words.ids("another")
    with pytest.raises(UsageError, match=r"^the tokenizer cannot read this text \("):
        byte_level_file.ids("\ud800")


def test_files_that_are_no_tokenizer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.json: no such file, expected a tokenizer\.json of the package"):
        TokenizersFile(tmp_path / "nowhere.json")
    (tmp_path / "spec.json").write_text("{}")
    with pytest.raises(UsageError, match=r"spec\.json: not a tokenizer\.json of the package tokenizers \("):
        TokenizersFile(tmp_path / "spec.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    expected = r"tokenizer\.json: needs the package tokenizers; pip install 'mod-export\[generate\]'$"
    with pytest.raises(UsageError, match=expected):
        TokenizersFile(tmp_path / "tokenizer.json")


def cut(text: str, seed: int) -> list[str]:
    """The text in pieces of 0 to 4 characters."""
    sizes, parts = random.Random(seed), []
    while text:
        size = sizes.randint(0, 4)
        parts.append(text[:size])
        text = text[size:]
    return parts


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text up to its first stop, and the stop: character by character, as the definition says."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


# Two letters, so that strings begin, end and repeat within each other.
words_of_two = st.text("ab", min_size=1, max_size=5)


@given(text=st.text("abc", max_size=30), stops=st.lists(words_of_two, max_size=4), seed=st.integers(0, 99))
def test_a_text_is_shown_up_to_its_first_stop(text: str, stops: list[str], seed: int) -> None:
    for parts in (cut(text, seed), list(text), [text]):
        stopping = StopText(stops)
        shown = "".join(stopping.feed(part) for part in parts) + stopping.close()
        assert (shown, stopping.stopped) == first_stop(text, stops)
        assert not any(stop in shown for stop in stops)
        assert stopping.close() == ""


@given(text=st.text("abc", max_size=30), stops=st.lists(words_of_two, max_size=4))
def test_no_more_is_held_back_than_could_begin_a_stop(text: str, stops: list[str]) -> None:
    stopping, shown = StopText(stops), ""
    for number, character in enumerate(text, 1):
        shown += stopping.feed(character)
        if stopping.stopped is None:
            held = text[len(shown) : number]
            assert held == "" or any(stop.startswith(held) for stop in stops)
            assert text.startswith(shown)


def test_what_might_begin_a_stop_is_held_back_and_shown_at_the_end() -> None:
    stopping = StopText([END])
    assert [stopping.feed(piece) for piece in ("a <", "|e", "x<|", "end")] == ["a ", "", "<|ex", ""]
    assert stopping.close() == "<|end"
    assert stopping.stopped is None

"""Text and token ids: the text that is shown does not depend on where it was cut."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mod_export.errors import UsageError
from mod_export.runtime.texts import Bytes, StopText

END = "<|end|>"


def pieces(vocabulary: Bytes, ids: list[int]) -> list[str]:
    """Text shown after each token, and the rest that is shown at the end."""
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
    """Bytes of a command line that are not text are kept."""
    assert Bytes().ids("a\udcff") == [0x61, 0xFF]
    expected = r"^text: U\+D800 at character 1 is half of a surrogate pair, which no bytes stand for; leave it out$"
    with pytest.raises(UsageError, match=expected):
        Bytes().ids("a\ud800")
    for token in (-1, 256):
        expected = rf"^token {token}: expected a byte, 0 to 255; the model's .* not bytes, name its tokenizer\.json$"
        with pytest.raises(UsageError, match=expected):
            Bytes().reader().feed(token)


def cut(text: str, seed: int) -> list[str]:
    """Cuts the text into pieces of 0 to 4 characters."""
    sizes, parts = random.Random(seed), []
    while text:
        size = sizes.randint(0, 4)
        parts.append(text[:size])
        text = text[size:]
    return parts


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Text up to its first stop, and the stop, found character by character as it is defined."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


# With two letters, strings begin, end and repeat within each other.
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
            hidden = text[len(shown) : number]
            assert hidden == "" or any(stop.startswith(hidden) for stop in stops)
            assert text.startswith(shown)


def test_a_token_that_completes_a_stop_shows_all_characters() -> None:
    """An incomplete character at its end is left out, like everything after a stop."""
    stopping, reader = StopText(["b"]), Bytes().reader()
    assert [stopping.feed(stopping.read(reader, token)) for token in b"a\xe2"] == ["a", ""]
    assert reader.peek() == ""
    assert (stopping.feed(stopping.read(reader, ord("b"))), stopping.stopped) == ("\ufffd", "b")


def test_what_might_begin_a_stop_is_held_back_and_shown_at_the_end() -> None:
    stopping = StopText([END])
    assert [stopping.feed(piece) for piece in ("a <", "|e", "x<|", "end")] == ["a ", "", "<|ex", ""]
    assert stopping.close() == "<|end"
    assert stopping.stopped is None

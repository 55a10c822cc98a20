"""A model's own tokenizer agrees with transformers on the same folder, and shows no character too early."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_folders import FAMILIES, SAID, TEXTS, opened, write_folder
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer

from mod_export.errors import UsageError
from mod_export.runtime.tokenizer import TokenizersFile, certain_length, cleaned

MOST_EXAMPLES = 60
TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tokenizer folders of every family, as published and as transformers saves them again."""
    root, found = tmp_path_factory.mktemp("tokenizers"), {}
    for family in FAMILIES:
        found[family] = write_folder(root / family, family)
        AutoTokenizer.from_pretrained(found[family]).save_pretrained(root / f"saved-{family}")
        found[f"saved-{family}"] = root / f"saved-{family}"
    return found


@pytest.fixture(scope="module")
def files(folders: dict[str, Path]) -> dict[str, TokenizersFile]:
    return {name: opened(folder) for name, folder in folders.items()}


def texts_with(tokens: list[str]) -> Iterator[str]:
    """Yields texts with each token alone, inside, and beside spaces and line ends."""
    yield from SAID
    for token in tokens:
        yield token + token
        yield from (before + token + after for before in ("", "a", " b ", "\n") for after in ("", "c", " d", "\n\ne"))


@pytest.mark.parametrize("name", [*FAMILIES, *(f"saved-{family}" for family in FAMILIES)])
def test_ids_and_texts_are_those_of_transformers(
    folders: dict[str, Path], files: dict[str, TokenizersFile], name: str
) -> None:
    file = files[name]
    theirs: Any = AutoTokenizer.from_pretrained(folders[name])
    assert file.special.items() == theirs.special_tokens_map.items()
    assert file.end == theirs.eos_token_id
    texts = list(texts_with(list(theirs.get_added_vocab())))
    assert len(texts) > 60
    for text in texts:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert file.ids(text, special) == ids, text
            expected = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            assert file.decode(ids) == expected


def test_which_families_begin_a_text_with_a_token(files: dict[str, TokenizersFile]) -> None:
    begins = {family: files[family].ids("a")[:1] == [files[family].special_id(files[family].special["bos_token"])]
              for family in FAMILIES if "bos_token" in files[family].special}  # fmt: skip
    assert begins == {
        "smollm2": False, "llama3": True, "llama2": True, "mistral": True, "gemma": True, "phi3": False,
    }  # fmt: skip


def pieces(file: TokenizersFile, ids: list[int]) -> list[str]:
    """Text shown after each token, and the rest that is shown at the end."""
    reader = file.reader()
    return [*(reader.feed(token) for token in ids), reader.close()]


scripts = st.text(
    st.one_of(
        st.sampled_from("ab  e\u0301\u2581\n\ufffd\u200d\ufe0f\U0001f600\U0001f468\U0001f1eb"),
        st.characters(exclude_categories=["Cs"]),
    )
)


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_joined_are_the_text_of_all_tokens(files: dict[str, TokenizersFile], family: str) -> None:
    """This holds for any tokens, and wherever the text ends; text that was shown is never taken back."""
    file = files[family]

    @settings(max_examples=MOST_EXAMPLES)
    @given(
        tokens=st.lists(
            st.one_of(
                st.integers(0, file.size + 5),
                st.sampled_from([token for token in range(file.size) if file.is_byte(token)] or [0]),
                scripts.map(lambda text: file.ids(text, special=False)),
            ),
            max_size=20,
        )
    )
    def check(tokens: list[int | list[int]]) -> None:
        ids = [token for one in tokens for token in (one if isinstance(one, list) else [one])]
        in_vocabulary = [token for token in ids if token < file.size]
        assert "".join(pieces(file, ids)) == file.decode(in_vocabulary)
        for end in range(len(ids)):
            shown = "".join(pieces(file, ids[:end])[:-1])
            assert file.decode(in_vocabulary).startswith(shown)

    check()


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama3"])
def test_pieces_continue_the_text_before_them(files: dict[str, TokenizersFile], family: str) -> None:
    """Together they are the text of all tokens, also where the second one begins with a space, which decoders drop from
    the first word of a text. (Llama 3 cleans spaces, also those between the two texts.)
    """
    file = files[family]

    @settings(max_examples=MOST_EXAMPLES)
    @given(before=scripts, text=scripts, special=st.booleans())
    def check(before: str, text: str, special: bool) -> None:
        prompt, ids = file.ids(before, special), file.ids(text, special=False)
        reader = file.reader(prompt)
        found = "".join(map(reader.feed, ids)) + reader.close()
        assert file.decode(prompt) + found == file.decode(prompt + ids)

    check()


@pytest.mark.parametrize("family", ["llama2", "mistral", "phi3"])
def test_a_word_keeps_its_space_after_other_tokens(files: dict[str, TokenizersFile], family: str) -> None:
    file = files[family]
    ids = file.ids("dog", special=False)
    for before, expected in (([], "dog"), (file.ids(""), "dog"), (file.ids("fox"), " dog"), (file.ids("\n"), " dog"),
                             (file.ids("\U0001f600"), " dog")):  # fmt: skip
        reader = file.reader(before)
        assert "".join(map(reader.feed, ids)) + reader.close() == expected
    assert file.drops_space(ids[0])
    assert not file.drops_space(ids[-1])


@pytest.mark.parametrize("cleans", [False, True], ids=["as it is", "cleaned"])
@pytest.mark.parametrize("family", ["smollm2", "llama2", "phi3"])
def test_a_look_at_what_is_held_back_changes_nothing(tmp_path: Path, family: str, cleans: bool) -> None:
    file = opened(write_folder(tmp_path, family, clean_up_tokenization_spaces=cleans))
    for text in TEXTS:
        ids, reader, shown = file.ids(text, special=False), file.reader(), ""
        for end in range(len(ids)):
            shown += reader.feed(ids[end])
            assert reader.peek() == reader.peek() == file.decode(ids[: end + 1]).rstrip("\ufffd").removeprefix(shown)
        assert shown + reader.close() == file.decode(ids)
        assert reader.peek() == ""


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_of_every_script_come_back(files: dict[str, TokenizersFile], family: str) -> None:
    file = files[family]

    @settings(max_examples=MOST_EXAMPLES)
    @given(text=scripts)
    def check(text: str) -> None:
        found = "".join(pieces(file, file.ids(text)))
        assert found == file.decode(file.ids(text))
        if family in ("smollm2", "llama3"):  # Other families change some characters, such as spaces or accents.
            assert found == text

    check()


@pytest.mark.parametrize("family", ["smollm2", "llama3", "qwen2"])
def test_a_character_is_shown_with_the_token_that_completes_it(files: dict[str, TokenizersFile], family: str) -> None:
    file = files[family]
    for text in ("\U0001f600 \u20ac", "\u6771\u4eac", "\u041b\u0438\u0441\u0430"):
        ids = file.ids(text, special=False)
        for end in range(len(ids) + 1):
            decoded = file.decode(ids[:end])
            assert "".join(pieces(file, ids[:end])[:-1]) == decoded.rstrip("\ufffd")


def test_special_tokens_are_not_shown_and_others_are(files: dict[str, TokenizersFile]) -> None:
    ids = files["qwen3"].ids("<|im_start|>a <think>\nb</think> c<|im_end|>")
    assert "".join(pieces(files["qwen3"], ids)) == "a <think>\nb</think> c"
    assert pieces(files["llama2"], files["llama2"].ids("a b</s>"))[-2:] == ["", ""]


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_of_tokens_joined_are_the_text(files: dict[str, TokenizersFile], family: str) -> None:
    """Each token gives its own bytes, whether it is a word with its space or a part of a character."""
    file = files[family]
    for text in TEXTS:
        ids = file.ids(text, special=False)
        alone = [file.token_bytes(token) for token in ids]
        assert all(isinstance(part, bytes) for part in alone)
        joined = b"".join(part or b"" for part in alone).decode()
        assert joined in (file.decode(ids), f" {file.decode(ids)}")
    special = next(iter(file.special.values()))
    assert file.token_bytes(file.special_id(special)) == special.encode()
    assert file.token_bytes(file.size) is None


@pytest.fixture
def fallback(tmp_path: Path) -> TokenizersFile:
    """A tokenizer with words that begin with a space, and bytes for everything else; ids 0 to 255 are the bytes."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581": 256, "\u2581a": 257, "b": 258}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.save(str(tmp_path / TOKENIZER))
    return TokenizersFile(tmp_path / TOKENIZER)


def test_a_run_of_bytes_is_certain_when_it_is_over(fallback: TokenizersFile) -> None:
    """One byte that belongs to no character makes the whole run unreadable, even the bytes before it."""
    assert pieces(fallback, [0x41, 0xFF, 258, 258]) == ["", "", "\ufffd\ufffdb", "b", ""]
    assert pieces(fallback, [257, 0xE2, 0x82]) == ["a", "", "", "\ufffd\ufffd"]
    assert pieces(fallback, [257, 0xE2, 0x82, 0xAC]) == ["a", "", "", "", "\u20ac"]


def test_a_token_without_text_does_not_make_the_next_one_the_first(fallback: TokenizersFile) -> None:
    assert pieces(fallback, [258, 999, 257]) == ["b", "", " a", ""]


def test_a_text_that_the_tokenizer_refuses(files: dict[str, TokenizersFile], tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"the": 0})).save(str(tmp_path / TOKENIZER))
    expected = r"^the tokenizer cannot read this text \(WordLevel error: Missing \[UNK\] token .* no token for$"
    with pytest.raises(UsageError, match=expected):
        TokenizersFile(tmp_path / TOKENIZER).ids("another")
    with pytest.raises(UsageError, match=r"^the tokenizer cannot read this text \("):
        files["llama3"].ids("\ud800")


def test_files_that_are_no_tokenizer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.json: no such file, expected a tokenizer\.json of the package"):
        TokenizersFile(tmp_path / "nowhere.json")
    (tmp_path / "spec.json").write_text("{}")
    with pytest.raises(UsageError, match=r"spec\.json: not a tokenizer\.json of the package tokenizers \("):
        TokenizersFile(tmp_path / "spec.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    expected = r"tokenizer\.json: needs the package tokenizers; pip install 'mod-export\[generate\]'$"
    with pytest.raises(UsageError, match=expected):
        TokenizersFile(tmp_path / TOKENIZER)


@pytest.mark.parametrize(("config", "message"), [
    ("{", r"tokenizer_config\.json: cannot be read \("),
    ("[1]", r"tokenizer_config\.json: expected a JSON object, got list$"),
])  # fmt: skip
def test_a_configuration_that_is_none(tmp_path: Path, config: str, message: str) -> None:
    folder = write_folder(tmp_path, "llama3")
    (folder / CONFIG).write_text(config)
    with pytest.raises(UsageError, match=message):
        TokenizersFile(folder / TOKENIZER)


@given(
    text=st.text(st.sampled_from(" .?!,'nmst\u00e9verab"), max_size=30),
    more=st.text(st.sampled_from(" .?!,'nmst"), max_size=6),
)
def test_what_is_certain_of_a_cleaned_text_stays_whatever_follows(text: str, more: str) -> None:
    cut = certain_length(text)
    assert cleaned(text[:cut]) + cleaned(text[cut:] + more) == cleaned(text + more)

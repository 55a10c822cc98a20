"""The text that models are judged and timed on: whose it is, how pieces are drawn, and which files are refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from mod_export.errors import UsageError
from mod_export.judge import text
from mod_export.judge.text import (
    TextFile,
    TextSource,
    TokensOf,
    documentation,
    documentation_of,
    prompts_of,
    text_ids,
    text_kind,
)
from mod_export.model.model import Model
from mod_export.runtime.texts import Bytes
from mod_export.types import Bucket

IDS = Bytes().ids
LETTERS = "abcdefghijklmnopqrstuvwxyz" * 4


def test_prompts_are_held_out_text_or_random_ids(model: Model) -> None:
    np.testing.assert_array_equal(prompts_of(model, 256, 2, 9, 3), model.sample_ids(2, 9, 3))
    random_ids = prompts_of(None, 256, 2, 9, 3)
    assert (random_ids.shape, random_ids.dtype) == ((2, 9), np.dtype(np.int64))
    assert not np.array_equal(random_ids, model.sample_ids(2, 9, 3))
    assert [text_kind(one, 9, None) for one in (model, None)] == ["held_out", "random"]


def test_a_named_text_comes_first_and_documentation_last(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "letters.txt"
    path.write_text(LETTERS)
    named = TextFile.read(path).source("m", IDS, 256, [Bucket(1, 20)], 0)
    described = documentation_of(IDS, 256)
    assert named.named is not None
    assert (named.named.name, named.named.sha256) == ("letters.txt", sha256(path.read_bytes()).hexdigest())
    cases = ((named, model, "named"), (described, model, "held_out"), (described, None, "documentation"))
    for source, one, kind in cases:
        assert text_kind(one, 20, source) == kind
        ids_NS = text_ids(one, 3, 20, 5, source)
        assert ids_NS is not None
        assert ids_NS.shape == (3, 20)
        np.testing.assert_array_equal(ids_NS, prompts_of(one, 256, 3, 20, 5, source))
        whole = {"named": LETTERS, "documentation": documentation()}.get(kind)
        found = [bytes(ids_S.tolist()).decode(errors="replace") for ids_S in ids_NS]
        assert whole is None or all(piece in whole for piece in found)
        assert len(set(found)) == 3
        assert not np.array_equal(ids_NS, text_ids(one, 3, 20, 6, source))
    assert text_kind(None, 10**7, described) == "random"


@pytest.mark.parametrize("length", [1, 25])
def test_a_piece_may_be_one_token_shorter_than_the_text(length: int) -> None:
    source = TextSource("documentation", np.arange(length + 1))
    assert source.pieces(2, length, 0) is not None
    assert source.pieces(2, length + 1, 0) is None


def test_of_a_long_file_the_beginning_counts_up_to_a_whole_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "long.txt"
    path.write_text("ab\N{EURO SIGN}" * 20, encoding="utf-8")
    monkeypatch.setattr(text, "READ_BYTES", 13)  # After the first byte of the third sign.
    found = TextFile.read(path).source("m", IDS, 256, [Bucket(1, 3)], 0)
    assert bytes(found.ids_N.tolist()).decode() == "ab\N{EURO SIGN}" * 2 + "ab"
    assert found.named is not None
    assert found.named.sha256 == sha256(path.read_bytes()[:13]).hexdigest()


def _number(content: str) -> Sequence[int]:
    return [300] * len(content)


@pytest.mark.parametrize(
    ("content", "tokens_of", "message"),
    [
        (None, IDS, r"cannot be read \(No such file or directory\)"),
        (b"\xff\xfe", IDS, r"not UTF-8 text \(byte 0\); name a file of plain text"),
        (b"half \xe2\x82", IDS, r"not UTF-8 text \(byte 5\); name a file of plain text"),
        (b"", IDS, "has 0 tokens; name a text of at least 80, 4 times the longest row"),
        (b"a" * 79, IDS, "has 79 tokens; name a text of at least 80, 4 times the longest row"),
        (b"a" * 80, _number, "has token 300, and m has a vocabulary of 256"),
        (b"a" * 80, None, "m has no tokenizer, so it reads no text; name one"),
    ],
)
def test_files_that_are_refused(
    content: bytes | None, tokens_of: TokensOf | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "given.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=f"^{re.escape(str(path))}: {message}$"):
        TextFile.read(path).source("m", tokens_of, 256, [Bucket(2, 9)], 20)


def test_documentation_needs_a_tokenizer_that_fits() -> None:
    def refuses(content: str) -> Sequence[int]:
        raise UsageError("no token")

    assert len(documentation()) > 100_000
    for tokens_of in (refuses, _number):
        assert len(documentation_of(tokens_of, 256).ids_N) == 0

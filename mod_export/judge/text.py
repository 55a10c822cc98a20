"""The text that a model is judged and timed on: the user's own, or held-out text of the model, or documentation.

Which tokens of a text run is decided by its content, so the speed of a Mixture-of-Depths model depends on the text, and
so does the quality of integer weights.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mod_export.errors import UsageError
from mod_export.model.model import Model
from mod_export.rows.speed import NamedText
from mod_export.types import Bucket, TextKind

READ_BYTES = 2**22
"""A file is read up to here. A tokenizer takes about a second for it."""
LEAST_ROWS = 4
"""A named text must be so many times as long as the longest row, or pieces of it would be nearly the same."""
TokensOf = Callable[[str], Sequence[int]]
"""A tokenizer: text -> ids, without special tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class TextSource:
    """A long text, from which pieces are drawn at random.

    Attributes:
        kind: where the text comes from.
        ids_N: its token ids, int64.
        named: name and hash of the user's file; None for other kinds.
    """

    kind: TextKind
    ids_N: np.ndarray
    named: NamedText | None = None

    def pieces(self, rows: int, length: int, seed: int) -> np.ndarray | None:
        """Returns pieces of the text, int64 (rows, length), or None if the text is not longer than one piece."""
        if len(self.ids_N) <= length:
            return None
        start_R = np.random.default_rng(seed).integers(0, len(self.ids_N) - length, rows)
        ids_RS: np.ndarray = self.ids_N[start_R[:, None] + np.arange(length)]
        return ids_RS


def text_kind(model: Model | None, length: int, source: TextSource | None) -> TextKind:
    """Returns what kind of text `text_ids` returns for rows of a length; `random` if it returns None."""
    if source is not None and source.kind == "named":
        return "named"
    if model is not None and model.sample_ids(1, length, 0) is not None:
        return "held_out"
    return "random" if source is None or len(source.ids_N) <= length else source.kind


def text_ids(
    model: Model | None, rows: int, length: int, seed: int, source: TextSource | None = None
) -> np.ndarray | None:
    """Returns text, int64 (rows, length): pieces of a text that the user named, or else held-out text of the model, or
    else pieces of any other text. None if there is no text that is long enough.
    """
    held_out = None
    if model is not None and (source is None or source.kind != "named"):
        held_out = model.sample_ids(rows, length, seed)
    return source.pieces(rows, length, seed) if held_out is None and source is not None else held_out


def prompts_of(
    model: Model | None, vocab_size: int, rows: int, length: int, seed: int, source: TextSource | None = None
) -> np.ndarray:
    """Returns prompts, int64 (rows, length): text as from `text_ids` if there is any, else random ids."""
    ids_BS = text_ids(model, rows, length, seed, source)
    if ids_BS is not None:
        return ids_BS
    return np.random.default_rng(seed).integers(0, vocab_size, (rows, length), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file of text that the user named.

    Attributes:
        path: the file.
        text: what was read of it, up to READ_BYTES.
        sha256: the hash of that.
    """

    path: Path
    text: str
    sha256: str

    @classmethod
    def read(cls, path: Path) -> TextFile:
        """Reads a file of UTF-8 text.

        Raises:
            UsageError: the file cannot be read, or is not UTF-8.
        """
        try:
            with path.open("rb") as file:
                data, more = file.read(READ_BYTES), file.read(1)
            # The end of what is read may cut a character.
            text = codecs.getincrementaldecoder("utf-8")().decode(data, final=not more)
        except OSError as error:
            raise UsageError(f"{path}: cannot be read ({error.strerror or error})") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"{path}: not UTF-8 text (byte {error.start:,}); name a file of plain text") from error
        return cls(path, text, hashlib.sha256(data).hexdigest())

    def source(
        self, reader: str, tokens_of: TokensOf | None, vocab_size: int | None, buckets: Iterable[Bucket], window: int
    ) -> TextSource:
        """Returns the text in the ids of a model.

        Args:
            reader: name of the model.
            tokens_of: its tokenizer; None if it has none.
            vocab_size: size of its vocabulary; None if it does not read ids.
            buckets: shapes of the whole rows that are judged.
            window: number of tokens of the longest text that it writes; 0 if it writes none.

        Raises:
            UsageError: the model has no tokenizer, or the text is too short or does not fit the vocabulary.
        """
        if tokens_of is None or vocab_size is None:
            raise UsageError(f"{self.path}: {reader} has no tokenizer, so it reads no text; name one")
        ids_N = np.array(tokens_of(self.text), dtype=np.int64)
        least = LEAST_ROWS * max(window, *(bucket.seq for bucket in buckets))
        if ids_N.max(initial=-1) >= vocab_size:
            raise UsageError(f"{self.path}: has token {ids_N.max()}, and {reader} has a vocabulary of {vocab_size:,}")
        if len(ids_N) < least:
            raise UsageError(
                f"{self.path}: has {len(ids_N):,} tokens; name a text of at least {least:,}, {LEAST_ROWS} times the "
                "longest row"
            )
        return TextSource("named", ids_N, NamedText(name=self.path.name, sha256=self.sha256))


def documentation_of(tokens_of: TokensOf, vocab_size: int) -> TextSource:
    """Returns English text for models without held-out text: Python's own `help()` topics about the language, in the
    ids of the model's tokenizer. The text is empty if the tokenizer or the vocabulary does not fit, or if Python has no
    documentation.
    """
    try:
        ids_N = np.array(tokens_of(documentation()), dtype=np.int64)
    except UsageError:
        ids_N = np.zeros(0, np.int64)
    if ids_N.max(initial=-1) >= vocab_size:
        ids_N = ids_N[:0]  # The tokenizer is not the model's.
    return TextSource("documentation", ids_N)


def documentation() -> str:
    """Returns the `help()` topics about Python as one text; empty if Python was installed without them."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return ""
    return "\n".join(topics.values())

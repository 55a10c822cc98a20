"""Between text and token ids: bytes, which need nothing, or the vocabulary of a `tokenizers` file; and stop strings.

A vocabulary gives the ids of a text, without special tokens, and a reader for each text that is written. A character
may take several tokens, so the text that can be shown after a token may be empty, or longer than the token itself.
Readers and `StopText` take a text piece by piece (`feed`) and return the characters that are certain so far; what is
left when the text ends, an incomplete character as U+FFFD, comes with `close`. Joined together the pieces do not depend
on where the text was cut.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mod_export.build_folder.files import verify_files
from mod_export.build_folder.manifest import Manifest
from mod_export.errors import UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNREADABLE = "\N{REPLACEMENT CHARACTER}"


def vocabulary_of(folder: Path, manifest: Manifest) -> Vocabulary | None:
    """The vocabulary of a build folder's model; None if its ids do not represent text.

    Raises:
        BuildFolderError: the tokenizer's file has changed since the build.
        UsageError: the package `tokenizers` is needed and not installed.
    """
    if manifest.tokenizer is None or manifest.tokenizer == "bytes":
        return None if manifest.tokenizer is None else Bytes()
    verify_files(folder, manifest.entries([manifest.tokenizer]))
    return TokenizersFile(folder / manifest.tokenizer)


class Bytes:
    """The bytes of UTF-8 are the ids 0 to 255."""

    def ids(self, text: str) -> list[int]:
        """The bytes of a text.

        Raises:
            UsageError: no bytes stand for it.
        """
        try:
            # Bytes of a command line that are not UTF-8 reach Python as escapes; the model gets the original bytes.
            return list(text.encode(errors="surrogateescape"))
        except UnicodeEncodeError as error:
            where = f"U+{ord(text[error.start]):04X} at character {error.start}"
            raise UsageError(
                f"text: {where} is half of a surrogate pair, which no bytes stand for; leave it out"
            ) from error

    def reader(self) -> Reader:
        return _ByteReader()


class _ByteReader:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """The new characters that are certain with this token; it may complete none.

        Raises:
            UsageError: the token is not a byte.
        """
        if not 0 <= token < 256:
            raise UsageError(
                f"token {token}: expected a byte, 0 to 255; the model's tokens are not bytes, name its tokenizer.json"
            )
        return self._decoder.decode(bytes([token]))

    def close(self) -> str:
        return self._decoder.decode(b"", final=True)


class TokenizersFile:
    """A tokenizer.json of the package `tokenizers`.

    Special tokens are read if they occur in a text, and never added. Ids that are not in the file represent no text:
    many models have a few more ids than their tokenizer.

    Raises:
        UsageError: the package is missing, or this is not such a file.
    """

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise UsageError(f"{path}: needs the package tokenizers; pip install 'mod-export[generate]'") from error
        if not path.is_file():
            raise UsageError(f"{path}: no such file, expected a tokenizer.json of the package tokenizers")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust side raises nothing narrower
            raise UsageError(f"{path}: not a tokenizer.json of the package tokenizers ({error})") from error
        # Truncation and padding that were set for training would silently change a prompt.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @property
    def size(self) -> int:
        """The smallest vocabulary of a model that can read every id. Ids may have gaps, so this is not a count."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def ids(self, text: str) -> list[int]:
        """The tokens of a text.

        Raises:
            UsageError: the vocabulary has none for it.
        """
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        except Exception as error:  # the Rust side raises nothing narrower
            raise UsageError(
                f"the tokenizer cannot read this text ({error}); leave out what it has no token for"
            ) from error

    def reader(self) -> Reader:
        return _FileReader(self._tokenizer)


class _FileReader:
    """Decodes the last tokens again with each new one, special tokens included, as `tokenizers.decoders.DecodeStream`.

    That class does not return what it still holds when a text ends. And it fails permanently if a decoder falls back to
    bytes and a byte makes earlier ones unreadable that were already shown, which happens with sampled tokens. Here the
    text continues after what was shown.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # The tokens of the piece that was shown last, and all tokens since. New tokens are never decoded alone, because
        # a decoder drops the space before the first word.
        self._ids: list[int] = []
        self._before = 0
        self._shown = 0

    def feed(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(UNREADABLE) or len(text) <= self._shown:
            return ""
        new = text[self._shown :]
        self._ids = self._ids[self._before :]
        self._before = len(self._ids)
        self._shown = len(self._decode(self._ids))
        return new

    def close(self) -> str:
        rest = self._decode(self._ids)[self._shown :]
        self._ids, self._before, self._shown = [], 0, 0
        return rest

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


Reader = _ByteReader | _FileReader
Vocabulary = Bytes | TokenizersFile


class StopText:
    """Ends a text before the first of several strings, wherever the text is cut into pieces.

    The stop string that is complete first counts, so that no token is computed in search of a longer one. If several
    end at the same character, the longest counts, so that no part of any of them is shown.

    Args:
        stops: each of at least one character; the list may be empty.

    Attributes:
        stopped: the string that ended the text; None until then.

    Raises:
        UsageError: a stop is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise UsageError("stop: got '', expected a string of at least one character; leave it out")
        self.stopped: str | None = None
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, piece: str) -> str:
        """The characters that can be shown now: none that might begin a stop string, and none once `stopped`."""
        if self.stopped is not None:
            return ""
        text = self._held + piece
        found = [(text.index(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if found:
            end, _, self.stopped = min(found)
            self._held = ""
            return text[: end - len(self.stopped)]
        shown = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[shown:]
        return text[:shown]

    def close(self) -> str:
        """What was held back, for a text that ends for another reason."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of the text that are the beginning of the stop string, but not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)

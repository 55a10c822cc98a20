"""Converts between text and token ids, with bytes as ids or the model's own tokenizer; and finds stop strings.

A vocabulary returns the ids of a text, the chat template, and a reader that decodes one new text. A character may take
several tokens, so the characters to show after a token may be none, or more than those of the token. Readers and
`StopText` take a text in pieces (`feed`) and return the new characters that are certain. `close` returns the rest when
the text ends, with U+FFFD for an incomplete character. The joined result does not depend on where the text was cut.
`peek` of a reader returns what `close` would, without ending the text: a stop string may be complete in characters that
later tokens could still change.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mod_export.errors import UsageError
from mod_export.folder.files import verify_files
from mod_export.folder.manifest import BESIDE_TOKENIZER, Manifest
from mod_export.runtime.chat_template import ChatTemplate
from mod_export.runtime.tokenizer import FileReader, TokenizersFile


def vocabulary_of(folder: Path, manifest: Manifest) -> Vocabulary | None:
    """Loads the vocabulary of a build folder's model; None if its ids do not represent text.

    Raises:
        BuildFolderError: a file of the tokenizer has changed since the build.
        UsageError: the package `tokenizers` is needed but not installed.
    """
    if manifest.tokenizer is None or manifest.tokenizer == "bytes":
        return None if manifest.tokenizer is None else Bytes()
    file_names = [manifest.tokenizer, *(name for name in BESIDE_TOKENIZER if name in manifest.files)]
    verify_files(folder, manifest.entries(file_names))
    return TokenizersFile(folder / manifest.tokenizer)


class Bytes:
    """A vocabulary in which UTF-8 bytes are the ids 0 to 255. It has no special tokens and no chat template."""

    end: int | None = None

    def ids(self, text: str, special: bool = True) -> list[int]:
        """Returns the bytes of a text; there are no special tokens to add.

        Raises:
            UsageError: the text holds half of a surrogate pair.
        """
        try:
            # Python escapes command-line bytes that are not UTF-8. Here they become the original bytes again.
            return list(text.encode(errors="surrogateescape"))
        except UnicodeEncodeError as error:
            where = f"U+{ord(text[error.start]):04X} at character {error.start}"
            raise UsageError(
                f"text: {where} is half of a surrogate pair, which no bytes stand for; leave it out"
            ) from error

    @property
    def chat_template(self) -> ChatTemplate:
        """Not available.

        Raises:
            UsageError: always.
        """
        raise UsageError("this model's tokens are bytes, for which there is no chat template; give plain prompts")

    def special_id(self, text: str) -> int | None:
        return None

    def is_shown(self, token: int) -> bool:
        """Whether a token represents a part of a text."""
        return 0 <= token < 256

    def token_bytes(self, token: int) -> bytes | None:
        """Returns the byte of a token; None if the id is not a byte."""
        return bytes([token]) if 0 <= token < 256 else None

    def drops_space(self, token: int) -> bool:
        """Whether a text that begins with this token is shown without its space: never."""
        return False

    def reader(self, before: Sequence[int] = ()) -> Reader:
        """Returns a decoder for one new text. The bytes before a text do not change it."""
        return _ByteReader()

    def close(self) -> None:
        """Does nothing: there is no chat template whose process could run."""


class _ByteReader:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """Returns the characters that become certain with this token, possibly none.

        Raises:
            UsageError: the token is not a byte.
        """
        if not 0 <= token < 256:
            raise UsageError(
                f"token {token}: expected a byte, 0 to 255; the model's tokens are not bytes, name its tokenizer.json"
            )
        return self._decoder.decode(bytes([token]))

    def peek(self) -> str:
        """Returns the whole characters that are held back: none, as only an incomplete one is."""
        return ""

    def close(self) -> str:
        return self._decoder.decode(b"", final=True)


class ExactReader:
    """Decodes a text that follows a grammar: the bytes that the grammar has seen, without the clean-up of spaces that
    some tokenizers ask for, which would change the strings of a JSON text.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """Returns the characters that become certain with this token, possibly none."""
        token_bytes = self._vocabulary.token_bytes(token) if self._vocabulary.is_shown(token) else None
        return self._decoder.decode(token_bytes or b"")

    def peek(self) -> str:
        """Returns the whole characters that are held back: none, as only an incomplete one is."""
        return ""

    def close(self) -> str:
        return self._decoder.decode(b"", final=True)


class MarkReader:
    """Decodes a text that shows the names of some special tokens, which other texts hide."""

    def __init__(self, reader: Reader, marks: Mapping[int, str], following: Callable[[], Reader]) -> None:
        """`reader` decodes what is before the first mark, `following` makes a reader of what is after a mark, and
        `marks` maps the ids of the tokens to what the text shows in their place.
        """
        self._reader, self._marks, self._following = reader, marks, following

    def feed(self, token: int) -> str:
        """Returns the characters that become certain with this token, possibly none."""
        mark = self._marks.get(token)
        if mark is None:
            return self._reader.feed(token)
        rest, self._reader = self._reader.close(), self._following()
        return rest + mark

    def peek(self) -> str:
        """Returns the whole characters that are held back."""
        return self._reader.peek()

    def close(self) -> str:
        return self._reader.close()


Reader = _ByteReader | FileReader | ExactReader | MarkReader
Vocabulary = Bytes | TokenizersFile


class StopText:
    """Ends a text before the first stop string, independent of how the text is cut into pieces.

    The stop string that is complete first wins, so no extra token is computed to look for a longer one. If several end
    at the same character, the longest wins, so no part of any of them is shown.

    Args:
        stops: the stop strings, each of at least one character; the list may be empty.

    Attributes:
        stopped: the string that ended the text; None until then.

    Raises:
        UsageError: a stop string is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise UsageError("stop: got '', expected a string of at least one character; leave it out")
        self.stopped: str | None = None
        self._stops = tuple(stops)
        self._held = ""

    def read(self, reader: Reader, token: int) -> str:
        """Feeds a token to the reader of the text. Returns the characters that become certain with it: all of them if
        the text ends here, because they complete a stop string.
        """
        piece = reader.feed(token)
        if not self._stops:
            return piece
        text = self._held + piece + reader.peek()
        return piece + reader.close() if any(stop in text for stop in self._stops) else piece

    def feed(self, piece: str) -> str:
        """Returns the characters that can be shown now: none that may begin a stop string, and none once `stopped`."""
        if self.stopped is not None:
            return ""
        text = self._held + piece
        matches = [(text.index(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if matches:
            end, _, self.stopped = min(matches)
            self._held = ""
            return text[: end - len(self.stopped)]
        certain_length = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[certain_length:]
        return text[:certain_length]

    def close(self) -> str:
        """Returns the characters that were held back, for a text that ends without a stop string."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Returns how many characters at the end of the text form an incomplete beginning of the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)

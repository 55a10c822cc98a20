"""Between text and token ids: bytes, which need nothing, or the model's own tokenizer; and stop strings.

A vocabulary gives the ids of a text or of a conversation, and a reader for each text that is written. A character may
take several tokens, so the text that can be shown after a token may be empty, or longer than the token itself. Readers
and `StopText` take a text piece by piece (`feed`) and return the characters that are certain so far; what is left when
the text ends, an incomplete character as U+FFFD, comes with `close`. Joined together the pieces do not depend on where
the text was cut.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path

from mod_export.errors import UsageError
from mod_export.folder.files import verify_files
from mod_export.folder.manifest import BESIDE_TOKENIZER, Manifest
from mod_export.runtime.chat import ChatTemplate
from mod_export.runtime.tokenizer import FileReader, TokenizersFile


def vocabulary_of(folder: Path, manifest: Manifest) -> Vocabulary | None:
    """The vocabulary of a build folder's model; None if its ids do not represent text.

    Raises:
        BuildFolderError: a file of the tokenizer has changed since the build.
        UsageError: the package `tokenizers` is needed and not installed.
    """
    if manifest.tokenizer is None or manifest.tokenizer == "bytes":
        return None if manifest.tokenizer is None else Bytes()
    kept = [manifest.tokenizer, *(name for name in BESIDE_TOKENIZER if name in manifest.files)]
    verify_files(folder, manifest.entries(kept))
    return TokenizersFile(folder / manifest.tokenizer)


class Bytes:
    """The bytes of UTF-8 are the ids 0 to 255. There are no special tokens and no template for conversations."""

    end: int | None = None

    def ids(self, text: str, special: bool = True) -> list[int]:
        """The bytes of a text, with nothing to add to them.

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

    @property
    def chat_template(self) -> ChatTemplate:
        """Refused.

        Raises:
            UsageError: always.
        """
        raise UsageError("this model's tokens are bytes, for which there is no chat template; give plain prompts")

    def special_id(self, text: str) -> int | None:
        return None

    def is_shown(self, token: int) -> bool:
        """Whether it stands for a part of a text."""
        return 0 <= token < 256

    def token_bytes(self, token: int) -> bytes | None:
        """What a token stands for; None for an id that is no byte."""
        return bytes([token]) if 0 <= token < 256 else None

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


Reader = _ByteReader | FileReader
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

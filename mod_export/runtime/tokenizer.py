"""A model's own tokenizer: a tokenizer.json of the package `tokenizers`, and the files beside it.

A build folder keeps them as `model.tokenizer_files` has made them from whatever the model was published with, so
tokenizer.json alone decides the ids of a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mod_export.errors import UsageError
from mod_export.runtime.chat_template import ChatTemplate

if TYPE_CHECKING:
    from tokenizers import AddedToken

UNREADABLE = "\N{REPLACEMENT CHARACTER}"
CONFIG = "tokenizer_config.json"
BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
NEAR = 256
"""How many tokens before a text are looked at to find one that its decoder can begin with."""


class TokenizersFile:
    """A tokenizer.json, with the tokenizer_config.json and chat_template.jinja beside it, if there are any.

    Ids that are not in the file represent no text: many models have a few more ids than their tokenizer.

    Attributes:
        size: largest id plus one, the smallest vocabulary that a model needs to read every id. Ids may have gaps, so
            this is not a count.
        base_size: `size` without the tokens that were added to the vocabulary, such as a token for padding.
        special: name of a special token, such as `bos_token` -> its text.
        end: id of `eos_token`; None if there is none.
        cleans: whether decoded text has no space before punctuation; see `cleaned`.

    Raises:
        UsageError: the package is missing, or one of the files is invalid.
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
        # Truncation and padding, if set for training, would silently change a prompt.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.size, self.base_size = (
            max(self._tokenizer.get_vocab(with_added_tokens=added).values(), default=-1) + 1 for added in (True, False)
        )
        self._folder, self._config = path.parent, read_json(path.parent / CONFIG)
        self._token_bytes: dict[int, bytes | None] = {}
        own_names = self._config.get("extra_special_tokens")
        self.special = {
            name: text for name, text in self._config.items() if name.endswith("_token") and isinstance(text, str)
        } | (own_names if isinstance(own_names, dict) else {})
        self._tokenizer.encode_special_tokens = self._config.get("split_special_tokens") is True
        self.cleans = self._config.get("clean_up_tokenization_spaces") is True
        self.end = self._tokenizer.token_to_id(self.special["eos_token"]) if "eos_token" in self.special else None

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template.

        Raises:
            UsageError: it has no template, or an invalid one.
        """
        return ChatTemplate.of_folder(self._folder, self._config.get("chat_template"), self.special)

    def ids(self, text: str, special: bool = True) -> list[int]:
        """Returns the token ids of a text. Special tokens written in the text become special tokens, unless the
        configuration says `split_special_tokens`.

        Args:
            text: the text.
            special: whether to add the tokens that the tokenizer puts around a text, such as `<s>`.

        Raises:
            UsageError: the vocabulary cannot represent the text.
        """
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=special).ids)
        except Exception as error:  # the Rust side raises nothing narrower
            raise UsageError(
                f"the tokenizer cannot read this text ({error}); leave out what it has no token for"
            ) from error

    def name_of(self, token: int) -> str | None:
        """Returns the name of a token in the vocabulary; None for an id that is not in the file."""
        name: str | None = self._tokenizer.id_to_token(token)
        return name

    def special_id(self, text: str) -> int | None:
        """Returns the id of a special token, which texts never show; None if the text is not a special token."""
        token = self._tokenizer.token_to_id(text)
        return token if token in self._special_ids else None

    def token_bytes(self, token: int) -> bytes | None:
        """Returns the UTF-8 bytes of a token inside a text, which may be a part of a character. For a special token it
        is the name; for an id that is not in the file it is None.
        """
        if token not in self._token_bytes:
            self._token_bytes[token] = self._bytes_of(token)
        return self._token_bytes[token]

    def _bytes_of(self, token: int) -> bytes | None:
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return None
        if token in self._special_ids:
            return str(name).encode()
        if self.is_byte(token):
            return bytes([int(name[3:-1], 16)])
        if self._is_byte_level:
            # Each character of a name encodes one byte (GPT-2's `bytes_to_unicode`).
            table = _byte_of_character()
            if all(character in table for character in name):
                return bytes(table[character] for character in name)
        # Decoded alone, a token would lose its leading space: decoders drop the space before the first word of a text.
        before = self._tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        return self.decode_raw([*before, token]).removeprefix(self.decode_raw(before)).encode()

    def drops_space(self, token: int) -> bool:
        """Whether a text that begins with this token is shown without the space that the token begins with."""
        return (self.token_bytes(token) or b"").startswith(b" ") and not self.decode_raw([token]).startswith(" ")

    def reader(self, before: Sequence[int] = ()) -> FileReader:
        """Returns a decoder for one new text, which continues the text of the tokens `before`."""
        # A part of a character would become whole with the new text. Every whole token has the same effect on it.
        whole = (token for token in reversed(before[-NEAR:]) if self._is_whole(token))
        return FileReader(self, list(islice(whole, 1)))

    def _is_whole(self, token: int) -> bool:
        """Whether the token is shown, and no part of a character."""
        return self.is_shown(token) and not self.is_byte(token) and UNREADABLE not in self.decode_raw([token])

    def close(self) -> None:
        """Ends the process of the chat template, if there is one."""
        if "chat_template" in self.__dict__:  # It is read when it is first needed.
            self.chat_template.close()

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids without special tokens: `decode(ids, skip_special_tokens=True)` of transformers."""
        text = self.decode_raw(ids)
        return cleaned(text) if self.cleans else text

    def decode_raw(self, ids: Sequence[int]) -> str:
        """Returns the text of ids without special tokens, with its spaces before punctuation."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def is_shown(self, token: int) -> bool:
        """Whether decoded text includes this token: special tokens and unknown ids are left out."""
        return token not in self._hidden_ids and self._tokenizer.id_to_token(token) is not None

    def is_byte(self, token: int) -> bool:
        """Whether the token is a byte, in a vocabulary that uses bytes for characters without a token of their own."""
        return self._has_bytes and BYTE.fullmatch(self._tokenizer.id_to_token(token) or "") is not None

    @cached_property
    def _has_bytes(self) -> bool:
        decoder = self._tokenizer.decoder
        return decoder is not None and decoder.decode(["<0x41>"]) == "A"

    @cached_property
    def _is_byte_level(self) -> bool:
        """Whether each character of a token's name encodes a byte."""
        decoder = self._tokenizer.decoder
        return decoder is not None and decoder.decode(["\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}a"]) == " a"

    @cached_property
    def _hidden_ids(self) -> frozenset[int]:
        """The special tokens that decoding leaves out; it keeps those that are normalized before they are matched."""
        return frozenset(token for token in self._special_ids if not self.decode_raw([token]))

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added: dict[int, AddedToken] = self._tokenizer.get_added_tokens_decoder()
        return frozenset(token for token, about in added.items() if about.special)


class FileReader:
    """Decodes a text token by token. The joined results equal `decode` of all tokens, wherever the text ends; or, after
    tokens before the text, what the text adds to theirs.

    It decodes the last few tokens again with each new one, and returns a character only when no later token can change
    it. Characters of a run of byte tokens are never certain before the run ends: if one byte of the run is invalid, a
    decoder with byte fallback shows the whole run as unreadable. (`DecodeStream` of the package `tokenizers` shows such
    characters at once and fails at the byte that invalidates them. It also loses held-back characters at the end.)
    """

    def __init__(self, file: TokenizersFile, before: Sequence[int]) -> None:
        """`before` are tokens before the text, whose own text is whole; none if the text begins with its own."""
        self._file = file
        # The tokens of the last piece shown, and all tokens after it. New tokens are never decoded alone, because a
        # decoder drops the space before the first word.
        self._ids = list(before)
        self._before = len(before)
        self._shown = len(file.decode_raw(before))
        self._uncleaned = ""

    def feed(self, token: int) -> str:
        """Returns the characters that become certain with this token."""
        return self._clean(self._raw(token))

    def peek(self) -> str:
        """Returns the characters that are held back, without those at the end that may be a part of a character."""
        # After a piece that was shown whole there are no further tokens, so that most calls decode nothing.
        is_whole = len(self._ids) == self._before
        rest = "" if is_whole else self._file.decode_raw(self._ids)[self._shown :].rstrip(UNREADABLE)
        text = self._uncleaned + rest
        return cleaned(text) if self._file.cleans else text

    def close(self) -> str:
        """Returns the characters that were held back."""
        rest = self._file.decode_raw(self._ids)[self._shown :]
        self._ids, self._before, self._shown = [], 0, 0
        return self._clean(rest, ends=True)

    def _clean(self, piece: str, *, ends: bool = False) -> str:
        if not self._file.cleans:
            return piece
        text = self._uncleaned + piece
        cut = len(text) if ends else certain_length(text)
        self._uncleaned = text[cut:]
        return cleaned(text[:cut])

    def _raw(self, token: int) -> str:
        if not self._file.is_shown(token):
            return ""
        self._ids.append(token)
        if self._file.is_byte(token):
            return ""
        text = self._file.decode_raw(self._ids)
        certain = text.rstrip(UNREADABLE)
        if len(certain) <= self._shown:
            return ""
        new = certain[self._shown :]
        if certain != text:
            self._shown = len(certain)
            return new
        self._ids = self._ids[self._before :]
        self._before = len(self._ids)
        self._shown = len(self._file.decode_raw(self._ids))
        return new


CLEANED = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"), (" 's", "'s"),
    (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip
"""What `clean_up_tokenization` of transformers replaces, in its order."""
REACH = max(len(pattern) for pattern, _ in CLEANED) - 1


def cleaned(text: str) -> str:
    """Removes spaces before punctuation, as transformers does if a tokenizer says `clean_up_tokenization_spaces`."""
    for pattern, replacement in CLEANED:
        text = text.replace(pattern, replacement)
    return text


def certain_length(text: str) -> int:
    """Returns the length of the beginning of a text that `cleaned` changes in the same way whatever follows it.

    Every pattern begins with a space, so what follows can change the text only from a space among its last REACH
    characters on. As patterns overlap, a space up to REACH characters before that one counts instead, and so on.
    """
    cut = len(text)
    while (space := text.find(" ", max(0, cut - REACH), cut)) >= 0:
        cut = space
    return cut


@cache
def _byte_of_character() -> dict[str, int]:
    """Character -> byte, as in byte-level vocabularies (GPT-2): printable bytes map to their own character, the others
    to the characters from U+0100 on, in order.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(unprintable)}


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file; empty if there is no such file.

    Raises:
        UsageError: the file cannot be read, or is not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content

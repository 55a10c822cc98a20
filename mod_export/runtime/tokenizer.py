"""A model's own tokenizer: a tokenizer.json of the package `tokenizers`, used as transformers uses it.

Only the post-processor of tokenizer.json decides which special tokens a text begins or ends with; transformers
(release 5) ignores `add_bos_token` of tokenizer_config.json if there is a tokenizer.json. Tokens that the configuration
names as special are special even if tokenizer.json does not say so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mod_export.errors import UsageError
from mod_export.runtime.chat import ChatTemplate

if TYPE_CHECKING:
    from tokenizers import AddedToken

UNREADABLE = "\N{REPLACEMENT CHARACTER}"
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names of special tokens that transformers and chat templates know."""
CONFIG, SPECIAL_TOKENS_MAP = "tokenizer_config.json", "special_tokens_map.json"
BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


class TokenizersFile:
    """A tokenizer.json, and the files beside it that configure it: tokenizer_config.json, special_tokens_map.json and
    chat_template.jinja.

    Ids that are not in the file represent no text: many models have a few more ids than their tokenizer.

    Attributes:
        size: largest id plus one, the smallest vocabulary that a model needs to read every id. Ids may have gaps, so
            this is not a count.
        special: name of a special token, such as `bos_token` -> its text.
        end: id of `eos_token`; None if there is none.

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
        self.size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._folder, self._config = path.parent, _config(path.parent)
        self._token_bytes: dict[int, bytes | None] = {}
        self.special = {name: _content(self._config[name]) for name in NAMED if self._config.get(name)}
        self._add_special_tokens()
        self._tokenizer.encode_special_tokens = self._config.get("split_special_tokens") is True
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
        return self.decode([*before, token]).removeprefix(self.decode(before)).encode()

    def reader(self) -> FileReader:
        """Returns a decoder for one new text."""
        return FileReader(self)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids without special tokens: `decode(ids, skip_special_tokens=True)` of transformers."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def is_shown(self, token: int) -> bool:
        """Whether decoded text includes this token: special tokens and unknown ids are left out."""
        return token not in self._special_ids and self._tokenizer.id_to_token(token) is not None

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
    def _special_ids(self) -> frozenset[int]:
        added: dict[int, AddedToken] = self._tokenizer.get_added_tokens_decoder()
        return frozenset(token for token, about in added.items() if about.special)

    def _add_special_tokens(self) -> None:
        """Adds tokens that the configuration names but tokenizer.json does not list, in transformers' order."""
        from tokenizers import AddedToken

        known = {token.content: repr(token) for token in self._tokenizer.get_added_tokens_decoder().values()}
        listed = self._config.get("added_tokens_decoder") or {}
        try:
            tokens = [AddedToken(**listed[number]) for number in sorted(listed, key=int)]
        except (TypeError, ValueError, AttributeError) as error:
            path = self._folder / CONFIG
            raise UsageError(f"{path}: added_tokens_decoder: expected a table of tokens ({error})") from error
        new = [token for token in tokens if repr(token) != known.get(token.content)]
        seen = known.keys() | {token.content for token in tokens}
        names = dict.fromkeys([*self.special.values(), *_further(self._config)])
        self._tokenizer.add_tokens([*new, *(AddedToken(name, special=True) for name in names if name not in seen)])


class FileReader:
    """Decodes a text token by token. The joined results equal `decode` of all tokens, wherever the text ends.

    It decodes the last few tokens again with each new one, and returns a character only when no later token can change
    it. Characters of a run of byte tokens are never certain before the run ends: if one byte of the run is invalid, a
    decoder with byte fallback shows the whole run as unreadable. (`DecodeStream` of the package `tokenizers` shows such
    characters at once and fails at the byte that invalidates them. It also loses held-back characters at the end.)
    """

    def __init__(self, file: TokenizersFile) -> None:
        self._file = file
        # The tokens of the last piece shown, and all tokens after it. New tokens are never decoded alone, because a
        # decoder drops the space before the first word.
        self._ids: list[int] = []
        self._before = 0
        self._shown = 0

    def feed(self, token: int) -> str:
        """Returns the characters that become certain with this token."""
        if not self._file.is_shown(token):
            return ""
        self._ids.append(token)
        if self._file.is_byte(token):
            return ""
        text = self._file.decode(self._ids)
        certain = text.rstrip(UNREADABLE)
        if len(certain) <= self._shown:
            return ""
        new = certain[self._shown :]
        if certain != text:
            self._shown = len(certain)
            return new
        self._ids = self._ids[self._before :]
        self._before = len(self._ids)
        self._shown = len(self._file.decode(self._ids))
        return new

    def close(self) -> str:
        """Returns the characters that were held back."""
        rest = self._file.decode(self._ids)[self._shown :]
        self._ids, self._before, self._shown = [], 0, 0
        return rest


@cache
def _byte_of_character() -> dict[str, int]:
    """Character -> byte, as in byte-level vocabularies (GPT-2): printable bytes map to their own character, the others
    to the characters from U+0100 on, in order.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


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


def _config(folder: Path) -> dict[str, Any]:
    """Reads tokenizer_config.json, and also special_tokens_map.json of older transformers if tokens are missing."""
    config = read_json(folder / CONFIG)
    return config if "added_tokens_decoder" in config else config | read_json(folder / SPECIAL_TOKENS_MAP)


def _further(config: Mapping[str, Any]) -> list[str]:
    """Special tokens beyond `NAMED`: unnamed ones, and those under a name of the model's own, such as `image_token`."""
    listed = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    own_names = [
        value
        for name, value in config.items()
        if name.endswith("_token") and name not in NAMED and isinstance(value, str)
    ]
    return [_content(token) for token in [*own_names, *(listed.values() if isinstance(listed, dict) else listed)]]


def _content(token: Any) -> str:
    """The text of a token, which is given as a string or as an object with properties."""
    return str(token["content"]) if isinstance(token, dict) and "content" in token else str(token)

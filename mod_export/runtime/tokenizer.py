"""A model's own tokenizer and chat template: a tokenizer.json of the package `tokenizers`, and the files beside it.

They are used as transformers uses them.

Only the post-processor of tokenizer.json decides which special tokens a text begins or ends with; transformers
(release 5) ignores `add_bos_token` of tokenizer_config.json if there is a tokenizer.json. Tokens that the configuration
names as special are special even if tokenizer.json does not say so.

A chat template is code written by the publisher of the model. It runs in jinja2's sandbox and sees plain data only. The
result equals that of `apply_chat_template` in transformers: same environment, same functions, same variables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from mod_export.errors import UsageError

if TYPE_CHECKING:
    from tokenizers import AddedToken

UNREADABLE = "\N{REPLACEMENT CHARACTER}"
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names of special tokens that transformers and chat templates know."""
CONFIG, SPECIAL_TOKENS_MAP = "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
DEFAULT = "default"
NO_TEMPLATE = (
    "this model has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); give plain "
    "prompts, or add the template beside its tokenizer.json and build again"
)
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


# Chat templates.


class ChatTemplate:
    """A compiled chat template.

    Raises:
        UsageError: the source is not a valid template.
    """

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """`special` maps names such as `bos_token` to special tokens; templates use them as variables."""
        self._special = dict(special)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise UsageError(f"the model's chat template cannot be read ({error})") from error

    @classmethod
    def of_folder(cls, folder: Path, configured: Any, special: Mapping[str, str]) -> ChatTemplate:
        """Loads chat_template.jinja, or else the template in tokenizer_config.json (`configured`).

        `configured` is a string, or a list of {name, template}, of which the one named "default" is used.

        Raises:
            UsageError: there is no template, or no default one, or it cannot be read.
        """
        file = folder / TEMPLATE
        if file.is_file():
            try:
                return cls(file.read_text(encoding="utf-8"), special)
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"{file}: cannot be read ({error})") from error
        if not configured:
            raise UsageError(NO_TEMPLATE)
        if isinstance(configured, str):
            return cls(configured, special)
        try:
            by_name = {str(entry["name"]): str(entry["template"]) for entry in configured}
        except (TypeError, KeyError) as error:
            raise UsageError(
                "chat_template in tokenizer_config.json: expected a text, or a list of {name, template}"
            ) from error
        if DEFAULT not in by_name:
            raise UsageError(
                f"the model has chat templates for {', '.join(by_name)}, and none is the default; write the one to use "
                f"to {TEMPLATE} beside its tokenizer.json, and build again"
            )
        return cls(by_name[DEFAULT], special)

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None) -> str:
        """Returns the text of a conversation, up to and including the marker that starts the answer.

        Args:
            messages: each has a `role` (such as system, user or assistant) and a `content`. Other keys hold plain
                data and reach the template unchanged.
            variables: more variables for the template, as plain data, such as `enable_thinking` and `tools`.

        Raises:
            UsageError: a message is invalid, a variable is not plain data, or the template refuses the conversation.
        """
        defaults = {"tools": None, "documents": None, "add_generation_prompt": True, **self._special}
        context = {**defaults, **_plain(variables or {}, "a variable of the template"), "messages": _messages(messages)}
        try:
            return self._template.render(context)
        except Exception as error:  # A template is a program: it may raise any exception.
            raise UsageError(f"the model's chat template refuses this conversation: {error}") from error


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    for message in messages:
        if not all(isinstance(message.get(name), str) for name in ("role", "content")):
            raise UsageError(f"a message has a role and a content, both text, got {dict(message)!r}")
    # Keys whose value is None are removed, as transformers does: templates check whether a key is defined.
    return [
        {name: value for name, value in _plain(message, "a message").items() if value is not None}
        for message in messages
    ]


def _plain(data: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Copies the data into new lists, dicts and scalars, so that a template cannot reach methods of other objects."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(dict(data)))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{what} holds more than plain data ({error}); leave it out") from error
    return copy


class _Generation(Extension):
    """Renders only the content of `{% generation %}`, which marks answers for training."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it this way.

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """jinja2's namespace, but without names that begin with an underscore: the sandbox does not check them here."""

    def __init__(*args: Any, **values: Any) -> None:  # A template may set a name `self`.
        self, *mappings = args
        values = dict(*mappings, **values)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace holds no names that begin with an underscore, got {name!r}")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    # jinja2's own `tojson` escapes HTML characters.
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now, "namespace": _Namespace}
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)

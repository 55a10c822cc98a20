"""A conversation as the text that a model was trained on, by the chat template that comes with its tokenizer.

A template is code of whoever published the model. It runs in jinja2's sandbox and sees plain data only, and it renders
what `apply_chat_template` of transformers renders: the same environment, the same functions, the same variables.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from mod_export.errors import UsageError

TEMPLATE = "chat_template.jinja"
DEFAULT = "default"
NO_TEMPLATE = (
    "this model has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); give plain "
    "prompts, or add the template beside its tokenizer.json and build again"
)


class ChatTemplate:
    """A template, ready to render.

    Raises:
        UsageError: it is no template.
    """

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """`special` are the special tokens by name, `bos_token` and others, which templates use as variables."""
        self._special = dict(special)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise UsageError(f"the model's chat template cannot be read ({error})") from error

    @classmethod
    def of_folder(cls, folder: Path, configured: Any, special: Mapping[str, str]) -> ChatTemplate:
        """That of chat_template.jinja, else the one in tokenizer_config.json: a text, or a list of named ones.

        Raises:
            UsageError: there is none, or none that is meant for plain conversations.
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
            named = {str(one["name"]): str(one["template"]) for one in configured}
        except (TypeError, KeyError) as error:
            raise UsageError(
                "chat_template in tokenizer_config.json: expected a text, or a list of {name, template}"
            ) from error
        if DEFAULT not in named:
            raise UsageError(
                f"the model has chat templates for {', '.join(named)}, and none is the default; write the one to use "
                f"to {TEMPLATE} beside its tokenizer.json, and build again"
            )
        return cls(named[DEFAULT], special)

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None) -> str:
        """The text of a conversation, and the beginning of the answer.

        Args:
            messages: each with a `role`, such as system, user or assistant, and a `content`; further keys, of plain
                data, are given to the template as they are.
            variables: further ones that the template knows, of plain data, such as `enable_thinking` and `tools`.

        Raises:
            UsageError: a message is none, a variable is more than plain data, or the template refuses the conversation.
        """
        known = {"tools": None, "documents": None, "add_generation_prompt": True, **self._special}
        told = {**known, **_plain(variables or {}, "a variable of the template"), "messages": _messages(messages)}
        try:
            return self._template.render(told)
        except Exception as error:  # A template is a program: it may fail with whatever Python raises.
            raise UsageError(f"the model's chat template refuses this conversation: {error}") from error


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    for message in messages:
        if not all(isinstance(message.get(name), str) for name in ("role", "content")):
            raise UsageError(f"a message has a role and a content, both text, got {dict(message)!r}")
    # Keys without a value are left out, as transformers does: templates ask whether there is one.
    return [
        {name: value for name, value in _plain(message, "a message").items() if value is not None}
        for message in messages
    ]


def _plain(given: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The same as new lists, dicts and scalars, which have no methods that reach further."""
    try:
        found: dict[str, Any] = json.loads(json.dumps(dict(given)))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{what} holds more than plain data ({error}); leave it out") from error
    return found


class _Generation(Extension):
    """`{% generation %}` marks answers for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012  # As jinja2 declares it.

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Without names that begin with an underscore, which the sandbox does not look at in here."""

    def __init__(*args: Any, **values: Any) -> None:  # `self` is a name that a template may set.
        self, *given = args
        values = dict(*given, **values)
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
    # jinja2's own would escape characters of HTML.
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

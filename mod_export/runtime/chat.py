"""Renders a conversation as the text format that a model was trained on, with the chat template of its tokenizer.

A template is code written by the publisher of the model. It runs in jinja2's sandbox and sees plain data only. The
result equals that of `apply_chat_template` in transformers: same environment, same functions, same variables.
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


def _plain(given: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Copies the data into new lists, dicts and scalars, so that a template cannot reach methods of other objects."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(dict(given)))
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

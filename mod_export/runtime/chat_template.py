"""A model's chat template, which turns a conversation into a prompt.

A chat template is code written by the publisher of the model. It runs in jinja2's sandbox and sees plain data only. The
result equals that of `apply_chat_template` in transformers: same environment, same functions, same variables, and the
same changes to messages before the template sees them (`utils/chat_template_utils.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from mod_export.errors import UsageError

TEMPLATE = "chat_template.jinja"
DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Names of the templates that are used without tools and, if there is one of its own, with tools."""
NO_TEMPLATE = (
    "this model has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); give plain "
    "prompts, or add the template beside its tokenizer.json and build again"
)
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message under which clients send the reasoning of an answer; templates read the first or the second."""
PART = "a part of a message"
"""The text of the message by which `ChatTemplate.reads_parts` finds out what a template does."""

FUNCTION, ARGUMENTS = "a_probed_function", '{"probed": "value"}'
"""The call by which `ChatTemplate.reads_tools` and `reads_argument_texts` find it out."""

Message = Mapping[str, Any]


class ChatTemplate:
    """The chat templates of a model, compiled.

    Attributes:
        names_developer: whether a template knows the role `developer`, OpenAI's new name of the role `system`.

    Raises:
        UsageError: a source is not a valid template.
    """

    def __init__(self, source: str | Mapping[str, str], special: Mapping[str, str]) -> None:
        """`source` is the template, or the templates by name. `special` maps names such as `bos_token` to special
        tokens; templates use them as variables.
        """
        sources = {DEFAULT: source} if isinstance(source, str) else source
        self._special = dict(special)
        self.names_developer = any("developer" in text for text in sources.values())
        try:
            self._by_name = {name: _environment().from_string(text) for name, text in sources.items()}
        except jinja2.TemplateError as error:
            raise UsageError(f"the model's chat template cannot be read ({error})") from error

    @classmethod
    def of_folder(cls, folder: Path, configured: Any, special: Mapping[str, str]) -> ChatTemplate:
        """Loads chat_template.jinja, or else the templates in tokenizer_config.json (`configured`).

        `configured` is a string, or a list of {name, template}.

        Raises:
            UsageError: there is no template, or it cannot be read.
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
        return cls(by_name, special)

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> str:
        """Returns the text of a conversation, up to and including the marker that starts the answer.

        Args:
            messages: each has a `role`, such as system, user or assistant, and usually a `content`. All keys hold plain
                data and reach the template; keys whose value is None are left out.
            variables: more variables for the template, as plain data, such as `enable_thinking` and `tools`.

        Raises:
            UsageError: a message is invalid, a variable is not plain data, the model has no template for these
                variables, or the template refuses the conversation.
        """
        defaults = {"tools": None, "documents": None, "add_generation_prompt": True, **self._special}
        context = {**defaults, **_plain(variables or {}, "a variable of the template"), "messages": _messages(messages)}
        template = self._template(with_tools=context["tools"] is not None)
        try:
            return template.render(context)
        except Exception as error:  # A template is a program: it may raise any exception.
            raise UsageError(f"the model's chat template refuses this conversation: {error}") from error

    def _template(self, *, with_tools: bool) -> jinja2.Template:
        name = WITH_TOOLS if with_tools and WITH_TOOLS in self._by_name else DEFAULT
        if name not in self._by_name:
            raise UsageError(
                f"the model has chat templates for {', '.join(self._by_name)}, and none is the default; write the one "
                f"to use to {TEMPLATE} beside its tokenizer.json, and build again"
            )
        return self._by_name[name]

    @cached_property
    def reads_parts(self) -> bool:
        """Whether the template reads a content that is a list of parts, as models of images and text do. Others would
        write the list itself into the prompt.
        """
        parts = [{"type": "text", "text": PART}]
        try:
            text = self.render([{"role": "user", "content": parts}])
        except UsageError:
            return False
        return PART in text and not any(str(written) in text for written in (parts, json.dumps(parts)))

    @cached_property
    def reads_tools(self) -> bool:
        """Whether the template writes the tools that the model may call."""
        function = {"name": FUNCTION, "description": "", "parameters": {"type": "object", "properties": {}}}
        tools = [{"type": "function", "function": function}]
        try:
            return FUNCTION in self.render([{"role": "user", "content": PART}], {"tools": tools})
        except UsageError:
            return False

    @cached_property
    def reads_argument_texts(self) -> bool:
        """Whether the template writes the arguments of a call as they are if they are a text, as OpenAI's API has them.
        Others would write the text as a JSON string.
        """
        call = {"id": "a" * 9, "type": "function", "function": {"name": FUNCTION, "arguments": ARGUMENTS}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            return ARGUMENTS in self.render([{"role": "user", "content": PART}, answer])
        except UsageError:
            return False


def _messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Prepares messages as transformers does: it removes keys whose value is None, because templates ask whether a key
    is defined, and gives reasoning under the names that templates read.
    """
    prepared = []
    for message in messages:
        if not isinstance(message.get("role"), str):
            raise UsageError(f"a message has a role, which is a text, got {dict(message)!r}")
        fields = {name: value for name, value in _plain(message, "a message").items() if value is not None}
        reasoning = next((fields[name] for name in REASONING if name in fields), None)
        if reasoning is not None:
            fields = {"thinking": reasoning, **fields, "reasoning_content": reasoning}
        prepared.append(fields)
    return prepared


def _plain(data: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Copies the data into new lists, dicts and scalars, so that a template cannot reach methods of other objects."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(dict(data)))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{what} holds more than plain data ({error}); leave it out") from error
    return copy


class _Generation(Extension):
    """Renders the content of `{% generation %}`, which marks answers for training, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it this way.

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """jinja2's `dict`, without the methods of a type."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


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
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": _strftime_now,
        "namespace": _Namespace,
        "dict": _Dict(),
    }
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

"""A model's chat template, which turns a conversation into a prompt.

A chat template is code written by the publisher of the model. It runs in jinja2's sandbox, in a process of its own that
has limits of time and memory (`template_process.py`), and sees plain data only. The result equals that of
`apply_chat_template` in transformers: same environment, same functions, same variables, and the same changes to
messages before the template sees them (`utils/chat_template_utils.py`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from mod_export.errors import UsageError
from mod_export.runtime.limited_process import LimitedProcess
from mod_export.runtime.template_process import NoTextError, TooSlowTextError, rendered, template_process

TEMPLATE = "chat_template.jinja"
DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Names of the template that is used by default, and of the one that is used with tools if the model has it."""
NO_TEMPLATE = (
    "this model has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); give plain "
    "prompts, or add the template beside its tokenizer.json and build again"
)
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message under which clients send the reasoning of an answer; templates read the first or the second."""
PART = "a part of a message"
"""The text of the message with which `ChatTemplate.reads_parts` probes a template."""

FUNCTION, ARGUMENTS = "a_probed_function", '{"probed": "value"}'
"""The call with which `ChatTemplate.reads_tools` and `reads_argument_texts` probe a template."""

Message = Mapping[str, Any]


class ChatTemplate:
    """The chat templates of a model, compiled. Any thread may use them.

    Attributes:
        names_developer: whether a template knows the role `developer`, OpenAI's new name of the role `system`.

    Raises:
        UsageError: a source is not a valid template, or takes too much time or memory.
    """

    def __init__(
        self, source: str | Mapping[str, str], special: Mapping[str, str], process: LimitedProcess | None = None
    ) -> None:
        """Reads the templates.

        Args:
            source: the template, or the templates by name.
            special: names such as `bos_token` -> special tokens, which templates use as variables.
            process: renders templates; None: a new one.
        """
        sources = {DEFAULT: source} if isinstance(source, str) else source
        self._special, self._sources = dict(special), dict(sources)
        self.names_developer = any("developer" in text for text in sources.values())
        self._process, self._lock = process or template_process(), threading.Lock()
        for name in sources:
            try:
                self._asked(name, None)
            except NoTextError as error:
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
            TemplateNotRenderedError: the process that renders it cannot be started, or was ended by somebody else.
        """
        try:
            return self._text(messages, variables)
        except NoTextError as error:
            raise UsageError(f"the model's chat template refuses this conversation: {error}") from error

    def close(self) -> None:
        """Ends the process that renders the templates. Nothing is rendered any more."""
        self._process.close()

    def _text(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> str:
        defaults = {"tools": None, "documents": None, "add_generation_prompt": True, **self._special}
        context = {**defaults, **_plain(variables or {}, "a variable of the template"), "messages": _messages(messages)}
        return self._asked(self._name(with_tools=context["tools"] is not None), context)

    def _name(self, *, with_tools: bool) -> str:
        name = WITH_TOOLS if with_tools and WITH_TOOLS in self._sources else DEFAULT
        if name not in self._sources:
            raise UsageError(
                f"the model has chat templates for {', '.join(self._sources)}, and none is the default; write the one "
                f"to use to {TEMPLATE} beside its tokenizer.json, and build again"
            )
        return name

    def _asked(self, name: str, context: Mapping[str, Any] | None) -> str:
        with self._lock:
            return rendered(self._process, self._sources, name, context)

    @cached_property
    def reads_parts(self) -> bool:
        """Whether the template reads a content that is a list of parts, as models of images and text do. Others would
        write the list itself into the prompt.
        """
        parts = [{"type": "text", "text": PART}]
        text = self._probed([{"role": "user", "content": parts}])
        return PART in text and not any(str(written) in text for written in (parts, json.dumps(parts)))

    @cached_property
    def reads_tools(self) -> bool:
        """Whether the template writes the tools that the model may call."""
        function = {"name": FUNCTION, "description": "", "parameters": {"type": "object", "properties": {}}}
        tools = [{"type": "function", "function": function}]
        return FUNCTION in self._probed([{"role": "user", "content": PART}], {"tools": tools})

    @cached_property
    def reads_argument_texts(self) -> bool:
        """Whether the template writes the arguments of a call as they are if they are a text, as OpenAI's API has them.
        Others would write the text as a JSON string.
        """
        call = {"id": "a" * 9, "type": "function", "function": {"name": FUNCTION, "arguments": ARGUMENTS}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        return ARGUMENTS in self._probed([{"role": "user", "content": PART}, answer])

    def _probed(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> str:
        """Returns the text of a conversation; empty if the template refuses it. A failure that may be temporary is
        raised instead.
        """
        try:
            return self._text(messages, variables)
        except TooSlowTextError as error:
            raise UsageError(f"the model's chat template refuses this conversation: {error}") from error
        except (NoTextError, UsageError):
            return ""


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

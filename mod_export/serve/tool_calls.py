"""Functions that a model may call: how requests offer them, and how calls are found in the text that the model writes.

If a request demands a call, the text follows a grammar and is one call, `{"name": "f", "arguments": {...}}`, whose
arguments follow the schema of the function. Otherwise the text is free, and a call is found if it has one of the forms
that chat templates teach:

    <tool_call>{"name": "f", "arguments": {...}}</tool_call>        Hermes, Qwen; any number of them
    [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]            Mistral
    {"name": "f", "parameters": {...}}                              Llama 3.1, as the whole answer
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from mod_export.runtime.grammar import schema_rule
from mod_export.runtime.texts import StopText

HERMES, HERMES_END, MISTRAL = "<tool_call>", "</tool_call>", "[TOOL_CALLS]"
MARKS = (HERMES, MISTRAL)
"""Marks that stand before calls."""
SHOWN = (*MARKS, HERMES_END)
"""Marks that may be special tokens of a vocabulary. Texts show special tokens only on request."""
NUMBER = secrets.token_hex(16)
"""Stands before numbers while JSON is read and written, so that they keep their digits. It is random, so no text can
contain it on purpose."""
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of a function without `parameters`."""
ID_LENGTH = 9
"""Templates of Mistral refuse ids of calls that have another length, or characters other than letters and digits."""

Json = dict[str, Any]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(BaseModel):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        kind = (self.parameters or {}).get("type", "object")
        if kind != "object":
            raise ValueError(f'parameters: expected a JSON schema of type "object", got type {json.dumps(kind)[:80]}')
        return self


class Sent(BaseModel):
    """A part of a request that chat templates read. It is checked and kept as it was sent, in the order of its keys."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    _sent: Json = PrivateAttr()

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, data: Any, check: Callable[[Any], Self]) -> Self:
        part = check(data)
        part._sent = data
        return part

    @property
    def sent(self) -> Json:
        """The part as it was sent."""
        return self._sent


class Tool(Sent):
    """A tool that a request offers."""

    type: Literal["function"]
    function: Function


class NamedFunction(BaseModel):
    """The name of a function."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: Name


class NamedChoice(BaseModel):
    """Demands a call of one function."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


class Call(NamedTuple):
    """A call of a function; `arguments` is a JSON text."""

    name: str
    arguments: str

    def delta(self, index: int) -> Json:
        """Returns the call in OpenAI's format, with a new id."""
        return {
            "index": index,
            "id": secrets.token_hex(ID_LENGTH)[:ID_LENGTH],
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


def grammar_of_call(functions: Sequence[Function]) -> str:
    """Returns the grammar of texts that are one call of one of the functions.

    Raises:
        GrammarError: the parameters of a function are nested too deeply.
    """
    rules = [f'start: ({" | ".join(f"call{number}" for number in range(len(functions)))}) "}}"']
    for number, function in enumerate(functions):
        schema = NO_PARAMETERS if function.parameters is None else {"type": "object", **function.parameters}
        rules += [f"call{number}: {json.dumps(_opening(function.name))} arguments{number}"]
        rules += [f"arguments{number}: {schema_rule(schema)}"]
    return "\n".join(rules)


def _opening(name: str) -> str:
    """Returns the beginning of a call, up to its arguments."""
    return f'{{"name": "{name}", "arguments": '


class CallReader(ABC):
    """Reads a text in pieces and returns what a client sees of it: parts of a message, each with `content` or
    `tool_calls`. Without calls, the joined contents are the text.
    """

    @abstractmethod
    def feed(self, piece: str) -> Json:
        """Returns the part that is certain with this piece, possibly an empty one."""

    @abstractmethod
    def close(self) -> Json:
        """Returns the part that was held back until the text ended."""


class DemandedCall(CallReader):
    """Reads a text that follows `grammar_of_call`."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._text = ""
        self._told: int | None = None

    def feed(self, piece: str) -> Json:
        self._text += piece
        if self._told is None:
            name = next((name for name in self._names if self._text.startswith(_opening(name))), None)
            if name is None:
                return {}
            self._told = len(_opening(name))
            return {"tool_calls": [Call(name, self._arguments()).delta(0)]}
        arguments = self._arguments()
        return {"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]} if arguments else {}

    def close(self) -> Json:
        """Returns the last character if the text was cut, because it then belongs to the arguments."""
        remainder = "" if self._told is None or _is_json(self._text) else self._text[self._told :]
        return {"tool_calls": [{"index": 0, "function": {"arguments": remainder}}]} if remainder else {}

    def _arguments(self) -> str:
        """Returns the new characters of the arguments. The last character may be the brace that ends the call."""
        begin, end = self._told or 0, max(self._told or 0, len(self._text) - 1)
        self._told = end
        return self._text[begin:end]


class FoundCalls(CallReader):
    """Finds calls in a free text. Characters that may belong to a call are held back until the text ends."""

    def __init__(self, names: Collection[str], most: int | None) -> None:
        """`names` are the names of the functions, and `most` is the largest number of calls that a client gets."""
        self._names, self._most = names, most
        self._text = ""
        self._shown = 0
        self._certain = StopText(MARKS)
        self._unmarked = ""

    def feed(self, piece: str) -> Json:
        self._text += piece
        self._unmarked += self._certain.feed(piece)
        if self._text.lstrip()[:1] in ("", "{"):
            return {}
        # White space before a call is not shown.
        return self._content(self._unmarked.rstrip())

    def close(self) -> Json:
        found = calls_of(self._text, self._names)
        if found is None:
            return self._content(self._text)
        deltas = {"tool_calls": [call.delta(index) for index, call in enumerate(found.calls[: self._most])]}
        before = self._content(found.before.rstrip()).get("content", "")
        content = before + ("\n" if found.after and self._shown else "") + found.after
        return {"content": content, **deltas} if content else deltas

    def _content(self, text: str) -> Json:
        new, self._shown = text[self._shown :], max(self._shown, len(text))
        return {"content": new} if new else {}


class Found(NamedTuple):
    """The calls in a text, the text before the first one, and the text between and after them."""

    calls: list[Call]
    before: str
    after: str


def calls_of(text: str, names: Collection[str]) -> Found | None:
    """Returns the calls in a text, at least one; None if it has none, a call is incomplete, or a call is of a function
    that is not in `names`.
    """
    try:
        before, parts = _parts(text)
        calls = [_call(entry, names) for value, _ in parts for entry in (value if isinstance(value, list) else [value])]
    except (ValueError, RecursionError):
        return None
    return Found(calls, before, "\n".join(after.strip() for _, after in parts if after.strip())) if calls else None


def _parts(text: str) -> tuple[str, list[tuple[Any, str]]]:
    """Divides a text into what is before its first mark, and the JSON value after each mark, with the text after it.
    The text is read forward, because values may contain marks. A whole text that is one JSON object needs no mark.

    Raises:
        ValueError: no JSON value follows a mark, or the end of the call is missing.
    """
    if text.lstrip().startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):  # A text may begin like this and have marks later.
            return "", [(_json(text), "")]
    mark = min((mark for mark in MARKS if mark in text), key=text.index, default=HERMES)
    before, found, rest = text.partition(mark)
    parts: list[tuple[Any, str]] = []
    while found:
        value, rest = _value(rest)
        if mark == HERMES:
            rest = rest.lstrip()
            if not rest.startswith(HERMES_END):
                raise ValueError("the call has no end")
            rest = rest.removeprefix(HERMES_END)
        after, found, rest = rest.partition(mark)
        parts.append((value, after))
    return before, parts


def _json(text: str) -> Any:
    value, after = _value(text)
    if after.strip():
        raise ValueError("more than a JSON value")
    return value


def _value(text: str) -> tuple[Any, str]:
    """Returns the JSON value that a text begins with, and the text after it."""
    text = text.lstrip()
    decoder = json.JSONDecoder(parse_constant=_no_constant, parse_float=_number, parse_int=_number)
    value, end = decoder.raw_decode(text)
    return value, text[end:]


def _number(digits: str) -> str:
    return NUMBER + digits


def _written(value: Any) -> str:
    """Writes what `_value` has read, with the numbers as they were."""
    text = json.dumps(value, ensure_ascii=False)
    if any("\ud800" <= character <= "\udfff" for character in text):  # Half a surrogate pair is only valid escaped.
        text = json.dumps(value)
    return re.sub(f'"{NUMBER}([^"]*)"', r"\1", text)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _call(value: Any, names: Collection[str]) -> Call:
    """Reads a call.

    Raises:
        ValueError: the value is no such call.
    """
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in names:
        raise ValueError("no call of one of these functions")
    arguments: Any = next((value[key] for key in ("arguments", "parameters") if key in value), {})
    if isinstance(arguments, str):
        arguments = _json(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a call are an object")
    return Call(name, _written(arguments))

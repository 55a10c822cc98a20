"""Calls in texts: their forms, how they are streamed, and the grammar of one that is demanded."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from mod_export.errors import GrammarError
from mod_export.serve.tool_calls import Call, CallReader, DemandedCall, FoundCalls, Function, calls_of, grammar_of_call

NAMES = ["weather", "time"]
PARIS = Call("weather", '{"city": "Paris"}')
CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'
SECOND = '{"name": "time", "arguments": {}}'
FORMS = {
    "hermes": (f"<tool_call>\n{CALL}\n</tool_call>", [PARIS]),
    "two of hermes": (f"<tool_call>{CALL}</tool_call>\n<tool_call>{SECOND}</tool_call>", [PARIS, Call("time", "{}")]),
    "mark in a text": (
        '<tool_call>{"name": "time", "arguments": {"a": "</tool_call>"}}</tool_call>',
        [Call("time", '{"a": "</tool_call>"}')],
    ),
    "mark of a call in a call": (
        '<tool_call>{"name": "time", "arguments": {"a": "b <tool_call> c"}}</tool_call>',
        [Call("time", '{"a": "b <tool_call> c"}')],
    ),
    "another mark in a call": (
        '<tool_call>{"name": "time", "arguments": {"a": "[TOOL_CALLS]"}}</tool_call>',
        [Call("time", '{"a": "[TOOL_CALLS]"}')],
    ),
    "mark in one of mistral": (
        '[TOOL_CALLS][{"name": "time", "arguments": {"a": "[TOOL_CALLS] and <tool_call>"}}]',
        [Call("time", '{"a": "[TOOL_CALLS] and <tool_call>"}')],
    ),
    "mark in one of llama": (
        '{"name": "time", "parameters": {"a": "what is <tool_call>?"}}',
        [Call("time", '{"a": "what is <tool_call>?"}')],
    ),
    "numbers": (
        '{"name": "time", "arguments": {"a": [1e999, -0, 1.10, 123456789012345678901234567890], "b": "1.0"}}',
        [Call("time", '{"a": [1e999, -0, 1.10, 123456789012345678901234567890], "b": "1.0"}')],
    ),
    "half a character": (
        r'{"name": "time", "arguments": {"a": "\ud800"}}',
        [Call("time", r'{"a": "\ud800"}')],
    ),
    "mistral": (f"[TOOL_CALLS] [{CALL}, {SECOND}]", [PARIS, Call("time", "{}")]),
    "one of mistral": (f"[TOOL_CALLS]{CALL}", [PARIS]),
    "llama": ('{"name": "weather", "parameters": {"city": "Paris"}}', [PARIS]),
    "spaces": (f"\n {CALL} \n", [PARIS]),
    "text as arguments": ('{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}', [PARIS]),
    "no arguments": ('{"name": "time"}', [Call("time", "{}")]),
    "other characters": (
        '{"name": "time", "arguments": {"a": "d\u00e9j\u00e0"}}',
        [Call("time", '{"a": "d\u00e9j\u00e0"}')],
    ),
}
NO_CALLS = [
    "", "Hello.", "{", '{"a": 1}', '{"name": "other", "arguments": {}}', '{"name": ["time"]}', f"Call {CALL}",
    f"{CALL} {CALL}", "<tool_call>", f"<tool_call>{CALL}", f"<tool_call>{CALL} or </tool_call>",
    "<tool_call>nothing</tool_call>", f"<tool_call>{CALL}</tool_call><tool_call>{{",
    "[TOOL_CALLS]", "[TOOL_CALLS][1]", "[TOOL_CALLS][]", f"[{CALL}]", '{"a": "<tool_call>"}',
    '{"name": "time", "arguments": [1]}', '{"name": "time", "arguments": "x"}',
    '{"name": "time", "arguments": {"a": NaN}}', '{"name": "time", "arguments": "{\\"a\\": -Infinity}"}',
     "[" * 20_000, "<tool_call>" + "[" * 20_000,
]  # fmt: skip


def told(reader: CallReader, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The content and the calls of a message, put together as clients do it."""
    content, calls = "", {}
    for part in [*map(reader.feed, pieces), reader.close()]:
        content += part.get("content", "")
        for delta in part.get("tool_calls", []):
            if delta["index"] not in calls:
                assert re.fullmatch("[0-9a-f]{9}", delta["id"])
                assert delta["type"] == "function"
                calls[delta["index"]] = [delta["function"]["name"], ""]
            calls[delta["index"]][1] += delta["function"]["arguments"]
    assert list(calls) == list(range(len(calls)))
    return content, [(name, arguments) for name, arguments in calls.values()]


@pytest.mark.parametrize(("text", "calls"), FORMS.values(), ids=FORMS)
def test_calls_that_templates_teach(text: str, calls: list[Call]) -> None:
    assert calls_of(text, NAMES) == (calls, "", "")
    for pieces in ([text], list(text)):
        assert told(FoundCalls(NAMES, None), pieces) == ("", calls)
        assert told(FoundCalls(NAMES, 1), pieces) == ("", calls[:1])


@pytest.mark.parametrize("text", NO_CALLS, ids=lambda text: text[:30])
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert calls_of(text, NAMES) is None
    for pieces in ([text], list(text)):
        assert told(FoundCalls(NAMES, None), pieces) == (text, [])


def test_text_before_a_call_is_shown_at_once() -> None:
    reader = FoundCalls(NAMES, None)
    assert reader.feed(" Let me see. <to") == {"content": " Let me see."}
    assert reader.feed("p> ") == {"content": " <top>"}
    assert reader.feed("\n<tool_call>") == {}
    assert reader.feed(f"{CALL}</tool_call>") == {}
    assert [call["function"]["name"] for call in reader.close()["tool_calls"]] == ["weather"]
    whole = f" Let me see. <top> \n<tool_call>{CALL}</tool_call>"
    assert told(FoundCalls(NAMES, None), [whole]) == (" Let me see. <top>", [PARIS])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"<tool_call>{CALL}</tool_call>\nI look. ", "I look.", [PARIS]),
        (f"Well.\n<tool_call>{CALL}</tool_call>\nI look.", "Well.\nI look.", [PARIS]),
        (f"Well. <tool_call>{CALL}</tool_call> and <tool_call>{CALL}</tool_call>", "Well.\nand", [PARIS, PARIS]),
        (f"Well. [TOOL_CALLS][{CALL}] I look.", "Well.\nI look.", [PARIS]),
        (f"{{x}} <tool_call>{CALL}</tool_call>", "{x}", [PARIS]),
        (f"Well. [TOOL_CALLS][{CALL}] <tool_call>", "Well.\n<tool_call>", [PARIS]),
    ],
)
def test_texts_around_calls_are_shown(text: str, content: str, calls: list[Call]) -> None:
    for pieces in ([text], list(text)):
        assert told(FoundCalls(NAMES, None), pieces) == (content, calls)


@pytest.mark.parametrize("cut", range(len(CALL) + 1))
def test_a_demanded_call_is_told_piece_by_piece(cut: int) -> None:
    """Wherever the text is cut into two pieces, and wherever it ends."""
    names = ["weath", "weather", "weather2"]
    assert told(DemandedCall(names), [CALL[:cut], CALL[cut:]]) == ("", [PARIS])
    _, calls = told(DemandedCall(names), [CALL[:cut]])
    opening = len('{"name": "weather", "arguments": ')
    assert calls == (
        [("weather", CALL[opening:cut] if cut < len(CALL) else CALL[opening:-1])] if cut >= opening else []
    )


def test_the_grammar_names_every_function() -> None:
    functions: list[Any] = [Function(name="a.b-c"), Function(name="d", parameters={"properties": {"x": {}}})]
    rules = grammar_of_call(functions).split("\n")
    assert rules[0] == 'start: (call0 | call1) "}"'
    assert rules[1] == r'call0: "{\"name\": \"a.b-c\", \"arguments\": " arguments0'
    assert json.loads(rules[2].removeprefix("arguments0: %json "))["additionalProperties"] is False
    assert json.loads(rules[4].removeprefix("arguments1: %json "))["type"] == "object"
    deep: dict[str, Any] = {}
    deep["items"] = deep
    with pytest.raises(GrammarError, match="the JSON schema cannot be read"):
        grammar_of_call([Function.model_construct(name="a", parameters=deep)])

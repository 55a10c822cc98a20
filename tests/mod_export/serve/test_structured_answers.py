"""Requests that say what the answer must look like: biases of tokens, JSON schemas, and tools."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import openai
import pytest
import torch
from chat_models import built, random_llama, text_toml
from chat_templates import LLAMA3
from serving import PATIENCE_S, Server, serving
from tokenizer_folders import write_folder
from tokenizers import AddedToken, Tokenizer

from mod_export.runtime import compiling
from mod_export.runtime import grammar as grammar_module
from mod_export.runtime.generator import Generator
from mod_export.runtime.grammar import schema_rule
from mod_export.serve import openai_api, tool_calls

pytestmark = pytest.mark.filterwarnings("ignore::mod_export.errors.UnverifiedWarning")
TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content %}{{ message.content }}{% endif %}
    {%- for call in message.tool_calls %}
        {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
        {{- (call.function.arguments | tojson) + '}</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>' }}
{%- endfor %}
{{- '<|im_start|>assistant' + (' ' if messages[-1].role == 'tool' else '\\n') }}
"""
PARTS = ['<tool_call>{"name": "weather", ', '"arguments": {"city": "Paris"}}</tool_call>', "It rains."]
"""Texts of three tokens of the vocabulary. The model writes the first two where an answer begins, and the third where
the result of a tool is before it.
"""
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 0, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
MESSAGES: Any = [{"role": "user", "content": "What is the weather?"}]
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["n"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["a .", "\u6771"]}, "minItems": 1, "maxItems": 2},
]


def with_head(model: Any, follows: list[tuple[int, int]]) -> None:
    """Changes a model so that its most probable token after a token depends on this token alone."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.mul_(0.1)
        for before, after in follows:
            row = model.model.embed_tokens.weight[before]
            model.lm_head.weight[after] += 2 * row / row.norm()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build folder of a Llama with the tokenizer of Qwen3 and a template that teaches calls."""
    source = tmp_path_factory.mktemp("tools") / "llama"
    write_folder(source, "qwen3")
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(part, special=False, normalized=False) for part in PARTS])
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (source / "chat_template.jinja").write_text(TEMPLATE)
    model = random_llama(416, 512, hidden_size=64, tie_word_embeddings=False)
    one, two, three, end = (tokenizer.token_to_id(text) for text in (*PARTS, "<|im_end|>"))
    asked, answered = (tokenizer.encode(f"assistant{text}").ids[-1] for text in ("\n", " "))
    with_head(model, [(asked, one), (one, two), (two, end), (answered, three), (three, end)])
    model.generation_config.eos_token_id = end
    model.save_pretrained(source)
    return built(source, text_toml(512, 64, [2]))


@pytest.fixture(scope="module")
def chat(folder: Path) -> Iterator[Server]:
    with serving(folder) as found:
        yield found


@pytest.fixture
def client(chat: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{chat.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def refusal(server: Server, path: str, body: dict[str, Any]) -> tuple[str, str | None]:
    """Message and `param` of the error with which a request is refused."""
    answer = httpx2.post(f"{server.url}/v1/{path}", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["message"], error["param"]


# Completions.


@pytest.mark.parametrize("schema", SCHEMAS, ids=["object", "array"])
def test_answers_follow_a_schema(server: Server, other: Generator, schema: dict[str, Any]) -> None:
    """Fifty texts, ten requests at once in the rows of one server, each as the generator alone writes it."""
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        for seed in range(10):
            request: dict[str, Any] = {"prompt": "x", "n": 5, "max_tokens": 40, "seed": seed}
            found = client.completions.create(model="writing", **request, extra_body={"response_format": form})
            expected = other.generate(["x"] * 5, 40, seed=seed, temperature=1.0, grammar=schema)
            for choice, done in zip(found.choices, expected, strict=True):
                assert (choice.text, choice.finish_reason) == (done.text, "stop")
                jsonschema.validate(json.loads(choice.text), schema)


def test_texts_with_and_without_a_schema_beside_each_other(server: Server, other: Generator) -> None:
    form = {"type": "json_object"}
    free: dict[str, Any] = {"prompt": ["def", "abc"], "max_tokens": 30, "seed": 5}
    with httpx2.Client(base_url=f"{server.url}/v1/", timeout=PATIENCE_S) as client:
        plain = client.post("completions", json=free).json()["choices"]
        given = client.post("completions", json={**free, "n": 2, "response_format": form}).json()["choices"]
    expected = other.generate(["def", "abc"], 30, seed=5, temperature=1.0)
    assert [choice["text"] for choice in plain] == [done.text for done in expected]
    assert all(choice["text"].startswith("{") for choice in given)


def test_a_format_of_text_changes_nothing(server: Server) -> None:
    body: dict[str, Any] = {"prompt": "def", "max_tokens": 8, "seed": 1}
    answers = [
        httpx2.post(f"{server.url}/v1/completions", json={**body, **more}, timeout=PATIENCE_S).json()["choices"]
        for more in ({}, {"response_format": {"type": "text"}, "logit_bias": {}}, {"response_format": None})
    ]
    assert answers[0] == answers[1] == answers[2]


def test_biases_of_tokens(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        request: dict[str, Any] = {"model": "writing", "prompt": "def", "max_tokens": 6, "seed": 2}
        assert client.completions.create(**request, logit_bias={"65": 100}).choices[0].text == "AAAAAA"
        free = client.completions.create(**request, temperature=0).choices[0].text
        excluded = {str(byte): -100 for byte in range(256) if byte != 66}
        some = client.completions.create(**request, logit_bias=dict(list(excluded.items())[:255]))
        assert some.choices[0].text == "BBBBBB"
        assert free != some.choices[0].text


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"logit_bias": {"x": 1}}, "String should match pattern", "logit_bias.x.[key]"),
        ({"logit_bias": {"5": 101}}, "Input should be less than or equal to 100", "logit_bias.5"),
        ({"logit_bias": {str(token): 1 for token in range(301)}}, "at most 300 items", "logit_bias"),
        ({"logit_bias": {"256": 1}}, "logit_bias: got token 256, expected ids from 0 to 255", None),
        ({"response_format": {"type": "xml"}}, "does not match any of the expected tags", "response_format"),
        ({"response_format": {"type": "json_schema"}}, "Field required", "response_format.json_schema.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "foo"}}}},
            "response_format: no grammar can be made of it: Invalid type: foo",
            "response_format",
        ),
    ],
    ids=["no id", "large", "many", "unknown id", "xml", "no schema", "bad schema"],
)
def test_what_is_refused(server: Server, body: dict[str, Any], message: str, param: str | None) -> None:
    found, where = refusal(server, "completions", {"prompt": "x", **body})
    assert message in found
    assert where == param


def test_a_missing_package_is_named(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with serving(written) as server:
        body = {"prompt": "x", "response_format": {"type": "json_object"}}
        message = "response_format: needs the package llguidance; pip install 'mod-export[structured]'"
        assert refusal(server, "completions", body) == (message, "response_format")


@pytest.mark.parametrize("demanded", [False, True], ids=["schema", "tools"])
def test_a_schema_is_checked_once_and_not_on_the_event_loop(
    server: Server, chat: Server, monkeypatch: pytest.MonkeyPatch, demanded: bool
) -> None:
    """Checking a large one takes a second, in which the event loop would answer nobody."""
    threads: list[str] = []

    def noted(schema: Any) -> str:
        threads.append(threading.current_thread().name)
        return schema_rule(schema)

    for module in (grammar_module, tool_calls):
        monkeypatch.setattr(module, "schema_rule", noted)
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMAS[0]}}
    free: dict[str, Any] = {"n": 3, "max_tokens": 4}
    body = {"prompt": "x", **free, "response_format": form}
    url = f"{server.url}/v1/completions"
    if demanded:
        body = {"messages": MESSAGES, **free, "tools": [WEATHER], "tool_choice": "required"}
        url = f"{chat.url}/v1/chat/completions"
    answer = httpx2.post(url, json=body, timeout=PATIENCE_S)
    assert (answer.status_code, len(answer.json()["choices"])) == (200, 3)
    (name,) = threads
    assert re.fullmatch(r"(asyncio|uvloop)_\d+", name)  # A thread of the pool of `asyncio.to_thread`.


@pytest.mark.slow
def test_grammars_that_take_long_delay_only_grammars(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than a pool has threads."""
    monkeypatch.setattr(compiling, "COMPILE_S", 6.0)
    monkeypatch.setattr(grammar_module, "WAIT_S", 1.0)
    known = {"type": "json_object"}

    def ask(client: httpx2.Client, form: Any) -> httpx2.Response:
        return client.post("completions", json={"prompt": "x", "max_tokens": 2, "response_format": form})

    def endless(number: int) -> dict[str, Any]:
        words = (f".*{chr(97 + i % 26)}.{{9}}{chr(97 + (i + 1) % 26)}x{i}n{number}" for i in range(48))
        schema = {"allOf": [{"type": "string", "pattern": word} for word in words]}
        return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}

    with (
        httpx2.Client(base_url=f"{server.url}/v1/", timeout=PATIENCE_S) as client,
        ThreadPoolExecutor(40) as pool,
    ):
        assert ask(client, known).status_code == 200
        waiting = [pool.submit(ask, client, endless(number)) for number in range(40)]
        time.sleep(0.5)
        assert [ask(client, form).status_code for form in (None, known)] == [200, 200]
        # One is still being compiled, however slow this machine is just now.
        assert not all(future.done() for future in waiting)
        answers = [future.result() for future in waiting]
        assert sorted(answer.status_code for answer in answers) == [400] + [503] * 39
        for answer in answers:
            error = answer.json()["error"]
            if answer.status_code == 400:
                message = "response_format: the grammar took longer than 6 s to compile; simplify it"
                assert (error["message"], error["param"]) == (message, "response_format")
            else:
                message = "the grammar waited longer than 1 s for others; try again in 5 s"
                assert (error["message"], error["code"]) == (message, "not_compiled")
                assert answer.headers["retry-after"] == "5"
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "null"}}}
        assert ask(client, form).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_cannot_follow_its_schema_any_further(server: Server, stream: bool) -> None:
    schema = {"properties": {f"p{i}": {"pattern": "^a{1,50}b+$"} for i in range(1000)}, "type": "object"}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body: dict[str, Any] = {"prompt": "x", "response_format": form, "stream": stream}
    answer = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == (200 if stream else 400)
    error = json.loads(answer.text.split("data: ")[-1])["error"]
    assert "the text cannot follow the grammar any further: Parser Error: Current row has" in error["message"]
    assert error["param"] == "response_format"
    metrics = httpx2.get(f"{server.url}/metrics").text
    assert 'mod_export_texts_total{finish="failed"}' in metrics
    assert server.writing.healthy


# Conversations with tools.


def test_a_conversation_with_tools(client: openai.OpenAI) -> None:
    """The model calls a function, gets its result, and answers."""
    request: Any = {"model": "llama", "tools": [WEATHER, NOW], "temperature": 0}
    (choice,) = client.chat.completions.create(messages=MESSAGES, **request).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    messages = [*MESSAGES, choice.message.to_dict(), result]
    (choice,) = client.chat.completions.create(messages=messages, **request).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", "It rains.")
    assert choice.message.tool_calls is None


def test_a_conversation_with_tools_as_a_stream(client: openai.OpenAI) -> None:
    request: Any = {"model": "llama", "tools": [WEATHER], "temperature": 0, "logprobs": True}
    with client.chat.completions.stream(messages=MESSAGES, **request) as stream:
        for _ in stream:
            pass
        (choice,) = stream.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})
    assert choice.logprobs is not None
    assert [token.token for token in choice.logprobs.content or []] == PARTS[:2]
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call.to_dict()]}, {"role": "tool", "content": "rain"}]
    with client.chat.completions.stream(messages=messages, **request) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
    assert text == "It rains."


@pytest.mark.parametrize("stream", [False, True])
def test_demanded_calls_follow_the_parameters(client: openai.OpenAI, stream: bool) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    called = set()
    for seed in range(8):
        for choice, tools in (("required", [WEATHER, NOW]), (named, [NOW, WEATHER])):
            request: Any = {"model": "llama", "messages": MESSAGES, "tools": tools, "tool_choice": choice, "seed": seed}
            name, arguments, finish = "", "", ""
            if stream:
                pieces = 0
                for chunk in client.chat.completions.create(**request, stream=True):
                    (part,) = chunk.choices
                    assert not part.delta.content
                    for delta in part.delta.tool_calls or []:
                        assert (delta.index, bool(delta.id)) == (0, not pieces)
                        pieces += 1
                        assert delta.function is not None
                        name += delta.function.name or ""
                        arguments += delta.function.arguments or ""
                    finish += part.finish_reason or ""
                assert pieces > 1
            else:
                (answer,) = client.chat.completions.create(**request).choices
                (call,) = answer.message.tool_calls
                name, arguments, finish = call.function.name, call.function.arguments, answer.finish_reason
                assert answer.message.content is None
            assert finish == "tool_calls"
            called.add(name)
            tool = WEATHER if name == "weather" else NOW
            jsonschema.validate(json.loads(arguments), tool["function"].get("parameters", {"maxProperties": 0}))
            assert choice == "required" or name == "weather"
    assert called == {"weather", "now"}


def test_a_demanded_call_that_is_cut(client: openai.OpenAI) -> None:
    request: Any = {"model": "llama", "messages": MESSAGES, "tools": [WEATHER], "tool_choice": "required"}
    (choice,) = client.chat.completions.create(**request, max_tokens=2).choices
    assert (choice.finish_reason, choice.message.tool_calls, choice.message.content) == ("length", None, "")
    (choice,) = client.chat.completions.create(**request, stop="city").choices
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].function.arguments.endswith('"')  # Of the text, its last character too.


def test_no_choice_leaves_the_tools_out(client: openai.OpenAI) -> None:
    request: Any = {"model": "llama", "messages": MESSAGES, "temperature": 0}
    plain = client.chat.completions.create(**request)
    none = client.chat.completions.create(**request, tools=[WEATHER], tool_choice="none")
    assert plain.usage is not None
    assert none.usage is not None
    assert plain.usage.prompt_tokens == none.usage.prompt_tokens
    assert plain.choices[0].message.content == none.choices[0].message.content == "".join(PARTS[:2])
    offered = client.chat.completions.create(**request, tools=[WEATHER], parallel_tool_calls=False)
    assert offered.usage is not None
    assert offered.usage.prompt_tokens > plain.usage.prompt_tokens + 40


def test_an_answer_of_a_conversation_follows_a_schema(client: openai.OpenAI) -> None:
    for seed in range(10):
        form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMAS[0], "strict": True}}
        (choice,) = client.chat.completions.create(
            model="llama", messages=MESSAGES, seed=seed, response_format=form
        ).choices
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMAS[0])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice: expected one of the functions in tools"),
        (
            {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice: expected one of the functions in tools",
        ),
        ({"tools": [NOW, NOW]}, "tools: two functions are called now; give each a name of its own"),
        (
            {"tools": [NOW], "response_format": {"type": "json_object"}},
            'response_format: an answer that follows it calls no tools; give tool_choice: "none"',
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": ["object", "null"]}}}]},
            'tools.0.function: parameters: expected a JSON schema of type "object", got type ["object", "null"]',
        ),
        ({"tools": [{"type": "custom"}]}, "tools.0.type: Input should be 'function'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name: String should match"),
        ({"tools": [NOW] * 129}, "tools: List should have at most 128 items"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            'tools: no grammar can be made of it: Unimplemented keys: ["not"]',
        ),
    ],
    ids=["none given", "unknown", "twice", "format", "array", "custom", "name", "many", "unsupported"],
)
def test_tools_that_are_refused(chat: Server, body: dict[str, Any], message: str) -> None:
    found, _ = refusal(chat, "chat/completions", {"messages": MESSAGES, **body})
    assert message in found


def test_a_template_that_reads_no_tools(chat: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary: Any = chat.writing.generator.vocabulary
    template = type(vocabulary.chat_template)(LLAMA3, {"bos_token": ""})
    monkeypatch.setitem(vocabulary.__dict__, "chat_template", template)
    body: dict[str, Any] = {"messages": MESSAGES, "tools": [WEATHER], "seed": 1}
    assert refusal(chat, "chat/completions", body) == (openai_api.BLIND, "tools")
    function = {**WEATHER["function"], "description": "a" * 32 * 512}  # Is not counted: it is no part of the prompt.
    body["tools"] = [{"type": "function", "function": function}]
    answer = httpx2.post(
        f"{chat.url}/v1/chat/completions", json={**body, "tool_choice": "required"}, timeout=PATIENCE_S
    )
    assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"

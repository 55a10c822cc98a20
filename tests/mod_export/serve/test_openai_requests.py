"""Requests: neutral values of unsupported fields pass, and values that would have an effect are refused."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx2
import pytest
from pydantic import ValidationError
from serving import PATIENCE_S, Server

from mod_export.runtime.chat_template import ChatTemplate
from mod_export.serve.openai_formats import IGNORED, NEUTRAL, ChatRequest, CompletionRequest

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"prompt": "Hi"}
LIMIT = "This model's maximum context length is 48 tokens. However,"
JSON_TEXT = json.dumps({**TEXT, "max_tokens": 1})


def ask(server: Server, body: Any, path: str = "/v1/completions") -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json; charset=utf-8"}
    return httpx2.post(server.url + path, content=content, headers=headers, timeout=PATIENCE_S)


def test_neutral_values_of_unsupported_fields_pass() -> None:
    plain = CompletionRequest.model_validate(TEXT)
    for name, values in NEUTRAL.items():
        for value in (*values, None):
            assert CompletionRequest.model_validate({**TEXT, name: value}) == plain, name
    for name in IGNORED:
        assert CompletionRequest.model_validate({**TEXT, name: "anything"}) == plain
    for name in CompletionRequest.model_fields.keys() - {"prompt"}:
        assert CompletionRequest.model_validate({**TEXT, name: None}) == plain, name
    assert CompletionRequest.model_validate({**TEXT, "best_of": 1}) == plain
    assert CompletionRequest.model_validate({**TEXT, "best_of": 3, "n": 3}).n == 3


def test_values_that_change_nothing_pass() -> None:
    for logprobs in ({"logprobs": False, "top_logprobs": 0}, {"top_logprobs": 0}):
        assert not ChatRequest.model_validate({**CHAT, **logprobs}).logprobs
    for kind, body in ((ChatRequest, CHAT), (CompletionRequest, TEXT)):
        for limits in (
            {"max_tokens": 7},
            {"max_completion_tokens": 7},
            {"max_tokens": 7, "max_completion_tokens": 7},
            {"max_tokens": None, "max_completion_tokens": 7},
        ):
            assert kind.model_validate({**body, **limits}).new_tokens == 7
        assert kind.model_validate(body).new_tokens is None


@pytest.mark.parametrize(("kind", "name"), [
    (kind, name) for kind in (CompletionRequest, ChatRequest) for name in sorted(NEUTRAL.keys() - kind.model_fields)
])  # fmt: skip
def test_other_values_of_unsupported_fields_are_refused(kind: Any, name: str) -> None:
    body = TEXT if kind is CompletionRequest else CHAT
    message = f"{name}: is not supported, and this value would change the answer; leave it out"
    for value in (0.5, ["x"], {"type": "json_object"}, "other"):
        with pytest.raises(ValidationError, match=message):
            kind.model_validate({**body, name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": None}, "prompt: expected a text, a list of texts, a list of token ids, or a list of such lists"),
        ({"prompt": []}, "prompt: expected a text"),
        ({"prompt": ["a", 1]}, "prompt: expected a text"),
        ({"prompt": [True]}, "prompt: expected a text"),
        ({"prompt": [1.5]}, "prompt: expected a text"),
        ({"prompt": {"a": 1}}, "prompt: expected a text"),
        ({"prompt": ""}, "prompt 0 is empty; expected at least one token"),
        ({"prompt": [[1], []]}, "prompt 1 is empty; expected at least one token"),
        ({"prompt": [256]}, "prompt 0: expected text, or token ids from 0 to 255, got 256"),
        ({"prompt": [-1]}, "prompt 0: expected text, or token ids from 0 to 255, got -1"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": [1] * 49}, f"{LIMIT} your prompt has 49 tokens. Please reduce the length of the prompt."),
        ({"prompt": "a" * 49}, f"{LIMIT} your prompt resulted in 49 tokens. Please reduce the length of the prompt."),
        ({"prompt": "a" * 1537}, f"{LIMIT} your prompt has 1537 characters; at most 1536 are read. Please reduce the"),
        ({"prompt": "a" * 48, "n": 3}, f"{LIMIT} you requested 64 tokens (48 in the prompt, 16 in the completion). "),
        ({"stop": "a" * 257}, "stop.0: String should have at most 256 characters"),
        ({"n": 0}, "n: Input should be greater than or equal to 1"),
        ({"n": "2"}, "n: Input should be a valid integer"),
        ({"n": 10**9}, "1000000000 texts, prompts times n, are more than this server ever takes"),
        ({"max_tokens": 0}, "max_tokens: expected at least 1; 0 scores a prompt, with echo and logprobs"),
        ({"max_tokens": 0, "echo": True}, "max_tokens: expected at least 1; 0 scores a prompt, with echo and logprobs"),
        ({"max_completion_tokens": 0}, "max_tokens: expected at least 1; 0 scores a prompt, with echo and logprobs"),
        (
            {"max_tokens": 2, "max_completion_tokens": 3},
            "max_tokens: means the same as max_completion_tokens; give only one of them",
        ),
        ({"max_tokens": -1}, "max_tokens: Input should be greater than or equal to 0"),
        ({"max_tokens": True}, "max_tokens: Input should be a valid integer"),
        ({"max_tokens": 1.5}, "max_tokens: Input should be a valid integer"),
        ({"temperature": -0.1}, "temperature: Input should be greater than or equal to 0"),
        ({"temperature": "hot"}, "temperature: Input should be a valid number"),
        ({"top_p": -0.1}, "top_p: Input should be greater than or equal to 0"),
        ({"top_p": 1.1}, "top_p: Input should be less than or equal to 1"),
        ({"top_k": -2}, "top_k: Input should be greater than or equal to -1"),
        ({"seed": -2}, "seed: Input should be greater than or equal to -1"),
        ({"seed": 2**63}, "seed: "),
        ({"stop": ["a"] * 17}, "stop: List should have at most 16 items"),
        ({"stop": ""}, "stop: got '', expected a string of at least one character"),
        ({"stop": [1]}, "stop.0: Input should be a valid string"),
        ({"logprobs": 21}, "logprobs: Input should be less than or equal to 20"),
        ({"logprobs": True}, "logprobs: Input should be a valid integer"),
        ({"stream": 1}, "stream: Input should be a valid boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options: is about streams; give stream with it"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "include_obfuscation is not supported"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x: Extra inputs are not permitted"),
        ({"best_of": 2}, "best_of: is not supported, and this value would change the answer; leave it out"),
        ({"nonsense": 1}, "nonsense: no such field is known here; leave it out"),
        ({"model": 3}, "model: Input should be a valid string"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_fields_out_of_range(server: Server, change: dict[str, Any], message: str) -> None:
    answer = ask(server, {**TEXT, **change})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert message in error["message"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "user"}]}, "messages.0: content: expected a text, or a list of parts of type text"),
        ({"messages": [{"role": "user", "content": 5}]}, "content: expected a text, or a list of parts of type text"),
        ({"messages": [{"role": "user", "content": "x"}]}, "this model's tokens are bytes, for which there is no chat"),
        ({"messages": [{"role": 1, "content": "x"}]}, "messages.0.role: Input should be 'developer', 'system', 'user'"),
        ({"messages": ["Hi"]}, "messages.0: Input should be an object"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only parts of type text are supported"),
        ({"messages": [{"role": "user", "content": [{"type": {}}]}]}, "content: only parts of type text are supported"),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "tool_calls.0: Input should be an object"),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "audio: is not supported in a message"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
            "content: expected a text in every part",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "content: expected a text in every part",
        ),
        ({"messages": [{"role": "user", "content": []}]}, "content: only parts of type text are supported"),
        ({"messages": [1] * 200_000}, "messages.0: Input should be an object"),
        ({"messages": [{"role": "user", "content": "a" * 1537}]}, f"{LIMIT} your prompt has 1537 characters; at most"),
        ({"top_logprobs": 2}, "top_logprobs: is about logprobs; give logprobs: true with it"),
        ({"max_tokens": 0}, "max_tokens: expected at least 1"),
        ({"max_completion_tokens": 0}, "max_tokens: expected at least 1"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_fields_of_conversations_out_of_range(server: Server, change: dict[str, Any], message: str) -> None:
    answer = ask(server, {**CHAT, **change}, "/v1/chat/completions")
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"prompt": NaN}',
     b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": 1e999}', b"[" * 100_000,
     b'{"prompt": ' + b"[" * 5_000 + b"]" * 5_000 + b"}", b'{"prompt": [' + b"9" * 10_000 + b"]}"],
    ids=lambda body: repr(body[:24]),
)  # fmt: skip
def test_what_is_no_json_object(server: Server, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = ask(server, body, path)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]


def test_a_byte_order_mark_is_no_part_of_a_body(server: Server) -> None:
    """PowerShell and .NET write one."""
    assert ask(server, JSON_TEXT.encode("utf-8-sig")).status_code == 200
    answer = ask(server, b"\xef\xbb\xbf{}", "/v2/models/writing/infer")
    assert answer.json()["error"].startswith("inputs: Field required")


@pytest.mark.parametrize(
    ("body", "what"),
    [(JSON_TEXT.encode(name), f"is {name[:6].upper()}; send JSON in UTF-8, the only encoding of JSON between programs")
     for name in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")]
    + [(gzip.compress(JSON_TEXT.encode()), "is compressed (gzip); send the JSON itself"),
       (b"\x28\xb5\x2f\xfd\x24", "is compressed (zstd); send the JSON itself"),
       (b"PK\x03\x04", "is compressed (zip); send the JSON itself")],
    ids=lambda value: value[-30:] if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_no_utf8_is_named(server: Server, body: bytes, what: str) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v2/models/writing/infer"):
        answer = ask(server, body, path)
        error = answer.json()["error"]
        message = error if path.startswith("/v2") else error["message"]
        assert (answer.status_code, message) == (400, f"the body of the request {what}")


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip", "zstd"])
def test_encoded_bodies_are_refused(server: Server, encoding: str) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v2/models/writing/infer"):
        headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
        body = gzip.compress(JSON_TEXT.encode())
        answer = httpx2.post(server.url + path, content=body, headers=headers, timeout=PATIENCE_S)
        assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "identity")
        message = f"Content-Encoding {encoding}: bodies are read as they are; send this one unencoded"
        assert message in answer.text
    for name in ("identity", "Identity", ""):
        headers = {"Content-Encoding": name}
        answer = httpx2.post(f"{server.url}/v1/completions", content=JSON_TEXT, headers=headers, timeout=PATIENCE_S)
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("change", "message", "param"),
    [
        ({"nonsense": 1}, "nonsense: no such field is known here; leave it out", "nonsense"),
        ({"functions": [{"name": "f"}]}, "functions: is not supported, and this value would change", "functions"),
        ({"audio": {}}, "audio: is not supported, and this value would change the answer; leave it out", "audio"),
        (
            {"max_tokens": 2, "max_completion_tokens": 3},
            "max_tokens: means the same as max_completion_tokens; give only one of them",
            "max_tokens",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice: allowed_tools is not supported; give in tools only those that are allowed",
            "tool_choice",
        ),
        ({"tool_choice": "any"}, 'tool_choice: expected "none", "auto", "required", or a function, as', "tool_choice"),
        ({"tool_choice": {"type": "custom"}}, 'tool_choice: expected "none", "auto", "required", or a', "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice: expected one of the functions in tools", "tool_choice"),
        ({"temperature": -1}, "temperature: Input should be greater than or equal to 0", "temperature"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_refusals_name_the_field(server: Server, change: dict[str, Any], message: str, param: str) -> None:
    error = ask(server, {**CHAT, **change}, "/v1/chat/completions").json()["error"]
    assert error["message"].startswith(message)
    assert error["param"] == param


def test_refusals_of_earlier_answers_reach_the_template() -> None:
    texts = ChatTemplate("{{ messages[0].content }}", {})
    parts = ChatTemplate("{% for part in messages[0].content %}{{ part.text }}{% endfor %}", {})
    for said in ({"content": None, "refusal": "No."}, {"content": [{"type": "refusal", "refusal": "No."}]}):
        (message,) = ChatRequest.model_validate({"messages": [{"role": "assistant", **said}]}).messages
        assert message.text == "No."
        assert texts.render([message.for_template(texts)]) == "No."
        if said["content"]:
            assert parts.render([message.for_template(parts)]) == "No."
    (message,) = ChatRequest.model_validate(
        {"messages": [{"role": "assistant", "content": "Yes.", "refusal": None}]}
    ).messages
    assert texts.render([message.for_template(texts)]) == "Yes."


def test_content_of_messages_in_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (message,) = ChatRequest.model_validate({"messages": [{"role": "developer", "content": parts, "x": 1}]}).messages
    assert message.text == "ab"
    assert message.for_template(ChatTemplate("{{ messages[0].content }}", {})) == {
        "role": "system", "content": "ab", "x": 1,
    }  # fmt: skip
    reads_parts = ChatTemplate("{% for part in messages[0].content %}{{ part.text }}{% endfor %} developer", {})
    assert message.for_template(reads_parts) == {"role": "developer", "content": parts, "x": 1}

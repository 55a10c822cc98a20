"""Every kind of answer has the types of OpenAI's own package, and the shapes that the server describes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import pytest
from openai.pagination import SyncPage
from openai.types import Completion, ErrorObject, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel
from serving import PATIENCE_S, Server, serving

from mod_export.serve.openapi import description

pytestmark = pytest.mark.filterwarnings("ignore::mod_export.errors.UnverifiedWarning")
DESCRIPTION = description(keys=False)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6}
TEXT: dict[str, Any] = {"prompt": "Hi", "max_tokens": 6}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
ALWAYS = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
TOOL = {
    "type": "function",
    "function": {
        "name": "day",
        "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]},
    },
}
TEXTS: list[dict[str, Any]] = [
    {},
    {"n": 3, "prompt": ["a", "b"], "seed": 1},
    {"logprobs": 3},
    {"logprobs": 0, "temperature": 0},
    {"echo": True},
    {"stop": ["e", "a"]},
]
CHATS: list[dict[str, Any]] = [
    {},
    {"n": 3, "seed": 1},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 3},
    {"stop": ["e", "a"]},
    {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60, "n": 2, "logprobs": True},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1, 2]}}}},
]
REFUSED = [
    (400, "/v1/completions", {"prompt": 5}),
    (400, "/v1/completions", {"prompt": "x", "max_tokens": 9999}),
    (400, "/v1/chat/completions", {"messages": []}),
    (404, "/v1/completions", {"prompt": "x", "model": "other"}),
    (404, "/v1/embeddings", {}),
    (404, "/v1/nowhere", {}),
    (405, "/v1/models", {}),
    (413, "/v1/completions", {"prompt": "x" * (2 << 20)}),
]


@pytest.fixture(scope="module")
def server(chat_folder: Path) -> Iterator[Server]:
    with serving(chat_folder) as found:
        yield found


def post(server: Server, path: str, body: dict[str, Any], **headers: str) -> httpx2.Response:
    return httpx2.post(server.url + path, json=body, headers=headers, timeout=PATIENCE_S)


def check(answer: Any, shape: str, theirs: type[BaseModel] | None = None) -> None:
    """The types of OpenAI's package take any further field; the shapes take none."""
    if theirs is not None:
        theirs.model_validate(answer, strict=True)
    jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{shape}", **DESCRIPTION}).validate(answer)


def lines_of(stream: httpx2.Response) -> list[Any]:
    assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = [line.removeprefix("data: ") for line in stream.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("change", TEXTS, ids=json.dumps)
def test_completions(server: Server, change: dict[str, Any]) -> None:
    check(post(server, "/v1/completions", {**TEXT, **change}).json(), "TextCompletion", Completion)
    for streamed in ({"stream": True}, USAGE):
        chunks = lines_of(post(server, "/v1/completions", {**TEXT, **change, **streamed}))
        for chunk in chunks:
            # OpenAI's type has no chunk of its own, and does not say that an unfinished choice has no reason yet.
            choices = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in chunk["choices"]]
            check({**chunk, "choices": choices}, "TextChunk", Completion)
            check(chunk, "TextChunk")
        assert [bool(chunk.get("usage")) for chunk in chunks] == [False] * (len(chunks) - 1) + [streamed is USAGE]
        assert all(("usage" in chunk) == (streamed is USAGE) for chunk in chunks)


@pytest.mark.parametrize("change", CHATS, ids=json.dumps)
def test_chat_completions(server: Server, change: dict[str, Any]) -> None:
    check(post(server, "/v1/chat/completions", {**CHAT, **change}).json(), "ChatCompletion", ChatCompletion)
    for streamed in ({"stream": True}, USAGE):
        chunks = lines_of(post(server, "/v1/chat/completions", {**CHAT, **change, **streamed}))
        for chunk in chunks:
            check(chunk, "ChatChunk", ChatCompletionChunk)
        assert [bool(chunk.get("usage")) for chunk in chunks] == [False] * (len(chunks) - 1) + [streamed is USAGE]
        assert all(("usage" in chunk) == (streamed is USAGE) for chunk in chunks)


@pytest.mark.parametrize(("path", "body", "shape"), [
    ("/v1/completions", {**TEXT, "prompt": ["a", "b"]}, "TextChunk"), ("/v1/chat/completions", CHAT, "ChatChunk"),
])  # fmt: skip
def test_counts_in_every_chunk(server: Server, path: str, body: dict[str, Any], shape: str) -> None:
    """Programs that measure servers ask for them. They rise to those of the whole answer."""
    asked = {**body, "temperature": 0, "ignore_eos": True}
    whole = post(server, path, asked).json()["usage"]
    for options in (ALWAYS, {"stream": True, "stream_options": {"continuous_usage_stats": True}}):
        chunks = lines_of(post(server, path, {**asked, **options}))
        for chunk in chunks:
            check(chunk, shape)
        assert (chunks[-1]["choices"] == []) == (options is ALWAYS)
        written = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert written == sorted(written)
        assert len(set(written)) > 3
        assert all(chunk["usage"]["prompt_tokens"] == whole["prompt_tokens"] for chunk in chunks)
        assert chunks[-1]["usage"]["total_tokens"] == whole["total_tokens"]
    quiet = {"stream": True, "stream_options": {"include_usage": False, "continuous_usage_stats": False}}
    assert all("usage" not in chunk for chunk in lines_of(post(server, path, {**asked, **quiet})))


def test_scored_prompts(server: Server) -> None:
    """OpenAI's type does not say that the first token of a prompt has no log probability, which OpenAI's API shows."""
    answer = post(server, "/v1/completions", {**TEXT, "echo": True, "logprobs": 2, "max_tokens": 0}).json()
    check(answer, "TextCompletion")
    for name in ("token_logprobs", "top_logprobs"):
        assert answer["choices"][0]["logprobs"][name][0] is None
        del answer["choices"][0]["logprobs"][name][0]
    check(answer, "TextCompletion", Completion)


def test_models(server: Server) -> None:
    listed = httpx2.get(f"{server.url}/v1/models").json()
    check(listed, "ModelList", SyncPage[Model])
    (model,) = listed["data"]
    check(model, "ModelCard", Model)
    assert httpx2.get(f"{server.url}/v1/models/llama").json() == model


@pytest.mark.parametrize(("status", "path", "body"), REFUSED)
def test_errors(server: Server, status: int, path: str, body: dict[str, Any]) -> None:
    answer = post(server, path, body)
    assert answer.status_code == status
    check(answer.json(), "ErrorAnswer")
    ErrorObject.model_validate(answer.json()["error"], strict=True)


def test_errors_of_access_and_load(chat_folder: Path) -> None:
    with serving(chat_folder, keys=["secret"]) as server:
        answers = [(401, post(server, "/v1/completions", TEXT))]
        key = {"Authorization": "Bearer secret"}
        answers.append((415, post(server, "/v1/completions", TEXT, **key, **{"Content-Encoding": "gzip"})))
        server.service.drain(0)
        answers.append((503, post(server, "/v1/chat/completions", CHAT, **key)))
    with serving(chat_folder, hosts=["a.example"]) as server:
        answers.append((403, post(server, "/v1/completions", TEXT)))
    for status, answer in answers:
        assert answer.status_code == status
        check(answer.json(), "ErrorAnswer")
        ErrorObject.model_validate(answer.json()["error"], strict=True)


def test_whole_rows(server: Server) -> None:
    row = {"name": "input_ids", "shape": [1, 3], "datatype": "INT64", "data": [1, 2, 3]}
    for path, shape, answer in (
        ("/v2", "ServerMetadata", httpx2.get(f"{server.url}/v2")),
        ("/v2/health/live", "Live", httpx2.get(f"{server.url}/v2/health/live")),
        ("/v2/health/ready", "Ready", httpx2.get(f"{server.url}/v2/health/ready")),
        ("/health", "Ready", httpx2.get(f"{server.url}/health")),
        ("/v2/models/llama", "ModelMetadata", httpx2.get(f"{server.url}/v2/models/llama")),
        ("/v2/models/llama/ready", "ModelReady", httpx2.get(f"{server.url}/v2/models/llama/ready")),
        ("infer", "InferAnswer", post(server, "/v2/models/llama/infer", {"id": "7", "inputs": [row]})),
        ("bad", "ProtocolError", post(server, "/v2/models/llama/infer", {"inputs": []})),
    ):
        assert answer.status_code == (400 if path == "bad" else 200), answer.text
        check(answer.json(), shape)

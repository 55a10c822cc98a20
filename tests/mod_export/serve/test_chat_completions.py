"""Conversations: the model's own template, sampling and stop tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from serving import Server, serving

from mod_export.runtime.generator import Generator, load_generator
from mod_export.serve.scheduler import Scheduler

pytestmark = pytest.mark.filterwarnings("ignore::mod_export.errors.UnverifiedWarning")
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the capital of France?"}]
NEW = 12


@pytest.fixture(scope="module")
def generator(chat_folder: Path) -> Iterator[Generator]:
    with load_generator(chat_folder) as found:
        yield found


@pytest.fixture(scope="module")
def server(chat_folder: Path) -> Iterator[Server]:
    with serving(chat_folder) as found:
        yield found


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def test_the_answer_is_that_of_generate(client: openai.OpenAI, generator: Generator) -> None:
    (expected,) = generator.generate(MESSAGES, NEW)
    found = client.chat.completions.create(model="llama", messages=MESSAGES, max_tokens=NEW, temperature=0)  # type: ignore[arg-type]
    (choice,) = found.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.finish_reason == expected.finish
    assert found.usage is not None
    assert found.usage.prompt_tokens == len(expected.prompt_ids)
    stream = client.chat.completions.create(
        model="llama",
        messages=MESSAGES,
        max_completion_tokens=NEW,
        temperature=0,
        stream=True,
        n=2,  # type: ignore[arg-type]
    )
    texts, roles, ends = ["", ""], ["", ""], ["", ""]
    for chunk in stream:
        (part,) = chunk.choices
        texts[part.index] += part.delta.content or ""
        roles[part.index] += part.delta.role or ""
        ends[part.index] += part.finish_reason or ""
    assert (texts, roles, ends) == ([expected.text] * 2, ["assistant"] * 2, [expected.finish] * 2)


def test_without_a_number_of_tokens_the_window_is_the_limit(client: openai.OpenAI, generator: Generator) -> None:
    (expected,) = generator.generate(MESSAGES, generator.window + 1 - len(generator.ids(MESSAGES)[0]))
    found = client.chat.completions.create(model="llama", messages=MESSAGES, temperature=0)  # type: ignore[arg-type]
    assert found.choices[0].message.content == expected.text
    long = [{"role": "user", "content": "word " * 200}]
    tokens = len(generator.ids(long)[0])
    begins = "This model's maximum context length is 128 tokens. However, you"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="llama", messages=long)  # type: ignore[arg-type]
    assert refused.value.code == "context_length_exceeded"
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["message"] == (
        f"{begins}r messages resulted in {tokens} tokens. Please reduce the length of the messages."
    )
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="llama", messages=long, max_completion_tokens=7)  # type: ignore[arg-type]
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["message"] == (
        f"{begins} requested {tokens + 7} tokens ({tokens} in the messages, 7 in the completion). Please reduce the "
        "length of the messages or max_tokens."
    )


def test_logprobs_name_every_token(client: openai.OpenAI, generator: Generator) -> None:
    (expected,) = generator.generate(MESSAGES, NEW, logprobs=2)
    found = client.chat.completions.create(
        model="llama",
        messages=MESSAGES,
        max_tokens=NEW,
        temperature=0,
        logprobs=True,
        top_logprobs=2,  # type: ignore[arg-type]
    )
    listed = found.choices[0].logprobs
    assert listed is not None
    assert listed.content is not None
    assert [token.logprob for token in listed.content] == pytest.approx(
        [token.logprob for token in expected.logprobs], abs=1e-4
    )
    assert all(len(token.top_logprobs) == 2 for token in listed.content)
    joined = b"".join(bytes(token.bytes or ()) for token in listed.content)
    assert expected.text
    assert joined.decode(errors="replace") == expected.text


def test_names_of_tokens_in_completions(client: openai.OpenAI) -> None:
    """Special tokens appear by name, and the echoed text equals the given one."""
    found = client.completions.create(
        model="llama", prompt="The quick", max_tokens=1, temperature=0, echo=True, logprobs=3
    )
    (choice,) = found.choices
    assert choice.text.startswith("The quick")
    assert choice.logprobs is not None
    tokens, offsets = choice.logprobs.tokens or [], choice.logprobs.text_offset or []
    assert tokens[0] == "<|begin_of_text|>"
    assert all(
        choice.text[offset:].startswith(token) for token, offset in zip(tokens[1:-1], offsets[1:-1], strict=True)
    )
    assert offsets[:2] == [0, 0]
    plain = client.completions.create(
        model="llama", prompt="The quick", max_tokens=1, temperature=0, echo=True, logprobs=3,
        extra_body={"add_special_tokens": False},
    )  # fmt: skip
    assert plain.choices[0].logprobs is not None
    assert "".join((plain.choices[0].logprobs.tokens or [])[:-1]) == "The quick"


def test_the_template_gets_its_variables(client: openai.OpenAI, generator: Generator) -> None:
    variables = {"bos_token": "word word word"}
    found = client.chat.completions.create(
        model="llama",
        messages=MESSAGES,  # type: ignore[arg-type]
        max_tokens=1,
        extra_body={"chat_template_kwargs": variables},
    )
    assert found.usage is not None
    assert found.usage.prompt_tokens == len(generator.ids(MESSAGES, variables)[0]) > len(generator.ids(MESSAGES)[0])


@pytest.mark.parametrize("stream", [False, True])
def test_where_a_text_ends_at_once_its_stop_token_has_a_logprob(
    client: openai.OpenAI, generator: Generator, monkeypatch: pytest.MonkeyPatch, server: Server, stream: bool
) -> None:
    """Harnesses ask for one token after a continuation, and use every token but the last for its score."""
    assert isinstance(server.service.writing, Scheduler)
    (free,) = generator.generate("The quick", 1)
    owned = server.service.writing.generator
    monkeypatch.setattr(owned._requests, "defaults", replace(owned.defaults, stop_ids=frozenset(free.ids)))
    request = {"model": "llama", "prompt": "The quick", "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
    answer: Any = client.completions.create(**request, stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == "The quick"
    assert choices[-1].finish_reason == "stop"
    listed = [value for choice in choices if choice.logprobs for value in choice.logprobs.token_logprobs]
    (expected,) = generator.generate("The quick", 1, logprobs=1, prompt_logprobs=True)
    logprobs = [token.logprob for token in (*expected.prompt_logprobs, *expected.logprobs)]
    assert listed[0] is None
    assert listed[1:] == pytest.approx(logprobs, abs=1e-4)

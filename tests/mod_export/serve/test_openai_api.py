"""OpenAI's API, used by its own client and by programs that read its JSON."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from serving import PATIENCE_S, Server, held, serving
from writing import WINDOW

from mod_export.runtime.generator import Generator
from mod_export.runtime.rows import RowText

PROMPT = "def main("


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def post(server: Server, body: Any, path: str = "/v1/completions") -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    return httpx2.post(server.url + path, content=content, headers=headers, timeout=PATIENCE_S)


def idle(server: Server) -> bool:
    """Whether no row is in use, shortly after the last client has left."""
    scheduler = server.writing
    deadline = time.monotonic() + PATIENCE_S
    while (scheduler.busy or scheduler.waiting) and time.monotonic() < deadline:
        time.sleep(0.005)
    return scheduler.busy == scheduler.waiting == 0


def test_greedy_text_is_that_of_generate(client: openai.OpenAI, other: Generator) -> None:
    (expected,) = other.generate(PROMPT, 20)
    found = client.completions.create(model="writing", prompt=PROMPT, max_tokens=20, temperature=0)
    assert (found.choices[0].text, found.choices[0].finish_reason) == (expected.text, "length")
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (9, 20, 29)
    assert (found.object, found.model) == ("text_completion", "writing")
    streamed = client.completions.create(model="writing", prompt=PROMPT, max_tokens=20, temperature=0, stream=True)
    chunks = [chunk.choices[0] for chunk in streamed]
    assert "".join(one.text for one in chunks) == expected.text
    assert [one.finish_reason for one in chunks if one.finish_reason] == ["length"]
    assert len(chunks) > 3


def test_a_seed_gives_the_text_of_generate(client: openai.OpenAI, other: Generator) -> None:
    (expected,) = other.generate(PROMPT, 20, temperature=1.2, top_p=0.9, seed=7)
    found = client.completions.create(model="writing", prompt=PROMPT, max_tokens=20, temperature=1.2, top_p=0.9, seed=7)
    assert found.choices[0].text == expected.text


def test_a_missing_seed_is_drawn(client: openai.OpenAI) -> None:
    texts = {client.completions.create(model="writing", prompt=PROMPT, max_tokens=20).choices[0].text for _ in range(4)}
    assert len(texts) == 4


@pytest.mark.parametrize(
    "prompt", ["def f(", ["def f(", "x"], [100, 101], [[100, 101], [1]]], ids=["text", "texts", "ids", "lists of ids"]
)
@pytest.mark.parametrize("n", [1, 2])
def test_prompts_of_every_form(client: openai.OpenAI, other: Generator, prompt: Any, n: int) -> None:
    several = [prompt] if isinstance(prompt[0], int) else [prompt] if isinstance(prompt, str) else prompt
    expected = other.generate([item for item in several for _ in range(n)], 6, temperature=1.0, seed=3)
    found = client.completions.create(model="writing", prompt=prompt, max_tokens=6, temperature=1, seed=3, n=n)
    assert [item.text for item in found.choices] == [item.text for item in expected]
    assert [item.index for item in found.choices] == list(range(len(several) * n))
    assert found.usage is not None
    assert found.usage.prompt_tokens == sum(len(item.prompt_ids) for item in expected[::n])
    assert found.usage.completion_tokens == 6 * len(expected)


def test_a_stream_of_several_texts_tells_them_apart_and_counts(client: openai.OpenAI, other: Generator) -> None:
    prompts = ["def f(", "class A", "import ", "x"]
    expected = other.generate(prompts, 9)
    stream = client.completions.create(
        model="writing",
        prompt=prompts,
        max_tokens=9,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts = [""] * 4
    chunks = list(stream)
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
    assert texts == [completion.text for completion in expected]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 36
    assert len({chunk.id for chunk in chunks}) == 1


def test_stops(client: openai.OpenAI, other: Generator) -> None:
    (unstopped,) = other.generate(PROMPT, 30)
    stop = unstopped.text[10:12]
    for stops in (stop, [stop, "never"]):
        found = client.completions.create(model="writing", prompt=PROMPT, max_tokens=30, temperature=0, stop=stops)
        assert found.choices[0].text == unstopped.text[: unstopped.text.index(stop)]
        assert found.choices[0].finish_reason == "stop"


def test_sixteen_tokens_unless_asked(client: openai.OpenAI) -> None:
    found = client.completions.create(model="writing", prompt=PROMPT)
    assert found.usage is not None
    assert found.usage.completion_tokens == 16


def test_a_limit_by_its_newer_name(server: Server) -> None:
    for limits in ({"max_completion_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 3}):
        assert post(server, {"prompt": PROMPT, "ignore_eos": True, **limits}).json()["usage"]["completion_tokens"] == 3


def test_echo_gives_the_logprob_of_every_token_of_the_prompt(client: openai.OpenAI, other: Generator) -> None:
    """Evaluation harnesses ask for this, and slice the lists at the length of the context."""
    (expected,) = other.generate(PROMPT, 1, logprobs=2, prompt_logprobs=True)
    for prompt in (PROMPT, list(PROMPT.encode())):
        found = client.completions.create(
            model="writing", prompt=prompt, max_tokens=1, temperature=0, echo=True, logprobs=2, seed=1234
        )
        (choice,) = found.choices
        assert choice.text == PROMPT + expected.text
        listed = choice.logprobs
        assert listed is not None
        assert listed.tokens is not None
        assert listed.token_logprobs is not None
        assert listed.top_logprobs is not None
        assert listed.text_offset == list(range(10))
        assert "".join(listed.tokens[:9]) == PROMPT
        assert listed.token_logprobs[0] is None  # It has nothing before it.
        logprobs = [one.logprob for one in [*expected.prompt_logprobs, *expected.logprobs]]
        assert listed.token_logprobs[1:] == pytest.approx(logprobs, abs=1e-4)
        assert listed.top_logprobs[0] is None
        assert all(
            token in top and len(top) in (2, 3)
            for token, top in zip(listed.tokens[1:], listed.top_logprobs[1:], strict=True)
        )
        # lm-eval checks this way whether the continuation equals greedy text.
        top = listed.top_logprobs[-1]
        assert max(top, key=lambda name: top[name]) == listed.tokens[-1]


def test_echo_alone_writes_nothing(client: openai.OpenAI) -> None:
    found = client.completions.create(model="writing", prompt=["abc", "de"], max_tokens=0, echo=True, logprobs=0)
    assert [choice.text for choice in found.choices] == ["abc", "de"]
    assert [choice.finish_reason for choice in found.choices] == ["length"] * 2
    assert found.choices[0].logprobs is not None
    assert len(found.choices[0].logprobs.token_logprobs or ()) == 3
    plain = client.completions.create(model="writing", prompt="abc", max_tokens=2, echo=True, temperature=0)
    assert plain.choices[0].text.startswith("abc")
    assert plain.choices[0].logprobs is None


def test_a_stream_with_echo_and_logprobs_is_the_whole_in_parts(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": "writing",
        "prompt": [PROMPT, "x"],
        "max_tokens": 5,
        "temperature": 0,
        "echo": True,
    }
    answer = client.completions.create(**request, logprobs=1)
    texts, logprobs, offsets = ["", ""], [[], []], [[], []]  # type: ignore[var-annotated]
    for chunk in client.completions.create(**request, logprobs=1, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        if choice.logprobs is not None:
            logprobs[choice.index] += choice.logprobs.token_logprobs or []
            offsets[choice.index] += choice.logprobs.text_offset or []
    for row, choice in enumerate(answer.choices):
        assert choice.logprobs is not None
        assert texts[row] == choice.text
        assert logprobs[row][1:] == pytest.approx((choice.logprobs.token_logprobs or [])[1:], abs=1e-6)
        assert offsets[row] == choice.logprobs.text_offset


def test_models(client: openai.OpenAI, server: Server) -> None:
    assert [item.id for item in client.models.list()] == ["writing"]
    assert client.models.retrieve("writing").id == "writing"
    (card,) = httpx2.get(f"{server.url}/v1/models").json()["data"]
    assert (card["root"], card["parent"]) == ("writing", None)  # vLLM's benchmark takes the name from `root`.
    assert post(server, {"prompt": "x", "max_tokens": 1}).json()["model"] == "writing"
    for refused in (
        lambda: client.models.retrieve("gpt-4"),
        lambda: client.completions.create(model="gpt-4", prompt="x"),
    ):
        with pytest.raises(
            openai.NotFoundError, match="model 'gpt-4': not served here; this server has 'writing'"
        ) as item:
            refused()
        assert (item.value.code, item.value.param, item.value.type) == (
            "model_not_found",
            "model",
            "invalid_request_error",
        )


def test_a_text_that_is_too_long(client: openai.OpenAI) -> None:
    """The longest text that passes has one token more than the window, because its last token is never read."""
    client.completions.create(model="writing", prompt=PROMPT, max_tokens=WINDOW + 1 - len(PROMPT))
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="writing", prompt=PROMPT, max_tokens=WINDOW + 2 - len(PROMPT))
    error = refused.value
    assert (error.code, error.type, error.param) == ("context_length_exceeded", "invalid_request_error", None)
    assert isinstance(error.body, dict)
    assert error.body["message"] == (
        "This model's maximum context length is 48 tokens. However, you requested 50 tokens (9 in the prompt, 41 in "
        "the completion). Please reduce the length of the prompt or max_tokens."
    )


def test_a_random_seed_may_be_asked_for(client: openai.OpenAI) -> None:
    def written() -> str:
        return client.completions.create(model="writing", prompt=PROMPT, max_tokens=20, seed=-1).choices[0].text

    assert len({written() for _ in range(4)}) == 4


def test_top_p_0_takes_the_most_probable_tokens(client: openai.OpenAI, other: Generator) -> None:
    (expected,) = other.generate(PROMPT, 20)
    found = client.completions.create(model="writing", prompt=PROMPT, max_tokens=20, temperature=5, top_p=0, seed=7)
    assert found.choices[0].text == expected.text


def test_no_event_of_a_stream_is_cut_by_a_client_that_knows_other_ends_of_lines(server: Server) -> None:
    prompt = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei\r\nj\rk"
    answer = post(server, {"prompt": prompt, "max_tokens": 2, "echo": True, "stream": True})
    lines = [line for line in answer.text.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert chunks[0]["choices"][0]["text"] == prompt


def test_more_texts_than_there_will_ever_be_room_for(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="68 texts, prompts times n, are more than this server ever takes"):
        client.completions.create(model="writing", prompt=["a", "b"], n=34)


def test_a_model_with_bytes_has_no_chat_template(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="this model's tokens are bytes, for which there is no chat templ"):
        client.chat.completions.create(model="writing", messages=[{"role": "user", "content": "Hi"}])


def test_a_full_queue_answers_429_with_a_time(written: Path) -> None:
    with serving(written, max_queue=1) as server:
        writing = server.writing
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with held(writing, writing.generator, [[1]] * 4, 4), pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model="writing", prompt=["a", "b"])
        assert (refused.value.code, refused.value.type) == ("queue_full", "rate_limit_error")
        assert int(refused.value.response.headers["retry-after"]) >= 1
        # A client that retries gets its text.
        patient = client.with_options(max_retries=3)
        assert patient.completions.create(model="writing", prompt="a").choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_waiting_too_long_answers_503(written: Path, stream: bool) -> None:
    with serving(written, max_wait_s=0.05) as server:
        writing = server.writing
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

        async def ask() -> int:
            waiting = asyncio.create_task(
                asyncio.to_thread(client.completions.create, model="writing", prompt="a", stream=stream)
            )
            await asyncio.sleep(0.2)
            events.go.set()
            with pytest.raises(openai.InternalServerError) as refused:
                await waiting
            assert refused.value.code == "waited_too_long"
            assert refused.value.response.headers["retry-after"] == "1"
            return refused.value.status_code

        with held(writing, writing.generator, [[1]] * 3, 30) as events:
            assert asyncio.run(ask()) == 503


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("queued", [False, True], ids=["in a row", "queued"])
def test_a_client_that_leaves_frees_its_row(server: Server, stream: bool, queued: bool) -> None:
    writing = server.writing
    body = {"prompt": ["a"] * 3, "max_tokens": 40, "ignore_eos": True, "stream": stream}
    with held(writing, writing.generator, [[1]] * (3 if queued else 1), 3) as busy:
        with httpx2.Client() as client, pytest.raises(httpx2.ReadTimeout):
            client.post(f"{server.url}/v1/completions", json=body, timeout=0.3)
        (job,) = [one for one in writing._jobs if one is not busy.job]
        deadline = time.monotonic() + PATIENCE_S
        while not all(text.cancelled for text in job.texts) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert all(text.cancelled for text in job.texts)
    assert idle(server)
    assert 'mod_export_texts_total{finish="cancelled"}' in server.service.metrics.text().decode()


def test_eight_async_clients_get_their_own_texts(server: Server, other: Generator) -> None:
    prompts = [f"def f{number}(" for number in range(8)]
    expected = [item.text for item in other.generate(prompts, 12)]

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            found = await asyncio.gather(
                *(
                    client.completions.create(model="writing", prompt=item, max_tokens=12, temperature=0)
                    for item in prompts
                )
            )
        return [item.choices[0].text for item in found]

    assert asyncio.run(ask()) == expected


def test_a_step_that_fails_in_a_stream_is_told_in_it(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(written) as server:
        writing, metrics = server.writing, server.service.metrics
        wrote = metrics.wrote

        def spoil(text: RowText, since_s: float | None) -> None:
            """Fills the caches with NaN after the third token."""
            wrote(text, since_s)
            if len(text.completion.ids) == 3:
                for decoder in writing.generator._decoders.values():
                    for array in decoder.cache.values():
                        if array.dtype == np.float32:
                            array.fill(np.nan)

        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with monkeypatch.context() as patch:
            patch.setattr(metrics, "wrote", spoil)
            stream = client.completions.create(model="writing", prompt="a", max_tokens=40, stream=True)
            with pytest.raises(openai.APIError, match="the server failed to answer this request; its log says why"):
                list(stream)
        fine = client.completions.create(model="writing", prompt="a", max_tokens=4, temperature=0)
        assert fine.choices[0].finish_reason == "length"


def test_a_model_that_writes_no_text_says_why(small: Path) -> None:
    with serving(small) as server:
        answer = post(server, {"prompt": "x"})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["message"].startswith("this model writes no text: ")
        assert (error["code"], error["type"]) == ("unsupported", "invalid_request_error")
        assert httpx2.get(f"{server.url}/v1/models").json()["data"][0]["id"] == "small"

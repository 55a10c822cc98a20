"""/v1: completions, conversations and the list of models, as OpenAI's API has them."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import deque
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from mod_export.errors import TooLongError
from mod_export.runtime.generator import Generator, tokens_read
from mod_export.runtime.rows import Piece, Text
from mod_export.serve.body import gone, read_body, unless_gone
from mod_export.serve.jobs import Ended, Event, Failed, Job
from mod_export.serve.openai_answers import Answer, ChatAnswer, TextAnswer, TokenNames
from mod_export.serve.openai_requests import ChatRequest, CompletionRequest, OpenAIRequest
from mod_export.serve.problems import ApiError, problem_of
from mod_export.serve.service import Service, Writing

NEW_TOKENS = 16
"""Of a completion that does not say how many, as OpenAI's API."""
TEMPERATURE = 1.0
"""Likewise, unless the model's generation_config.json asks for sampling at another one."""
BYTES_OF_A_TOKEN = 8
"""Of a prompt, as JSON, in the largest request of ids."""
LEAST_BODY_BYTES = 1 << 20
CHARACTERS_OF_A_TOKEN = 32
"""On average, at most, in a prompt that is tokenised at all: while a long one is, no text of others is written."""
DRAWN_SEEDS = 2**31
Asked = TypeVar("Asked", bound=OpenAIRequest)


async def list_models(request: Request) -> Response:
    """GET /v1/models."""
    return JSONResponse({"object": "list", "data": [_model(request.app.state.service)]})


async def one_model(request: Request) -> Response:
    """GET /v1/models/NAME."""
    service: Service = request.app.state.service
    _check_model(service, request.path_params["name"])
    return JSONResponse(_model(service))


async def completions(request: Request) -> Response:
    """POST /v1/completions."""
    service: Service = request.app.state.service
    _check_room(service)
    asked = await _asked(request, CompletionRequest)
    writing = _writing(service, asked.model, len(asked.several) * asked.n)
    generator = writing.generator

    def read() -> tuple[list[Text], list[str] | None]:
        for prompt in asked.several:
            _check_length(generator, prompt)
        ids = generator.ids(asked.several, special=asked.add_special_tokens)
        new = NEW_TOKENS if asked.max_tokens is None else asked.max_tokens
        texts = _texts(writing, asked, ids, new, asked.logprobs, scored=asked.scored)
        return texts, [_text_of(writing, one) for one in asked.several] if asked.echo else None

    texts, echo = await asyncio.to_thread(read)
    answer = TextAnswer(service.name, texts, TokenNames(generator.vocabulary), asked.n, echo)
    return await _answer(request, writing, asked, texts, answer)


async def chat_completions(request: Request) -> Response:
    """POST /v1/chat/completions."""
    service: Service = request.app.state.service
    _check_room(service)
    asked = await _asked(request, ChatRequest)
    writing = _writing(service, asked.model, asked.n)
    generator = writing.generator

    def read() -> list[Text]:
        _check_length(generator, "".join(one.content for one in asked.messages))
        messages = [one.model_dump() for one in asked.messages]
        ids = generator.ids(messages, asked.chat_template_kwargs)
        limits = [asked.max_completion_tokens, asked.max_tokens, max(1, generator.window - len(ids[0]) + 1)]
        new = next(one for one in limits if one is not None)
        return _texts(writing, asked, ids, new, (asked.top_logprobs or 0) if asked.logprobs else None)

    texts = await asyncio.to_thread(read)
    names = TokenNames(generator.vocabulary)
    answer = ChatAnswer(service.name, texts, names, asked.n, streamed=asked.stream)
    return await _answer(request, writing, asked, texts, answer)


def _model(service: Service) -> dict[str, Any]:
    window = {} if isinstance(service.writing, str) else {"max_model_len": service.writing.generator.window}
    return {"id": service.name, "object": "model", "created": service.created, "owned_by": "mod-export", **window}


async def _asked(request: Request, kind: type[Asked]) -> Asked:
    service: Service = request.app.state.service
    most = LEAST_BODY_BYTES
    if isinstance(service.writing, Writing):
        texts = service.writing.scheduler.most_texts
        most = max(most, texts * service.writing.generator.window * BYTES_OF_A_TOKEN)
    return kind.model_validate_json(await read_body(request, most))


def _check_room(service: Service) -> None:
    """Refuses a request before it is read where there is no room for one text: a server that has too much to do has no
    time for those.
    """
    if isinstance(service.writing, Writing):
        service.writing.scheduler.check_room(1)


def _check_model(service: Service, name: str | None) -> None:
    if name not in (None, service.name):
        message = f"model {name[:80]!r}: not served here; this server has {service.name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def _writing(service: Service, model: str | None, texts: int) -> Writing:
    """What writes the texts of a request, if there is room for them, before any work is done for it."""
    _check_model(service, model)
    if isinstance(service.writing, str):
        raise ApiError(400, f"this model writes no text: {service.writing}", code="unsupported")
    scheduler = service.writing.scheduler
    if texts > scheduler.most_texts:
        raise ApiError(400, f"{texts} texts, prompts times n, are more than this server ever takes at once: "
                           f"{scheduler.most_texts}; ask for fewer", param="n")  # fmt: skip
    scheduler.check_room(texts)
    return service.writing


def _check_length(generator: Generator, prompt: str | Sequence[int]) -> None:
    """Refuses what is far too long before it is tokenised, or looked at id by id."""
    size = len(prompt) / CHARACTERS_OF_A_TOKEN if isinstance(prompt, str) else len(prompt)
    if size > generator.window:
        what = "characters" if isinstance(prompt, str) else "tokens"
        raise TooLongError(
            f"a prompt of {len(prompt):,} {what} is longer than the window of {generator.window} tokens; give less"
        )


def _texts(
    writing: Writing,
    asked: OpenAIRequest,
    ids: Sequence[list[int]],
    new_tokens: int,
    logprobs: int | None,
    *,
    scored: bool = False,
) -> list[Text]:
    defaults = writing.generator.defaults
    # Before each prompt is copied n times.
    writing.generator.bucket_for(1, tokens_read(max(map(len, ids)), new_tokens))
    temperature = asked.temperature if asked.temperature is not None else defaults.temperature or TEMPERATURE
    return writing.generator.texts(
        [prompt for prompt in ids for _ in range(asked.n)],
        new_tokens,
        temperature=temperature,
        top_p=asked.top_p,
        top_k=asked.cut,
        seed=secrets.randbelow(DRAWN_SEEDS) if asked.seed is None else asked.seed,
        stop=asked.stop,
        ignore_eos=asked.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=scored,
    )


def _text_of(writing: Writing, prompt: str | Sequence[int]) -> str:
    """What `echo` shows of a prompt."""
    if isinstance(prompt, str) or writing.generator.vocabulary is None:
        return prompt if isinstance(prompt, str) else ""
    reader = writing.generator.vocabulary.reader()
    return "".join(map(reader.feed, prompt)) + reader.close()


async def _answer(
    request: Request, writing: Writing, asked: OpenAIRequest, texts: Sequence[Text], answer: Answer
) -> Response:
    events: asyncio.Queue[Event] = asyncio.Queue()
    mailbox: Mailbox = request.app.state.mailbox
    put = partial(mailbox.put, events, asyncio.get_running_loop())

    def put_ends(event: Event) -> None:
        if not isinstance(event, Piece):  # The texts have them, and the event loop would be woken at every step.
            put(event)

    job = writing.scheduler.submit(texts, put if asked.stream else put_ends)
    try:
        if not asked.stream:
            await unless_gone(request.receive, _all(events, len(texts)))
            return JSONResponse(await asyncio.to_thread(answer.whole))
        # Until a first event comes, a refusal can still have a status of its own.
        first = await unless_gone(request.receive, events.get())
    except BaseException:  # Cancelled as well, as Ray does when a client leaves: its rows are given back.
        job.cancel()
        raise
    if isinstance(first, Failed):
        raise first.error
    return EventStream(job, _chunks(first, events, len(texts), answer, usage=asked.counts_tokens))


class Mailbox:
    """Brings events from the scheduler's thread to the event loop, which is woken once for all that have come."""

    def __init__(self) -> None:
        self._items: deque[tuple[asyncio.Queue[Event], Event]] = deque()
        self._woken = False

    def put(self, events: asyncio.Queue[Event], loop: asyncio.AbstractEventLoop, event: Event) -> None:
        """From the scheduler's thread."""
        self._items.append((events, event))
        if not self._woken:
            self._woken = True
            try:
                loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # The loop is closed.
                self._woken = False
                raise

    def _deliver(self) -> None:
        # First, so that what is put from here on wakes the loop again.
        self._woken = False
        while self._items:
            events, event = self._items.popleft()
            events.put_nowait(event)


async def _all(events: asyncio.Queue[Event], texts: int) -> None:
    """Waits until all texts are complete."""
    while texts:
        event = await events.get()
        if isinstance(event, Failed):
            raise event.error
        texts -= isinstance(event, Ended)


async def _chunks(
    event: Event | None, events: asyncio.Queue[Event], texts: int, answer: Answer, *, usage: bool
) -> AsyncIterator[bytes]:
    """Server-sent events, as many in one piece as have come."""
    opened: set[int] = set()
    while texts:
        lines: list[dict[str, Any]] = []
        event = event or await events.get()
        while event is not None:
            if isinstance(event, Failed):
                # The status has been sent. Clients of OpenAI raise what stands in a chunk as `error`.
                yield _sse(*lines, problem_of(event.error).openai())
                return
            lines += _chunks_of(event, opened, answer)
            texts -= isinstance(event, Ended)
            event = None if events.empty() else events.get_nowait()
        if not texts and usage:
            lines.append(answer.usage())
        yield _sse(*lines)
    yield b"data: [DONE]\n\n"


def _chunks_of(event: Piece | Ended, opened: set[int], answer: Answer) -> list[dict[str, Any]]:
    lines = [] if event.row in opened else answer.opening(event.row)
    opened.add(event.row)
    chunk = answer.piece(event) if isinstance(event, Piece) else answer.closing(event.row, event.completion)
    return lines if chunk is None else [*lines, chunk]


def _sse(*lines: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(line, ensure_ascii=False).encode() + b"\n\n" for line in lines)


class EventStream(Response):
    """Server-sent events of a job, which is cancelled when the client leaves."""

    def __init__(self, job: Job, chunks: AsyncIterator[bytes]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._job, self._chunks = job, chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left = asyncio.create_task(gone(receive))
        sending = asyncio.create_task(self._send(send))
        try:
            await asyncio.wait({left, sending}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            self._job.cancel()
            left.cancel()
            sending.cancel()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._chunks:
            if chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

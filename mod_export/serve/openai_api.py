"""/v1: completions, chat completions and the list of models, in the format of OpenAI's API."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import deque
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mod_export.errors import GrammarError, UsageError
from mod_export.runtime.generator import Generator, tokens_read
from mod_export.runtime.grammar import lark_of
from mod_export.runtime.rows import Piece, RowText
from mod_export.serve.endpoint import ApiError, json_of, problem_of, read_body, service_of, unless_gone
from mod_export.serve.openai_formats import (
    Answer,
    ChatAnswer,
    ChatRequest,
    CompletionRequest,
    OpenAIRequest,
    StreamOptions,
    TextAnswer,
    TokenNames,
)
from mod_export.serve.scheduler import Ended, Event, Failed, Job, Scheduler
from mod_export.serve.service import Service
from mod_export.serve.tool_answer import ToolAnswer
from mod_export.serve.tool_calls import SHOWN, CallReader, DemandedCall, FoundCalls
from mod_export.types import Unavailable

NEW_TOKENS = 16
"""Default number of new tokens of a completion, as in OpenAI's API."""
TEMPERATURE = 1.0
"""Default temperature, as in OpenAI's API, unless the model's generation_config.json asks to sample at another."""
BYTES_OF_A_TOKEN = 8
"""JSON bytes for each prompt token in the largest request of token ids."""
LEAST_BODY_BYTES = 1 << 20
CHARACTERS_OF_A_TOKEN = 32
"""A prompt with more characters than this per token of the window is refused: tokenising it delays all other texts."""
DRAWN_SEEDS = 2**31
LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
"""Characters that may stand unescaped in JSON but end a line in Unicode -> their escapes. Clients that split streams
into lines with str.splitlines would cut an event there.
"""
BLIND = (
    "tools: this model's chat template does not write them into the prompt, so the model cannot know them; demand a "
    'call (tool_choice: "required", or a function), which the server can make sure of, or leave tools out'
)
Asked = TypeVar("Asked", bound=OpenAIRequest)


async def list_models(request: Request) -> Response:
    """GET /v1/models."""
    return JSONResponse({"object": "list", "data": [_model(service_of(request))]})


async def one_model(request: Request) -> Response:
    """GET /v1/models/NAME."""
    service = service_of(request)
    _check_model(service, request.path_params["name"])
    return JSONResponse(_model(service))


async def completions(request: Request) -> Response:
    """POST /v1/completions."""
    service = service_of(request)
    _check_room(service)
    body = await _asked(request, CompletionRequest)
    scheduler = _scheduler(service, body.model, len(body.several) * body.n)
    generator = scheduler.generator

    def read() -> tuple[list[RowText], list[str] | None]:
        for prompt in body.several:
            _check_length(generator, prompt)
        ids = generator.ids(body.several, special=body.add_special_tokens)
        new = NEW_TOKENS if body.new_tokens is None else body.new_tokens
        texts = _texts(generator, body, ids, new, body.logprobs, grammar, scored=body.scored)
        return texts, [_text_of(generator, echoed) for echoed in body.several] if body.echo else None

    grammar = await _compiled(generator, body)
    texts, echo = await asyncio.to_thread(read)
    answer = TextAnswer(service.name, texts, TokenNames(generator.vocabulary), body.n, echo)
    return await _answer(request, scheduler, body, texts, answer)


async def chat_completions(request: Request) -> Response:
    """POST /v1/chat/completions."""
    service = service_of(request)
    _check_room(service)
    body = await _asked(request, ChatRequest)
    scheduler = _scheduler(service, body.model, body.n)
    generator = scheduler.generator

    def read() -> list[RowText]:
        tools = [tool.sent for tool in body.offered]
        conversation = "".join(message.text for message in body.messages)
        _check_length(generator, conversation)
        if generator.vocabulary is None:
            raise UsageError("this model's ids stand for no text, so it has no conversations; give prompts as ids")
        template = generator.vocabulary.chat_template
        if tools and not body.demanded and not template.reads_tools:
            raise ApiError(400, BLIND, param="tools")
        if tools and template.reads_tools:
            _check_length(generator, "".join([conversation, *map(json.dumps, tools)]))
        variables = {**body.chat_template_kwargs, **({"tools": tools} if tools and template.reads_tools else {})}
        ids = generator.ids([message.for_template(template) for message in body.messages], variables)
        rest = max(1, generator.window - len(ids[0]) + 1)
        new = rest if body.new_tokens is None else body.new_tokens
        return _texts(generator, body, ids, new, (body.top_logprobs or 0) if body.logprobs else None, grammar)

    grammar = await _compiled(generator, body)
    texts = await asyncio.to_thread(read)
    names = TokenNames(generator.vocabulary)
    if body.offered:
        reader = partial(_call_reader, body)
        answer: Answer = ToolAnswer(service.name, texts, names, body.n, streamed=body.stream, reader=reader)
    else:
        answer = ChatAnswer(service.name, texts, names, body.n, streamed=body.stream)
    return await _answer(request, scheduler, body, texts, answer)


def _call_reader(asked: ChatRequest) -> CallReader:
    names = [tool.function.name for tool in asked.demanded or asked.offered]
    return DemandedCall(names) if asked.demanded else FoundCalls(names, None if asked.parallel_tool_calls else 1)


def _model(service: Service) -> dict[str, Any]:
    window = {} if isinstance(service.writing, Unavailable) else {"max_model_len": service.writing.generator.window}
    # Programs made for vLLM take the name from `root`, which is another one there if a model is served by an alias.
    name = {"id": service.name, "root": service.name, "parent": None}
    return {**name, "object": "model", "created": service.created, "owned_by": "mod-export", **window}


async def _asked(request: Request, kind: type[Asked]) -> Asked:
    service = service_of(request)
    most = LEAST_BODY_BYTES
    if isinstance(service.writing, Scheduler):
        most = max(most, service.writing.most_texts * service.writing.generator.window * BYTES_OF_A_TOKEN)
    return kind.model_validate_json(json_of(await read_body(request, most)))


def _check_room(service: Service) -> None:
    """Refuses a request before its body is read if there is no room for even one text. This saves time under load."""
    if isinstance(service.writing, Scheduler):
        service.writing.check_room(1)


def _check_model(service: Service, name: str | None) -> None:
    if name not in (None, service.name):
        message = f"model {name[:80]!r}: not served here; this server has {service.name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def _scheduler(service: Service, model: str | None, texts: int) -> Scheduler:
    """Returns the scheduler of the service. Refuses the request before any work if there is no room for its texts."""
    _check_model(service, model)
    if isinstance(service.writing, Unavailable):
        raise ApiError(400, f"this model writes no text: {service.writing}", code="unsupported")
    scheduler = service.writing
    if texts > scheduler.most_texts:
        raise ApiError(400, f"{texts} texts, prompts times n, are more than this server ever takes at once: "
                           f"{scheduler.most_texts}; ask for fewer", param="n")  # fmt: skip
    scheduler.check_room(texts)
    return scheduler


def _check_length(generator: Generator, prompt: str | Sequence[int]) -> None:
    """Refuses a prompt that is far too long, before it is tokenised or its ids are checked."""
    most = generator.window * (CHARACTERS_OF_A_TOKEN if isinstance(prompt, str) else 1)
    if len(prompt) > most:
        unit = f"characters; at most {most} are read" if isinstance(prompt, str) else "tokens"
        raise _too_long(generator, f"your prompt has {len(prompt)} {unit}. Please reduce the length of the prompt.")


def _too_long(generator: Generator, but: str) -> ApiError:
    """Returns the refusal of a text that is longer than the window, in OpenAI's words: clients search them for the
    numbers of tokens, and shorten the conversation.
    """
    message = f"This model's maximum context length is {generator.window} tokens. However, {but}"
    return ApiError(400, message, code="context_length_exceeded")


def _check_window(generator: Generator, asked: OpenAIRequest, longest: int, new_tokens: int) -> None:
    if tokens_read(longest, new_tokens) <= generator.window:
        return
    source = "messages" if isinstance(asked, ChatRequest) else "prompt"
    if longest > generator.window and asked.new_tokens is None:
        but = f"your {source} resulted in {longest} tokens. Please reduce the length of the {source}."
    else:
        but = (
            f"you requested {longest + new_tokens} tokens ({longest} in the {source}, {new_tokens} in the completion). "
            f"Please reduce the length of the {source} or max_tokens."
        )
    raise _too_long(generator, but)


def _texts(
    generator: Generator,
    asked: OpenAIRequest,
    ids: Sequence[list[int]],
    new_tokens: int,
    logprobs: int | None,
    grammar: str | None,
    *,
    scored: bool = False,
) -> list[RowText]:
    # Refuses texts that are too long before each prompt is copied n times.
    _check_window(generator, asked, max(map(len, ids)), new_tokens)
    temperature = asked.temperature if asked.temperature is not None else generator.defaults.temperature or TEMPERATURE
    try:
        return generator.texts(
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
            logit_bias={int(token): value for token, value in asked.logit_bias.items()},
            grammar=grammar,
            shown=SHOWN if isinstance(asked, ChatRequest) and asked.offered else (),
            answers=isinstance(asked, ChatRequest),
        )
    except GrammarError as error:
        raise _no_text(asked, error) from error


async def _compiled(generator: Generator, asked: OpenAIRequest) -> str | None:
    """Waits until the grammar of a request is compiled, and returns it; None if the request has none. While it is
    being compiled, the request takes no thread from others.
    """

    def read() -> str | None:
        grammar = asked.grammar
        return None if grammar is None else lark_of(grammar)

    if asked.response_format is None and not _demands_call(asked):
        return None
    try:
        # Checking a large schema takes long, and the event loop serves all clients.
        grammar = await asyncio.to_thread(read)
        if grammar is not None:
            # Others may wait for the same grammar, so a request that is cancelled does not cancel it.
            await asyncio.shield(asyncio.wrap_future(generator.grammars.compiled(grammar)))
    except GrammarError as error:
        raise _no_text(asked, error) from error
    return grammar


def _no_text(asked: OpenAIRequest, reason: object) -> ApiError:
    """Returns the refusal of a request whose grammar no text can follow."""
    param = "tools" if _demands_call(asked) else "response_format"
    return ApiError(400, f"{param}: {reason}", param=param)


def _demands_call(asked: OpenAIRequest) -> bool:
    """Whether the answer has to be a call of a tool."""
    return isinstance(asked, ChatRequest) and bool(asked.demanded)


def _text_of(generator: Generator, prompt: str | Sequence[int]) -> str:
    """Returns the text of a prompt, which `echo` shows; empty if its ids do not represent text."""
    if isinstance(prompt, str) or generator.vocabulary is None:
        return prompt if isinstance(prompt, str) else ""
    reader = generator.vocabulary.reader()
    return "".join(map(reader.feed, prompt)) + reader.close()


async def _answer(
    request: Request, scheduler: Scheduler, asked: OpenAIRequest, texts: Sequence[RowText], answer: Answer
) -> Response:
    events: asyncio.Queue[Event] = asyncio.Queue()
    mailbox: Mailbox = request.app.state.mailbox
    put = partial(mailbox.put, events, asyncio.get_running_loop())

    def tell(event: Event) -> None:
        if isinstance(event, Ended) and event.completion.failure:
            put(Failed(_no_text(asked, event.completion.failure)))
        elif asked.stream or not isinstance(event, Piece):
            # Without a stream the texts keep their pieces, so the event loop need not wake at every step.
            put(event)

    job = scheduler.submit(texts, tell)
    try:
        if not asked.stream:
            await unless_gone(request.receive, _all(events, len(texts)))
            return JSONResponse(await asyncio.to_thread(answer.whole))
        # The status is not sent before the first event, so an early failure still gets its own status.
        first = await unless_gone(request.receive, events.get())
    except BaseException:  # Includes cancellation, which Ray uses when a client disconnects. The rows become free.
        job.cancel()
        raise
    if isinstance(first, Failed):
        raise first.error
    return EventStream(job, _chunks(first, events, len(texts), answer, asked.streamed))


class Mailbox:
    """Moves events from the scheduler's thread to the event loop, with one wake-up for all events that are waiting."""

    def __init__(self) -> None:
        self._items: deque[tuple[asyncio.Queue[Event], Event]] = deque()
        self._woken = False

    def put(self, events: asyncio.Queue[Event], loop: asyncio.AbstractEventLoop, event: Event) -> None:
        """Adds an event. Called on the scheduler's thread."""
        self._items.append((events, event))
        if not self._woken:
            self._woken = True
            try:
                loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # The loop is closed.
                self._woken = False
                raise

    def _deliver(self) -> None:
        # Reset first, so that events put from now on wake the loop again.
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
    event: Event | None, events: asyncio.Queue[Event], texts: int, answer: Answer, shows: StreamOptions
) -> AsyncIterator[bytes]:
    """Yields server-sent events. Joins all events that are waiting into one piece."""
    opened: set[int] = set()
    written = 0
    while texts:
        lines: list[dict[str, Any]] = []
        event = event or await events.get()
        while event is not None:
            if isinstance(event, Failed):
                # The status has been sent already. OpenAI's clients raise the `error` of a chunk as an exception.
                yield _sse(*lines, problem_of(event.error).openai())
                return
            written += isinstance(event, Piece) and event.token is not None
            usage: dict[str, Any] = {"usage": None} if shows.include_usage else {}
            if shows.continuous_usage_stats:
                usage = {"usage": answer.counted(written)}
            lines += [{**line, **usage} for line in _chunks_of(event, opened, answer)]
            texts -= isinstance(event, Ended)
            event = None if events.empty() else events.get_nowait()
        if not texts and shows.include_usage:
            lines.append(answer.usage())
        yield _sse(*lines)
    yield b"data: [DONE]\n\n"


def _chunks_of(event: Piece | Ended, opened: set[int], answer: Answer) -> list[dict[str, Any]]:
    lines = [] if event.row in opened else answer.opening(event.row)
    opened.add(event.row)
    if isinstance(event, Ended):
        return lines + answer.closing(event.row, event.completion)
    chunk = answer.piece(event)
    return lines if chunk is None else [*lines, chunk]


def _sse(*lines: dict[str, Any]) -> bytes:
    texts = (json.dumps(line, ensure_ascii=False).translate(LINE_ENDS) for line in lines)
    return "".join(f"data: {text}\n\n" for text in texts).encode()


class EventStream(StreamingResponse):
    """Server-sent events of a job, which is cancelled when the client disconnects."""

    def __init__(self, job: Job, chunks: AsyncIterator[bytes]) -> None:
        super().__init__(chunks, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()

"""A light HTTP client with one connection for each request, one task, and no library between it and the socket.

Client libraries retry, keep connections and wait by their own rules, which would hide the server's behaviour.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

HOST = "127.0.0.1"
ANSWER_S = 60.0
"""Seconds after which a request counts as hanging."""
BROKEN = (OSError, EOFError)
"""Errors of a connection that the server ended. IncompleteReadError is an EOFError, and TimeoutError an OSError."""


@dataclass
class Reply:
    """A whole answer.

    Attributes:
        seconds: time from before the connection to the last byte.
    """

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Streamed:
    """A streamed answer.

    Attributes:
        status: 200, or the status of a refusal, whose body is in `body`.
        texts: index of the choice -> its text.
        finishes: index of the choice -> its finish reason; a choice that did not end is missing.
        tokens: tokens as the server counted them; 0 if it sent no count.
        first_s: time from before the connection to the first piece of text.
        gaps_s: times between pieces of text.
        seconds: time from before the connection to the last byte.
        done: whether the closing line of the protocol came.
        error: error that the server sent in the stream.
    """

    status: int
    headers: dict[str, str]
    body: bytes = b""
    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    tokens: int = 0
    first_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    done: bool = False
    error: Any = None

    @property
    def whole(self) -> bool:
        """Whether every text is complete."""
        return self.status == 200 and self.done and not self.error and self.texts.keys() == self.finishes.keys()


def request_bytes(method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
    """Bytes of a request. `headers` replace the default headers; an empty value removes a header."""
    all_headers = {"Host": HOST, "Connection": "close", "Content-Type": "application/json",
                   "Content-Length": str(len(body)), **(headers or {})}  # fmt: skip
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in all_headers.items() if value != "")]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def completion(payload: Mapping[str, Any]) -> bytes:
    """Bytes of a request for a completion."""
    return request_bytes("POST", "/v1/completions", json.dumps(payload).encode())


async def exchange(port: int, sent: bytes, timeout_s: float = ANSWER_S) -> Reply:
    """Sends bytes, and returns the answer."""
    begin = time.perf_counter()
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            # No drain: a server may refuse a body and answer before it has read all of it.
            writer.write(sent)
            status, headers = await read_head(reader)
            body = b"".join([piece async for piece in _body(reader, headers)])
        finally:
            writer.close()
    return Reply(status, headers, body, time.perf_counter() - begin)


async def get(port: int, path: str, timeout_s: float = ANSWER_S) -> Reply:
    """Gets a page."""
    return await exchange(port, request_bytes("GET", path), timeout_s)


async def complete(port: int, payload: Mapping[str, Any], timeout_s: float = ANSWER_S) -> Reply:
    """Gets a completion in one piece."""
    return await exchange(port, completion(payload), timeout_s)


async def stream(
    port: int, payload: Mapping[str, Any], timeout_s: float = ANSWER_S, begun: asyncio.Event | None = None
) -> Streamed:
    """Gets a streamed completion, and sets `begun` at its first text."""
    asked = {**payload, "stream": True, "stream_options": {"include_usage": True}}
    begin = time.perf_counter()
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            writer.write(completion(asked))
            streamed = Streamed(*await read_head(reader))
            last = begin
            pending = b""
            async for piece in _body(reader, streamed.headers):
                if streamed.status != 200:
                    streamed.body += piece
                    continue
                *events, pending = (pending + piece).split(b"\n\n")
                if sum(_take(streamed, event) for event in events):
                    now = time.perf_counter()
                    if streamed.first_s is None:
                        streamed.first_s = now - begin
                    else:
                        streamed.gaps_s.append(now - last)
                    last = now
                    if begun is not None:
                        begun.set()
        finally:
            writer.close()
    streamed.seconds = time.perf_counter() - begin
    return streamed


def _take(streamed: Streamed, event: bytes) -> bool:
    """Adds an event to `streamed`, and returns whether it has text."""
    data = event.removeprefix(b"data: ")
    if data == b"[DONE]":
        streamed.done = True
        return False
    chunk = json.loads(data)
    streamed.error = chunk.get("error") or streamed.error
    if chunk.get("usage"):
        streamed.tokens = chunk["usage"]["completion_tokens"]
    texts = False
    for choice in chunk.get("choices", ()):
        row = choice["index"]
        streamed.texts[row] = streamed.texts.get(row, "") + choice["text"]
        texts = texts or bool(choice["text"])
        if choice["finish_reason"]:
            streamed.finishes[row] = choice["finish_reason"]
    return texts


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Returns the status and the headers, with names in small letters."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines[1:] if line)
    return int(lines[0].split(" ")[1]), {name.lower(): value.strip() for name, _, value in pairs}


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """Yields the pieces of the body as they come."""
    if headers.get("transfer-encoding") != "chunked":
        yield await reader.readexactly(int(headers.get("content-length", "0")))
        return
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)

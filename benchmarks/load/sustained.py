"""Sustained load: clients with one request at a time each, or requests that arrive at given times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.load import raw_client
from benchmarks.load.raw_client import BROKEN

WARM_S = 2.0
CLIENTS_PER_ROW = 2
"""Clients of a closed loop for each row, so that a text always waits for a row that becomes free."""


@dataclass(frozen=True)
class Answered:
    """One request of a load.

    Attributes:
        begun: seconds since the load began.
        seconds: time until the last byte.
        status: HTTP status; 0 if the connection broke or no answer came in time.
        tokens: tokens of the text.
        retry_after: the Retry-After header of a refusal.
        text: the text of the answer.
        prompt: index of the payload.
    """

    begun: float
    seconds: float
    status: int
    tokens: int = 0
    retry_after: str | None = None
    text: str = ""
    prompt: int = 0

    @property
    def ended(self) -> float:
        return self.begun + self.seconds


async def one(port: int, payloads: Sequence[Mapping[str, Any]], number: int, since: float) -> Answered:
    """Sends a request. A broken connection or a timeout gives status 0 instead of an exception."""
    begun = time.perf_counter() - since
    prompt = number % len(payloads)
    try:
        reply = await raw_client.complete(port, payloads[prompt])
    except BROKEN:
        return Answered(begun, time.perf_counter() - since - begun, 0, prompt=prompt)
    if reply.status != 200:
        return Answered(begun, reply.seconds, reply.status, retry_after=reply.headers.get("retry-after"), prompt=prompt)
    completion = reply.json()
    return Answered(
        begun,
        reply.seconds,
        200,
        completion["usage"]["completion_tokens"],
        text="".join(choice["text"] for choice in completion["choices"]),
        prompt=prompt,
    )


async def closed_loop(port: int, payloads: Sequence[Mapping[str, Any]], clients: int, seconds: float) -> list[Answered]:
    """Runs clients that send their next request when they have the answer to the previous one."""
    since = time.perf_counter()
    answers: list[Answered] = []

    async def client(number: int) -> None:
        while time.perf_counter() - since < seconds:
            answers.append(await one(port, payloads, number, since))
            number += clients

    await asyncio.gather(*map(client, range(clients)))
    return answers


async def open_loop(port: int, payloads: Sequence[Mapping[str, Any]], times: Sequence[float]) -> list[Answered]:
    """Sends requests at these times, without waiting for earlier answers."""
    since = time.perf_counter()
    running: list[asyncio.Task[Answered]] = []
    for number, at in enumerate(times):
        await asyncio.sleep(max(0.0, at - (time.perf_counter() - since)))
        running.append(asyncio.create_task(one(port, payloads, number, since)))
    return list(await asyncio.gather(*running))


def rate(answers: Sequence[Answered], begin: float, end: float) -> tuple[float, float]:
    """Returns texts and tokens a second, counting texts that were complete between two times."""
    inside = [answer for answer in answers if answer.status == 200 and begin <= answer.ended <= end]
    return len(inside) / (end - begin), sum(answer.tokens for answer in inside) / (end - begin)


def wrong_texts(answers: Sequence[Answered], right: Mapping[int, str] | None = None) -> int:
    """Counts texts that differ from the right text of their prompt, or, if there is none, from its first answer."""
    known = dict(right or {})
    return sum(
        known.setdefault(answer.prompt, answer.text) != answer.text for answer in answers if answer.status == 200
    )


async def capacity(port: int, payloads: Sequence[Mapping[str, Any]], rows: int, seconds: float) -> tuple[float, float]:
    """Returns texts and tokens a second when every row is always busy."""
    answers = await closed_loop(port, payloads, CLIENTS_PER_ROW * rows, seconds)
    return rate(answers, WARM_S, seconds)

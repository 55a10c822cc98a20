"""Load for a while: clients that have one request each at a time, or requests that arrive at given times."""

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
"""Of a closed loop, so that a row that becomes free has a text that waits for it."""


@dataclass(frozen=True)
class Answered:
    """One request of a load.

    Attributes:
        begun: seconds since the load began.
        seconds: until the last byte.
        status: 0 if the connection broke, or nothing came in time.
        tokens: of its text.
        retry_after: the header of a refusal.
        text: that it got.
        prompt: number of the payload.
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
    """Sends a request, and never raises."""
    begun = time.perf_counter() - since
    prompt = number % len(payloads)
    try:
        reply = await raw_client.complete(port, payloads[prompt])
    except BROKEN:
        return Answered(begun, time.perf_counter() - since - begun, 0, prompt=prompt)
    if reply.status != 200:
        return Answered(begun, reply.seconds, reply.status, retry_after=reply.headers.get("retry-after"), prompt=prompt)
    found = reply.json()
    return Answered(
        begun,
        reply.seconds,
        200,
        found["usage"]["completion_tokens"],
        text="".join(choice["text"] for choice in found["choices"]),
        prompt=prompt,
    )


async def closed_loop(port: int, payloads: Sequence[Mapping[str, Any]], clients: int, seconds: float) -> list[Answered]:
    """Each client sends its next request when it has the answer to the one before."""
    since = time.perf_counter()
    found: list[Answered] = []

    async def client(number: int) -> None:
        while time.perf_counter() - since < seconds:
            found.append(await one(port, payloads, number, since))
            number += clients

    await asyncio.gather(*map(client, range(clients)))
    return found


async def open_loop(port: int, payloads: Sequence[Mapping[str, Any]], times: Sequence[float]) -> list[Answered]:
    """Requests arrive at these times, whatever became of those before."""
    since = time.perf_counter()
    running: list[asyncio.Task[Answered]] = []
    for number, at in enumerate(times):
        await asyncio.sleep(max(0.0, at - (time.perf_counter() - since)))
        running.append(asyncio.create_task(one(port, payloads, number, since)))
    return list(await asyncio.gather(*running))


def rate(answers: Sequence[Answered], begin: float, end: float) -> tuple[float, float]:
    """Texts and tokens a second, of the texts that were complete between two times."""
    inside = [one for one in answers if one.status == 200 and begin <= one.ended <= end]
    return len(inside) / (end - begin), sum(one.tokens for one in inside) / (end - begin)


def wrong_texts(answers: Sequence[Answered], right: Mapping[int, str] | None = None) -> int:
    """Texts that differ from the right one of their prompt, or else from the first that it got."""
    known = dict(right or {})
    return sum(known.setdefault(one.prompt, one.text) != one.text for one in answers if one.status == 200)


async def capacity(port: int, payloads: Sequence[Mapping[str, Any]], rows: int, seconds: float) -> tuple[float, float]:
    """Texts and tokens a second when every row is always busy."""
    answers = await closed_loop(port, payloads, CLIENTS_PER_ROW * rows, seconds)
    return rate(answers, WARM_S, seconds)

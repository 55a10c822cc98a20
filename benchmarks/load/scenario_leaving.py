"""A thousand clients that leave before their answer is complete."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

from benchmarks.load import raw_client
from benchmarks.load.arrivals import prompts
from benchmarks.load.outcomes import Check, at_least, equal, told
from benchmarks.load.raw_client import BROKEN, HOST
from benchmarks.load.served import ServerProcess, Setting, greedy

CLIENTS = 1000
AT_ONCE = 32
"""Fewer clients than may wait for a row, so that the server refuses none."""
KINDS = ("streaming", "not streaming", "queued", "prefill")
MOST_STAY_S = 0.15
SPARE_TOKENS = 48
CANCELLED = 'mod_export_texts_total{finish="cancelled"}'


async def leaving(setting: Setting) -> list[Check]:
    """The clients leave no busy row, place in the queue or descriptor behind, and the texts of others stay right."""
    rng = random.Random(setting.seed)
    with ServerProcess(setting, "leaving") as server:
        rows, window = await server.rows(), await server.window()
        asked = prompts(rows + 1, 64, setting.seed)
        long = prompts(1, window - SPARE_TOKENS, setting.seed)[0]
        right = [await _text(server.port, greedy(prompt, 96)) for prompt in asked]
        before = server.sample()
        beside = _Beside(server.port, greedy(asked[-1], 96), right[-1])
        running = asyncio.create_task(beside.run())
        left = dict.fromkeys(KINDS, 0)
        for kind in KINDS:
            occupied = await _occupied(server, asked[:rows], window - 128) if kind == "queued" else []
            payload = greedy(long, 8) if kind == "prefill" else greedy(asked[0], window - 128)
            payload = {**payload, "stream": kind != "not streaming"}
            for clients in _rounds(CLIENTS // len(KINDS)):
                unanswered = await asyncio.gather(*(_leave(server.port, payload, kind, rng) for _ in range(clients)))
                left[kind] += sum(unanswered)
            for task in occupied:
                task.cancel()
        await asyncio.sleep(0.2)
        beside.over = True
        await running
        idle = await server.idle(10)
        again = await asyncio.gather(*(_text(server.port, greedy(prompt, 96)) for prompt in asked[:rows]))
        metrics = await server.metrics()
        return [
            equal("clients that left unanswered", sum(left.values()), CLIENTS),
            told("of them", ", ".join(f"{kind} {count}" for kind, count in left.items())),
            told("texts that the server counted as cancelled", f"{metrics.get(CANCELLED, 0):.0f}"),
            idle,
            equal(f"right texts, {rows} at once, afterwards", sum(a == b for a, b in zip(again, right, strict=False)),
                  rows),
            at_least("texts written beside them", beside.texts, 1),
            equal("of them wrong or failed", beside.wrong, 0),
            await server.descriptors_back(before.descriptors),
            told("RSS before, afterwards", f"{before.rss / 2**20:.0f}, {server.sample().rss / 2**20:.0f} MiB"),
            *await server.end(),
        ]  # fmt: skip


class _Beside:
    """A client that asks for one text after the other, and counts those that are wrong."""

    def __init__(self, port: int, payload: Any, right: str) -> None:
        self._port, self._payload, self._right = port, payload, right
        self.over = False
        self.texts = self.wrong = 0

    async def run(self) -> None:
        while not self.over:
            try:
                self.wrong += await _text(self._port, self._payload) != self._right
            except (RuntimeError, *BROKEN):
                self.wrong += 1
            self.texts += 1


async def _text(port: int, payload: Any) -> str:
    reply = await raw_client.complete(port, payload)
    if reply.status != 200:
        raise RuntimeError(f"status {reply.status}: {reply.body[:200]!r}")
    return str(reply.json()["choices"][0]["text"])


async def _occupied(server: ServerProcess, asked: list[str], tokens: int) -> list[asyncio.Task[Any]]:
    """Starts a client for every row, which asks for the next text when one is complete, until it is cancelled. Returns
    when all rows are busy, with these clients or with the one that runs beside them.
    """

    async def occupy(prompt: str) -> None:
        while True:
            await raw_client.stream(server.port, greedy(prompt, tokens))

    running = [asyncio.create_task(occupy(prompt)) for prompt in asked]
    while (await server.metrics())["mod_export_busy_rows"] < len(asked):
        await asyncio.sleep(0.02)
    return running


def _rounds(clients: int) -> Iterator[int]:
    while clients > 0:
        yield min(AT_ONCE, clients)
        clients -= AT_ONCE


async def _leave(port: int, payload: Any, kind: str, rng: random.Random) -> bool:
    """Sends a request and leaves, half of the time with a reset. Returns whether the answer was still incomplete."""
    stay, reset = rng.uniform(0, MOST_STAY_S), rng.random() < 0.5
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(raw_client.completion(payload))
        if kind == "streaming":
            # It leaves after a few tokens. A client that has no row gets none, and leaves after 5 s.
            pieces = rng.randrange(1, 6)
            try:
                async with asyncio.timeout(5):
                    for _ in range(pieces):
                        await reader.readuntil(b"data: ")
            except TimeoutError:
                pass
        elif kind != "prefill" or stay > MOST_STAY_S / 2:
            await asyncio.sleep(stay)
        else:
            await writer.drain()
        return not reader.at_eof()
    finally:
        if reset:
            writer.transport.abort()
        else:
            writer.close()

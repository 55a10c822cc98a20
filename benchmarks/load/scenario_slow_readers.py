"""Clients that open a stream and read nothing from it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any

from benchmarks.load import raw_client
from benchmarks.load.arrivals import percentile, prompts
from benchmarks.load.outcomes import Check, at_most, equal, told
from benchmarks.load.raw_client import HOST
from benchmarks.load.served import Sample, ServerProcess, Setting, greedy

STALLED_MS = 5000
STREAMS = 6
TEXTS = 8
"""Texts in each stream. With 20 logprobs for every token, they exceed the two or three megabytes of system buffers."""
READ_S = 12.0
"""Seconds in which another client is timed beside clients that do read."""
ACCEPTED_S = 5.0
OTHER_TOKENS = 256
MOST_TIMES_SLOWER, MOST_TIMES_LATER = 1.5, 3.0
"""Largest factors for the median and for the p99 of the time between tokens; the p99 depends on few samples."""
MOST_MIB = 256.0
MOST_CUT_OFF_S = 60.0


async def slow_readers(setting: Setting) -> list[Check]:
    """The server cuts off clients that do not read. Other clients get tokens as fast as beside clients that read."""
    with ServerProcess(setting, "slow_readers", stalled_ms=STALLED_MS) as server:
        window = await server.window()
        asked = prompts(STREAMS + 1, 64, setting.seed)
        payloads = [greedy(prompt, window - 128, n=TEXTS, logprobs=20, stream=True) for prompt in asked[:STREAMS]]
        at_first = server.sample()
        right = (await raw_client.stream(server.port, greedy(asked[-1], OTHER_TOKENS))).texts[0]
        other_client = _Other(server.port, greedy(asked[-1], OTHER_TOKENS), right)
        reading = [asyncio.create_task(_read_on(server.port, payload)) for payload in payloads]
        until = time.monotonic() + READ_S
        beside_readers = await other_client.run(lambda: time.monotonic() < until)
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        idle = [await server.idle(15)]
        before = server.sample()
        with contextlib.ExitStack() as stack:
            samples: list[Sample] = []
            watching = asyncio.create_task(server.watch(samples))
            begin = time.monotonic()
            ports = [_open_unread(stack, server.port, payload) for payload in payloads]
            while len(_connected(server, ports)) < STREAMS and time.monotonic() - begin < ACCEPTED_S:
                await asyncio.sleep(0.05)
            beside_unread = await other_client.run(
                lambda: bool(_connected(server, ports)) and time.monotonic() - begin < MOST_CUT_OFF_S
            )
            left, cut_off_s = _connected(server, ports), time.monotonic() - begin
            watching.cancel()
            idle.append(await server.idle(5))
            descriptors = await server.descriptors_back(before.descriptors)
        slower = percentile(beside_unread, 0.5) / percentile(beside_readers, 0.5)
        late = percentile(beside_unread, 0.99) / percentile(beside_readers, 0.99)
        peak = max(sample.rss for sample in samples)
        return [
            told("streams", f"{STREAMS} of {TEXTS} texts of {window - 128} tokens with 20 logprobs; limit "
                            f"{STALLED_MS / 1e3:g} s"),
            equal("connections that are not cut off", len(left), 0),
            told("until that was seen, texts waiting their turn included", f"{cut_off_s:.0f} s"),
            *idle,
            descriptors,
            told("another client, between tokens, p50 and p99",
                 f"{_shown(beside_readers)} beside clients that read, {_shown(beside_unread)} beside these"),
            at_most("how much longer p50 is", slower, MOST_TIMES_SLOWER, " times", 2),
            at_most("how much longer p99 is", late, MOST_TIMES_LATER, " times", 2),
            equal("its wrong texts", f"{other_client.wrong} of {other_client.texts}", f"0 of {other_client.texts}"),
            told("RSS at first, before them, most beside them",
                 ", ".join(f"{size / 2**20:.0f}" for size in (at_first.rss, before.rss, peak)) + " MiB"),
            at_most("most RSS over that at first", (peak - at_first.rss) / 2**20, MOST_MIB, " MiB"),
            *await server.end(),
        ]  # fmt: skip


class _Other:
    """A client that asks for one text after the other, and times the gaps between its tokens."""

    def __init__(self, port: int, payload: Any, right: str) -> None:
        self._port, self._payload, self._right = port, payload, right
        self.texts = self.wrong = 0

    async def run(self, goes_on: Callable[[], bool]) -> list[float]:
        gaps: list[float] = []
        while goes_on():
            reply = await raw_client.stream(self._port, self._payload)
            gaps += reply.gaps_s
            self.texts += 1
            self.wrong += not reply.whole or reply.texts[0] != self._right
        return gaps


def _shown(gaps: list[float]) -> str:
    return f"{1e3 * percentile(gaps, 0.5):.1f} and {1e3 * percentile(gaps, 0.99):.1f} ms ({len(gaps)} samples)"


async def _read_on(port: int, payload: Any) -> None:
    """Reads one stream after the other, and drops what it reads."""
    while True:
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            writer.write(raw_client.completion(payload))
            while await reader.read(1 << 16):
                pass
        finally:
            writer.close()


def _open_unread(stack: contextlib.ExitStack, port: int, payload: Any) -> int:
    """Sends a request from a socket with the smallest possible receive buffer, and returns the socket's port."""
    client = stack.enter_context(socket.socket())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    client.connect((HOST, port))
    client.sendall(raw_client.completion(payload))
    return int(client.getsockname()[1])


def _connected(server: ServerProcess, ports: list[int]) -> list[int]:
    """Returns those of the ports whose connection the server still has."""
    remote_ports = {connection.raddr.port for connection in server.process.net_connections("tcp") if connection.raddr}
    return [port for port in ports if port in remote_ports]

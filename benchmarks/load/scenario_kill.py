"""A server that is killed under load, and the server that replaces it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from typing import Any

from benchmarks.load import raw_client
from benchmarks.load.arrivals import prompts
from benchmarks.load.outcomes import Check, at_least, at_most, equal, told
from benchmarks.load.raw_client import BROKEN
from benchmarks.load.served import ServerProcess, Setting, greedy

CLIENTS = 16
MOST_NOTICED_S = 1.0
MOST_START_S = 30.0


async def kill(setting: Setting) -> list[Check]:
    """After SIGKILL with texts running and waiting, clients notice at once, and the port can be used again at once."""
    pieces = prompts(CLIENTS, 64, setting.seed)
    with ServerProcess(setting, "kill") as server:
        payload = greedy(pieces[0], 32)
        before = (await raw_client.complete(server.port, payload)).json()["choices"][0]["text"]
        tokens = await server.window() - 128
        noticed: list[float] = []
        running = [asyncio.create_task(_kind_of_end(server.port, greedy(prompt, tokens), noticed)) for prompt in pieces]
        await asyncio.sleep(1.5)
        server.signal(signal.SIGKILL)
        killed = time.perf_counter()
        code = await server.ended()
        kinds = Counter(await asyncio.gather(*running))
    again = ServerProcess(setting, "kill-again", port=server.port)
    await asyncio.to_thread(again.__enter__)
    try:
        after = (await raw_client.complete(server.port, payload)).json()["choices"][0]["text"]
        return [
            equal("exit code", code, -signal.SIGKILL),
            at_least("connections that broke", kinds["broken"], 1),
            equal("clients that hung", kinds["hung"], 0),
            equal("streams that looked whole and were not", kinds["whole"], 0),
            at_most("until the last client noticed", max(noticed) - killed, MOST_NOTICED_S, " s", 2),
            at_most("until the next server on the same port was ready", again.ready_s, MOST_START_S, " s", 1),
            equal("its text is the same", after == before, True),
            told("clients", f"{CLIENTS}, by how they ended: {dict(kinds)}"),
            *await again.end(),
        ]
    finally:
        again.__exit__()


async def _kind_of_end(port: int, payload: Any, noticed: list[float]) -> str:
    try:
        reply = await raw_client.stream(port, payload, 30)
    except TimeoutError:
        return "hung"
    except BROKEN:
        return "broken"
    finally:
        noticed.append(time.perf_counter())
    return "whole" if reply.whole else "cut"

"""A server that gets SIGTERM under load."""

from __future__ import annotations

import asyncio
import signal
import time

from benchmarks.load import raw_client
from benchmarks.load.arrivals import prompts
from benchmarks.load.outcomes import Check, at_most, equal, told
from benchmarks.load.raw_client import BROKEN, Streamed
from benchmarks.load.served import ServerProcess, Setting, greedy

MOST_SECOND_S = 1.0


async def drain(setting: Setting) -> list[Check]:
    """At a first signal, the server finishes accepted texts and refuses new ones. At a second, it ends at once."""
    return [*await _first(setting), *await _second(setting)]


async def _first(setting: Setting) -> list[Check]:
    with ServerProcess(setting, "drain") as server:
        rows, tokens = await server.rows(), await server.window() // 2
        running = await _loaded(server, rows, tokens, setting.seed)
        begin = time.perf_counter()
        server.signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        new = await raw_client.complete(server.port, greedy("def ", 4))
        ready = await raw_client.get(server.port, "/v2/health/ready")
        live = await raw_client.get(server.port, "/v2/health/live")
        unfinished = sum(not task.done() for task in running)
        streams = await asyncio.gather(*running)
        code = await server.ended()
        return [
            told("texts when SIGTERM came", f"{rows} running, {rows} waiting, {unfinished} unfinished 0.3 s later"),
            equal("texts that came whole", sum(reply.whole and reply.tokens == tokens for reply in streams), 2 * rows),
            equal("a new request, its Retry-After", f"{new.status}, {new.headers.get('retry-after')}", "503, 1"),
            equal("/v2/health/ready, /live", f"{ready.status}, {live.status}", "503, 200"),
            equal("exit code", code, 0),
            told("from the signal to the end", f"{time.perf_counter() - begin:.1f} s"),
            server.log_check(),
        ]


async def _second(setting: Setting) -> list[Check]:
    with ServerProcess(setting, "drain-second") as server:
        rows, tokens = await server.rows(), await server.window() // 2
        running = await _loaded(server, rows, tokens, setting.seed)
        server.signal(signal.SIGTERM)
        await asyncio.sleep(0.5)
        begin = time.perf_counter()
        server.signal(signal.SIGTERM)
        code = await server.ended()
        took = time.perf_counter() - begin
        results = await asyncio.gather(*running, return_exceptions=True)
        return [
            equal("exit code after a second SIGTERM", code, 143),
            at_most("from the second signal to the end", took, MOST_SECOND_S, " s", 2),
            equal("clients with no error", sum(not isinstance(result, BROKEN) for result in results), 0),
            server.log_check(),
        ]


async def _loaded(server: ServerProcess, rows: int, tokens: int, seed: int) -> list[asyncio.Task[Streamed]]:
    """Starts a stream for each row and as many that wait, and returns when the server has them all."""
    running = [
        asyncio.create_task(raw_client.stream(server.port, greedy(prompt, tokens)))
        for prompt in prompts(2 * rows, 64, seed)
    ]
    for _ in range(100):
        metrics = await server.metrics()
        if (metrics["mod_export_busy_rows"], metrics["mod_export_queue_depth"]) == (rows, rows):
            return running
        await asyncio.sleep(0.02)
    raise RuntimeError(f"expected {rows} texts that run and {rows} that wait, got {metrics}")

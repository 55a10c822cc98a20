"""A supervised server whose engines crash again and again under load."""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections import Counter

import psutil

from benchmarks.load import raw_client
from benchmarks.load.arrivals import poisson_times, prompts
from benchmarks.load.outcomes import Check, at_least, at_most, equal, told
from benchmarks.load.served import ServerProcess, Setting, greedy
from benchmarks.load.sustained import open_loop, wrong_texts

CRASHES = 6
PAUSE_S = 4.0
"""Seconds of service between two crashes."""
RATE = 8.0
"""Requests a second."""
PROMPTS, TOKENS = 8, 64
MOST_BACK_S = 30.0


async def crash(setting: Setting) -> list[Check]:
    """Every request is answered: with its whole text, or with 503 while the next worker starts."""
    payloads = [greedy(prompt, TOKENS) for prompt in prompts(PROMPTS, 64, setting.seed)]
    with ServerProcess(setting, "crash", ["--supervise"]) as server:
        answers = [await raw_client.complete(server.port, payload) for payload in payloads]
        right = dict(enumerate(answer.json()["choices"][0]["text"] for answer in answers))
        before = server.sample()
        times = poisson_times(RATE, CRASHES * PAUSE_S, setting.seed)
        load = asyncio.create_task(open_loop(server.port, payloads, times))
        back = [await _crash_and_wait(server) for _ in range(CRASHES)]
        answered = await load
        statuses = Counter(each.status for each in answered)
        refused = [each for each in answered if each.status == 503]
        restarts = (await server.metrics())["mod_export_engine_restarts_total"]
        left = await server.descriptors_back(before.descriptors)
        server.signal(signal.SIGTERM)
        return [
            equal("restarts", int(restarts), CRASHES),
            equal("broken connections and requests without an answer", statuses[0], 0),
            equal("other statuses than 200 and 503", sorted(statuses.keys() - {0, 200, 503}), []),
            at_least("texts", statuses[200], 1),
            at_least("requests that got 503", statuses[503], 1),
            equal("of them without Retry-After", sum(each.retry_after is None for each in refused), 0),
            equal("texts that differ", wrong_texts(answered, right), 0),
            at_most("until the next worker was ready, longest", max(back), MOST_BACK_S, " s", 1),
            at_most("until an answer, longest", max(each.seconds for each in answered), MOST_BACK_S, " s", 1),
            told("requests", f"{len(answered)} in {CRASHES * PAUSE_S:.0f} s"),
            left,
            equal("exit code after SIGTERM", await server.ended(), 0),
        ]


async def _crash_and_wait(server: ServerProcess) -> float:
    """Lets the engines crash after a while; returns the seconds until others can serve."""
    await asyncio.sleep(PAUSE_S)
    (worker,) = (child for child in server.process.children() if "spawn_main" in " ".join(child.cmdline()))
    worker.send_signal(signal.SIGSEGV)
    psutil.wait_procs([worker], timeout=MOST_BACK_S)
    begin = time.perf_counter()
    while (await raw_client.get(server.port, "/health/ready")).status != 200:
        if time.perf_counter() - begin > MOST_BACK_S:
            return math.inf
        await asyncio.sleep(0.05)
    return time.perf_counter() - begin

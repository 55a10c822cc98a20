"""Four times as many requests as the server can answer."""

from __future__ import annotations

import asyncio
import time
from statistics import median
from typing import Any

from benchmarks.load import raw_client
from benchmarks.load.arrivals import percentile, poisson_times, prompts, spread
from benchmarks.load.outcomes import Check, at_least, at_most, equal, told
from benchmarks.load.served import ServerProcess, Setting, greedy
from benchmarks.load.sustained import WARM_S, capacity, open_loop, rate, wrong_texts

TOKENS = 128
MEASURE_S = 8.0
LOAD_S = 10.0
ROUNDS = 3
TIMES = 4
MOST_REFUSAL_MS = 100.0
LEAST_GOODPUT = 0.9
NORMAL_AGAIN_S = 5.0
PAUSE_S = 0.1


async def overload(setting: Setting) -> list[Check]:
    """Refusals come at once, accepted texts are written at full speed, and afterwards the server is as fast as before.

    Capacity is measured before and after each load, because other programs may start and end during the scenario.
    """
    payloads = [greedy(prompt, TOKENS) for prompt in prompts(16, 64, setting.seed)]
    with ServerProcess(setting, "overload") as server:
        rows = await server.rows()
        alone = [(await raw_client.complete(server.port, payloads[0])).seconds for _ in range(9)]
        right = {}
        for number, payload in enumerate(payloads):
            right[number] = (await raw_client.complete(server.port, payload)).json()["choices"][0]["text"]
        capacities = [await capacity(server.port, payloads, rows, MEASURE_S)]
        answers, goodputs, again = [], [], []
        for number in range(ROUNDS):
            times = poisson_times(TIMES * capacities[-1][0], LOAD_S, setting.seed + number)
            begin = time.perf_counter()
            loading = asyncio.create_task(open_loop(server.port, payloads, times))
            await asyncio.sleep(LOAD_S - (time.perf_counter() - begin))
            again.append(await _normal_after(server.port, payloads[0], 1.5 * median(alone) + 0.05))
            answers += (round_answers := await loading)
            goodputs.append(rate(round_answers, WARM_S, LOAD_S)[1])
            capacities.append(await capacity(server.port, payloads, rows, MEASURE_S))
        tokens_s = [measured[1] for measured in capacities]
        shares = [2 * goodputs[number] / (tokens_s[number] + tokens_s[number + 1]) for number in range(ROUNDS)]
        refused = [reply for reply in answers if reply.status == 429]
        late_ms = percentile([1e3 * reply.seconds for reply in refused], 0.99)
        return [
            told(f"capacity in tokens/s ({TOKENS} of each request)", spread(tokens_s, 0)),
            told("offered, refused",
                 f"{len(answers) / ROUNDS / LOAD_S:.0f} requests/s, {len(refused) / len(answers):.0%}"),
            equal("answers that are neither 200 nor 429", sum(reply.status not in (200, 429) for reply in answers), 0),
            equal("refusals without Retry-After in seconds",
                  sum(not (reply.retry_after or "").isdigit() for reply in refused), 0),
            at_least("refusals", len(refused), 1),
            at_most("refusal p99", late_ms, MOST_REFUSAL_MS, " ms"),
            told(f"goodput over capacity, {ROUNDS} rounds", spread(shares)),
            at_least("its median", median(shares), LEAST_GOODPUT, digits=2),
            at_most(f"alone {1e3 * median(alone):.0f} ms; as fast again after the load, median", median(again),
                    NORMAL_AGAIN_S, " s", 1),
            equal("wrong texts", wrong_texts(answers, right), 0),
            await server.idle(5),
            *await server.end(),
        ]  # fmt: skip


async def _normal_after(port: int, payload: Any, normal_s: float) -> float:
    """Returns the seconds until a new request takes at most `normal_s`; infinity after 3 * NORMAL_AGAIN_S."""
    since = time.perf_counter()
    while (passed := time.perf_counter() - since) < 3 * NORMAL_AGAIN_S:
        reply = await raw_client.complete(port, payload)
        if reply.status == 200 and reply.seconds <= normal_s:
            return passed + reply.seconds
        await asyncio.sleep(PAUSE_S)
    return float("inf")

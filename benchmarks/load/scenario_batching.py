"""Eight clients at once, compared with the same requests one after the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import openai

from benchmarks.load.arrivals import prompts, spread
from benchmarks.load.outcomes import Check, at_least, equal, told
from benchmarks.load.raw_client import ANSWER_S, HOST
from benchmarks.load.served import ServerProcess, Setting, greedy

CLIENTS = 8
TOKENS = 128
ROUNDS = 7
LEAST_FACTOR = 2.0
"""Least speed-up (median) of eight clients at once over one after the other, both on an engine of eight rows."""


async def batching(setting: Setting) -> list[Check]:
    """Measures tokens a second of all ways, which take turns, and whether a text depends on the texts beside it."""
    asked = prompts(CLIENTS, 64, setting.seed)
    with (
        ServerProcess(setting, "batching") as eight,
        ServerProcess(setting, "batching-1", ("--rows", "1")) as single_row,
    ):
        many, single = client_of(eight), client_of(single_row)
        ways: dict[str, Callable[[], Awaitable[list[str]]]] = {
            "together": lambda: together(many, asked),
            "in turn": lambda: in_turn(many, asked),
            "in turn, one row": lambda: in_turn(single, asked),
        }
        speeds: dict[str, list[float]] = {way: [] for way in ways}
        texts: dict[str, list[str]] = {}
        equal_rounds = 0
        for _ in range(ROUNDS):
            for way, run in ways.items():
                begin = time.perf_counter()
                texts[way] = await run()
                speeds[way].append(CLIENTS * TOKENS / (time.perf_counter() - begin))
            equal_rounds += texts["together"] == texts["in turn"]
        same = sum(a == b for a, b in zip(texts["in turn"], texts["in turn, one row"], strict=True))
        factor, over_one = (
            [a / b for a, b in zip(speeds["together"], speeds[way], strict=True)]
            for way in ("in turn", "in turn, one row")
        )
        checks = [told(f"tokens/s, {way}", spread(rates, 0)) for way, rates in speeds.items()]
        checks += [
            told(f"factor of {CLIENTS} at once, median of {ROUNDS} (least to most)", spread(factor)),
            at_least("that factor, median", sorted(factor)[ROUNDS // 2], LEAST_FACTOR, digits=2),
            told("the same over an engine of one row", spread(over_one)),
            equal("rounds with equal texts", equal_rounds, ROUNDS),
            told("texts that an engine of one row writes alike", f"{same} of {CLIENTS}"),
        ]
        await asyncio.gather(many.close(), single.close())
        return [*checks, *await eight.end(), *await single_row.end()]


def client_of(server: ServerProcess) -> openai.AsyncOpenAI:
    """OpenAI's own client. It must not retry, because that would hide a failure."""
    return openai.AsyncOpenAI(
        base_url=f"http://{HOST}:{server.port}/v1", api_key="none", max_retries=0, timeout=ANSWER_S
    )


async def written(client: openai.AsyncOpenAI, prompt: str) -> str:
    asked = dict(greedy(prompt, TOKENS))
    more = {"ignore_eos": asked.pop("ignore_eos")}
    completion = await client.completions.create(model=None, extra_body=more, **asked)
    return str(completion.choices[0].text)


async def together(client: openai.AsyncOpenAI, asked: list[str]) -> list[str]:
    return list(await asyncio.gather(*(written(client, prompt) for prompt in asked)))


async def in_turn(client: openai.AsyncOpenAI, asked: list[str]) -> list[str]:
    return [await written(client, prompt) for prompt in asked]

"""Requests that begin alike, with and without the prefix cache, which must give the same texts in less time."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import openai

from benchmarks.load.arrivals import prompts, spread
from benchmarks.load.outcomes import Check, at_least, equal, told
from benchmarks.load.scenario_batching import client_of
from benchmarks.load.served import ServerProcess, Setting

ROUNDS = 5
CHOICES = 4
CONTEXT, ENDING = 400, 8
"""Characters of a context that is scored with several endings, as evaluations do, and of an ending."""
TURNS, TURN, ANSWER = 10, 40, 32
"""Turns of a conversation, characters of each question, and tokens of each answer."""
LEAST_FACTOR = 2.0
"""Least speed-up (median) of scoring the endings of one context."""

Way = Callable[[openai.AsyncOpenAI, int], Awaitable[list[Any]]]


async def prefix(setting: Setting) -> list[Check]:
    """Measures three kinds of requests at two servers, which take turns. Both write in one row of one engine."""
    rows = ("--rows", "1")
    with (
        ServerProcess(setting, "prefix", rows) as kept,
        ServerProcess(setting, "prefix-0", (*rows, "--prefix-cache", "0")) as plain,
    ):
        clients = {"kept": client_of(kept), "plain": client_of(plain)}
        checks: list[Check] = []
        for what, way in WAYS.items():
            seconds: dict[str, list[float]] = {name: [] for name in clients}
            same = 0
            for round_number in range(ROUNDS):
                got = {}
                for name, client in clients.items():
                    begin = time.perf_counter()
                    got[name] = await way(client, setting.seed + round_number)
                    seconds[name].append(time.perf_counter() - begin)
                same += got["kept"] == got["plain"]
            factor = [without / with_ for without, with_ in zip(seconds["plain"], seconds["kept"], strict=True)]
            checks += [
                told(f"{what}: seconds without", spread(seconds["plain"])),
                told(f"{what}: times as fast with what was read before, median (least to most)", spread(factor)),
                equal(f"{what}: rounds with equal texts and log probabilities", same, ROUNDS),
            ]
            if way is scored:
                checks.append(at_least(f"{what}: that factor", sorted(factor)[ROUNDS // 2], LEAST_FACTOR, digits=2))
        for client in clients.values():
            await client.close()
        return [*checks, *await kept.end(), *await plain.end()]


async def scored(client: openai.AsyncOpenAI, seed: int) -> list[Any]:
    """Scores the endings of one context, one request each."""
    context, *endings = prompts(CHOICES + 1, CONTEXT, seed)
    logprobs = []
    for ending in endings:
        answer = await client.completions.create(
            model=None, prompt=context + ending[:ENDING], max_tokens=1, echo=True, logprobs=1, temperature=0
        )
        logprobs.append(answer.choices[0].logprobs)
    return logprobs


async def chosen(client: openai.AsyncOpenAI, seed: int) -> list[Any]:
    """Writes several short texts after one prompt."""
    (prompt,) = prompts(1, CONTEXT, seed)
    answer = await client.completions.create(model=None, prompt=prompt, max_tokens=4, n=CHOICES, seed=seed)
    return [choice.text for choice in answer.choices]


async def talked(client: openai.AsyncOpenAI, seed: int) -> list[Any]:
    """Holds a conversation: every turn begins with all turns before it."""
    history, answers = "", []
    for question in prompts(TURNS, TURN, seed):
        history += question
        more = {"ignore_eos": True}
        answer = await client.completions.create(
            model=None, prompt=history, max_tokens=ANSWER, temperature=0, extra_body=more
        )
        history += answer.choices[0].text
        answers.append(answer.choices[0].text)
    return answers


WAYS: dict[str, Way] = {
    f"{CHOICES} endings of a context of {CONTEXT} tokens": scored,
    f"{CHOICES} choices of a prompt of {CONTEXT} tokens": chosen,
    f"{TURNS} turns of {TURN} tokens and answers of {ANSWER}": talked,
}

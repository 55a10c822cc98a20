"""Thousands of malformed requests."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from benchmarks.load import raw_client
from benchmarks.load.arrivals import prompts
from benchmarks.load.malformed import Case, cases, problem
from benchmarks.load.outcomes import Check, at_most, equal, holds, told
from benchmarks.load.raw_client import BROKEN, Reply
from benchmarks.load.served import ServerProcess, Setting, greedy

CASES = 6000
AT_ONCE = 8
ANSWER_S = 20.0
PROBE_EVERY = 200
HUGE = 9 << 20
LIBRARY = ("400", "405", "431", "closed")
"""Statuses with which the HTTP library may refuse a request; it may also close the connection."""
MOST_MIB = 128
"""Allowed growth of RSS. Each of a few threads that read requests keeps the memory of its largest request."""
BESIDE_HTTP: dict[str, bytes] = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50),
    "no method": b"BREW / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "no version": b"GET / HTTP/x\r\n\r\n",
    "a length that is no number": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n{}",
    "a length below 0": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n{}",
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a chunk that is no number": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                                 b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "a header of a megabyte": b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * (1 << 20) + b"\r\n\r\n",
    "a header without a colon": b"GET / HTTP/1.1\r\nHost: x\r\nX y\r\n\r\n",
}  # fmt: skip
"""Requests that the HTTP library itself refuses, with an answer in no API's shape or by closing the connection."""


async def fuzz(setting: Setting) -> list[Check]:
    """The server refuses them all in the shape of the API, and works afterwards as before."""
    rng = random.Random(setting.seed)
    with ServerProcess(setting, "fuzz") as server:
        rows = await server.rows()
        name = (await raw_client.get(server.port, "/v1/models")).json()["data"][0]["id"]
        payload = greedy("def main(", 16)
        right = (await raw_client.complete(server.port, payload)).body.split(b'"choices"')[1]
        before = server.sample()
        tally = _Found()
        rss = []
        waiting = asyncio.create_task(_half_a_body(server.port))
        sent = cases(rng, CASES, name)
        for begin in range(0, CASES, PROBE_EVERY):
            await _send_all(server.port, sent[begin : begin + PROBE_EVERY], tally)
            reply = await raw_client.complete(server.port, payload)
            rss.append(server.sample().rss)
            tally.wrong += reply.status != 200 or reply.body.split(b'"choices"')[1] != right
        huge = [await _huge(server.port, path) for path in ("/v1/completions", f"/v2/models/{name}/infer")]
        library = {what: await _status(server.port, wrong) for what, wrong in BESIDE_HTTP.items()}
        prompted = [greedy(prompt, 16) for prompt in prompts(rows, 64, setting.seed)]
        again = await asyncio.gather(*(raw_client.complete(server.port, payload) for payload in prompted))
        first = tally.problems[0] if tally.problems else ""
        return [
            told("requests, seed", f"{CASES}, {setting.seed}"),
            told("by status", ", ".join(f"{status}: {count}" for status, count in sorted(tally.statuses.items()))),
            holds("answers that are not as they should be", not tally.problems,
                  f"{len(tally.problems)}; {dict(tally.kinds)}; {first}" if first else "0", "0"),
            equal("right texts between them that were wrong", tally.wrong, 0),
            # The server closes the connection with data unread, which may happen before the client has the answer.
            holds("bodies that are too large", set(huge) <= {"413", "closed"}, ", ".join(huge), "413, or closed"),
            equal("half a body, and nothing after it", await waiting, "408"),
            holds("what the HTTP library refuses", all(status in LIBRARY for status in library.values()),
                  ", ".join(f"{what}: {status}" for what, status in library.items()), "a refusal, or closed"),
            await server.idle(5),
            equal(f"{rows} at once afterwards", [reply.status for reply in again].count(200), rows),
            await server.descriptors_back(before.descriptors),
            told("RSS before, in the middle, at the end",
                 ", ".join(f"{size / 2**20:.0f}" for size in (before.rss, rss[len(rss) // 2], rss[-1])) + " MiB"),
            at_most("most RSS over that before", (max(rss) - before.rss) / 2**20, MOST_MIB, " MiB"),
            *await server.end(),
        ]  # fmt: skip


class _Found:
    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.kinds: Counter[str] = Counter()
        self.problems: list[str] = []
        self.wrong = 0


async def _send_all(port: int, sent: list[Case], tally: _Found) -> None:
    async def client(mine: list[Case]) -> None:
        for case in mine:
            try:
                reply = await raw_client.exchange(port, case.sent, ANSWER_S)
                tally.statuses[reply.status] += 1
                wrong = problem(case, reply)
            except BROKEN as error:
                wrong = f"no answer: {type(error).__name__}"
            if wrong:
                tally.kinds[case.kind] += 1
                tally.problems.append(f"{case.kind}, {case.path[:60]}: {wrong}: {case.sent[-200:]!r}")

    await asyncio.gather(*(client(sent[number::AT_ONCE]) for number in range(AT_ONCE)))


async def _huge(port: int, path: str) -> str:
    """Sends a body that is larger than the limit, and reads the answer meanwhile."""
    return await _status(port, raw_client.request_bytes("POST", path, b'"' + b"a" * HUGE))


async def _half_a_body(port: int) -> str:
    """Sends a request without the rest of its body. The server must not wait for it forever."""
    head = raw_client.request_bytes("POST", "/v1/completions", b"", {"Content-Length": "100"})
    return await _status(port, head + b'{"prompt": ', 45)


async def _status(port: int, sent: bytes, within_s: float = ANSWER_S) -> str:
    try:
        reply: Reply = await raw_client.exchange(port, sent, within_s)
    except TimeoutError:
        return f"nothing within {within_s:g} s"
    except BROKEN:
        return "closed"
    return str(reply.status)

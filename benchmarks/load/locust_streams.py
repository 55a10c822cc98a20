"""Load by locust, in its own environment: reads a plan from a file, streams completions, writes results to a file.

    LOAD_PLAN=plan.json LOAD_RESULTS=results.json locust -f locust_streams.py --headless --users 1 --host http://127.0.0.1:N

The plan has `payloads`, `seconds`, and either `times`, at which requests are sent without waiting for earlier answers,
or `clients`, each of which sends its next request after the answer to the previous one. Locust's own users wait for
their answer, so arrivals at given times are greenlets of one user.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import time
from array import array
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import gevent
from locust import User, task

from benchmarks.load.arrivals import percentiles

ANSWER_S = 60.0
MOST_ERRORS = 20


class Client(User):
    """The only user, which sends all requests."""

    @task
    def follow(self) -> None:
        """Follows the plan, writes the results, and ends the run."""
        plan = json.loads(Path(os.environ["LOAD_PLAN"]).read_text(encoding="utf-8"))
        load = Load(self.environment, urlsplit(self.host).netloc, plan["payloads"])
        begin = time.perf_counter()
        if "times" in plan:
            running = []
            for number, at in enumerate(plan["times"]):
                gevent.sleep(max(0.0, at - (time.perf_counter() - begin)))
                running.append(gevent.spawn(load.one, number))
            gevent.joinall(running)
        else:
            gevent.joinall([gevent.spawn(_closed, load, number, plan, begin) for number in range(plan["clients"])])
        results = load.results(begin, plan["seconds"], plan.get("warm_s", 0.0))
        Path(os.environ["LOAD_RESULTS"]).write_text(json.dumps(results), encoding="utf-8")
        self.environment.runner.quit()


def _closed(load: Load, number: int, plan: dict[str, Any], begin: float) -> None:
    while time.perf_counter() - begin < plan["seconds"]:
        load.one(number)
        number += plan["clients"]


class Load:
    """Sends requests, and keeps their results."""

    def __init__(self, environment: Any, address: str, payloads: list[dict[str, Any]]) -> None:
        self._environment, self._address = environment, address
        self._bodies = [
            json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
            for body in payloads
        ]
        self._first_s, self._gaps_s, self._whole_s, self._ended = (array("d") for _ in range(4))
        self._tokens = 0
        self._texts: list[set[str]] = [set() for _ in payloads]
        self._errors: list[str] = []
        self._sent = 0

    def one(self, number: int) -> None:
        """Sends one request and reports it to locust as well."""
        begin = time.perf_counter()
        self._sent += 1
        error = None
        try:
            self._stream(number % len(self._bodies), begin)
        except Exception as problem:  # Any exception makes it a failed request.
            error = problem
            self._errors.append(f"{type(problem).__name__}: {problem}"[:200])
        self._environment.events.request.fire(
            request_type="POST", name="/v1/completions", response_time=1e3 * (time.perf_counter() - begin),
            response_length=0, exception=error, context={},
        )  # fmt: skip

    def _stream(self, payload: int, begin: float) -> None:
        connection = http.client.HTTPConnection(self._address, timeout=ANSWER_S)
        try:
            connection.request(
                "POST", "/v1/completions", self._bodies[payload],
                {"Content-Type": "application/json", "Connection": "close"},
            )  # fmt: skip
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {response.read()[:100]!r}")
            pieces, last = [], begin
            while piece := response.read1(1 << 16):
                pieces.append(piece)
                now = time.perf_counter()
                # The last pieces have the number of tokens and no text.
                if b'"usage": {' not in piece and b"[DONE]" not in piece:
                    (self._first_s if last == begin else self._gaps_s).append(now - last)
                    last = now
        finally:
            connection.close()
        # Parsed only at the end, so that the client spends little time while other answers arrive.
        *lines, done = [line.removeprefix(b"data: ") for line in b"".join(pieces).split(b"\n\n") if line]
        chunks = [json.loads(line) for line in lines]
        if done != b"[DONE]" or any("error" in chunk for chunk in chunks):
            raise RuntimeError(f"a stream that is not whole: {(lines or [done])[-1][:100]!r}")
        self._tokens += chunks[-1]["usage"]["completion_tokens"]
        text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        self._texts[payload].add(hashlib.sha256(text.encode()).hexdigest())
        now = time.perf_counter()
        self._whole_s.append(now - begin)
        self._ended.append(now)

    def results(self, begin: float, seconds: float, warm_s: float) -> dict[str, Any]:
        """Returns the results of all requests. The rate covers the time after the first `warm_s` seconds."""
        inside = sum(warm_s <= ended - begin <= seconds for ended in self._ended)
        return {
            "sent": self._sent,
            "whole": len(self._whole_s),
            "tokens": self._tokens,
            "requests_s": inside / (seconds - warm_s),
            "errors": self._errors[:MOST_ERRORS],
            "failed": len(self._errors),
            "prompts_with_several_texts": sum(len(texts) > 1 for texts in self._texts),
            "first_s": percentiles(self._first_s),
            "between_s": percentiles(self._gaps_s),
            "whole_s": percentiles(self._whole_s),
        }

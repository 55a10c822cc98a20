"""Starts a server in its own process, watches it from outside, and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import psutil

from benchmarks.load import raw_client
from benchmarks.load.outcomes import Check, equal, holds

HERE = Path(__file__).parent
START_S = 60.0
END_S = 45.0
WATCH_S = 1.0
SAMPLE = re.compile(r"^(\w+(?:\{[^}]*\})?) (\S+)$", re.MULTILINE)
BANNER_LINES = 2


CORES = sorted(os.sched_getaffinity(0))
ON_ITS_CORES = ["taskset", "--cpu-list", ",".join(map(str, CORES[:-1]))] if len(CORES) > 1 else []
"""Command prefix that gives a server, and its engine threads, all cores but the last, which its clients have."""


@dataclass(frozen=True)
class Setting:
    """Settings of all scenarios.

    Attributes:
        folder: a build folder that writes text.
        results: folder of the logs.
        seed: seed of everything random.
        steady_s: seconds of load in the scenario `steady`.
        locust: path of the locust program, which has its own environment.
    """

    folder: Path
    results: Path
    seed: int
    steady_s: float
    locust: Path


class Sample(NamedTuple):
    """Resources of a process: RSS in bytes, open descriptors, threads."""

    rss: int
    descriptors: int
    threads: int


class ServerProcess:
    """A server that runs as long as the `with` block.

    Attributes:
        port: port of 127.0.0.1 that the server listens at.
        process: the server's process, to be watched.
    """

    def __init__(
        self,
        setting: Setting,
        name: str,
        options: Sequence[str] = (),
        *,
        port: int | None = None,
        stalled_ms: int | None = None,
    ) -> None:
        """`name` names the log. The server cuts off clients that read nothing for `stalled_ms` milliseconds."""
        self.port = free_port() if port is None else port
        folder = str(setting.folder.resolve())
        if stalled_ms is None:
            program = str(Path(sys.executable).with_name("mod-export"))
            self._command = [program, "serve", folder, "--port", str(self.port), *options]
        else:
            self._command = [sys.executable, str(HERE / "start_server.py"), folder, str(self.port), str(stalled_ms)]
        self._log = setting.results / "logs" / f"{name}.txt"
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self.ready_s = 0.0

    def __enter__(self) -> Self:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._output = self._log.open("wb")
        begin = time.monotonic()
        # A new session, so that Ctrl-C reaches only the scripts, which then end the server themselves.
        self._process = subprocess.Popen(
            [*ON_ITS_CORES, *self._command], stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while not self._answers():
                if self._process.poll() is not None or time.monotonic() - begin > START_S:
                    raise RuntimeError(f"the server did not start: {self._log.read_text(errors='replace')[-500:]}")
                time.sleep(0.05)
        except BaseException:
            self.__exit__()
            raise
        self.ready_s = time.monotonic() - begin
        self.process = psutil.Process(self._process.pid)
        return self

    def __exit__(self, *exc: object) -> None:
        """Ends the server at once if the scenario has not ended it."""
        assert self._process is not None
        assert self._output is not None
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._output.close()

    def _answers(self) -> bool:
        try:
            with contextlib.closing(http.client.HTTPConnection(raw_client.HOST, self.port, timeout=5)) as connection:
                connection.request("GET", "/v2/health/ready")
                return connection.getresponse().status == 200
        except OSError:
            return False

    def sample(self) -> Sample:
        """Returns the current memory, descriptors and threads."""
        with self.process.oneshot():
            return Sample(self.process.memory_info().rss, self.process.num_fds(), self.process.num_threads())

    async def watch(self, into: list[Sample]) -> None:
        """Appends a sample each second until it is cancelled."""
        while True:
            into.append(self.sample())
            await asyncio.sleep(WATCH_S)

    async def metrics(self) -> dict[str, float]:
        """Returns all of /metrics: name with labels -> value."""
        return parse_metrics((await raw_client.get(self.port, "/metrics")).body.decode())

    async def window(self) -> int:
        """Returns the number of tokens of the longest possible text."""
        listed = (await raw_client.get(self.port, "/v1/models")).json()
        return int(listed["data"][0]["max_model_len"])

    async def rows(self) -> int:
        """Returns the number of texts that the server writes at once."""
        return int((await self.metrics())["mod_export_rows"])

    async def idle(self, within_s: float) -> Check:
        """Checks that no text runs or waits any more, at the latest after `within_s`."""
        end = time.monotonic() + within_s
        while True:
            metrics = await self.metrics()
            left = metrics["mod_export_busy_rows"], metrics["mod_export_queue_depth"]
            if left == (0, 0) or time.monotonic() > end:
                return equal("busy_rows, queue_depth afterwards", f"{left[0]:.0f}, {left[1]:.0f}", "0, 0")
            await asyncio.sleep(0.1)

    async def descriptors_back(self, before: int, within_s: float = 15.0) -> Check:
        """Checks that no descriptor is left over. Waits, because connections close a little after their answers."""
        end = time.monotonic() + within_s
        while (left := self.sample().descriptors - before) > 0 and time.monotonic() < end:
            await asyncio.sleep(0.2)
        return holds("descriptors left over", left <= 0, str(max(0, left)), "0")

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the server only."""
        assert self._process is not None
        self._process.send_signal(number)

    async def ended(self, within_s: float = END_S) -> int | None:
        """Waits for the server to end. Returns its exit code, or None if it still runs after `within_s`."""
        assert self._process is not None
        try:
            return await asyncio.to_thread(self._process.wait, within_s)
        except subprocess.TimeoutExpired:
            return None

    async def end(self) -> list[Check]:
        """Sends SIGTERM, and checks the exit code and the log."""
        self.signal(signal.SIGTERM)
        return [equal("exit code after SIGTERM", await self.ended(), 0), self.log_check()]

    def log_check(self) -> Check:
        """Checks that nothing follows the first lines of the log, which tell the address of the server."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        odd = [line for line in lines[BANNER_LINES:] if line.strip()]
        return holds("lines in the log", not odd, f"{len(odd)}: {odd[-1][:120]}" if odd else "none", "none")


def free_port() -> int:
    """Returns a port that no process listens at."""
    with socket.create_server((raw_client.HOST, 0)) as listener:
        return int(listener.getsockname()[1])


def parse_metrics(text: str) -> dict[str, float]:
    """Parses Prometheus' text format."""
    return {name: float(value) for name, value in SAMPLE.findall(text)}


def greedy(prompt: str, tokens: int, **more: Any) -> Mapping[str, Any]:
    """A request whose text is the same every time and has exactly `tokens` tokens."""
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def keep_clients_apart() -> None:
    """Moves this process and the programs that it starts to the last core; servers have the others."""
    if ON_ITS_CORES:
        os.sched_setaffinity(0, CORES[-1:])


def machine_line() -> str:
    """Text about the cores that the numbers were measured on."""
    if ON_ITS_CORES:
        return f"the server on {len(CORES) - 1} logical core(s), its clients on another one"
    return "one logical core, which the server and its clients share, so the clients take time from the server"

"""Servers of build folders inside this process and in one of their own, and requests whose events can be waited for."""

from __future__ import annotations

import contextlib
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import uvicorn

from mod_export.runtime.generator import Generator
from mod_export.runtime.rows import Completion
from mod_export.serve import KEEP_ALIVE_S
from mod_export.serve.app import create_app
from mod_export.serve.connection import Connection
from mod_export.serve.scheduler import Ended, Event, Failed, Job, Scheduler
from mod_export.serve.service import Service, ServiceOptions, open_service

PATIENCE_S = 60
SLOW_STEPS = """
import time
from mod_export.runtime.decoder import Decoder
step = Decoder.step
def slow(self, *arguments):
    time.sleep({seconds})
    return step(self, *arguments)
Decoder.step = slow
"""
"""Slows the tiny model down, so that a signal comes in the middle of a text."""


@dataclass
class Events:
    """Keeps the events of a scheduler."""

    found: queue.Queue[Event] = field(default_factory=queue.Queue)
    job: Job | None = None

    def tell(self, event: Event) -> None:
        self.found.put(event)

    def next(self) -> Event:
        return self.found.get(timeout=PATIENCE_S)

    def completions(self) -> dict[int, Completion]:
        """Waits until all texts of the job have ended; returns their completions."""
        assert self.job is not None
        found: dict[int, Completion] = {}
        while len(found) < len(self.job.texts):
            event = self.next()
            assert not isinstance(event, Failed), event
            if isinstance(event, Ended):
                assert event.row not in found
                found[event.row] = event.completion
        return found

    def failure(self) -> Exception:
        while True:
            event = self.next()
            if isinstance(event, Failed):
                return event.error


def submitted(scheduler: Scheduler, generator: Generator, prompts: Any, tokens: int = 8, **options: Any) -> Events:
    """Submits a request and keeps its events."""
    events = Events()
    events.job = scheduler.submit(generator.texts(prompts, tokens, **options), events.tell)
    return events


class Held(Events):
    """Stops the scheduler's thread at the first event until `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go = threading.Event(), threading.Event()

    def tell(self, event: Event) -> None:
        super().tell(event)
        self.reached.set()
        assert self.go.wait(PATIENCE_S)


@contextlib.contextmanager
def held(scheduler: Scheduler, generator: Generator, prompts: Any, tokens: int = 8, **options: Any) -> Iterator[Held]:
    """Keeps the thread busy with a request during the block."""
    events = Held()
    events.job = scheduler.submit(generator.texts(prompts, tokens, **options), events.tell)
    assert events.reached.wait(PATIENCE_S)
    try:
        yield events
    finally:
        events.go.set()


@dataclass(frozen=True)
class Server:
    """A server that accepts requests."""

    url: str
    port: int
    service: Service

    @property
    def writing(self) -> Scheduler:
        """Scheduler of a folder that writes text."""
        assert isinstance(self.service.writing, Scheduler)
        return self.service.writing


@contextlib.contextmanager
def serving(
    folder: Path,
    keys: Sequence[str] = (),
    hosts: Sequence[str] | None = None,
    origins: Sequence[str] = (),
    keep_alive_s: float = KEEP_ALIVE_S,
    **options: Any,
) -> Iterator[Server]:
    """Serves a build folder on a thread of this process."""
    with open_service(folder, ServiceOptions(**options)) as service, socket.create_server(("127.0.0.1", 0)) as listener:
        app = create_app(service, keys, hosts, origins)
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            log_level="warning",
            lifespan="off",
            timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]
        )
        server = uvicorn.Server(config)

        def run() -> None:
            with listener:  # Clients of a server that has ended must not wait for it.
                server.run(sockets=[listener])

        thread = threading.Thread(target=run)
        port = listener.getsockname()[1]
        thread.start()
        try:
            yield Server(f"http://127.0.0.1:{port}", port, service)
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)


@contextlib.contextmanager
def command(folder: Path, *options: object, code: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Runs `mod-export serve`; yields the process and its address."""
    script = f"{code}\nfrom mod_export.cli import main\nmain()"
    listed = [sys.executable, "-c", script, "serve", str(folder), "--port", "0", *map(str, options)]
    process = subprocess.Popen(listed, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    output = ""
    for line in process.stderr:
        output += line
        if found := re.search(r"http://\S+:\d+", line):
            break
    assert found, output
    try:
        yield process, found[0]
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        process.stderr.close()


def metric(url: str, name: str) -> float:
    """Reads the sum of a metric's values."""
    lines = httpx2.get(f"{url}/metrics", timeout=PATIENCE_S).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"mod_export_{name}"))


def until(condition: Callable[[], bool]) -> None:
    """Waits until something is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


def received(connection: socket.socket, *, head: bool = False) -> bytes:
    """The whole next answer, which may come in several pieces; what there is of it if the server hangs up."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        while not _complete(answer, head=head) and (piece := connection.recv(1 << 16)):
            answer += piece
    return answer


def _complete(answer: bytes, *, head: bool) -> bool:
    top, ended, body = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").partition(b"\r\n\r\n")
    if not ended:
        return False
    length = re.search(rb"(?i)content-length: (\d+)", top)
    return head or (len(body) >= int(length[1]) if length else body.endswith(b"0\r\n\r\n") or b" 204 " in top)

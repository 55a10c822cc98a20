"""A worker that crashes behind its supervisor: every request is answered, and another worker starts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from build_folders import flip, rewrite_manifest
from command_line import invoke, refused
from ending_workers import crash, cut_an_event, leave
from serving import PATIENCE_S, SLOW_STEPS, command, metric, received, until

from mod_export.errors import EngineError, UsageError
from mod_export.serve.server import ServerOptions, serve_folder
from mod_export.serve.service import ServiceOptions
from mod_export.serve.supervisor import Supervisor

LONG = {"prompt": "def f(", "max_tokens": 40, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Slows the steps of engines down in every process that starts from now on."""

    def slow_down(seconds: float) -> None:
        (tmp_path / "sitecustomize.py").write_text(SLOW_STEPS.format(seconds=seconds))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))

    return slow_down


def worker_of(process: subprocess.Popen[str]) -> psutil.Process:
    """The child that runs the engines; another child of Python's own tracks what processes share."""
    found = [child for child in psutil.Process(process.pid).children() if "spawn_main" in " ".join(child.cmdline())]
    assert len(found) == 1, found
    return found[0]


def is_ready(url: str) -> bool:
    return httpx2.get(f"{url}/health/ready", timeout=PATIENCE_S).status_code == 200


class Asking:
    """A client with one request, which waits for its answer on a thread."""

    def __init__(self, url: str, **fields: Any) -> None:
        self.answer: httpx2.Response | None = None
        self._url, self._fields = url, fields
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        self.answer = httpx2.post(f"{self._url}/v1/completions", json={**LONG, **self._fields}, timeout=PATIENCE_S)

    def answered(self) -> httpx2.Response:
        self._thread.join(PATIENCE_S)
        assert self.answer is not None, "no answer"
        return self.answer


@pytest.mark.fast("11")
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_every_request_is_answered_when_the_engine_crashes(
    written: Path, slow: Callable[[float], None], number: signal.Signals
) -> None:
    slow(0.02)
    # Clients are told how long the last start took.
    code = """
from mod_export.serve import supervisor
wait = supervisor._Worker.wait
def started(worker):
    wait(worker)
    worker.retry_s = 7
supervisor._Worker.wait = started
"""
    with command(written, "--supervise", code=code) as (process, url):
        before = httpx2.post(f"{url}/v1/completions", json=LONG, timeout=PATIENCE_S).json()["choices"]
        streams = [Asking(url, stream=True) for _ in range(2)]
        until(lambda: metric(url, "busy_rows") == 2)
        time.sleep(0.1)  # The streams have begun.
        others = [Asking(url) for _ in range(6)]
        until(lambda: metric(url, "busy_rows") + metric(url, "queue_depth") == 8)
        worker_of(process).send_signal(number)
        for asking in others:
            answer = asking.answered()
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_restarting")
            assert answer.headers["retry-after"] == "7"
            assert answer.headers["x-request-id"]
        for asking in streams:
            events = asking.answered().text.strip().split("\n\n")
            assert asking.answered().status_code == 200
            assert len(events) > 1
            assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "engine_restarting"
        # The supervisor lives, and says that it takes no requests at the moment.
        assert httpx2.get(f"{url}/health/live").json() == {"live": True}
        assert httpx2.get(f"{url}/v2/health/ready").status_code in (200, 503)
        assert httpx2.get(f"{url}/health").status_code in (200, 503)
        until(lambda: is_ready(url))
        assert httpx2.post(f"{url}/v1/completions", json=LONG, timeout=PATIENCE_S).json()["choices"] == before
        assert metric(url, "engine_restarts_total") == 1
        process.terminate()
        assert process.stderr is not None
        log = process.stderr.read()
        assert process.wait(PATIENCE_S) == 0
        assert f"error: the process of the engines has ended ({number.name}), and another one starts" in log
        # Where the engine was, for those who look for the reason.
        assert ("Fatal Python error: Segmentation fault" in log) == (number == signal.SIGSEGV)


@pytest.mark.slow
def test_a_signal_lets_texts_finish(written: Path, slow: Callable[[float], None]) -> None:
    slow(0.05)
    with command(written, "--supervise") as (process, url):
        asking = [Asking(url) for _ in range(4)]
        until(lambda: metric(url, "busy_rows") + metric(url, "queue_depth") == 4)
        worker = worker_of(process)
        process.terminate()
        until(lambda: not is_ready(url))
        assert httpx2.get(f"{url}/health/live").status_code == 200
        refusal = httpx2.post(f"{url}/v1/completions", json=LONG, timeout=PATIENCE_S)
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (503, "shutting_down")
        assert [each.answered().status_code for each in asking] == [200] * 4
        assert process.wait(PATIENCE_S) == 0
        assert not worker.is_running()


@pytest.mark.slow
def test_a_second_signal_ends_both_at_once(written: Path, slow: Callable[[float], None]) -> None:
    slow(0.5)
    with command(written, "--supervise") as (process, url):
        worker = worker_of(process)
        asking = threading.Thread(target=_ignoring, args=[url])
        asking.start()
        until(lambda: metric(url, "busy_rows") > 0)
        process.terminate()
        time.sleep(0.3)
        assert process.poll() is None
        process.terminate()
        assert process.wait(PATIENCE_S) == 143
        assert not psutil.wait_procs([worker], PATIENCE_S)[1]
        asking.join(PATIENCE_S)
        assert not asking.is_alive()


def _ignoring(url: str) -> None:
    with contextlib.suppress(httpx2.HTTPError):
        httpx2.post(f"{url}/v1/completions", json=LONG, timeout=PATIENCE_S)


@pytest.mark.slow
def test_a_client_that_leaves_makes_its_row_free(written: Path, slow: Callable[[float], None]) -> None:
    slow(0.2)
    with command(written, "--supervise") as (_, url):
        for stream in (False, True):
            with contextlib.suppress(httpx2.ReadTimeout):
                httpx2.post(f"{url}/v1/completions", json={**LONG, "stream": stream}, timeout=0.5)
            until(lambda: metric(url, "busy_rows") == 0)
        assert metric(url, 'texts_total{finish="length"}') == 0


@pytest.mark.slow
def test_a_worker_that_cannot_begin_again_ends_the_server(written_copy: Path) -> None:
    """The supervisor's own supervisor sees it, and its log says why."""
    code = "from mod_export.serve import supervisor\nsupervisor.MOST_FAILURES = 2"
    with command(written_copy, "--supervise", code=code) as (process, url):
        flip(written_copy / "graphs/weights-float32.data")
        worker_of(process).kill()
        until(lambda: not is_ready(url))
        assert process.stderr is not None
        log = process.stderr.read()
        assert process.wait(PATIENCE_S) == 1
        for attempt in (1, 2):
            assert re.search(f"error: attempt {attempt} of 2 to serve again: .*weights-float32.data", log), log


def test_what_it_does_not_start_with(written_copy: Path) -> None:
    """The messages are those of a server without a supervisor."""
    refused(invoke("serve", written_copy, "--supervise", "--rows", "9", "--port", 0), "rows: no engine writes 9 texts")
    flip(written_copy / "manifest.json")
    refused(invoke("serve", written_copy, "--supervise", "--port", 0), "has been changed since it was written|damaged")


@pytest.mark.fast("crash-SIGKILL")
@pytest.mark.parametrize(("work", "end"), [(crash, "SIGKILL"), (leave, "exit code 7")])
def test_a_worker_that_ends_before_it_serves(work: Callable[..., int], end: str) -> None:
    message = rf"the process of the engines ended before it could serve \({end}\)"
    with pytest.raises(EngineError, match=message):
        Supervisor(work)


def test_an_event_that_is_cut_is_dropped() -> None:
    """A client would read the error after it as its rest."""
    sent: list[Any] = []

    async def ask(supervisor: Supervisor) -> None:
        requests = [{"type": "http.request", "body": b"{}"}]

        async def receive() -> Any:
            return requests.pop() if requests else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions",
                 "query_string": b"", "headers": [(b"content-length", b"2")], "scheme": "http"}  # fmt: skip
        await asyncio.wait_for(supervisor(scope, receive, send), PATIENCE_S)

    with contextlib.closing(Supervisor(cut_an_event)) as supervisor:
        asyncio.run(ask(supervisor))
    bodies = [message["body"] for message in sent if message["type"] == "http.response.body"]
    *events, last, rest = b"".join(bodies).split(b"\n\n")
    assert (events, rest) == ([b'data: {"a": 1}', b'data: {"b": 2}'], b"")
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_restarting"


def test_it_needs_a_folder_for_its_socket(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervised = ServerOptions(port=0, supervise=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(UsageError, match="--supervise: needs a folder for a socket"):
        serve_folder(written, ServiceOptions(), supervised)
    # Paths of sockets are short.
    (tmp_path / ("a" * 200)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("a" * 200)))
    with pytest.raises(UsageError, match=r"worker-0: cannot listen there .*; name another folder with TMPDIR"):
        serve_folder(written, ServiceOptions(), supervised)


@pytest.mark.slow
def test_a_new_version_is_taken_by_the_worker(written: Path, tmp_path: Path) -> None:
    link = tmp_path / "current"
    link.symlink_to(written)
    again = tmp_path / "again"
    shutil.copytree(written, again, ignore=shutil.ignore_patterns(".partial-*"))
    rewrite_manifest(again, lambda manifest: manifest["models"]["mod"].update(name="again"))
    with command(link, "--supervise", "--reload") as (process, url):
        link.unlink()
        link.symlink_to(again)
        process.send_signal(signal.SIGHUP)
        until(lambda: httpx2.get(f"{url}/v1/models").json()["data"][0]["id"] == "again")
        assert process.poll() is None


# What a client sees is what it sees without a supervisor.

BODY = json.dumps({**LONG, "max_tokens": 3}).encode()
STREAM = json.dumps({**LONG, "max_tokens": 3, "stream": True}).encode()
CHUNKED = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (BODY[:9], BODY[9:])) + b"0\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
REQUESTS = {
    "text": POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
    "stream": POST + b"Content-Length: %d\r\n\r\n" % len(STREAM) + STREAM,
    "in chunks": POST + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED,
    "with a head to be confirmed": POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY,
    "not JSON": POST + b"Content-Length: 1\r\n\r\n{",
    "too large": POST + b"Content-Length: 30000000\r\n\r\n" + b" " * 30_000_000,
    "GET": b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "HEAD": b"HEAD /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "a query": b"GET /v1/models?a=%20b&c HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "no such address": b"GET /v1/nowhere/%41%2f%C3%A9?x HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "bytes that no address has": b"GET /caf\xc3\xa9 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "another method": b"DELETE /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "another host": b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    "HTTP/1.0 without a host": b"GET /v1/models HTTP/1.0\r\n\r\n",
    "HTTP/1.0 with a host": b"GET /v1/models HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n",
    "preflight": b"OPTIONS /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: https://chat.example\r\n"
    b"Access-Control-Request-Method: POST\r\n\r\n",
    "another page": b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: https://evil.example\r\n\r\n",
    "its own name": b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Request-Id: mine\r\n\r\n",
    "an offer to upgrade": b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade, HTTP2-Settings\r\n"
    b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n",
    "blanks after a value": b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Request-Id: mine \t\r\n\r\n",
    "headers of hops": b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nTE: trailers\r\nKeep-Alive: 5\r\n\r\n",
}
OWN_OF_EACH = re.compile(
    rb'(?mi)^(date|x-request-id: (?!mine)).*\r\n|"id": ?"cmpl-[^"]*"|"created": ?\d+|^content-length: .*\r\n'
)


@pytest.fixture(scope="module")
def ports(request: pytest.FixtureRequest, written: Path) -> Iterator[tuple[int, int]]:
    """Two servers, the second one supervised."""
    page = ("--allow-origin", "https://chat.example")
    with command(written, *page) as (_, plain), command(written, *page, "--supervise") as (_, supervised):
        yield int(plain.rpartition(":")[2]), int(supervised.rpartition(":")[2])


def raw(port: int, message: bytes) -> bytes:
    """All bytes of the answer, without what each answer has of its own."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(message)
        return OWN_OF_EACH.sub(b"", received(connection, head=message.startswith(b"HEAD")))


@pytest.mark.parametrize("name", REQUESTS)
def test_answers_are_those_of_a_server_without_a_supervisor(ports: tuple[int, int], name: str) -> None:
    plain, supervised = (raw(port, REQUESTS[name]) for port in ports)
    assert plain.startswith(b"HTTP/1."), plain
    assert head_and_body(supervised) == head_and_body(plain)


def head_and_body(answer: bytes) -> tuple[bytes, set[bytes], bytes]:
    """Status, headers in any order, and the body, whose chunks may be cut elsewhere."""
    top, _, body = answer.rpartition(b"\r\n\r\n") if b"chunked" not in answer else answer.partition(b"\r\n\r\n")
    status, *headers = top.split(b"\r\n")
    if b"chunked" in top:
        body = re.sub(rb"(\A|\r\n)[0-9a-f]+\r\n", b"", body)
    return status, set(headers), body


def test_a_body_that_does_not_come_and_the_clients_of_the_log(written: Path) -> None:
    """Nobody can hold a connection for ever, and the log names the client, not the supervisor."""
    code = "from mod_export.serve import supervisor\nsupervisor.BODY_S = 0.5"
    with command(written, "--supervise", "-v", code=code) as (process, url):
        found = raw(int(url.rpartition(":")[2]), POST + b"Content-Length: 1000\r\n\r\n{")
        assert found.startswith(b"HTTP/1.1 408 Request Timeout\r\n"), found
        assert b"the body of the request did not come within" in found
        assert is_ready(url)
        # A proxy on the same machine may say who asks, as without a supervisor; what it says is passed on.
        httpx2.get(f"{url}/v1/models", headers={"X-Forwarded-For": "203.0.113.9"})
        httpx2.get(f"{url}/v1/models", headers={"Forwarded": "for=203.0.113.8"})
        process.terminate()
        assert process.stderr is not None
        log = process.stderr.read()
        assert process.wait(PATIENCE_S) == 0
        lines = [line for line in log.splitlines() if "GET /v1/models 200" in line]
        assert [line.split()[1] for line in lines] == ["203.0.113.9", "127.0.0.1"], log


def test_without_descriptors_and_killed(
    written: Path, slow: Callable[[float], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor without descriptors says so, and not that the engines have crashed. The worker ends with it."""
    slow(0.2)
    sockets = tmp_path / "s"  # Paths of sockets are short.
    sockets.mkdir()
    monkeypatch.setenv("TMPDIR", str(sockets))
    code = """
import resource
from mod_export.serve import server
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
server._allow_connections = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
"""
    with command(written, "--supervise", code=code) as (process, url), contextlib.ExitStack() as opened:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        assert is_ready(url)  # Leaves one connection to the worker, which the text then takes.
        waiting = [opened.enter_context(socket.create_connection(address)) for _ in range(64)]
        until(lambda: psutil.Process(process.pid).num_fds() == 64)
        waiting[0].sendall(POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        time.sleep(0.1)
        waiting[1].settimeout(PATIENCE_S)
        waiting[1].sendall(REQUESTS["GET"])
        answer = received(waiting[1])
        assert answer.startswith(b"HTTP/1.1 503 "), answer
        assert b"the server has no room for another connection; try again" in answer
        opened.close()
        until(lambda: is_ready(url))
        worker = worker_of(process)
        assert list(sockets.iterdir())
        process.kill()
        assert not psutil.wait_procs([worker], PATIENCE_S)[1]
        assert not list(sockets.iterdir())

"""HTTP byte by byte: messages that servers and proxies read differently, and malicious clients."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
from serving import PATIENCE_S, Server, held, serving

from mod_export.serve import KEEP_ALIVE_S
from mod_export.serve.scheduler import Job

HOST = b"Host: 127.0.0.1\r\n"
GET = b"GET /v2/health/ready HTTP/1.1\r\n" + HOST
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST
NOWHERE = b"POST /nowhere HTTP/1.1\r\n" + HOST + b"Content-Length: 99\r\n\r\n"
HEAD_S = 1.0
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n"
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"


def posted(headers: bytes = b"", **asked: object) -> bytes:
    """A completion request."""
    body = json.dumps({"prompt": [7, 3], "temperature": 0, "ignore_eos": True, **asked}).encode()
    return POST + headers + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


def said(server: Server, *sent: bytes) -> bytes:
    """All bytes that a connection returns until the server closes it. Each part is sent after the server has read the
    ones before.
    """
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found = b""
        with contextlib.suppress(ConnectionError):  # The server may close before it has read everything.
            for part in sent:
                connection.sendall(part)
                time.sleep(0.05 * (part is not sent[-1]))
        with contextlib.suppress(ConnectionError):
            while chunk := connection.recv(1 << 16):
                found += chunk
    return found


def statuses(found: bytes) -> list[int]:
    """Status codes of all answers."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", found)]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server waits one second for a head."""
    monkeypatch.setattr("mod_export.serve.connection.HEAD_S", HEAD_S)


@pytest.mark.fast("half a head", "half of a second head", "half a body")
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("begun", "answered"),
    [
        (b"", []),
        (b"GET /v1/mod", []),
        (b"\r\n" * 9, []),
        (GET + b"\r\nGET /v1/mod", [200]),
        (GET + b"\r\n\r\n", [200]),
        (NOWHERE + b"a" * 9, [404]),
    ],
    ids=[
        "nothing",
        "half a head",
        "blank lines",
        "half of a second head",
        "a blank line after an answer",
        "half a body",
    ],
)
def test_a_head_that_does_not_come_ends_the_connection(server: Server, begun: bytes, answered: list[int]) -> None:
    head, end, rest = begun.partition(b"\r\n\r\n")
    begun_s = time.monotonic()
    assert statuses(said(server, *filter(None, (head + end, rest)))) == answered
    assert 0.9 * HEAD_S <= time.monotonic() - begun_s < KEEP_ALIVE_S / 2


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("body", [b"", b"a" * 99], ids=["after an answer", "after the body of a refused request"])
def test_an_idle_connection_waits_longer_than_for_a_head(written: Path, body: bytes) -> None:
    """Once the next head has begun, it has its own limit again."""
    with serving(written, keep_alive_s=3 * HEAD_S) as server:
        parts = [NOWHERE, body] if body else [GET + b"\r\n"]
        first = 404 if body else 200
        begun_s = time.monotonic()
        assert statuses(said(server, *parts)) == [first]
        assert 2.9 * HEAD_S <= time.monotonic() - begun_s < KEEP_ALIVE_S / 2
    with (
        serving(written) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection,
    ):
        for part in parts:
            connection.sendall(part)
            time.sleep(0.1)
        time.sleep(2 * HEAD_S)
        connection.sendall(GET)
        time.sleep(0.1)
        connection.sendall(b"\r\n")
        answers = b""
        while len(statuses(answers)) < 2 or not answers.endswith(b'{"ready":true}'):
            answers += connection.recv(1 << 16) or pytest.fail(f"the connection was closed after {answers!r}")
        assert statuses(answers) == [first, 200]
        begun_s = time.monotonic()
        connection.sendall(b"GET /")
        assert connection.recv(1) == b""
        assert 0.9 * HEAD_S <= time.monotonic() - begun_s < KEEP_ALIVE_S / 2


@pytest.mark.parametrize(
    "sent",
    [
        GET + b"X: " + b"a" * (1 << 20),
        GET + b"".join(b"X%d: %s\r\n" % (number, b"a" * 1000) for number in range(1000)),
        b"GET /" + b"a" * (1 << 20),
        CHUNKED + b"\r\n2\r\n{}\r\n0\r\n" + b"X: a\r\n" * (1 << 17),
        CHUNKED + b"\r\n2;" + b"a" * (1 << 20),
        GET + b"\r\n" + b"\r\n" * (1 << 19),
    ],
    ids=["a header", "headers", "an address", "trailers", "an extension of a chunk", "blank lines"],
)
def test_what_does_not_end_is_cut_off(server: Server, sent: bytes) -> None:
    """The client may not see the answer, because the server did not read all that it sent."""
    found = said(server, sent)
    assert statuses(found) in ([], [400], [200], [200, 400]), found
    assert httpx2.get(f"{server.url}/v2/health/ready").status_code == 200


REFUSED = {
    "more than 100 headers": GET + b"X: a\r\n" * 100 + b"\r\n",
    "more than 65536 bytes of headers": GET + b"X: " + b"a" * (1 << 17),
    "expected one header Host": GET + b"Host: a.example\r\n\r\n",
    "Transfer-Encoding other than chunked": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "not a request of HTTP/1.0 or HTTP/1.1 to this server": b"CONNECT a:80 HTTP/1.1\r\n" + HOST + b"\r\n",
    "not HTTP/1.1": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}


@pytest.mark.parametrize("why", REFUSED)
def test_bad_requests_are_answered_with_the_reason(server: Server, why: str) -> None:
    found = said(server, REFUSED[why])
    assert statuses(found) == [400]
    assert found.endswith(f"\r\n\r\nBad request: {why}\n".encode())


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/2.0\r\n" + HOST + b"\r\n",
        b"GET /\r\n\r\n",
        POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        CHUNKED + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        CHUNKED + b"\r\nno number\r\n",
        b"GET /\xff HTTP/1.1\r\n" + HOST + b"\r\n",
        GET + b"X: a\r\n b\r\n\r\n",
        GET + b"X: a\nY: b\r\n\r\n",
    ],
    ids=[
        "no host", "version 2", "no version", "length and chunks", "two lengths", "chunks twice",
        "chunks in version 1.0", "a size that is none", "an address beyond ASCII", "a folded header",
        "a line that ends in LF",
    ],
)  # fmt: skip
def test_what_servers_read_in_different_ways_is_refused(server: Server, sent: bytes) -> None:
    found = said(server, sent)
    assert (statuses(found), b"Bad request: " in found) == ([400], True), found


def test_trailers_are_no_headers(written: Path) -> None:
    """A proxy that removes headers may let trailers pass."""
    foreign = b"Origin: http://a.example\r\n"
    with serving(written, hosts=["127.0.0.1"]) as server:
        head, body = CHUNKED + b"Connection: close\r\n", b"2\r\n{}\r\n0\r\n"
        assert statuses(said(server, head + foreign + b"\r\n" + body + b"\r\n")) == [403]
        assert statuses(said(server, head + b"\r\n" + body + foreign + b"\r\n")) == [400]  # The body has no prompt.


@pytest.mark.parametrize("split", [False, True], ids=["at once", "the body later"])
@pytest.mark.parametrize(
    "offer", [H2C, b"Connection: upgrade, close\r\nUpgrade: websocket\r\n"], ids=["h2c", "websocket"]
)
def test_an_offer_of_another_protocol_is_not_taken(server: Server, offer: bytes, *, split: bool) -> None:
    """Java's client offers HTTP/2 with every first request, even one with a body."""
    head, end, body = posted(offer, max_tokens=3).partition(b"\r\n\r\n")
    parts = [head + end, body] if split else [head + end + body]
    found = said(server, *parts, *([GET + b"Connection: close\r\n\r\n"] if offer == H2C else []))
    assert statuses(found) == ([200, 200] if offer == H2C else [200])
    assert b'"completion_tokens":3' in found
    assert b"\r\nconnection: close\r\n" in found


def test_the_body_of_an_offer_is_no_request(server: Server) -> None:
    inner = GET + b"\r\n"
    sent = POST + b"Connection: Upgrade, close\r\nUpgrade: h2c\r\nContent-Length: %d\r\n\r\n" % len(inner)
    assert statuses(said(server, sent, inner)) == [400]


@pytest.mark.parametrize("more", [posted(max_tokens=2), GET + b"\r\n", b"no HTTP\r\n\r\n", b"GET / HT"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_comes_before_an_answer_ends_the_connection_after_it(server: Server, more: bytes, *, stream: bool) -> None:
    """The extra bytes come in the same part as the request, and in another part."""
    writing = server.writing
    alone = said(server, posted(b"Connection: close\r\n", max_tokens=3, stream=stream))
    assert statuses(said(server, posted(max_tokens=3) + more)) == [200]
    with held(writing, writing.generator, [[1]], 3) as busy:
        threading.Timer(0.3, busy.go.set).start()
        found = said(server, posted(max_tokens=3, stream=stream), more)
    assert statuses(found) == [200]
    assert b"onnection: close" in found
    assert _text(found) == _text(alone) != b""


def _text(found: bytes) -> bytes:
    return b"".join(re.findall(rb'"text":"(.*?)"', found.replace(b'": "', b'":"')))


def test_of_many_requests_at_once_the_first_is_answered(server: Server) -> None:
    """The client may not see the answer, because the server did not read all that it sent."""
    assert statuses(said(server, (GET + b"\r\n") * 20_000)) in ([200], [])
    assert httpx2.get(f"{server.url}/v2/health/ready").status_code == 200


def test_requests_that_wait_for_answers_share_a_connection(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        for tokens in (1, 2, 3):
            connection.sendall(posted(max_tokens=tokens))
            found = b""
            while b"completion_tokens" not in found:
                found += connection.recv(1 << 16)
            assert b'"completion_tokens":%d' % tokens in found
        # The body comes after the answer that refused it.
        connection.sendall(b"POST /nowhere HTTP/1.1\r\n" + HOST + b"Content-Length: 100000\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404")
        connection.sendall(b"a" * 100_000 + GET + b"Connection: Close, x\r\n\r\n")
        found = b""
        while chunk := connection.recv(1 << 16):
            found += chunk
    assert statuses(found) == [200]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [b"", GET + b"\r\n", b"GET / HT"], ids=["nothing", "a request", "half a request"])
def test_a_client_that_leaves_is_noticed(server: Server, more: bytes, *, stream: bool) -> None:
    """It is noticed no matter what the client sent afterwards."""
    writing = server.writing
    with held(writing, writing.generator, [[1]], 3) as busy:
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
            connection.sendall(posted(max_tokens=40, stream=stream))
            jobs: list[Job] = []
            _until(lambda: bool(jobs.extend(job for job in writing._jobs if job is not busy.job) or jobs))
            connection.sendall(more)
        _until(lambda: all(text.cancelled for text in jobs[0].texts))


def test_a_body_that_is_none_ends_its_request(server: Server) -> None:
    """Nothing is written for the request."""
    before = server.service.metrics.text()
    assert statuses(said(server, CHUNKED + b"\r\n5\r\n{    \r\n", b"no size\r\n")) == [400]
    _until(lambda: server.service.metrics.text() != before)
    assert server.writing.busy == 0


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)

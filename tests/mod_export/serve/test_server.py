"""The command in its own process: where it listens, how it ends, and when it refuses to start."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import threading
import time
from pathlib import Path

import httpx2
import pytest
from build_folders import flip
from command_line import invoke, refused
from serving import PATIENCE_S, SLOW_STEPS, command

from mod_export.serve import KEEP_ALIVE_S
from mod_export.serve import server as server_module

LONG = {"prompt": "def f(", "max_tokens": 40, "ignore_eos": True, "temperature": 0}


def texts_of(url: str, count: int, found: list[httpx2.Response]) -> list[threading.Thread]:
    """Starts clients that each ask for a long text."""

    def ask() -> None:
        found.append(httpx2.post(f"{url}/v1/completions", json=LONG, timeout=PATIENCE_S))

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        text = httpx2.get(f"{url}/metrics", timeout=PATIENCE_S).text
        values = dict(
            line.split(" ")
            for line in text.splitlines()
            if line.startswith(("mod_export_busy_rows", "mod_export_queue_depth"))
        )
        if sum(map(float, values.values())) == count:
            return threads
        time.sleep(0.01)
    raise AssertionError("the requests did not arrive")


@pytest.mark.fast("15")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_texts_finish(written: Path, number: signal.Signals) -> None:
    """Texts in rows and waiting ones finish; meanwhile new ones are refused, and the server is not ready."""
    with command(written, code=SLOW_STEPS.format(seconds=0.02)) as (process, url):
        found: list[httpx2.Response] = []
        threads = texts_of(url, 5, found)
        process.send_signal(number)
        deadline = time.monotonic() + PATIENCE_S
        while httpx2.get(f"{url}/v2/health/ready").status_code == 200 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert httpx2.get(f"{url}/v2/health/ready").status_code == 503
        assert httpx2.get(f"{url}/v2/health/live").status_code == 200
        new = httpx2.post(f"{url}/v1/completions", json=LONG)
        assert (new.status_code, new.headers["retry-after"]) == (503, "1")
        assert new.json()["error"]["code"] == "shutting_down"
        for thread in threads:
            thread.join(PATIENCE_S)
        assert process.wait(PATIENCE_S) == 0
        assert [answer.status_code for answer in found] == [200] * 5
        assert all(answer.json()["choices"][0]["finish_reason"] == "length" for answer in found)


def test_a_second_signal_ends_it_at_once(written: Path) -> None:
    with command(written, code=SLOW_STEPS.format(seconds=0.5)) as (process, url):
        texts = {"prompt": ["a"] * 3, "max_tokens": 40, "ignore_eos": True}
        thread = threading.Thread(target=lambda: _ignoring(url, texts))
        thread.start()
        time.sleep(1)
        process.terminate()
        time.sleep(0.3)
        assert process.poll() is None
        process.terminate()
        assert process.wait(PATIENCE_S) == 143
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def _ignoring(url: str, body: object) -> None:
    with contextlib.suppress(httpx2.HTTPError):
        httpx2.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)


@pytest.mark.slow
def test_how_long_an_idle_connection_lives(written: Path) -> None:
    with command(written, "--keep-alive", "1.5") as (_, url), socket.socket() as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        begun = time.monotonic()
        while connection.recv(1 << 16):
            pass
        assert 1 < time.monotonic() - begun < KEEP_ALIVE_S / 2


def test_what_takes_longer_than_it_may_is_cut(written: Path) -> None:
    with command(written, "--drain", "0.2", code=SLOW_STEPS.format(seconds=0.1)) as (process, url):
        found: list[httpx2.Response] = []
        texts_of(url, 1, found)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
        deadline = time.monotonic() + PATIENCE_S
        while not found and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (found[0].status_code, found[0].json()["error"]["code"]) == (503, "shutting_down")


@pytest.mark.slow
def test_killed_it_starts_again_on_the_same_port(written: Path) -> None:
    with command(written, code=SLOW_STEPS.format(seconds=0.1)) as (process, url):
        thread = threading.Thread(target=lambda: _ignoring(url, LONG))
        thread.start()
        time.sleep(0.5)
        process.kill()
        process.wait(PATIENCE_S)
        thread.join(PATIENCE_S)
    assert not thread.is_alive()
    with command(written, "--port", url.rpartition(":")[2]) as (_, again):
        assert again == url
        assert httpx2.post(f"{again}/v1/completions", json=LONG, timeout=PATIENCE_S).status_code == 200


def test_a_thread_that_has_ended_ends_the_server(written: Path) -> None:
    """A supervisor can then start another server."""
    broken = """
from mod_export.runtime.text_rows import TextRows
def step(self): raise ZeroDivisionError
TextRows.step = step
"""
    with command(written, code=broken) as (process, url):
        answer = httpx2.post(f"{url}/v1/completions", json=LONG, timeout=PATIENCE_S)
        assert answer.status_code == 500
        assert process.wait(PATIENCE_S) == 1


@pytest.mark.slow
def test_an_engine_that_keeps_failing_ends_the_server(written: Path) -> None:
    broken = """
from mod_export.errors import EngineError
from mod_export.runtime.decoder import Decoder
def step(self, *arguments): raise EngineError("it is broken")
def read(self, *arguments): raise EngineError("it is broken")
Decoder.step = step
from mod_export.runtime.prompts import Prompts
Prompts.read_part = read
"""
    with command(written, code=broken) as (process, url):
        for _ in range(3):
            assert httpx2.post(f"{url}/v1/completions", json=LONG, timeout=PATIENCE_S).status_code == 500
        assert process.wait(PATIENCE_S) == 1


def test_others_need_a_key(written: Path, tmp_path: Path) -> None:
    refused(
        invoke("serve", written, "--host", "0.0.0.0"), r"--host 0.0.0.0: whoever reaches this machine could use the"
    )
    keys = tmp_path / "keys"
    refused(invoke("serve", written, "--api-key-file", keys), "keys: cannot be read as API keys")
    keys.write_text("\n \n")
    refused(invoke("serve", written, "--api-key-file", keys), "keys: expected API keys, one a line, and it has none")
    keys.write_text(" one \ntwo\n")
    assert server_module.read_keys(keys) == {"one", "two"}
    keys.write_text(" one \ntwo\n", encoding="utf-8-sig")  # With a byte order mark, as Windows' Notepad may write it.
    assert server_module.read_keys(keys) == {"one", "two"}
    with command(written, "--host", "0.0.0.0", "--api-key-file", keys) as (_, url):
        local = url.replace("0.0.0.0", "127.0.0.1")
        assert httpx2.get(f"{local}/v1/models").status_code == 401
        assert httpx2.get(f"{local}/v1/models", headers={"Authorization": "Bearer two"}).status_code == 200


def test_what_it_does_not_start_with(written: Path, written_copy: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(invoke("serve", written, "--port", port), f"--host 127.0.0.1 --port {port}: cannot listen there")
    # A wait that lasts longer than the system's clock of waits would fail at the signal.
    for seconds in ("-1", "inf", "nan", "1e+10"):
        message = rf"--drain: expected a number of seconds from 0 to 9223372036, got {re.escape(seconds)}"
        refused(invoke("serve", written, "--drain", seconds, "--port", 0), message)
    server_module.ServerOptions(drain_s=threading.TIMEOUT_MAX)
    for seconds in ("0", "-1", "inf", "nan"):
        refused(
            invoke("serve", written, "--keep-alive", seconds, "--port", 0),
            f"--keep-alive: expected a number of seconds above 0, got {seconds}",
        )
    refused(invoke("serve", written, "--max-wait", "0", "--port", 0), "max_wait: expected a number of seconds above 0")
    refused(invoke("serve", written, "--rows", "9", "--port", 0), "rows: no engine writes 9 texts at once; built: 1, 3")
    refused(invoke("serve", tmp_path, "--port", 0), "no manifest.json here")
    assert invoke("serve", written, "--port", "70000").exit_code == 2
    for name in ("graphs/weights-float32.data", "engines/ort-cpu/mod-decode-b3s48-float32.onnx", "manifest.json"):
        content = (written_copy / name).read_bytes()
        flip(written_copy / name)
        refused(invoke("serve", written_copy, "--port", 0), r"has been changed since it was (built|written)|damaged")
        (written_copy / name).write_bytes(content)


@pytest.mark.slow
def test_a_client_that_takes_nothing_is_cut_off(written: Path) -> None:
    """The server's memory holds the rest of its text, and the system closes the connection."""
    code = "import mod_export.serve.server as one\none.STALLED_MS = 1500"
    with command(written, code=code) as (process, url):
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(PATIENCE_S)
        slow.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        body = json.dumps(
            {"prompt": ["a"] * 20, "n": 3, "max_tokens": 40, "ignore_eos": True, "stream": True, "logprobs": 20}
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        slow.sendall(head + body)
        assert httpx2.post(f"{url}/v1/completions", json=LONG, timeout=PATIENCE_S).status_code == 200
        time.sleep(5)
        found = b""
        with contextlib.suppress(ConnectionError):
            while chunk := slow.recv(1 << 16):
                found += chunk
        slow.close()
        assert b"[DONE]" not in found
        process.terminate()
        assert process.wait(PATIENCE_S) == 0

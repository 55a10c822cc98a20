"""Serves one build folder over HTTP until a signal ends it.

After the first SIGTERM or SIGINT, the server is not ready but keeps listening until its current texts are done. So new
requests get status 503 and not a closed port. A second signal ends it at once.

HTTP/1.1 is uvicorn's protocol over llhttp (the package httptools), with more checks and limits. A connection handles
one request at a time. A request that arrives before the previous one is answered is not read, and the connection closes
after the answer (RFC 9112, 9.3.2). So no queue grows without limit, and a disconnect is seen at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import resource
import signal
import socket
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mod_export.errors import UsageError
from mod_export.serve import DRAIN_S, KEEP_ALIVE_S
from mod_export.serve.cors import check_origins
from mod_export.serve.folder_app import OpenFolder
from mod_export.serve.metrics import Metrics
from mod_export.serve.reload import ServedFolder
from mod_export.serve.request_log import configure_logging
from mod_export.serve.service import ServiceOptions
from mod_export.serve.traces import sending_traces

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MOST_CONNECTIONS = 4096
STALLED_MS = 60_000
"""A client that receives nothing for this long is disconnected, because unsent data stays in memory."""
WATCH_S = 1.0
LEAST_SHUTDOWN_S = 1
REPLACED_S = 86_400.0
"""How many seconds requests have to finish after a new version has replaced their folder: as long as any takes."""
TERMINATED = 143
"""Exit code after a second signal: that of a program ended by SIGTERM."""
BROKEN = 1
HEAD_S = 15.0
"""How many seconds the head of a request may take from its first byte, or from the beginning of the connection."""
MOST_HEAD_BYTES = 1 << 16
"""Limit of a request head. It is checked after each read, and one read returns a few hundred kilobytes at most."""
MOST_HEADERS = 100
FOR_AN_UPGRADE = (b"connection", b"upgrade", b"http2-settings")


def read_keys(path: Path) -> frozenset[str]:
    """Reads the API keys of a file, one per line.

    Raises:
        UsageError: the file cannot be read, or holds no key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as API keys ({error})") from error
    keys = frozenset(line.strip() for line in lines) - {""}
    if not keys:
        raise UsageError(f"{path}: expected API keys, one a line, and it has none")
    return keys


def serve_folder(
    folder: Path,
    options: ServiceOptions,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    drain_s: float = DRAIN_S,
    keep_alive_s: float = KEEP_ALIVE_S,
    keys: frozenset[str] = frozenset(),
    origins: Collection[str] = frozenset(),
    reload: bool = False,
    traces: bool = False,
    log_requests: bool = False,
    log_format: str = "text",
    say: Callable[[str], None] = print,
) -> int:
    """Serves until a signal ends it, and returns the exit code.

    Args:
        folder: a build folder.
        options: how it is served.
        host: address to listen at.
        port: port to listen at; 0 means any free port.
        drain_s: seconds that texts have to finish after the first signal.
        keep_alive_s: seconds that a connection stays open between two requests.
        keys: API keys.
        origins: web pages of other origins that may use the server.
        reload: whether a new version of the folder is taken while the server runs, when it appears or at a SIGHUP.
        traces: whether OpenTelemetry traces are sent; see `sending_traces`.
        log_requests: whether every request is logged, to stderr.
        log_format: form of the log, one of `request_log.FORMATS`.
        say: receives a line with the address before the server starts.

    Raises:
        UsageError: an option is out of range, the address cannot be used, or it is public and there is no API key.
        BuildFolderError: the folder is damaged.
    """
    if host not in LOOPBACK and not keys:
        raise UsageError(
            f"--host {host}: whoever reaches this machine could use the server; give --api-key-file with it, or listen "
            "at 127.0.0.1 behind a proxy that asks who is there"
        )
    if not drain_s >= 0:
        raise UsageError(f"--drain: expected a number of seconds of at least 0, got {drain_s:g}")
    if not 0 < keep_alive_s < math.inf:
        raise UsageError(f"--keep-alive: expected a number of seconds above 0, got {keep_alive_s:g}")
    check_origins(origins, "--allow-origin", public=bool(keys))
    _allow_connections()
    if reload:
        # The folder is being opened already. Without a handler the signal would end the process.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def open_version(path: Path, metrics: Metrics) -> OpenFolder:
        hosts = None if keys else {*LOOPBACK, host}
        return OpenFolder.of(path, options, keys, hosts, REPLACED_S, origins, metrics)

    # Listens first: a port in use is found at once, while opening a folder takes long.
    with (
        sending_traces() if traces else contextlib.nullcontext(),
        _listening(host, port) as listener,
        contextlib.closing(ServedFolder(folder, open_version)) as served,
    ):
        config = uvicorn.Config(
            served,
            http=Connection,
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            limit_concurrency=MOST_CONNECTIONS,
            timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]  # Only given to call_later, as it is.
            timeout_graceful_shutdown=LEAST_SHUTDOWN_S,
            server_header=False,
        )
        server = _Server(config, served, drain_s, reload=reload)
        service = served.current.service
        name = f"[{host}]" if ":" in host else host
        address = f"http://{name}:{listener.getsockname()[1]}"
        say(f"{service.name}: {service.describe()}\n{address}  (Ctrl-C ends it when its texts are done)")
        configure_logging(log_format, requests=log_requests)
        server.run(sockets=[listener])
        return server.exit_code


def _allow_connections() -> None:
    """Raises the limit of file descriptors: each connection takes one, and many systems allow only 1,024 by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MOST_CONNECTIONS
    if resource.RLIM_INFINITY != soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((host, port), family=family, backlog=1024) as listener:
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # Only on Linux. Connections inherit it.
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_MS)
            yield listener
    except (OSError, OverflowError) as error:
        raise UsageError(f"--host {host} --port {port}: cannot listen there ({error}); name another port") from error


class _Server(uvicorn.Server):
    """A uvicorn server that keeps answering while it drains.

    Attributes:
        exit_code: 0 after a normal shutdown.
    """

    def __init__(self, config: uvicorn.Config, served: ServedFolder, drain_s: float, *, reload: bool) -> None:
        super().__init__(config)
        self.exit_code = 0
        self._served, self._drain_s, self._reload = served, drain_s, reload
        self._signals = 0

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's handlers, which close the port at the first signal."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        watching = [loop.create_task(self._watch())]
        if self._reload:
            loop.add_signal_handler(signal.SIGHUP, self._served.ask)
            watching.append(loop.create_task(self._served.watch()))
        try:
            yield
        finally:
            for task in watching:
                task.cancel()

    def _on_signal(self) -> None:
        self._signals += 1
        if self._signals == 1:
            self._served.stop_accepting()
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            # Exits at once: a step of the engine may take long, and no file is being written.
            os._exit(TERMINATED)

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._drain_s
        # Uses a separate thread, because those of the loop may all be busy.
        await loop.run_in_executor(ThreadPoolExecutor(1), self._served.drain, self._drain_s)
        # The rest of the time is for texts that are complete but not sent yet.
        self.config.timeout_graceful_shutdown = max(LEAST_SHUTDOWN_S, math.ceil(end - loop.time()))
        self.should_exit = True

    async def _watch(self) -> None:
        """Ends the server if its engine keeps failing or its scheduler crashed, so that a supervisor restarts it."""
        while self._served.live:
            await asyncio.sleep(WATCH_S)
        self.exit_code = BROKEN
        self.should_exit = True


class _BadRequestError(Exception):
    """A request head is invalid; the message says why."""


class Connection(HttpToolsProtocol):
    """Limits the size and time of a request head, and refuses heads that different servers interpret differently.

    An offer to upgrade to another protocol is ignored (RFC 9110, 7.8). Java's HTTP client and `curl --http2` send one
    with every first request. llhttp skips the body of such a request, so it is parsed again without the offer.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _bytes_of_head = 0
    """Bytes received since the last complete head, message or piece of a body. Trailers and blank lines count too."""
    _in_head = _in_body = False
    _reads = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # Same signature as in uvicorn.
        super().connection_made(transport)
        self._limit_head()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feeds the parser, which calls the methods below."""
        self._unset_keepalive_if_required()
        if not self._reads:
            return
        self._bytes_of_head += len(data)
        try:
            self.parser.feed_data(data)
            if self._bytes_of_head > MOST_HEAD_BYTES:
                raise _BadRequestError(f"more than {MOST_HEAD_BYTES} bytes of headers")
        except httptools.HttpParserUpgrade as offer:
            self._read_again(data[offer.args[0] :])
        except (httptools.HttpParserError, _BadRequestError) as error:
            reason = next((e for e in (error, error.__context__) if isinstance(e, _BadRequestError)), None)
            self._stop_reading(f"Bad request: {reason or 'not HTTP/1.1'}\n")
        self._limit_time()

    def on_message_begin(self) -> None:
        if not self._idle:
            raise _BadRequestError("it came before the one before it was answered")
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:  # Trailers are not headers.
            return
        if len(self.headers) >= MOST_HEADERS:
            raise _BadRequestError(f"more than {MOST_HEADERS} headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._bytes_of_head = 0
        self._in_head, self._in_body = False, True
        self._check_head()
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._bytes_of_head = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._bytes_of_head = 0
        self._in_body = False
        if not self.parser.should_upgrade():
            super().on_message_complete()

    @property
    def _idle(self) -> bool:
        """Whether no request is waiting for its response."""
        return self.cycle is None or self.cycle.response_complete

    def _check_head(self) -> None:
        """Refuses heads that a proxy in front of the server may interpret differently (RFC 9112, 3.2, 6.1 and 6.3)."""
        version = self.parser.get_http_version()
        values: dict[bytes, list[bytes]] = {}
        for name, value in self.headers:
            values.setdefault(name, []).append(value.strip().lower())
        if version not in ("1.0", "1.1") or self.parser.get_method() == b"CONNECT":
            raise _BadRequestError("not a request of HTTP/1.0 or HTTP/1.1 to this server")
        if len(values.get(b"host", ())) != 1 and (version == "1.1" or b"host" in values):
            raise _BadRequestError("expected one header Host")
        if b"transfer-encoding" in values and (version == "1.0" or values[b"transfer-encoding"] != [b"chunked"]):
            raise _BadRequestError("Transfer-Encoding other than chunked")

    def _read_again(self, rest: bytes) -> None:
        """Parses the head again without the upgrade offer, and then the bytes after it."""
        closes = any(name == b"connection" and b"close" in value.lower() for name, value in self.headers)
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % pair for pair in self.headers if pair[0] not in FOR_AN_UPGRADE]
        lines += [b"connection: close"] * closes
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join([*lines, b"", b""]) + rest)

    def _stop_reading(self, why: str) -> None:
        """Ignores all further input. Closes the connection once no request is waiting for its response."""
        self._reads = False
        if self.transport.is_closing():
            return
        if not self._idle and not self.cycle.more_body:
            self.cycle.keep_alive = False
        elif not self._idle and self.cycle.response_started:
            self.transport.close()
        else:
            self.send_400_response(why)

    def _limit_time(self) -> None:
        """Limits the time of a head, and of the rest of a body whose request was answered already. uvicorn limits the
        time between two requests, but only from an answer on: not after such a body.
        """
        if self._idle and (self._in_head or self._in_body or self._bytes_of_head):
            self._limit_head()
            return
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        if self._idle and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _limit_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._give_up)

    def _give_up(self) -> None:
        self._head_timer = None
        if self._idle:
            self.transport.close()

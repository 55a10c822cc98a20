"""Serves one build folder over HTTP until a signal ends it.

After the first SIGTERM or SIGINT, the server is not ready but keeps listening until its current texts are done. So new
requests get status 503 and not a closed port. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import uvicorn
from starlette.types import Receive, Scope, Send

from mod_export.errors import UsageError
from mod_export.serve import DRAIN_S, KEEP_ALIVE_S
from mod_export.serve.connection import Connection
from mod_export.serve.cors import check_origins
from mod_export.serve.folder_app import OpenFolder
from mod_export.serve.metrics import Metrics
from mod_export.serve.reload import ServedFolder
from mod_export.serve.request_log import configure_logging
from mod_export.serve.service import ServiceOptions
from mod_export.serve.supervisor import TERMINATED, Supervisor
from mod_export.serve.traces import sending_traces

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MOST_CONNECTIONS = 4096
STALLED_MS = 60_000
"""A client that receives nothing for this long is disconnected, because unsent data stays in memory."""
WATCH_S = 1.0
LEAST_SHUTDOWN_S = 1
REPLACED_S = 86_400.0
"""Seconds that requests have to finish after a new version has replaced their folder: a day, enough for any text."""
BROKEN = 1


@dataclass(frozen=True)
class ServerOptions:
    """How a server listens, logs and ends.

    Attributes:
        host: address to listen at.
        port: port to listen at; 0 means any free port.
        drain_s: seconds that texts have to finish after the first signal.
        keep_alive_s: seconds that a connection stays open between two requests.
        keys: API keys, of which each request must send one. If empty, no key is needed.
        origins: web pages of other origins that may use the server.
        reload: whether a new version of the folder is taken while the server runs, when it appears or at a SIGHUP.
        supervise: whether the engines run in a process of their own, which is replaced when it crashes.
        traces: whether OpenTelemetry traces are sent; see `sending_traces`.
        log_requests: whether every request is logged, to stderr.
        log_format: form of the log, one of `request_log.FORMATS`.

    Raises:
        UsageError: an option is out of range, or the address is public and there is no API key.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    drain_s: float = DRAIN_S
    keep_alive_s: float = KEEP_ALIVE_S
    keys: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    reload: bool = False
    supervise: bool = False
    traces: bool = False
    log_requests: bool = False
    log_format: str = "text"

    def __post_init__(self) -> None:
        if self.host not in LOOPBACK and not self.keys:
            raise UsageError(
                f"--host {self.host}: whoever reaches this machine could use the server; give --api-key-file with it, "
                "or listen at 127.0.0.1 behind a proxy that asks who is there"
            )
        if not 0 <= self.drain_s <= threading.TIMEOUT_MAX:
            raise UsageError(
                f"--drain: expected a number of seconds from 0 to {threading.TIMEOUT_MAX:.0f}, got {self.drain_s:g}"
            )
        if not 0 < self.keep_alive_s < math.inf:
            raise UsageError(f"--keep-alive: expected a number of seconds above 0, got {self.keep_alive_s:g}")
        check_origins(self.origins, "--allow-origin", public=bool(self.keys))


class ServedApp(Protocol):
    """What a server serves: an application that can end, and that looks after itself while it runs."""

    @property
    def description(self) -> str:
        """One line for the person who started the server."""

    @property
    def live(self) -> bool:
        """False if only a restart would help."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""

    def stop_accepting(self) -> None:
        """Refuses all new requests with status 503."""

    def drain(self, within_s: float) -> None:
        """Waits up to `within_s` for current texts, and then ends unfinished ones. Blocks."""

    def ask(self) -> None:
        """Asks for the folder to be opened again."""

    async def watch(self) -> None:
        """Does the work that is not an answer to a request, until it is cancelled."""


def read_keys(path: Path) -> frozenset[str]:
    """Reads the API keys of a file, one per line.

    Raises:
        UsageError: the file cannot be read, or holds no key.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()  # Some editors write a byte order mark.
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as API keys ({error})") from error
    keys = frozenset(line.strip() for line in lines) - {""}
    if not keys:
        raise UsageError(f"{path}: expected API keys, one a line, and it has none")
    return keys


def serve_folder(
    folder: Path, options: ServiceOptions, server: ServerOptions, say: Callable[[str], None] = print
) -> int:
    """Serves until a signal ends it, and returns the exit code.

    Args:
        folder: a build folder.
        options: how it is served.
        server: how the server listens, logs and ends.
        say: receives two lines with the address before the server starts.

    Raises:
        UsageError: the address cannot be used.
        BuildFolderError: the folder is damaged.
        EngineError: the process of the engines ended before it could serve.
    """
    # Listens first: a port in use is found at once, while opening a folder takes long.
    with _listening(server.host, server.port) as listener, _served(folder, options, server) as served:
        name = f"[{server.host}]" if ":" in server.host else server.host
        address = f"http://{name}:{listener.getsockname()[1]}"
        say(f"{served.description}\n{address}  (Ctrl-C ends it when its texts are done)")
        return _run(served, listener, server)


@contextlib.contextmanager
def _served(folder: Path, options: ServiceOptions, server: ServerOptions) -> Iterator[ServedApp]:
    """Opens the folder in this process, or in one of its own that is supervised."""
    _allow_connections()
    if server.reload:
        # The folder is being opened already. Without a handler the signal would end the process.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if server.supervise:
        with contextlib.closing(Supervisor(partial(_work, folder, options, server), server.origins)) as supervisor:
            yield supervisor
        return

    def open_version(path: Path, metrics: Metrics) -> OpenFolder:
        hosts = None if server.keys else {*LOOPBACK, server.host}
        return OpenFolder.of(path, options, server.keys, hosts, REPLACED_S, server.origins, metrics)

    with (
        sending_traces() if server.traces else contextlib.nullcontext(),
        contextlib.closing(ServedFolder(folder, open_version, watched=server.reload)) as served_folder,
    ):
        yield served_folder


def _work(
    folder: Path, options: ServiceOptions, server: ServerOptions, path: str, restarts: int, say: Callable[[str], None]
) -> int:
    """Serves a folder at the Unix socket `path`, behind a supervisor, which learns from `say` that it can begin."""
    alone = ServerOptions(**{**vars(server), "supervise": False, "keep_alive_s": KEEP_ALIVE_S})
    with _served(folder, options, alone) as served, _listening_at(path) as listener:
        assert isinstance(served, ServedFolder)
        served.metrics.restarted(restarts)
        say(served.description)
        return _run(served, listener, alone)


def _run(served: ServedApp, listener: socket.socket, options: ServerOptions) -> int:
    """Answers requests until a signal or `served` ends it; returns the exit code."""
    supervised = listener.family == socket.AF_UNIX
    config = uvicorn.Config(
        served,
        http=Connection,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=options.keep_alive_s,  # type: ignore[arg-type]  # Only given to call_later, as it is.
        timeout_graceful_shutdown=LEAST_SHUTDOWN_S,
        server_header=False,
        # The supervisor writes the date of each answer, and says where requests come from.
        date_header=not supervised,
        forwarded_allow_ips="*" if supervised else None,
    )
    server = _Server(config, served, options.drain_s, reload=options.reload, supervised=supervised)
    configure_logging(options.log_format, requests=options.log_requests)
    server.run(sockets=[listener])
    return server.exit_code


def _allow_connections() -> None:
    """Raises the limit of file descriptors: each connection takes one, and many systems allow only 1,024 by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A supervisor takes two descriptors for each connection.
    wanted = 3 * MOST_CONNECTIONS
    if resource.RLIM_INFINITY != soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        raise UsageError(f"--host {host} --port {port}: cannot listen there ({error}); name another port") from error
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Only on Linux. Connections inherit it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_MS)
    return listener


def _listening_at(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise UsageError(f"{path}: cannot listen there ({error}); name another folder with TMPDIR") from error
    listener.listen(MOST_CONNECTIONS)
    return listener


class _Server(uvicorn.Server):
    """A uvicorn server that keeps answering while it drains.

    Attributes:
        exit_code: 0 after a normal shutdown.
    """

    def __init__(
        self, config: uvicorn.Config, served: ServedApp, drain_s: float, *, reload: bool, supervised: bool
    ) -> None:
        super().__init__(config)
        self.exit_code = 0
        self._served, self._drain_s, self._reload, self._supervised = served, drain_s, reload, supervised
        self._signals = 0

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's handlers, which close the port at the first signal."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        if self._reload:
            loop.add_signal_handler(signal.SIGHUP, self._served.ask)
        watching = [loop.create_task(self._served.watch()), loop.create_task(self._watch())]
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
        elif not self._supervised:
            # Exits at once: a step of the engine may take long, and no file is being written. A worker ends with its
            # supervisor instead: systemd may send the first signal to both, and the supervisor passes it on.
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

"""Serves a build folder in a process of its own, and replaces that process when it crashes.

Engines run native code. A fault in that code (SIGSEGV), or the kernel's out-of-memory killer, ends the whole process.
So the engines run in a process of their own, the worker, and this process stands in front of it:

    client -- TCP --> supervisor -- Unix socket --> worker: the server without a supervisor

The supervisor passes requests and answers on as they are. When the worker has ended, requests that it had not begun to
answer, and all that arrive until another one can serve, get status 503 with Retry-After. Streams get an error as their
last event. The supervisor gives up after some workers in a row that could not begin, so that its own supervisor acts.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import faulthandler
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import string
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from urllib.parse import quote

import httpcore2
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from mod_export.errors import EngineError, ModExportError, UsageError
from mod_export.serve.cors import Cors
from mod_export.serve.endpoint import BODY_S, ApiError, problem_of, slow_body
from mod_export.serve.inference_protocol import LIVE, READY
from mod_export.serve.request_log import RequestLog
from mod_export.serve.scheduler import CLOSING, LOG, ClosingError

TERMINATED = 143
"""Exit code after a second signal, or if the supervisor is gone: that of a program ended by SIGTERM."""
MOST_FAILURES = 5
"""Workers in a row that could not begin to serve, after which the supervisor gives up."""
LONGER_S = 5.0
"""How much longer than its texts a worker may take to end."""
IDLE_S = 30.0
"""Seconds that a connection to the worker stays open between two requests: less than the worker's own limit."""
FOR_ONE_HOP = {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade", b"http2-settings"}
"""Headers about one connection (RFC 9110, 7.6.1)."""
NOT_SENT_ON = FOR_ONE_HOP | {b"expect", b"forwarded", b"x-forwarded-for", b"x-forwarded-proto"}
NOT_SENT_BACK = FOR_ONE_HOP | {b"transfer-encoding"}
EVENTS, END_OF_EVENT = b"text/event-stream", b"\n\n"
NO_ROOM = "the server has no room for another connection; try again"
GONE = (httpcore2.NetworkError, httpcore2.RemoteProtocolError)
"""Errors of a request whose worker has ended, or to whose worker no connection can be made."""
PROCESSES = multiprocessing.get_context("spawn")
Work = Callable[[str, int, Callable[[str], None]], int]
"""Serves at the path of a Unix socket, which does not exist yet; gets the number of workers that crashed before, and
calls the function with a line about what it serves when it can begin. Returns an exit code. It must be picklable.
"""


class _NoRoomError(Exception):
    """There is no descriptor left for a connection to the worker."""


class Supervisor:
    """The application that passes requests on to the worker.

    Attributes:
        live: False if several workers in a row could not begin to serve.
    """

    def __init__(self, work: Work, origins: Collection[str] = ()) -> None:
        """Starts the first worker, and waits until it can serve.

        Args:
            work: what a worker does.
            origins: web pages of other origins that may read the supervisor's own answers.

        Raises:
            ModExportError: the worker's own error.
            EngineError: the worker ended before it could serve.
            UsageError: there is no folder for temporary files.
        """
        self.live = True
        self._work, self._draining, self._restarts = work, False, 0
        self._origins = origins
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="mod-export-")
        except OSError as error:
            raise UsageError(f"--supervise: needs a folder for a socket ({error}); name one with TMPDIR") from error
        self._worker = self._started(retry_s=1)
        try:
            self._worker.wait()
        except BaseException:  # Ctrl-C too must not leave the worker behind.
            self.close()
            raise

    @property
    def description(self) -> str:
        """What the worker serves, in one line."""
        return self._worker.description

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request with the worker's answer, or with a refusal of its own."""
        response: Response
        try:
            if self._worker.serves and await self._worker.answer(scope, receive, send):
                return
            response = self._unavailable(scope["path"])
        except TimeoutError:
            response = slow_body().response(scope["path"])
        except _NoRoomError:
            response = ApiError(503, NO_ROOM, code="no_room", retry_after_s=1).response(scope["path"])
        # Wrapped as the worker's application is, so that it has an id, a line in the log, and CORS headers.
        await RequestLog(Cors(response, self._origins))(scope, receive, send)

    def stop_accepting(self) -> None:
        """Lets the worker refuse all new requests, and end when its texts are done."""
        self._draining = True
        self._worker.signal(signal.SIGTERM)

    def drain(self, within_s: float) -> None:
        """Waits until the worker has ended. Blocks."""
        if not self._worker.ended(within_s + LONGER_S):
            LOG.error("the process of the engines did not end in time, and is killed")
        self._worker.kill()

    def ask(self) -> None:
        """Lets the worker open the folder again. One that is starting opens the newest version anyway."""
        if self._worker.serves:
            self._worker.signal(signal.SIGHUP)

    def close(self) -> None:
        """Ends the worker at once."""
        self._worker.kill()
        self._folder.cleanup()

    async def watch(self) -> None:
        """Replaces each worker that has ended."""
        while True:
            await self._worker.over()
            if self._draining:
                return
            self._restarts += 1
            LOG.error("the process of the engines has ended (%s), and another one starts", self._worker.end)
            try:
                replaced = await self._replaced()
            except Exception:  # A bug. Nobody would start another worker, so the server must not stay.
                LOG.exception("no other process can be started")
                self.live = False
                return
            if not replaced:
                return

    async def _replaced(self) -> bool:
        """Starts workers until one can serve; returns False if there is none."""
        for failures in range(1, MOST_FAILURES + 1):
            if self._draining:
                return False
            try:
                self._worker = self._started(self._worker.retry_s)
                await asyncio.to_thread(self._worker.wait)
            except (ModExportError, OSError, RuntimeError) as error:  # No memory for a process, or for a thread.
                LOG.error("attempt %d of %d to serve again: %s", failures, MOST_FAILURES, error)
                self._worker.kill()
            else:
                return True
            await asyncio.sleep(2.0**failures)
        self.live = False
        return False

    def _started(self, retry_s: int) -> _Worker:
        return _Worker(self._work, Path(self._folder.name) / f"worker-{self._restarts}", self._restarts, retry_s)

    def _unavailable(self, path: str) -> Response:
        """Returns the supervisor's own answer, for the time in which no worker can serve."""
        if path in LIVE:
            return JSONResponse({"live": self.live}, 200 if self.live else 503)
        if path in READY:
            return JSONResponse({"ready": False}, 503)
        if self._draining:
            return problem_of(ClosingError(CLOSING)).response(path)
        return _crash(self._worker.retry_s).response(path)


class _Worker:
    """A process that serves the build folder.

    Attributes:
        serves: whether requests can be sent to it.
        description: what it serves, in one line.
        retry_s: seconds after which a client should try again when it has ended.
    """

    def __init__(self, work: Work, path: Path, restarts: int, retry_s: int) -> None:
        self.serves, self.description, self.retry_s = False, "", retry_s
        path.unlink(missing_ok=True)
        self._begin = time.monotonic()
        self._told, theirs = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=_run, args=(work, str(path), restarts, theirs))
        self._process.start()
        theirs.close()
        self._pool = httpcore2.AsyncConnectionPool(max_connections=None, keepalive_expiry=IDLE_S, uds=str(path))

    def wait(self) -> None:
        """Waits until the worker can serve. Blocks.

        Raises:
            ModExportError: the worker's own error.
            EngineError: the worker ended.
        """
        try:
            message = self._told.recv()
        except (EOFError, OSError) as error:
            self.ended()
            raise EngineError(f"the process of the engines ended before it could serve ({self.end})") from error
        if isinstance(message, ModExportError):
            raise message
        self.description, self.serves = message, True
        self.retry_s = math.ceil(time.monotonic() - self._begin)

    @property
    def end(self) -> str:
        """How the worker ended, in words."""
        self._process.join(LONGER_S)
        code = self._process.exitcode
        return f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name

    def ended(self, within_s: float | None = None) -> bool:
        """Waits until the worker has ended; returns False if this takes longer than `within_s`. Blocks."""
        return bool(multiprocessing.connection.wait([self._process.sentinel], within_s))

    async def over(self) -> None:
        """Returns when the worker has ended. No thread waits for that, because it would keep the event loop from
        closing.
        """
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._process.sentinel, over.set)
        try:
            await over.wait()
        finally:
            loop.remove_reader(self._process.sentinel)
        self.serves = False

    def signal(self, number: signal.Signals) -> None:
        """Sends the worker a signal, if it runs."""
        if not self.ended(0) and self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Ends the worker at once. Blocks until it has ended."""
        self.serves = False
        self._process.kill()
        self.ended()

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Passes a request to the worker, and its answer back to the client; returns False if the worker did not begin
        to answer.

        Raises:
            TimeoutError: the body of the request did not come in time.
            _NoRoomError: this process has no descriptor left for a connection to it.
        """
        sent = asyncio.Event()
        passing = asyncio.create_task(self._pass_on(scope, _body(receive, sent), send))
        leaving = asyncio.create_task(_client_left(receive, sent))
        try:
            await asyncio.wait({passing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            # A client that has left gets no answer. The connection to the worker closes, so its text ends as well.
            return passing.result() if passing.done() else True
        except ClientDisconnect:
            return True
        finally:
            passing.cancel()
            leaving.cancel()
            await asyncio.gather(passing, leaving, return_exceptions=True)

    async def _pass_on(self, scope: Scope, body: AsyncIterator[bytes], send: Send) -> bool:
        try:
            answer = await self._pool.handle_async_request(_request(scope, body))
        except GONE as error:
            # The pool raises the error again without its cause.
            if isinstance(error.__context__, OSError) and error.__context__.errno in (errno.EMFILE, errno.ENFILE):
                raise _NoRoomError from error
            return False
        headers = [(name.lower(), value) for name, value in answer.headers if name.lower() not in NOT_SENT_BACK]
        streams = dict(headers).get(b"content-type", b"").startswith(EVENTS)
        try:
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            parts = answer.aiter_stream()
            async for part in _whole_events(parts) if streams else parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except GONE:
            if not streams:
                raise  # The server closes the connection, so the client sees that the answer is not whole.
            # OpenAI's clients raise the `error` of an event as an exception.
            event = json.dumps(_crash(self.retry_s).openai())
            await send({"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True})
        finally:
            await answer.aclose()
        await send({"type": "http.response.body", "body": b""})
        return True


def _run(work: Work, path: str, restarts: int, told: multiprocessing.connection.Connection) -> None:
    """What a worker does."""
    # Ctrl-C in a terminal reaches a whole group of processes, but the supervisor says when the worker ends.
    os.setsid()
    faulthandler.enable()
    threading.Thread(target=_end_with_supervisor, args=[told, Path(path).parent], daemon=True).start()
    try:
        code = work(path, restarts, told.send)
    except ModExportError as error:
        told.send(error)
        code = error.exit_code
    sys.exit(code)


def _end_with_supervisor(told: multiprocessing.connection.Connection, folder: Path) -> None:
    """Waits until the supervisor is gone, and then ends the worker, and removes what the supervisor could not."""
    with contextlib.suppress(EOFError, OSError):
        told.recv()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(TERMINATED)


def _crash(retry_s: int) -> ApiError:
    return ApiError(
        503,
        "the process that runs the engines ended unexpectedly, and another one starts; try again",
        code="engine_restarting",
        retry_after_s=retry_s,
    )


def _request(scope: Scope, body: AsyncIterator[bytes]) -> httpcore2.Request:
    """Returns the request that the worker gets."""
    # Blanks around a value are no part of it (RFC 9110, 5.5), and the client library refuses them.
    headers = [(name, value.strip(b" \t")) for name, value in scope["headers"] if name.lower() not in NOT_SENT_ON]
    names = {name.lower() for name, _ in headers}
    if b"host" not in names:  # HTTP/1.0 has none. The worker refuses the empty one where it checks hosts.
        headers.append((b"host", b""))
    if scope.get("client"):
        headers += [(b"x-forwarded-for", scope["client"][0].encode()), (b"x-forwarded-proto", scope["scheme"].encode())]
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    # Clients may send bytes that no address has (RFC 3986, 2). They mean the same when they are escaped.
    url = httpcore2.URL(scheme=b"http", host=b"localhost", target=quote(target, safe=string.punctuation))
    return httpcore2.Request(scope["method"], url, headers=headers, content=body)


async def _body(receive: Receive, sent: asyncio.Event) -> AsyncIterator[bytes]:
    """Yields the body of a request as it arrives, and then sets `sent`.

    Raises:
        ClientDisconnect: the client has left before the body was complete.
        TimeoutError: the body did not come within BODY_S. The worker has the same limit, but its answer is read only
            after the whole body.
    """
    end, more = asyncio.get_running_loop().time() + BODY_S, True
    while more:
        async with asyncio.timeout_at(end):
            message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        more = message.get("more_body", False)
        if message.get("body"):
            yield message["body"]
    sent.set()


async def _whole_events(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yields server-sent events, each as soon as its end has come. If the worker is lost, the beginning of an event is
    dropped, because whatever followed it would be read as its rest.
    """
    held = b""
    async for part in parts:
        whole, end, held = (held + part).rpartition(END_OF_EVENT)
        if end:
            yield whole + end
    if held:
        yield held


async def _client_left(receive: Receive, sent: asyncio.Event) -> None:
    """Returns when the client has left after its whole request was read."""
    await sent.wait()
    while (await receive())["type"] != "http.disconnect":
        pass

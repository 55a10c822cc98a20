"""What all endpoints share: who may use them, how bodies are read, and how errors become responses."""

from __future__ import annotations

import asyncio
import codecs
import hmac
import json
import re
from collections.abc import Awaitable, Callable, Collection, Coroutine
from functools import wraps
from http import HTTPStatus
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from mod_export.errors import BuildFolderError, TargetError, UsageError
from mod_export.runtime.compiling import GrammarNotCompiledError
from mod_export.runtime.template_process import TemplateNotRenderedError
from mod_export.serve.request_log import CLIENT_LEFT
from mod_export.serve.scheduler import LOG, ClosingError, QueueFullError, WaitedTooLongError
from mod_export.serve.service import Service
from mod_export.serve.traces import name_request

HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[\w.-]+)(:\d{1,5})?", re.ASCII)
RETRY_S = 1
"""Retry-After for clients if the server has no free row or is shutting down: another replica may have a free row."""
BODY_S = 30.0
"""How many seconds a body may take to arrive."""
MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}
"""First bytes of compressed bodies -> the format."""
DISCARDED = 8
"""A body that is too large is read up to this multiple of the limit, because clients see no response while they send.
"""

FIELD = re.compile(r"([^:\s]+): ")
"""The field that a message begins with."""

Endpoint = Callable[[Request], Awaitable[Response]]
Result = TypeVar("Result")


def service_of(request: Request) -> Service:
    """Returns the open build folder that answers a request."""
    service: Service = request.app.state.service
    return service


# Access.


class Guard:
    """Checks requests before they reach an endpoint, and turns errors into responses."""

    def __init__(
        self, keys: Collection[str], hosts: Collection[str] | None, origins: Collection[str] = frozenset()
    ) -> None:
        self._keys = [key.encode() for key in keys]
        self._hosts, self._origins = hosts, origins

    def __call__(self, path: str, endpoint: Endpoint) -> Endpoint:
        """Wraps the endpoint of a path."""

        @wraps(endpoint)
        async def guarded(request: Request) -> Response:
            metrics = service_of(request).metrics
            name_request(request.method, path)
            try:
                self.check(request)
                response = await endpoint(request)
            except ClientDisconnect:
                response = Response(status_code=CLIENT_LEFT)
            except Exception as error:  # For any error, the client gets a response in the format of its API.
                problem = problem_of(error)
                metrics.refused(problem.code or str(problem.status))
                response = problem.response(path_of(request))
            metrics.answered(path, response.status_code)
            return response

        return guarded

    def check(self, request: Request) -> None:
        if self._hosts is not None:
            self._check_hosts(request, self._hosts)
        if not self._keys:
            return
        scheme, _, key_text = request.headers.get("authorization", "").partition(" ")
        key_bytes = key_text.strip().encode("latin-1")  # The original bytes: Starlette decodes headers as latin-1.
        # Compares with every key, each in constant time, so that timing reveals nothing.
        matches = [hmac.compare_digest(key_bytes, known_key) for known_key in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(401, "this server needs an API key: Authorization: Bearer KEY", code="invalid_api_key")

    def _check_hosts(self, request: Request, hosts: Collection[str]) -> None:
        with_key = "give it API keys (--api-key-file, on Ray api_key_file)"
        host = request.headers.get("host", "")
        match = HOST.fullmatch(host)
        if match is None or match["name"].strip("[]").lower() not in hosts:
            raise ApiError(
                403,
                f"Host {host[:80]!r}: without an API key this server answers as "
                f"{', '.join(sorted(hosts))} only; {with_key} to be reached by other names",
            )
        origin = request.headers.get("origin")
        if origin is not None and origin not in self._origins and origin.partition("://")[2] != host:
            raise foreign_page(origin)


def foreign_page(origin: str) -> ApiError:
    """Returns the refusal of a request from a web page that the server does not know."""
    return ApiError(
        403,
        f"Origin {origin[:80]!r}: this server answers only its own page and those that it was started for; "
        f"allow another one with --allow-origin {origin[:80]} (on Ray allow_origins)",
    )


def path_of(request: Request) -> str:
    """Path of the request, without the prefix at which the application is mounted."""
    path: str = request.scope["path"]
    return path.removeprefix(request.scope.get("root_path", ""))


# Bodies.


async def read_body(request: Request, most_bytes: int) -> bytes:
    """Returns the whole body, if it has at most `most_bytes`.

    Raises:
        ApiError: the body is too large, encoded, or did not arrive in time.
        ClientDisconnect: the client has disconnected.
    """
    try:
        async with asyncio.timeout(BODY_S):
            body = await _read(request, most_bytes)
    except TimeoutError:
        raise slow_body() from None
    encoding = request.headers.get("content-encoding", "identity").strip()
    if encoding.lower() not in ("", "identity"):
        raise ApiError(415, f"Content-Encoding {encoding[:80]}: bodies are read as they are; send this one unencoded")
    return body


def slow_body() -> ApiError:
    """Returns the refusal of a request whose body did not come in time."""
    return ApiError(408, f"the body of the request did not come within {BODY_S:g} s")


def json_of(body: bytes) -> bytes:
    """Returns the JSON text of a body, without the byte order mark that some programs write before UTF-8.

    Raises:
        ApiError: the body is compressed, or text of another encoding (RFC 8259, 8.1, allows none but UTF-8).
    """
    packed = next((name for magic, name in MAGIC.items() if body.startswith(magic)), None)
    if packed is not None:
        raise ApiError(400, f"the body of the request is compressed ({packed}); send the JSON itself")
    encoding = json.detect_encoding(body)
    if encoding.startswith(("utf-16", "utf-32")):
        raise ApiError(400, f"the body of the request is {encoding[:6].upper()}; send JSON in UTF-8, the only encoding "
                            "of JSON between programs")  # fmt: skip
    return body.removeprefix(codecs.BOM_UTF8)


async def _read(request: Request, most_bytes: int) -> bytes:
    body, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= most_bytes:
            body += chunk
        elif size > DISCARDED * most_bytes:
            break
    if size > most_bytes:
        raise ApiError(413, f"the body of the request is larger than {most_bytes:,} bytes; ask for less at once")
    return bytes(body)


async def _gone(receive: Receive) -> None:
    """Returns when the client has disconnected. It drops parts of a body, so the body must be read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Returns the result of `work`; cancels it if the client disconnects first.

    Raises:
        ClientDisconnect: the client has disconnected.
    """
    leaving, working = asyncio.create_task(_gone(receive)), asyncio.create_task(work)
    try:
        await asyncio.wait({leaving, working}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        leaving.cancel()
        working.cancel()


# Errors.


class ApiError(Exception):
    """A request that cannot be answered.

    Attributes:
        status: HTTP status.
        kind: `type` of OpenAI's error object.
        param: name of the invalid field.
        code: machine-readable reason.
        retry_after_s: seconds until the client should try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after_s = status, param, code, retry_after_s

    @property
    def kind(self) -> str:
        named = {401: "authentication_error", 429: "rate_limit_error"}
        return named.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def openai(self) -> dict[str, dict[str, str | None]]:
        """Returns the body in the format of OpenAI's API."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    def response(self, path: str) -> Response:
        """Returns the response, in the format of the Open Inference Protocol under /v2 and of OpenAI elsewhere."""
        body = {"error": str(self)} if path.startswith("/v2") else self.openai()
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status == HTTPStatus.UNSUPPORTED_MEDIA_TYPE:
            headers["Accept-Encoding"] = "identity"  # RFC 9110, 15.5.16: the encoding to use instead.
        return JSONResponse(body, self.status, headers)


def problem_of(error: Exception) -> ApiError:
    """Returns the error to send to a client. Internal errors are logged, and the client does not see their text."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            return ApiError(429, str(error), code="queue_full", retry_after_s=error.retry_after_s)
        case WaitedTooLongError():
            return ApiError(503, str(error), code="waited_too_long", retry_after_s=RETRY_S)
        case GrammarNotCompiledError():
            return ApiError(503, str(error), code="not_compiled", retry_after_s=error.retry_after_s)
        case TemplateNotRenderedError():
            return ApiError(503, str(error), code="not_rendered", retry_after_s=RETRY_S)
        case ClosingError():
            return ApiError(503, str(error), code="shutting_down", retry_after_s=RETRY_S)
        case UsageError() if not isinstance(error, BuildFolderError | TargetError):  # Not the client's fault.
            return ApiError(400, str(error))
        case ValidationError():
            return _invalid(error)
    LOG.error("a request failed: %s", error, exc_info=error)
    return ApiError(500, "the server failed to answer this request; its log says why", code="failed")


def _invalid(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = ".".join(str(part) for part in first["loc"]) or None
    message = first["msg"].removeprefix("Value error, ")
    if param is not None:
        return ApiError(400, f"{param}: {message}", param=param)
    named = FIELD.match(message)  # Checks of a whole request name the field themselves.
    return ApiError(400, message, param=named[1] if named else None)

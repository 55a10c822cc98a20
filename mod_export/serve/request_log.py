"""Gives every request an id, sends the id with the answer, and logs the request in one line, for people or for
programs. The span of the request begins here, too.

The id comes from the client's header X-Request-Id, or is a new one. The answer has the id in the same header, as
answers of OpenAI's API have, and so has every line that is logged while the request is answered. So the report of a
user, the log of a proxy and the log of this server can be matched.
"""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mod_export.serve.traces import answered, request_span, trace_of_request

LOG = logging.getLogger("mod_export.requests")
"""The logger that gets one record of level INFO for each answered request."""
HEADER = "X-Request-Id"
NAME = re.compile(rb"[\x21-\x7e]{1,128}")
"""Ids that are accepted from clients, because they can be written to a log and a header as they are."""
FORMATS = ("text", "json")
CLIENT_LEFT = 499
"""The status that nginx logs for a client that disconnected before the answer began; it is never sent."""
EXTRA = "mod_export"
"""Attribute of a log record with the fields of its JSON line."""

_request: ContextVar[str | None] = ContextVar("request", default=None)


class RequestLog:
    """The outermost layer of an application. An answer is logged when its last byte is sent, or its client has left."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        header = next((value for name, value in scope["headers"] if name == HEADER.lower().encode()), b"").strip(b" \t")
        name = header.decode() if NAME.fullmatch(header) else uuid.uuid4().hex
        status, begin = CLIENT_LEFT, time.perf_counter()

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = name
            await send(message)

        token = _request.set(name)
        with request_span(scope) as span:
            try:
                await self._app(scope, receive, named)
            finally:
                answered(span, status, name)
                _log(scope, status, time.perf_counter() - begin)
                _request.reset(token)


def _log(scope: Scope, status: int, seconds: float) -> None:
    if not LOG.isEnabledFor(logging.INFO):
        return
    # The query is left out: addresses here have none, and what a client put there may be secret.
    path = scope["path"][:200]
    client = scope["client"][0] if scope.get("client") else None
    fields = {
        "method": scope["method"], "path": path, "status": status, "seconds": round(seconds, 6), "client": client,
    }  # fmt: skip
    printable_path = path.encode("unicode_escape").decode()
    LOG.info("%s %s %s %d %.3f s", client, scope["method"], printable_path, status, seconds, extra={EXTRA: fields})


class _Named(logging.Filter):
    """Adds the name of the request, and of its trace, to the records that are made while it is answered."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id, record.trace_id = _request.get(), trace_of_request()
        return True


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        name = getattr(record, "request_id", None)
        return f"{record.levelname.lower()}: {super().format(record)}" + (f" [{name}]" if name else "")


class _Json(logging.Formatter):
    """One object a line: time (RFC 3339), level, logger, message, request_id, trace_id if the request is traced, and
    for requests method, path, status, seconds and client. A traceback is one text in `exception`.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        names = {name: getattr(record, name, None) for name in ("request_id", "trace_id")}
        line |= {name: value for name, value in names.items() if value is not None}
        line |= getattr(record, EXTRA, {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logging(form: str, *, requests: bool) -> None:
    """Sends what this process logs to stderr: warnings and errors, new versions of the served folder, and with
    `requests` a line for each request.

    Args:
        form: one of FORMATS.
        requests: whether requests are logged.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if form == "json" else _Text())
    handler.addFilter(_Named())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("mod_export").setLevel(logging.INFO)
    LOG.setLevel(logging.INFO if requests else logging.WARNING)

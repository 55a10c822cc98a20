"""One connection of HTTP/1.1: uvicorn's protocol over llhttp (the package httptools), with more checks and limits.

A connection handles one request at a time. A request that arrives before the previous one is answered is not read, and
the connection closes after the answer (RFC 9112, 9.3.2). So no queue grows without limit, and a disconnect is seen at
once.
"""

from __future__ import annotations

import asyncio

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S = 15.0
"""How many seconds the head of a request may take from its first byte, or from the beginning of the connection."""
MOST_HEAD_BYTES = 1 << 16
"""Limit of a request head. It is checked after each read, and one read returns a few hundred kilobytes at most."""
MOST_HEADERS = 100
FOR_AN_UPGRADE = (b"connection", b"upgrade", b"http2-settings")


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
        """Limits the time of a head, and of the rest of a body whose request was answered already. uvicorn starts its
        limit of the time between two requests only when it answers, so it is started here after such a body.
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

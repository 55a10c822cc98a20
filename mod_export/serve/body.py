"""Reads request bodies with limits of size and time, and detects clients that disconnect before the response."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from mod_export.serve.problems import ApiError

BODY_S = 30.0
"""How many seconds a body may take to arrive."""
DISCARDED = 8
"""A body that is too large is read up to this multiple of the limit: clients see no response while they send."""
Result = TypeVar("Result")


async def read_body(request: Request, most_bytes: int) -> bytes:
    """Returns the whole body, if it has at most `most_bytes`.

    Raises:
        ApiError: the body is too large, or did not arrive in time.
        ClientDisconnect: the client has disconnected.
    """
    try:
        async with asyncio.timeout(BODY_S):
            return await _read(request, most_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body of the request did not come within {BODY_S:g} s") from None


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


async def gone(receive: Receive) -> None:
    """Returns when the client has disconnected. Use it only after the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Returns the result of `work`; cancels it if the client disconnects first.

    Raises:
        ClientDisconnect: the client has disconnected.
    """
    leaving, working = asyncio.create_task(gone(receive)), asyncio.create_task(work)
    try:
        await asyncio.wait({leaving, working}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        leaving.cancel()
        working.cancel()

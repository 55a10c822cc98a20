"""The body of a request, bounded in size and time, and clients that leave before they are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from mod_export.serve.problems import ApiError

BODY_S = 30.0
"""Seconds in which a body has to come."""
DISCARDED = 8
"""Times what a body may have that is read of it all the same: a client that is still sending does not see an answer."""
Result = TypeVar("Result")


async def read_body(request: Request, most_bytes: int) -> bytes:
    """The whole body, of at most so many bytes.

    Raises:
        ApiError: it is too large, or did not come in time.
        ClientDisconnect: the client has left.
    """
    try:
        async with asyncio.timeout(BODY_S):
            return await _read(request, most_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body of the request did not come within {BODY_S:g} s") from None


async def _read(request: Request, most_bytes: int) -> bytes:
    found, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= most_bytes:
            found += chunk
        elif size > DISCARDED * most_bytes:
            break
    if size > most_bytes:
        raise ApiError(413, f"the body of the request is larger than {most_bytes:,} bytes; ask for less at once")
    return bytes(found)


async def gone(receive: Receive) -> None:
    """Returns when the client has left. Only for requests whose body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of some work, which ends when the client leaves.

    Raises:
        ClientDisconnect: it has left.
    """
    left, working = asyncio.create_task(gone(receive)), asyncio.create_task(work)
    try:
        await asyncio.wait({left, working}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        left.cancel()
        working.cancel()

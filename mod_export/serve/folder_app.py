"""The application of one open build folder, which can be closed while it answers requests: it finishes them first.

A server that takes a new version of its folder, and a replica of Ray Serve that opens another model, both close a
folder while requests for it are being answered.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Self

from starlette.types import ASGIApp, Receive, Scope, Send

from mod_export.errors import EngineError
from mod_export.serve.app import create_app
from mod_export.serve.metrics import Metrics
from mod_export.serve.service import Service, ServiceOptions, open_service


class OpenFolder:
    """The application of an open build folder; `close` waits for its current requests.

    Attributes:
        service: the service behind the application.
        closed: whether the folder was closed.
    """

    def __init__(self, opened: contextlib.ExitStack, service: Service, app: ASGIApp, drain_s: float) -> None:
        """`opened` closes the service. Requests have `drain_s` seconds to finish before that."""
        self._changed = threading.Condition()
        self._requests = 0
        self._opened, self._app, self._drain_s = opened, app, drain_s
        self.service, self.closed = service, False

    @classmethod
    def of(
        cls,
        folder: Path,
        options: ServiceOptions,
        keys: Collection[str],
        hosts: Collection[str] | None,
        drain_s: float,
        origins: Collection[str] = frozenset(),
        metrics: Metrics | None = None,
    ) -> Self:
        """Opens a build folder; see `open_service` and `create_app`."""
        opened = contextlib.ExitStack()
        service = opened.enter_context(open_service(folder, options, metrics))
        return cls(opened, service, create_app(service, keys, hosts, origins), drain_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        with self._changed:
            self._requests += 1
        try:
            await self._app(scope, receive, send)
        finally:
            with self._changed:
                self._requests -= 1
                self._changed.notify_all()

    def check(self) -> None:
        """Raises an error if the process must be replaced.

        Raises:
            EngineError: the engine failed several times in a row, or the scheduler ended.
        """
        if not self.closed and not self.service.live:
            reason = "its engines keep failing, or it writes no more; the log says why"
            raise EngineError(f"{self.service.name}: {reason}. Start another process")

    def close(self) -> None:
        """Waits up to `drain_s` for current requests, then closes the build folder. Blocks."""
        end = time.monotonic() + self._drain_s
        with self._changed:
            self._changed.wait_for(lambda: not self._requests, self._drain_s)
            if self.closed:
                return
            self.closed = True
        # Scoring of a prompt continues even if its client has disconnected, and needs the engine until it is done.
        self.service.drain(max(0.0, end - time.monotonic()))
        self._opened.close()

    # Ray Serve calls this when it evicts a folder from its cache; Python calls it if a load was abandoned.
    def __del__(self) -> None:
        self.close()

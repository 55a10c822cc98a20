"""Takes a new version of the served build folder while the server runs, without losing a text.

The new version is opened beside the old one. When it can answer, new requests go to it, and the old one closes when its
last request is answered. For a while both are in memory. A version that cannot be opened, or that cannot write text or
read whole rows although the old one can, is logged, and the old one stays.

A version has to be complete when it appears: switch a symbolic link, or rename a folder into place. Files of a folder
that is being served must not be overwritten, because engines read their weights from them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from starlette.types import Receive, Scope, Send

from mod_export.errors import ModExportError, TargetError
from mod_export.folder.manifest import MANIFEST
from mod_export.serve.folder_app import OpenFolder
from mod_export.serve.metrics import Metrics
from mod_export.serve.scheduler import LOG

LOOK_S = 1.0
"""Seconds between two looks at the manifest."""
MOST_RETRY_S = 60.0
"""A version that cannot be taken is tried again after 2, 4, 8 ... seconds, and at most after this many: it may still
be being copied.
"""
Open = Callable[[Path, Metrics], OpenFolder]
Version = tuple[int, int, int, int]


class _LostPartError(TargetError):
    """A version cannot do something that the one before can. Opening it again would change nothing."""


class ServedFolder:
    """The application of a server. It passes each request to the newest version of its build folder.

    Attributes:
        current: answers new requests.
        metrics: shared by all versions.
    """

    def __init__(self, path: Path, open_version: Open, *, watched: bool) -> None:
        """Opens the folder.

        Args:
            path: where the folder is.
            open_version: opens it; gets the path without symbolic links, and the metrics to use.
            watched: whether new versions are taken.

        Raises:
            ModExportError: it cannot be opened.
        """
        self._path, self._open, self._watched = path, open_version, watched
        self._asked = asyncio.Event()
        self._replaced: OpenFolder | None = None
        self.metrics = Metrics()
        self._version = self._look()
        self._refused: Version | None = None
        self.current = self._opened()
        self.current.service.show_gauges()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        await self.current(scope, receive, send)

    @property
    def description(self) -> str:
        """One line about the newest version."""
        return f"{self.current.service.name}: {self.current.service.describe()}"

    @property
    def live(self) -> bool:
        """False if only a restart would help."""
        return self.current.service.live

    def stop_accepting(self) -> None:
        """Refuses all new requests with status 503."""
        self.current.service.draining = True

    def drain(self, within_s: float) -> None:
        """Waits up to `within_s` for the texts of all versions, and then ends unfinished ones. Blocks."""
        open_versions = [version for version in (self.current, self._replaced) if version is not None]
        threads = [threading.Thread(target=version.service.drain, args=[within_s]) for version in open_versions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        """Closes the folder. Blocks."""
        self.current.close()

    def ask(self) -> None:
        """Asks for the folder to be opened again, also if it looks unchanged."""
        self._asked.set()

    async def watch(self) -> None:
        """Takes every new version until it is cancelled."""
        wait_s = LOOK_S
        while self._watched:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), wait_s)
            is_requested = self._asked.is_set()
            self._asked.clear()
            version = self._look()
            unchanged = version in (None, self._version, self._refused) and not is_requested
            done = unchanged or await self._take(version)
            wait_s = LOOK_S if done else min(2 * wait_s, MOST_RETRY_S)

    async def _take(self, version: Version | None) -> bool:
        """Opens a version and closes the one before; returns False if it may be opened later."""
        try:
            new = await asyncio.to_thread(self._successor)
        except _LostPartError as error:
            self._failed(error)
            self._refused = version
            return True
        except (ModExportError, OSError) as error:
            self._failed(error)
            return False
        except Exception as error:  # A bug, which must not end the texts of the version that works.
            self._failed(error, traceback=True)
            return False
        if self.current.service.draining:
            await asyncio.to_thread(new.close)
            return True
        old, self.current, self._version = self.current, new, version
        new.service.show_gauges()
        self.metrics.reloaded("taken")
        LOG.info("%s: serves a new version: %s", new.service.name, new.service.describe())
        self._replaced = old
        # The old version closes before another one is opened, so that there are never three in memory.
        await asyncio.to_thread(old.close)
        self._replaced = None
        return True

    def _failed(self, error: Exception, *, traceback: bool = False) -> None:
        self.metrics.reloaded("failed")
        message = "%s: cannot be taken, so the version before is served on: %s"
        LOG.error(message, self._path, error, exc_info=error if traceback else None)

    def _successor(self) -> OpenFolder:
        """Opens the newest version.

        Raises:
            ModExportError: it cannot be opened.
            _LostPartError: it cannot do everything that the current version can.
        """
        new = self._opened()
        missing = new.service.missing(self.current.service)
        if missing is not None:
            new.close()
            raise _LostPartError(f"it cannot do all that the version before can: {missing}")
        return new

    def _opened(self) -> OpenFolder:
        # Engines are opened when they are first needed. By then a link may lead to another version.
        return self._open(self._path.resolve(), self.metrics)

    def _look(self) -> Version | None:
        """Returns the properties in which two manifests at the same path differ; None if there is no manifest at the
        moment.
        """
        try:
            manifest = (self._path / MANIFEST).stat()
        except OSError:
            return None
        return manifest.st_dev, manifest.st_ino, manifest.st_size, manifest.st_mtime_ns

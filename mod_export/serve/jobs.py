"""Requests, events and errors of a scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from mod_export.errors import ModExportError
from mod_export.runtime.rows import Completion, Piece, Text


class QueueFullError(ModExportError):
    """There is no room for a request now.

    Attributes:
        retry_after_s: whole seconds until there may be room, at least 1.
    """

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class WaitedTooLongError(ModExportError):
    """A request got no row in time."""


class ClosingError(ModExportError):
    """The scheduler accepts no more requests, or ended before this one was done."""


class Ended(NamedTuple):
    """A text is complete, or was cancelled.

    Attributes:
        row: index of the prompt.
        completion: the whole text.
    """

    row: int
    completion: Completion


class Failed(NamedTuple):
    """A request failed as a whole; no further event follows.

    Attributes:
        error: `WaitedTooLongError`, `ClosingError` or EngineError; any other type is a bug.
    """

    error: Exception


Event = Piece | Ended | Failed


class Observer(Protocol):
    """Receives events of a scheduler, on the scheduler's thread."""

    def began(self, text: Text, waited_s: float) -> None:
        """A text got a row after it waited `waited_s` seconds."""

    def wrote(self, text: Text, since_s: float | None) -> None:
        """A token was written, `since_s` seconds after the previous one; None for the first token of a text."""

    def ended(self, text: Text) -> None:
        """A text is complete, or was cancelled."""

    def failed(self, error: Exception, texts: int) -> None:
        """A request failed while `texts` of its texts were unfinished."""


class Silent:
    """An observer that ignores everything."""

    def began(self, text: Text, waited_s: float) -> None: ...
    def wrote(self, text: Text, since_s: float | None) -> None: ...
    def ended(self, text: Text) -> None: ...
    def failed(self, error: Exception, texts: int) -> None: ...


@dataclass(eq=False, slots=True)
class Job:
    """The texts of one request.

    Attributes:
        tell: receives the events of the request.
        texts: all texts.
        waiting: the texts that have no row yet.
        begin_by: deadline for the first text to begin, from `time.monotonic`; after it the request fails.
        begun: whether a text has begun.
    """

    tell: Callable[[Event], None]
    texts: Sequence[Text]
    waiting: deque[Text]
    begin_by: float
    begun: bool = False

    def cancel(self) -> None:
        """Cancels unfinished texts before their next token. Any thread may call it, any number of times."""
        for text in self.texts:
            text.cancelled = True

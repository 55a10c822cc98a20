"""What a scheduler is given, what it tells of it, and why it refuses."""

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
        retry_after_s: when there may be, in whole seconds, at least 1.
    """

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class WaitedTooLongError(ModExportError):
    """A request got no row in time."""


class ClosingError(ModExportError):
    """The scheduler takes no more requests, or ended before this one was done."""


class Ended(NamedTuple):
    """A text is complete, or was cancelled.

    Attributes:
        row: number of the prompt.
        completion: all of it.
    """

    row: int
    completion: Completion


class Failed(NamedTuple):
    """A request failed as a whole, and no further event comes.

    Attributes:
        error: `WaitedTooLongError`, `ClosingError` or EngineError; anything else is a bug.
    """

    error: Exception


Event = Piece | Ended | Failed


class Observer(Protocol):
    """What is told about the work of a scheduler, on its thread."""

    def began(self, text: Text, waited_s: float) -> None:
        """A text got a row after it had waited."""

    def wrote(self, text: Text, since_s: float | None) -> None:
        """A new token, and the seconds since the one before it; None for the first of a text."""

    def ended(self, text: Text) -> None:
        """A text is complete, or was cancelled."""

    def failed(self, error: Exception, texts: int) -> None:
        """A request failed that had this many texts left."""


class Silent:
    """Observes nothing."""

    def began(self, text: Text, waited_s: float) -> None: ...
    def wrote(self, text: Text, since_s: float | None) -> None: ...
    def ended(self, text: Text) -> None: ...
    def failed(self, error: Exception, texts: int) -> None: ...


@dataclass(eq=False, slots=True)
class Job:
    """The texts of one request.

    Attributes:
        texts: all of them.
        waiting: those that have no row yet.
        begin_by: of `time.monotonic`; a request none of whose texts has begun by then fails.
        begun: whether one has.
    """

    tell: Callable[[Event], None]
    texts: Sequence[Text]
    waiting: deque[Text]
    begin_by: float
    begun: bool = False

    def cancel(self) -> None:
        """Ends what is left of it before its next token; from any thread, and as often as one likes."""
        for text in self.texts:
            text.cancelled = True

"""A thread that owns the rows of decoders, and a queue of requests for them.

Between two steps, the thread removes cancelled texts from their rows and starts waiting texts in free rows. So a short
text that arrives late can end before a long text that arrived early. Requests take turns in order of arrival: each
starts one text before any of them starts a second one. While texts are being written, at most one part of a prompt is
read between two steps, so a burst of prompts does not pause these texts until all prompts are read.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from mod_export.errors import EngineError, ModExportError, UsageError
from mod_export.runtime.generator import Generator
from mod_export.runtime.rows import Completion, Piece, RowText
from mod_export.runtime.text_rows import TextRows, Written
from mod_export.serve import MAX_QUEUE, MAX_WAIT_S
from mod_export.types import Bucket

LOG = logging.getLogger("mod_export.serve")
MOST_FAILURES = 3
"""After this many failures of an engine in a row, its server is no longer healthy."""
PROMPTS, STEPS = "prompts", "steps"
"""The work of the engines that read prompts, and of those that write."""
GUESSED_TEXT_S = 1.0
"""Assumed seconds per text, for `QueueFullError.retry_after_s`, before any text has been measured."""
WEIGHT = 0.1
"""Weight of the newest text in the running mean of seconds per text."""


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


CLOSING = "this server is shutting down and takes no more requests"


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
        error: `WaitedTooLongError`, `ClosingError` or EngineError. Formats of answers add their own, such as ApiError;
            any other type is a bug.
    """

    error: Exception


Event = Piece | Ended | Failed


class TextObserver:
    """Receives events of a scheduler, most of them on the scheduler's thread. This one ignores them."""

    def submitted(self, text: RowText) -> None:
        """A text is going to be queued. Called on the thread that submits its request."""

    def began(self, text: RowText, waited_s: float) -> None:
        """A text got a row after it waited `waited_s` seconds."""

    def wrote(self, text: RowText, since_s: float | None) -> None:
        """A token was written, `since_s` seconds after the previous one; None for the first token of a text."""

    def ended(self, text: RowText) -> None:
        """A text is complete, or was cancelled."""

    def failed(self, error: Exception, texts: Sequence[RowText]) -> None:
        """A request failed while these of its texts were unfinished."""


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
    texts: Sequence[RowText]
    waiting: deque[RowText]
    begin_by: float
    begun: bool = False

    def cancel(self) -> None:
        """Cancels unfinished texts before their next token. Any thread may call it, any number of times."""
        for text in self.texts:
            text.cancelled = True


@dataclass(eq=False, slots=True)
class _InRow:
    """State of a text that has a row. Times are from `time.perf_counter`.

    Attributes:
        job: its request.
        begun: when it got the row.
        last: when its last token was written; None before the first.
    """

    job: Job
    begun: float
    last: float | None = None


class Scheduler:
    """Writes the texts of many requests in the rows of decode engines.

    Attributes:
        generator: writes the texts.
        buckets: buckets of the engines in use, in ascending order of rows.
        bucket: the last of `buckets`.
    """

    def __init__(
        self,
        generator: Generator,
        rows: int | None = None,
        max_queue: int = MAX_QUEUE,
        max_wait_s: float = MAX_WAIT_S,
        observers: Sequence[TextObserver] = (),
    ) -> None:
        """The thread starts with the `with` block and uses the generator exclusively until the block ends.

        Args:
            generator: writes the texts; the scheduler must be its only user.
            rows: number of texts written at once, all by one engine, so the number of other texts does not change even
                the last bit of a text's logits. None uses the smallest decode bucket while its rows are enough, and
                then the largest.
            max_queue: how many texts may wait for a row.
            max_wait_s: how many seconds a request may wait for its first row.
            observers: receive events.

        Raises:
            UsageError: no decode bucket has so many rows, or a limit is out of range.
        """
        self.buckets = _buckets_of(generator, rows)
        self.bucket = self.buckets[-1]
        if max_queue < 0:
            raise UsageError(f"max_queue: expected at least 0, got {max_queue}")
        if not 0 < max_wait_s < math.inf:
            raise UsageError(f"max_wait: expected a number of seconds above 0, got {max_wait_s:g}")
        self.generator, self._max_queue, self._max_wait_s = generator, max_queue, max_wait_s
        self._observers = tuple(observers)
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._in_rows: dict[RowText, _InRow] = {}
        self._untold: list[tuple[Job, Event]] = []
        self._text_s = GUESSED_TEXT_S
        self._failures = {PROMPTS: 0, STEPS: 0}
        self._draining = self._stopping = False
        self._broken: Exception | None = None
        self._opened = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mod-export scheduler", daemon=True)

    # Any thread may use the following.

    @property
    def waiting(self) -> int:
        """Number of texts that wait for a row."""
        with self._changed:
            return sum(len(job.waiting) for job in self._jobs)

    @property
    def busy(self) -> int:
        """Number of texts that have a row."""
        return len(self._in_rows)

    @property
    def healthy(self) -> bool:
        """Whether the thread runs and no engine has failed several times in a row."""
        works = max(self._failures.values()) < MOST_FAILURES
        return self._thread.is_alive() and self._broken is None and works

    @property
    def most_texts(self) -> int:
        """Number of texts of the largest request that can ever be accepted."""
        return self._max_queue + self.bucket.batch

    def check_room(self, texts: int) -> None:
        """Raises the error that `submit` would raise for this many texts.

        Raises:
            ClosingError: no more requests are accepted.
            QueueFullError: there is no room for so many texts now.
        """
        with self._changed:
            self._check_room(texts)

    def submit(self, texts: Sequence[RowText], tell: Callable[[Event], None]) -> Job:
        """Queues a request. `tell` receives its events on the scheduler's thread and must not block. Events are pieces
        of its texts and one `Ended` per text, or `Failed` for all unfinished texts.

        Raises:
            ClosingError: no more requests are accepted.
            QueueFullError: there is no room for the request now.
        """
        now = time.perf_counter()
        for text in texts:
            text.since = now
        job = Job(tell, tuple(texts), deque(texts), time.monotonic() + self._max_wait_s)
        with self._changed:
            self._check_room(len(texts))
            for text in texts:
                for observer in self._observers:
                    observer.submitted(text)
            self._jobs.append(job)
            self._changed.notify()
        return job

    def drain(self, within_s: float) -> bool:
        """Stops accepting requests and waits for current ones; returns False if they take longer than `within_s`."""
        with self._changed:
            self._draining = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._jobs and not self._in_rows, within_s)

    def __enter__(self) -> Self:
        self._thread.start()
        self._opened.wait()
        if self._broken is not None:
            self._thread.join()
            raise self._broken
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Fails every unfinished request with `ClosingError`, and ends the thread."""
        with self._changed:
            self._draining = self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _check_room(self, texts: int) -> None:
        if self._broken is not None:
            raise ClosingError(
                f"texts cannot be written any more ({self._broken!r}); the server has to be started again"
            )
        if self._draining:
            raise ClosingError(CLOSING)
        waiting = sum(len(job.waiting) for job in self._jobs)
        free = self.bucket.batch - len(self._in_rows)
        if waiting + texts > self._max_queue + free:
            seconds = max(1, math.ceil((waiting + texts) * self._text_s / self.bucket.batch))
            raise QueueFullError(
                f"{len(self._in_rows)} texts are being written, {waiting} wait for a row and at most {self._max_queue} "
                f"may, so there is no room for {texts} more; try again in {seconds} s",
                seconds,
            )

    # The following runs on the scheduler's thread.

    def _run(self) -> None:
        try:
            with self.generator.open_rows(*self.buckets) as rows:
                self._opened.set()
                while self._wait_for_work():
                    try:
                        self._work(rows)
                    except EngineError as error:
                        rows.reset()
                        self._fail({state.job for state in self._in_rows.values()}, error)
        except Exception as error:  # Clients must not wait for a thread that has ended.
            self._broken = error
        finally:
            reason = self._broken or ClosingError("this server shut down before the request was done")
            with self._changed:
                self._draining = True
            self._fail({*self._jobs, *(state.job for state in self._in_rows.values())}, reason)
            self._opened.set()

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._in_rows or self._stopping)
            return not self._stopping

    def _work(self, rows: TextRows) -> None:
        """Starts waiting texts, reads one part of a prompt, and runs one step."""
        self._drop_ended_requests()
        self._deliver_events()
        while len(rows.busy) < rows.size and (text := self._next()) is not None:
            rows.begin(text)
        self._take_ended()
        # Counted apart: a part of a prompt that can be read says nothing about its last part, or about steps.
        self._run_engine(PROMPTS, rows.read_part, lambda: rows.from_prompts)
        self._run_engine(STEPS, rows.step, lambda: rows.steps)
        _ = rows.busy  # Removes texts that were cancelled meanwhile from their rows.
        self._take_ended()
        self._deliver_events()

    def _run_engine(self, work: str, run: Callable[[], Iterable[Written]], done: Callable[[], int]) -> None:
        """Passes on what an engine writes, and counts its failures in a row, which end when `done` rises."""
        before = done()
        try:
            self._pass_on(run())
        except EngineError:
            self._failures[work] += 1
            raise
        if done() > before:
            self._failures[work] = 0

    def _drop_ended_requests(self) -> None:
        """Drops texts that were cancelled while they waited, and fails requests that waited too long."""
        now = time.monotonic()
        late = []
        with self._changed:
            for job in list(self._jobs):
                for text in [waiting_text for waiting_text in job.waiting if waiting_text.cancelled]:
                    job.waiting.remove(text)
                    text.completion.finish = "cancelled"
                    self._say_ended(job, text)
                if not job.waiting:
                    self._jobs.remove(job)
                elif not job.begun and now > job.begin_by:
                    late.append(job)
            self._changed.notify_all()
        reason = f"no row was free within {self._max_wait_s:g} s; try again later"
        self._fail(late, WaitedTooLongError(reason))

    def _next(self) -> RowText | None:
        """Returns the next text of the request whose turn it is; None if no request waits."""
        with self._changed:
            if not self._jobs:
                return None
            job = self._jobs.popleft()
            text = job.waiting.popleft()
            if job.waiting:
                self._jobs.append(job)
            job.begun = True
            self._in_rows[text] = _InRow(job, time.perf_counter())
        for observer in self._observers:
            observer.began(text, time.perf_counter() - text.since)
        return text

    def _pass_on(self, written: Iterable[Written]) -> None:
        for text, piece in written:
            state = self._in_rows[text]
            if piece.token is not None:
                now = time.perf_counter()
                for observer in self._observers:
                    observer.wrote(text, None if state.last is None else now - state.last)
                state.last = now
            self._untold.append((state.job, piece))

    def _take_ended(self) -> None:
        for text in [candidate for candidate in self._in_rows if candidate.completion.finish]:
            with self._changed:
                state = self._in_rows.pop(text)
                self._changed.notify_all()
            self._text_s += WEIGHT * (time.perf_counter() - state.begun - self._text_s)
            self._say_ended(state.job, text)

    def _say_ended(self, job: Job, text: RowText) -> None:
        for observer in self._observers:
            observer.ended(text)
        self._untold.append((job, Ended(text.row, text.completion)))

    def _deliver_events(self) -> None:
        """Delivers events after all rows of a step have their tokens: receivers need the GIL, which this thread
        releases when the engine runs.
        """
        events, self._untold = self._untold, []
        for job, event in events:
            job.tell(event)

    def _fail(self, jobs: Iterable[Job], error: Exception) -> None:
        failing = set(jobs)
        self._untold = [(job, event) for job, event in self._untold if job not in failing]
        for job in failing:
            with self._changed:
                unfinished = [*job.waiting, *(text for text, state in self._in_rows.items() if state.job is job)]
                for text in unfinished:
                    self._in_rows.pop(text, None)
                with contextlib.suppress(ValueError):  # The job left the queue when its last text got a row.
                    self._jobs.remove(job)
                self._changed.notify_all()
            for observer in self._observers:
                observer.failed(error, unfinished)
            try:
                job.tell(Failed(error))
            except Exception as unheard:  # The other requests must still be told.
                LOG.error("a client could not be told of %r: %r", error, unheard)


def _buckets_of(generator: Generator, rows: int | None) -> tuple[Bucket, ...]:
    """Returns buckets with the longest cache: the one with the fewest rows that are enough, or, if `rows` is None, the
    smallest and the largest.
    """
    longest = [bucket for bucket in generator.buckets if bucket.seq == generator.window]
    if rows is None:
        return tuple(dict.fromkeys((min(longest), max(longest))))
    enough = [bucket for bucket in longest if bucket.batch >= rows]
    if not enough or rows < 1:
        built = ", ".join(str(bucket.batch) for bucket in longest)
        raise UsageError(f"rows: no engine writes {rows} texts at once; built: {built} (generation.batches)")
    return (min(enough),)

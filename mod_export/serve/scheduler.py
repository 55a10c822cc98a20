"""One thread that owns the rows of a decoder, and the requests that wait for them.

Between two steps the thread takes cancelled texts out of their rows and lets the next ones begin in free rows, so a
short text that comes late ends before a long one that came early. Requests take turns, in the order in which they came:
each of them has one text begin before any of them has a second one begin. While texts are being written, at most one
prompt is read between two steps, so that a burst of prompts does not stop the texts until all of it is read.
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
from typing import Self

from mod_export.errors import EngineError, UsageError
from mod_export.runtime.generator import Generator
from mod_export.runtime.rows import Rows, Text, Written
from mod_export.serve import MAX_QUEUE, MAX_WAIT_S
from mod_export.serve.jobs import (
    ClosingError,
    Ended,
    Event,
    Failed,
    Job,
    Observer,
    QueueFullError,
    Silent,
    WaitedTooLongError,
)
from mod_export.types import Bucket

LOG = logging.getLogger("mod_export.serve")
MOST_FAILURES = 3
"""Steps that fail one after the other before a scheduler says that it is not healthy."""
GUESSED_TEXT_S = 1.0
"""Of a text, before one has been measured, for `QueueFullError.retry_after_s`."""
WEIGHT = 0.1
"""Of the newest text in the running mean of how long texts have a row."""


@dataclass(eq=False, slots=True)
class _InRow:
    """What the thread knows of a text that has a row.

    Attributes:
        begun: when it got the row.
        last: when its last token was written.
    """

    job: Job
    begun: float
    last: float | None = None


class Scheduler:
    """Writes the texts of many requests in the rows of decode engines.

    Attributes:
        buckets: of the engines that write them, those of the fewest rows first.
        bucket: the last of them.
    """

    def __init__(
        self,
        generator: Generator,
        rows: int | None = None,
        max_queue: int = MAX_QUEUE,
        max_wait_s: float = MAX_WAIT_S,
        observer: Observer | None = None,
    ) -> None:
        """Starts with the `with` block, and owns the generator until it ends.

        Args:
            generator: no other stream may be written with it meanwhile.
            rows: texts that are written at once, by one engine, so that a text does not depend on how many others there
                are in the last bit either; None is as many as the largest decode bucket has, and one text alone is
                written by the smallest.
            max_queue: texts that may wait for a row.
            max_wait_s: seconds that a request may wait for its first row.
            observer: is told what happens.

        Raises:
            UsageError: there is no decode bucket of so many rows, or a bound is out of range.
        """
        self.buckets = _buckets_of(generator, rows)
        self.bucket = self.buckets[-1]
        if max_queue < 0:
            raise UsageError(f"max_queue: expected at least 0, got {max_queue}")
        if not 0 < max_wait_s < math.inf:
            raise UsageError(f"max_wait: expected a number of seconds above 0, got {max_wait_s:g}")
        self._generator, self._max_queue, self._max_wait_s = generator, max_queue, max_wait_s
        self._observer: Observer = observer or Silent()
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._in_rows: dict[Text, _InRow] = {}
        self._untold: list[tuple[Job, Event]] = []
        self._text_s = GUESSED_TEXT_S
        self._failures = 0
        self._draining = self._stopping = False
        self._broken: Exception | None = None
        self._opened = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mod-export scheduler", daemon=True)

    # From any thread.

    @property
    def waiting(self) -> int:
        """Texts that have no row yet."""
        with self._changed:
            return sum(len(job.waiting) for job in self._jobs)

    @property
    def busy(self) -> int:
        """Texts that have a row."""
        return len(self._in_rows)

    @property
    def healthy(self) -> bool:
        """Whether its thread runs and the engine has not failed several times in a row."""
        return self._thread.is_alive() and self._broken is None and self._failures < MOST_FAILURES

    @property
    def most_texts(self) -> int:
        """Texts of the largest request that can ever be taken."""
        return self._max_queue + self.bucket.batch

    def check_room(self, texts: int) -> None:
        """Refuses a request that `submit` would refuse.

        Raises:
            ClosingError: no more requests are taken.
            QueueFullError: there is no room for so many texts now.
        """
        with self._changed:
            self._check_room(texts)

    def submit(self, texts: Sequence[Text], tell: Callable[[Event], None]) -> Job:
        """Queues a request. `tell` is called with its events on the scheduler's thread, and must not block: pieces of
        its texts, `Ended` for each of them, or `Failed` for what is left of it.

        Raises:
            ClosingError: no more requests are taken.
            QueueFullError: there is no room for it now.
        """
        now = time.perf_counter()
        for text in texts:
            text.since = now
        job = Job(tell, tuple(texts), deque(texts), time.monotonic() + self._max_wait_s)
        with self._changed:
            self._check_room(len(texts))
            self._jobs.append(job)
            self._changed.notify()
        return job

    def drain(self, within_s: float) -> bool:
        """Takes no more requests, and waits until those that it has are done; False if that took too long."""
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
        """Ends every request that is not done with `Failed(ClosingError)`, and the thread."""
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
            raise ClosingError("this server is shutting down and takes no more requests")
        waiting = sum(len(job.waiting) for job in self._jobs)
        free = self.bucket.batch - len(self._in_rows)
        if waiting + texts > self._max_queue + free:
            seconds = max(1, math.ceil((waiting + texts) * self._text_s / self.bucket.batch))
            raise QueueFullError(
                f"{len(self._in_rows)} texts are being written, {waiting} wait for a row and at most {self._max_queue} "
                f"may, so there is no room for {texts} more; try again in {seconds} s",
                seconds,
            )

    # On the thread.

    def _run(self) -> None:
        try:
            with self._generator.open_rows(*self.buckets) as rows:
                self._opened.set()
                while self._wait_for_work():
                    try:
                        self._work(rows)
                        self._failures = 0
                    except EngineError as error:
                        self._failures += 1
                        rows.reset()
                        self._fail({state.job for state in self._in_rows.values()}, error)
        except Exception as error:  # Nobody may wait for a thread that has ended.
            self._broken = error
        finally:
            gone = self._broken or ClosingError("this server shut down before the request was done")
            with self._changed:
                self._draining = True
            self._fail({*self._jobs, *(state.job for state in self._in_rows.values())}, gone)
            self._opened.set()

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._in_rows or self._stopping)
            return not self._stopping

    def _work(self, rows: Rows) -> None:
        """Lets texts begin, and takes one step."""
        self._leave_out_what_is_over()
        self._tell()
        while len(rows.busy) < rows.size and (text := self._next()) is not None:
            alone = not rows.busy
            self._pass_on(rows.begin(text))
            self._take_ended()
            self._tell()
            if not alone:
                break
        self._pass_on(rows.step())
        _ = rows.busy  # What was cancelled meanwhile leaves its row.
        self._take_ended()
        self._tell()

    def _leave_out_what_is_over(self) -> None:
        """Requests that were cancelled while they waited, or waited too long."""
        now = time.monotonic()
        late = []
        with self._changed:
            for job in list(self._jobs):
                for text in [one for one in job.waiting if one.cancelled]:
                    job.waiting.remove(text)
                    text.completion.finish = "cancelled"
                    self._say_ended(job, text)
                if not job.waiting:
                    self._jobs.remove(job)
                elif not job.begun and now > job.begin_by:
                    late.append(job)
            self._changed.notify_all()
        waited = f"no row was free within {self._max_wait_s:g} s; try again later"
        self._fail(late, WaitedTooLongError(waited))

    def _next(self) -> Text | None:
        """The next text of the request whose turn it is."""
        with self._changed:
            if not self._jobs:
                return None
            job = self._jobs.popleft()
            text = job.waiting.popleft()
            if job.waiting:
                self._jobs.append(job)
            job.begun = True
            self._in_rows[text] = _InRow(job, time.perf_counter())
        self._observer.began(text, time.perf_counter() - text.since)
        return text

    def _pass_on(self, written: Iterable[Written]) -> None:
        for text, piece in written:
            state = self._in_rows[text]
            if piece.token is not None:
                now = time.perf_counter()
                self._observer.wrote(text, None if state.last is None else now - state.last)
                state.last = now
            self._untold.append((state.job, piece))

    def _take_ended(self) -> None:
        for text in [one for one in self._in_rows if one.completion.finish]:
            with self._changed:
                state = self._in_rows.pop(text)
                self._changed.notify_all()
            self._text_s += WEIGHT * (time.perf_counter() - state.begun - self._text_s)
            self._say_ended(state.job, text)

    def _say_ended(self, job: Job, text: Text) -> None:
        self._observer.ended(text)
        self._untold.append((job, Ended(text.row, text.completion)))

    def _tell(self) -> None:
        """Tells what has happened, when all rows of a step have their tokens: whoever is told wants the interpreter's
        lock, which this thread gives away as soon as the engine runs.
        """
        untold, self._untold = self._untold, []
        for job, event in untold:
            job.tell(event)

    def _fail(self, jobs: Iterable[Job], error: Exception) -> None:
        failing = set(jobs)
        self._untold = [(job, event) for job, event in self._untold if job not in failing]
        for job in failing:
            with self._changed:
                left = [*job.waiting, *(text for text, state in self._in_rows.items() if state.job is job)]
                for text in left:
                    self._in_rows.pop(text, None)
                with contextlib.suppress(ValueError):  # It waits no longer if its last text has a row.
                    self._jobs.remove(job)
                self._changed.notify_all()
            self._observer.failed(error, len(left))
            try:
                job.tell(Failed(error))
            except Exception as unheard:  # The others still have to be told.
                LOG.error("a client could not be told of %r: %r", error, unheard)


def _buckets_of(generator: Generator, rows: int | None) -> tuple[Bucket, ...]:
    """Of the longest cache: that of the fewest rows that are enough; where no number is asked for, the smallest and the
    largest.
    """
    longest = [bucket for bucket in generator.buckets if bucket.seq == generator.window]
    if rows is None:
        return tuple(dict.fromkeys((min(longest), max(longest))))
    enough = [bucket for bucket in longest if bucket.batch >= rows]
    if not enough or rows < 1:
        built = ", ".join(str(bucket.batch) for bucket in longest)
        raise UsageError(f"rows: no engine writes {rows} texts at once; built: {built} (generation.batches)")
    return (min(enough),)

"""One build folder that is open for requests: what it can write, what it can score, and how much of that at once."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mod_export.errors import TargetError, UsageError
from mod_export.folder.manifest import GenerationFacts, Manifest, open_folder
from mod_export.runtime.deployment import Deployment, load
from mod_export.runtime.generator import Generator, load_generator
from mod_export.serve import MAX_QUEUE, MAX_WAIT_S
from mod_export.serve.jobs import ClosingError, QueueFullError
from mod_export.serve.metrics import Metrics
from mod_export.serve.scheduler import Scheduler
from mod_export.types import ModelKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """How a build folder is served.

    Attributes:
        name: of the model, as clients name it; None is that of the checkpoint.
        rows: texts that are written at once, by one engine; see `Scheduler`.
        max_queue: texts that may wait for a row, and whole prompts that may wait to be scored.
        max_wait_s: seconds that a request may wait for its first row.
        target: of the engines; None takes the fastest that met their gates.
        dtype: likewise.
        model: `mod`, or `dense` for the dense baseline.
        threads: of a CPU engine inside one operator; None is every physical core.
    """

    name: str | None = None
    rows: int | None = None
    max_queue: int = MAX_QUEUE
    max_wait_s: float = MAX_WAIT_S
    target: str | None = None
    dtype: str | None = None
    model: ModelKind = "mod"
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Writing:
    """What writes text."""

    generator: Generator
    scheduler: Scheduler


class Scoring:
    """Whole rows, one request at a time: the engine uses all of its threads for each.

    Attributes:
        deployment: what runs them.
        pool: the one thread on which it does.
    """

    def __init__(self, deployment: Deployment, most_waiting: int) -> None:
        self.deployment = deployment
        self.pool = ThreadPoolExecutor(1, "mod-export scoring")
        self._most_waiting = most_waiting
        self._changed = threading.Condition()
        self._requests = 0
        self._closing = False

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Counts a request that waits for the thread, or has it.

        Raises:
            QueueFullError: too many wait already.
            ClosingError: no more requests are taken.
        """
        with self._changed:
            if self._closing:
                raise ClosingError("this server is shutting down and takes no more requests")
            if self._requests > self._most_waiting:
                raise QueueFullError(f"{self._requests} prompts are being scored or wait for it; try again in 1 s", 1)
            self._requests += 1
        try:
            yield
        finally:
            with self._changed:
                self._requests -= 1
                self._changed.notify_all()

    def drain(self, within_s: float) -> bool:
        """Takes no more requests, and waits until those that it has are done; False if that took too long."""
        with self._changed:
            self._closing = True
            return self._changed.wait_for(lambda: not self._requests, within_s)


@dataclass(slots=True)
class Service:
    """An open build folder.

    Attributes:
        name: of the model.
        checkpoint: SHA-256 of the checkpoint that it was built from.
        created: when it was opened, seconds since 1970.
        writing: what writes text, or the reason why nothing does.
        scoring: what scores whole prompts, or the reason why nothing does.
        metrics: what it tells Prometheus.
        draining: whether it takes no more requests.
    """

    name: str
    checkpoint: str
    created: int
    writing: Writing | str
    scoring: Scoring | str
    metrics: Metrics
    draining: bool = False

    @property
    def live(self) -> bool:
        """Whether a restart would not help."""
        return not isinstance(self.writing, Writing) or self.draining or self.writing.scheduler.healthy

    @property
    def ready(self) -> bool:
        """Whether it takes requests."""
        return self.live and not self.draining

    def drain(self, within_s: float) -> None:
        """Takes no more requests, waits until those that it has are done, and then ends what is left of them."""
        self.draining = True
        end = time.monotonic() + within_s
        parts: list[Scoring | Scheduler] = []
        parts += [self.scoring] if isinstance(self.scoring, Scoring) else []
        parts += [self.writing.scheduler] if isinstance(self.writing, Writing) else []
        for one in parts:
            one.drain(0.0)
        for one in parts:
            one.drain(max(0.0, end - time.monotonic()))
        if isinstance(self.writing, Writing):
            self.writing.scheduler.stop()

    def describe(self) -> str:
        """One line for whoever started it."""
        parts = []
        if isinstance(self.writing, Writing):
            one, bucket = self.writing.generator, self.writing.scheduler.bucket
            threads = f"{one.threads} threads" if one.threads else "threads of the library's choice"
            parts.append(
                f"writes {bucket.batch} texts of {bucket.seq} tokens at once ({one.target} {one.dtype}, {threads})"
            )
        if isinstance(self.scoring, Scoring):
            other = self.scoring.deployment
            parts.append(f"reads {', '.join(bucket.name for bucket in other.buckets)} ({other.target} {other.dtype})")
        return "; ".join(parts)


@contextlib.contextmanager
def open_service(folder: Path, options: ServiceOptions) -> Iterator[Service]:
    """Opens a build folder. Every file is compared with its hash and the decode engine is opened before this returns.

    Raises:
        BuildFolderError: not a complete build folder, or a damaged file.
        UsageError: an option is out of range.
        TargetError: nothing in it runs here.
    """
    manifest = open_folder(folder)
    metrics = Metrics()
    with contextlib.ExitStack() as opened:
        scoring = _open_scoring(opened, folder, options)
        writing = _open_writing(opened, folder, manifest, options, metrics)
        if isinstance(writing, str) and isinstance(scoring, str):
            raise TargetError(
                f"{folder}: nothing of it can be served\nwriting text: {writing}\nwhole prompts: {scoring}"
            )
        facts = manifest.models[options.model]
        yield Service(options.name or facts.name, facts.checkpoint_sha256, int(time.time()), writing, scoring, metrics)


def _open_scoring(opened: contextlib.ExitStack, folder: Path, options: ServiceOptions) -> Scoring | str:
    try:
        deployment = load(folder, options.target, options.dtype, options.model, options.threads)
    except TargetError as error:
        return str(error)
    scoring = Scoring(opened.enter_context(deployment), options.max_queue)
    opened.callback(scoring.pool.shutdown, cancel_futures=True)  # Before the engines are closed that it runs.
    return scoring


def _open_writing(
    opened: contextlib.ExitStack, folder: Path, manifest: Manifest, options: ServiceOptions, metrics: Metrics
) -> Writing | str:
    if not isinstance(manifest.generation, GenerationFacts):
        if options.rows is not None:
            raise UsageError(f"rows: {folder} writes no text ({manifest.generation})")
        return manifest.generation
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # It was said when the folder was loaded for whole prompts.
            generator = load_generator(folder, options.target, options.dtype, options.model, options.threads)
    except TargetError as error:
        return str(error)
    opened.enter_context(generator)
    scheduler = Scheduler(generator, options.rows, options.max_queue, options.max_wait_s, metrics)
    metrics.gauge("mod_export_rows", "Texts that can be written at once", lambda: scheduler.bucket.batch)
    metrics.gauge("mod_export_busy_rows", "Texts that are being written", lambda: scheduler.busy)
    metrics.gauge("mod_export_queue_depth", "Texts that wait for a row", lambda: scheduler.waiting)
    return Writing(generator, opened.enter_context(scheduler))

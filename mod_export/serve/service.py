"""An open build folder that writes text and scores prompts, with limits on concurrent requests."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mod_export.errors import EngineError, TargetError, UsageError
from mod_export.folder.manifest import Manifest, open_folder
from mod_export.folder.signature import check_signature
from mod_export.runtime.deployment import Deployment, load, open_smallest
from mod_export.runtime.generator import load_generator
from mod_export.serve import MAX_QUEUE, MAX_WAIT_S, PREFIX_CACHE_MIB
from mod_export.serve.metrics import Gauge, Metrics
from mod_export.serve.scheduler import CLOSING, LOG, MOST_FAILURES, ClosingError, QueueFullError, Scheduler
from mod_export.serve.traces import TextTraces
from mod_export.types import ModelKind, Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """How a build folder is served.

    Attributes:
        name: model name for clients; None is the name of the checkpoint.
        rows: number of texts written at once by one engine; see `Scheduler`.
        max_queue: how many texts may wait for a row, and how many whole prompts may wait to be scored.
        max_wait_s: how many seconds a request may wait for its first row.
        target: target of the engines; None selects the fastest that met their gates.
        dtype: dtype of the engines; None as for `target`.
        model: `mod`, or `dense` for the dense baseline.
        threads: threads of a CPU engine inside one operator; None uses every physical core.
        prefix_cache_mib: memory, in MiB, for what texts have read; later texts with the same beginning take it.
        trusted_keys: public keys, each a PEM file; the owner of one must have signed the folder. None asks for no
            signature.
    """

    name: str | None = None
    rows: int | None = None
    max_queue: int = MAX_QUEUE
    max_wait_s: float = MAX_WAIT_S
    target: str | None = None
    dtype: str | None = None
    model: ModelKind = "mod"
    threads: int | None = None
    prefix_cache_mib: int = PREFIX_CACHE_MIB
    trusted_keys: tuple[Path, ...] | None = None


class Scoring:
    """Runs whole rows, one request at a time, because the engine uses all its threads for each.

    Attributes:
        deployment: runs the rows.
        pool: a pool with the single thread on which the deployment runs.
    """

    def __init__(self, deployment: Deployment, most_waiting: int) -> None:
        self.deployment = deployment
        self.pool = ThreadPoolExecutor(1, "mod-export scoring")
        self._most_waiting = most_waiting
        self._changed = threading.Condition()
        self._requests = 0
        self._closing = False
        self._failures = 0

    @property
    def healthy(self) -> bool:
        """Whether the engine has not failed several times in a row."""
        return self._failures < MOST_FAILURES

    def answer(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Runs rows as `Deployment.answer` does. Called on the thread of the pool.

        Raises:
            EngineError: the engine failed.
            UsageError: the inputs are refused.
            BuildFolderError: a file has changed since the build.
        """
        try:
            results = self.deployment.answer(feeds)
        except EngineError:
            # Token ids are checked before an engine reads them. Other inputs may make an engine fail by themselves, and
            # no client may end the server with them.
            self._failures += self.deployment.vocab_size is not None
            raise
        self._failures = 0
        return results

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Counts a request that waits for the thread or runs on it.

        Raises:
            QueueFullError: too many requests are waiting already.
            ClosingError: no more requests are accepted.
        """
        with self._changed:
            if self._closing:
                raise ClosingError(CLOSING)
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
        """Stops accepting requests and waits for current ones; returns False if they take longer than `within_s`."""
        with self._changed:
            self._closing = True
            return self._changed.wait_for(lambda: not self._requests, within_s)


@dataclass(slots=True)
class Service:
    """An open build folder.

    Attributes:
        name: name of the model.
        checkpoint: SHA-256 of the checkpoint that it was built from.
        created: when it was opened, in seconds since 1970.
        writing: writes text; or the reason why the folder cannot write.
        scoring: scores whole prompts; or the reason why the folder cannot score.
        metrics: Prometheus metrics.
        draining: whether it has stopped accepting requests.
    """

    name: str
    checkpoint: str
    created: int
    writing: Scheduler | Unavailable
    scoring: Scoring | Unavailable
    metrics: Metrics
    draining: bool = False

    @property
    def live(self) -> bool:
        """False if only a restart would help."""
        parts = [part for part in (self.scoring, self.writing) if not isinstance(part, Unavailable)]
        return self.draining or all(part.healthy for part in parts)

    @property
    def ready(self) -> bool:
        """Whether it accepts requests."""
        return self.live and not self.draining

    def missing(self, before: Service) -> Unavailable | None:
        """Returns why this service cannot do something that the one before it can; None if it can do all of that."""
        parts = ((self.writing, before.writing), (self.scoring, before.scoring))
        lost = (new for new, old in parts if isinstance(new, Unavailable) and not isinstance(old, Unavailable))
        return next(lost, None)

    def show_gauges(self) -> None:
        """Shows how busy this service is, in place of the one before it that has the same metrics."""
        self.metrics.show([] if isinstance(self.writing, Unavailable) else _gauges(self.writing))

    def drain(self, within_s: float) -> None:
        """Stops accepting requests, waits up to `within_s` for current ones, and then ends unfinished texts."""
        self.draining = True
        end = time.monotonic() + within_s
        parts = [part for part in (self.scoring, self.writing) if not isinstance(part, Unavailable)]
        for part in parts:
            part.drain(0.0)
        for part in parts:
            part.drain(max(0.0, end - time.monotonic()))
        if isinstance(self.writing, Scheduler):
            self.writing.stop()

    def describe(self) -> str:
        """Returns one line about the service, for the person who started it."""
        parts = []
        if isinstance(self.writing, Scheduler):
            generator, bucket = self.writing.generator, self.writing.bucket
            threads = f"{generator.threads} threads" if generator.threads else "threads of the library's choice"
            parts.append(
                f"writes {bucket.batch} texts of {bucket.seq} tokens at once "
                f"({generator.target} {generator.dtype}, {threads})"
            )
        if isinstance(self.scoring, Scoring):
            scorer = self.scoring.deployment
            parts.append(
                f"reads {', '.join(bucket.name for bucket in scorer.buckets)} ({scorer.target} {scorer.dtype})"
            )
        return "; ".join(parts)


@contextlib.contextmanager
def open_service(folder: Path, options: ServiceOptions, metrics: Metrics | None = None) -> Iterator[Service]:
    """Opens a build folder. Checks its signature and the hash of every file, and opens the decode engines and the
    smallest engine of whole rows: what cannot be opened here is not served.

    Args:
        folder: the build folder.
        options: how it is served.
        metrics: counts its texts and requests, together with those of other versions of the folder, of which one at a
            time calls `show_gauges`; None makes metrics that show the gauges of this service.

    Raises:
        BuildFolderError: the folder is not a complete build folder, a file is damaged, or the folder is not signed by
            the owner of one of the trusted keys.
        UsageError: an option is out of range, a file of a trusted key holds no key, or there is not enough memory for
            the caches of the texts: whoever starts the server can ask for fewer rows.
        TargetError: no engine of the folder runs here.
    """
    check_signature(folder, options.trusted_keys)
    manifest = open_folder(folder)
    counting = metrics or Metrics()
    with contextlib.ExitStack() as opened:
        scoring = _open_scoring(opened, folder, options)
        writing = _open_writing(opened, folder, manifest, options, counting)
        if isinstance(writing, Unavailable) and isinstance(scoring, Unavailable):
            raise TargetError(
                f"{folder}: nothing of it can be served\nwriting text: {writing}\nwhole prompts: {scoring}"
            )
        for part in (writing, scoring):
            if isinstance(part, Unavailable) and part is not manifest.generation:  # That is so on every machine.
                LOG.warning("only a part of the folder is served: %s", part)
        facts = manifest.models[options.model]
        name = options.name or facts.name
        service = Service(name, facts.checkpoint_sha256, int(time.time()), writing, scoring, counting)
        if metrics is None:
            service.show_gauges()
        yield service


def _open_scoring(opened: contextlib.ExitStack, folder: Path, options: ServiceOptions) -> Scoring | Unavailable:
    try:
        deployment = opened.enter_context(load(folder, options.target, options.dtype, options.model, options.threads))
        open_smallest(deployment)  # Only the engine itself knows which processors can run it.
    except (TargetError, EngineError) as error:
        return Unavailable(str(error))
    scoring = Scoring(deployment, options.max_queue)
    opened.callback(scoring.pool.shutdown, cancel_futures=True)  # Runs before the engines are closed.
    return scoring


def _open_writing(
    opened: contextlib.ExitStack, folder: Path, manifest: Manifest, options: ServiceOptions, metrics: Metrics
) -> Scheduler | Unavailable:
    if isinstance(manifest.generation, Unavailable):
        if options.rows is not None:
            raise UsageError(f"rows: {folder} writes no text ({manifest.generation})")
        return manifest.generation
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Loading for whole prompts warns already.
            generator = load_generator(
                folder, options.target, options.dtype, options.model, options.threads, options.prefix_cache_mib * 2**20
            )
        opened.enter_context(generator)
        scheduler = Scheduler(generator, options.rows, options.max_queue, options.max_wait_s, (metrics, TextTraces()))
        return opened.enter_context(scheduler)  # Opens the engines.
    except (TargetError, EngineError) as error:
        return Unavailable(str(error))


def _gauges(scheduler: Scheduler) -> list[Gauge]:
    gauges: list[Gauge] = [
        ("mod_export_rows", "Texts that can be written at once", lambda: scheduler.bucket.batch),
        ("mod_export_busy_rows", "Texts that are being written", lambda: scheduler.busy),
        ("mod_export_queue_depth", "Texts that wait for a row", lambda: scheduler.waiting),
    ]
    if (prefixes := scheduler.generator.prefixes) is not None:
        gauges.append(("mod_export_prefix_cache_bytes", "What is kept of earlier texts", lambda: prefixes.used_bytes))
    return gauges

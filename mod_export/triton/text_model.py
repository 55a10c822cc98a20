"""A model for Triton's Python backend that writes text piece by piece, with continuous batching.

It uses three threads. Triton's thread hands requests to the scheduler and returns at once. The scheduler's thread
writes all texts together. The third thread sends responses and detects clients that have disconnected. So a slow client
delays neither the writing nor new requests.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from mod_export.errors import ModExportError, UsageError
from mod_export.runtime.generator import Generator, load_generator
from mod_export.runtime.rows import RowText
from mod_export.serve.scheduler import (
    ClosingError,
    Ended,
    Event,
    Failed,
    Job,
    QueueFullError,
    Scheduler,
    WaitedTooLongError,
)
from mod_export.triton.config import QUEUE_SECONDS, settings_of

LOOK_SECONDS = 0.1
"""Seconds between two checks for clients that have disconnected."""
MOST_NEW_TOKENS = 128
"""Number of new tokens if a request does not set it; fewer if the window has no room for them."""
SAMPLING = {"temperature": float, "top_p": float, "top_k": int}


class Answers:
    """Sends responses on its own thread, and cancels the texts of clients that have disconnected.

    Args:
        utils: the module `triton_python_backend_utils`.
        shows_text: whether responses contain the new characters in addition to the new token.
    """

    def __init__(self, utils: Any, *, shows_text: bool) -> None:
        self._utils, self._shows_text = utils, shows_text
        self._events: queue.SimpleQueue[tuple[Any, Event] | None] = queue.SimpleQueue()
        self._jobs: dict[Any, Job] = {}
        self._changing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="mod-export answers", daemon=True)

    def begin(self, scheduler: Scheduler, texts: list[RowText], sender: Any) -> None:
        """Starts to answer a request with `sender`.

        Raises:
            QueueFullError: the scheduler has no room for it.
            ClosingError: the scheduler accepts no more requests.
        """
        # Events may arrive before `submit` returns. The last one waits for the lock, so it finds the job.
        with self._changing:
            self._jobs[sender] = scheduler.submit(texts, lambda event: self._events.put((sender, event)))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Sends the remaining responses and ends the thread."""
        self._events.put(None)
        self._thread.join()

    def _run(self) -> None:
        next_check = time.monotonic() + LOOK_SECONDS
        while True:
            try:
                item = self._events.get(timeout=max(0.0, next_check - time.monotonic()))
            except queue.Empty:
                pass
            else:
                if item is None:
                    return
                self._send_or_drop(*item)
            if time.monotonic() >= next_check:
                self._cancel_what_nobody_reads()
                next_check = time.monotonic() + LOOK_SECONDS

    def _cancel_what_nobody_reads(self) -> None:
        with self._changing:
            jobs = list(self._jobs.items())
        for sender, job in jobs:
            if sender.is_cancelled():
                job.cancel()

    def _send_or_drop(self, sender: Any, event: Event) -> None:
        try:
            self._send(sender, event)
        except Exception as error:  # A failed response to one client must not block the responses to the others.
            self._utils.Logger.log_error(f"mod-export: a response cannot be sent: {error}")
            with self._changing:
                job = self._jobs.pop(sender, None)
            if job is not None:
                job.cancel()

    def _send(self, sender: Any, event: Event) -> None:
        utils = self._utils
        if not isinstance(event, Ended | Failed):
            tensors = [] if event.token is None else [utils.Tensor("token", np.array([event.token], dtype=np.int64))]
            if self._shows_text:
                tensors.append(utils.Tensor("text", _bytes(event.text)))
            sender.send(utils.InferenceResponse(tensors))
            return
        with self._changing:
            self._jobs.pop(sender, None)
        if isinstance(event, Failed):
            self.refuse(sender, event.error)
            return
        final = utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if event.completion.finish == "cancelled":
            sender.send(flags=final)  # Its client has disconnected.
            return
        last = utils.InferenceResponse([utils.Tensor("finish_reason", _bytes(event.completion.finish))])
        sender.send(last, flags=final)

    def refuse(self, sender: Any, error: Exception) -> None:
        """Ends a request with an error: HTTP 400 for an invalid request, 503 if there is no room, otherwise 500."""
        codes = self._utils.TritonError
        code = codes.INTERNAL
        if isinstance(error, UsageError):
            code = codes.INVALID_ARG
        elif isinstance(error, QueueFullError | WaitedTooLongError | ClosingError):
            code = codes.UNAVAILABLE
        response = self._utils.InferenceResponse(error=codes(str(error), code))
        sender.send(response, flags=self._utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _bytes(text: str) -> np.ndarray:
    return np.array([text.encode()], dtype=np.object_)


def texts_of(generator: Generator, arrays: Mapping[str, np.ndarray]) -> list[RowText]:
    """Returns a list with the one text of a request.

    Args:
        generator: writes the text.
        arrays: inputs of the request: `text` or `input_ids`, and optionally `max_tokens`, `temperature`, `top_p`,
            `top_k`, `seed` and `stop`.

    Raises:
        UsageError: an input is invalid.
    """
    if ("text" in arrays) == ("input_ids" in arrays):
        raise UsageError(f"expected either text or input_ids, got {'both' if 'text' in arrays else 'neither'}")
    prompt = _string("text", arrays["text"][0]) if "text" in arrays else arrays["input_ids"].tolist()
    options: dict[str, Any] = {name: kind(arrays[name][0]) for name, kind in SAMPLING.items() if name in arrays}
    options["seed"] = int(arrays["seed"][0]) if "seed" in arrays else secrets.randbits(31)
    options["stop"] = [_string("stop", value) for value in arrays.get("stop", ())]
    ids = generator.ids([prompt])
    # The last new token is never read, so a text may have one more token than the window has room for.
    room = max(1, generator.window - len(ids[0]) + 1)
    new_tokens = int(arrays["max_tokens"][0]) if "max_tokens" in arrays else min(MOST_NEW_TOKENS, room)
    return generator.texts(ids, new_tokens, **options)


def _string(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: expected UTF-8, got a byte that is not at position {error.start}") from error


class TritonPythonModel:
    """The class that Triton's Python backend runs."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Opens the build folder and writes two tokens, so that engines are open before the model is ready."""
        import triton_python_backend_utils as utils

        self._utils = utils
        settings = settings_of(args)
        with contextlib.ExitStack() as opened:
            self._generator = opened.enter_context(
                load_generator(settings.folder, settings.target, settings.dtype, threads=settings.threads)
            )
            shows_text = self._generator.vocabulary is not None
            self._answers = opened.enter_context(Answers(utils, shows_text=shows_text))
            self._scheduler = opened.enter_context(
                Scheduler(self._generator, max_queue=settings.max_queue, max_wait_s=QUEUE_SECONDS)
            )
            self._write_something()
            self._opened = opened.pop_all()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
                self._answers.begin(self._scheduler, texts_of(self._generator, arrays), sender)
            except ModExportError as error:
                self._answers.refuse(sender, error)

    def finalize(self) -> None:
        self._opened.close()

    def _write_something(self) -> None:
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        texts = self._generator.texts([[0]], max_new_tokens=min(2, self._generator.window))
        self._scheduler.submit(texts, events.put)
        event = events.get()
        while not isinstance(event, Ended | Failed):
            event = events.get()
        if isinstance(event, Failed):
            raise event.error

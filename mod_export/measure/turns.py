"""Runs each route, that is, one way to run a model, in its own process; the processes take turns.

Thread pools of several libraries in one process disturb each other: on two threads, a median was off by a factor of
two. A process that waits for its turn sleeps. A pause before each turn lets the pool that ran last go to sleep too.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

FRESH = multiprocessing.get_context("spawn")
"""Starts processes that inherit no memory, threads or caches."""
PAUSE_S = 0.02
Action = Callable[..., Any]
Opener = Callable[..., Mapping[str, Action]]


class RouteError(Exception):
    """A route cannot be measured here. The message is the reason in one line."""


class Worker:
    """One route that is open in its own process, which performs one action at a time on request."""

    def __init__(self, log: Path, opener: Opener, *args: Any) -> None:
        """`opener(*args)` runs in the process and returns actions by name. What the process prints goes to `log`."""
        self._pipe, far_end = FRESH.Pipe()
        self._process = FRESH.Process(target=_serve, args=(far_end, str(log), opener, args), daemon=True)
        self._process.start()
        far_end.close()

    def opened(self) -> None:
        """Waits until the route is open.

        Raises:
            RouteError: the route could not be opened.
        """
        self._answer()

    def ask(self, name: str, *args: Any) -> tuple[float, Any]:
        """Performs the action `name` with `args`, and returns its seconds and its result.

        Raises:
            RouteError: the action failed.
        """
        try:
            self._pipe.send((name, args))
        except OSError as error:
            raise self._ended() from error
        seconds, value = self._answer()
        return seconds, value

    def _answer(self) -> Any:
        try:
            failed, value = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise self._ended() from error
        if failed:
            raise RouteError(value)
        return value

    def _ended(self) -> RouteError:
        self._process.join()
        return RouteError(f"its process ended with code {self._process.exitcode}")

    def close(self) -> None:
        """Ends the process."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection, log: str, opener: Opener, args: Sequence[Any]) -> None:
    _write_to(log)
    try:
        actions = opener(*args)
        pipe.send((False, None))
        gc.disable()
        while (request := pipe.recv()) is not None:
            name, arguments = request
            time.sleep(PAUSE_S)
            begin = time.perf_counter()
            value = actions[name](*arguments)
            pipe.send((False, (time.perf_counter() - begin, value)))
    except Exception as error:  # Whatever a library raises is why the route has no time.
        traceback.print_exc()
        pipe.send((True, reason_of(error)))


def _write_to(log: str) -> None:
    """Redirects the output of this process and its libraries to a file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    faulthandler.enable()


def reason_of(error: BaseException) -> str:
    """Returns the text of an error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, ImportError):
        return f"not installed ({lines[0] if lines else error!r})"
    text = f"{type(error).__name__}: {lines[0] if lines else ''}"
    return text if len(text) <= 200 else text[:197] + "..."


@contextlib.contextmanager
def opened_workers(
    log: Path, openers: Mapping[str, tuple[Opener, Sequence[Any]]]
) -> Iterator[tuple[dict[str, Worker], dict[str, str]]]:
    """Opens routes one after the other. Yields the workers that opened, and the reasons of the routes that did not."""
    workers: dict[str, Worker] = {}
    failed: dict[str, str] = {}
    try:
        for name, (opener, args) in openers.items():
            workers[name] = worker = Worker(log, opener, *args)
            try:
                worker.opened()
            except RouteError as error:
                failed[name] = str(error)
                workers.pop(name).close()
        yield workers, failed
    finally:
        for worker in workers.values():
            worker.close()


def rounds(
    turns: Mapping[Any, Callable[[], tuple[float, Any]]], warmup: int, fewest: int, seconds: float
) -> tuple[dict[Any, list[tuple[float, Any]]], dict[Any, str]]:
    """Runs rounds in which every turn runs once, in a new random order. Returns the results of each turn in the rounds
    after the warm-up, and the reasons of the turns that failed.
    """
    taken: dict[Any, list[tuple[float, Any]]] = {key: [] for key in turns}
    failed: dict[Any, str] = {}
    rng, deadline, done = np.random.default_rng(0), float("inf"), 0
    while done < warmup + fewest or time.perf_counter() < deadline:
        keys = [key for key in turns if key not in failed]
        if not keys:
            break
        for index in rng.permutation(len(keys)):
            key = keys[index]
            try:
                taken[key].append(turns[key]())
            except RouteError as error:
                failed[key] = str(error)
        done += 1
        deadline = time.perf_counter() + seconds if done == warmup else deadline
    return {key: results[warmup:] for key, results in taken.items() if key not in failed}, failed


def other_load() -> float:
    """Measures for a second the share of the machine that other processes use while all routes wait."""
    return float(psutil.cpu_percent(interval=1.0)) / 100

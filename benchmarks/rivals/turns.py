"""Each route in a process of its own, and all of them taking turns.

Pools of threads of several libraries in one process disturb each other: on two threads a median was off by a factor of
two. A process that waits for its turn sleeps; a pause before each turn lets the pool that ran last go to sleep too.
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
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

FRESH = multiprocessing.get_context("spawn")
"""A process inherits no memory, threads or caches."""
PAUSE_S = 0.02
Action = Callable[..., Any]
Opener = Callable[..., Mapping[str, Action]]


class RouteError(Exception):
    """A route that cannot be measured here; the message is the reason, in one line."""


class Worker:
    """One route, open in a process of its own, which does one thing at a time when it is asked to."""

    def __init__(self, log: Path, opener: Opener, *args: Any) -> None:
        """`opener(*args)` runs in the process and gives what it can do, by name. Its output is appended to `log`."""
        self._pipe, theirs = FRESH.Pipe()
        self._process = FRESH.Process(target=_serve, args=(theirs, str(log), opener, args), daemon=True)
        self._process.start()
        theirs.close()

    def opened(self) -> None:
        """Waits until it is open.

        Raises:
            RouteError: it could not be opened.
        """
        self._answer()

    def ask(self, name: str, *args: Any) -> tuple[float, Any]:
        """Does `name` with `args`: seconds, and what it gave.

        Raises:
            RouteError: it failed.
        """
        self._pipe.send((name, args))
        seconds, value = self._answer()
        return seconds, value

    def _answer(self) -> Any:
        try:
            failed, value = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            self._process.join()
            raise RouteError(f"its process ended with code {self._process.exitcode}") from error
        if failed:
            raise RouteError(value)
        return value

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
        while (asked := pipe.recv()) is not None:
            name, given = asked
            time.sleep(PAUSE_S)
            begin = time.perf_counter()
            value = actions[name](*given)
            pipe.send((False, (time.perf_counter() - begin, value)))
    except Exception as error:  # Whatever a library raises is the reason why there is no time.
        traceback.print_exc()
        pipe.send((True, reason_of(error)))


def _write_to(log: str) -> None:
    """Sends what this process and its libraries write to a file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    faulthandler.enable()


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, ImportError):
        return f"not installed ({lines[0] if lines else error!r})"
    text = f"{type(error).__name__}: {lines[0] if lines else ''}"
    return text if len(text) <= 200 else text[:197] + "..."


def done_apart(log: Path, action: Action, *args: Any) -> str:
    """Does something in a process of its own; the reason why it failed, or nothing."""
    worker = Worker(log, _nothing_first, action)
    try:
        worker.opened()
        worker.ask("do", *args)
    except RouteError as error:
        return str(error)
    finally:
        worker.close()
    return ""


def _nothing_first(action: Action) -> Mapping[str, Action]:
    def do(*args: Any) -> None:
        action(*args)

    return {"do": do}


@contextlib.contextmanager
def opened_workers(
    log: Path, openers: Mapping[str, tuple[Opener, Sequence[Any]]]
) -> Iterator[tuple[dict[str, Worker], dict[str, str]]]:
    """Opens one after the other: those that opened, and of the others the reasons."""
    workers: dict[str, Worker] = {}
    failed: dict[str, str] = {}
    try:
        for name, (opener, args) in openers.items():
            worker = Worker(log, opener, *args)
            try:
                worker.opened()
                workers[name] = worker
            except RouteError as error:
                failed[name] = str(error)
                worker.close()
        yield workers, failed
    finally:
        for worker in workers.values():
            worker.close()


def rounds(
    turns: Mapping[Any, Callable[[], tuple[float, Any]]], warmup: int, fewest: int, seconds: float
) -> tuple[dict[Any, list[tuple[float, Any]]], dict[Any, str]]:
    """What every turn took and gave in every round after the warm-up, in an order that is drawn anew for each; and
    of those that failed the reasons.
    """
    taken: dict[Any, list[tuple[float, Any]]] = {key: [] for key in turns}
    failed: dict[Any, str] = {}
    rng, deadline, done = np.random.default_rng(0), float("inf"), 0
    while done < warmup + fewest or time.perf_counter() < deadline:
        keys = [key for key in turns if key not in failed]
        for index in rng.permutation(len(keys)):
            key = keys[index]
            try:
                taken[key].append(turns[key]())
            except RouteError as error:
                failed[key] = str(error)
        done += 1
        deadline = time.perf_counter() + seconds if done == warmup else deadline
    return {key: found[warmup:] for key, found in taken.items() if key not in failed}, failed


def other_load() -> float:
    """Share of the machine's time that others take while all routes wait; measured for a second."""
    return float(psutil.cpu_percent(interval=1.0)) / 100


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Of those packages that are installed."""
    found = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found

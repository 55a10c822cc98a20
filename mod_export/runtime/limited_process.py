"""Does work in another process, within limits of time and memory.

A small grammar can take hours and all memory to compile, and a chat template is a program. Nothing can stop such work
from inside its process, so another process does it, and is killed if it exceeds its limits. It is started when it is
first needed, gets the data that does not change, answers one question after the other, and is started again after it
was killed. It is not started by the package `multiprocessing`, which would run the main module of a program again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

START_S = 60.0
"""How many seconds a process may take to start and to read the data that does not change."""

Answer = Callable[[Any], Any]
"""Answers a question. Both are plain data."""


class NoAnswerError(Exception):
    """A question was not answered. The process is started again for the next one."""


class TooSlowError(NoAnswerError):
    """The answer took longer than it may."""


class TooLargeError(NoAnswerError):
    """The answer took more memory than it may."""


class DiedError(NoAnswerError):
    """The process ended while it worked on the answer. The message has its exit status."""


class NotStartedError(NoAnswerError):
    """There is no process. The message says why."""


class ClosedError(NoAnswerError):
    """The process was closed."""


class LimitedProcess:
    """A process that answers questions. One thread may ask; any may close it."""

    def __init__(self, module: str) -> None:
        """`module` is run in the process, and calls `answer_questions`."""
        self._module = module
        self._process: subprocess.Popen[str] | None = None
        self._closed = False

    def ask(self, question: Any, known: Callable[[], Any], limit_s: float, most_bytes: int) -> Any:
        """Returns the answer to a question.

        Args:
            question: plain data.
            known: returns plain data that does not change, which each process gets once.
            limit_s: seconds that the answer may take.
            most_bytes: memory that the answers of a process may take.

        Raises:
            NoAnswerError: one of its subclasses says why.
        """
        if self._process is not None and self._process.poll() is not None:
            self._end()  # The process was killed from outside since the last question.
        process = self._process or self._start({"known": known(), "limit_s": limit_s, "most_bytes": most_bytes})
        ended_by_time, answer = _exchange(process, question, limit_s)
        if answer is not None:
            return answer["answer"]
        status = self._end()
        if self._closed:
            raise ClosedError
        if ended_by_time:
            raise TooSlowError
        if status == -signal.SIGABRT:
            raise TooLargeError
        raise DiedError(f"exit status {status}")

    def close(self) -> None:
        """Ends the process, also while another thread waits for it."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()
            process.wait()  # So that the system does not keep it until Python looks for cycles.

    def _start(self, first: Any) -> subprocess.Popen[str]:
        if self._closed:
            raise ClosedError
        paths = os.pathsep.join(str(Path.cwd()) if path == "" else path for path in sys.path)
        try:
            self._process = process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-P", "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                env={**os.environ, "PYTHONPATH": paths},
                start_new_session=True,  # Ctrl-C in a terminal is for this process only.
            )
        except (OSError, ValueError, TypeError) as error:  # An embedded interpreter has no executable.
            raise NotStartedError(f"cannot be started ({error})") from error
        self._finish = weakref.finalize(self, _finish, process)
        _, answer = _exchange(process, first, START_S)
        if answer is None:
            raise NotStartedError(f"did not start (exit status {self._end()})")
        return process

    def _end(self) -> int:
        """Ends the process and returns its exit status."""
        self._process = None
        status: int = self._finish() or 0
        return status


def _finish(process: subprocess.Popen[str]) -> int:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # What could not be written cannot be flushed.
            _open(pipe).close()
    return process.wait()


def _exchange(process: subprocess.Popen[str], data: Any, limit_s: float) -> tuple[bool, dict[str, Any] | None]:
    """Sends a line to a process. Returns whether it was killed at the limit of time, and its answer, if any."""
    late = threading.Event()

    def end() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        _open(process.stdin).write(json.dumps(data) + "\n")
        _open(process.stdin).flush()
        answer = _open(process.stdout).readline()
    except OSError:
        answer = ""
    finally:
        timer.cancel()
    if not answer.endswith("\n"):
        with contextlib.suppress(subprocess.TimeoutExpired):  # The process has ended; its exit status says why.
            process.wait(1)
        return late.is_set(), None
    return False, dict(json.loads(answer))


def _open(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def answer_questions(prepare: Callable[[Any], Answer]) -> None:
    """Runs in the other process: answers every question that comes, until there are no more.

    `prepare` gets the data that does not change, and returns the function that answers. The memory limit applies after
    `prepare`.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # A line that a library prints is no answer.

    def say(answer: Any) -> None:
        answers.write(json.dumps({"answer": answer}) + "\n")
        answers.flush()

    first: dict[str, Any] = json.loads(sys.stdin.readline())
    answer = prepare(first["known"])
    _limit_memory(first["most_bytes"])
    say(None)
    for line in sys.stdin:
        signal.alarm(math.ceil(first["limit_s"]) + 1)  # Ends this process even if its parent is gone.
        try:
            say(answer(json.loads(line)))
        except MemoryError:
            os.abort()
        signal.alarm(0)


def _limit_memory(more: int) -> None:
    """Limits the memory of this process to what it uses now plus `more` bytes, if the system supports that."""
    import resource

    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

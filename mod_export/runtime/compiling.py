"""Compiles grammars with the package llguidance, first in a process of its own.

A small grammar can take hours and all memory, and nothing ends a compilation inside a process. So another process does
the same work before this one does. It has a limit of time and memory, and it is killed where it goes beyond them. The
process is started once, is told the vocabulary, and is started again after it was killed. It is no child of the package
`multiprocessing`, which would run the main module of a program again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mod_export.errors import GrammarError, ModExportError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

COMPILE_S = 10.0
"""How many seconds a grammar may take to compile."""
START_S = 60.0
"""How many seconds the process may take to start and to read the vocabulary."""
MOST_BYTES = 1 << 30
"""How much memory a grammar may take to compile."""
MOST_STATES = 20_000
"""Limit of the states of a lexer, each of 1 to 2 kB (llguidance's own limit is 250,000)."""
MOST_SYMBOLS = 65_525
"""Limit of llguidance, which ends in an assertion."""
RETRY_S = 5
CLOSED = "the grammar is not compiled: this server, or generator, is closing"
NO_PROCESS = "the grammar is not compiled: the process that would do it"


class GrammarNotCompiledError(ModExportError):
    """A grammar was not compiled, for a reason that is none of its own.

    Attributes:
        retry_after_s: whole seconds until it may be compiled.
    """

    def __init__(self, message: str, retry_after_s: int = RETRY_S) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Tokens:
    """The vocabulary as llguidance reads it. Tokens without text are never allowed.

    The last token is none of the model's. It stands for the end of a text, which llguidance needs exactly one of.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self, tokens: Sequence[bytes], hidden: Sequence[int], ids: Callable[[str | bytes], list[int]] | None = None
    ) -> None:
        """`hidden` are the tokens that texts do not show. `ids` divides a text into tokens; None takes the longest."""
        self.tokens, self.hidden = [*tokens, b"<end>"], list(hidden)
        self.eos_token_id = len(tokens)
        self.special_token_ids = [*self.hidden, self.eos_token_id]
        self._ids = ids

    def __call__(self, text: str | bytes) -> list[int]:
        """Returns the tokens of a text that the grammar forces."""
        if self._ids is not None:
            return self._ids(text)
        return self._longest(text if isinstance(text, bytes) else text.encode())

    def _longest(self, text: bytes) -> list[int]:
        known = {token: number for number, token in enumerate(self.tokens[:-1]) if token and number not in self.hidden}
        longest, ids, begin = max(map(len, known), default=1), [], 0
        while begin < len(text):
            pieces = (text[begin : begin + length] for length in range(longest, 0, -1))
            piece = next((piece for piece in pieces if piece in known), None)
            ids += [] if piece is None else [known[piece]]
            begin += 1 if piece is None else len(piece)
        return ids


def compiled(tokens: LLTokenizer, text: str) -> LLMatcher:
    """Does all that llguidance does for a new grammar, up to the tokens that a text may begin with.

    Raises:
        GrammarError: llguidance refuses the grammar.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=MOST_STATES, verbose_errors=False)
    matcher = LLMatcher(tokens, text, log_level=0, limits=limits)  # Releases the GIL.
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarError(f"no grammar can be made of it: {sentence_of(matcher.get_error())}")
    return matcher


def sentence_of(error: str) -> str:
    """Returns a message of llguidance without the grammar that it quotes, and without a backtrace, on one line."""
    if error.startswith("panic: "):
        first = error.removeprefix("panic: ").splitlines()[0]
        too_many = f"it has more than {MOST_SYMBOLS:,} symbols; simplify it"
        return too_many if "symbols.len()" in first else f"llguidance fails on it ({first})"
    quoted = re.split(r"\n +\d+ \| |\n?<state>|\n?<backtrace>", error)[0]
    return " ".join(re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", quoted).split())


class CompilingProcess:
    """A process that compiles grammars, one at a time, within limits of time and memory. One thread may use it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._closed = False

    def check(self, tokens: Tokens, text: str) -> None:
        """Compiles a grammar in the process, whose vocabulary is always the same.

        Raises:
            GrammarError: llguidance refuses the grammar, or it takes too much time or memory.
            GrammarNotCompiledError: no process can be started, or this one was closed.
        """
        process = self._process or self._start(tokens)
        ended_by_time, answer = _ask(process, json.dumps(text), COMPILE_S)
        if answer is None:
            status = self._end()
            if self._closed:
                raise GrammarNotCompiledError(CLOSED)
            if ended_by_time:
                raise GrammarError(f"the grammar took longer than {COMPILE_S:g} s to compile; simplify it")
            if status == -signal.SIGABRT:
                size = f"{MOST_BYTES / 2**30:g} GiB"
                raise GrammarError(f"the grammar took more than {size} of memory to compile; simplify it")
            raise GrammarError(f"llguidance fails on the grammar (exit status {status}); simplify it")
        if answer:
            raise GrammarError(answer)

    def close(self) -> None:
        """Ends the process, also while another thread waits for it."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()

    def _start(self, tokens: Tokens) -> subprocess.Popen[str]:
        if self._closed:
            raise GrammarNotCompiledError(CLOSED)
        paths = os.pathsep.join(str(Path.cwd()) if path == "" else path for path in sys.path)
        try:
            self._process = process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-P", "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                env={**os.environ, "PYTHONPATH": paths},
                start_new_session=True,  # Ctrl-C in a terminal is for this process only.
            )
        except (OSError, ValueError, TypeError) as error:  # An embedded interpreter has no executable.
            raise GrammarNotCompiledError(f"{NO_PROCESS} cannot be started ({error})") from error
        self._finish = weakref.finalize(self, _finish, process)
        vocabulary = {"tokens": [token.decode("latin-1") for token in tokens.tokens[:-1]], "hidden": tokens.hidden}
        _, answer = _ask(process, json.dumps({**vocabulary, "compile_s": COMPILE_S, "bytes": MOST_BYTES}), START_S)
        if answer is None:
            status = self._end()
            raise GrammarNotCompiledError(f"{NO_PROCESS} did not start (exit status {status})")
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


def _ask(process: subprocess.Popen[str], line: str, limit_s: float) -> tuple[bool, str | None]:
    """Sends a line to a process. Returns whether it was killed at the limit of time, and its answer, if any."""
    late = threading.Event()

    def end() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        _open(process.stdin).write(line + "\n")
        _open(process.stdin).flush()
        answer = _open(process.stdout).readline()
    except OSError:
        answer = ""
    finally:
        timer.cancel()
    if not answer.endswith("\n"):
        with contextlib.suppress(subprocess.TimeoutExpired):  # It has ended: its exit status says why.
            process.wait(1)
        return late.is_set(), None
    return False, str(json.loads(answer))


def _open(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


# The other process.


def main() -> None:
    """Reads the vocabulary and then grammars, a line each, and answers each with an empty text or why it is refused."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # A line that a library prints is no answer.

    def say(answer: str) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    from llguidance import LLTokenizer

    start: dict[str, Any] = json.loads(sys.stdin.readline())
    wrapped = Tokens([token.encode("latin-1") for token in start["tokens"]], start["hidden"])
    tokens = LLTokenizer(wrapped)  # type: ignore[arg-type]  # The same attributes.
    _limit_memory(start["bytes"])
    say("")
    for line in sys.stdin:
        signal.alarm(math.ceil(start["compile_s"]) + 1)  # Also ends it if nobody is left to kill it.
        try:
            compiled(tokens, json.loads(line))
            answer = ""
        except GrammarError as error:
            answer = str(error)
        except MemoryError:
            os.abort()
        signal.alarm(0)
        say(answer)


def _limit_memory(more: int) -> None:
    """Limits the memory to what is taken now and `more` bytes, where the system can do so."""
    import resource

    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()

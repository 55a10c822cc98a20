"""Texts that are being written: requests share the rows of a decoder, which reads one token of every row at a time.

A row that has finished is given to the next request while the others continue (continuous batching), so a batch never
waits for its longest text. What a row writes depends on its own request alone: it has its own cache and random numbers.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np

from mod_export.errors import EngineError
from mod_export.runtime.generate.decoder import Decoder, Kept, Prompts
from mod_export.runtime.generate.sampling import Sampling, draw
from mod_export.runtime.generate.texts import Reader, StopText
from mod_export.types import Bucket, Site

__all__ = ["Completion", "Piece", "Request", "Stream"]

IDLE = -1


class Piece(NamedTuple):
    """One new token of one text.

    Attributes:
        row: number of the prompt.
        token: its id; None for the end of a text that was held back until it was certain.
        text: the characters that are certain by now; a token may complete none, or several.
    """

    row: int
    token: int | None
    text: str


@dataclass(slots=True)
class Completion:
    """What was written after one prompt.

    Attributes:
        prompt_ids: the prompt with its prefix.
        ids: the new tokens: without an id that it stopped at, and up to the token that completed a stop string.
        text: the new characters, up to the stop string; empty where the model's ids stand for no text.
        finish: "length", "stop", or "cancelled"; empty while it is being written.
        stop: the stop string or id that ended it.
        first_token_s: seconds from the start of the stream to its first token, time in the queue included.
        ran: routing site -> how many tokens of the text were selected there.
        overflow: routing site -> how many tokens wanted a slot there and found none.
        read: how many tokens of the text the model has read, its prefix and what was read again by rolling included.
    """

    prompt_ids: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    stop: str | int | None = None
    first_token_s: float | None = None
    ran: dict[Site, int] = field(default_factory=dict)
    overflow: dict[Site, int] = field(default_factory=dict)
    read: int = 0


@dataclass(slots=True)
class Request:
    """One prompt and how to continue it.

    Attributes:
        ids: of the prompt, without the prefix.
        prefix: what was read before, with its ids.
        max_new_tokens: at least 1.
        sampling: how to choose.
        rng: the row's own random numbers.
        stop_ids: ids that end the text.
        reader: of the new tokens; None where ids stand for no text.
        stops: the stop strings.
    """

    ids: Sequence[int]
    prefix: tuple[tuple[int, ...], Kept] | None
    max_new_tokens: int
    sampling: Sampling
    rng: np.random.Generator
    stop_ids: frozenset[int]
    reader: Reader | None
    stops: StopText


class _Row:
    """One request in one row of the decoder."""

    def __init__(self, index: int, request: Request, completion: Completion) -> None:
        self.index, self.request, self.completion = index, request, completion
        self.pending: deque[int] = deque()
        self.position = 0

    @property
    def text_ids(self) -> list[int]:
        """Of the whole text."""
        return [*self.completion.prompt_ids, *self.completion.ids]


class Stream(Iterator[Piece]):
    """An iterator over the pieces of all texts in the order in which they are written.

    `completions` holds what has been written so far, one for each prompt. Leaving the `with` block, or `close`, ends
    what is not finished.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        prompts: Prompts,
        turn: Callable[[], AbstractContextManager[Decoder]],
        sites: Sequence[Site],
        bucket: Bucket,
        *,
        rolling: bool,
    ) -> None:
        """Nothing is computed until the first piece is asked for.

        Args:
            requests: one for each text.
            prompts: read prompts.
            turn: gives exclusive use of the decoder.
            sites: names of the routing sites.
            bucket: of the decoder.
            rolling: whether a text that fills the cache continues from its second half.
        """
        self.completions = [
            Completion((*(request.prefix[0] if request.prefix else ()), *request.ids)) for request in requests
        ]
        self._requests = requests
        self._prompts = prompts
        self._turn = turn
        self._sites = sites
        self._rolling = rolling
        self.bucket = bucket
        self._cancelled: set[int] = set()
        self._lock = threading.Lock()
        self._pieces = self._write()
        self.steps = 0
        self.step_seconds = 0.0
        self.seconds = 0.0
        self._begun = 0.0

    def __next__(self) -> Piece:
        return next(self._pieces)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def cancel(self, row: int | None = None) -> None:
        """Ends one text, or all of them, before its next token; from any thread."""
        with self._lock:
            self._cancelled |= set(range(len(self._requests)) if row is None else [row])

    def close(self) -> None:
        """Ends all texts. Only for the thread that iterates."""
        self._pieces.close()
        for completion in self.completions:
            completion.finish = completion.finish or "cancelled"

    def _write(self) -> Generator[Piece]:
        with self._turn() as decoder:
            self._begun = time.perf_counter()
            try:
                yield from self._pieces_of(decoder)
            finally:
                self.seconds = time.perf_counter() - self._begun

    def _pieces_of(self, decoder: Decoder) -> Iterator[Piece]:
        waiting = deque(range(len(self._requests)))
        rows: list[_Row | None] = [None] * decoder.batch
        try:
            while True:
                for slot in range(decoder.batch):
                    yield from self._occupy(decoder, slot, rows, waiting)
                busy = [(slot, row) for slot, row in enumerate(rows) if row is not None and not row.completion.finish]
                if not busy:
                    return
                yield from self._next_tokens(decoder, busy)
        finally:
            # Closed or failed: what was read until then is counted.
            for slot, row in enumerate(rows):
                if row is not None and not row.completion.finish:
                    self._finish(decoder, slot, row, "cancelled")

    def _next_tokens(self, decoder: Decoder, busy: Sequence[tuple[int, _Row]]) -> Iterator[Piece]:
        """One step of all rows."""
        ids_B = np.zeros(decoder.batch, dtype=np.int64)
        position_B = np.full(decoder.batch, IDLE, dtype=np.int64)
        for slot, row in busy:
            ids_B[slot] = row.pending[0] if row.pending else row.completion.ids[-1]
            position_B[slot] = row.position
        begin = time.perf_counter()
        logits_BV = decoder.step(ids_B, position_B)
        self.step_seconds += time.perf_counter() - begin
        self.steps += 1
        for slot, row in busy:
            row.position += 1
            row.completion.read += 1
            if row.pending:
                row.pending.popleft()
            if not row.pending:
                yield from self._accept(decoder, slot, row, logits_BV[slot])

    def _occupy(self, decoder: Decoder, slot: int, rows: list[_Row | None], waiting: deque[int]) -> Iterator[Piece]:
        """Gives the row to the next request if the one that has it is over."""
        row = rows[slot]
        while (row is None or self._is_over(decoder, slot, row)) and waiting:
            index = waiting.popleft()
            row = rows[slot] = _Row(index, self._requests[index], self.completions[index])
            if not self._is_over(decoder, slot, row):
                yield from self._begin(decoder, slot, row)
        if row is not None and row.position == decoder.length and not self._is_over(decoder, slot, row):
            yield from self._roll(decoder, slot, row)  # A prompt that fills the window.

    def _begin(self, decoder: Decoder, slot: int, row: _Row) -> Iterator[Piece]:
        """Reads as much of the prompt as can be read at once; the rest is left to steps."""
        request = row.request
        if request.prefix is None:
            yield from self._read(decoder, slot, row, request.ids)
            return
        prefix_ids, kept = request.prefix
        decoder.put(slot, kept)
        row.position = row.completion.read = len(prefix_ids)
        row.pending.extend(request.ids)
        if not row.pending:
            yield from self._accept(decoder, slot, row, kept.logits_V)

    def _read(self, decoder: Decoder, slot: int, row: _Row, ids: Sequence[int]) -> Iterator[Piece]:
        first = ids[: self._prompts.longest]
        kept = self._prompts.read(first)
        decoder.put(slot, kept)
        row.position = len(first)
        row.completion.read += len(first)
        row.pending.extend(ids[len(first) :])
        if not row.pending:
            yield from self._accept(decoder, slot, row, kept.logits_V)

    def _roll(self, decoder: Decoder, slot: int, row: _Row) -> Iterator[Piece]:
        """Continues as if the second half were the whole text. Positions start at 0 again, so it is read again."""
        assert self._rolling
        self._count(decoder, slot, row)
        yield from self._read(decoder, slot, row, row.text_ids[-max(1, decoder.length // 2) :])

    def _accept(self, decoder: Decoder, slot: int, row: _Row, logits_V: np.ndarray) -> Iterator[Piece]:
        """Chooses the next token of a row and yields the text that is certain with it."""
        request, completion = row.request, row.completion
        if not np.isfinite(logits_V).all():
            raise EngineError(
                f"the logits of token {len(completion.ids) + 1} of prompt {row.index} are not finite, at position "
                f"{row.position} of the text: the weights or the engine are damaged; mod-export validate looks for the "
                "place"
            )
        token = draw(logits_V, request.sampling, request.rng)
        if completion.first_token_s is None:
            completion.first_token_s = time.perf_counter() - self._begun
        if token in request.stop_ids:
            self._finish(decoder, slot, row, "stop", token)
            yield from self._rest(row)
            return
        completion.ids.append(token)
        text = "" if request.reader is None else request.stops.feed(request.reader.feed(token))
        completion.text += text
        stopped = request.stops.stopped
        if stopped is not None:
            self._finish(decoder, slot, row, "stop", stopped)
        elif len(completion.ids) >= request.max_new_tokens:
            self._finish(decoder, slot, row, "length")
        yield Piece(row.index, token, text)
        if completion.finish == "length":
            yield from self._rest(row)

    def _rest(self, row: _Row) -> Iterator[Piece]:
        """Yields what was held back, at the end of a text."""
        request, completion = row.request, row.completion
        if request.reader is None:
            return
        text = request.stops.feed(request.reader.close()) + request.stops.close()
        completion.text += text
        if text:
            yield Piece(row.index, None, text)

    def _finish(self, decoder: Decoder, slot: int, row: _Row, finish: str, stop: str | int | None = None) -> None:
        self._count(decoder, slot, row)
        row.completion.finish, row.completion.stop = finish, stop

    def _count(self, decoder: Decoder, slot: int, row: _Row) -> None:
        """Adds the counts of the row's cache to its completion."""
        if decoder.overflow_BN is None or not row.position:
            return
        ran, overflow = row.completion.ran, row.completion.overflow
        for column, site in enumerate(self._sites):
            ran[site] = ran.get(site, 0) + int(decoder.cache["counts"][slot, column])
            overflow[site] = overflow.get(site, 0) + int(decoder.overflow_BN[slot, column])

    def _is_over(self, decoder: Decoder, slot: int, row: _Row) -> bool:
        with self._lock:
            cancelled = row.index in self._cancelled
        if cancelled and not row.completion.finish:
            self._finish(decoder, slot, row, "cancelled")
        return bool(row.completion.finish)

"""Texts that are being written: they share the rows of a decoder, which reads one token of every row at a time.

A row whose text has finished is given to the next one while the others continue (continuous batching), so a batch never
waits for its longest text. What is written depends on its own prompt alone: it has its own cache and random numbers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np

from mod_export.errors import EngineError
from mod_export.runtime.generate.decoder import Decoder, Kept, Prompts
from mod_export.runtime.generate.logits import Sampling, draw
from mod_export.runtime.generate.texts import Reader, StopText
from mod_export.types import Bucket, Site

IDLE = -1


@dataclass(frozen=True, slots=True)
class Prefix:
    """Tokens that were read once and start several texts.

    Attributes:
        ids: the tokens.
        kept: the cached state after them.
        engines: which engines read them; the cached state is meaningless to others.
    """

    ids: tuple[int, ...]
    kept: Kept
    engines: str


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


@dataclass(slots=True, kw_only=True, eq=False)
class Text:
    """A prompt, how to continue it, and how far that is.

    Attributes:
        row: number of the prompt.
        ids: of the prompt, without the prefix.
        rng: the text's own random numbers.
        stop_ids: ids that end the text.
        reader: of the new tokens; None where ids stand for no text.
        stops: the stop strings.
        b: the row of the decoder that has it.
        position: tokens that this row has read.
        pending: tokens of the prompt that are left to steps.
    """

    row: int
    ids: Sequence[int]
    prefix: Prefix | None
    max_new_tokens: int
    sampling: Sampling
    rng: np.random.Generator
    stop_ids: frozenset[int]
    reader: Reader | None
    stops: StopText
    completion: Completion = field(init=False)
    cancelled: bool = field(default=False, init=False)
    b: int = field(default=IDLE, init=False)
    position: int = field(default=0, init=False)
    pending: deque[int] = field(default_factory=deque, init=False)

    def __post_init__(self) -> None:
        self.completion = Completion((*(self.prefix.ids if self.prefix else ()), *self.ids))


class Stream(Iterator[Piece]):
    """An iterator over the pieces of all texts in the order in which they are written.

    `completions` holds what has been written so far, one for each prompt. Leaving the `with` block, or `close`, ends
    what is not finished.
    """

    def __init__(
        self,
        texts: Sequence[Text],
        prompts: Prompts,
        exclusive: Callable[[], AbstractContextManager[Decoder]],
        sites: Sequence[Site],
        bucket: Bucket,
        *,
        rolling: bool,
    ) -> None:
        """Nothing is computed until the first piece is asked for. `exclusive` gives exclusive use of the decoder, whose
        counts are of `sites`; with `rolling`, a text that fills the cache continues from its second half.
        """
        self.completions = [text.completion for text in texts]
        self.bucket = bucket
        self.steps = 0
        self.step_seconds = 0.0
        self.prompt_seconds = 0.0
        self.seconds = 0.0
        self._from_prompts = 0
        self._texts, self._prompts, self._exclusive, self._sites = texts, prompts, exclusive, sites
        self._rolling = rolling
        self._begun = 0.0
        self._decoder: Decoder
        self._pieces = self._write()

    def __next__(self) -> Piece:
        return next(self._pieces)

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens of all texts a second, the first ones and the time in which prompts alone were read left out; None
        before the end, and where no text has a second token.
        """
        tokens = sum(len(one.ids) for one in self.completions) - self._from_prompts
        seconds = self.seconds - self.prompt_seconds
        return tokens / seconds if tokens > 0 and seconds > 0 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def cancel(self, row: int | None = None) -> None:
        """Ends one text, or all of them, before its next token; from any thread."""
        for text in self._texts if row is None else [self._texts[row]]:
            text.cancelled = True

    def close(self) -> None:
        """Ends all texts. Only for the thread that iterates."""
        self._pieces.close()
        for completion in self.completions:
            completion.finish = completion.finish or "cancelled"

    def _write(self) -> Generator[Piece]:
        with self._exclusive() as self._decoder:
            self._begun = time.perf_counter()
            waiting = deque(self._texts)
            rows: list[Text | None] = [None] * self._decoder.batch
            try:
                while True:
                    for b in range(len(rows)):
                        yield from self._occupy(b, rows, waiting)
                    busy = [text for text in rows if text is not None and not text.completion.finish]
                    if not busy:
                        return
                    yield from self._step(busy)
            finally:
                self.seconds = time.perf_counter() - self._begun
                # Closed or failed: what was read until then is counted.
                for text in rows:
                    if text is not None and not text.completion.finish:
                        self._finish(text, "cancelled")

    def _occupy(self, b: int, rows: list[Text | None], waiting: deque[Text]) -> Iterator[Piece]:
        """Gives a row of the decoder to the next text if the one that has it is over."""
        text = rows[b]
        while (text is None or self._is_over(text)) and waiting:
            text = rows[b] = waiting.popleft()
            text.b = b
            if not self._is_over(text):
                yield from self._begin(text)
        if text is not None and text.position == self._decoder.length and not self._is_over(text):
            yield from self._roll(text)  # A prompt that fills the window.

    def _step(self, busy: Sequence[Text]) -> Iterator[Piece]:
        ids_B = np.zeros(self._decoder.batch, dtype=np.int64)
        position_B = np.full(self._decoder.batch, IDLE, dtype=np.int64)
        for text in busy:
            ids_B[text.b] = text.pending[0] if text.pending else text.completion.ids[-1]
            position_B[text.b] = text.position
        begin = time.perf_counter()
        logits_BV = self._decoder.step(ids_B, position_B)
        took = time.perf_counter() - begin
        self.step_seconds += took
        self.steps += 1
        if all(text.pending for text in busy):
            self.prompt_seconds += took
        for text in busy:
            text.position += 1
            text.completion.read += 1
            if text.pending:
                text.pending.popleft()
                self._from_prompts += not text.pending
            if not text.pending:
                yield from self._accept(text, logits_BV[text.b])

    def _begin(self, text: Text) -> Iterator[Piece]:
        if text.prefix is None:
            return self._read(text, text.ids)
        return self._resume(text, text.prefix.kept, text.ids)

    def _read(self, text: Text, ids: Sequence[int]) -> Iterator[Piece]:
        longest = self._prompts.longest
        begin = time.perf_counter()
        kept = self._prompts.read(ids[:longest])
        self.prompt_seconds += time.perf_counter() - begin
        return self._resume(text, kept, ids[longest:])

    def _resume(self, text: Text, kept: Kept, rest: Sequence[int]) -> Iterator[Piece]:
        """Continues after tokens that were read; the rest of the prompt is left to steps."""
        self._decoder.put(text.b, kept)
        text.position = kept.length
        text.completion.read += kept.length
        text.pending.extend(rest)
        if not text.pending:
            self._from_prompts += 1
            yield from self._accept(text, kept.logits_V)

    def _roll(self, text: Text) -> Iterator[Piece]:
        """Continues as if the second half were the whole text. Positions start at 0 again, so it is read again."""
        assert self._rolling
        self._count(text)
        whole = [*text.completion.prompt_ids, *text.completion.ids]
        yield from self._read(text, whole[-max(1, self._decoder.length // 2) :])

    def _accept(self, text: Text, logits_V: np.ndarray) -> Iterator[Piece]:
        """Chooses the next token of a text and yields the characters that are certain with it."""
        completion = text.completion
        if not np.isfinite(logits_V).all():
            raise EngineError(
                f"the logits of token {len(completion.ids) + 1} of prompt {text.row} are not finite, at position "
                f"{text.position} of the text: the weights or the engine are damaged; mod-export validate says where"
            )
        token = draw(logits_V, text.sampling, text.rng)
        if completion.first_token_s is None:
            completion.first_token_s = time.perf_counter() - self._begun
        if token in text.stop_ids:
            self._finish(text, "stop", token)
            yield from self._rest(text)
            return
        completion.ids.append(token)
        new = "" if text.reader is None else text.stops.feed(text.reader.feed(token))
        completion.text += new
        if text.stops.stopped is not None:
            self._finish(text, "stop", text.stops.stopped)
        elif len(completion.ids) >= text.max_new_tokens:
            self._finish(text, "length")
        yield Piece(text.row, token, new)
        if completion.finish == "length":
            yield from self._rest(text)

    def _rest(self, text: Text) -> Iterator[Piece]:
        """Yields what was held back, at the end of a text."""
        if text.reader is None:
            return
        held = text.stops.feed(text.reader.close()) + text.stops.close()
        text.completion.text += held
        if held:
            yield Piece(text.row, None, held)

    def _is_over(self, text: Text) -> bool:
        if text.cancelled and not text.completion.finish:
            self._finish(text, "cancelled")
        return bool(text.completion.finish)

    def _finish(self, text: Text, finish: str, stop: str | int | None = None) -> None:
        self._count(text)
        text.completion.finish, text.completion.stop = finish, stop

    def _count(self, text: Text) -> None:
        overflow_BN = self._decoder.overflow_BN
        if overflow_BN is None or not text.position:
            return
        ran, overflow = text.completion.ran, text.completion.overflow
        for column, site in enumerate(self._sites):
            ran[site] = ran.get(site, 0) + int(self._decoder.cache["counts"][text.b, column])
            overflow[site] = overflow.get(site, 0) + int(overflow_BN[text.b, column])

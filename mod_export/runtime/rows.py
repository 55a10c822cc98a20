"""The rows of decoders and the texts that are being written in them: one step reads one token of every text.

A text that has ended leaves its row, and another one can begin there while the others go on (continuous batching), so
no text waits for the longest. What is written depends on a text's own prompt alone: it has its own cache and random
numbers. The caller decides which text begins when: `Stream` has a fixed list of them, a server what has come in.

Of several decoders the smallest that has a row for every text takes the steps, so one text alone is written at the
speed of an engine for one text.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mod_export.errors import EngineError
from mod_export.runtime.decoder import Decoder, Kept, Prompts
from mod_export.runtime.logits import Logprob, Sampling, draw, logprob_of
from mod_export.runtime.texts import Reader, StopText
from mod_export.types import Site

IDLE = -1
NO_LOGITS = np.zeros(0, dtype=np.float32)


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
        logprob: of the token, where it was asked for.
    """

    row: int
    token: int | None
    text: str
    logprob: Logprob | None = None


@dataclass(slots=True)
class Completion:
    """What was written after one prompt.

    Attributes:
        prompt_ids: the prompt with its prefix.
        ids: the new tokens: without an id that it stopped at, and up to the token that completed a stop string.
        text: the new characters, up to the stop string; empty where the model's ids stand for no text.
        finish: "length", "stop", or "cancelled"; empty while it is being written.
        stop: the stop string or id that ended it.
        first_token_s: seconds from when the text was asked for to its first token, time in the queue included.
        ran: routing site -> how many tokens of the text were selected there.
        overflow: routing site -> how many tokens wanted a slot there and found none.
        read: how many tokens of the text the model has read, its prefix and what was read again by rolling included.
        logprobs: one for each of `ids`, where they were asked for.
        stop_logprob: of the id that it stopped at, likewise.
        prompt_logprobs: one for each of `prompt_ids` but the first, where they were asked for.
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
    logprobs: list[Logprob] = field(default_factory=list)
    stop_logprob: Logprob | None = None
    prompt_logprobs: list[Logprob] = field(default_factory=list)


@dataclass(slots=True, kw_only=True, eq=False)
class Text:
    """A prompt, how to continue it, and how far that is.

    Attributes:
        row: number of the prompt in its request.
        ids: of the prompt, without the prefix.
        max_new_tokens: 0 only reads the prompt.
        rng: the text's own random numbers.
        stop_ids: ids that end the text.
        reader: of the new tokens; None where ids stand for no text.
        stops: the stop strings.
        logprobs: how many of the most probable tokens are recorded beside each token; None records nothing.
        score_prompt: whether that is recorded of the tokens of the prompt too.
        since: when it was asked for, of `time.perf_counter`.
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
    logprobs: int | None = None
    score_prompt: bool = False
    since: float = 0.0
    completion: Completion = field(init=False)
    cancelled: bool = field(default=False, init=False)
    b: int = field(default=IDLE, init=False)
    position: int = field(default=0, init=False)
    pending: deque[int] = field(default_factory=deque, init=False)

    def __post_init__(self) -> None:
        self.completion = Completion((*(self.prefix.ids if self.prefix else ()), *self.ids))


Written = tuple[Text, Piece]


class Rows:
    """The rows of decoders. Only one thread may use it, but any thread may set `cancelled` of a text.

    Attributes:
        size: how many texts are written at once.
        steps: how many there were.
        step_seconds: in them.
        prompt_seconds: in which prompts alone were read.
        from_prompts: new tokens that came right after a prompt.
    """

    def __init__(
        self, decoders: Sequence[Decoder], prompts: Prompts, sites: Sequence[Site], *, rolling: bool = False
    ) -> None:
        """The decoders hold texts of the same length, and their counts are of `sites`; with `rolling`, a text that
        fills the cache continues from its second half.
        """
        self._decoders = sorted(decoders, key=lambda one: one.batch)
        self._decoder = self._decoders[0]
        self.size = self._decoders[-1].batch
        self.steps = 0
        self.step_seconds = 0.0
        self.prompt_seconds = 0.0
        self.from_prompts = 0
        self._prompts, self._sites, self._rolling = prompts, sites, rolling
        self._texts: list[Text | None] = [None] * self._decoder.batch

    @property
    def busy(self) -> list[Text]:
        """The texts that are being written. A text that has ended, or was cancelled, is none of them any more."""
        for b, text in enumerate(self._texts):
            if text is not None and self._is_over(text):
                self._texts[b] = None
        return [text for text in self._texts if text is not None]

    def begin(self, text: Text) -> Iterator[Written]:
        """Gives a free row to a text: reads its prompt, and yields the first token if it follows right after.

        Raises:
            EngineError: the engine failed, or its logits are not finite.
        """
        if self._is_over(text):
            return
        self._make_room(len(self.busy) + 1)
        text.b = self._texts.index(None)
        self._texts[text.b] = text
        if text.prefix is not None:
            yield from self._resume(text, text.prefix.kept, text.ids)
        elif text.score_prompt:
            # Prefill engines give the logits of the last token only. Steps give those of every token.
            self._decoder.clear(text.b)
            text.pending.extend(text.ids)
        else:
            yield from self._read(text, text.ids)

    def step(self) -> Iterator[Written]:
        """Reads one token of every text that is being written, and yields those that follow.

        Raises:
            EngineError: the engine failed, or its logits are not finite.
        """
        for text in self.busy:
            if text.position == self._decoder.length:
                yield from self._roll(text)
        busy = self.busy
        if not busy:
            return
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
                self.from_prompts += not text.pending
            if not text.pending:
                yield from self._accept(text, logits_BV[text.b])
            elif text.score_prompt:
                _check_finite(text, logits_BV[text.b])
                logprob = logprob_of(logits_BV[text.b], text.pending[0], text.logprobs or 0)
                text.completion.prompt_logprobs.append(logprob)

    def cancel(self) -> None:
        """Ends every text that is being written. What was read until then is counted."""
        for text in self.busy:
            text.cancelled = True
        assert not self.busy

    def reset(self) -> None:
        """Ends every text, and clears the caches, after the engine has failed."""
        self.cancel()
        for decoder in self._decoders:
            decoder.wipe()

    def _make_room(self, texts: int) -> None:
        """Goes on with a larger decoder if the one that takes the steps has no row left, and with the smallest one
        where nothing is being written.
        """
        busy = self.busy
        fitting = next(one for one in self._decoders if one.batch >= texts)
        if busy and fitting.batch <= self._decoder.batch:
            return  # To move texts to a smaller one would cost a copy of their caches whenever a text ends.
        before, self._decoder = self._decoder, fitting
        self._texts = [*busy, *[None] * (fitting.batch - len(busy))]
        for b, text in enumerate(busy):
            fitting.put(b, before.keep(text.b, text.position, NO_LOGITS))
            text.b = b

    def _read(self, text: Text, ids: Sequence[int]) -> Iterator[Written]:
        longest = self._prompts.longest
        begin = time.perf_counter()
        kept = self._prompts.read(ids[:longest])
        self.prompt_seconds += time.perf_counter() - begin
        return self._resume(text, kept, ids[longest:])

    def _resume(self, text: Text, kept: Kept, rest: Sequence[int]) -> Iterator[Written]:
        """Continues after tokens that were read; the rest of the prompt is left to steps."""
        self._decoder.put(text.b, kept)
        text.position = kept.length
        text.completion.read += kept.length
        text.pending.extend(rest)
        if not text.pending:
            self.from_prompts += 1
            yield from self._accept(text, kept.logits_V)

    def _roll(self, text: Text) -> Iterator[Written]:
        """Continues as if the second half were the whole text. Positions start at 0 again, so it is read again."""
        assert self._rolling
        self._count(text)
        whole = [*text.completion.prompt_ids, *text.completion.ids]
        yield from self._read(text, whole[-max(1, self._decoder.length // 2) :])

    def _accept(self, text: Text, logits_V: np.ndarray) -> Iterator[Written]:
        """Chooses the next token of a text and yields the characters that are certain with it."""
        completion = text.completion
        _check_finite(text, logits_V)
        if text.max_new_tokens == 0:
            self._finish(text, "length")
            return
        token = draw(logits_V, text.sampling, text.rng)
        if completion.first_token_s is None:
            completion.first_token_s = time.perf_counter() - text.since
        logprob = None if text.logprobs is None else logprob_of(logits_V, token, text.logprobs)
        if token in text.stop_ids:
            completion.stop_logprob = logprob
            self._finish(text, "stop", token)
            yield from self._rest(text)
            return
        completion.ids.append(token)
        if logprob is not None:
            completion.logprobs.append(logprob)
        new = "" if text.reader is None else text.stops.feed(text.reader.feed(token))
        completion.text += new
        if text.stops.stopped is not None:
            self._finish(text, "stop", text.stops.stopped)
        elif len(completion.ids) >= text.max_new_tokens:
            self._finish(text, "length")
        yield text, Piece(text.row, token, new, logprob)
        if completion.finish == "length":
            yield from self._rest(text)

    def _rest(self, text: Text) -> Iterator[Written]:
        """Yields what was held back, at the end of a text."""
        if text.reader is None:
            return
        held = text.stops.feed(text.reader.close()) + text.stops.close()
        text.completion.text += held
        if held:
            yield text, Piece(text.row, None, held)

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


def _check_finite(text: Text, logits_V: np.ndarray) -> None:
    if not np.isfinite(logits_V).all():
        raise EngineError(
            f"the logits of token {len(text.completion.ids) + 1} of prompt {text.row} are not finite, at position "
            f"{text.position} of the text: the weights or the engine are damaged; mod-export validate says where"
        )

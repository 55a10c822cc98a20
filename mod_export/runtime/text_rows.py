"""Writes texts in the rows of decoders. Prompts are read in parts. A step reads one token of every text whose prompt is
read, and chooses the next one.

When a text ends, another can begin in its row while the others continue (continuous batching), so no text waits for
the longest one. A text has its own cache and random numbers, so its output depends on its own request alone, except
where texts compete for the slots of a step (`generation.slots = "fair"`).

The caller decides which text begins when, and whether prompts or tokens come next. A stream (`stream.py`) has a fixed
list of texts and reads their prompts first, because an engine takes as long for few of its rows as for all. A server
takes requests as they arrive, and steps between the parts of a prompt, so that nobody waits for a whole one.

If there are several decoders, the smallest one with a row for every text runs the steps. So a single text is written at
the speed of an engine for one text.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mod_export.errors import EngineError
from mod_export.runtime.cache import Kept
from mod_export.runtime.decoder import Decoder
from mod_export.runtime.logits import Logprob, draw, logprob_of
from mod_export.runtime.prefix_cache import BLOCK, Node, PrefixCache, Trail
from mod_export.runtime.prompts import Prompts
from mod_export.runtime.rows import Piece, RowText
from mod_export.types import VACANT, Site

NO_LOGITS = np.zeros(0, dtype=np.float32)
Written = tuple[RowText, Piece]


@dataclass(slots=True)
class _Reading:
    """A prompt that is read in parts.

    Attributes:
        text: the text that it begins.
        ids: the tokens to read.
        kept: the cached state of the tokens before these; None if there are none.
        parts: the parts that are left to read; None before the first part.
        node: the node that keeps the last part; None if the part is not kept.
        logits_V: the logits after the last part.
    """

    text: RowText
    ids: Sequence[int]
    kept: Kept | None = None
    parts: deque[tuple[int, ...]] | None = None
    node: Node | None = None
    logits_V: np.ndarray = field(default_factory=lambda: NO_LOGITS)


class TextRows:
    """The rows of decoders. Only one thread may use an instance, but any thread may set `cancelled` of a text.

    Attributes:
        size: maximum number of texts written at once.
        steps: number of steps so far.
        step_seconds: time spent in steps.
        prompt_seconds: time spent only on reading prompts.
        from_prompts: number of new tokens that directly followed a prompt.
    """

    def __init__(
        self,
        decoders: Sequence[Decoder],
        prompts: Prompts,
        sites: Sequence[Site],
        *,
        rolling: bool = False,
        prefixes: PrefixCache | None = None,
    ) -> None:
        """All decoders have the same length, and their counts refer to `sites`. With `rolling`, a text that fills the
        cache continues from its second half. `prefixes` keeps what texts have read.
        """
        self._decoders = sorted(decoders, key=lambda decoder: decoder.batch)
        self._decoder = self._decoders[0]
        self.size = self._decoders[-1].batch
        self.steps = 0
        self.step_seconds = 0.0
        self.prompt_seconds = 0.0
        self.from_prompts = 0
        self._prompts, self._sites, self._rolling = prompts, sites, rolling
        self._prefixes = prefixes
        self._texts: list[RowText | None] = [None] * self._decoder.batch
        # Only the first reading has begun, because there is one row to read prompts in.
        self._readings: deque[_Reading] = deque()

    @property
    def busy(self) -> list[RowText]:
        """The texts that are being written. Removes texts that have ended or were cancelled from their rows."""
        for b, text in enumerate(self._texts):
            if text is not None and self._is_over(text):
                self._texts[b] = None
        return [text for text in self._texts if text is not None]

    def begin(self, text: RowText) -> None:
        """Gives a text a free row. `read_part` reads its prompt in its turn; steps read one that is scored."""
        if self._is_over(text):
            return
        self._make_room(len(self.busy) + 1)
        text.b = self._texts.index(None)
        self._texts[text.b] = text
        if text.prefix is None and text.score_prompt:
            self._score(text)
        else:
            self._read(text, text.ids, text.prefix.kept if text.prefix else None)

    @property
    def has_unread_prompts(self) -> bool:
        """Whether `read_part` has a prompt to read."""
        while self._readings and self._is_over(self._readings[0].text):
            self._readings.popleft()
        return bool(self._readings)

    def read_part(self) -> Iterator[Written]:
        """Reads one part of the first prompt that is not read yet; after its last part, yields the first new token.

        Raises:
            EngineError: the engine failed, or its logits are not finite.
        """
        if not self.has_unread_prompts:
            return
        reading = self._readings[0]
        begin = time.perf_counter()
        if reading.parts is None:
            reading.parts = self._begin_reading(reading)
        if reading.parts:
            part = reading.parts.popleft()
            reading.logits_V = self._prompts.read_part(part)
            reading.text.completion.read += len(part)
            if reading.node is not None and self._prefixes is not None:
                reading.node = self._prefixes.add_block(reading.node, part, self._prompts.last_block())
        text, position = reading.text, self._prompts.position
        if not reading.parts:
            self._readings.popleft()
            self._decoder.put(text.b, self._prompts.state(0, position, reading.logits_V))
            text.position, text.reading = position, False
        self.prompt_seconds += time.perf_counter() - begin
        if not text.reading:
            self.from_prompts += 1
            yield from self._accept(text, reading.logits_V)

    def step(self) -> Iterator[Written]:
        """Reads one token of every text whose prompt is read, and yields the new tokens.

        Raises:
            EngineError: the engine failed, or its logits are not finite.
        """
        for text in self.busy:
            if text.position == self._decoder.length:
                self._roll(text)
        busy = [text for text in self.busy if not text.reading]
        if not busy:
            return
        ids_B = np.zeros(self._decoder.batch, dtype=np.int64)
        position_B = np.full(self._decoder.batch, VACANT, dtype=np.int64)
        for b, row in enumerate(self._texts):
            if row is None or row.reading:  # It holds nothing: a prompt is put into its row when it is read.
                self._decoder.clear(b)
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
            yield from self._advance(text, int(ids_B[text.b]), logits_BV[text.b])

    def _advance(self, text: RowText, token: int, logits_V: np.ndarray) -> Iterator[Written]:
        """Goes on after a step that has read `token`."""
        text.position += 1
        text.completion.read += 1
        if text.pending:
            text.pending.popleft()
            self.from_prompts += not text.pending
        if text.pending and text.score_prompt:
            _check_finite(text, logits_V)
            text.completion.prompt_logprobs.append(logprob_of(logits_V, text.pending[0], text.logprobs or 0))
        if text.trail is not None:
            self._follow(text, text.trail, token, logits_V)
        if not text.pending:
            yield from self._accept(text, logits_V)

    def cancel(self) -> None:
        """Cancels every text that is being written. The tokens read so far are counted."""
        for text in self.busy:
            text.cancelled = True
        assert not self.busy

    def reset(self) -> None:
        """Cancels every text and clears the caches, after an engine failure."""
        self.cancel()
        self._readings.clear()
        self._prompts.wipe()
        for decoder in self._decoders:
            decoder.wipe()
        if self._prefixes is not None:
            self._prefixes.clear()

    def _make_room(self, texts: int) -> None:
        """Switches to a larger decoder if the current one has no free row. If no text is being written, switches to the
        smallest one that is large enough.
        """
        busy = self.busy
        fitting = next(decoder for decoder in self._decoders if decoder.batch >= texts)
        if busy and fitting.batch <= self._decoder.batch:
            return  # Moving texts to a smaller decoder would copy their caches whenever a text ends.
        before, self._decoder = self._decoder, fitting
        self._texts = [*busy, *[None] * (fitting.batch - len(busy))]
        for b, text in enumerate(busy):
            fitting.put(b, before.keep(text.b, text.position, NO_LOGITS))
            text.b, text.trail = b, None  # Another engine rounds differently, so its blocks do not follow these.

    def _score(self, text: RowText) -> None:
        """Begins a text whose whole prompt is read by steps: prefill engines return logits of the last token only."""
        self._decoder.clear(text.b)
        rest = text.ids
        if self._prefixes is not None:
            start = self._prefixes.beginning(("steps", *self._decoder.shape))
            if start is not None:
                rest = self._take(text, start, text.logprobs or 0)
        text.pending.extend(rest)

    def _take(self, text: RowText, start: Node, alternatives: int) -> Sequence[int]:
        """Takes the blocks that are kept of a scored prompt. Returns the tokens that steps still have to read: at least
        the last one, for its logits.
        """
        assert self._prefixes is not None
        blocks = [text.ids[i : i + BLOCK] for i in range(0, len(text.ids) - BLOCK, BLOCK)]
        *_, last = nodes = self._prefixes.chain(start, blocks, alternatives)
        for node in nodes:
            if node.block is not None:
                self._decoder.put_block(text.b, node.block)
                text.completion.prompt_logprobs += [_listing(entry, alternatives) for entry in node.block.logprobs]
        text.trail = Trail(last)
        text.position += last.length
        text.completion.read += last.length
        text.completion.cached += last.length
        if last.block is not None:
            next_token = text.ids[last.length]
            text.completion.prompt_logprobs.append(logprob_of(last.block.logits_V, next_token, alternatives))
        return text.ids[last.length :]

    def _follow(self, text: RowText, trail: Trail, token: int, logits_V: np.ndarray) -> None:
        """Notes the token that a text has just read, and keeps its block when it is whole."""
        assert self._prefixes is not None
        if not text.pending:
            text.trail = None  # Blocks of scored prompts have log probabilities, which new tokens may not have.
            return
        trail.ids.append(token)
        trail.slots.append(self._decoder.slots_of(text.b))
        if len(trail.ids) < BLOCK:
            return
        slots_TL = np.stack(trail.slots)
        filled = {layer: slots_TL[slots_TL[:, layer] >= 0, layer] for layer in range(slots_TL.shape[1])}
        # The first token of a text has no log probability, so that of the token at a position is one entry before.
        first = max(0, trail.node.length - 1)
        entries = text.completion.prompt_logprobs[first : trail.node.length + BLOCK - 1]
        block = replace(self._decoder.block(text.b, filled, logits_V), logprobs=tuple(entries))
        node = self._prefixes.add_block(trail.node, trail.ids, block)
        text.trail = None if node is None else Trail(node)

    def _read(self, text: RowText, ids: Sequence[int], kept: Kept | None = None) -> None:
        text.reading = True
        self._readings.append(_Reading(text, ids, kept))

    def _begin_reading(self, reading: _Reading) -> deque[tuple[int, ...]]:
        """Prepares the row that reads prompts, and takes the parts of this prompt that are kept. Returns the parts that
        are left.
        """
        parts, text = self._prompts.parts(reading.ids), reading.text
        self._prompts.start(reading.kept)
        if reading.kept is not None:
            reading.logits_V = reading.kept.logits_V
            text.completion.read += reading.kept.length
        elif self._prefixes is not None and not self._rolling:
            start = self._prefixes.beginning(("parts", 0, 0))
            nodes = [] if start is None else self._prefixes.chain(start, parts)
            for node, part in zip(nodes[1:], parts, strict=False):
                assert node.block is not None
                self._prompts.take(node.block, len(part))
                reading.logits_V = node.block.logits_V
            reading.node = nodes[-1] if nodes else None
            text.completion.read += self._prompts.position
            text.completion.cached += self._prompts.position
            parts = parts[max(0, len(nodes) - 1) :]
        return deque(parts)

    def _roll(self, text: RowText) -> None:
        """Continues as if the second half were the whole text. It is read again because positions restart at 0."""
        assert self._rolling
        self._count(text)
        whole = [*text.completion.prompt_ids, *text.completion.ids]
        text.position = 0
        self._read(text, whole[-max(1, self._decoder.length // 2) :])

    def _accept(self, text: RowText, logits_V: np.ndarray) -> Iterator[Written]:
        """Chooses the next token of a text and yields the characters that are certain with it."""
        completion = text.completion
        _check_finite(text, logits_V)
        if text.max_new_tokens == 0:
            self._finish(text, "length")
            return
        choice_V = logits_V
        if text.bias is not None or text.grammar is not None:
            allowed_V = _steered(text, logits_V)
            if allowed_V is None:
                yield from self._end_without_token(text)
                return
            choice_V = allowed_V
        token = draw(choice_V, text.sampling, text.rng)
        if completion.first_token_s is None:
            completion.first_token_s = time.perf_counter() - text.since
        logprob = None if text.logprobs is None else logprob_of(logits_V, token, text.logprobs)
        if token in text.stop_ids:
            completion.stop_logprob = logprob
            self._finish(text, "stop", token)
            yield from self._rest(text)
            return
        completion.ids.append(token)
        if text.grammar is not None:
            text.grammar.feed(token)
        if logprob is not None:
            completion.logprobs.append(logprob)
        new = "" if text.reader is None else text.stops.feed(text.stops.read(text.reader, token))
        completion.text += new
        ends_whole = self._ends_whole(text)
        yield text, Piece(text.row, token, new, logprob)
        if ends_whole:
            yield from self._rest(text)

    def _ends_whole(self, text: RowText) -> bool:
        """Ends a text that its last token completes. Returns whether it has ended, other than at a stop string."""
        if text.stops.stopped is not None:
            self._finish(text, "stop", text.stops.stopped)
            return False
        if text.grammar is not None and text.grammar.is_over:
            self._finish(text, "stop")
        elif len(text.completion.ids) >= text.max_new_tokens:
            self._finish(text, "length")
        return bool(text.completion.finish)

    def _end_without_token(self, text: RowText) -> Iterator[Written]:
        """Ends a text that no token may continue."""
        assert text.grammar is not None
        if not text.grammar.is_complete:
            text.completion.failure = text.grammar.failure
        self._finish(text, "failed" if text.completion.failure else "stop")
        yield from self._rest(text)

    def _rest(self, text: RowText) -> Iterator[Written]:
        """Yields the characters that were held back, at the end of a text, which may complete a stop string."""
        if text.reader is None:
            return
        rest = text.stops.feed(text.reader.close()) + text.stops.close()
        if text.completion.finish == "length" and text.stops.stopped is not None:
            text.completion.finish, text.completion.stop = "stop", text.stops.stopped
        text.completion.text += rest
        if rest:
            yield text, Piece(text.row, None, rest)

    def _is_over(self, text: RowText) -> bool:
        if text.cancelled and not text.completion.finish:
            self._finish(text, "cancelled")
        return bool(text.completion.finish)

    def _finish(self, text: RowText, finish: str, stop: str | int | None = None) -> None:
        self._count(text)
        text.completion.finish, text.completion.stop = finish, stop

    def _count(self, text: RowText) -> None:
        overflow_BN = self._decoder.overflow_BN
        if overflow_BN is None or not text.position:
            return
        ran, overflow = text.completion.ran, text.completion.overflow
        for column, site in enumerate(self._sites):
            ran[site] = ran.get(site, 0) + int(self._decoder.cache["counts"][text.b, column])
            overflow[site] = overflow.get(site, 0) + int(overflow_BN[text.b, column])


def _listing(logprob: Logprob, alternatives: int | None) -> Logprob:
    """A kept log probability with as few alternatives as a text asks for."""
    return logprob._replace(top=logprob.top[: alternatives or 0])


def _steered(text: RowText, logits_V: np.ndarray) -> np.ndarray | None:
    """Returns the logits with the bias of the text, and -inf for tokens that its grammar excludes; None if it excludes
    all of them.
    """
    biased_V = logits_V if text.bias is None else text.bias.added_to(logits_V)
    return biased_V if text.grammar is None else text.grammar.restrict(biased_V)


def _check_finite(text: RowText, logits_V: np.ndarray) -> None:
    if not np.isfinite(logits_V).all():
        raise EngineError(
            f"the logits of token {len(text.completion.ids) + 1} of prompt {text.row} are not finite, at position "
            f"{text.position} of the text: the weights or the engine are damaged; mod-export validate says where"
        )

"""Writes a fixed list of texts, piece by piece."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Self

from mod_export.runtime.rows import Piece, RowText
from mod_export.runtime.text_rows import TextRows
from mod_export.types import Bucket


class Stream(Iterator[Piece]):
    """Writes a fixed list of texts, and iterates over their pieces in the order in which they are written. When a text
    ends, the next one gets its row. While a prompt is read, or half of a text that rolls, no other text goes on.

    `completions` holds one completion for each prompt, with the text so far. Leaving the `with` block, or `close`,
    cancels unfinished texts.
    """

    def __init__(
        self, texts: Sequence[RowText], open_rows: Callable[[], AbstractContextManager[TextRows]], bucket: Bucket
    ) -> None:
        """Computes nothing until the first piece is requested. `open_rows` gives exclusive use of the rows of
        `bucket`.
        """
        self.completions = [text.completion for text in texts]
        self.bucket = bucket
        self.seconds = 0.0
        self._texts, self._open_rows = texts, open_rows
        self._rows: TextRows | None = None
        self._pieces = self._write()

    def __next__(self) -> Piece:
        return next(self._pieces)

    @property
    def steps(self) -> int:
        return self._rows.steps if self._rows else 0

    @property
    def step_seconds(self) -> float:
        return self._rows.step_seconds if self._rows else 0.0

    @property
    def prompt_seconds(self) -> float:
        """Time spent only on reading prompts."""
        return self._rows.prompt_seconds if self._rows else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens of all texts per second, without tokens that directly followed a prompt and without time spent
        only on reading prompts. None before the end, or if no text has a second token.
        """
        tokens = sum(len(text.ids) for text in self.completions) - (self._rows.from_prompts if self._rows else 0)
        seconds = self.seconds - self.prompt_seconds
        return tokens / seconds if tokens > 0 and seconds > 0 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def cancel(self, row: int | None = None) -> None:
        """Cancels one text, or all texts, before the next token. Any thread may call it."""
        for text in self._texts if row is None else [self._texts[row]]:
            text.cancelled = True

    def close(self) -> None:
        """Cancels all unfinished texts. Only the iterating thread may call it."""
        self._pieces.close()
        for completion in self.completions:
            completion.finish = completion.finish or "cancelled"

    def _write(self) -> Generator[Piece]:
        with self._open_rows() as rows:
            self._rows = rows
            begun = time.perf_counter()
            for text in self._texts:
                text.since = begun
            waiting = deque(self._texts)
            try:
                while waiting or rows.busy:
                    while waiting and len(rows.busy) < rows.size:
                        rows.begin(waiting.popleft())
                    for _, piece in rows.read_part() if rows.has_unread_prompts else rows.step():
                        yield piece
            finally:
                self.seconds = time.perf_counter() - begun
                rows.cancel()  # Needed if the stream was closed or failed.

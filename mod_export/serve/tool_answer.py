"""The answer of a conversation with tools: calls of functions in place of, or after, a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mod_export.runtime.rows import Completion, Piece, RowText
from mod_export.serve.openai_formats import ChatAnswer, Json, TokenNames
from mod_export.serve.tool_calls import CallReader


class ToolAnswer(ChatAnswer):
    """Answer of /v1/chat/completions to a request that offers tools."""

    def __init__(
        self,
        model: str,
        texts: Sequence[RowText],
        names: TokenNames,
        n: int,
        *,
        streamed: bool,
        reader: Callable[[], CallReader],
    ) -> None:
        """`reader` makes the reader of one text."""
        super().__init__(model, texts, names, n, streamed=streamed)
        self._new_reader = reader
        self._readers = [reader() for _ in texts]
        self._called = [False] * len(texts)

    def opening(self, row: int) -> list[Json]:
        return [self._chunk(self._delta(row, {"role": "assistant", "content": None}, None, None))]

    def piece(self, piece: Piece) -> Json | None:
        part = self._told(piece.row, self._readers[piece.row].feed(piece.text))
        if not part and piece.logprob is None:
            return None
        listed = None if piece.logprob is None else self._listed([piece.logprob])
        return self._chunk(self._delta(piece.row, part, listed, None))

    def closing(self, row: int, done: Completion) -> list[Json]:
        part = self._told(row, self._readers[row].close())
        chunks = [self._chunk(self._delta(row, part, None, None))] if part else []
        finish = _finish(done, called=self._called[row])
        return [*chunks, self._chunk(self._delta(row, {}, None, finish))]

    def _told(self, row: int, part: Json) -> Json:
        self._called[row] |= "tool_calls" in part
        return part

    def _message(self, completion: Completion) -> Json:
        reader = self._new_reader()
        parts = [reader.feed(completion.text), reader.close()]
        content = "".join(part.get("content", "") for part in parts)
        calls: list[Json] = []
        for call in (call for part in parts for call in part.get("tool_calls", [])):
            if "id" in call:
                calls.append(call)
            else:  # More characters of a call that has begun.
                function = calls[call["index"]]["function"]
                function["arguments"] += call["function"]["arguments"]
        message: Json = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
        if calls:
            message["tool_calls"] = [{name: call[name] for name in ("id", "type", "function")} for call in calls]
        return message

    def _reason(self, completion: Completion, message: Json) -> str:
        return _finish(completion, called="tool_calls" in message)


def _finish(done: Completion, *, called: bool) -> str:
    """Returns the reason why an answer ended: "tool_calls" if it has calls and its text ended by itself, neither at its
    limit nor at a stop string; otherwise the reason why the text ended.
    """
    return "tool_calls" if called and done.finish == "stop" and not isinstance(done.stop, str) else done.finish

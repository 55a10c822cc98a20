"""Responses of the OpenAI API: whole answers, and the chunks of a stream.

Completions and chat completions follow the same steps in different formats, so each is a class with the same methods.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mod_export.runtime.logits import Logprob
from mod_export.runtime.rows import Completion, Piece, Text
from mod_export.runtime.texts import Vocabulary

Json = dict[str, Any]


class Answer(Protocol):
    """Formats the answer to one request."""

    def opening(self, row: int) -> list[Json]:
        """Returns the chunks before the first piece of a choice."""

    def piece(self, piece: Piece) -> Json | None:
        """Returns the chunk of a piece; None if there is nothing to show."""

    def closing(self, row: int, done: Completion) -> Json:
        """Returns the last chunk of a choice."""

    def usage(self) -> Json:
        """Returns the chunk with the token counts."""

    def whole(self) -> Json:
        """Returns the answer to a request that does not stream, after all texts are complete."""


class _Base:
    """Common parts of both formats: the texts of the request, token names, and the head of every chunk."""

    def __init__(self, prefix: str, kind: str, model: str, texts: Sequence[Text], names: TokenNames, n: int) -> None:
        """Each prompt has `n` consecutive texts."""
        self._texts, self._names, self._n = texts, names, n
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time())}
        self._head["model"] = model

    @property
    def completions(self) -> list[Completion]:
        return [text.completion for text in self._texts]

    def usage(self) -> Json:
        return {**self._head, "choices": [], "usage": self._counted()}

    def _chunk(self, choice: Json) -> Json:
        return {**self._head, "choices": [choice]}

    def _counted(self) -> Json:
        """Token counts of the request. A prompt with several continuations counts once."""
        prompt = sum(len(completion.prompt_ids) for completion in self.completions[:: self._n])
        new = sum(len(completion.ids) for completion in self.completions)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


class TextAnswer(_Base):
    """Answer of /v1/completions. With `echo`, each text begins with its prompt."""

    def __init__(
        self, model: str, texts: Sequence[Text], names: TokenNames, n: int, echo: Sequence[str] | None
    ) -> None:
        """`echo` holds the text of each prompt, or None."""
        super().__init__("cmpl", "text_completion", model, texts, names, n)
        self._echo = echo
        self._offset = [0] * len(texts)

    def opening(self, row: int) -> list[Json]:
        if self._echo is None:
            return []
        return [self._chunk(self._choice(row, self._echo[row // self._n], self._of_prompt(row), None))]

    def piece(self, piece: Piece) -> Json | None:
        if not piece.text and piece.logprob is None:
            return None
        listed = self._listed(piece.row, [] if piece.logprob is None else [piece.logprob])
        return self._chunk(self._choice(piece.row, piece.text, listed, None))

    def closing(self, row: int, done: Completion) -> Json:
        stop = self._listed(row, _stop(done)) if done.stop_logprob is not None else None
        return self._chunk(self._choice(row, "", stop, done.finish))

    def whole(self) -> Json:
        choices = []
        for row, completion in enumerate(self.completions):
            before = "" if self._echo is None else self._echo[row // self._n]
            listed = self._of_prompt(row) if self._echo is not None else None
            new = self._listed(row, [*completion.logprobs, *_stop(completion)])
            if listed is not None and new is not None:
                listed = {name: listed[name] + new[name] for name in listed}
            choices.append(self._choice(row, before + completion.text, listed or new, completion.finish))
        return {**self._head, "choices": choices, "usage": self._counted()}

    def _choice(self, row: int, text: str, logprobs: Json | None, finish: str | None) -> Json:
        return {"index": row, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _of_prompt(self, row: int) -> Json | None:
        """Log probabilities of all prompt tokens. The first token has none, because nothing comes before it."""
        text = self._texts[row]
        if text.logprobs is None:
            return None
        ids = text.completion.prompt_ids
        first = {"tokens": [self._names.of(ids[0])], "token_logprobs": [None], "top_logprobs": [None]}
        first["text_offset"] = self._offsets(row, [ids[0]])
        rest = self._listed(row, text.completion.prompt_logprobs) or {}
        return {name: first[name] + rest[name] for name in first}

    def _listed(self, row: int, logprobs: Sequence[Logprob]) -> Json | None:
        if self._texts[row].logprobs is None:
            return None
        return {
            "tokens": [self._names.of(entry.token) for entry in logprobs],
            "token_logprobs": [entry.logprob for entry in logprobs],
            "top_logprobs": [self._names.by_name(entry) for entry in logprobs],
            "text_offset": self._offsets(row, [entry.token for entry in logprobs]),
        }

    def _offsets(self, row: int, ids: Sequence[int]) -> list[int]:
        """Returns the character offset of each token in the text of its choice, and advances the offset of the row."""
        offsets = []
        for token in ids:
            offsets.append(self._offset[row])
            self._offset[row] += self._names.length(token)
        return offsets


def _stop(done: Completion) -> list[Logprob]:
    """Log probability of the stop id, if any. Clients that score continuations expect it after those of the text."""
    return [] if done.stop_logprob is None else [done.stop_logprob]


class ChatAnswer(_Base):
    """Answer of /v1/chat/completions."""

    def __init__(self, model: str, texts: Sequence[Text], names: TokenNames, n: int, *, streamed: bool) -> None:
        super().__init__("chatcmpl", f"chat.completion{'.chunk' if streamed else ''}", model, texts, names, n)

    def opening(self, row: int) -> list[Json]:
        return [self._chunk(self._delta(row, {"role": "assistant", "content": ""}, None, None))]

    def piece(self, piece: Piece) -> Json | None:
        if not piece.text and piece.logprob is None:
            return None
        listed = None if piece.logprob is None else self._listed([piece.logprob])
        return self._chunk(self._delta(piece.row, {"content": piece.text}, listed, None))

    def closing(self, row: int, done: Completion) -> Json:
        return self._chunk(self._delta(row, {}, None, done.finish))

    def whole(self) -> Json:
        choices = [
            {
                "index": row,
                "message": {"role": "assistant", "content": completion.text, "refusal": None},
                "logprobs": None if self._texts[row].logprobs is None else self._listed(completion.logprobs),
                "finish_reason": completion.finish,
            }
            for row, completion in enumerate(self.completions)
        ]
        return {**self._head, "choices": choices, "usage": self._counted()}

    def _delta(self, row: int, delta: Json, logprobs: Json | None, finish: str | None) -> Json:
        return {"index": row, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _listed(self, logprobs: Sequence[Logprob]) -> Json:
        return {"content": [{**self._token(*entry[:2]), "top_logprobs": self._top(entry)} for entry in logprobs]}

    def _top(self, logprob: Logprob) -> list[Json]:
        return [self._token(token, value) for token, value in logprob.top]

    def _token(self, token: int, logprob: float) -> Json:
        name = self._names.of(token)
        return {"token": name, "logprob": logprob, "bytes": self._names.bytes_of(token)}


class TokenNames:
    """Names of single tokens: their text, or another form if the token is not a whole text."""

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        self._vocabulary = vocabulary

    def of(self, token: int) -> str:
        r"""Returns its text, or `bytes:\xe2\x82` for a part of a character (OpenAI's format), or else `token_id:7`."""
        token_bytes = self.bytes_of(token)
        if token_bytes is None:
            return f"token_id:{token}"
        try:
            return bytes(token_bytes).decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)

    def by_name(self, one: Logprob) -> Mapping[str, float]:
        """Returns name -> log probability of the most probable tokens, and of the token itself. If several tokens have
        the same name, all but the first are named by id.
        """
        logprobs: dict[str, float] = {}
        for token, logprob in dict([*one.top, one[:2]]).items():
            name = self.of(token)
            logprobs[f"token_id:{token}" if name in logprobs else name] = logprob
        return logprobs

    def length(self, token: int) -> int:
        """Returns the number of characters that a token adds to a text."""
        if self._vocabulary is None or not self._vocabulary.is_shown(token):
            return 0
        token_bytes = self.bytes_of(token)
        # Counts the first byte of each character: a token may hold only a part of one.
        return 0 if token_bytes is None else sum(byte & 0xC0 != 0x80 for byte in token_bytes)

    def bytes_of(self, token: int) -> list[int] | None:
        """Returns the UTF-8 bytes of a token, which may be a part of a character; None if it represents no text."""
        token_bytes = None if self._vocabulary is None else self._vocabulary.token_bytes(token)
        return None if token_bytes is None else list(token_bytes)

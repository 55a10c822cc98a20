"""What clients of OpenAI's API get: whole answers, and the chunks of a stream.

Both APIs have the same course and other shapes, so each is a class with the same methods.
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
    """The shape of the answer to one request."""

    def opening(self, row: int) -> list[Json]:
        """Chunks before the first piece of a choice."""

    def piece(self, piece: Piece) -> Json | None:
        """The chunk of a piece; None where there is nothing to show."""

    def closing(self, row: int, done: Completion) -> Json:
        """The last chunk of a choice."""

    def usage(self) -> Json:
        """The chunk with the number of tokens."""

    def whole(self) -> Json:
        """The answer to a request without a stream, when all texts are complete."""


class _Base:
    """What both shapes know: the request's texts, the names of tokens, and the head of every chunk."""

    def __init__(self, prefix: str, kind: str, model: str, texts: Sequence[Text], names: TokenNames, n: int) -> None:
        """`n` texts one after the other have the same prompt."""
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
        """A prompt that is continued several times counts once."""
        prompt = sum(len(one.prompt_ids) for one in self.completions[:: self._n])
        new = sum(len(one.ids) for one in self.completions)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


class TextAnswer(_Base):
    """Of /v1/completions. With `echo` each text begins with its prompt."""

    def __init__(
        self, model: str, texts: Sequence[Text], names: TokenNames, n: int, echo: Sequence[str] | None
    ) -> None:
        """`echo`: the text of each prompt."""
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
        for row, one in enumerate(self.completions):
            before = "" if self._echo is None else self._echo[row // self._n]
            listed = self._of_prompt(row) if self._echo is not None else None
            new = self._listed(row, [*one.logprobs, *_stop(one)])
            if listed is not None and new is not None:
                listed = {name: listed[name] + new[name] for name in listed}
            choices.append(self._choice(row, before + one.text, listed or new, one.finish))
        return {**self._head, "choices": choices, "usage": self._counted()}

    def _choice(self, row: int, text: str, logprobs: Json | None, finish: str | None) -> Json:
        return {"index": row, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _of_prompt(self, row: int) -> Json | None:
        """Of every token of a prompt. Nothing comes before the first, so it has no probability."""
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
            "tokens": [self._names.of(one.token) for one in logprobs],
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": [self._names.by_name(one) for one in logprobs],
            "text_offset": self._offsets(row, [one.token for one in logprobs]),
        }

    def _offsets(self, row: int, ids: Sequence[int]) -> list[int]:
        """Where each token begins in the text, were it the names of its tokens."""
        found = []
        for token in ids:
            found.append(self._offset[row])
            self._offset[row] += self._names.length(token)
        return found


def _stop(done: Completion) -> list[Logprob]:
    """Of the id that a text stopped at, which clients that score continuations look for after those of the text."""
    return [] if done.stop_logprob is None else [done.stop_logprob]


class ChatAnswer(_Base):
    """Of /v1/chat/completions."""

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
                "message": {"role": "assistant", "content": one.text, "refusal": None},
                "logprobs": None if self._texts[row].logprobs is None else self._listed(one.logprobs),
                "finish_reason": one.finish,
            }
            for row, one in enumerate(self.completions)
        ]
        return {**self._head, "choices": choices, "usage": self._counted()}

    def _delta(self, row: int, delta: Json, logprobs: Json | None, finish: str | None) -> Json:
        return {"index": row, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _listed(self, logprobs: Sequence[Logprob]) -> Json:
        return {"content": [{**self._token(*one[:2]), "top_logprobs": self._top(one)} for one in logprobs]}

    def _top(self, logprob: Logprob) -> list[Json]:
        return [self._token(token, value) for token, value in logprob.top]

    def _token(self, token: int, logprob: float) -> Json:
        name = self._names.of(token)
        return {"token": name, "logprob": logprob, "bytes": self._names.bytes_of(token)}


class TokenNames:
    """How tokens are written where one stands alone: as their text, or in a form that says what they are."""

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        self._vocabulary = vocabulary

    def of(self, token: int) -> str:
        r"""Its text; `bytes:\xe2\x82` for a part of a character, as OpenAI writes it; else `token_id:7`."""
        found = self.bytes_of(token)
        if found is None:
            return f"token_id:{token}"
        try:
            return bytes(found).decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{one:02x}" for one in found)

    def by_name(self, one: Logprob) -> Mapping[str, float]:
        """Of the most probable tokens, and of the token itself if it is none of them, by name; of tokens that are
        written alike, all but the first by number.
        """
        found: dict[str, float] = {}
        for token, logprob in dict([*one.top, one[:2]]).items():
            name = self.of(token)
            found[f"token_id:{token}" if name in found else name] = logprob
        return found

    def length(self, token: int) -> int:
        """Characters that it adds to a text."""
        if self._vocabulary is None or not self._vocabulary.is_shown(token):
            return 0
        found = self.bytes_of(token)
        # In a part of a character the first byte counts for all of it.
        return 0 if found is None else sum(one & 0xC0 != 0x80 for one in found)

    def bytes_of(self, token: int) -> list[int] | None:
        """UTF-8 of its text, or of a part of a character; None where it stands for no text."""
        found = None if self._vocabulary is None else self._vocabulary.token_bytes(token)
        return None if found is None else list(found)

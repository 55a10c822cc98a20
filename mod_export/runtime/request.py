"""From what a caller asks for to texts that can be written: prompts as ids, sampling, stops, and refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from mod_export.errors import UsageError
from mod_export.runtime.defaults import GenerationDefaults
from mod_export.runtime.logits import rng_of
from mod_export.runtime.rows import Prefix, Text
from mod_export.runtime.texts import StopText, Vocabulary

Message = Mapping[str, Any]
"""`role` and `content` of one turn of a conversation."""
Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or the messages of a conversation that the model answers."""


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_conversation(value: object) -> bool:
    """Whether these are the messages of one."""
    return isinstance(value, Sequence) and len(value) > 0 and all(isinstance(one, Mapping) for one in value)


class RequestReader:
    """Reads requests for one model.

    Attributes:
        vocabulary: converts between text and ids; None if ids do not represent text.
        vocab_size: ids are below it.
        defaults: what holds unless a request says otherwise.
    """

    def __init__(self, vocabulary: Vocabulary | None, vocab_size: int, defaults: GenerationDefaults) -> None:
        self.vocabulary, self.vocab_size, self.defaults = vocabulary, vocab_size, defaults

    def texts(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int = 128,
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop: Sequence[str | int] = (),
        ignore_eos: bool = False,
        add_special_tokens: bool = True,
        template: Mapping[str, Any] | None = None,
        prefix: Prefix | None = None,
        logprobs: int | None = None,
        prompt_logprobs: bool = False,
    ) -> list[Text]:
        """One text for each prompt, ready to begin.

        The arguments are those of `Generator.stream`.

        Raises:
            UsageError: an argument is out of range, or a prompt cannot be read by this model.
        """
        found = self.ids(prompts, template or {}, special=add_special_tokens, continued=prefix is not None)
        least = 0 if prompt_logprobs else 1
        if not _is_whole(max_new_tokens) or max_new_tokens < least:
            raise UsageError(f"max_new_tokens: expected a whole number of at least {least}, got {max_new_tokens!r}")
        if logprobs is not None and not (_is_whole(logprobs) and 0 <= logprobs <= self.vocab_size):
            raise UsageError(f"logprobs: expected a whole number from 0 to {self.vocab_size}, got {logprobs!r}")
        if prompt_logprobs and prefix is not None:
            raise UsageError("prompt_logprobs: a prefix has been read already; give the whole text as the prompt")
        sampling = self.defaults.sampling_of(temperature, top_k, top_p)
        stop_ids = self._stop_ids(stop) | (frozenset() if ignore_eos else self.defaults.stop_ids)
        texts = [
            Text(
                row=row,
                ids=ids,
                prefix=prefix,
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                rng=rng_of(seed, row),
                stop_ids=stop_ids,
                reader=self.vocabulary.reader() if self.vocabulary else None,
                stops=StopText([one for one in stop if isinstance(one, str)]),
                logprobs=logprobs,
                score_prompt=prompt_logprobs,
            )
            for row, ids in enumerate(found)
        ]
        empty = next((text.row for text in texts if not text.completion.prompt_ids), None)
        if empty is not None:
            raise UsageError(f"prompt {empty} is empty; expected at least one token")
        return texts

    def ids(
        self,
        prompts: Prompt | Sequence[Prompt],
        template: Mapping[str, Any],
        *,
        special: bool = True,
        continued: bool = False,
    ) -> list[list[int]]:
        """The ids of each prompt.

        Args:
            prompts: one, or a list of them.
            template: variables of the chat template.
            special: whether the tokenizer adds its special tokens to a text.
            continued: whether the prompts continue a prefix.

        Raises:
            UsageError: a prompt cannot be read by this model.
        """
        if not isinstance(prompts, str | Sequence | np.ndarray):
            raise UsageError(f"expected a prompt or a list of prompts, got {type(prompts).__name__}")
        if not isinstance(prompts, str) and len(prompts) == 0:
            raise UsageError("expected at least one prompt")
        # A single prompt, text, ids or messages, need not be in a list.
        one = isinstance(prompts, str) or all(map(_is_whole, prompts)) or _is_conversation(prompts)
        several = cast("Sequence[Prompt]", [prompts] if one else prompts)
        if continued and any(map(_is_conversation, several)):
            raise UsageError("a conversation is a whole text, which cannot continue a prefix; leave the prefix out")
        special = special and not continued
        return [self._ids(row, prompt, template, special=special) for row, prompt in enumerate(several)]

    def _ids(self, row: int, prompt: Prompt, template: Mapping[str, Any], *, special: bool) -> list[int]:
        if isinstance(prompt, str) or _is_conversation(prompt):
            if self.vocabulary is None:
                raise UsageError("this model's ids stand for no text; give prompts as ids, or build with a tokenizer")
            if isinstance(prompt, str):
                ids = self.vocabulary.ids(prompt, special)
            else:
                # The template writes every special token itself.
                told = self.vocabulary.chat_template.render(cast("Sequence[Message]", prompt), template)
                ids = self.vocabulary.ids(told, special=False)
        else:
            given: Any = prompt
            ids = list(given) if isinstance(given, Sequence | np.ndarray) else [given]
        wrong = [one for one in ids if not self._is_id(one)]
        if wrong:
            raise UsageError(
                f"prompt {row}: expected text, or token ids from 0 to {self.vocab_size - 1}, got {wrong[0]!r}"
            )
        return [int(one) for one in ids]

    def _is_id(self, value: Any) -> bool:
        return _is_whole(value) and 0 <= value < self.vocab_size

    def _stop_ids(self, stop: Sequence[str | int]) -> frozenset[int]:
        """The ids among the stops, and those of special tokens, which no text shows."""
        if isinstance(stop, str):
            raise UsageError(f"stop: got the string {stop!r}, expected a list of strings and ids; write [{stop!r}]")
        odd = [one for one in stop if not isinstance(one, str) and not self._is_id(one)]
        if odd:
            raise UsageError(f"stop: expected strings and ids from 0 to {self.vocab_size - 1}, got {odd[0]!r}")
        if self.vocabulary is None and any(isinstance(one, str) for one in stop):
            raise UsageError("stop: this model's ids stand for no text; give ids to stop at")
        ids = [self.vocabulary.special_id(one) if isinstance(one, str) and self.vocabulary else one for one in stop]
        return frozenset(one for one in ids if one is not None and not isinstance(one, str))

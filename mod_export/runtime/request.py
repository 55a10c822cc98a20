"""Checks the requests of callers and turns them into texts that can be written, with the model's own defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from mod_export.errors import UsageError
from mod_export.runtime.grammar import Grammar, Grammars
from mod_export.runtime.logits import Bias, Sampling, rng_of
from mod_export.runtime.rows import Prefix, RowText
from mod_export.runtime.texts import ExactReader, MarkReader, Reader, StopText, Vocabulary
from mod_export.runtime.tokenizer import TokenizersFile, read_json

GENERATION_CONFIG = "generation_config.json"

Message = Mapping[str, Any]
"""`role` and `content` of one turn of a conversation."""
Prompt = str | Sequence[int] | Sequence[Message]
"""A text, token ids, or the messages of a conversation that the model answers."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Generation settings that apply unless a request overrides them.

    Attributes:
        stop_ids: tokens that end a text.
        temperature: 0 (greedy), unless `do_sample` is true in the file; then the file's value, or 1.
        top_k: the file's value, or 0 (all tokens).
        top_p: the file's value, or 1 (all tokens).
    """

    stop_ids: frozenset[int]
    temperature: float
    top_k: int
    top_p: float

    def sampling_of(self, temperature: float | None, top_k: int | None, top_p: float | None) -> Sampling:
        """Returns the sampling of a request, with the model's default in place of each None.

        Raises:
            UsageError: a value is out of range.
        """
        return Sampling(
            self.temperature if temperature is None else temperature,
            self.top_k if top_k is None else top_k,
            self.top_p if top_p is None else top_p,
        )


def defaults_of(folder: Path, end: int | None) -> GenerationDefaults:
    """Reads the defaults from a folder. If the file says nothing about the ends of texts, they end at `end`, the
    tokenizer's end-of-text token; if it says `"eos_token_id": null`, they have no end.

    Raises:
        UsageError: the file cannot be read, or holds a value that is invalid.
    """
    path = folder / GENERATION_CONFIG
    config = read_json(path)
    listed = config.get("eos_token_id", end)
    ids = listed if isinstance(listed, list) else [listed]
    wrong = [token for token in ids if token is not None and not (_is_whole(token) and token >= 0)]
    if wrong:
        raise UsageError(f"{path}: eos_token_id: expected a token id, or a list of them, got {wrong[0]!r}")
    settings = {name: config[name] for name in ("temperature", "top_k", "top_p") if config.get(name) is not None}
    try:
        sampling = Sampling(**{"temperature": 1.0, **settings})
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    stop_ids = frozenset(token for token in ids if token is not None)
    temperature = sampling.temperature if config.get("do_sample") is True else 0.0
    return GenerationDefaults(stop_ids, temperature, sampling.top_k, sampling.top_p)


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_conversation(value: object) -> bool:
    """Whether the value is a list of messages."""
    return isinstance(value, Sequence) and len(value) > 0 and all(isinstance(item, Mapping) for item in value)


class RequestReader:
    """Reads requests for one model.

    Attributes:
        vocabulary: converts between text and ids; None if ids do not represent text.
        vocab_size: upper bound of ids, exclusive.
        defaults: settings that apply unless a request overrides them.
        grammars: compiles the grammars of requests.
    """

    def __init__(self, vocabulary: Vocabulary | None, vocab_size: int, defaults: GenerationDefaults) -> None:
        self.vocabulary, self.vocab_size, self.defaults = vocabulary, vocab_size, defaults
        self.grammars = Grammars(vocabulary, vocab_size)

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
        logit_bias: Mapping[int, float] | None = None,
        grammar: Grammar | None = None,
        shown: Sequence[str] = (),
        answers: bool = False,
    ) -> list[RowText]:
        """Returns one text for each prompt, ready to begin. Takes the arguments of `Generator.stream`; `shown`, the
        special tokens that the texts show; and `answers`, whether prompts of ids are conversations.

        Raises:
            GrammarError: no text can follow the grammar.
            GrammarNotCompiledError: the grammar could not be compiled now.
            UsageError: an argument is out of range, or a prompt cannot be read by this model.
        """
        several = self._several(prompts)
        ids_by_row = self.ids(several, template or {}, special=add_special_tokens, continued=prefix is not None)
        least = 0 if prompt_logprobs else 1
        if not _is_whole(max_new_tokens) or max_new_tokens < least:
            raise UsageError(f"max_new_tokens: expected a whole number of at least {least}, got {max_new_tokens!r}")
        if logprobs is not None and not (_is_whole(logprobs) and 0 <= logprobs <= self.vocab_size):
            raise UsageError(f"logprobs: expected a whole number from 0 to {self.vocab_size}, got {logprobs!r}")
        if prompt_logprobs and prefix is not None:
            raise UsageError("prompt_logprobs: a prefix has been read already; give the whole text as the prompt")
        sampling = self.defaults.sampling_of(temperature, top_k, top_p)
        stop_ids = self._stop_ids(stop) | (frozenset() if ignore_eos else self.defaults.stop_ids)
        bias = Bias(logit_bias, self.vocab_size) if logit_bias else None
        # Checking a large schema takes long, so it is done once for all texts.
        beginning = None if grammar is None else self.grammars.begin(grammar, stop_ids)
        texts = [
            RowText(
                row=row,
                ids=ids,
                prefix=prefix,
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                rng=rng_of(seed, row),
                stop_ids=stop_ids,
                reader=self._reader(
                    [*(prefix.ids if prefix else ()), *ids],
                    shown,
                    exact=grammar is not None,
                    answers=answers or _is_conversation(prompt),
                ),
                stops=StopText([item for item in stop if isinstance(item, str)]),
                logprobs=logprobs,
                score_prompt=prompt_logprobs,
                bias=bias,
                grammar=None if beginning is None else beginning.copy(),
            )
            for row, (prompt, ids) in enumerate(zip(several, ids_by_row, strict=True))
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
        """Returns the token ids of each prompt.

        Args:
            prompts: one prompt, or a list of prompts.
            template: variables of the chat template.
            special: whether the tokenizer adds its special tokens to a text.
            continued: whether the prompts continue a prefix.

        Raises:
            UsageError: a prompt cannot be read by this model.
        """
        several = self._several(prompts)
        if continued and any(map(_is_conversation, several)):
            raise UsageError("a conversation is a whole text, which cannot continue a prefix; leave the prefix out")
        special = special and not continued
        return [self._ids(row, prompt, template, special=special) for row, prompt in enumerate(several)]

    def _several(self, prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
        """Returns the prompts as a list: a single one (text, ids or messages) need not be in a list."""
        if not isinstance(prompts, str | Sequence | np.ndarray):
            raise UsageError(f"expected a prompt or a list of prompts, got {type(prompts).__name__}")
        if not isinstance(prompts, str) and len(prompts) == 0:
            raise UsageError("expected at least one prompt")
        is_single = isinstance(prompts, str) or all(map(_is_whole, prompts)) or _is_conversation(prompts)
        return cast("Sequence[Prompt]", [prompts] if is_single else prompts)

    def _ids(self, row: int, prompt: Prompt, template: Mapping[str, Any], *, special: bool) -> list[int]:
        if isinstance(prompt, str) or _is_conversation(prompt):
            if self.vocabulary is None:
                raise UsageError("this model's ids stand for no text; give prompts as ids, or build with a tokenizer")
            if isinstance(prompt, str):
                ids = self.vocabulary.ids(prompt, special)
            else:
                # The template writes all special tokens itself.
                text = self.vocabulary.chat_template.render(cast("Sequence[Message]", prompt), template)
                ids = self.vocabulary.ids(text, special=False)
        else:
            values: Any = prompt
            ids = list(values) if isinstance(values, Sequence | np.ndarray) else [values]
        wrong = [token for token in ids if not self._is_id(token)]
        if (
            wrong
            and isinstance(self.vocabulary, TokenizersFile)
            and (isinstance(prompt, str) or _is_conversation(prompt))
        ):
            name = self.vocabulary.name_of(wrong[0])
            raise UsageError(
                f"prompt {row}: holds {name!r}, token {wrong[0]}, and the model has tokens 0 to {self.vocab_size - 1} "
                f"only; leave it out"
            )
        if wrong:
            raise UsageError(
                f"prompt {row}: expected text, or token ids from 0 to {self.vocab_size - 1}, got {wrong[0]!r}"
            )
        return [int(token) for token in ids]

    def _reader(self, before: Sequence[int], shown: Sequence[str], *, exact: bool, answers: bool) -> Reader | None:
        """Returns the reader of a text after the tokens `before`. An answer of a conversation is a text of its own: it
        does not begin with the space of its first word.
        """
        if self.vocabulary is None:
            return None
        if exact:
            return ExactReader(self.vocabulary)
        following = partial(self.vocabulary.reader, before)
        reader = self.vocabulary.reader() if answers else following()
        marks = {token: text for text in shown if (token := self.vocabulary.special_id(text)) is not None}
        return MarkReader(reader, marks, following) if marks else reader

    def _is_id(self, value: Any) -> bool:
        return _is_whole(value) and 0 <= value < self.vocab_size

    def _stop_ids(self, stop: Sequence[str | int]) -> frozenset[int]:
        """Returns the ids among the stops, and the ids of stop strings that are special tokens, which no text shows."""
        if isinstance(stop, str):
            raise UsageError(f"stop: got the string {stop!r}, expected a list of strings and ids; write [{stop!r}]")
        wrong = [item for item in stop if not isinstance(item, str) and not self._is_id(item)]
        if wrong:
            raise UsageError(f"stop: expected strings and ids from 0 to {self.vocab_size - 1}, got {wrong[0]!r}")
        if self.vocabulary is None and any(isinstance(item, str) for item in stop):
            raise UsageError("stop: this model's ids stand for no text; give ids to stop at")
        ids = [self.vocabulary.special_id(item) if isinstance(item, str) and self.vocabulary else item for item in stop]
        return frozenset(item for item in ids if item is not None and not isinstance(item, str))

"""What is written in the rows of decoders: the prefix, the progress, the new tokens and the completion of each text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mod_export.runtime.cache import Kept
from mod_export.runtime.grammar import GrammarProgress
from mod_export.runtime.logits import Bias, Logprob, Sampling
from mod_export.runtime.prefix_cache import Trail
from mod_export.runtime.texts import Reader, StopText
from mod_export.types import Site

NO_ROW = -1


@dataclass(frozen=True, slots=True)
class Prefix:
    """A common beginning of several texts, read once.

    Attributes:
        ids: the tokens.
        kept: the cached state after these tokens.
        engines: identifies the engines that read them; for other engines the cached state is meaningless.
    """

    ids: tuple[int, ...]
    kept: Kept
    engines: str


class Piece(NamedTuple):
    """One new token of one text.

    Attributes:
        row: index of the prompt.
        token: id of the token; None if the piece only holds characters that were held back until the text ended.
        text: the characters that became certain with this piece; a token may complete none, or several.
        logprob: log probability of the token, if requested.
    """

    row: int
    token: int | None
    text: str
    logprob: Logprob | None = None


@dataclass(slots=True)
class Completion:
    """The text written after one prompt, and statistics.

    Attributes:
        prompt_ids: the prompt, including its prefix.
        ids: the new tokens, without a stop id, and up to the token that completed a stop string.
        text: the new characters, up to the stop string; empty if the model's ids do not represent text.
        finish: "length", "stop", "cancelled" or "failed"; empty while the text is being written.
        stop: the stop string or stop id that ended the text; None if its grammar ended it.
        failure: why the text failed. Only a text with a grammar can fail; the texts beside it go on.
        first_token_s: seconds from the request to the first token, including time in the queue.
        ran: routing site -> number of tokens of the text that it selected.
        overflow: routing site -> number of tokens that wanted a slot but found none left.
        read: number of tokens that the model has read, including the prefix and tokens read again by rolling.
        cached: number of tokens of the prompt that were taken from a `PrefixCache`; they count as read.
        logprobs: log probability of each of `ids`, if requested.
        stop_logprob: log probability of the stop id, if requested.
        prompt_logprobs: log probability of each of `prompt_ids` but the first, if requested.
    """

    prompt_ids: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    stop: str | int | None = None
    failure: str = ""
    first_token_s: float | None = None
    ran: dict[Site, int] = field(default_factory=dict)
    overflow: dict[Site, int] = field(default_factory=dict)
    read: int = 0
    cached: int = 0
    logprobs: list[Logprob] = field(default_factory=list)
    stop_logprob: Logprob | None = None
    prompt_logprobs: list[Logprob] = field(default_factory=list)


@dataclass(slots=True, kw_only=True, eq=False)
class RowText:
    """A prompt, how to continue it, and its progress.

    Attributes:
        row: index of the prompt in its request.
        ids: token ids of the prompt, without the prefix.
        max_new_tokens: limit of new tokens; 0 only reads the prompt.
        rng: the text's own random generator.
        stop_ids: ids that end the text.
        reader: decodes the new tokens; None if ids do not represent text.
        stops: finds the stop strings.
        logprobs: how many of the most probable tokens are recorded with each new token; None records nothing.
        score_prompt: whether log probabilities of the prompt are recorded too.
        bias: is added to the logits before a token is chosen; log probabilities do not include it.
        grammar: the grammar that the text follows; log probabilities do not take it into account.
        since: time of the request, from `time.perf_counter`.
        b: row of the decoder that holds the text.
        position: number of tokens that this row has read.
        reading: whether its prompt is being read in parts, or waits for that.
        pending: tokens of a scored prompt that steps still have to read.
        trail: what was read since the last block that a `PrefixCache` keeps; None if nothing more of it is kept.
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
    bias: Bias | None = None
    grammar: GrammarProgress | None = None
    since: float = 0.0
    completion: Completion = field(init=False)
    cancelled: bool = field(default=False, init=False)
    b: int = field(default=NO_ROW, init=False)
    position: int = field(default=0, init=False)
    reading: bool = field(default=False, init=False)
    pending: deque[int] = field(default_factory=deque, init=False)
    trail: Trail | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.completion = Completion((*(self.prefix.ids if self.prefix else ()), *self.ids))

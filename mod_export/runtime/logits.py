"""Chooses the next token from logits, greedily or by sampling, and computes how probable a text is.

Each draw takes one number from the random generator of its row, and a greedy choice takes none. So the same seed, row
and logits give the same tokens, independent of the other rows in the batch. Tokens are ranked by their logits, and
among equal logits the lower id comes first, so the result does not depend on a library's sort order.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mod_export.errors import EngineError, UsageError

MOST_BIAS = 100
"""Largest absolute value of a bias: enough to exclude or force a token, as in OpenAI's API."""

RANDOM_SEED = -1
"""The seed that stands for a random one, as in llama.cpp."""


def perplexity_of(nats: float) -> float:
    """Returns exp of the mean negative log-likelihood in nats; infinity where exp overflows."""
    return math.inf if nats > 700 else math.exp(nats)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. top_k is applied first, then top_p to the remaining tokens.

    Attributes:
        temperature: divisor of the logits. 0 is greedy: the largest logit, with the lowest id among equals.
        top_k: draw among this many largest logits, with the lowest ids among equals; 0 draws among all.
        top_p: draw among the smallest set of most probable tokens whose probabilities sum to this, at least one token
            (nucleus sampling: Holtzman et al. 2020, arXiv 1904.09751); 1 draws among all, 0 always takes the most
            probable token, the one of the lowest id among equals.

    Raises:
        UsageError: a value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (_is_number(self.temperature) and 0 <= self.temperature <= sys.float_info.max):
            raise UsageError(
                f"temperature: got {self.temperature!r}, expected a finite number of at least 0; "
                "0 always takes the most probable token"
            )
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise UsageError(
                f"top_k: got {self.top_k!r}, expected a whole number of at least 0; 0 draws from all tokens"
            )
        if not (_is_number(self.top_p) and 0 <= self.top_p <= 1):
            raise UsageError(f"top_p: got {self.top_p!r}, expected a number from 0 to 1; 1 draws from all tokens")


class Bias:
    """Numbers that are added to the logits of some tokens before one is chosen.

    Raises:
        UsageError: a token is not in the vocabulary, or a number is out of range.
    """

    def __init__(self, by_token: Mapping[int, float], vocab_size: int) -> None:
        for token, value in by_token.items():
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise UsageError(f"logit_bias: got token {token!r}, expected ids from 0 to {vocab_size - 1}")
            if not (_is_number(value) and abs(value) <= MOST_BIAS):
                raise UsageError(
                    f"logit_bias: got {value!r} for token {token}, expected a number from -{MOST_BIAS} to {MOST_BIAS}"
                )
        self._ids = np.array([*by_token], dtype=np.int64)
        self._values = np.array([*by_token.values()], dtype=np.float32)

    def added_to(self, logits_V: np.ndarray) -> np.ndarray:
        """Returns a copy of the logits with the numbers added."""
        biased_V = logits_V.copy()
        biased_V[self._ids] += self._values
        return biased_V


def rng_of(seed: int, row: int) -> np.random.Generator:
    """Returns the random generator of one row of a request. `RANDOM_SEED` gives another one each time.

    Raises:
        UsageError: the seed is not a whole number of at least 0, nor `RANDOM_SEED`.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < RANDOM_SEED:
        raise UsageError(f"seed: got {seed!r}, expected a whole number of at least 0; {RANDOM_SEED} draws a seed")
    return np.random.default_rng() if seed == RANDOM_SEED else np.random.default_rng([seed, row])


def draw(logits_V: np.ndarray, sampling: Sampling, rng: np.random.Generator) -> int:
    """Chooses the next token. Calls `random()` of the row's generator once, or not at all if greedy.

    The logits are float32 (V,). A token with logit -inf cannot be drawn.

    Raises:
        EngineError: the largest logit is not finite.
    """
    if sampling.temperature == 0:
        _peak(logits_V)
        return int(np.argmax(logits_V))
    reached_V = np.cumsum(probabilities(logits_V, sampling))
    # The random number is scaled by the rounded sum, which may differ from 1. A float below 1 times this sum is below
    # the sum, so the search never runs past the end. side="right" skips tokens of probability 0.
    return int(np.searchsorted(reached_V, rng.random() * reached_V[-1], side="right"))


def probabilities(logits_V: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Returns the distribution that `draw` samples: float64 (V,), 0 for excluded tokens, with sum 1 up to rounding.

    Raises:
        EngineError: the largest logit is not finite.
    """
    peak = _peak(logits_V)
    if sampling.temperature == 0:
        return np.asarray(np.eye(1, len(logits_V), int(np.argmax(logits_V)))[0])
    # The largest logit is subtracted before the division, so only logits of weight 0 can overflow, to -inf.
    with np.errstate(over="ignore"):
        weight_V = np.exp((logits_V.astype(np.float64) - peak) / sampling.temperature)
    if 0 < sampling.top_k < len(logits_V):
        weight_V[~_largest(logits_V, sampling.top_k)] = 0
    if sampling.top_p < 1:
        weight_V[~_nucleus(logits_V, weight_V, sampling.top_p)] = 0
    return np.asarray(weight_V / weight_V.sum())


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _peak(logits_V: np.ndarray) -> float:
    """Returns the largest logit, which must be finite."""
    peak = float(logits_V.max())
    if not np.isfinite(peak):
        raise EngineError(
            f"logits: the largest of {len(logits_V)} is {peak}, expected a finite number; "
            "look for the fault with `mod-export validate`"
        )
    return peak


def _largest(logits_V: np.ndarray, k: int) -> np.ndarray:
    """Bool (V,): True for exactly the k largest logits, lowest ids first among equals. Sorting is ten times slower."""
    edge = np.partition(logits_V, len(logits_V) - k)[len(logits_V) - k]
    kept_V: np.ndarray = logits_V > edge
    kept_V[np.flatnonzero(logits_V == edge)[: k - np.count_nonzero(kept_V)]] = True
    return kept_V


def _nucleus(logits_V: np.ndarray, weight_V: np.ndarray, top_p: float) -> np.ndarray:
    """Bool (V,): True for the smallest set of largest logits whose weights reach top_p of the total; at least one.

    Tokens are ordered by logit, not by weight: at a high temperature different logits may have equal weights.
    """
    total = weight_V.sum()
    # All tokens below this weight together have at most half of the weight that may be left out, so none is needed.
    candidate_N = np.flatnonzero(weight_V >= (1 - top_p) * total / (2 * len(weight_V)))
    order_N = candidate_N[np.argsort(-logits_V[candidate_N], kind="stable")]
    count = int(np.searchsorted(np.cumsum(weight_V[order_N]), top_p * total)) + 1
    kept_V = np.zeros(len(weight_V), dtype=bool)
    kept_V[order_N[:count]] = True
    return kept_V


class Logprob(NamedTuple):
    """The log probability of a token, before biases, grammars, temperature, top_k and top_p.

    Attributes:
        token: id of the token.
        logprob: natural logarithm of its probability.
        top: (id, logprob) of the most probable tokens, in descending order, lowest ids first among equals.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def logprob_of(logits_V: np.ndarray, token: int, top: int) -> Logprob:
    """Returns the log probability of a token, and those of the `top` most probable tokens."""
    logprob_V = log_softmax(logits_V)
    # Ranked by logits, as in greedy decoding: different logits may have equal log probabilities after rounding.
    largest = np.flatnonzero(_largest(logits_V, min(top, len(logits_V)))) if top else np.zeros(0, dtype=np.int64)
    best = largest[np.argsort(-logits_V[largest], kind="stable")]
    return Logprob(token, float(logprob_V[token]), tuple((int(i), float(logprob_V[i])) for i in best))


def negative_log_likelihood(logits_BSV: np.ndarray, ids_BS: np.ndarray) -> tuple[float, int]:
    """Returns the sum of -log p(token | tokens before it), in nats, over all but each first token, and their count.

    Perplexity is exp(sum / count).
    """
    target_BS1 = ids_BS[:, 1:, None]
    log_p = np.take_along_axis(log_softmax(logits_BSV[:, :-1]), target_BS1, axis=-1)
    return float(-log_p.sum()), target_BS1.size


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-softmax over the last axis, in float64."""
    shifted = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        shifted -= shifted.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted

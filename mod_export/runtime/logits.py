"""From logits to the next token, drawn at a temperature or the most probable one; and how probable a text was.

A draw uses exactly one number of the random generator of its row, so the same seed, row and logits give the same
tokens, whatever other rows are generated in the same batch. Tokens are ranked by their logits, and among equal logits
the lower id comes first, so the result does not depend on a library's sort order.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mod_export.errors import EngineError, UsageError

if TYPE_CHECKING:
    from mod_export.runtime.deployment import Deployment

SHOWN = 5
"""Next tokens of a `Score`."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. The cuts are made one after the other: top_k, then top_p of what is left.

    Attributes:
        temperature: logits are divided by it. 0 is greedy: the largest logit, the lowest id among equals.
        top_k: draw among this many largest logits, the lowest ids among equals; 0 draws among all.
        top_p: only the smallest set of most probable tokens whose probabilities sum to this can be drawn, one at least
            (nucleus sampling: Holtzman et al. 2020, arXiv 1904.09751); 1 is all.

    Raises:
        UsageError: one of them is out of its range.
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
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise UsageError(
                f"top_p: got {self.top_p!r}, expected a number above 0 and at most 1; 1 draws from all tokens"
            )


def rng_of(seed: int, row: int) -> np.random.Generator:
    """The generator of one row of a request.

    Raises:
        UsageError: the seed is not a whole number of at least 0.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise UsageError(f"seed: got {seed!r}, expected a whole number of at least 0")
    return np.random.default_rng([seed, row])


def draw(logits_V: np.ndarray, sampling: Sampling, rng: np.random.Generator) -> int:
    """The next token, with one `random()` of the row's generator, or none if greedy.

    The logits are float32 (V,); -inf is a token that cannot be drawn.

    Raises:
        EngineError: there is no finite largest logit.
    """
    if sampling.temperature == 0:
        _peak(logits_V)
        return int(np.argmax(logits_V))
    reached_V = np.cumsum(probabilities(logits_V, sampling))
    # Scaled by the rounded sum and not by 1: a float below 1 times the last sum is below the last sum, so the search
    # never runs past the end. side="right" skips tokens of probability 0, which add nothing to the sum.
    return int(np.searchsorted(reached_V, rng.random() * reached_V[-1], side="right"))


def probabilities(logits_V: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The distribution that `draw` draws from: float64 (V,), 0 for tokens that are cut off, with sum 1 up to rounding.

    Raises:
        EngineError: there is no finite largest logit.
    """
    peak = _peak(logits_V)
    if sampling.temperature == 0:
        return np.asarray(np.eye(1, len(logits_V), int(np.argmax(logits_V)))[0])
    # The largest is subtracted before the division, so that only logits of weight 0 overflow, to -inf.
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
    """The largest logit; NaN if any is NaN."""
    peak = float(logits_V.max())
    if not np.isfinite(peak):
        raise EngineError(
            f"logits: the largest of {len(logits_V)} is {peak}, expected a finite number; "
            "look for the fault with `mod-export validate`"
        )
    return peak


def _largest(logits_V: np.ndarray, k: int) -> np.ndarray:
    """Bool (V,): True for exactly the k largest, the lowest ids among equals. Sorting would take ten times as long."""
    edge = np.partition(logits_V, len(logits_V) - k)[len(logits_V) - k]
    kept_V: np.ndarray = logits_V > edge
    kept_V[np.flatnonzero(logits_V == edge)[: k - np.count_nonzero(kept_V)]] = True
    return kept_V


def _nucleus(logits_V: np.ndarray, weight_V: np.ndarray, top_p: float) -> np.ndarray:
    """Bool (V,): True for the fewest of the largest whose weights reach top_p of all weight; at least one.

    The order is that of the logits: at a high temperature different logits may weigh the same.
    """
    total = weight_V.sum()
    # All tokens below this weight have together at most half of what may be left out, so none of them is needed.
    candidate_N = np.flatnonzero(weight_V >= (1 - top_p) * total / (2 * len(weight_V)))
    order_N = candidate_N[np.argsort(-logits_V[candidate_N], kind="stable")]
    count = int(np.searchsorted(np.cumsum(weight_V[order_N]), top_p * total)) + 1
    kept_V = np.zeros(len(weight_V), dtype=bool)
    kept_V[order_N[:count]] = True
    return kept_V


class Logprob(NamedTuple):
    """How probable a token was, before temperature and cuts.

    Attributes:
        token: its id.
        logprob: natural logarithm of its probability.
        top: (id, logprob) of the most probable tokens, the lowest ids first among equals.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def logprob_of(logits_V: np.ndarray, token: int, top: int) -> Logprob:
    """Of a token, with that of the `top` most probable ones."""
    found_V = log_softmax(logits_V)
    # Ranked by the logits, as greedy text is: different logits may have equal logarithms.
    largest = np.flatnonzero(_largest(logits_V, min(top, len(logits_V)))) if top else np.zeros(0, dtype=np.int64)
    best = largest[np.argsort(-logits_V[largest], kind="stable")]
    return Logprob(token, float(found_V[token]), tuple((int(one), float(found_V[one])) for one in best))


@dataclass(frozen=True, slots=True)
class Score:
    """One prompt.

    Attributes:
        tokens: of the prompt.
        nll: mean of -log p of all its tokens but the first, in nats; NaN for a prompt of one token.
        following: the most probable next tokens, (id, probability).
    """

    tokens: int
    nll: float
    following: tuple[tuple[int, float], ...]

    @property
    def perplexity(self) -> float:
        """exp(nll)."""
        return math.exp(self.nll) if not self.nll > 700 else math.inf


def score(deployment: Deployment, ids: Sequence[int]) -> Score:
    """Reads a prompt in the smallest forward bucket that holds it. Routing is that of the bucket: see `Deployment.run`.

    So a model that cannot generate, because it selects tokens by looking at the whole prompt, can say how probable the
    tokens of a prompt are, and which may come next.

    Raises:
        UsageError: no tokens, more than the largest bucket holds, or a folder that gives no logits of every token.
    """
    if not ids:
        raise UsageError("an empty prompt has no score; expected at least one token")
    ids_1S = np.array([ids], dtype=np.int64)
    logits_1SV = deployment.run(ids_1S)
    if logits_1SV.ndim != 3 or logits_1SV.shape[2] != deployment.vocab_size:
        raise UsageError(
            "this folder gives no logits of every token; build it with outputs = 'logits' to score prompts"
        )
    nll, count = negative_log_likelihood(logits_1SV, ids_1S)
    share_V = np.exp(log_softmax(logits_1SV[0, -1]))
    best = np.argsort(-share_V, kind="stable")[:SHOWN]
    following = tuple((int(token), float(share_V[token])) for token in best)
    return Score(len(ids), nll / count if count else math.nan, following)


def negative_log_likelihood(logits_BSV: np.ndarray, ids_BS: np.ndarray) -> tuple[float, int]:
    """Sum of -log p(token | the tokens before it), in nats, over all tokens but the first, and their number.

    Perplexity is exp(sum / count).
    """
    target_BS1 = ids_BS[:, 1:, None]
    log_p = np.take_along_axis(log_softmax(logits_BSV[:, :-1]), target_BS1, axis=-1)
    return float(-log_p.sum()), target_BS1.size


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, in float64."""
    shifted = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        shifted -= shifted.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted

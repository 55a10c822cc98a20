"""Scores prompts with a model that cannot generate: how probable their tokens are, and which may come next.

A model that selects tokens by looking at the whole prompt is defined for a prompt, but not for a text that is still
being written. Its forward buckets read the prompt, as the checkpoint's spec says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mod_export.errors import UsageError
from mod_export.runtime.deployment import Deployment

__all__ = ["Score", "log_softmax", "negative_log_likelihood", "score"]

SHOWN = 5


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
    """Reads a prompt in the smallest bucket that holds it. Routing is that of the bucket: see `Deployment.run`.

    Args:
        deployment: of a folder that was built with outputs = "logits".
        ids: at least one token.

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
    last_V = logits_1SV[0, -1].astype(np.float64)
    share_V = np.exp(last_V - last_V.max())
    share_V /= share_V.sum()
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

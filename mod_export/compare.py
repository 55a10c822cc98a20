"""Differences as numbers. Nothing here knows a threshold; NaN stays NaN, so that a judge sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = [
    "ErrorNumbers",
    "LayerRouting",
    "divergence",
    "error_between",
    "farthest_from",
    "negative_log_likelihood",
    "next_token_shortfalls",
    "routing_of_layer",
    "smallest",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorNumbers:
    """max_abs, mean_abs and rms of `count` logits in their units; max_rel is max_abs over the reference's rms."""

    max_abs: float
    mean_abs: float
    max_rel: float
    rms: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRouting:
    """How a candidate routed one layer, against the reference that was given the same routing in earlier layers.

    Attributes:
        layer: which.
        k: slots of a row.
        routed: real tokens that the reference routes, over all rows.
        agreed: of those, how many the candidate routes too.
        distances: for each token that only one side routes, |score - k-th score|, in the units of the scores.
        min_margin: smallest (k-th score - next score) over the rows that have a next one; None if none has.
        scale: largest root mean square of the scores of a row. A row of one repeated token can have scores near zero,
            with rounding as large as that of any other row; so nothing is measured against its own row.
        noise: largest |score - score in float64| of any real token, over all runs of the reference; None where there
            is no float64 run.
        malformed: why the candidate's positions are no selection at all (not ascending, out of range); empty if sound.
    """

    layer: int
    k: int
    routed: int
    agreed: int
    distances: tuple[float, ...]
    min_margin: float | None
    scale: float = 0.0
    noise: float | None = None
    malformed: str = ""


def error_between(candidate_NV: np.ndarray, reference_NV: np.ndarray) -> ErrorNumbers:
    """Elementwise error of the logits of N real tokens, in float64."""
    reference = reference_NV.astype(np.float64)
    with np.errstate(invalid="ignore"):  # Infinity minus infinity is NaN, which the judge sees.
        difference = np.abs(candidate_NV.astype(np.float64) - reference)
    largest = float(difference.max())
    scale = _rms(reference)
    return ErrorNumbers(
        max_abs=largest,
        mean_abs=float(difference.mean()),
        max_rel=largest / scale if scale else largest,
        rms=_rms(difference),
        count=difference.size,
    )


def farthest_from(exact: np.ndarray, runs: Sequence[np.ndarray]) -> np.ndarray:
    """Of several runs, element by element, the value that is farthest from the exact one; NaN where one of them is."""
    farthest = runs[0]
    for other in runs[1:]:
        with np.errstate(invalid="ignore"):
            nearer = np.abs(other - exact) <= np.abs(farthest - exact)
        farthest = np.where(nearer | np.isnan(farthest), farthest, other)
    return farthest


def next_token_shortfalls(candidate_NV: np.ndarray, reference_NV: np.ndarray) -> np.ndarray:
    """By how much the reference prefers its own most probable next token to the candidate's: float64 (N,).

    In the units of the logits; 0 where they agree, infinity where the candidate is not finite.
    """
    chosen_N1 = candidate_NV.argmax(-1, keepdims=True)
    short_N = reference_NV.max(-1) - np.take_along_axis(reference_NV, chosen_N1, -1)[:, 0]
    return np.where(np.isfinite(candidate_NV).all(-1), short_N.astype(np.float64), np.inf)


def divergence(candidate_NV: np.ndarray, reference_NV: np.ndarray) -> float:
    """Mean Kullback-Leibler divergence KL(reference || candidate) of the next-token distributions, in nats."""
    candidate, reference = _log_softmax(candidate_NV), _log_softmax(reference_NV)
    return float(np.mean(np.sum(np.exp(reference) * (reference - candidate), axis=-1)))


def negative_log_likelihood(logits_BSV: np.ndarray, ids_BS: np.ndarray) -> tuple[float, int]:
    """Sum over the tokens of a text that have one before them of -log p(token | what is before it), in nats, and how
    many there are. Perplexity is exp(sum / count).
    """
    target_BS1 = ids_BS[:, 1:, None]
    log_p = np.take_along_axis(_log_softmax(logits_BSV[:, :-1]), target_BS1, axis=-1)
    return float(-log_p.sum()), target_BS1.size


def routing_of_layer(
    layer: int,
    candidate_BK: np.ndarray,
    score_BS: np.ndarray,
    lengths_B: np.ndarray,
    exact_BS: np.ndarray | None = None,
    noisy_BS: np.ndarray | None = None,
) -> LayerRouting:
    """Compares a candidate's selection with the definition applied to the reference's scores.

    The definition: the k largest scores of the row's real tokens, ties to the earlier token.

    Args:
        layer: for the result.
        candidate_BK: int64, what the candidate routed.
        score_BS: float32, the reference's scores, computed with the candidate's routing in all layers.
        lengths_B: int64, real tokens of each row.
        exact_BS: float64, the same scores of the same model in float64.
        noisy_BS: float32, what is held against the exact scores to see how they are rounded; `score_BS` by default.
    """
    k = candidate_BK.shape[1]
    noisy_BS = score_BS if noisy_BS is None else noisy_BS
    malformed = _malformed(candidate_BK, score_BS.shape[1], lengths_B)
    routed = agreed = 0
    distances: list[float] = []
    margins: list[float] = []
    noises: list[float] = []
    scales: list[float] = []
    for b, (row_K, length) in enumerate(zip(candidate_BK, lengths_B, strict=True)):
        score_L = score_BS[b, :length].astype(np.float64)
        order = np.argsort(-score_L, kind="stable")
        kept = min(k, int(length))
        wanted, got = set(order[:kept].tolist()), set(row_K[row_K < length].tolist())
        scales.append(_rms(score_L))
        threshold = score_L[order[kept - 1]]
        routed += kept
        agreed += len(wanted & got)
        distances += _distances(score_L, wanted ^ got, threshold)
        if kept < length:
            margins.append(float(threshold - score_L[order[kept]]))
        if exact_BS is not None:
            noises.append(float(np.abs(noisy_BS[b, :length].astype(np.float64) - exact_BS[b, :length]).max()))
    return LayerRouting(
        layer=layer,
        k=k,
        routed=routed,
        agreed=agreed,
        distances=tuple(distances),
        min_margin=smallest(margins),
        scale=float(np.max(scales)),
        noise=None if exact_BS is None else float(np.max(noises)),
        malformed=malformed,
    )


def smallest(values: Sequence[float]) -> float | None:
    """The smallest value, None of none. NaN as soon as one is NaN, which min() alone would let slip."""
    return float(np.min(values)) if values else None


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        shifted -= shifted.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted


def _distances(score_L: np.ndarray, flipped: set[int], threshold: float) -> list[float]:
    # A position that no real token has cannot be a near-tie of anything.
    return [float(abs(score_L[i] - threshold)) if 0 <= i < len(score_L) else float("inf") for i in sorted(flipped)]


def _malformed(index_BK: np.ndarray, seq: int, lengths_B: Sequence[int] | np.ndarray) -> str:
    if index_BK.size and (index_BK.min() < 0 or index_BK.max() >= seq):
        return f"positions from {index_BK.min()} to {index_BK.max()} in a row of {seq}"
    if np.any(np.diff(index_BK, axis=1) <= 0):
        return "positions are not ascending, or not unique"
    k = index_BK.shape[1]
    for row, (index_K, length) in enumerate(zip(index_BK, lengths_B, strict=True)):
        real = int(np.sum(index_K < length))
        if real < min(k, int(length)):
            return f"row {row} gives {k - real} of {k} places to padding while real tokens are left"
    return ""

"""Differences as numbers. Nothing here knows a threshold; NaN stays NaN, so that a judge sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["ErrorNumbers", "LayerRouting", "error_between", "next_token_agreement", "routing_of_layer", "smallest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorNumbers:
    """max_abs and mean_abs in the units of the logits; max_rel is max_abs over the reference's root mean square."""

    max_abs: float
    mean_abs: float
    max_rel: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRouting:
    """How a candidate routed one layer, against the reference that was given the same routing in earlier layers.

    Attributes:
        layer: which.
        k: slots of a row.
        routed: real tokens that the reference routes, over all rows.
        agreed: of those, how many the candidate routes too.
        distances: for each token that only one side routes, |score - k-th score| / rms(scores of the row).
        min_margin: smallest (k-th score - next score) / rms over the rows that have a next one; None if none has.
        malformed: why the candidate's positions are no selection at all (not ascending, out of range); empty if sound.
    """

    layer: int
    k: int
    routed: int
    agreed: int
    distances: tuple[float, ...]
    min_margin: float | None
    malformed: str = ""


def error_between(candidate_NV: np.ndarray, reference_NV: np.ndarray) -> ErrorNumbers:
    """Elementwise error of the logits of N real tokens, in float64."""
    reference = reference_NV.astype(np.float64)
    with np.errstate(invalid="ignore"):  # Infinity minus infinity is NaN, which the judge sees.
        difference = np.abs(candidate_NV.astype(np.float64) - reference)
    largest = float(difference.max())
    rms = float(np.sqrt(np.mean(reference**2)))
    return ErrorNumbers(max_abs=largest, mean_abs=float(difference.mean()), max_rel=largest / rms if rms else largest)


def next_token_agreement(candidate_NV: np.ndarray, reference_NV: np.ndarray) -> float:
    """Share of tokens whose most probable next token is the same; 0 where the candidate is not finite."""
    same_N = candidate_NV.argmax(-1) == reference_NV.argmax(-1)
    return float(np.mean(same_N & np.isfinite(candidate_NV).all(-1)))


def routing_of_layer(layer: int, candidate_BK: np.ndarray, score_BS: np.ndarray, lengths_B: np.ndarray) -> LayerRouting:
    """Compares a candidate's selection with the definition applied to the reference's scores.

    The definition: the k largest scores of the row's real tokens, ties to the earlier token.

    Args:
        layer: for the result.
        candidate_BK: int64, what the candidate routed.
        score_BS: float32, the reference's scores, computed with the candidate's routing in all layers.
        lengths_B: int64, real tokens of each row.
    """
    k = candidate_BK.shape[1]
    malformed = _malformed(candidate_BK, score_BS.shape[1], lengths_B)
    routed = agreed = 0
    distances: list[float] = []
    margins: list[float] = []
    for row_K, score_S, length in zip(candidate_BK, score_BS, lengths_B, strict=True):
        score_L = score_S[:length].astype(np.float64)
        order = np.argsort(-score_L, kind="stable")
        kept = min(k, int(length))
        wanted, got = set(order[:kept].tolist()), set(row_K[row_K < length].tolist())
        rms = float(np.sqrt(np.mean(score_L**2))) or 1.0
        threshold = score_L[order[kept - 1]]
        routed += kept
        agreed += len(wanted & got)
        distances += _distances(score_L, wanted ^ got, threshold, rms)
        if kept < length:
            margins.append(float(threshold - score_L[order[kept]]) / rms)
    return LayerRouting(
        layer=layer,
        k=k,
        routed=routed,
        agreed=agreed,
        distances=tuple(distances),
        min_margin=smallest(margins),
        malformed=malformed,
    )


def smallest(values: Sequence[float]) -> float | None:
    """The smallest value, None of none. NaN as soon as one is NaN, which min() alone would let slip."""
    return float(np.min(values)) if values else None


def _distances(score_L: np.ndarray, flipped: set[int], threshold: float, rms: float) -> list[float]:
    # A position that no real token has cannot be a near-tie of anything.
    return [
        float(abs(score_L[i] - threshold)) / rms if 0 <= i < len(score_L) else float("inf") for i in sorted(flipped)
    ]


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

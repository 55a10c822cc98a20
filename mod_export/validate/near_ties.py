"""Rows on which a router that is a little less precise than it should be selects other tokens.

Among a few dozen random rows, those are kept in which the scores at rank k and k + 1 are closest in some layer: close
enough for the rounding of a shorter float to swap them, and too far apart for that of float32.
"""

from __future__ import annotations

import numpy as np

from mod_export.types import Bucket, Site
from mod_export.validate.compare import FIRST_COME, Judged
from mod_export.validate.inputs import Batch, affordable_tokens
from mod_export.validate.reference import Reference

__all__ = ["near_tie_batches"]

MOST_TOKENS = 2**14
MOST_ROWS = 256
MOST_BATCHES = 4
FAR = 2.0**-17
"""A hundred times the unit roundoff of float32: margins below it can be swapped by rounding alone."""


def near_tie_batches(reference: Reference, bucket: Bucket, seed: int) -> list[Batch]:
    """Batches of the rows with the smallest margins of each layer; none for a model that routes nothing here.

    Costs one run of the reference for up to MOST_TOKENS tokens, fewer of a large model.
    """
    if not any(reference.loaded.k_by_layer(bucket.seq).values()):
        return []
    rng = np.random.default_rng(seed)
    # These runs are not needed again: kept with the others, their logits would take all the memory for kept runs.
    passing = reference.with_weights({})
    tokens = min(MOST_TOKENS, affordable_tokens(reference.loaded))
    # In batches of the bucket's own shape, because another shape would have to be captured first.
    count = max(2, min(MOST_ROWS, tokens // bucket.seq) // bucket.batch) * bucket.batch
    rows_NS = rng.integers(0, reference.loaded.vocab_size, (count, bucket.seq), dtype=np.int64)
    margins: dict[Site, list[float]] = {}
    for start in range(0, count, bucket.batch):
        ids_BS = rows_NS[start : start + bucket.batch]
        traced = passing.free(Batch("near_ties", ids_BS, np.full(len(ids_BS), bucket.seq, dtype=np.int64)))
        for layer, index_BK in traced.routed.items():
            margins.setdefault(layer, []).extend(_margins(traced.judged[layer], index_BK.shape[1]))
    best: dict[int, None] = {}
    for rank in range(count):
        for found in margins.values():
            best.setdefault(int(np.argsort(found)[rank]), None)
    # Several rows for each layer, because a swap is likely and not certain even where it can happen.
    batches = min(MOST_BATCHES, count // bucket.batch // 2)
    chosen_NS = rows_NS[list(best)]
    full_B = np.full(bucket.batch, bucket.seq, dtype=np.int64)
    return [Batch("near_ties", chosen_NS[i * bucket.batch : (i + 1) * bucket.batch], full_B) for i in range(batches)]


def _margins(judged: Judged, k: int) -> list[float]:
    """(k-th score - next score) / |k-th score| of each row; infinite where a coarser float would not swap the two.

    Where tokens above 0 are taken, the smallest |score| of a row, as a share of their root mean square.

    Rounding keeps the order of scores or makes them equal, and equal scores go to the earlier token. So only a token
    that is left out and stands before the k-th one tells a coarse router from an exact one.
    """
    if judged.rule == FIRST_COME:
        rows = zip(judged.score_BS, judged.open_BS, strict=True)
        return [_nearest_to_zero(score_S[open_S]) for score_S, open_S in rows]
    rows = zip(judged.score_BS, judged.open_BS, strict=True)
    return [_gap(score_S[open_S].astype(np.float64), k) for score_S, open_S in rows]


def _gap(score_L: np.ndarray, k: int) -> float:
    if k >= len(score_L):
        return np.inf
    order_L = np.argsort(-score_L, kind="stable")
    last, following = float(score_L[order_L[k - 1]]), float(score_L[order_L[k]])
    rms = float(np.sqrt(np.mean(score_L**2)))
    if not (last - following > FAR * rms and order_L[k] < order_L[k - 1]):
        return np.inf
    # The distance between neighbouring floats grows with their size.
    return (last - following) / max(abs(last), FAR * rms)


def _nearest_to_zero(score_L: np.ndarray) -> float:
    """Of the scores that rounding alone does not bring to the other side."""
    score_L = np.abs(score_L.astype(np.float64))
    rms = float(np.sqrt(np.mean(score_L**2))) if len(score_L) else 0.0
    far_L = score_L[score_L > FAR * rms]
    return float(far_L.min()) / rms if len(far_L) else np.inf

"""Rows in which the last selected and the first skipped token have the closest scores; and all inputs of a bucket.

Such rows can only be found with a reference, which shows the scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mod_export.config import BuildConfig
from mod_export.judge.compare import FIRST_COME, Judged
from mod_export.judge.inputs import Batch, TextOf, affordable_tokens, parity_batches
from mod_export.judge.reference import Reference
from mod_export.types import Bucket, Site

SEARCHED_TOKENS = 2**14
SEARCHED_ROWS = 256
NEAR_TIE_BATCHES = 4
FAR = 2.0**-17
"""About a hundred times the unit roundoff of float32: below this margin, rounding alone can swap two scores."""


def batches_of(reference: Reference, bucket: Bucket, config: BuildConfig, text_of: TextOf | None = None) -> list[Batch]:
    """Returns all inputs of a bucket, of every kind. `text_of` is a source of text for a model that has none."""
    per_kind, texts = config.parity.batches_per_kind, config.parity.text_batches
    ks = reference.k_by_layer(bucket).values()
    batches = parity_batches(reference.model, bucket, ks, config.seed, per_kind, texts, text_of)
    return batches + reference.remembered(
        f"near-ties of {bucket.name}, seed {config.seed}", lambda: near_tie_batches(reference, bucket, config.seed)
    )


def near_tie_batches(reference: Reference, bucket: Bucket, seed: int) -> list[Batch]:
    """Returns the random rows with the smallest margins at each routing site; empty if nothing is routed.

    Runs the reference on up to SEARCHED_TOKENS tokens, fewer for a large model.
    """
    # This reference keeps no runs: they are not needed again.
    passing = reference.with_weights({})
    tokens = min(SEARCHED_TOKENS, affordable_tokens(reference.model))
    # In batches of the bucket's own shape, because another shape would have to be captured first.
    count = max(2, min(SEARCHED_ROWS, tokens // bucket.seq) // bucket.batch)
    samples = [reference.model.sample(bucket, seed * SEARCHED_ROWS + i) for i in range(count)]
    margins: dict[Site, list[float]] = {}
    for feeds in samples:
        traced = passing.free(Batch("near_ties", bucket, feeds))
        if not traced.routed:
            return []
        for site, index_BK in traced.routed.items():
            margins.setdefault(site, []).extend(_margins(traced.judged[site], index_BK.shape[1]))
    of_rows = all(len(values) == count * bucket.batch for values in margins.values())
    if not of_rows:  # The model joins the rows of a batch or splits each of them, so only whole samples can be ranked.
        margins = {site: np.reshape(values, (count, -1)).min(1).tolist() for site, values in margins.items()}
    # The best row of every site, then the second best, and so on: several, because a swap is likely but not certain.
    ranked = list(dict.fromkeys(np.argsort(list(margins.values()), axis=1).T.ravel().tolist()))
    if of_rows:
        chosen = [_batch_of_rows(samples, ranked[i : i + bucket.batch]) for i in range(0, len(ranked), bucket.batch)]
    else:
        chosen = [samples[i] for i in ranked]
    return [Batch("near_ties", bucket, feeds) for feeds in chosen[: min(NEAR_TIE_BATCHES, count // 2)]]


def _batch_of_rows(samples: Sequence[Mapping[str, np.ndarray]], rows: Sequence[int]) -> Mapping[str, np.ndarray]:
    """Joins rows of several samples into one batch; `rows` numbers the rows of all samples consecutively. An input that
    all rows of a batch share is taken from the sample of the first row.
    """
    batch = len(rows)
    return {
        name: np.stack([samples[row // batch][name][row % batch] for row in rows])
        if array.shape[:1] == (batch,)
        else array
        for name, array in samples[rows[0] // batch].items()
    }


def _margins(judged: Judged, k: int) -> list[float]:
    """Returns (k-th score - next score) / |k-th score| of each row, infinite if a coarser float would not swap the two.

    If the first k tokens above 0 are selected: the smallest |score| of the row, as a share of its root mean square.

    Rounding keeps the order of scores or makes them equal, and the earlier of two equal scores wins. So only a skipped
    token that stands before the k-th one distinguishes a coarse router from an exact one.
    """
    rows = zip(judged.score_BS.astype(np.float64), judged.open_BS, strict=True)
    if judged.rule == FIRST_COME:
        return [_nearest_to_zero(score_S[open_S]) for score_S, open_S in rows]
    return [_gap(score_S[open_S], k) for score_S, open_S in rows]


def _gap(score_L: np.ndarray, k: int) -> float:
    if k >= len(score_L):
        return np.inf
    order_L = np.argsort(-score_L, kind="stable")
    last, following = float(score_L[order_L[k - 1]]), float(score_L[order_L[k]])
    rms = _rms(score_L)
    if not (last - following > FAR * rms and order_L[k] < order_L[k - 1]):
        return np.inf
    if np.isinf(last):
        return np.inf
    # The distance between neighbouring floats grows with their size.
    return (last - following) / max(abs(last), FAR * rms)


def _nearest_to_zero(score_L: np.ndarray) -> float:
    """Returns the smallest |score| / root mean square of the scores that rounding alone does not move across 0."""
    rms = _rms(score_L)
    far_L = np.abs(score_L)[np.abs(score_L) > FAR * rms]
    return float(far_L.min()) / rms if len(far_L) else np.inf


def _rms(score_L: np.ndarray) -> float:
    """Root mean square of finite scores: a token that is always or never selected may have an infinite score."""
    finite_L = score_L[~np.isinf(score_L)]
    return float(np.sqrt(np.mean(finite_L**2))) if len(finite_L) else 0.0

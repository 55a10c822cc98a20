"""Differences between a candidate and the reference as numbers, without thresholds. NaN stays NaN, so that it fails.

A logit of minus infinity marks a token that a model excludes. If both sides exclude it, they do not differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mod_export.rows.correctness import ErrorNumbers
from mod_export.runtime.logits import log_softmax
from mod_export.types import FOUND, DType, Site

FIRST_COME = "first_come"
EMPTY = -1
"""Marks a slot that no token fills."""
BLOCK = 2**16
"""Number of logits that are compared at a time."""
ROUNDOFF: dict[DType, float] = {
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "int8": 2.0**-7,
    "int4": 2.0**-4,
}
"""Unit roundoff; for int8 and int4, half a quantization step as a share of the largest weight."""


def error_between(candidate_NV: np.ndarray, reference_NV: np.ndarray) -> ErrorNumbers:
    """Returns the elementwise error of N rows, such as logits of real tokens, in float64; 0 if there are no values."""
    largest, total, squares, scale, count = 0.0, 0.0, 0.0, 0.0, reference_NV.size
    for rows in _blocks(reference_NV):
        reference = reference_NV[rows].astype(np.float64)
        excluded = _excluded(candidate_NV[rows], reference)
        with np.errstate(invalid="ignore"):  # Infinity minus infinity is NaN, which fails the checks.
            difference = np.where(excluded, 0.0, np.abs(candidate_NV[rows] - reference))
        reference = np.where(excluded, 0.0, reference)
        largest = float(np.maximum(largest, difference.max()))
        total += float(difference.sum())
        squares += float(np.vdot(difference, difference))
        scale += float(np.vdot(reference, reference))
    scale, count = float(np.sqrt(scale / max(1, count))), max(1, count)
    return ErrorNumbers(
        max_abs=largest,
        mean_abs=total / count,
        max_rel=largest / scale if scale else largest,
        rms=float(np.sqrt(squares / count)),
    )


def rows_of(values: np.ndarray) -> np.ndarray:
    """Returns an output of any rank as rows (N, V) of its last dimension; each row is judged or left out as a whole.
    Integers, booleans and outputs of at most one dimension become N rows of one value. Booleans and unsigned integers
    become int64, so that they can be subtracted.
    """
    width = values.shape[-1] if values.ndim > 1 and values.dtype.kind == "f" else 1
    # Not reshape(-1, width): a dimension cannot be inferred if another one has no entries.
    rows = values.reshape(values.size // max(1, width), width)
    return rows.astype(np.int64) if rows.dtype.kind in "bu" else rows


def rounded_once(exact_NV: np.ndarray, roundoff: float) -> tuple[float, float]:
    """Returns bounds of the largest and the root mean square error if each exact value is rounded once."""
    largest, squares = 0.0, 0.0
    for rows in _blocks(exact_NV):
        exact = np.where(np.isneginf(exact_NV[rows]), 0.0, exact_NV[rows])
        largest = float(np.maximum(largest, np.abs(exact).max()))
        squares += float(np.vdot(exact, exact))
    return roundoff * largest, roundoff * float(np.sqrt(squares / max(1, exact_NV.size)))


def farthest_from(exact: np.ndarray, runs: Sequence[np.ndarray]) -> np.ndarray:
    """Returns for each element the value of the run farthest from the exact value; NaN if it is NaN in any run."""
    farthest = runs[0]
    for run in runs[1:]:
        with np.errstate(invalid="ignore"):
            nearer = np.abs(run - exact) <= np.abs(farthest - exact)
        farthest = np.where(nearer | np.isnan(farthest), farthest, run)
    return farthest


def next_token_shortfalls(candidate_NV: np.ndarray, reference_NV: np.ndarray) -> np.ndarray:
    """Returns float64 (N,), how much the reference prefers its own most probable next token to the candidate's.

    In units of the logits: 0 if both agree, infinity if the candidate is not finite.
    """
    chosen_N1 = candidate_NV.argmax(-1, keepdims=True)
    usable_N = (np.isfinite(candidate_NV) | _excluded(candidate_NV, reference_NV)).all(-1)
    short_N = reference_NV.max(-1) - np.take_along_axis(reference_NV, chosen_N1, -1)[:, 0]
    return np.where(usable_N, short_N.astype(np.float64), np.inf)


def divergences(candidate_NV: np.ndarray, reference_NV: np.ndarray) -> np.ndarray:
    """Returns float64 (N,): divergence KL(reference || candidate) of the next-token distributions, in nats."""
    nats_N = np.empty(len(reference_NV))
    for rows in _blocks(reference_NV):
        candidate, reference = log_softmax(candidate_NV[rows]), log_softmax(reference_NV[rows])
        with np.errstate(invalid="ignore"):
            terms = np.exp(reference) * (reference - candidate)
        nats_N[rows] = np.sum(np.where(_excluded(candidate, reference), 0.0, terms), axis=1)
    return nats_N


def _excluded(candidate: np.ndarray, reference: np.ndarray) -> np.ndarray:
    return np.isneginf(candidate) & np.isneginf(reference)


def smallest(values: Sequence[float]) -> float | None:
    """Returns the smallest value, None if there is none, and NaN if any value is NaN, which `min` could miss."""
    return float(np.min(values)) if values else None


def _blocks(values_NV: np.ndarray) -> Iterator[slice]:
    """Returns slices of rows that fit a processor's cache, because float64 copies of all logits at once would be slow;
    no slice if there are no values.
    """
    step = max(1, BLOCK // max(1, values_NV.shape[1]))
    return (slice(start, start + step) for start in range(0, len(values_NV) if values_NV.size else 0, step))


@dataclass(frozen=True, slots=True)
class Slack:
    """How far a sound engine may be off.

    Attributes:
        units: allowed error as a multiple of the rounding error of the reference.
        near_tie: upper limit for values that a choice reads, as a share of their root mean square.
        max_abs: limit for an output whose rounding error is not known.
        narrow: whether the engine computes in fewer bits than float32.
    """

    units: float
    near_tie: float
    max_abs: float
    narrow: bool


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """The inputs of a selection: its rule (see `mark_selection`), scores (B, S), and the tokens that can be selected,
    bool (B, S).
    """

    rule: str
    score_BS: np.ndarray
    open_BS: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRouting:
    """A candidate's selection at one routing site against the reference, given the same selections at earlier sites.

    Attributes:
        site: the routing site.
        k: slots of a row.
        routed: real tokens that the reference selects, over all rows.
        agreed: how many of those the candidate selects too.
        distances: for each token that only one side selects, the distance of its score from the edge of the selection,
            in units of the scores. The edge is the k-th score, or 0 if the first k tokens above 0 are selected. In that
            case, a token that finds no free slot because others came first is no difference.
        inversions: for each pair of neighbouring slots whose tokens are in the wrong order of score, the difference of
            their scores.
        min_margin: smallest (k-th score - next score) over the rows that have a next one, or smallest |score| if the
            edge is 0; None if there is none.
        scale: largest root mean square of a row's scores. In a row of one repeated token, scores can be near zero while
            rounding is as large as in any other row, so no score is measured against its own row.
        rounding: rounding error, the largest |score - score in float64| of any real token and run; None without a
            float64 run.
        malformed: why the candidate's positions are not a valid selection (not ascending, out of range), else empty.
        overflow: tokens above 0 that find no slot in the reference, over all rows.
    """

    site: Site
    k: int
    routed: int
    agreed: int
    distances: tuple[float, ...]
    min_margin: float | None
    scale: float = 0.0
    rounding: float | None = None
    malformed: str = ""
    overflow: int = 0
    inversions: tuple[float, ...] = ()

    @property
    def differences(self) -> tuple[float, ...]:
        """Distances and inversions: each compares two scores, so one bound says which of them rounding can explain."""
        return self.distances + self.inversions


def selected(rule: str, score_L: np.ndarray, k: int) -> np.ndarray:
    """Defines both rules: returns the ascending indices of the selected tokens among the L that can be selected."""
    if rule == FIRST_COME:
        return np.flatnonzero(score_L > 0)[:k]
    return np.sort(np.argsort(-score_L, kind="stable")[:k])


def wrong_slots(index_BK: np.ndarray, judged: Judged) -> int:
    """Counts the slots that do not hold the token that the rule selects."""
    wrong = 0
    for row_K, score_S, open_S in zip(index_BK, judged.score_BS, judged.open_BS, strict=True):
        open_L = np.flatnonzero(open_S)
        wanted_W = open_L[selected(judged.rule, score_S[open_L], len(row_K))]
        wrong += int(np.sum(row_K[: len(wanted_W)] != wanted_W))
        wrong += int(np.isin(row_K[len(wanted_W) :], open_L).sum())
    return wrong


def routing_of_site(
    site: Site,
    candidate_BK: np.ndarray,
    judged: Judged,
    exact_BS: np.ndarray | None = None,
    rounded_BS: np.ndarray | None = None,
    judged_B: np.ndarray | None = None,
    direction: int = 0,
) -> SiteRouting:
    """Compares a candidate's selection with the rule, applied to the reference's scores.

    Args:
        site: the site, for the result.
        candidate_BK: int64, the candidate's selection; surplus slots are EMPTY or, unless the rule is `first_come`,
            hold positions that cannot be selected.
        judged: the reference's scores, float32, computed with the candidate's routing at all sites.
        exact_BS: float64, the same scores of the same model in float64.
        rounded_BS: float32, the scores whose rounding error is measured; those of `judged` by default.
        judged_B: bool, the rows whose scores the reference determines; all by default. In other rows, only the form of
            the selection is checked.
        direction: the order of the slots by score (see `direction_of`). The tokens run in this order, and the reference
            runs them in the candidate's, so an order that is wrong shows nowhere else.
    """
    rule, (B, S), k = judged.rule, judged.open_BS.shape, candidate_BK.shape[1]
    rounded_BS = judged.score_BS if rounded_BS is None else rounded_BS
    routed = agreed = overflow = 0
    distances: list[float] = []
    inversions: list[float] = []
    margins: list[float] = []
    roundings: list[float] = [0.0]
    scales: list[float] = [0.0]
    problems: list[str] = []
    for b in range(B):
        open_L = np.flatnonzero(judged.open_BS[b])
        score_L = judged.score_BS[b, open_L].astype(np.float64)
        row_K = candidate_BK[b]
        got_G = row_K[np.isin(row_K, open_L)]
        # A position outside the row can never be a near-tie.
        distances += [float("inf")] * int(np.sum((row_K < EMPTY) | (row_K >= S)))
        problems += _malformed(rule, row_K, got_G, open_L, S, b)
        if not len(open_L) or (judged_B is not None and not judged_B[b]):
            continue
        wanted_W = open_L[selected(rule, score_L, k)]
        routed += len(wanted_W)
        agreed += int(np.isin(wanted_W, got_G).sum())
        edge, row_margins = _edge(rule, score_L, k)
        distances += _differences(score_L[_flipped(rule, score_L, open_L, wanted_W, got_G, k)], edge).tolist()
        inversions += _inversions(_scores_of_slots(row_K, judged, b), direction)
        margins += row_margins
        scales.append(rms_of_finite(score_L))
        if rule == FIRST_COME:
            overflow += max(0, int((score_L > 0).sum()) - k)
        if exact_BS is not None:
            roundings.append(float(_differences(rounded_BS[b, open_L].astype(np.float64), exact_BS[b, open_L]).max()))
    return SiteRouting(
        site=site,
        k=k,
        routed=routed,
        agreed=agreed,
        distances=tuple(distances),
        min_margin=smallest(margins),
        scale=float(np.max(scales)),
        rounding=None if exact_BS is None else float(np.max(roundings)),
        malformed=problems[0] if problems else "",
        overflow=overflow,
        inversions=tuple(inversions),
    )


def direction_of(index_BK: np.ndarray, judged: Judged) -> int:
    """Returns 1 if the scores of every row descend from slot to slot, -1 if they ascend, and 0 if they do neither or
    are all equal.
    """
    rows = [_scores_of_slots(row_K, judged, b) for b, row_K in enumerate(index_BK)]
    descend, ascend = (not any(_inversions(score_K, direction) for score_K in rows) for direction in (1, -1))
    return int(descend) - int(ascend)


def _scores_of_slots(row_K: np.ndarray, judged: Judged, row: int) -> np.ndarray:
    """Returns float64, the scores of a row in the order of the slots, without positions outside the row. Tokens that
    cannot be selected fill surplus slots, so they rank last.
    """
    slot_G = row_K[(row_K >= 0) & (row_K < judged.open_BS.shape[1])]
    return np.where(judged.open_BS[row, slot_G], judged.score_BS[row, slot_G].astype(np.float64), -np.inf)


def _inversions(score_K: np.ndarray, direction: int) -> list[float]:
    """Returns the differences of the neighbouring scores that do not follow the direction; empty if there is none."""
    if not direction:
        return []
    before, after = direction * score_K[:-1], direction * score_K[1:]
    inversions: list[float] = _differences(before, after)[~(before >= after)].tolist()
    return inversions


def rms_of_finite(score_L: np.ndarray) -> float:
    """Returns the root mean square of finite scores: a token that is always or never selected may have an infinite
    score, which has no scale.
    """
    finite_L = score_L[~np.isinf(score_L)]
    return float(np.sqrt(np.mean(finite_L**2))) if len(finite_L) else 0.0


def _differences(score_L: np.ndarray, compared_L: np.ndarray | float) -> np.ndarray:
    """Returns absolute differences; infinities of the same sign do not differ."""
    with np.errstate(invalid="ignore"):
        return np.where(score_L == compared_L, 0.0, np.abs(score_L - compared_L))


def _edge(rule: str, score_L: np.ndarray, k: int) -> tuple[float, list[float]]:
    """Returns the score at the edge of the selection, which is 0 or the smallest selected score, and a list with the
    row's margin, empty if it has none.
    """
    if rule == FIRST_COME:
        return 0.0, [float(np.abs(score_L).min())]
    ordered_L = -np.sort(-score_L)
    margins = _differences(ordered_L[k - 1 : k], ordered_L[k]).tolist() if k < len(ordered_L) else []
    return float(ordered_L[min(k, len(ordered_L)) - 1]), margins


def _flipped(
    rule: str, score_L: np.ndarray, open_L: np.ndarray, wanted_W: np.ndarray, got_G: np.ndarray, k: int
) -> np.ndarray:
    """Returns the places in `open_L` of the tokens that only one side selects, except those that lost their slot to an
    earlier token.
    """
    is_selected = np.isin(open_L, got_G)
    if rule != FIRST_COME:
        return np.flatnonzero(is_selected != np.isin(open_L, wanted_W))
    # A token above 0 may be missing only if all slots are filled by then.
    full = np.cumsum(is_selected) >= k
    return np.flatnonzero((is_selected & ~(score_L > 0)) | (~is_selected & ~full & (score_L > 0)))


def _malformed(
    rule: str, row_K: np.ndarray, got_G: np.ndarray, open_L: np.ndarray, seq: int, row: int
) -> Iterator[str]:
    """Yields the reasons why a row's positions are not a valid selection."""
    # -1 marks an empty slot. Empty slots come last.
    filled_G = row_K[row_K != EMPTY]
    if filled_G.size and (filled_G.min() < 0 or filled_G.max() >= seq):
        yield f"positions from {filled_G.min()} to {filled_G.max()} in a row of {seq}"
    if rule == FIRST_COME and len(got_G) < len(filled_G):
        yield f"row {row} gives {len(filled_G) - len(got_G)} slots to tokens that cannot be chosen"
    in_order_G = np.sort(filled_G) if rule in FOUND else filled_G
    if np.any(np.diff(in_order_G) <= 0) or np.any(row_K[: len(filled_G)] == EMPTY):
        yield f"positions are {'' if rule in FOUND else 'not ascending, or '}not unique"
    k = len(row_K)
    if rule != FIRST_COME and len(got_G) < min(k, len(open_L)):
        yield f"row {row} leaves {k - len(got_G)} of {k} slots empty while tokens are left that could be chosen"

"""From comparisons to reasons: what rounding can explain, and the table of checks.

A fixed tolerance is too wide for a small, well-conditioned model, where a wrong gate hides below it, and too narrow for
a deep one with large logits. So the reference is run in float64 as well, and its own float32 error is the unit: the
error of a float32 candidate is of the same size, whatever the order in which it sums. For 16-bit floats the unit grows
with the unit roundoff (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 2.2: errors are linear in
it to first order).

Each check looks at all comparisons of one candidate and at what is allowed, and gives its reasons to fail, none when it
holds. Every condition is written so that a NaN fails it: `not value <= limit`, never `value > limit`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from mod_export.config import ParityGate
from mod_export.judge.compare import SiteRouting
from mod_export.rows.parity import (
    ErrorNumbers,
)
from mod_export.types import QUANTIZED, DType, Site

REFERENCE = "eager float32"
MADE_OF_TIES = ("ties", "near_ties")
"""Kinds of input on which scores are equal, or nearly so, by design."""
TEXT = "text"
"""The kind of input that is real text."""
ROUNDOFF: dict[DType, float] = {
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "int8": 2.0**-7,
    "int4": 2.0**-4,
}
"""Half the distance between 1 and the next number; of whole numbers half a step, as a share of the largest of them."""
FEWEST_LOGITS = 1000
"""The root mean square of fewer rounding errors varies too much to be a bound."""
MANY_POSITIONS = 1000
"""Of so many how many agree is nearly normal."""
DEVIATIONS = 2.0
"""Standard deviations below what is expected that are taken for chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextNumbers:
    """-log p of the tokens of a text, in nats, summed: the candidate's, the reference's with the candidate's routing,
    and the reference's with its own; and at how many positions the candidate agrees with that one on the next token.
    """

    tokens: int
    nll: float
    reference_nll: float
    own_nll: float
    positions: int
    agreed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Rows of an output that are not judged, and why, as a sentence."""

    rows: int
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What was found about one output on one batch.

    Attributes:
        kind: of the input.
        output: its name.
        sites: of every routing site; only of the first output.
        error: candidate against reference, given the same routing, over the logits of real tokens, or all values.
        tokens: of how many tokens, or rows of an output.
        values: how many.
        rounding: rounding error of the reference: its float32 runs against float64; None where it was not measured.
        shortfalls: float64 (N,), see `compare.next_token_shortfalls`; None of an output that is not logits.
        divergences: float64 (N,), see `compare.divergences`; likewise.
        text: only for real text.
        problems: outputs that should be there or should not.
        left_out: rows that were not compared.
        undetermined: how many of them the reference does not determine.
    """

    kind: str
    output: str
    sites: tuple[SiteRouting, ...]
    error: ErrorNumbers
    tokens: int
    values: int
    rounding: ErrorNumbers | None = None
    shortfalls: np.ndarray | None = field(repr=False)
    divergences: np.ndarray | None = field(repr=False)
    text: TextNumbers | None = None
    problems: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    undetermined: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What one output of an engine may differ by.

    Attributes:
        gate: of the configuration.
        max_abs: largest error of a value.
        rms: root mean square of the errors, None where only a fixed tolerance is known.
        scores: site -> largest distance from the edge of the selection, in the units of the scores, at which a token
            that only one side selects is a near-tie.
        scales: site -> largest root mean square of a row's scores, which the report states distances as shares of.
        rounding: largest rounding error of the reference, None where it was not measured.
        quantized: whether weights are whole numbers: the model is then another one, near to the reference, and is
            judged by what it makes of real text, with the routing that either of them chooses.
        narrow: whether the dtype has fewer bits than float32.
        routed: whether the model has routing sites.
    """

    gate: ParityGate
    max_abs: float
    rms: float | None
    scores: Mapping[Site, float]
    scales: Mapping[Site, float]
    rounding: float | None
    quantized: bool = False
    narrow: bool = False
    routed: bool = False

    @property
    def next_token_slack(self) -> float:
        """Two logits that are nearer than this are equal as far as float32 can tell, whatever the engine's dtype."""
        return 0.0 if self.rounding is None else 2 * self.gate.rounding_error * self.rounding

    def share(self, site: Site, distance: float) -> float:
        """A distance of scores as a share of the site's scale."""
        return distance / (self.scales[site] or 1.0)


def allowance(found: Sequence[Comparison], gate: ParityGate, dtype: DType, *, routed: bool = False) -> Allowance:
    """The largest rounding error of the reference over all inputs: on a single small one it can be small by luck."""
    measured = [one.rounding for one in found if one.rounding is not None]
    coarser = coarser_than_float32(dtype)
    scores, scales = {}, {}
    for site, many in by_site(found).items():
        scales[site] = _largest([one.scale for one in many])
        scores[site] = gate.near_tie * scales[site]
        if measured:
            # No score is known better than to its last digits. Two are compared, each with its own error.
            unit = _largest([*(one.rounding or 0.0 for one in many), 2 * ROUNDOFF["float32"] * scales[site]])
            # np.minimum, unlike min, keeps a NaN.
            scores[site] = float(np.minimum(scores[site], 2 * gate.rounding_error * coarser * unit))
    rounding = _largest([one.max_abs for one in measured]) if measured else None
    enough = measured and sum(one.values for one in found) >= FEWEST_LOGITS
    return Allowance(
        gate=gate,
        max_abs=gate.max_abs if rounding is None else gate.rounding_error * coarser * rounding,
        rms=gate.rounding_error_rms * coarser * _largest([one.rms for one in measured]) if enough else None,
        scores=scores,
        scales=scales,
        rounding=rounding,
        quantized=dtype in QUANTIZED,
        narrow=dtype != "float32",
        routed=routed,
    )


def coarser_than_float32(dtype: DType) -> float:
    """How many times the rounding error of float32 one in another dtype is."""
    return ROUNDOFF[dtype] / ROUNDOFF["float32"]


def check_outputs(found: Sequence[Comparison], allowed: Allowance) -> Sequence[str]:
    """The engine gives what its model has to give, and nothing else."""
    return [f"outputs: {problem}" for one in found for problem in one.problems]


def check_coverage(found: Sequence[Comparison], allowed: Allowance) -> Sequence[str]:
    """Enough was judged: of the rows of all inputs but those that are made of ties, at least the share of the gate."""
    usual = [one for one in found if one.kind not in MADE_OF_TIES] or found
    judged = sum(one.tokens for one in usual)
    total = judged + sum(one.undetermined for one in usual)
    if judged >= allowed.gate.judged_rows * total:
        return []
    why = next(part.because for one in usual if one.undetermined for part in one.left_out)
    return [
        f"{usual[0].output}: could not be evaluated: {why}, and {judged:,} of {total:,} rows of it are left, at least "
        f"{allowed.gate.judged_rows:.0%} must be; give samples on which the model itself decides clearly"
    ]


def check_routing(found: Sequence[Comparison], allowed: Allowance) -> Sequence[str]:
    """Positions are a selection, and every token that is routed differently is a near-tie."""
    reasons = []
    for site, many in by_site(found).items():
        kinds = [comparison.kind for comparison in found for one in comparison.sites if one.site == site]
        malformed = [(kind, one.malformed) for kind, one in zip(kinds, many, strict=True) if one.malformed]
        if malformed:
            kind, why = malformed[0]
            reasons.append(f"{kind}: layer {site} routing: {why}{_and_more(len(malformed) - 1)}")
        bound = allowed.scores[site]
        faulty = [
            (max(faults), len(faults), kind)
            for kind, one in zip(kinds, many, strict=True)
            if (faults := [distance for distance in one.distances if not distance <= bound])
        ]
        if faulty:
            # A NaN is the worst.
            worst, count, kind = max(faulty, key=lambda one: (math.isnan(one[0]), one[0]))
            reasons.append(
                f"{kind}: layer {site} routing: {count} tokens differ by more than a near-tie, the worst is "
                f"{allowed.share(site, worst):.3g} from the edge of the selection, allowed "
                f"{allowed.share(site, bound):.3g} of the layer's root mean square{_and_more(len(faulty) - 1)}"
            )
    return reasons


def check_error(found: Sequence[Comparison], allowed: Allowance) -> Sequence[str]:
    """The largest error of a value, and the root mean square of all, given the same routing."""
    reasons = []
    outputs = dict.fromkeys(one.output for one in found)
    for output, (name, field_name, limit) in itertools.product(
        outputs, (("max abs error", "max_abs", allowed.max_abs), ("root mean square error", "rms", allowed.rms))
    ):
        errors = [(getattr(one.error, field_name), one.kind) for one in found if one.output == output]
        missed = [(error, kind) for error, kind in errors if limit is not None and not error <= limit]
        if missed:
            worst, kind = max(missed, key=lambda one: (math.isnan(one[0]), one[0]))
            reasons.append(
                f"{kind}: {output}: {name} {worst:.3g}{given(allowed)}, allowed {limit:.3g}{_and_more(len(missed) - 1)}"
            )
    return reasons


def _and_more(count: int) -> str:
    return f", and on {count} more input{'' if count == 1 else 's'}" if count else ""


def check_next_token(found: Sequence[Comparison], allowed: Allowance) -> Sequence[str]:
    """The most probable next token, where float32 can tell which one it is: over all inputs, because one is short. Of a
    quantized model, where all of a text was compared, each model with its own routing.
    """
    least = allowed.gate.next_token_agreement
    judged = quality_inputs(found, allowed)
    texts = [one.text for one in judged if one.text is not None] if allowed.quantized else []
    if texts:
        positions, agreed = sum(text.positions for text in texts), sum(text.agreed for text in texts)
        how = "agree on text, each with its own routing"
    else:
        shortfalls = [one.shortfalls for one in judged if one.shortfalls is not None]
        if not shortfalls:
            return []
        same = np.concatenate(shortfalls) <= allowed.next_token_slack
        positions, agreed, how = len(same), int(same.sum()), f"agree{given(allowed)}"
    # In fewer bits some differ, and how many of these positions is chance.
    luck = allowed.narrow and _is_chance(agreed, positions, least)
    if not (luck or agreed / positions >= least):
        return [f"next token: {agreed / positions:.4%} {how}, at least {least:.4%} must"]
    return []


def _is_chance(agreed: int, positions: int, share: float) -> bool:
    """Whether so few may agree where each does with probability `share`: of few positions by the binomial distribution,
    of many by the normal one, which is no different and can be computed.
    """
    if positions >= MANY_POSITIONS:
        return agreed >= positions * share - DEVIATIONS * math.sqrt(positions * share * (1 - share))
    at_most = sum(math.comb(positions, n) * share**n * (1 - share) ** (positions - n) for n in range(agreed + 1))
    return at_most >= NormalDist().cdf(-DEVIATIONS)


def check_divergence(found: Sequence[Comparison], allowed: Allowance) -> Sequence[str]:
    """The distribution of the next token: its mean on every input. Of a quantized model that over all of its text, as
    far as it can be told from chance.
    """
    missed = [
        (float(nats_N.mean()), kind)
        for kind, nats_N in divergences_of(found, allowed)
        # Two standard deviations of the mean: a few tokens make most of it.
        if not nats_N.mean() - (2 * nats_N.std() / math.sqrt(len(nats_N)) if allowed.quantized else 0.0)
        <= allowed.gate.max_kl
    ]
    if not missed:
        return []
    worst, kind = max(missed, key=lambda one: (math.isnan(one[0]), one[0]))
    return [
        f"{kind}: next token: divergence {worst:.3g} nats{given(allowed)}, allowed {allowed.gate.max_kl:g}"
        f"{_and_more(len(missed) - 1)}"
    ]


def divergences_of(found: Sequence[Comparison], allowed: Allowance) -> list[tuple[str, np.ndarray]]:
    """Kinds of input, and the divergences that the gate applies to the mean of."""
    by_input = [(one.kind, one.divergences) for one in quality_inputs(found, allowed) if one.divergences is not None]
    if not allowed.quantized or not by_input:
        return by_input
    return [(by_input[0][0], np.concatenate([nats_N for _, nats_N in by_input]))]


def quality_inputs(found: Sequence[Comparison], allowed: Allowance) -> Sequence[Comparison]:
    """What next tokens are judged on. Weights in whole numbers change every logit, and after random ids, where nothing
    makes one token much more probable than others, the order of many of them: such a model is judged on text, if
    there is any.
    """
    texts = [one for one in found if one.kind == TEXT] if allowed.quantized else []
    return texts or found


def check_perplexity(found: Sequence[Comparison], allowed: Allowance) -> Sequence[str]:
    """What the model makes of real text, over all of it."""
    texts = [one.text for one in found if one.text is not None]
    if not texts:
        return []
    expected = sum(text.own_nll if allowed.quantized else text.reference_nll for text in texts)
    nats = abs(sum(text.nll for text in texts) - expected) / sum(text.tokens for text in texts)
    if not nats <= np.log(allowed.gate.max_perplexity_ratio):
        how = "" if allowed.quantized else given(allowed)
        return [
            f"text: log perplexity is {nats:.3g} nats from the reference's{how}, allowed a factor of "
            f"{allowed.gate.max_perplexity_ratio:g}"
        ]
    return []


CHECKS: tuple[Callable[[Sequence[Comparison], Allowance], Sequence[str]], ...] = (
    check_outputs,
    check_coverage,
    check_routing,
    check_error,
    check_next_token,
    check_divergence,
    check_perplexity,
)
WHATEVER_ROUNDING_IS = (check_outputs, check_coverage, check_divergence, check_perplexity)
"""Those of them whose limits do not depend on how well the reference is known."""


def given(allowed: Allowance) -> str:
    """What makes errors comparable, where there is routing."""
    return " given the same routing" if allowed.routed else ""


def by_site(found: Sequence[Comparison]) -> dict[Site, list[SiteRouting]]:
    """What was found about each routing site, over all inputs."""
    grouped: dict[Site, list[SiteRouting]] = {}
    for one in (one for comparison in found for one in comparison.sites):
        grouped.setdefault(one.site, []).append(one)
    return grouped


def _largest(values: Sequence[float]) -> float:
    """NaN as soon as one of them is not finite: a reference that overflows would otherwise allow everything."""
    return float(np.max(values)) if np.isfinite(values).all() else math.nan

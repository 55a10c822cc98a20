"""Turns comparisons into reasons to fail: how much rounding can explain, and the table of checks.

A fixed tolerance is too wide for a small, well-conditioned model, where it hides a wrong gate, and too narrow for a
deep one with large logits. So the reference is also run in float64, and its float32 error is the unit: a float32
candidate has an error of the same size, whatever the order in which it sums. For 16-bit floats, the unit is scaled to
their unit roundoff (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 2.2: errors are linear in it
to first order).

Each check reads all comparisons of one candidate and its allowance, and returns its reasons to fail, none if it passes.
Every condition is written so that a NaN fails it: `not value <= limit`, never `value > limit`.
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
from mod_export.rows.correctness import ErrorNumbers
from mod_export.types import QUANTIZED, DType, Site

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
"""Unit roundoff; for int8 and int4, half a quantization step as a share of the largest weight."""
FEWEST_LOGITS = 1000
"""With fewer logits, the root mean square of their rounding errors varies too much to be a bound."""
MANY_POSITIONS = 1000
"""From this many positions on, the count that agrees is close to normally distributed."""
DEVIATIONS = 2.0
"""A shortfall of up to this many standard deviations counts as chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextNumbers:
    """Sums of -log p over a text's tokens, in nats: of the candidate (`nll`), of the reference with the candidate's
    routing (`reference_nll`) and of the reference with its own routing (`own_nll`). `agreed` counts the positions at
    which the candidate and the reference with its own routing have the same most probable next token.
    """

    tokens: int
    nll: float
    reference_nll: float
    own_nll: float
    positions: int
    agreed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """The number of rows of an output that are not judged, and the reason as a sentence."""

    rows: int
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The comparison of one output on one batch.

    Attributes:
        kind: kind of the input.
        output: name of the output.
        sites: results of all routing sites; only for the first output.
        error: candidate against reference, given the same routing, over the logits of real tokens, or all values.
        tokens: number of tokens, or of rows of the output, that were compared.
        values: number of values that were compared.
        rounding: rounding error of the reference: its float32 runs against float64; None if it was not measured.
        shortfalls: float64 (N,), see `compare.next_token_shortfalls`; None if the output is not logits.
        divergences: float64 (N,), see `compare.divergences`; None if the output is not logits.
        text: only for real text.
        problems: messages about missing, malformed or unexpected outputs.
        left_out: rows that were not compared.
        undetermined: how many of these rows the reference does not determine.
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
    """How far one output of an engine may differ from the reference.

    Attributes:
        gate: the gate of the configuration.
        max_abs: largest error of a value.
        rms: root mean square of the errors; None if no rounding error was measured, or for fewer than FEWEST_LOGITS.
        scores: site -> largest distance from the edge of the selection, in the units of the scores, at which a token
            that only one side selects is a near-tie.
        scales: site -> largest root mean square of a row's scores; the report states distances as shares of it.
        rounding: largest rounding error of the reference; None if it was not measured.
        quantized: whether weights are integers. Such a model differs slightly from the reference, so it is judged on
            real text, each of the two with its own routing.
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
        """Distance up to which float32 cannot tell two logits apart, whatever the engine's dtype."""
        return 0.0 if self.rounding is None else 2 * self.gate.rounding_error * self.rounding

    def share(self, site: Site, distance: float) -> float:
        """Returns a distance of scores as a share of the site's scale."""
        return distance / (self.scales[site] or 1.0)


def allowance(found: Sequence[Comparison], gate: ParityGate, dtype: DType, *, routed: bool = False) -> Allowance:
    """Derives the allowance from the largest rounding error over all inputs: on a small one it can be low by luck."""
    measured = [one.rounding for one in found if one.rounding is not None]
    coarser = coarser_than_float32(dtype)
    scores, scales = {}, {}
    for site, many in by_site(found).items():
        scales[site] = _largest([one.scale for one in many])
        scores[site] = gate.near_tie * scales[site]
        if measured:
            # No score is more exact than its last digits. Two scores are compared, each with its own error.
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
    """Returns the ratio of the rounding error of this dtype to that of float32."""
    return ROUNDOFF[dtype] / ROUNDOFF["float32"]


def check_outputs(found: Sequence[Comparison], allowed: Allowance) -> Sequence[str]:
    """Checks that the engine returns exactly the outputs of its model."""
    return [f"outputs: {problem}" for comparison in found for problem in comparison.problems]


def check_coverage(found: Sequence[Comparison], allowed: Allowance) -> Sequence[str]:
    """Checks that the gate's share of rows was judged, over all inputs that are not made of ties."""
    usual = [comparison for comparison in found if comparison.kind not in MADE_OF_TIES] or found
    judged = sum(comparison.tokens for comparison in usual)
    total = judged + sum(comparison.undetermined for comparison in usual)
    if judged >= allowed.gate.judged_rows * total:
        return []
    why = next(part.because for comparison in usual if comparison.undetermined for part in comparison.left_out)
    return [
        f"{usual[0].output}: could not be evaluated: {why}, and {judged:,} of {total:,} rows of it are left, at least "
        f"{allowed.gate.judged_rows:.0%} must be; give samples on which the model itself decides clearly"
    ]


def check_routing(found: Sequence[Comparison], allowed: Allowance) -> Sequence[str]:
    """Checks that positions are a valid selection, and that every token routed differently is a near-tie."""
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
    """Checks the largest error of a value and the root mean square of all errors, given the same routing."""
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
    """Checks the share of positions with the same most probable next token, as far as float32 can tell. It is over all
    inputs, because one input is short. Whole texts of a quantized model are compared with each model's own routing.
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
    # In fewer bits some tokens differ, and how many are among these positions is partly chance.
    luck = allowed.narrow and _is_chance(agreed, positions, least)
    if not (luck or agreed / positions >= least):
        return [f"next token: {agreed / positions:.4%} {how}, at least {least:.4%} must"]
    return []


def _is_chance(agreed: int, positions: int, share: float) -> bool:
    """Whether so few agreements can be chance if each position agrees with probability `share`. Uses the binomial
    distribution; for many positions the normal one, which hardly differs and can be computed.
    """
    if positions >= MANY_POSITIONS:
        return agreed >= positions * share - DEVIATIONS * math.sqrt(positions * share * (1 - share))
    at_most = sum(math.comb(positions, n) * share**n * (1 - share) ** (positions - n) for n in range(agreed + 1))
    return at_most >= NormalDist().cdf(-DEVIATIONS)


def check_divergence(found: Sequence[Comparison], allowed: Allowance) -> Sequence[str]:
    """Checks the mean divergence of the next-token distribution on every input; for a quantized model the mean over all
    its text, with a margin for chance.
    """
    missed = [
        (float(nats_N.mean()), kind)
        for kind, nats_N in divergences_of(found, allowed)
        # The margin is two standard deviations of the mean: a few tokens make up most of it.
        if not nats_N.mean() - (2 * nats_N.std() / math.sqrt(len(nats_N)) if allowed.quantized else 0.0)
        <= allowed.gate.max_kl
    ]
    if not missed:
        return []
    worst, kind = max(missed, key=lambda miss: (math.isnan(miss[0]), miss[0]))
    return [
        f"{kind}: next token: divergence {worst:.3g} nats{given(allowed)}, allowed {allowed.gate.max_kl:g}"
        f"{_and_more(len(missed) - 1)}"
    ]


def divergences_of(found: Sequence[Comparison], allowed: Allowance) -> list[tuple[str, np.ndarray]]:
    """Returns pairs (kind of input, divergences); the gate applies to the mean of each array."""
    by_input = [(one.kind, one.divergences) for one in quality_inputs(found, allowed) if one.divergences is not None]
    if not allowed.quantized or not by_input:
        return by_input
    return [(by_input[0][0], np.concatenate([nats_N for _, nats_N in by_input]))]


def quality_inputs(found: Sequence[Comparison], allowed: Allowance) -> Sequence[Comparison]:
    """Returns the inputs on which next tokens are judged: text for a quantized model if there is any, else all inputs.
    Integer weights change every logit. After random ids, where no token is much more probable than others, that alone
    changes the order of many tokens.
    """
    texts = [comparison for comparison in found if comparison.kind == TEXT] if allowed.quantized else []
    return texts or found


def check_perplexity(found: Sequence[Comparison], allowed: Allowance) -> Sequence[str]:
    """Checks the perplexity over all real text."""
    texts = [comparison.text for comparison in found if comparison.text is not None]
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
"""Checks whose limits do not depend on the measured rounding error."""


def given(allowed: Allowance) -> str:
    """Returns the words that messages add to errors of a routed model."""
    return " given the same routing" if allowed.routed else ""


def by_site(found: Sequence[Comparison]) -> dict[Site, list[SiteRouting]]:
    """Groups the results of all inputs by routing site."""
    grouped: dict[Site, list[SiteRouting]] = {}
    for routing in (routing for comparison in found for routing in comparison.sites):
        grouped.setdefault(routing.site, []).append(routing)
    return grouped


def _largest(values: Sequence[float]) -> float:
    """Returns the largest value; NaN if any is not finite, or a reference that overflows would allow everything."""
    return float(np.max(values)) if np.isfinite(values).all() else math.nan

"""Turns comparisons into a row of the report: how much rounding can explain, and the table of checks.

A fixed tolerance is too wide for a small, well-conditioned model, where it hides a wrong gate, and too narrow for a
deep one with large logits. So the reference is also run in float64, and its float32 error is the unit: a float32
candidate has an error of the same size, whatever the order in which it sums. For 16-bit floats, the unit is scaled to
their unit roundoff (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 2.2: errors are linear in it
to first order).

Each check reads the comparisons of one output on all inputs, and the allowance of this output. It returns its reasons
to fail, none if it passes. Every condition is written so that a NaN fails it: `not value <= limit`, never
`value > limit`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import TypeVar

import numpy as np

from mod_export.config import ParityGate
from mod_export.errors import EngineError
from mod_export.judge.compare import ROUNDOFF, SiteRouting, smallest
from mod_export.rows.base import setting_fields
from mod_export.rows.correctness import (
    ErrorNumbers,
    Gate,
    InputAgreement,
    LayerAgreement,
    LeftOutRows,
    OutputParity,
    ParityRow,
    RoutingAgreement,
    TextQuality,
)
from mod_export.runtime.logits import perplexity_of
from mod_export.types import QUANTIZED, DType, Setting, Site

MADE_OF_TIES = ("ties", "near_ties")
"""Kinds of input on which scores are equal, or nearly so, by design."""
TEXT = "text"
"""The kind of input that is real text."""
REFERENCE = "eager float32"
"""Name of the reference in reports."""
FEWEST_LOGITS = 1000
"""With fewer logits, the root mean square of their rounding errors varies too much to be a bound."""
MANY_POSITIONS = 1000
"""From this many positions on, the count that agrees is close to normally distributed."""
DEVIATIONS = 2.0
"""A shortfall of up to this many standard deviations counts as chance."""
Missed = TypeVar("Missed", tuple[float, str], tuple[float, int, str])
"""A number that misses its limit, for routing also the count of such numbers, and the kind of input."""


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
        left_out: rows that were not compared; those that the reference does not determine are the last part.
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
        rms: root mean square of the errors; None if no rounding error was measured, or if fewer than FEWEST_LOGITS
            values were compared.
        scores: site -> largest distance from the edge of the selection, in the units of the scores, at which a token
            that only one side selects is a near-tie; also the largest difference of two scores in the wrong order.
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
        """Distance up to which float32 cannot tell two logits of the reference apart: the rounding error of the
        reference, which is not scaled to the engine's dtype, times the gate, which depends on the dtype.
        """
        return 0.0 if self.rounding is None else 2 * self.gate.rounding_error * self.rounding

    def share(self, site: Site, distance: float) -> float:
        """Returns a distance of scores as a share of the site's scale."""
        return distance / (self.scales[site] or 1.0)


def allowance(
    comparisons: Sequence[Comparison], gate: ParityGate, dtype: DType, *, routed: bool = False, times: float = 1.0
) -> Allowance:
    """Derives the allowance from the largest rounding error over all inputs, because the error on one small input can
    be low by chance. With `times` it is the allowance if that error were so many times as large.
    """

    def supposed(error: float) -> float:
        # An error of 0 says nothing about the error on other inputs.
        return error if times == 1.0 else times * error if error else math.inf

    measured = [comparison.rounding for comparison in comparisons if comparison.rounding is not None]
    coarser = coarser_than_float32(dtype)
    scores, scales = {}, {}
    for site, site_results in by_site(comparisons).items():
        scales[site] = _largest([routing.scale for routing in site_results])
        scores[site] = gate.near_tie * scales[site]
        if measured:
            # No score is more exact than its last digits. Two scores are compared, each with its own error.
            unit = supposed(
                _largest(
                    [*(routing.rounding or 0.0 for routing in site_results), 2 * ROUNDOFF["float32"] * scales[site]]
                )
            )
            # np.minimum, unlike min, keeps a NaN.
            scores[site] = float(np.minimum(scores[site], 2 * gate.rounding_error * coarser * unit))
    rounding = supposed(_largest([error.max_abs for error in measured])) if measured else None
    enough = measured and sum(comparison.values for comparison in comparisons) >= FEWEST_LOGITS
    return Allowance(
        gate=gate,
        max_abs=gate.max_abs if rounding is None else gate.rounding_error * coarser * rounding,
        rms=gate.rounding_error_rms * coarser * supposed(_largest([error.rms for error in measured]))
        if enough
        else None,
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


# The checks


def check_outputs(comparisons: Sequence[Comparison], allowed: Allowance) -> Sequence[str]:
    """Checks that the engine returns exactly the outputs of its model."""
    return [f"outputs: {problem}" for comparison in comparisons for problem in comparison.problems]


def check_coverage(comparisons: Sequence[Comparison], allowed: Allowance) -> Sequence[str]:
    """Checks that the gate's share of rows was judged, over all inputs that are not made of ties."""
    usual = [comparison for comparison in comparisons if comparison.kind not in MADE_OF_TIES] or comparisons
    judged = sum(comparison.tokens for comparison in usual)
    total = judged + sum(comparison.undetermined for comparison in usual)
    if judged >= allowed.gate.judged_rows * total:
        return []
    # The rows that rounding decides are the last part; padding, which counts for nothing here, comes before them.
    why = next(comparison.left_out[-1].because for comparison in usual if comparison.undetermined)
    return [
        f"{usual[0].output}: could not be evaluated: {why}, and {judged:,} of {total:,} rows of it are left, at least "
        f"{allowed.gate.judged_rows:.0%} must be; give samples on which the model itself decides clearly"
    ]


def check_routing(comparisons: Sequence[Comparison], allowed: Allowance) -> Sequence[str]:
    """Checks that positions are a valid selection, and that all tokens routed differently, or in another order of
    score, are near-ties.
    """
    reasons = []
    for site, site_results in by_site(comparisons).items():
        kinds = [comparison.kind for comparison in comparisons for routing in comparison.sites if routing.site == site]
        malformed = [
            (kind, routing.malformed) for kind, routing in zip(kinds, site_results, strict=True) if routing.malformed
        ]
        if malformed:
            kind, why = malformed[0]
            reasons.append(f"{kind}: layer {site} routing: {why}{_and_more(len(malformed) - 1)}")
        bound = allowed.scores[site]
        for name, told, measured in (
            ("distances", "tokens differ by more than a near-tie", "{} from the edge of the selection"),
            ("inversions", "neighbouring tokens are in the wrong order of score", "{} apart"),
        ):
            faulty = [
                (max(faults), len(faults), kind)
                for kind, routing in zip(kinds, site_results, strict=True)
                if (faults := [number for number in getattr(routing, name) if not number <= bound])
            ]
            if faulty:
                worst, count, kind = _worst_of(faulty)
                reasons.append(
                    f"{kind}: layer {site} routing: {count} {told}, the worst is "
                    f"{measured.format(f'{allowed.share(site, worst):.3g}')}, allowed "
                    f"{allowed.share(site, bound):.3g} of the layer's root mean square{_and_more(len(faulty) - 1)}"
                )
    return reasons


def check_error(comparisons: Sequence[Comparison], allowed: Allowance) -> Sequence[str]:
    """Checks the largest error of a value and the root mean square of all errors, given the same routing."""
    reasons = []
    limits = (("max abs error", "max_abs", allowed.max_abs), ("root mean square error", "rms", allowed.rms))
    for name, field_name, limit in limits:
        errors = [(getattr(comparison.error, field_name), comparison.kind) for comparison in comparisons]
        missed = [(error, kind) for error, kind in errors if limit is not None and not error <= limit]
        if missed:
            worst, kind = _worst_of(missed)
            reasons.append(
                f"{kind}: {comparisons[0].output}: {name} {worst:.3g}{given(allowed)}, allowed {limit:.3g}"
                f"{_and_more(len(missed) - 1)}"
            )
    return reasons


def _worst_of(missed: Sequence[Missed]) -> Missed:
    """Returns the entry whose number, its first element, is the largest; NaN counts as larger than any number."""
    return max(missed, key=lambda entry: (math.isnan(entry[0]), entry[0]))


def _and_more(count: int) -> str:
    return f", and on {count} more input{'' if count == 1 else 's'}" if count else ""


def check_next_token(comparisons: Sequence[Comparison], allowed: Allowance) -> Sequence[str]:
    """Checks the share of positions with the same most probable next token."""
    least, counted = allowed.gate.next_token_agreement, next_tokens_of(comparisons, allowed)
    if counted is None:
        return []
    agreed, positions = counted
    # With fewer bits some next tokens differ, and it is partly chance how many do at these positions.
    luck = allowed.narrow and _is_chance(agreed, positions, least)
    if not (luck or agreed / positions >= least):
        own = _texts_with_own_routing(comparisons, allowed)
        how = "agree on text, each with its own routing" if own else f"agree{given(allowed)}"
        return [f"next token: {agreed / positions:.4%} {how}, at least {least:.4%} must"]
    return []


def next_tokens_of(comparisons: Sequence[Comparison], allowed: Allowance) -> tuple[int, int] | None:
    """Returns at how many positions the most probable next token is the same, as far as float32 can tell, and the
    number of positions; the gate applies to their ratio. None if the output is not logits.

    All inputs are counted together, because a single input is short. Whole texts of a quantized model are compared with
    each model's own routing.
    """
    texts = _texts_with_own_routing(comparisons, allowed)
    if texts:
        return sum(text.agreed for text in texts), sum(text.positions for text in texts)
    judged = quality_inputs(comparisons, allowed)
    shortfalls = [comparison.shortfalls for comparison in judged if comparison.shortfalls is not None]
    if not shortfalls:
        return None
    agrees = np.concatenate(shortfalls) <= allowed.next_token_slack
    return int(agrees.sum()), len(agrees)


def _texts_with_own_routing(comparisons: Sequence[Comparison], allowed: Allowance) -> list[TextNumbers]:
    return [comparison.text for comparison in comparisons if comparison.text is not None] if allowed.quantized else []


def _is_chance(agreed: int, positions: int, share: float) -> bool:
    """Whether so few agreements can be chance if each position agrees with probability `share`. Uses the binomial
    distribution; for many positions the normal one, which hardly differs and can be computed.
    """
    if positions >= MANY_POSITIONS:
        return agreed >= positions * share - DEVIATIONS * math.sqrt(positions * share * (1 - share))
    at_most = sum(math.comb(positions, n) * share**n * (1 - share) ** (positions - n) for n in range(agreed + 1))
    return at_most >= NormalDist().cdf(-DEVIATIONS)


def check_divergence(comparisons: Sequence[Comparison], allowed: Allowance) -> Sequence[str]:
    """Checks the mean divergence of the next-token distribution on every input; for a quantized model the mean over all
    its text, with a margin for chance.
    """
    missed = [
        (float(nats_N.mean()), kind)
        for kind, nats_N in divergences_of(comparisons, allowed)
        # The margin is two standard deviations of the mean, because a few tokens make up most of the mean.
        if not nats_N.mean() - (2 * nats_N.std() / math.sqrt(len(nats_N)) if allowed.quantized else 0.0)
        <= allowed.gate.max_kl
    ]
    if not missed:
        return []
    worst, kind = _worst_of(missed)
    return [
        f"{kind}: next token: divergence {worst:.3g} nats{given(allowed)}, allowed {allowed.gate.max_kl:g}"
        f"{_and_more(len(missed) - 1)}"
    ]


def divergences_of(comparisons: Sequence[Comparison], allowed: Allowance) -> list[tuple[str, np.ndarray]]:
    """Returns pairs (kind of input, divergences); the gate applies to the mean of each array."""
    by_input = [(c.kind, c.divergences) for c in quality_inputs(comparisons, allowed) if c.divergences is not None]
    if not allowed.quantized or not by_input:
        return by_input
    return [(by_input[0][0], np.concatenate([nats_N for _, nats_N in by_input]))]


def quality_inputs(comparisons: Sequence[Comparison], allowed: Allowance) -> Sequence[Comparison]:
    """Returns the inputs on which next tokens are judged: text for a quantized model if there is any, else all inputs.
    Integer weights change every logit. After random ids, where no token is much more probable than others, that alone
    changes the order of many tokens.
    """
    texts = [comparison for comparison in comparisons if comparison.kind == TEXT] if allowed.quantized else []
    return texts or comparisons


def check_perplexity(comparisons: Sequence[Comparison], allowed: Allowance) -> Sequence[str]:
    """Checks the perplexity over all real text."""
    texts = [comparison.text for comparison in comparisons if comparison.text is not None]
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


def given(allowed: Allowance) -> str:
    """Returns the words that messages add to errors of a routed model."""
    return " given the same routing" if allowed.routed else ""


def by_site(comparisons: Sequence[Comparison]) -> dict[Site, list[SiteRouting]]:
    """Groups the results of all inputs by routing site."""
    grouped: dict[Site, list[SiteRouting]] = {}
    for routing in (routing for comparison in comparisons for routing in comparison.sites):
        grouped.setdefault(routing.site, []).append(routing)
    return grouped


def _largest(values: Sequence[float]) -> float:
    """Returns the largest value; NaN if any value is not finite, because otherwise a reference that overflows would
    allow every error.
    """
    return float(np.max(values)) if np.isfinite(values).all() else math.nan


# The row


def judge(
    comparisons: Sequence[Comparison], gate: ParityGate, setting: Setting, artifact: str | None = None
) -> ParityRow:
    """Applies the gate to every batch; the row passes only if each check could be evaluated and passed."""
    outputs = _by_output(comparisons)
    routed = any(comparison.sites for comparison in comparisons)
    allowances = {name: allowance(compared, gate, setting.dtype, routed=routed) for name, compared in outputs.items()}
    reasons = [reason for name in outputs for check in CHECKS for reason in check(outputs[name], allowances[name])]
    first, *other_names = outputs or [""]
    comparisons, allowed = outputs.get(first, []), allowances.get(first) or allowance([], gate, setting.dtype)
    reasons = reasons if comparisons else ["nothing was compared"]
    next_tokens = next_tokens_of(comparisons, allowed)
    nats = divergences_of(comparisons, allowed)
    kinds = {c.kind for compared in outputs.values() for c in compared if c.tokens or not c.left_out}
    return ParityRow(
        **setting_fields(setting),
        artifact=artifact,
        reference=REFERENCE,
        inputs=tuple(sorted(kinds)),
        tokens=sum(comparison.tokens for comparison in comparisons),
        rounding_tokens=sum(comparison.tokens for comparison in comparisons if comparison.rounding is not None),
        routing=_routing(comparisons, allowed),
        error=_worst_error(comparisons),
        rounding_error=allowed.rounding,
        allowed_max_abs=allowed.max_abs,
        next_token_agreement=next_tokens[0] / next_tokens[1] if next_tokens else None if comparisons else 0.0,
        kl=_worst(float(nats_N.mean()) for _, nats_N in nats) if nats or not comparisons else None,
        text=_text(comparisons),
        ties_exact=None,
        located=None,
        further_outputs=tuple(
            OutputParity(
                name=name,
                error=_worst_error(outputs[name]),
                rounding_error=allowances[name].rounding,
                allowed_max_abs=allowances[name].max_abs,
            )
            for name in other_names
        ),
        left_out=tuple(row for name, compared in outputs.items() for row in _left_out(name, compared)),
        gate=Gate.model_validate(gate.model_dump()),
        passed=not reasons,
        reasons=tuple(dict.fromkeys(reasons)),
    )


def _left_out(name: str, comparisons: Sequence[Comparison]) -> list[LeftOutRows]:
    total = sum(comparison.tokens + sum(part.rows for part in comparison.left_out) for comparison in comparisons)
    by_cause: dict[str, list[tuple[str, int]]] = {}
    for comparison in comparisons:
        for part in comparison.left_out:
            by_cause.setdefault(part.because, []).append((comparison.kind, part.rows))
    return [
        LeftOutRows(
            output=name,
            inputs=tuple(dict.fromkeys(kind for kind, _ in rows_by_kind)),
            rows=sum(rows for _, rows in rows_by_kind),
            total=total,
            because=because,
        )
        for because, rows_by_kind in by_cause.items()
    ]


def fails_anyway(
    comparisons: Sequence[Comparison], gate: ParityGate, setting: Setting, times: float = math.inf
) -> bool:
    """Whether a candidate would fail even if rounding errors were `times` as large as measured; infinity stands for any
    size, so that only a NaN and what has nothing to do with rounding fail.
    """
    return any(
        check(compared, allowance(compared, gate, setting.dtype, times=times))
        for compared in _by_output(comparisons).values()
        for check in CHECKS
    )


def _by_output(comparisons: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    grouped: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        grouped.setdefault(comparison.output, []).append(comparison)
    return grouped


def _worst_error(comparisons: Sequence[Comparison]) -> ErrorNumbers:
    return ErrorNumbers(
        **{name: _worst(getattr(c.error, name) for c in comparisons) for name in ErrorNumbers.model_fields}
    )


def failed_row(reason: str, gate: ParityGate, setting: Setting, artifact: str | None = None) -> ParityRow:
    """Returns the row of a candidate that fails for this reason, without a comparison."""
    return judge([], gate, setting, artifact).model_copy(update={"reasons": (reason,)})


class ContradictionError(EngineError):
    """An engine ran, and what it returned contradicts itself. That is a fault of the engine, on any machine."""


def unjudged_row(reason: str, gate: ParityGate, setting: Setting, artifact: str | None = None) -> ParityRow:
    """Returns the row of a candidate that could not be loaded or run on this machine. It fails, because nothing shows
    that the candidate is right, but another machine may judge it.
    """
    return failed_row(reason, gate, setting, artifact).model_copy(update={"judged": False})


def _routing(comparisons: Sequence[Comparison], allowed: Allowance) -> RoutingAgreement:
    layers = tuple(_layer(site_results, allowed) for site_results in by_site(comparisons).values())
    return RoutingAgreement(
        layers=layers,
        routed=sum(layer.routed for layer in layers),
        agreed=sum(layer.agreed for layer in layers),
        near_ties=sum(layer.near_ties for layer in layers),
        min_margin=smallest([layer.min_margin for layer in layers if layer.min_margin is not None]),
        by_input=tuple(
            InputAgreement(
                input=comparison.kind,
                routed=sum(site.routed for site in comparison.sites),
                agreed=sum(site.agreed for site in comparison.sites),
            )
            for comparison in comparisons
        ),
    )


def _layer(site_results: Sequence[SiteRouting], allowed: Allowance) -> LayerAgreement:
    site = site_results[0].site
    distances = [distance for routing in site_results for distance in routing.differences]
    near = sum(distance <= allowed.scores[site] for distance in distances)
    margin = smallest([routing.min_margin for routing in site_results if routing.min_margin is not None])
    return LayerAgreement(
        layer=site,
        k=site_results[0].k,
        routed=sum(routing.routed for routing in site_results),
        agreed=sum(routing.agreed for routing in site_results),
        overflow=sum(routing.overflow for routing in site_results),
        near_ties=near,
        faults=len(distances) - near,
        min_margin=None if margin is None else allowed.share(site, margin),
        score_bound=allowed.share(site, allowed.scores[site]),
        worst_flip=allowed.share(site, max(distances)) if distances else None,
    )


def _text(comparisons: Sequence[Comparison]) -> TextQuality | None:
    texts = [comparison.text for comparison in comparisons if comparison.text is not None]
    if not texts:
        return None
    tokens = sum(text.tokens for text in texts)
    return TextQuality(
        tokens=tokens,
        perplexity=perplexity_of(sum(text.nll for text in texts) / tokens),
        reference_perplexity=perplexity_of(sum(text.reference_nll for text in texts) / tokens),
        own_perplexity=perplexity_of(sum(text.own_nll for text in texts) / tokens),
        next_token_agreement=sum(text.agreed for text in texts) / sum(text.positions for text in texts),
    )


def _worst(values: Iterable[float]) -> float:
    """Returns the largest value; NaN if there is none, or if any is NaN, which `max` could miss."""
    listed = list(values)
    return float(np.max(listed)) if listed else math.nan

"""Turns comparisons into a row of the report: applies the checks and sums up the numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from mod_export.config import ParityGate
from mod_export.judge.checks import (
    CHECKS,
    WHATEVER_ROUNDING_IS,
    Allowance,
    Comparison,
    allowance,
    by_site,
    divergences_of,
    quality_inputs,
)
from mod_export.judge.compare import SiteRouting, smallest
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
from mod_export.types import Setting

REFERENCE = "eager float32"


def judge(found: Sequence[Comparison], gate: ParityGate, setting: Setting, artifact: str | None = None) -> ParityRow:
    """Applies the gate to every batch; the row passes only if each check could be evaluated and passed."""
    outputs = {
        name: [one for one in found if one.output == name] for name in dict.fromkeys(one.output for one in found)
    }
    routed = any(one.sites for one in found)
    allowances = {name: allowance(some, gate, setting.dtype, routed=routed) for name, some in outputs.items()}
    reasons = [reason for name in outputs for check in CHECKS for reason in check(outputs[name], allowances[name])]
    first, *others = outputs or [""]
    found, allowed = outputs.get(first, []), allowances.get(first) or allowance([], gate, setting.dtype)
    reasons = reasons if found else ["nothing was compared"]
    judged = quality_inputs(found, allowed)
    shortfalls = [one.shortfalls for one in judged if one.shortfalls is not None]
    nats = divergences_of(found, allowed)
    return ParityRow(
        **setting_fields(setting),
        artifact=artifact,
        reference=REFERENCE,
        inputs=tuple(sorted({one.kind for some in outputs.values() for one in some if one.tokens or not one.left_out})),
        tokens=sum(one.tokens for one in found),
        rounding_tokens=sum(one.tokens for one in found if one.rounding is not None),
        routing=_routing(found, allowed),
        error=_worst_error(found),
        rounding_error=allowed.rounding,
        allowed_max_abs=allowed.max_abs,
        # A shortfall of 0 means the same most probable next token.
        next_token_agreement=min((float(np.mean(some <= 0)) for some in shortfalls), default=None if found else 0.0),
        kl=_worst(float(nats_N.mean()) for _, nats_N in nats) if nats or not found else None,
        text=_text(found),
        ties_exact=None,
        located=None,
        further_outputs=tuple(
            OutputParity(
                name=name,
                error=_worst_error(outputs[name]),
                rounding_error=allowances[name].rounding,
                allowed_max_abs=allowances[name].max_abs,
            )
            for name in others
        ),
        left_out=tuple(row for name, some in outputs.items() for row in _left_out(name, some)),
        gate=Gate.model_validate(gate.model_dump()),
        passed=not reasons,
        reasons=tuple(dict.fromkeys(reasons)),
    )


def _left_out(name: str, found: Sequence[Comparison]) -> list[LeftOutRows]:
    total = sum(comparison.tokens + sum(part.rows for part in comparison.left_out) for comparison in found)
    by_cause: dict[str, list[tuple[str, int]]] = {}
    for comparison in found:
        for part in comparison.left_out:
            by_cause.setdefault(part.because, []).append((comparison.kind, part.rows))
    return [
        LeftOutRows(
            output=name,
            inputs=tuple(dict.fromkeys(kind for kind, _ in some)),
            rows=sum(rows for _, rows in some),
            total=total,
            because=because,
        )
        for because, some in by_cause.items()
    ]


def fails_anyway(found: Sequence[Comparison], gate: ParityGate, setting: Setting) -> bool:
    """Whether a candidate fails a check that does not depend on the measured rounding error."""
    allowed = allowance(found, gate, setting.dtype)
    return any(check(found, allowed) for check in WHATEVER_ROUNDING_IS)


def _worst_error(found: Sequence[Comparison]) -> ErrorNumbers:
    return ErrorNumbers(
        **{name: _worst(getattr(comparison.error, name) for comparison in found) for name in ErrorNumbers.model_fields}
    )


def failed_row(reason: str, gate: ParityGate, setting: Setting, artifact: str | None = None) -> ParityRow:
    """Returns the failed row of a candidate that could not be loaded or run."""
    return judge([], gate, setting, artifact).model_copy(update={"reasons": (reason,)})


def _routing(found: Sequence[Comparison], allowed: Allowance) -> RoutingAgreement:
    layers = tuple(_layer(many, allowed) for many in by_site(found).values())
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
            for comparison in found
        ),
    )


def _layer(many: Sequence[SiteRouting], allowed: Allowance) -> LayerAgreement:
    site = many[0].site
    distances = [distance for routing in many for distance in routing.distances]
    near = sum(distance <= allowed.scores[site] for distance in distances)
    margin = smallest([routing.min_margin for routing in many if routing.min_margin is not None])
    return LayerAgreement(
        layer=site,
        k=many[0].k,
        routed=sum(routing.routed for routing in many),
        agreed=sum(routing.agreed for routing in many),
        overflow=sum(routing.overflow for routing in many),
        near_ties=near,
        faults=len(distances) - near,
        min_margin=None if margin is None else allowed.share(site, margin),
        score_bound=allowed.share(site, allowed.scores[site]),
        worst_flip=allowed.share(site, max(distances)) if distances else None,
    )


def _text(found: Sequence[Comparison]) -> TextQuality | None:
    texts = [comparison.text for comparison in found if comparison.text is not None]
    if not texts:
        return None
    tokens = sum(text.tokens for text in texts)
    return TextQuality(
        tokens=tokens,
        perplexity=_perplexity(sum(text.nll for text in texts) / tokens),
        reference_perplexity=_perplexity(sum(text.reference_nll for text in texts) / tokens),
        own_perplexity=_perplexity(sum(text.own_nll for text in texts) / tokens),
        next_token_agreement=sum(text.agreed for text in texts) / sum(text.positions for text in texts),
    )


def _perplexity(nats: float) -> float:
    return math.exp(nats) if not nats > 700 else math.inf


def _worst(values: Iterable[float]) -> float:
    """Returns the largest value; NaN if there is none, or if any is NaN, which `max` could miss."""
    listed = list(values)
    return float(np.max(listed)) if listed else math.nan

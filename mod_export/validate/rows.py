"""From comparisons to rows of the report: the numbers summed up, the checks applied, and the reasons collected."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from mod_export.config import ParityGate
from mod_export.engines.protocol import Runner
from mod_export.results.base import setting_fields
from mod_export.results.parity import (
    ErrorNumbers,
    Gate,
    InputAgreement,
    LayerAgreement,
    ParityRow,
    RoutingAgreement,
    TextQuality,
)
from mod_export.types import Setting, Site
from mod_export.validate.allowance import Allowance, allowance
from mod_export.validate.checks import CHECKS
from mod_export.validate.compare import LayerRouting, smallest
from mod_export.validate.inputs import Batch
from mod_export.validate.parity import ROUNDING, Comparison, compare_runner
from mod_export.validate.reference import Reference

__all__ = ["failed_row", "judge", "judge_runner", "judge_runners"]

NOTHING = "nothing was compared"


def judge_runner(
    runner: Runner,
    reference: Reference,
    batches: Sequence[Batch],
    gate: ParityGate,
    setting: Setting,
    artifact: str | None = None,
) -> ParityRow:
    """Runs a candidate and judges it; before it fails, rounding is measured on all inputs, and in several runs.

    Raises:
        EngineError: the candidate cannot be run on these inputs.
    """
    return judge_runners([(runner, batches)], reference, gate, setting, artifact)


def judge_runners(
    parts: Sequence[tuple[Runner, Sequence[Batch]]],
    reference: Reference,
    gate: ParityGate,
    setting: Setting,
    artifact: str | None = None,
) -> ParityRow:
    """`judge_runner` for a candidate that is run in several ways, each on inputs of its own.

    Raises:
        EngineError: the candidate cannot be run on these inputs.
    """
    for rounding in ROUNDING:
        compared = [one for runner, some in parts for one in compare_runner(runner, reference, some, rounding)]
        row = judge(compared, gate, setting, artifact)
        if row.passed:
            break
    return row


def judge(
    comparisons: Sequence[Comparison], gate: ParityGate, setting: Setting, artifact: str | None = None
) -> ParityRow:
    """Applies the gate to every batch; passes only when each check could be evaluated and held."""
    allowed = allowance(comparisons, gate, setting.dtype)
    reasons = [reason for check in CHECKS for reason in check(comparisons, allowed)] if comparisons else [NOTHING]
    return ParityRow(
        **setting_fields(setting),
        artifact=artifact,
        reference=Reference.name,
        inputs=tuple(sorted({found.kind for found in comparisons})),
        routing=_routing(comparisons, allowed),
        error=ErrorNumbers(
            max_abs=_worst(found.error.max_abs for found in comparisons),
            mean_abs=_worst(found.error.mean_abs for found in comparisons),
            max_rel=_worst(found.error.max_rel for found in comparisons),
            rms=_worst(found.error.rms for found in comparisons),
        ),
        rounding_error=allowed.noise,
        allowed_max_abs=allowed.max_abs,
        next_token_agreement=min((found.agreement for found in comparisons), default=0.0),
        kl=_worst(found.kl for found in comparisons),
        text=_text(comparisons),
        ties_exact=None,
        located=None,
        gate=Gate.model_validate(gate.model_dump()),
        passed=not reasons,
        reasons=tuple(dict.fromkeys(reasons)),
    )


def failed_row(reason: str, gate: ParityGate, setting: Setting, artifact: str | None = None) -> ParityRow:
    """A row about something that could not be loaded or run at all."""
    return judge([], gate, setting, artifact).model_copy(update={"reasons": (reason,)})


def _routing(comparisons: Sequence[Comparison], allowed: Allowance) -> RoutingAgreement:
    by_layer: dict[Site, list[LayerRouting]] = {}
    for found in comparisons:
        for layer in found.layers:
            by_layer.setdefault(layer.layer, []).append(layer)
    layers = tuple(_layer(many, allowed) for many in by_layer.values())
    return RoutingAgreement(
        layers=layers,
        routed=sum(layer.routed for layer in layers),
        agreed=sum(layer.agreed for layer in layers),
        near_ties=sum(layer.near_ties for layer in layers),
        min_margin=smallest([layer.min_margin for layer in layers if layer.min_margin is not None]),
        by_input=tuple(
            InputAgreement(
                input=found.kind,
                routed=sum(layer.routed for layer in found.layers),
                agreed=sum(layer.agreed for layer in found.layers),
            )
            for found in comparisons
        ),
    )


def _layer(many: Sequence[LayerRouting], allowed: Allowance) -> LayerAgreement:
    layer = many[0].layer
    distances = [distance for one in many for distance in one.distances]
    near = sum(distance <= allowed.scores[layer] for distance in distances)
    margin = smallest([one.min_margin for one in many if one.min_margin is not None])
    return LayerAgreement(
        layer=layer,
        k=many[0].k,
        routed=sum(one.routed for one in many),
        agreed=sum(one.agreed for one in many),
        overflow=sum(one.overflow for one in many),
        near_ties=near,
        faults=len(distances) - near,
        min_margin=None if margin is None else allowed.share(layer, margin),
        score_bound=allowed.share(layer, allowed.scores[layer]),
        worst_flip=allowed.share(layer, max(distances)) if distances else None,
    )


def _text(comparisons: Sequence[Comparison]) -> TextQuality | None:
    texts = [found.text for found in comparisons if found.text is not None]
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
    """The largest value; NaN as soon as one of them is NaN, which max() alone would let slip."""
    listed = list(values)
    return math.nan if not listed or any(math.isnan(value) for value in listed) else max(listed)

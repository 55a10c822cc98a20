"""From comparisons to rows of the report: the numbers summed up, the checks applied, and the reasons collected."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from mod_export.artifacts import Bucket, DType, ModelKind, Site
from mod_export.compare import LayerRouting, smallest
from mod_export.config import ParityGate
from mod_export.inputs import Batch
from mod_export.protocols import Runner
from mod_export.validate.allowance import Allowance, allowance
from mod_export.validate.checks import CHECKS
from mod_export.validate.parity import Comparison, compare_runner
from mod_export.validate.reference import Reference

__all__ = ["About", "ParityRow", "failed_row", "judge", "judge_runner", "judge_runners"]

NOTHING = "nothing was compared"


class About(TypedDict):
    """What a row is about."""

    target: str
    bucket: Bucket
    dtype: DType
    model: ModelKind
    artifact: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityRow:
    """One row of the report's `parity`; see docs/numerics.md for what each number means."""

    target: str
    bucket: str
    dtype: DType
    model: ModelKind
    artifact: str | None
    reference: str
    inputs: list[str]
    routing: dict[str, Any]
    error: dict[str, float]
    noise: float | None
    allowed_max_abs: float
    next_token_agreement: float
    kl: float
    text: dict[str, float] | None
    ties_exact: bool | None
    located: dict[str, Any] | None
    gate: dict[str, float]
    passed: bool
    reasons: list[str]


def judge_runner(
    runner: Runner,
    reference: Reference,
    batches: Sequence[Batch],
    gate: ParityGate,
    *,
    target: str,
    bucket: Bucket,
    dtype: DType,
    model: ModelKind,
    artifact: str | None = None,
) -> ParityRow:
    """Runs a candidate and judges it; what would fail is held against rounding that is measured in several runs.

    Raises:
        EngineError: the candidate cannot be run on these inputs.
    """
    about: About = {"target": target, "bucket": bucket, "dtype": dtype, "model": model, "artifact": artifact}
    return judge_runners([(runner, batches)], reference, gate, about)


def judge_runners(
    parts: Sequence[tuple[Runner, Sequence[Batch]]], reference: Reference, gate: ParityGate, about: About
) -> ParityRow:
    """`judge_runner` for a candidate that is run in several ways, each on inputs of its own.

    Raises:
        EngineError: the candidate cannot be run on these inputs.
    """

    def compared(*, shaken: bool) -> list[Comparison]:
        return [one for runner, some in parts for one in compare_runner(runner, reference, some, shaken=shaken)]

    row = judge(compared(shaken=False), gate, **about)
    return row if row.passed else judge(compared(shaken=True), gate, **about)


def judge(
    comparisons: Sequence[Comparison],
    gate: ParityGate,
    *,
    target: str,
    bucket: Bucket,
    dtype: DType,
    model: ModelKind,
    artifact: str | None = None,
) -> ParityRow:
    """Applies the gate to every batch; passes only when each check could be evaluated and held."""
    allowed = allowance(comparisons, gate, dtype)
    reasons = [reason for check in CHECKS for reason in check(comparisons, allowed)] if comparisons else [NOTHING]
    return ParityRow(
        target=target,
        bucket=bucket.name,
        dtype=dtype,
        model=model,
        artifact=artifact,
        reference=Reference.name,
        inputs=sorted({found.kind for found in comparisons}),
        routing=_routing(comparisons, allowed),
        error={
            "max_abs": _worst(found.error.max_abs for found in comparisons),
            "mean_abs": _worst(found.error.mean_abs for found in comparisons),
            "max_rel": _worst(found.error.max_rel for found in comparisons),
            "rms": _worst(found.error.rms for found in comparisons),
        },
        noise=allowed.noise,
        allowed_max_abs=allowed.max_abs,
        next_token_agreement=min((found.agreement for found in comparisons), default=0.0),
        kl=_worst(found.kl for found in comparisons),
        text=_text(comparisons),
        ties_exact=None,
        located=None,
        gate=gate.model_dump(),
        passed=not reasons,
        reasons=list(dict.fromkeys(reasons)),
    )


def failed_row(
    reason: str,
    gate: ParityGate,
    *,
    target: str,
    bucket: Bucket,
    dtype: DType,
    model: ModelKind,
    artifact: str | None = None,
) -> ParityRow:
    """A row about something that could not be loaded or run at all."""
    row = judge([], gate, target=target, bucket=bucket, dtype=dtype, model=model, artifact=artifact)
    row.reasons[:] = [reason]
    return row


def _routing(comparisons: Sequence[Comparison], allowed: Allowance) -> dict[str, Any]:
    by_layer: dict[Site, list[LayerRouting]] = {}
    for found in comparisons:
        for layer in found.layers:
            by_layer.setdefault(layer.layer, []).append(layer)
    layers = [_layer(many, allowed) for many in by_layer.values()]
    margins = [layer["min_margin"] for layer in layers if layer["min_margin"] is not None]
    return {
        "layers": layers,
        "routed": sum(layer["routed"] for layer in layers),
        "agreed": sum(layer["agreed"] for layer in layers),
        "near_ties": sum(layer["near_ties"] for layer in layers),
        "min_margin": smallest(margins),
        "by_input": [
            {
                "input": found.kind,
                "routed": sum(layer.routed for layer in found.layers),
                "agreed": sum(layer.agreed for layer in found.layers),
            }
            for found in comparisons
        ],
    }


def _layer(many: Sequence[LayerRouting], allowed: Allowance) -> dict[str, Any]:
    layer = many[0].layer
    distances = [distance for one in many for distance in one.distances]
    near = sum(distance <= allowed.scores[layer] for distance in distances)
    margin = smallest([one.min_margin for one in many if one.min_margin is not None])
    return {
        "layer": layer,
        "k": many[0].k,
        "routed": sum(one.routed for one in many),
        "agreed": sum(one.agreed for one in many),
        "overflow": sum(one.overflow for one in many),
        "near_ties": near,
        "faults": len(distances) - near,
        "min_margin": None if margin is None else allowed.share(layer, margin),
        "score_bound": allowed.share(layer, allowed.scores[layer]),
        "worst_flip": allowed.share(layer, max(distances)) if distances else None,
    }


def _text(comparisons: Sequence[Comparison]) -> dict[str, float] | None:
    texts = [found.text for found in comparisons if found.text is not None]
    if not texts:
        return None
    tokens = sum(text.tokens for text in texts)
    return {
        "tokens": tokens,
        "perplexity": _perplexity(sum(text.nll for text in texts) / tokens),
        "reference_perplexity": _perplexity(sum(text.reference_nll for text in texts) / tokens),
        "own_perplexity": _perplexity(sum(text.own_nll for text in texts) / tokens),
        "next_token_agreement": sum(text.agreed for text in texts) / sum(text.positions for text in texts),
    }


def _perplexity(nats: float) -> float:
    return math.exp(nats) if not nats > 700 else math.inf


def _worst(values: Iterable[float]) -> float:
    """The largest value; NaN as soon as one of them is NaN, which max() alone would let slip."""
    listed = list(values)
    return math.nan if not listed or any(math.isnan(value) for value in listed) else max(listed)

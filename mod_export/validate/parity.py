"""Parity in parts: which tokens were routed, the error given the same routing, and the next token.

A routed model is not continuous. When two scores are closer than rounding, either token may be taken, and the logits
then differ by a lot while nothing is wrong; a wrong gate may change them by little while everything is. So the
reference is run with the candidate's routing, which makes the error comparable, and each layer's choice is judged by
the reference's own scores given the same choices in the layers below.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mod_export.artifacts import Bucket, DType, Engine, ModelKind
from mod_export.compare import (
    ErrorNumbers,
    LayerRouting,
    error_between,
    next_token_agreement,
    routing_of_layer,
    smallest,
)
from mod_export.config import BuildConfig, ParityGate
from mod_export.engine import ENGINES
from mod_export.inputs import Batch, parity_batches
from mod_export.protocols import LoadedModel, Runner
from mod_export.validate.checks import CHECKS
from mod_export.validate.reference import Reference, Traced

__all__ = ["Comparison", "ParityRow", "compare_runner", "judge", "parity_of_engine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What was found on one batch."""

    kind: str
    layers: tuple[LayerRouting, ...]
    error: ErrorNumbers
    next_token_agreement: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityRow:
    """One row of the report's `parity`; see docs/numerics.md for what each number means."""

    target: str
    bucket: str
    dtype: DType
    model: ModelKind
    reference: str
    inputs: list[str]
    routing: dict[str, Any]
    error: dict[str, float]
    next_token_agreement: float
    gate: dict[str, float]
    passed: bool
    reasons: list[str]


def parity_of_engine(
    root: Path, engine: Engine, loaded: LoadedModel, reference: Reference, config: BuildConfig
) -> ParityRow:
    """Loads an engine of the build folder `root` and judges it on inputs of every kind."""
    batches = parity_batches(loaded, engine.bucket, config.seed, config.parity.batches_per_kind)
    with ENGINES[engine.target].load(root, engine, config) as runner:
        found = compare_runner(runner, reference, batches)
    return judge(
        found,
        config.parity.gate(engine.dtype),
        target=engine.target,
        bucket=engine.bucket,
        dtype=engine.dtype,
        model=engine.model,
    )


def compare_runner(runner: Runner, reference: Reference, batches: Sequence[Batch]) -> list[Comparison]:
    """Runs the candidate and the reference on every batch."""
    return [_compare(runner, reference, batch) for batch in batches]


def _compare(runner: Runner, reference: Reference, batch: Batch) -> Comparison:
    # A dense engine has no use for the lengths, and some builders drop an input that nothing reads.
    outputs = runner.run({name: array for name, array in batch.feeds.items() if name in runner.inputs})
    free = reference.free(batch)
    candidate, unusable = _candidate_routing(outputs, free)
    given = free
    if any(not np.array_equal(index_BK, free.routed[layer]) for layer, index_BK in candidate.items()):
        # Positions outside the row cannot be forced on anybody; the routing check reports them.
        last = batch.ids_BS.shape[1] - 1
        given = reference.forced(batch, {layer: index_BK.clip(0, last) for layer, index_BK in candidate.items()})
    judged = (
        routing_of_layer(layer, index_BK, given.scores[layer], batch.lengths_B) for layer, index_BK in candidate.items()
    )
    layers = tuple(sorted((*unusable, *judged), key=lambda layer: layer.layer))
    real_BS = batch.real_BS
    logits_NV, expected_NV = outputs["logits"][real_BS], given.logits_BSV[real_BS]
    return Comparison(
        kind=batch.kind,
        layers=layers,
        error=error_between(logits_NV, expected_NV),
        next_token_agreement=next_token_agreement(logits_NV, expected_NV),
    )


def _candidate_routing(
    outputs: Mapping[str, np.ndarray], free: Traced
) -> tuple[dict[int, np.ndarray], list[LayerRouting]]:
    """The candidate's positions by layer, and the layers whose positions cannot even be compared."""
    usable, unusable = {}, []
    for layer, expected_BK in free.routed.items():
        index = outputs.get(f"routed_{layer}")
        if index is not None and index.shape == expected_BK.shape:
            usable[layer] = index.astype(np.int64)
            continue
        B, k = expected_BK.shape
        found = "no routed positions" if index is None else f"routed positions of shape {list(index.shape)}"
        unusable.append(
            LayerRouting(
                layer=layer,
                k=k,
                routed=B * k,
                agreed=0,
                distances=(),
                min_margin=None,
                malformed=f"the engine gives {found}, expected [{B}, {k}]",
            )
        )
    return usable, unusable


def judge(
    comparisons: Sequence[Comparison],
    gate: ParityGate,
    *,
    target: str,
    bucket: Bucket,
    dtype: DType,
    model: ModelKind,
) -> ParityRow:
    """Applies the gate to every batch; passes only when each check could be evaluated and held."""
    reasons = [f"{found.kind}: {reason}" for found in comparisons for check in CHECKS for reason in check(found, gate)]
    if not comparisons:
        reasons.append("nothing was compared")
    return ParityRow(
        target=target,
        bucket=bucket.name,
        dtype=dtype,
        model=model,
        reference=Reference.name,
        inputs=sorted({found.kind for found in comparisons}),
        routing=_routing(comparisons, gate),
        error={
            "max_abs": _worst(found.error.max_abs for found in comparisons),
            "mean_abs": _worst(found.error.mean_abs for found in comparisons),
            "max_rel": _worst(found.error.max_rel for found in comparisons),
        },
        next_token_agreement=min((found.next_token_agreement for found in comparisons), default=0.0),
        gate=gate.model_dump(),
        passed=not reasons,
        reasons=reasons,
    )


def _routing(comparisons: Sequence[Comparison], gate: ParityGate) -> dict[str, Any]:
    by_layer: dict[int, list[LayerRouting]] = {}
    for found in comparisons:
        for layer in found.layers:
            by_layer.setdefault(layer.layer, []).append(layer)
    layers = [_layer(many, gate) for many in by_layer.values()]
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


def _layer(many: Sequence[LayerRouting], gate: ParityGate) -> dict[str, Any]:
    distances = [distance for layer in many for distance in layer.distances]
    near = sum(distance <= gate.near_tie for distance in distances)
    margins = [layer.min_margin for layer in many if layer.min_margin is not None]
    return {
        "layer": many[0].layer,
        "k": many[0].k,
        "routed": sum(layer.routed for layer in many),
        "agreed": sum(layer.agreed for layer in many),
        "near_ties": near,
        "faults": len(distances) - near,
        "min_margin": smallest(margins),
    }


def _worst(values: Iterable[float]) -> float:
    """The largest value; NaN as soon as one of them is NaN, which max() alone would let slip."""
    listed = list(values)
    return math.nan if not listed or any(math.isnan(value) for value in listed) else max(listed)

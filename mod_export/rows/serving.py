"""Which engines are served where none is named: the fastest that met their gates, as the build measured them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from mod_export.rows.base import Result
from mod_export.rows.generation import DecodeRow
from mod_export.rows.latency import LatencyRow
from mod_export.types import DType, ModelKind, Role, writes_text

ALONE = "the only one that was measured"


class Measured(Result):
    """How fast the engines of one model, target and dtype are together."""

    model: ModelKind
    """`mod`, or its dense baseline `dense`."""
    role: Role
    """`forward`: of whole rows; `decode`: of steps, for which engines that write text are chosen."""
    target: str
    """The engine family."""
    dtype: DType
    """What the weights of the engines are stored in."""
    ms: float
    """Milliseconds, geometric mean over all buckets: of the median latency of whole rows, of the mean of steps."""


class Served(Measured):
    """The engines that are served where neither target nor dtype is named."""

    reason: str
    """Why these."""


def measured_from_rows(latency: Iterable[LatencyRow], decode: Iterable[DecodeRow]) -> tuple[Measured, ...]:
    """What was timed, in its order; of those that were timed in fewer buckets than others nothing is said."""
    found: dict[tuple[ModelKind, Role, str, DType], list[float]] = defaultdict(list)
    for row in latency:
        found[row.model, row.role, row.target, row.dtype].append(row.p50_ms)
    for step in decode:
        for kind, mean_ms in step.ms.items():
            found[kind, step.role, step.target, step.dtype].append(mean_ms)
    most: dict[tuple[ModelKind, Role], int] = defaultdict(int)
    for (model, role, _, _), ms in found.items():
        most[model, role] = max(most[model, role], len(ms))
    return tuple(
        Measured(model=model, role=role, target=target, dtype=dtype, ms=math.exp(sum(map(math.log, ms)) / len(ms)))
        for (model, role, target, dtype), ms in found.items()
        if len(ms) == most[model, role]
    )


def served_of(measured: Sequence[Measured], refused: Collection[tuple[ModelKind, bool, str, DType]]) -> list[Served]:
    """What is served of each model and role: the fastest; of equals the first.

    Args:
        measured: what was timed.
        refused: (model, whether it writes text, target, dtype) of engines that missed their gates.
    """
    allowed = [one for one in measured if (one.model, writes_text(one.role), one.target, one.dtype) not in refused]
    served = []
    for model, role in dict.fromkeys((one.model, one.role) for one in allowed):
        ranked = sorted((one for one in allowed if (one.model, one.role) == (model, role)), key=lambda one: one.ms)
        others = ", ".join(f"{one.target} {one.dtype} {one.ms:.3g} ms" for one in ranked[1:])
        reason = f"the fastest of those that met their gates; {others}" if others else ALONE
        served.append(Served(**ranked[0].model_dump(), reason=reason))
    return served

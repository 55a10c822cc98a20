"""Chooses the engines to serve if none is named: the fastest that met their gates, as the build measured them."""

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
    """The speed of the engines of one model, role, target and dtype together."""

    model: ModelKind
    """`mod`, or its dense baseline `dense`."""
    role: Role
    """`forward` for whole rows; `decode` for steps, by which the engines that write text are chosen."""
    target: str
    """Engine family."""
    dtype: DType
    """Dtype in which the weights of the engines are stored."""
    ms: float
    """Geometric mean over all buckets, in milliseconds: of the median latency of whole rows, or of the mean time of
    steps."""


class Served(Measured):
    """The engines that are served if neither target nor dtype is named."""

    reason: str
    """Why these engines were chosen."""


def measured_from_rows(latency: Iterable[LatencyRow], decode: Iterable[DecodeRow]) -> tuple[Measured, ...]:
    """Returns the speed of everything that was timed, in the order of the rows. Leaves out engines that were timed in
    fewer buckets than others of their model and role.
    """
    ms_by_engines: dict[tuple[ModelKind, Role, str, DType], list[float]] = defaultdict(list)
    for row in latency:
        ms_by_engines[row.model, row.role, row.target, row.dtype].append(row.p50_ms)
    for step in decode:
        for kind, mean_ms in step.ms.items():
            ms_by_engines[kind, step.role, step.target, step.dtype].append(mean_ms)
    most_buckets: dict[tuple[ModelKind, Role], int] = defaultdict(int)
    for (model, role, _, _), ms in ms_by_engines.items():
        most_buckets[model, role] = max(most_buckets[model, role], len(ms))
    return tuple(
        Measured(model=model, role=role, target=target, dtype=dtype, ms=math.exp(sum(map(math.log, ms)) / len(ms)))
        for (model, role, target, dtype), ms in ms_by_engines.items()
        if len(ms) == most_buckets[model, role]
    )


def served_of(measured: Sequence[Measured], refused: Collection[tuple[ModelKind, bool, str, DType]]) -> list[Served]:
    """Returns the fastest of each model and role; of equally fast ones the first.

    Args:
        measured: everything that was timed.
        refused: (model, whether it writes text, target, dtype) of engines that missed their gates.
    """
    allowed = [row for row in measured if (row.model, writes_text(row.role), row.target, row.dtype) not in refused]
    served = []
    for model, role in dict.fromkeys((row.model, row.role) for row in allowed):
        ranked = sorted((row for row in allowed if (row.model, row.role) == (model, role)), key=lambda row: row.ms)
        others = ", ".join(f"{row.target} {row.dtype} {row.ms:.3g} ms" for row in ranked[1:])
        reason = f"the fastest of those that met their gates; {others}" if others else ALONE
        served.append(Served(**ranked[0].model_dump(), reason=reason))
    return served

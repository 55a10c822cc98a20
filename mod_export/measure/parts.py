"""Where the time of an engine should go, and where it goes: part by part of the model, on paper and as profiled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mod_export.artifacts import DType, Engine, ModelKind
from mod_export.measure.node_parts import NODE_PARTS
from mod_export.measure.roofline import Roofline
from mod_export.measure.work import Work

__all__ = ["PartRow", "Profiled", "part_rows", "roofline_ms"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """What a profile says of one engine: milliseconds of each part, `other` for kernels that nothing places."""

    profiler: str
    ms_by_part: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRow:
    """One part of one engine.

    Attributes:
        target: name of the engine family.
        bucket: name of the bucket.
        dtype: dtype of the engine.
        model: `mod` or `dense`.
        part: one of `node_parts.NODE_PARTS`.
        flops: of its matrix products.
        bytes: that its nodes read and write.
        predicted_ms: the sum over its nodes of what the roofline allows each of them.
        measured_ms: by the engine's own profile, every kernel in its fastest run; None where there is none.
        share: of the profiled time, from 0 to 1.
        profiler: what profiled.
    """

    target: str
    bucket: str
    dtype: DType
    model: ModelKind
    part: str
    flops: int
    bytes: int
    predicted_ms: float
    measured_ms: float | None
    share: float | None
    profiler: str | None


def part_rows(
    engine: Engine, work: Sequence[Work], roofline: Roofline, profiled: Profiled | None
) -> tuple[PartRow, ...]:
    """A row for every part that asks for anything or was seen in the profile, in the order of NODE_PARTS."""
    flops: dict[str, int] = defaultdict(int)
    size: dict[str, int] = defaultdict(int)
    predicted: dict[str, float] = defaultdict(float)
    for one in work:
        flops[one.part] += one.flops * len(one.nodes)
        size[one.part] += one.bytes * len(one.nodes)
        # Node by node: what one node computes does not hide what another one moves.
        predicted[one.part] += roofline.milliseconds(one.flops, one.bytes) * len(one.nodes)
    measured = profiled.ms_by_part if profiled else {}
    total = sum(measured.values())
    return tuple(
        PartRow(
            target=engine.target,
            bucket=engine.bucket.name,
            dtype=engine.dtype,
            model=engine.model,
            part=part,
            flops=flops[part],
            bytes=size[part],
            predicted_ms=predicted[part],
            measured_ms=measured.get(part, 0.0) if profiled else None,
            share=measured.get(part, 0.0) / total if total > 0 else None,
            profiler=profiled.profiler if profiled else None,
        )
        for part in NODE_PARTS
        if part in predicted or part in measured
    )


def roofline_ms(parts: Iterable[PartRow]) -> dict[tuple[str, str, DType, ModelKind], float]:
    """(target, bucket, dtype, model) -> predicted milliseconds of one run."""
    found: dict[tuple[str, str, DType, ModelKind], float] = defaultdict(float)
    for row in parts:
        found[row.target, row.bucket, row.dtype, row.model] += row.predicted_ms
    return dict(found)

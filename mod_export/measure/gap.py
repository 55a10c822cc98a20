"""Where the rest went: what each part of the model adds to the gap between the predicted and the measured speed-up.

With d and m for the milliseconds of a part in the dense and in the MoD engine, upper case for the sums over the parts,
and ' for predicted, the speed-ups are S = D / M and S' = D' / M'. Because D' - S' M' = 0,

    S - S' = (D - S' M) / M = ((D - D') - S' (M - M')) / M = sum over parts of ((d - d') - S' (m - m')) / M

So a part that takes as long as predicted in both engines contributes nothing; time that the dense engine loses beyond
its prediction raises the speed-up, time that the MoD engine loses lowers it, S' times as much. The contributions add up
to the gap exactly. Times are those of the profiles, so S may differ from the ratio of latencies by what a profile
leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Gap", "GapRow", "MeasuredPart", "gaps_of"]


class MeasuredPart(Protocol):
    """What the arithmetic needs of a `PartRow`, or of a row of report.json's `parts`."""

    @property
    def target(self) -> str: ...
    @property
    def bucket(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def part(self) -> str: ...
    @property
    def predicted_ms(self) -> float: ...
    @property
    def measured_ms(self) -> float | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GapRow:
    """One part of both engines; a part that one of them lacks takes it 0 ms.

    Attributes:
        part: of the model.
        dense_ms: measured.
        mod_ms: measured.
        dense_predicted_ms: by the roofline.
        mod_predicted_ms: by the roofline.
        ratio: dense_ms / mod_ms; None where the MoD engine spends no time.
        predicted_ratio: the same of the predictions.
        contribution: to the gap, in units of the speed-up.
    """

    part: str
    dense_ms: float
    mod_ms: float
    dense_predicted_ms: float
    mod_predicted_ms: float
    ratio: float | None
    predicted_ratio: float | None
    contribution: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """One setting: `measured` is the speed-up of the profiled times, `predicted` that of the roofline, and the
    contributions of `rows` add up to measured - predicted.
    """

    target: str
    bucket: str
    dtype: str
    measured: float
    predicted: float
    rows: tuple[GapRow, ...]


def gaps_of(parts: Iterable[MeasuredPart]) -> tuple[Gap, ...]:
    """One for each setting whose two engines were both profiled, in the order of `parts`."""
    settings: dict[tuple[str, str, str], list[MeasuredPart]] = {}
    for row in parts:
        settings.setdefault((row.target, row.bucket, row.dtype), []).append(row)
    found = (_gap(*setting, rows) for setting, rows in settings.items())
    return tuple(gap for gap in found if gap is not None)


def _gap(target: str, bucket: str, dtype: str, rows: Sequence[MeasuredPart]) -> Gap | None:
    dense = {row.part: row for row in rows if row.model == "dense"}
    mod = {row.part: row for row in rows if row.model == "mod"}
    D, M = _measured(dense), _measured(mod)
    predicted_D, predicted_M = (sum(row.predicted_ms for row in model.values()) for model in (dense, mod))
    if not D or not M or not predicted_M:
        return None
    predicted = predicted_D / predicted_M
    names = dict.fromkeys(row.part for row in (*mod.values(), *dense.values()))
    return Gap(
        target=target,
        bucket=bucket,
        dtype=dtype,
        measured=D / M,
        predicted=predicted,
        rows=tuple(_row(name, dense.get(name), mod.get(name), predicted, M) for name in names),
    )


def _row(part: str, dense: MeasuredPart | None, mod: MeasuredPart | None, predicted: float, M: float) -> GapRow:
    d, m = ((row.measured_ms or 0.0) if row else 0.0 for row in (dense, mod))
    predicted_d, predicted_m = (row.predicted_ms if row else 0.0 for row in (dense, mod))
    return GapRow(
        part=part,
        dense_ms=d,
        mod_ms=m,
        dense_predicted_ms=predicted_d,
        mod_predicted_ms=predicted_m,
        ratio=d / m if m else None,
        predicted_ratio=predicted_d / predicted_m if predicted_m else None,
        contribution=((d - predicted_d) - predicted * (m - predicted_m)) / M,
    )


def _measured(rows: Mapping[str, MeasuredPart]) -> float | None:
    """Milliseconds of a profiled engine; None for one that was not profiled."""
    times = [row.measured_ms for row in rows.values()]
    known = [ms for ms in times if ms is not None]
    return sum(known) if known and len(known) == len(times) else None

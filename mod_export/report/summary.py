"""What a reader asks first: for each setting the verdict and the gain, and for each target whether it was tried."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mod_export.artifacts import ModelKind
from mod_export.report.schema import (
    BuildReport,
    ErrorNumbers,
    LatencyEntry,
    ParityEntry,
    RoutingAgreement,
    SpeedupEntry,
    Target,
)

__all__ = ["Setting", "Untried", "settings_of", "untried_targets"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything that was found for one target, bucket and dtype; what was not measured is None or empty."""

    target: str
    bucket: str
    dtype: str
    parity: tuple[ParityEntry, ...]
    latency: tuple[LatencyEntry, ...]
    speedup: SpeedupEntry | None

    @property
    def parity_passed(self) -> bool | None:
        """Whether all parity rows passed, those of the dense twin included; None when there are none."""
        return all(row.passed for row in self.parity) if self.parity else None

    @property
    def routing(self) -> RoutingAgreement | None:
        """Of the MoD engine."""
        return next((row.routing for row in self.parity if row.model == "mod"), None)

    @property
    def error(self) -> ErrorNumbers | None:
        """Of the worse of the two engines; NaN is the worst."""
        errors = [row.error for row in self.parity]
        return max(errors, key=lambda error: (math.isnan(error.max_abs), error.max_abs), default=None)

    def of_model(self, kind: ModelKind) -> LatencyEntry | None:
        """Latency of one of the two models."""
        return next((row for row in self.latency if row.model == kind), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Untried:
    """A target without results on this machine. `built` says whether the build folder has engines for it."""

    target: str
    reason: str
    built: bool


def settings_of(report: BuildReport) -> tuple[Setting, ...]:
    """Every setting that has a row, in the order in which the report first names it."""
    rows: Sequence[ParityEntry | LatencyEntry | SpeedupEntry] = [*report.parity, *report.latency, *report.speedup]
    keys = dict.fromkeys((row.target, row.bucket, row.dtype) for row in rows)
    return tuple(
        Setting(
            target=target,
            bucket=bucket,
            dtype=dtype,
            parity=tuple(row for row in report.parity if _key(row) == (target, bucket, dtype)),
            latency=tuple(row for row in report.latency if _key(row) == (target, bucket, dtype)),
            speedup=next((row for row in report.speedup if _key(row) == (target, bucket, dtype)), None),
        )
        for target, bucket, dtype in keys
    )


def untried_targets(report: BuildReport) -> tuple[Untried, ...]:
    """Targets that did not run here: built ones first."""
    built = {artifact.target for artifact in report.artifacts if artifact.kind == "engine"}
    untried = [_untried(target, target.target in built) for target in report.targets if not target.ran]
    return tuple(sorted(untried, key=lambda target: not target.built))


def _untried(target: Target, built: bool) -> Untried:
    return Untried(target=target.target, reason=target.reason, built=built)


def _key(row: ParityEntry | LatencyEntry | SpeedupEntry) -> tuple[str, str, str]:
    return row.target, row.bucket, row.dtype

"""What a reader asks first: for each setting the verdict and the gain, and for each target whether it was tried."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from mod_export.artifacts import ModelKind
from mod_export.report.latency_entries import LatencyEntry, SpeedupEntry
from mod_export.report.parity_entries import ErrorNumbers, InputAgreement, ParityEntry, RoutingAgreement
from mod_export.report.schema import BuildReport, Target

__all__ = [
    "Gains",
    "Sampling",
    "Setting",
    "Untried",
    "agreement_by_input",
    "allowed_error",
    "broken_controls",
    "gains",
    "samplings",
    "settings_of",
    "untried_targets",
]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Whether a model may generate text token by token. `causal` is None where it was not probed.

    `engines` were probed with `suffixes` changed ends altogether; `statements` are what the probe said, without
    repetition, those that refute causality first.
    """

    model: ModelKind
    causal: bool | None
    engines: int
    suffixes: int
    statements: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gains:
    """The whole build in a few numbers, none of them chosen to please: ranges, sums and the worst.

    Attributes:
        speedups: how many settings have one.
        slowest: lowest of the speed-ups, None when nothing was measured.
        fastest: highest of them.
        routed: routed tokens compared, over all settings.
        agreed: those that the reference routed too.
        faults: differences that are no near-ties.
        by_input: the same by kind of input: ties made on purpose differ where text does not.
        max_abs: largest error of a logit; NaN is the worst; None when nothing was compared.
    """

    speedups: int
    slowest: float | None
    fastest: float | None
    routed: int
    agreed: int
    faults: int
    by_input: tuple[InputAgreement, ...]
    max_abs: float | None


def gains(report: BuildReport) -> Gains:
    """Sums up what was found on this machine."""
    measured = [row.measured for row in report.speedup]
    errors = [row.error.max_abs for row in report.parity]
    return Gains(
        speedups=len(measured),
        slowest=min(measured, key=lambda ratio: (not math.isnan(ratio), ratio), default=None),
        fastest=max(measured, default=None),
        routed=sum(row.routing.routed for row in report.parity),
        agreed=sum(row.routing.agreed for row in report.parity),
        faults=sum(layer.faults for row in report.parity for layer in row.routing.layers),
        by_input=agreement_by_input(report.parity),
        max_abs=max(errors, key=lambda error: (math.isnan(error), error), default=None),
    )


def agreement_by_input(rows: Sequence[ParityEntry]) -> tuple[InputAgreement, ...]:
    """The batches of one kind of input added up, in the order in which kinds first occur."""
    batches = [batch for row in rows for batch in row.routing.by_input if batch.routed]
    return tuple(
        InputAgreement(
            input=name,
            routed=sum(batch.routed for batch in batches if batch.input == name),
            agreed=sum(batch.agreed for batch in batches if batch.input == name),
        )
        for name in dict.fromkeys(batch.input for batch in batches)
    )


def samplings(report: BuildReport) -> tuple[Sampling, ...]:
    """One for each model: it may be used only if no engine of it was seen to look ahead."""
    found = []
    for model in get_args(ModelKind):
        rows = sorted((row for row in report.causality if row.model == model), key=lambda row: row.causal)
        probed = [row for row in rows if row.suffixes]
        found.append(
            Sampling(
                model=model,
                causal=all(row.causal for row in probed) if probed else None,
                engines=len(probed),
                suffixes=sum(row.suffixes for row in rows),
                statements=tuple(dict.fromkeys(row.statement for row in rows)),
            )
        )
    return tuple(found)


def allowed_error(row: ParityEntry) -> float:
    """The largest error of a logit that passes; older reports state the fixed one alone."""
    return row.gate.max_abs if row.allowed_max_abs is None else row.allowed_max_abs


def broken_controls(report: BuildReport) -> tuple[SpeedupEntry, ...]:
    """Comparisons whose control, an engine against itself, was not 1: they prove nothing."""
    return tuple(row for row in report.speedup if row.control is not None and not row.control.covers_one)


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

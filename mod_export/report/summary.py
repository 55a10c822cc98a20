"""What a reader asks first: for each setting the verdict and the gain, which files to deploy, and what did not run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from mod_export.report.wording import bytes_text, interval_text, setting_text, share_text
from mod_export.results.base import PairRow
from mod_export.results.latency import LatencyRow, PrecisionRow, SpeedupRow
from mod_export.results.parity import ErrorNumbers, InputAgreement, ParityRow, RoutingAgreement
from mod_export.results.report import Artifact, BuildReport
from mod_export.types import ModelKind

__all__ = [
    "Deployment",
    "Gains",
    "Precision",
    "Sampling",
    "Setting",
    "Untried",
    "agreement_by_input",
    "broken_controls",
    "deployments",
    "forward_parity",
    "gains",
    "precision_lines",
    "precision_text",
    "precisions",
    "samplings",
    "settings_of",
    "untried_targets",
]


State = Literal["passed", "failed", "not run here", "portable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything that was found for one target, bucket and dtype; what was not measured is None or empty."""

    target: str
    bucket: str
    dtype: str
    parity: tuple[ParityRow, ...]
    latency: tuple[LatencyRow, ...]
    speedup: SpeedupRow | None

    @property
    def name(self) -> str:
        """ort-cpu b1s512 float32."""
        return f"{self.target} {self.bucket} {self.dtype}"

    @property
    def parity_passed(self) -> bool | None:
        """Whether all parity rows passed, those of the dense baseline included; None when there are none."""
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

    def of_model(self, kind: ModelKind) -> LatencyRow | None:
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

    `engines` were probed with `suffixes` changed ends altogether; `statements` are what the probe said, each
    once, those that refute causality first.
    """

    model: ModelKind
    causal: bool | None
    engines: int
    suffixes: int
    statements: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gains:
    """The whole build in a few numbers, ranges, sums and the worst.

    Attributes:
        speedups: how many settings have one.
        slowest: lowest of the speed-ups, None when nothing was measured.
        fastest: highest of them.
        routed: selected tokens that were compared, over all settings.
        agreed: those that the reference selected too.
        faults: differences that are not near-ties.
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
    errors = [row.error.max_abs for row in forward_parity(report)]
    return Gains(
        speedups=len(measured),
        slowest=min(measured, key=lambda ratio: (not math.isnan(ratio), ratio), default=None),
        fastest=max(measured, default=None),
        routed=sum(row.routing.routed for row in forward_parity(report)),
        agreed=sum(row.routing.agreed for row in forward_parity(report)),
        faults=sum(layer.faults for row in forward_parity(report) for layer in row.routing.layers),
        by_input=agreement_by_input(forward_parity(report)),
        max_abs=max(errors, key=lambda error: (math.isnan(error), error), default=None),
    )


def agreement_by_input(rows: Sequence[ParityRow]) -> tuple[InputAgreement, ...]:
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


def broken_controls(report: BuildReport) -> tuple[SpeedupRow, ...]:
    """Comparisons whose control, an engine against itself, was not 1: nothing follows from them."""
    return tuple(row for row in report.speedup if not row.control.covers_one)


def forward_parity(report: BuildReport) -> tuple[ParityRow, ...]:
    """Rows of engines that read whole texts."""
    return tuple(row for row in report.parity if row.role == "forward")


def settings_of(report: BuildReport) -> tuple[Setting, ...]:
    """Every setting that has a row, in the order in which the report first names it."""
    rows: Sequence[PairRow] = [*forward_parity(report), *report.latency, *report.speedup]
    return tuple(
        Setting(
            target=target,
            bucket=bucket,
            dtype=dtype,
            parity=tuple(row for row in report.parity if row.pair_key == (target, dtype, role, bucket)),
            latency=tuple(row for row in report.latency if row.pair_key == (target, dtype, role, bucket)),
            speedup=next((row for row in report.speedup if row.pair_key == (target, dtype, role, bucket)), None),
        )
        for target, dtype, role, bucket in dict.fromkeys(row.pair_key for row in rows)
    )


def untried_targets(report: BuildReport) -> tuple[Untried, ...]:
    """Targets that did not run here: built ones first."""
    built = {artifact.target for artifact in report.artifacts if artifact.kind == "engine"}
    untried = [
        Untried(target=target.target, reason=target.reason, built=target.target in built)
        for target in report.targets
        if not target.ran
    ]
    return tuple(sorted(untried, key=lambda target: not target.built))


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A file that serves the MoD model: the engines of a target, or, with `target` None, the portable graphs.

    `setting` is what was found for it on this machine, None when it did not run.
    """

    target: str | None
    artifact: Artifact
    state: State
    setting: Setting | None


def deployments(report: BuildReport) -> tuple[Deployment, ...]:
    """What to deploy: engines that ran here, then those built for other machines, then portable graphs."""
    judged = [row for row in report.parity if row.model == "mod"]
    by_path = {row.artifact: row.passed for row in judged if row.artifact is not None}
    by_setting = {row.name: row.passed for row in judged if row.role == "forward"}
    settings = {one.name: one for one in settings_of(report)}
    # A portable graph is often the very file that ONNX Runtime runs: what was found for one holds for the other.
    by_bytes = {item.sha256: by_path[item.path] for item in report.artifacts if item.path in by_path}
    states: dict[bool | None, State] = {True: "passed", False: "failed"}
    found = []
    for artifact in report.artifacts:
        if artifact.model != "mod" or artifact.kind == "weights":
            continue
        name = f"{artifact.target} {artifact.bucket} {artifact.dtype}"
        if artifact.kind == "engine" and artifact.role in ("prefill", "decode"):
            # What was timed at the bucket of this name is another engine.
            state, setting = states.get(by_path.get(artifact.path), "not run here"), None
        elif artifact.kind == "engine":
            passed = by_path.get(artifact.path, by_setting.get(name))
            state, setting = states.get(passed, "not run here"), settings.get(name)
        elif artifact.target is None:
            state, setting = states.get(by_bytes.get(artifact.sha256), "portable"), None
        else:
            continue
        found.append(Deployment(target=artifact.target, artifact=artifact, state=state, setting=setting))
    order = {"passed": 0, "failed": 0, "not run here": 1, "portable": 2}
    return tuple(sorted(found, key=lambda item: (item.target is None, order[item.state], item.target or "")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """A row with the quality of the same engine, in words; a dash where it is not known."""

    row: PrecisionRow
    passed: bool | None
    agreement: str = "-"
    perplexity: str = "-"
    reference: str = ""


def precisions(report: BuildReport) -> tuple[Precision, ...]:
    """One for each row of `precision`, in their order."""
    return tuple(_precision(row, report.parity) for row in report.precision)


def precision_lines(report: BuildReport) -> list[str]:
    """One line of text for each."""
    return list(map(precision_text, precisions(report)))


def precision_text(one: Precision) -> str:
    """One line of text."""
    return ", ".join(_parts(one))


def _parts(one: Precision) -> list[str]:
    row = one.row
    parts = [
        f"{setting_text(row)} {row.model}: {bytes_text(row.bytes)} instead of {bytes_text(row.float32_bytes)}",
        f"{interval_text(row)} as fast as float32",
    ]
    if one.reference:
        parts += [f"same next token on text {one.agreement}", f"perplexity {one.perplexity} {one.reference}"]
    return [*parts, "missed its gates: not shipped"] if one.passed is False else parts


def _precision(row: PrecisionRow, parity: Sequence[ParityRow]) -> Precision:
    judged = next((one for one in parity if one.engine_key == row.engine_key), None)
    if judged is None:
        return Precision(row=row, passed=None)
    text = judged.text
    if text is None:
        return Precision(row=row, passed=judged.passed)
    return Precision(
        row=row,
        passed=judged.passed,
        agreement=share_text(text.next_token_agreement),
        perplexity=f"{text.perplexity:.4f}",
        reference=f"(PyTorch {text.own_perplexity:.4f})",
    )

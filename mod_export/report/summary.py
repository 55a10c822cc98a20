"""What a reader asks first: for each setting the verdict and the gain, which files to deploy, and what did not run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from mod_export.rows.base import PairRow, setting_fields
from mod_export.rows.cost import not_counted_text
from mod_export.rows.failures import reason_for
from mod_export.rows.generation import Compared, DecodeRow, FirstTokenRow, GenerationReport, TextsRow
from mod_export.rows.latency import LatencyRow, PrecisionRow, SpeedupRow
from mod_export.rows.parity import ErrorNumbers, InputAgreement, ParityRow, RoutingAgreement
from mod_export.rows.report import Artifact, BuildReport, Target
from mod_export.rows.serving import ALONE, Served
from mod_export.types import KINDS, Bucket, ModelKind, Role, Setting

State = Literal["passed", "failed", "not run here", "portable"]
Row = TypeVar("Row", bound=PairRow)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Everything that was found in one setting, named after the MoD engine; what was not measured is None or empty."""

    setting: Setting
    rows: tuple[PairRow, ...]

    def of(self, row_type: type[Row]) -> list[Row]:
        """The rows of one type."""
        return [row for row in self.rows if isinstance(row, row_type)]

    @property
    def speed(self) -> SpeedupRow | Compared | None:
        """The comparison with the dense baseline; None where there is none."""
        if self.written is not None:
            return self.written.compared
        return next(iter(self.of(SpeedupRow)), None)

    @property
    def written(self) -> DecodeRow | FirstTokenRow | None:
        """What was timed of an engine that writes text or reads a prompt of one."""
        return next((row for row in self.rows if isinstance(row, DecodeRow | FirstTokenRow)), None)

    def latency(self, kind: ModelKind) -> LatencyRow | None:
        """Of one of the two models."""
        return next((row for row in self.of(LatencyRow) if row.model == kind), None)

    def ms(self, kind: ModelKind) -> float | None:
        """Milliseconds of one run: the median, or the mean over steps."""
        if self.written is not None:
            return self.written.ms.get(kind)
        row = self.latency(kind)
        return row.p50_ms if row else None

    @property
    def parity_passed(self) -> bool | None:
        """Whether all parity rows passed, those of the dense baseline included; None when there are none."""
        rows = self.of(ParityRow)
        return all(row.passed for row in rows) if rows else None

    @property
    def routing(self) -> RoutingAgreement | None:
        """Of the MoD engine."""
        return next((row.routing for row in self.of(ParityRow) if row.model == "mod"), None)

    @property
    def error(self) -> ErrorNumbers | None:
        """Of the worse of the two engines; NaN is the worst."""
        errors = [row.error for row in self.of(ParityRow)]
        return max(errors, key=lambda error: (math.isnan(error.max_abs), error.max_abs), default=None)

    @property
    def texts(self) -> tuple[int, int]:
        """How many texts of both models are those of PyTorch, and how many were compared."""
        rows = self.of(TextsRow)
        return sum(row.identical for row in rows), sum(row.texts for row in rows)


def settings_of(found: BuildReport | Iterable[PairRow], role: Role) -> tuple[Found, ...]:
    """Every setting of a role that has a row, in the order in which they are first named."""
    grouped: dict[Setting, list[PairRow]] = {}
    for row in _rows(found) if isinstance(found, BuildReport) else found:
        if row.role == role:
            grouped.setdefault(row.setting.of("mod"), []).append(row)
    return tuple(Found(setting=setting, rows=tuple(rows)) for setting, rows in grouped.items())


def _rows(report: BuildReport) -> list[PairRow]:
    written = report.generation or GenerationReport()
    whole: list[PairRow] = [*report.parity, *report.latency, *report.speedup]
    return [*whole, *written.decode, *written.texts, *written.first_token]


def parity_of(report: BuildReport, *, forward: bool) -> tuple[ParityRow, ...]:
    """Rows of engines that read whole texts, or of those that write them."""
    return tuple(row for row in report.parity if row.setting.writes_text is not forward)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gains:
    """The whole build in a few numbers."""

    slowest: float | None
    """Lowest of the speed-ups, NaN if there is one; None when nothing was measured."""
    fastest: float | None
    routed: int
    """Selected tokens that were compared, over all settings."""
    agreed: int
    faults: int
    """Differences that are not near-ties."""
    by_input: tuple[InputAgreement, ...]
    """Ties made on purpose differ where text does not."""
    max_abs: float | None
    """Largest error of a logit, NaN if there is one; None when nothing was compared."""


def gains(report: BuildReport) -> Gains:
    """Sums up what was found of whole texts on this machine."""
    measured = [row.measured for row in report.speedup]
    parity = parity_of(report, forward=True)
    return Gains(
        slowest=min(measured, key=lambda ratio: (not math.isnan(ratio), ratio), default=None),
        fastest=max(measured, default=None),
        routed=sum(row.routing.routed for row in parity),
        agreed=sum(row.routing.agreed for row in parity),
        faults=sum(layer.faults for row in parity for layer in row.routing.layers),
        by_input=agreement_by_input(parity),
        max_abs=max((row.error.max_abs for row in parity), key=lambda e: (math.isnan(e), e), default=None),
    )


def lacks_sites(rows: Sequence[ParityRow]) -> bool:
    """Whether the model ran, and no selection in it was known that could have been judged."""
    ran = [row for row in rows if row.model == "mod" and row.inputs]
    return bool(ran) and not any(row.routing.layers for row in ran)


def given_routing(rows: Sequence[ParityRow]) -> str:
    """What makes errors comparable, where some model has routing sites."""
    return " given the same routing" if any(row.routing.layers for row in rows) else ""


def left_out_lines(rows: Sequence[ParityRow]) -> tuple[str, ...]:
    """What was not judged and why, once for all engines of which the same is true."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for one in row.left_out:
            found.setdefault(str(one), []).append(str(row.setting))
    return tuple(f"{', '.join(dict.fromkeys(settings))}: {line}" for line, settings in found.items())


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Whether a model may generate text token by token. `causal` is None where it was not probed.

    `engines` were probed with `suffixes` changed ends altogether; `statements` are what the probe said, each
    once, those that refute causality first. `decodes` is whether engines that read one token at a time were compared
    with PyTorch, and all of them met their gates.
    """

    model: ModelKind
    causal: bool | None
    decodes: bool
    engines: int
    suffixes: int
    statements: tuple[str, ...]


def samplings(report: BuildReport) -> tuple[Sampling, ...]:
    """One for each model of the build: it may be used only if no engine of it was seen to look ahead.

    None where the models do not read tokens: nobody asks.
    """
    if not report.model.reads_tokens:
        return ()
    found = []
    for model in KINDS if report.not_compared is None else KINDS[:1]:
        rows = sorted((row for row in report.causality if row.model == model), key=lambda row: row.causal)
        probed = [row for row in rows if row.suffixes]
        decoded = [row.passed for row in report.parity if (row.role, row.model) == ("decode", model)]
        found.append(
            Sampling(
                model=model,
                causal=all(row.causal for row in probed) if probed else None,
                decodes=bool(decoded) and all(decoded),
                engines=len(probed),
                suffixes=sum(row.suffixes for row in rows),
                statements=tuple(dict.fromkeys(row.statement for row in rows)),
            )
        )
    return tuple(found)


def untried_targets(report: BuildReport) -> dict[str, list[Target]]:
    """Targets that did not run here: those that the build folder has engines for, and those that were `not built`."""
    engines = {artifact.target for artifact in report.artifacts if artifact.kind == "engine"}
    untried = [target for target in report.targets if not target.ran]
    found = {
        "built": [target for target in untried if target.target in engines],
        "not built": [target for target in untried if target.target not in engines],
    }
    return {state: targets for state, targets in found.items() if targets}


def uncompared(report: BuildReport) -> list[str]:
    """Why a setting in which the model was timed has no comparison, where there is a dense baseline otherwise."""
    if report.not_compared is not None:
        return []
    timed = [found for role in get_args(Role) for found in settings_of(report, role) if found.ms("mod") is not None]
    rows = {one.setting: reason_for(report.failed, setting_fields(one.setting.of("dense"))) for one in timed}
    return [f"{setting}: the dense engine could not be built: {row.why}" for setting, row in rows.items() if row]


def uncounted(report: BuildReport) -> list[str]:
    """Which operators were not counted, and in which graphs; graphs that lack the same are named together."""
    graphs: dict[str, list[str]] = {}
    for row in report.cost:
        if row.not_counted:
            graphs.setdefault(not_counted_text(row.not_counted), []).append(f"{row.model} {row.bucket}")
    return [f"{missing} in {', '.join(names)}" for missing, names in graphs.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A file that serves the MoD model: the engines of a target, or, with `target` None, the portable graphs.

    `found` is what was found for it on this machine, None when it did not run.
    """

    target: str | None
    artifact: Artifact
    state: State
    found: Found | None


def deployments(report: BuildReport) -> tuple[Deployment, ...]:
    """What to deploy: engines that ran here, then those built for other machines, then portable graphs."""
    passed = {row.artifact: row.passed for row in report.parity if row.model == "mod" and row.artifact is not None}
    # A portable graph is often the very file that ONNX Runtime runs: what was found for one holds for the other.
    by_bytes = {item.sha256: passed[item.path] for item in report.artifacts if item.path in passed}
    by_setting = {one.setting: one for role in get_args(Role) for one in settings_of(report, role)}
    states: dict[bool | None, State] = {True: "passed", False: "failed"}
    found = []
    for artifact in report.artifacts:
        if artifact.model != "mod" or artifact.kind == "weights" or (artifact.kind == "graph" and artifact.target):
            continue
        if artifact.kind == "engine":
            state = states.get(passed.get(artifact.path), "not run here")
            measured = None if state == "not run here" else by_setting.get(_setting(artifact))
        else:
            state, measured = states.get(by_bytes.get(artifact.sha256), "portable"), None
        found.append(Deployment(target=artifact.target, artifact=artifact, state=state, found=measured))
    order = {"passed": 0, "failed": 0, "not run here": 1, "portable": 2}
    return tuple(sorted(found, key=lambda item: (item.target is None, order[item.state], item.target or "")))


def _setting(engine: Artifact) -> Setting:
    bucket = Bucket.named(str(engine.bucket))
    role = engine.role or "forward"
    return Setting(target=str(engine.target), dtype=engine.dtype, model="mod", role=role, bucket=bucket)


def precisions(report: BuildReport) -> list[tuple[PrecisionRow, ParityRow | None]]:
    """Every engine of a narrower dtype, with its parity where it was judged."""
    judged = {row.setting: row for row in report.parity}
    return [(row, judged.get(row.setting)) for row in report.precision]


def chosen(report: BuildReport) -> list[Served]:
    """What is served of the MoD model where no target is named, as far as there was a choice."""
    return [row for row in report.served if row.model == "mod" and row.reason != ALONE]

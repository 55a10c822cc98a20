"""The first questions of a reader: verdict and gain of each setting, files to deploy, and targets that did not run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar, get_args

from mod_export.rows.base import PairRow, reason_for, setting_fields
from mod_export.rows.correctness import ErrorNumbers, InputAgreement, ParityRow, RoutingAgreement, worst_error
from mod_export.rows.cost import not_counted_text
from mod_export.rows.report import Artifact, BuildReport, Target
from mod_export.rows.speed import (
    ALONE,
    Compared,
    DecodeRow,
    FirstTokenRow,
    GenerationReport,
    LatencyRow,
    PrecisionRow,
    ServedEngines,
    SpeedupRow,
    TextsRow,
)
from mod_export.types import KINDS, Bucket, ModelKind, Role, Setting, having

State = Literal["passed", "failed", "not judged", "portable"]
Row = TypeVar("Row", bound=PairRow)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingResults:
    """All results of one setting, named after the MoD engine; results that were not measured are None or empty."""

    setting: Setting
    rows: tuple[PairRow, ...]

    def of(self, row_type: type[Row]) -> list[Row]:
        """Returns the rows of one type."""
        return [row for row in self.rows if isinstance(row, row_type)]

    @property
    def speedup(self) -> SpeedupRow | None:
        """The speed-up on whole texts; None if there is none."""
        return next(iter(self.of(SpeedupRow)), None)

    @property
    def step(self) -> DecodeRow | None:
        """The times of decode steps; None if steps were not timed."""
        return next(iter(self.of(DecodeRow)), None)

    @property
    def speed(self) -> SpeedupRow | Compared | None:
        """The comparison with the dense baseline, of whole texts, steps or prompts; None if there is none."""
        return self.written.compared if self.written else self.speedup

    @property
    def written(self) -> DecodeRow | FirstTokenRow | None:
        """The times of an engine that writes text or reads a prompt; None for other engines or if it was not timed."""
        return next((row for row in self.rows if isinstance(row, DecodeRow | FirstTokenRow)), None)

    def latency(self, kind: ModelKind) -> LatencyRow | None:
        """Returns the latency of one of the two models; None if it was not measured."""
        return next((row for row in self.of(LatencyRow) if row.model == kind), None)

    def ms(self, kind: ModelKind) -> float | None:
        """Returns the milliseconds of one run: the median of whole rows and prompts, or the mean over steps."""
        if self.written is not None:
            return self.written.ms.get(kind)
        row = self.latency(kind)
        return row.p50_ms if row else None

    @property
    def parity_passed(self) -> bool | None:
        """Whether all parity rows passed, those of the dense baseline included; None if there are none."""
        rows = self.of(ParityRow)
        return all(row.passed for row in rows) if rows else None

    @property
    def routing(self) -> RoutingAgreement | None:
        """Selected tokens of the MoD engine, compared with the reference."""
        return next((row.routing for row in self.of(ParityRow) if row.model == "mod"), None)

    @property
    def error(self) -> ErrorNumbers | None:
        """Error of the worst output of both engines; NaN is the worst."""
        return worst_error(error for row in self.of(ParityRow) for error in row.errors)

    @property
    def texts(self) -> tuple[int, int]:
        """Number of texts of both models that equal those of PyTorch, and number of texts that were compared."""
        rows = self.of(TextsRow)
        return sum(row.identical for row in rows), sum(row.texts for row in rows)


def settings_of(report_or_rows: BuildReport | Iterable[PairRow], role: Role) -> tuple[SettingResults, ...]:
    """Returns every setting of a role that has a row, in the order in which they are first named."""
    grouped: dict[Setting, list[PairRow]] = {}
    for row in _rows(report_or_rows) if isinstance(report_or_rows, BuildReport) else report_or_rows:
        if row.role == role:
            grouped.setdefault(row.setting.of("mod"), []).append(row)
    return tuple(SettingResults(setting=setting, rows=tuple(rows)) for setting, rows in grouped.items())


def _rows(report: BuildReport) -> list[PairRow]:
    written = report.generation or GenerationReport()
    whole: list[PairRow] = [*report.parity, *report.latency, *report.speedup]
    return [*whole, *written.decode, *written.texts, *written.first_token]


def parity_rows(report: BuildReport, *, forward: bool) -> tuple[ParityRow, ...]:
    """Returns the parity rows of engines that read whole rows, or of engines that write text."""
    return tuple(row for row in report.parity if row.setting.writes_text is not forward)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gains:
    """The whole build in a few numbers."""

    slowest: float | None
    """Smallest speed-up, NaN if any is NaN; None if nothing was measured."""
    fastest: float | None
    routed: int
    """Number of selected tokens that were compared, over all settings."""
    agreed: int
    faults: int
    """Number of differences that are not near-ties."""
    by_input: tuple[InputAgreement, ...]
    """Selected tokens by kind of input, because inputs made of ties may differ where text does not."""
    max_abs: float | None
    """Largest error of an output, NaN if any is NaN; None if nothing was compared."""


def gains(report: BuildReport) -> Gains:
    """Sums up the results about whole texts on this machine."""
    measured = [row.measured for row in report.speedup]
    parity = parity_rows(report, forward=True)
    worst = worst_error(error for row in parity for error in row.errors)
    return Gains(
        slowest=min(measured, key=lambda ratio: (not math.isnan(ratio), ratio), default=None),
        fastest=max(measured, default=None),
        routed=sum(row.routing.routed for row in parity),
        agreed=sum(row.routing.agreed for row in parity),
        faults=sum(layer.faults for row in parity for layer in row.routing.layers),
        by_input=agreement_by_input(parity),
        max_abs=None if worst is None else worst.max_abs,
    )


def lacks_sites(rows: Sequence[ParityRow]) -> bool:
    """Whether the model ran and has no known routing site whose selection could be judged."""
    ran = [row for row in rows if row.model == "mod" and row.inputs]
    return bool(ran) and not any(row.routing.layers for row in ran)


def given_routing(rows: Sequence[ParityRow]) -> str:
    """Returns the condition under which errors are compared; empty if no model has routing sites."""
    return " given the same routing" if any(row.routing.layers for row in rows) else ""


def left_out_lines(rows: Sequence[ParityRow]) -> tuple[str, ...]:
    """Lists the rows that were not judged and the reasons; engines with the same line are named together."""
    settings_by_line: dict[str, list[str]] = {}
    for row in rows:
        for part in row.left_out:
            settings_by_line.setdefault(str(part), []).append(str(row.setting))
    return tuple(f"{', '.join(dict.fromkeys(settings))}: {line}" for line, settings in settings_by_line.items())


def agreement_by_input(rows: Sequence[ParityRow]) -> tuple[InputAgreement, ...]:
    """Returns the sums over all batches of each kind of input, in the order in which the kinds first occur."""
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
class GenerationVerdict:
    """Whether a model may generate text token by token.

    `causal` is None if causality was not tested. `engines` is the number of tested engines and `suffixes` the number of
    changed ends in all tests. `statements` are the different results of the tests, those that refute causality first.
    `decodes` says whether engines that read one token at a time were compared with PyTorch and all met their gates.
    """

    model: ModelKind
    causal: bool | None
    decodes: bool
    engines: int
    suffixes: int
    statements: tuple[str, ...]


def samplings(report: BuildReport) -> tuple[GenerationVerdict, ...]:
    """Returns for each model of the build whether it may generate text: it may if no tested engine of it looks ahead.

    Empty if the models do not read tokens.
    """
    if not report.model.reads_tokens:
        return ()
    listed = []
    for model in KINDS if report.not_compared is None else KINDS[:1]:
        rows = sorted((row for row in report.causality if row.model == model), key=lambda row: row.causal)
        probed = [row for row in rows if row.suffixes]
        decoded = [row.passed for row in having(report.parity, role="decode", model=model)]
        listed.append(
            GenerationVerdict(
                model=model,
                causal=all(row.causal for row in probed) if probed else None,
                decodes=bool(decoded) and all(decoded),
                engines=len(probed),
                suffixes=sum(row.suffixes for row in rows),
                statements=tuple(dict.fromkeys(row.statement for row in rows)),
            )
        )
    return tuple(listed)


def is_unjudged(report: BuildReport) -> bool:
    """Returns whether a folder was built without evidence, and is sound, but nothing was judged or timed since."""
    ran = {stage.name for stage in report.stages}
    sound = not report.failed and all(row.passed for row in report.structure)
    # Only a build without evidence has this stage.
    return sound and "structure" in ran and ran.isdisjoint(("validate", "benchmark"))


def untried_targets(report: BuildReport) -> dict[str, list[Target]]:
    """Returns the targets that did not run here: `built` if the build folder has engines for them, else `not built`."""
    engines = {artifact.target for artifact in report.artifacts if artifact.kind == "engine"}
    untried = [target for target in report.targets if not target.ran]
    by_state = {
        "built": [target for target in untried if target.target in engines],
        "not built": [target for target in untried if target.target not in engines],
    }
    return {state: targets for state, targets in by_state.items() if targets}


def uncompared(report: BuildReport) -> list[str]:
    """Says for a build with a dense baseline why settings in which the model was timed have no comparison."""
    if report.not_compared is not None:
        return []
    timed = [item for role in get_args(Role) for item in settings_of(report, role) if item.ms("mod") is not None]
    rows = {entry.setting: reason_for(report.failed, setting_fields(entry.setting.of("dense"))) for entry in timed}
    return [f"{setting}: the dense engine could not be built: {row.why}" for setting, row in rows.items() if row]


def uncounted(report: BuildReport) -> list[str]:
    """Lists the operators that were not counted, with their graphs. Graphs that lack the same operators are named
    together.
    """
    graphs: dict[str, list[str]] = {}
    for row in report.cost:
        if row.not_counted:
            graphs.setdefault(not_counted_text(row.not_counted), []).append(f"{row.model} {row.bucket}")
    return [f"{missing} in {', '.join(names)}" for missing, names in graphs.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingFile:
    """A file that serves the MoD model: an engine of a target, or a portable graph if `target` is None.

    `results` are those of its setting on this machine; None if it did not run.
    """

    target: str | None
    artifact: Artifact
    state: State
    results: SettingResults | None


def deployments(report: BuildReport) -> tuple[ServingFile, ...]:
    """Returns the files to deploy: engines that were judged here, other engines, then portable graphs."""
    passed = {row.artifact: row.passed for row in report.parity if row.model == "mod" and row.artifact is not None}
    # ONNX Runtime often runs the very bytes of the portable graph, so the engine's result holds for the graph too.
    by_bytes = {item.sha256: passed[item.path] for item in report.artifacts if item.path in passed}
    by_setting = {entry.setting: entry for role in get_args(Role) for entry in settings_of(report, role)}
    states: dict[bool | None, State] = {True: "passed", False: "failed"}
    listed = []
    for artifact in report.artifacts:
        if artifact.model != "mod" or artifact.kind == "weights" or (artifact.kind == "graph" and artifact.target):
            continue
        if artifact.kind == "engine":
            state = states.get(passed.get(artifact.path), "not judged")
            results = None if state == "not judged" else by_setting.get(_setting(artifact))
        else:
            state, results = states.get(by_bytes.get(artifact.sha256), "portable"), None
        listed.append(ServingFile(target=artifact.target, artifact=artifact, state=state, results=results))
    order = {"passed": 0, "failed": 0, "not judged": 1, "portable": 2}
    return tuple(sorted(listed, key=lambda item: (item.target is None, order[item.state], item.target or "")))


def _setting(engine: Artifact) -> Setting:
    bucket = Bucket.named(str(engine.bucket))
    role = engine.role or "forward"
    return Setting(target=str(engine.target), dtype=engine.dtype, model="mod", role=role, bucket=bucket)


class JudgedPrecision(NamedTuple):
    """An engine of a narrower dtype; `parity` is None if it was not judged."""

    row: PrecisionRow
    parity: ParityRow | None

    @property
    def setting(self) -> Setting:
        return self.row.setting


def precisions(precision: Iterable[PrecisionRow], parity: Iterable[ParityRow] = ()) -> list[JudgedPrecision]:
    """Returns every engine of a narrower dtype with its parity."""
    by_setting = {row.setting: row for row in parity}
    return [JudgedPrecision(row, by_setting.get(row.setting)) for row in precision]


def chosen(report: BuildReport) -> list[ServedEngines]:
    """Returns the engines of the MoD model that are served if no target is named, unless there was no choice."""
    return [row for row in report.served if row.model == "mod" and row.reason != ALONE]

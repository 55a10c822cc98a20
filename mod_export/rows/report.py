"""report.json, schema version 2: all results of one build, as the stages made them, and what they hold for.

A field is added freely; none is renamed or removed without a new `schema_version`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import JsonValue, ValidationError
from pydantic_core import from_json

from mod_export.errors import BuildFolderError
from mod_export.rows.base import Result
from mod_export.rows.cost import CostRow, PartRow, Roofline
from mod_export.rows.failures import FailedRow
from mod_export.rows.generation import GenerationReport
from mod_export.rows.latency import LatencyRow, PrecisionRow, SpeedupRow
from mod_export.rows.parity import ParityRow
from mod_export.rows.serving import Served
from mod_export.rows.structure import CausalityRow, RoutingMap, StructureRow
from mod_export.types import DType, ModelKind, Role

SCHEMA_VERSION = 2
SHOWN_PROBLEMS = 5


class Verdict(Result):
    """The outcome of all gates."""

    status: Literal["pass", "fail"]
    """`pass` when every gate was met."""
    reasons: tuple[str, ...]
    """What missed its gate, could not be judged, or could not be built; empty exactly when the status is `pass`."""


class ReportedModel(Result):
    """What was built."""

    name: str
    """Name of the checkpoint."""
    architecture: str
    """Entry point that read it."""
    parameters: int
    """Number of weights."""
    checkpoint_sha256: str
    """Of the checkpoint's bytes."""
    spec: dict[str, JsonValue]
    """Everything about the model that is not a weight."""
    reads_tokens: bool = True
    """Whether it reads token ids and answers for each of them, or for the last one: only then can it write text."""


class Stage(Result):
    """One stage of the pipeline."""

    name: str
    """Such as capture, onnx, passes, engines, validate."""
    status: Literal["built", "reused", "failed"]
    """`reused`: nothing that it depends on has changed."""
    seconds: float
    """Wall time."""
    peak_rss_bytes: int | None
    """Largest memory of the process so far."""
    failed: int = 0
    """How many rows of `failed` are of this stage."""


class Artifact(Result):
    """One file of the build folder."""

    path: str
    """Relative to the build folder."""
    kind: Literal["graph", "weights", "engine"]
    """What it is."""
    target: str | None
    """Null for portable files."""
    model: ModelKind | None
    """Null for files that serve both models."""
    bucket: str | None
    """Null for files that serve all buckets."""
    dtype: DType
    """Of the weights or of the engine."""
    bytes: int
    """Size."""
    sha256: str
    """Of the bytes."""
    role: Role | None
    """`forward` reads whole texts, `prefill` and `decode` write them; null for weights."""


class Target(Result):
    """What this machine can do with a target."""

    target: str
    """The engine family."""
    available: bool
    """Whether it can be built here."""
    reason: str
    """What was found, or what is missing."""
    ran: bool
    """Executed here, not only built."""


class BuildReport(Result):
    """The whole report."""

    schema_version: Literal[2] = 2
    """2"""
    command: str | None = None
    """What was typed to build, or the call of Python; null where nothing was."""
    rebuild: str | None = None
    """What builds the same from the same files, or objects, with `config` as config.toml."""
    capacity: float | None = None
    """Of every routed layer, where it was given in place of the checkpoint's own (`--capacity`)."""
    verdict: Verdict
    """The outcome of all gates."""
    not_compared: str | None = None
    """Why there is no speed-up, and how to get one; null where the build has a dense baseline."""
    unfollowed: tuple[str, ...] = ()
    """Where no routing site was found in a captured model: each top-k and sort of it, and where its indices go."""
    model: ReportedModel
    """What was built."""
    environment: dict[str, JsonValue]
    """Versions, CPU, GPU, threads and load of the machine."""
    config: dict[str, JsonValue]
    """The resolved configuration."""
    stages: tuple[Stage, ...]
    """In the order they ran."""
    artifacts: tuple[Artifact, ...]
    """Every graph, weights file and engine."""
    targets: tuple[Target, ...]
    """Every known target. One that was built but could not run here has no parity, latency or speed-up row."""
    parity: tuple[ParityRow, ...]
    """Of every engine that ran here, in every role, and of every graph that no engine stands for."""
    latency: tuple[LatencyRow, ...]
    """Two rows, MoD and dense, for each setting that ran here; one where there is no dense baseline."""
    speedup: tuple[SpeedupRow, ...]
    """One for each setting that ran here; none where there is no dense baseline."""
    cost: tuple[CostRow, ...]
    """Of every portable graph."""
    served: tuple[Served, ...] = ()
    """What `load` and `load_generator` take where no target is named, of each model."""
    precision: tuple[PrecisionRow, ...] = ()
    """Narrower dtypes beside float32."""
    structure: tuple[StructureRow, ...] = ()
    """One or more for each file."""
    causality: tuple[CausalityRow, ...] = ()
    """Of every forward engine that ran here."""
    routing_maps: tuple[RoutingMap, ...] = ()
    """One for each bucket that a person can read."""
    roofline: tuple[Roofline, ...] = ()
    """One for each dtype that was profiled."""
    parts: tuple[PartRow, ...] = ()
    """Every part of every engine that was profiled."""
    generation: GenerationReport | None = None
    """Writing text; null where the model does not read tokens."""
    failed: tuple[FailedRow, ...] = ()
    """What was wanted and could not be built, judged or timed; everything else was."""

    def __repr__(self) -> str:
        """One line: in a notebook, the whole of it is too much to read."""
        reasons = "".join(f"; {reason}" for reason in self.verdict.reasons)
        ran = ", ".join(sorted({row.target for row in self.latency})) or "none"
        return f"<BuildReport of {self.model.name}: {self.verdict.status}, measured: {ran}{reasons}>"

    __str__ = __repr__

    def to_json(self) -> str:
        """report.json, indented, with a newline at its end; `report_from_json` reads it back to an equal value."""
        return self.model_dump_json(indent=2) + "\n"


def report_from_json(text: str, where: str = "report.json") -> BuildReport:
    """Reads a report; `where` is what messages call it.

    Raises:
        BuildFolderError: damaged, of another schema version, or not a report.
    """
    try:
        data: Any = from_json(text)
    except ValueError as error:
        raise BuildFolderError(f"{where}: damaged: not valid JSON ({error}); build again") from error
    if not isinstance(data, dict) or "schema_version" not in data:
        raise BuildFolderError(f"{where}: not a report of mod-export: schema_version is missing; build again")
    version = data["schema_version"]
    if version != SCHEMA_VERSION:
        raise BuildFolderError(
            f"{where}: schema_version {version!r}, this mod-export reads {SCHEMA_VERSION}; "
            "read it with the mod-export that wrote it, or build again"
        )
    try:
        return BuildReport.model_validate_json(text)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        shown = "; ".join(problems[:SHOWN_PROBLEMS])
        more = f"; and {len(problems) - SHOWN_PROBLEMS} more" if len(problems) > SHOWN_PROBLEMS else ""
        raise BuildFolderError(
            f"{where}: damaged, or written by another version: {shown}{more}; build again"
        ) from error

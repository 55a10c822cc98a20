"""report.json, schema version 2: all results of one build, as the stages made them, and their conditions.

Fields may be added at any time. Removing or renaming a field needs a new `schema_version`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field, JsonValue, ValidationError
from pydantic_core import from_json

from mod_export.errors import BuildFolderError
from mod_export.rows.base import FailedRow, Result
from mod_export.rows.correctness import CausalityRow, ParityRow, RoutingMap, StructureRow
from mod_export.rows.cost import CostRow, PartRow, Roofline
from mod_export.rows.speed import GenerationReport, LatencyRow, NamedText, PrecisionRow, ServedEngines, SpeedupRow
from mod_export.types import DType, ModelKind, Role

SCHEMA_VERSION = 2
SHOWN_PROBLEMS = 5


class Verdict(Result):
    """The outcome of all gates."""

    status: Literal["pass", "fail"]
    """`pass` if every gate was met."""
    reasons: tuple[str, ...]
    """Gates that were missed, and what could not be judged or built; empty exactly if the status is `pass`."""


class ReportedModel(Result):
    """The model that was built."""

    name: str
    """Name of the model, from its file or module."""
    architecture: str
    """Name of the architecture (entry point) that read the checkpoint, or `program` for a captured module."""
    parameters: int
    """Number of weights."""
    checkpoint_sha256: str
    """SHA-256 of the checkpoint's bytes."""
    spec: dict[str, JsonValue]
    """Everything about the model except its weights."""
    reads_tokens: bool = True
    """Whether the model reads token ids and returns a result for each token or for the last one. Only then can it write
    text."""


class Stage(Result):
    """One stage of the pipeline."""

    name: str
    """Name of the stage, such as capture, onnx, passes, engines, validate."""
    status: Literal["built", "reused", "failed"]
    """`reused`: nothing that the stage depends on has changed."""
    seconds: float
    """Wall time."""
    peak_rss_bytes: int | None
    """Largest resident memory of the process during the stage; null if the operating system does not report it."""
    failed: int = 0
    """Number of rows that this stage added to `failed`."""


class Artifact(Result):
    """One file of the build folder."""

    path: str
    """Path relative to the build folder."""
    kind: Literal["graph", "weights", "engine"]
    """Kind of file: ONNX graph, weights file or engine."""
    target: str | None
    """Target of the file; null for portable files."""
    model: ModelKind | None
    """Model of the file; null for files that serve both models."""
    bucket: str | None
    """Bucket of the file; null for files that serve all buckets."""
    dtype: DType
    """Dtype of the weights or of the engine."""
    bytes: int
    """Size."""
    sha256: str
    """SHA-256 of the file."""
    role: Role | None
    """`forward` reads whole rows, `prefill` and `decode` write text; null for weights."""


class Target(Result):
    """What this machine can do with one target."""

    target: str
    """Engine family."""
    available: bool
    """Whether this machine can build engines of the target."""
    reason: str
    """Library or device that was found, or the reason why engines cannot be built or were not built."""
    ran: bool
    """Whether engines of the target were judged or timed, not only built."""


class BuildReport(Result):
    """The whole report."""

    schema_version: Literal[2] = 2
    """Always 2."""
    command: str | None = None
    """The command of the build as typed, or the call in Python; null if there was neither."""
    rebuild: str | None = None
    """The command or call that builds the same from the same files or objects, with `config` saved as config.toml."""
    capacity: float | None = None
    """Capacity of every routed layer, if one was given in place of the checkpoint's own (`--capacity`)."""
    text: NamedText | None = None
    """The file of text that the user named (`--text`) to judge and to time on."""
    verdict: Verdict
    """The outcome of all gates."""
    not_compared: str | None = None
    """Why there is no speed-up, and how to get one; null if the build has a dense baseline."""
    unfollowed: tuple[str, ...] = ()
    """Each top-k and sort of a captured model in which no routing site was found, and where its indices go."""
    model: ReportedModel
    """The model that was built."""
    environment: dict[str, JsonValue]
    """Versions, CPU, GPU, usable cores, threads and load of the machine that all times were taken on. A folder that was
    built without evidence has its builder's until `bench` adds times; what `validate` adds may come from others."""
    config: dict[str, JsonValue]
    """The resolved configuration."""
    stages: tuple[Stage, ...]
    """The stages in the order in which they ran. Every later run that completes a folder adds one."""
    artifacts: tuple[Artifact, ...]
    """Every graph, weights file and engine."""
    targets: tuple[Target, ...]
    """Every known target. A target that was built but could not run here has no parity, latency or speed-up row."""
    parity: tuple[ParityRow, ...]
    """One row for every engine that ran here, in every role, and for every graph that ran in place of an engine."""
    latency: tuple[LatencyRow, ...]
    """Two rows, MoD and dense, for each setting of whole rows that ran here; one row if there is no dense baseline."""
    speedup: tuple[SpeedupRow, ...]
    """One row for each setting of whole rows that ran here; none if there is no dense baseline."""
    cost: tuple[CostRow, ...]
    """One row for every portable graph of whole rows."""
    served: tuple[ServedEngines, ...] = ()
    """The engines of each model that `load` and `load_generator` choose if no target is named."""
    precision: tuple[PrecisionRow, ...] = ()
    """One row for each engine of a narrower dtype that was compared with float32."""
    structure: tuple[StructureRow, ...] = ()
    """One or more rows for each file."""
    causality: tuple[CausalityRow, ...] = ()
    """One row for every forward engine that ran here."""
    routing_maps: tuple[RoutingMap, ...] = ()
    """One map for each bucket that is short enough to be read."""
    roofline: tuple[Roofline, ...] = ()
    """One row for each dtype whose roofline was measured."""
    parts: tuple[PartRow, ...] = ()
    """One row for every part of every engine that can be profiled and has a roofline for its dtype."""
    generation: GenerationReport | None = None
    """Results about writing text; null if the model does not read tokens."""
    failed: tuple[FailedRow, ...] = ()
    """Everything that was requested and could not be built, judged or timed."""
    not_run: dict[str, str] = Field(default_factory=dict)
    """Path of each graph that no machine so far had the memory to judge in place of an engine -> a sentence that says
    why. No gate depends on it."""

    def __repr__(self) -> str:
        """Returns one line, because the whole report is too much to read in a notebook."""
        reasons = "".join(f"; {reason}" for reason in self.verdict.reasons)
        ran = ", ".join(sorted({row.target for row in self.latency})) or "none"
        return f"<BuildReport of {self.model.name}: {self.verdict.status}, measured: {ran}{reasons}>"

    __str__ = __repr__

    def to_json(self) -> str:
        """Returns report.json, indented, with a newline at its end. `report_from_json` reads back an equal value."""
        return self.model_dump_json(indent=2) + "\n"


def targets_that_ran(
    parity: Iterable[ParityRow], latency: Iterable[LatencyRow], generation: GenerationReport | None
) -> set[str]:
    """Returns the targets of which something was judged or timed."""
    texts = () if generation is None else (*generation.decode, *generation.first_token)
    return {row.target for row in (*parity, *latency, *texts)}


def report_from_json(text: str, where: str = "report.json") -> BuildReport:
    """Reads a report; messages call it `where`.

    Raises:
        BuildFolderError: the text is damaged, has another schema version, or is not a report.
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
        first_problems = "; ".join(problems[:SHOWN_PROBLEMS])
        more = f"; and {len(problems) - SHOWN_PROBLEMS} more" if len(problems) > SHOWN_PROBLEMS else ""
        raise BuildFolderError(
            f"{where}: damaged, or written by another version: {first_problems}{more}; build again"
        ) from error

"""report.json, schema version 1: what users script against.

A field is added freely; none is renamed or removed without a new `schema_version`. Numbers that are not finite are
written as the strings "NaN", "Infinity" and "-Infinity", because JSON has no other way; Python's float() reads them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import JsonValue, ValidationError
from pydantic_core import from_json

from mod_export.artifacts import DType, ModelKind, Role
from mod_export.errors import BuildFolderError
from mod_export.report.cost_entries import CostEntry, PartEntry, RooflineEntry
from mod_export.report.entry import Entry
from mod_export.report.generation_entries import GenerationEntry
from mod_export.report.latency_entries import LatencyEntry, PrecisionEntry, SpeedupEntry
from mod_export.report.parity_entries import CausalityEntry, ParityEntry, RoutingMap, StructureEntry

__all__ = [
    "SCHEMA_VERSION",
    "Artifact",
    "BuildReport",
    "ModelEntry",
    "Stage",
    "Target",
    "VerdictEntry",
    "report_from_json",
]

SCHEMA_VERSION = 1
SHOWN_PROBLEMS = 5


class VerdictEntry(Entry):
    """The outcome of all gates; `reasons` is empty exactly when the status is `pass`."""

    status: Literal["pass", "fail"]
    reasons: tuple[str, ...]


class ModelEntry(Entry):
    """What was built: the checkpoint is identified by its hash, its spec is plain data."""

    name: str
    architecture: str
    parameters: int
    checkpoint_sha256: str
    spec: dict[str, JsonValue]


class Stage(Entry):
    """One stage of the pipeline, in the order in which they ran."""

    name: str
    status: Literal["built", "reused", "failed"]
    seconds: float
    peak_rss_bytes: int | None


class Artifact(Entry):
    """One file of the build folder. `target` is None for portable files; `model` and `bucket` for files that serve
    several of them. `role`: `forward` reads whole texts, `prefill` and `decode` write them; None for weights.
    """

    path: str
    kind: Literal["graph", "weights", "engine"]
    target: str | None
    model: ModelKind | None
    bucket: str | None
    dtype: DType
    bytes: int
    sha256: str
    role: Role | None = None


class Target(Entry):
    """What this machine can do with a target. `ran`: executed here, not only built."""

    target: str
    available: bool
    reason: str
    ran: bool


class BuildReport(Entry):
    """The whole report.

    Rows may be given as dicts or as the dataclasses that they come from:
    `BuildReport.model_validate({"schema_version": 1, "verdict": verdict, ..., "latency": latency_rows, ...})`

    `command` is what was typed, for whoever wants to repeat it; None where nothing was typed.
    `capacity` is the one that took the place of the checkpoint's own; None where none did.
    """

    schema_version: Literal[1]
    command: str | None = None
    capacity: float | None = None
    verdict: VerdictEntry
    model: ModelEntry
    environment: dict[str, JsonValue]
    config: dict[str, JsonValue]
    stages: tuple[Stage, ...]
    artifacts: tuple[Artifact, ...]
    targets: tuple[Target, ...]
    parity: tuple[ParityEntry, ...]
    latency: tuple[LatencyEntry, ...]
    speedup: tuple[SpeedupEntry, ...]
    cost: tuple[CostEntry, ...]
    precision: tuple[PrecisionEntry, ...] = ()
    structure: tuple[StructureEntry, ...] = ()
    causality: tuple[CausalityEntry, ...] = ()
    routing_maps: tuple[RoutingMap, ...] = ()
    roofline: tuple[RooflineEntry, ...] = ()
    parts: tuple[PartEntry, ...] = ()
    generation: GenerationEntry | None = None

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

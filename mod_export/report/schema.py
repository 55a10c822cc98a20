"""report.json, schema version 1: what users script against.

A field is added freely; none is renamed or removed without a new `schema_version`. Numbers that are not finite are
written as the strings "NaN", "Infinity" and "-Infinity", because JSON has no other way; Python's float() reads them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError
from pydantic_core import from_json

from mod_export.artifacts import DType, ModelKind
from mod_export.errors import BuildFolderError

__all__ = [
    "SCHEMA_VERSION",
    "Artifact",
    "BuildReport",
    "CostEntry",
    "ErrorNumbers",
    "Gate",
    "InputAgreement",
    "LatencyEntry",
    "LayerAgreement",
    "ModelEntry",
    "ParityEntry",
    "RoutingAgreement",
    "SpeedupEntry",
    "Stage",
    "Target",
    "VerdictEntry",
    "report_from_json",
]

SCHEMA_VERSION = 1
SHOWN_PROBLEMS = 5


class _Entry(BaseModel):
    # from_attributes: rows of measure/ and validate/ are frozen dataclasses with the same field names.
    model_config = ConfigDict(frozen=True, extra="forbid", from_attributes=True, ser_json_inf_nan="strings")


class VerdictEntry(_Entry):
    """The outcome of all gates; `reasons` is empty exactly when the status is `pass`."""

    status: Literal["pass", "fail"]
    reasons: tuple[str, ...]


class ModelEntry(_Entry):
    """What was built: the checkpoint is identified by its hash, its spec is plain data."""

    name: str
    architecture: str
    parameters: int
    checkpoint_sha256: str
    spec: dict[str, JsonValue]


class Stage(_Entry):
    """One stage of the pipeline, in the order in which they ran."""

    name: str
    status: Literal["built", "reused", "failed"]
    seconds: float
    peak_rss_bytes: int | None


class Artifact(_Entry):
    """One file of the build folder. `target` is None for portable files; `model` and `bucket` for files that serve
    several of them.
    """

    path: str
    kind: Literal["graph", "weights", "engine"]
    target: str | None
    model: ModelKind | None
    bucket: str | None
    dtype: DType
    bytes: int
    sha256: str


class Target(_Entry):
    """What this machine can do with a target. `ran`: executed here, not only built."""

    target: str
    available: bool
    reason: str
    ran: bool


class LayerAgreement(_Entry):
    """Which tokens one routed layer took, against the reference, over all inputs.

    `near_ties` of the differing tokens lie within the gate's distance of the k-th score, `faults` do not. `min_margin`
    is the smallest distance between the scores at rank k and k + 1, None where there is no rank k + 1.
    """

    layer: int
    k: int
    routed: int
    agreed: int
    near_ties: int
    faults: int
    min_margin: float | None


class InputAgreement(_Entry):
    """Routed tokens over all layers on one batch of inputs of one kind."""

    input: str
    routed: int
    agreed: int


class RoutingAgreement(_Entry):
    """The sums over the layers, each layer, and each batch of inputs."""

    layers: tuple[LayerAgreement, ...]
    routed: int
    agreed: int
    near_ties: int
    min_margin: float | None
    by_input: tuple[InputAgreement, ...] = ()


class ErrorNumbers(_Entry):
    """Differences of the logits of real tokens, given the same routing."""

    max_abs: float
    mean_abs: float
    max_rel: float


class Gate(_Entry):
    """What the configuration demands for this dtype."""

    max_abs: float
    near_tie: float
    next_token_agreement: float


class ParityEntry(_Entry):
    """One engine against eager float32 PyTorch of the same model. `inputs` names the kinds of input; the routing of a
    dense engine has no layers.
    """

    target: str
    bucket: str
    dtype: DType
    model: ModelKind
    reference: str
    inputs: tuple[str, ...]
    routing: RoutingAgreement
    error: ErrorNumbers
    next_token_agreement: float
    gate: Gate
    passed: bool
    reasons: tuple[str, ...]


class LatencyEntry(_Entry):
    """`measure.latency.LatencyRow`."""

    target: str
    bucket: str
    dtype: DType
    model: ModelKind
    providers: tuple[str, ...]
    threads: int
    warmup: int
    samples_ms: tuple[float, ...]
    p50_ms: float
    p90_ms: float
    p99_ms: float
    mean_ms: float
    stdev_ms: float


class SpeedupEntry(_Entry):
    """`measure.statistics.SpeedupRow`. `gate` and `passed` are None where no gate applies."""

    target: str
    bucket: str
    dtype: DType
    measured: float
    ci95: tuple[float, float]
    predicted_flops: float
    efficiency: float
    gate: float | None
    passed: bool | None


class CostEntry(_Entry):
    """`measure.cost.CostRow`."""

    model: ModelKind
    bucket: str
    flops: int
    flops_by_part: dict[str, int]
    weight_bytes: int
    activation_bytes: int
    kv_bytes: int


class BuildReport(_Entry):
    """The whole report.

    Rows may be given as dicts or as the dataclasses that they come from:
    `BuildReport.model_validate({"schema_version": 1, "verdict": verdict, ..., "latency": latency_rows, ...})`

    `command` is what was typed, for whoever wants to repeat it; None where nothing was typed.
    """

    schema_version: Literal[1]
    command: str | None = None
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

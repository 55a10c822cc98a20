"""sweep.json, schema version 1: every cell with its numbers, and what follows from them.

A field is added freely; none is renamed or removed without a new `schema_version`. Latencies are milliseconds of one
run over a whole bucket. Numbers that are not finite are written as strings, as in report.json.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, JsonValue

from mod_export.rows.base import Result
from mod_export.rows.latency import SpeedupRow
from mod_export.rows.parity import TextQuality
from mod_export.rows.report import ReportedModel
from mod_export.types import DType, Site, site_from_text

SCHEMA_VERSION = 1
SiteKey = Annotated[Site, BeforeValidator(lambda site: site_from_text(site) if isinstance(site, str) else site)]
"""JSON has no numbers for keys."""


class Quality(Result):
    """Perplexity of eager PyTorch on held-out text, in rows of the cell's length."""

    tokens: int
    """Predicted tokens."""
    perplexity: float
    """Of the MoD model."""
    dense_perplexity: float
    """Of the dense baseline, which was never trained to run that way: it is no baseline of quality."""


class Measured(Result):
    """What was measured of one dtype of a cell."""

    dtype: DType
    """Of the engines' weights."""
    providers: tuple[str, ...]
    """What the MoD engine really ran on."""
    threads: int
    """CPU threads that it was given; 0 is the library's choice."""
    dense_ms: float
    """Median latency of the dense baseline."""
    mod_ms: float
    """Median latency of MoD."""
    speedup: SpeedupRow
    """Their ratio, as in report.json."""
    text: TextQuality | None
    """Perplexity of the engine and of eager PyTorch on the texts of the parity check; null where it is not known."""


class CellKey(Result):
    """Which cell of the grid, and what its numbers depend on."""

    name: str
    """As in file names."""
    capacity: float | None
    """Share of a row's tokens, or number of tokens; null for the checkpoint's own schedule of layers."""
    batch: int
    """Rows of the bucket."""
    seq: int
    """Tokens of a row."""
    target: str
    """The engine family."""
    folder: str
    """The build folder: relative to the sweep's, or a path on `node`."""
    fingerprint: str
    """Of everything that the numbers depend on but the machine; a cell is reused while it stays the same."""


class CellEntry(CellKey):
    """One cell of the grid."""

    k_by_layer: dict[SiteKey, int]
    """Slots of each routed layer."""
    k: int | None = None
    """Slots of every routed layer; null where they differ, or where the cell failed before that was known."""
    status: Literal["measured", "failed"]
    """`failed` where the cell could not be built."""
    complete: bool = True
    """Whether nothing failed beside what was measured, such as one of two dtypes; what failed is tried again."""
    passed: bool
    """Whether every gate was met; the speed-up gate is off in a sweep."""
    reasons: tuple[str, ...] = ()
    """Of gates that were not met."""
    exit_code: int
    """Of a build of this cell: 0, 4 for gates, otherwise that of its error, negative for a signal."""
    error: str | None = None
    """Why it could not be built."""
    quality: Quality | None = None
    """Null where no held-out text is known for the model's vocabulary."""
    measured: tuple[Measured, ...] = ()
    """One for each dtype; empty where nothing ran."""
    seconds: float = 0.0
    """Wall time of the cell's process."""
    machine: str
    """CPU, cores and GPU that it ran on."""
    node: str | None = None
    """Of the Ray cluster; null where the cell ran on the machine of the sweep."""
    report_sha256: str | None = None
    """Of its report.json."""

    @property
    def failed(self) -> bool:
        """Whether it could not be built."""
        return self.status == "failed"

    @property
    def missed(self) -> bool:
        """Whether it was built and misses a gate."""
        return not self.failed and not self.passed


class Finding(Result):
    """What the cells that are compared with each other have in common."""

    target: str
    """The engine family."""
    dtype: DType
    """Of the engines' weights."""
    machine: str
    """CPU, cores and GPU."""
    batch: int
    """Rows of the bucket."""


class CapacityBreakEven(Finding):
    """Up to which capacity MoD is faster than dense at one length.

    Faster means that the 95 % interval of the speed-up lies above 1, for this capacity and every smaller one tried.
    """

    seq: int
    """Tokens of a row."""
    largest_capacity: float | None
    """Null where MoD is faster at no capacity of the grid."""
    largest_k: int | None
    """Slots of a routed layer at that capacity."""
    tried: tuple[float, ...]
    """All capacities of the grid, ascending."""


class LengthBreakEven(Finding):
    """From which length on MoD is faster than dense at one capacity.

    Faster means that the 95 % interval of the speed-up lies above 1, for this length and every longer one tried.
    """

    capacity: float | None
    """Null for the checkpoint's own schedule of layers."""
    smallest_seq: int | None
    """Null where MoD is faster at no length of the grid."""
    tried: tuple[int, ...]
    """All lengths of the grid, ascending."""


class StairStep(Result):
    """Values of k whose latency is the same within the intervals. Latencies are scaled as in `Stair`."""

    k: tuple[int, ...]
    """Slots of a routed layer, ascending."""
    capacity: tuple[float, ...]
    """Of each k."""
    ms: tuple[float, ...]
    """Latency of MoD at each k."""
    ci95_ms: tuple[tuple[float, float], ...]
    """95 % interval of each latency."""
    advised_k: int
    """The largest k of the step: it costs no more than the smallest."""
    advised_capacity: float
    """Of that k."""


class Stair(Finding):
    """Latency of MoD over k in one setting, in steps of values that cost the same.

    Cells run minutes apart. The dense baseline is the same engine in all of them, so its medians show how much the
    machine changed, and latencies are dense_ms / speed-up with the median of them.
    """

    seq: int
    """Tokens of a row."""
    dense_ms: float
    """Median over the cells of the dense baseline's median latency."""
    drift: float
    """Largest / smallest of these medians - 1."""
    steps: tuple[StairStep, ...]
    """Ascending in k."""


class FrontPoint(Result):
    """One capacity: latency, scaled as in `Stair`, against perplexity."""

    capacity: float | None
    """Null for the checkpoint's own schedule of layers."""
    k: int | None
    """Slots of a routed layer; null where they differ."""
    ms: float
    """Latency of MoD."""
    speedup: float
    """Over the dense baseline."""
    perplexity: float
    """Of eager PyTorch on held-out text."""
    on_front: bool
    """Whether no other capacity is both faster and better."""


class Front(Finding):
    """Speed against quality in one setting, beside the dense baseline."""

    seq: int
    """Tokens of a row."""
    dense_ms: float
    """Latency of the dense baseline, as in `Stair`."""
    dense_perplexity: float
    """Of the dense baseline, which is no baseline of quality."""
    tokens: int
    """Predicted tokens of each perplexity."""
    points: tuple[FrontPoint, ...]
    """Fastest first."""


class Findings(Result):
    """What follows from the cells that were measured and met their gates."""

    break_even_capacity: tuple[CapacityBreakEven, ...]
    """One for each length."""
    break_even_length: tuple[LengthBreakEven, ...]
    """One for each capacity."""
    stairs: tuple[Stair, ...]
    """One for each setting with two values of k or more."""
    fronts: tuple[Front, ...]
    """One for each setting with held-out text and two capacities or more."""
    notes: tuple[str, ...]
    """What to keep in mind: cells that were left out, machines that differ, drift."""


class SweepModel(ReportedModel):
    """The checkpoint."""

    capacity: float | None
    """Its own; null where its layers differ."""


class SweepReport(Result):
    """The whole sweep."""

    schema_version: Literal[1]
    """Of sweep.json."""
    command: str
    """As typed."""
    model: SweepModel
    """What was swept."""
    environment: dict[str, JsonValue]
    """The machine that the sweep was started on."""
    config: dict[str, JsonValue]
    """What every cell started from."""
    planned: int
    """Cells of the grid: an interrupted sweep has fewer in `cells`."""
    cells: tuple[CellEntry, ...]
    """By target, batch, length and capacity."""
    findings: Findings
    """What follows."""

    def to_json(self) -> str:
        """sweep.json, indented, with a newline at its end."""
        return self.model_dump_json(indent=2) + "\n"

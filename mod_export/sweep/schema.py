"""sweep.json, schema version 1: every cell with its numbers, and the findings.

Fields may be added at any time, but are only renamed or removed with a new `schema_version`. Latencies are milliseconds
of one run over a whole bucket. Numbers that are not finite are written as strings, as in report.json.
"""

from __future__ import annotations

from typing import Literal

from pydantic import JsonValue

from mod_export.rows.base import Result
from mod_export.rows.correctness import TextQuality
from mod_export.rows.report import ReportedModel
from mod_export.rows.speed import SpeedupRow
from mod_export.types import DType, SiteKey

SCHEMA_VERSION = 1


class Quality(Result):
    """Perplexity of eager PyTorch on held-out text, in rows of the cell's length."""

    tokens: int
    """Number of predicted tokens."""
    perplexity: float
    """Perplexity of the MoD model."""
    dense_perplexity: float
    """Perplexity of the dense baseline. It was never trained to run this way, so it is no baseline of quality."""


class Measured(Result):
    """Measurements of one dtype of a cell."""

    dtype: DType
    """Dtype of the engines' weights."""
    providers: tuple[str, ...]
    """Execution providers that the MoD engine really ran on."""
    threads: int
    """Number of CPU threads that it was given; 0 leaves the choice to the library."""
    dense_ms: float
    """Median latency of the dense baseline."""
    mod_ms: float
    """Median latency of MoD."""
    speedup: SpeedupRow
    """Ratio of the latencies, as in report.json."""
    text: TextQuality | None
    """Perplexity of the engine and of eager PyTorch on the texts of the parity check; null if unknown."""


class CellKey(Result):
    """Identifies a cell of the grid, and what its numbers depend on."""

    name: str
    """Name in file names."""
    capacity: float | None
    """Share of a row's tokens, or number of tokens; null for the checkpoint's own schedule per layer."""
    batch: int
    """Number of rows of the bucket."""
    seq: int
    """Number of tokens of a row."""
    target: str
    """The engine family."""
    folder: str
    """The build folder: relative to the sweep's, or a path on `node`."""
    fingerprint: str
    """Hash of everything that the numbers depend on, except the machine. A cell is reused while it is unchanged."""


class CellEntry(CellKey):
    """One cell of the grid."""

    k_by_layer: dict[SiteKey, int]
    """Number of slots of each routed layer."""
    k: int | None = None
    """Number of slots of every routed layer; null if they differ, or if the cell failed before k was known."""
    status: Literal["measured", "failed"]
    """`failed` if the cell could not be built."""
    complete: bool = True
    """Whether all parts were measured; false if, for example, one of two dtypes failed. The cell is then run again."""
    passed: bool
    """Whether every gate was met; the speed-up gate is off in a sweep."""
    reasons: tuple[str, ...] = ()
    """Reasons why gates were missed."""
    exit_code: int
    """Exit code of the build: 0, 4 for missed gates, otherwise that of its error, or negative for a signal."""
    error: str | None = None
    """Why the cell could not be built."""
    quality: Quality | None = None
    """Perplexity; null if no held-out text is known for the model's vocabulary."""
    measured: tuple[Measured, ...] = ()
    """One entry for each dtype; empty if nothing ran."""
    seconds: float = 0.0
    """Wall time of the cell's process."""
    machine: str
    """CPU, cores and GPU of the machine that ran the cell."""
    node: str | None = None
    """Host name of the Ray node that ran the cell; null in a sweep without a Ray cluster."""
    report_sha256: str | None = None
    """Hash of its report.json."""

    @property
    def failed(self) -> bool:
        """Whether the cell could not be built."""
        return self.status == "failed"

    @property
    def missed(self) -> bool:
        """Whether the cell was built but missed a gate."""
        return not self.failed and not self.passed


class Finding(Result):
    """Fields that are equal for all cells of a finding."""

    target: str
    """The engine family."""
    dtype: DType
    """Dtype of the engines' weights."""
    machine: str
    """CPU, cores and GPU."""
    batch: int
    """Number of rows of the bucket."""


class CapacityBreakEven(Finding):
    """The largest capacity at which MoD is faster than dense, for one length.

    Faster means that the verdict on the speed-up is `faster`, for this capacity and every smaller one tried. A cell
    that was not measured, that missed a gate, or whose control misses 1 does not count as faster.
    """

    seq: int
    """Number of tokens of a row."""
    largest_capacity: float | None
    """This capacity; null if there is none in the grid."""
    largest_k: int | None
    """Number of slots of a routed layer at this capacity."""
    tried: tuple[float, ...]
    """All capacities of the grid, ascending, except those that another machine measured."""


class LengthBreakEven(Finding):
    """The smallest length at which MoD is faster than dense, for one capacity.

    Faster means that the verdict on the speed-up is `faster`, for this length and every longer one tried. A cell that
    was not measured, that missed a gate, or whose control misses 1 does not count as faster.
    """

    capacity: float | None
    """The capacity; null for the checkpoint's own schedule per layer."""
    smallest_seq: int | None
    """This length; null if there is none in the grid."""
    tried: tuple[int, ...]
    """All lengths of the grid, ascending, except those that another machine measured."""


class StairStep(Result):
    """Values of k whose latency is the same within the intervals. Latencies are scaled as in `Stair`."""

    k: tuple[int, ...]
    """Numbers of slots of a routed layer, ascending."""
    capacity: tuple[float, ...]
    """Capacity for each k."""
    ms: tuple[float, ...]
    """Latency of MoD at each k."""
    ci95_ms: tuple[tuple[float, float], ...]
    """95 % interval of each latency."""
    advised_k: int
    """The largest k of the step: it costs no more than the smallest."""
    advised_capacity: float
    """Capacity for this k."""


class Stair(Finding):
    """Latency of MoD over k in one setting, as steps of values that cost the same.

    Cells run minutes apart. The dense baseline is the same engine in all of them, so its medians show how much the
    machine changed. Latencies here are dense_ms / speed-up, where dense_ms is the median of these medians.
    """

    seq: int
    """Number of tokens of a row."""
    dense_ms: float
    """Median, over the cells, of the dense baseline's median latencies."""
    drift: float
    """Largest / smallest of these medians, minus 1."""
    steps: tuple[StairStep, ...]
    """The steps, ascending in k."""


class FrontPoint(Result):
    """Latency, scaled as in `Stair`, and perplexity of one capacity."""

    capacity: float | None
    """The capacity; null for the checkpoint's own schedule per layer."""
    k: int | None
    """Number of slots of a routed layer; null if layers differ."""
    ms: float
    """Latency of MoD."""
    speedup: float
    """Speed-up over the dense baseline."""
    perplexity: float
    """Perplexity of eager PyTorch on held-out text."""
    on_front: bool
    """Whether no other capacity is both faster and better."""


class Front(Finding):
    """Speed against quality in one setting, with the dense baseline for comparison."""

    seq: int
    """Number of tokens of a row."""
    dense_ms: float
    """Latency of the dense baseline, as in `Stair`."""
    dense_perplexity: float
    """Perplexity of the dense baseline, which is no baseline of quality."""
    tokens: int
    """Number of predicted tokens for each perplexity."""
    points: tuple[FrontPoint, ...]
    """The points, fastest first."""


class Findings(Result):
    """Findings from the cells that were measured and met their gates."""

    break_even_capacity: tuple[CapacityBreakEven, ...]
    """One entry for each length."""
    break_even_length: tuple[LengthBreakEven, ...]
    """One entry for each capacity."""
    stairs: tuple[Stair, ...]
    """One stair for each setting with at least two values of k."""
    fronts: tuple[Front, ...]
    """One front for each setting with held-out text and at least two capacities."""
    notes: tuple[str, ...]
    """Limits of the findings: cells that were left out, machines that differ, drift."""


class SweepModel(ReportedModel):
    """The checkpoint."""

    capacity: float | None
    """Capacity of the checkpoint; null if its layers differ."""


class SweepReport(Result):
    """The whole sweep."""

    schema_version: Literal[1]
    """Schema version of sweep.json."""
    command: str
    """The command line, as typed."""
    model: SweepModel
    """The model of the sweep."""
    environment: dict[str, JsonValue]
    """The machine that the sweep was started on."""
    config: dict[str, JsonValue]
    """The configuration from which every cell started."""
    planned: int
    """Number of cells of the grid; an interrupted sweep has fewer in `cells`."""
    cells: tuple[CellEntry, ...]
    """The cells, ordered by target, batch, length and capacity."""
    findings: Findings
    """Findings from the cells."""

    @property
    def failed(self) -> list[CellEntry]:
        """The cells that could not be built."""
        return [cell for cell in self.cells if cell.failed]

    @property
    def missed(self) -> list[CellEntry]:
        """The cells that were built but missed a gate."""
        return [cell for cell in self.cells if cell.missed]

    def to_json(self) -> str:
        """Returns the text of sweep.json, indented, with a final newline."""
        return self.model_dump_json(indent=2) + "\n"

"""report.json: `cost`, `roofline` and `parts`."""

from __future__ import annotations

from mod_export.artifacts import DType, ModelKind
from mod_export.report.entry import Entry

__all__ = ["CostEntry", "PartEntry", "RooflineEntry"]


class CostEntry(Entry):
    """`measure.cost.CostRow`."""

    model: ModelKind
    bucket: str
    flops: int
    flops_by_part: dict[str, int]
    weight_bytes: int
    activation_bytes: int
    kv_bytes: int
    needed_flops: int | None = None
    """Without the attention scores that a causal mask hides."""


class RooflineEntry(Entry):
    """What this machine can do at most, measured: matrix products and memory, for one dtype and thread count."""

    dtype: DType
    threads: int
    gemm_gflops: float
    bandwidth_gbs: float
    method: str
    measured_at: str


class PartEntry(Entry):
    """One part of one engine: what it needs on paper, what the roofline predicts, and what the engine's own profile
    says. `measured_ms` is None where the profile cannot tell this part.

    `flops` are those that the engine computes, `bytes` what it must read and write at least. `share` is the part's
    share of the profiled time.
    """

    target: str
    bucket: str
    dtype: DType
    model: ModelKind
    part: str
    flops: int
    bytes: int
    predicted_ms: float
    measured_ms: float | None
    share: float | None
    profiler: str | None

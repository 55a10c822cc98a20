"""What a graph costs, what this machine can do at most, and where the time of an engine goes."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, PositiveFloat

from mod_export.rows.base import EngineRow, Result
from mod_export.types import DType, ModelKind

MS_PER_GIGA = 1e-6
"""Milliseconds that one unit takes at a rate of one giga-unit a second."""


def not_counted_text(not_counted: Mapping[str, int]) -> str:
    """Operators and how many nodes of each were not counted: ConvTranspose (1), Loop (2); empty where all were."""
    return ", ".join(f"{name} ({count})" for name, count in not_counted.items())


class CostRow(Result):
    """The cost of one run of one portable graph, counted in the graph."""

    model: ModelKind
    """`mod`, or its dense baseline `dense`."""
    bucket: str
    """Name of the bucket."""
    flops: int
    """FLOPs of all matrix products, two for each multiply-add; attention as the full square."""
    flops_by_part: dict[str, int]
    """The same by part of the model, zeros included: `routing`, `attention_projections`, `attention`, `experts`, `mlp`,
    `head`, `other`."""
    needed_flops: int
    """`flops` without the attention scores that a causal mask hides: what no kernel can do without."""
    weight_bytes: int
    """Weights as stored, each once. Buffers such as tables of rotary angles are among them."""
    activation_bytes: int
    """Every intermediate value once, outputs and views included: a measure of traffic, not a peak."""
    kv_bytes: int
    """Keys and values as attention reads them, summed over the layers."""
    not_counted: dict[str, int] = Field(default_factory=dict)
    """Operator -> nodes of it that all numbers above leave out, because it has no rule or no static shape. Where there
    is any, the graph computes more than `flops`, and nothing is predicted from them."""


class Roofline(Result):
    """What this machine can do at most, measured, for one dtype and thread count."""

    dtype: DType
    """Of the numbers."""
    threads: int
    """CPU threads of one operator; 0 is the library's choice."""
    gemm_gflops: PositiveFloat
    """1e9 FLOPs a second of matrix products with a constant right side, two FLOPs for each multiply-add."""
    bandwidth_gbs: PositiveFloat
    """1e9 bytes a second, read and written, over arrays that no cache holds."""
    method: str
    """What was timed, by which library."""
    measured_at: str
    """ISO 8601, UTC."""

    def milliseconds(self, flops: int, size: int) -> float:
        """The least time for this many FLOPs and bytes, if the one hides behind the other."""
        return MS_PER_GIGA * max(flops / self.gemm_gflops, size / self.bandwidth_gbs)


class PartRow(EngineRow):
    """One part of one engine: what it needs, what the roofline predicts, and what the engine's own profile shows."""

    part: str
    """As in `flops_by_part`, and `norms`, `elementwise`, `embedding`."""
    flops: int
    """FLOPs that the engine computes there."""
    bytes: int
    """Bytes that its nodes read and write at least."""
    predicted_ms: float
    """Sum over its nodes of what the roofline allows each of them, in milliseconds."""
    measured_ms: float | None
    """Milliseconds by the engine's own profile, every kernel in its fastest run; null without a profile."""
    share: float | None
    """Share of the profiled time, from 0 to 1."""
    profiler: str | None
    """What profiled."""
    not_counted: int = 0
    """Nodes that `flops`, `bytes` and `predicted_ms` leave out, because their work is not known."""


class Work(Result):
    """What each of some nodes of a graph computes and moves; kept in the manifest, for profiles on other machines."""

    part: str
    """Part of the model."""
    flops: int
    """Of one node."""
    bytes: int
    """Of one node, read and written."""
    nodes: tuple[str, ...]
    """Names of the nodes. An attention whose scores pass through memory is in several entries."""
    counted: bool = True
    """Whether FLOPs and bytes are known; they are 0 where not."""

"""The cost of a graph, the limits of this machine, and the time of each part of an engine."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, PositiveFloat

from mod_export.rows.base import EngineRow, Result
from mod_export.types import DType, ModelKind

MS_PER_GIGA = 1e-6
"""Milliseconds that one unit takes at a rate of 1e9 units per second."""


def not_counted_text(not_counted: Mapping[str, int]) -> str:
    """Lists operators with the number of nodes that were not counted: ConvTranspose (1), Loop (2). Empty if there are
    none.
    """
    return ", ".join(f"{name} ({count})" for name, count in not_counted.items())


class CostRow(Result):
    """The cost of one run of one portable graph, counted from the graph."""

    model: ModelKind
    """`mod`, or its dense baseline `dense`."""
    bucket: str
    """Name of the bucket."""
    flops: int
    """FLOPs of all matrix products: two for each multiply-add. Causal attention counts as the full square."""
    flops_by_part: dict[str, int]
    """`flops` by part of the model, zeros included: `routing`, `attention_projections`, `attention`, `experts`, `mlp`,
    `adapter`, `head`, `other`."""
    needed_flops: int
    """`flops` without the attention scores that a causal mask hides: the least that any kernel must compute."""
    weight_bytes: int
    """Bytes of the weights as stored, each counted once. Buffers, such as tables of rotary angles, are included."""
    activation_bytes: int
    """Bytes of all intermediate values, each counted once, outputs and views included. This measures traffic, not peak
    memory."""
    kv_bytes: int
    """Bytes of the keys and values that attention reads, summed over the layers."""
    not_counted: dict[str, int] = Field(default_factory=dict)
    """Operator -> number of its nodes that all numbers above leave out, because the operator has no rule or the node
    has no static shape. If there are any, the graph computes more than `flops`, and nothing is predicted from it."""


class Roofline(Result):
    """The measured limits of this machine for one dtype and thread count."""

    dtype: DType
    """Dtype of the timed operations."""
    threads: int
    """CPU threads of one operator; 0: the library chooses."""
    gemm_gflops: PositiveFloat
    """Rate of matrix products with a constant right side, in 1e9 FLOPs per second; a multiply-add is two FLOPs."""
    bandwidth_gbs: PositiveFloat
    """Rate of reading and writing arrays that are larger than every cache, in 1e9 bytes per second."""
    method: str
    """Library and operations that were timed."""
    measured_at: str
    """Time of the measurement, ISO 8601, UTC."""

    def milliseconds(self, flops: int, size: int) -> float:
        """Returns the least time for so many FLOPs and `size` bytes, if computation and memory traffic overlap
        completely.
        """
        return MS_PER_GIGA * max(flops / self.gemm_gflops, size / self.bandwidth_gbs)


class PartRow(EngineRow):
    """One part of one engine: its work, the time that the roofline predicts, and the time in its own profile."""

    part: str
    """Part of the model: one of `flops_by_part`, or `norms`, `elementwise`, `embedding`."""
    flops: int
    """FLOPs that the engine computes in this part."""
    bytes: int
    """Bytes that the nodes of this part must at least read and write."""
    predicted_ms: float
    """Milliseconds that the roofline predicts: the sum over the nodes of this part."""
    measured_ms: float | None
    """Milliseconds in the engine's own profile, each kernel in its fastest run; null without a profile."""
    share: float | None
    """Share of the profiled time, from 0 to 1; null without a profile."""
    profiler: str | None
    """Name of the profiler; null without a profile."""
    not_counted: int = 0
    """Number of nodes that `flops`, `bytes` and `predicted_ms` leave out, because their work is not known."""


class Work(Result):
    """FLOPs and bytes of nodes with equal work. The manifest keeps them for profiles on other machines."""

    part: str
    """Part of the model."""
    flops: int
    """FLOPs of one node."""
    bytes: int
    """Bytes that one node reads and writes."""
    nodes: tuple[str, ...]
    """Names of the nodes. An attention whose scores pass through memory is in several entries."""
    counted: bool = True
    """Whether FLOPs and bytes are known; if not, both are 0."""

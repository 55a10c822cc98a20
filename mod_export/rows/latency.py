"""Latency of engines, and what follows from it: speed-up over the dense baseline and over float32."""

from __future__ import annotations

from typing import Literal

from mod_export.rows.base import EngineRow, PairRow, Result

SpeedVerdict = Literal["faster", "not faster", "inconclusive"]


class Conditions(Result):
    """System load and clock while the samples were taken, the same for all models of a setting.

    Null where the machine, or so short a time, cannot tell.
    """

    threads_used: float | None
    """Threads of this process that were busy, as (sum of their CPU times)^2 / sum of the squares: n when n threads
    share the work equally, whatever part of the CPU each was given."""
    frequency_mhz: tuple[float, float] | None
    """Clock of the CPU, before and after."""
    load: float | None
    """One-minute load average before the first sample."""
    other_load: float | None
    """Share of the CPU time of the machine that others took, neighbouring virtual machines included, from 0 to 1."""


class LatencyRow(EngineRow):
    """The latency of one model in one setting, with the conditions that it holds for.

    The models of a setting are interleaved: every round has two samples of each, so samples 2 r and 2 r + 1 of both
    models are round r. A model without a dense baseline is sampled alone, likewise two samples in a round.
    """

    providers: tuple[str, ...]
    """What the engine really ran on."""
    threads: int
    """CPU threads that it was given; 0 is the library's choice."""
    warmup: int
    """Rounds before the first sample."""
    samples_ms: tuple[float, ...]
    """Every sample in milliseconds, in the order in which they were measured."""
    p50_ms: float
    """Median."""
    p90_ms: float
    """90th percentile, linear between samples."""
    p99_ms: float
    """99th percentile; with fewer than 100 samples it lies close to the slowest one."""
    mean_ms: float
    """Mean."""
    stdev_ms: float
    """Standard deviation of the sample (divisor n - 1)."""
    p50_ci95: tuple[float, float] | None
    """95 % interval of the median in milliseconds; null where the samples do not bound it."""
    p90_ci95: tuple[float, float] | None
    """Likewise of the 90th percentile, which needs 36 independent samples."""
    p99_ci95: tuple[float, float] | None
    """Likewise of the 99th percentile, which needs 368 independent samples."""
    cv: float
    """Coefficient of variation: standard deviation over mean."""
    iqr_ms: float
    """Interquartile range."""
    drift: float
    """Median of the last third of the samples over that of the first third, minus 1."""
    outliers: int
    """Samples more than 1.5 interquartile ranges beyond the quartiles."""
    flags: tuple[str, ...]
    """What speaks against these numbers, in words."""
    stable: bool
    """Whether the warm-up ended because the latency had become stable."""
    conditions: Conditions
    """System load and clock while sampling."""


class Control(Result):
    """The MoD engine against itself: its first samples of the rounds over its second ones. A ratio that must be 1."""

    measured: float
    """Ratio of the medians."""
    ci99: tuple[float, float]
    """Its 99 % interval."""
    covers_one: bool
    """Whether the interval covers 1. If not, machine or method see differences that are not there."""


class SpeedupRow(PairRow):
    """How much faster MoD is than its dense baseline in one setting."""

    measured: float
    """Median latency of the dense baseline over that of MoD, from interleaved samples of one run."""
    ci95: tuple[float, float]
    """Interval of `measured` that holds with 95 % whenever sampling stopped."""
    predicted_flops: float | None
    """FLOPs of the dense graph over FLOPs of the MoD graph, of the graphs that the engines run; null where not all of
    them were counted (`cost[].not_counted`)."""
    predicted_roofline: float | None
    """Ratio of the times that the roofline of this machine predicts; null where it was not measured, and where the work
    of a node is not known."""
    efficiency: float | None
    """`measured` / `predicted_flops`; null without the latter."""
    gate: float | None
    """What the whole interval must reach; null where no gate applies."""
    passed: bool | None
    """Whether it does; null where no gate applies. NaN never passes."""
    verdict: SpeedVerdict
    """`faster` when the interval lies above 1; `not faster` when it ends below 1 + `latency.resolution`; otherwise, and
    when the control does not cover 1, `inconclusive`."""
    reason: str | None
    """Why it is not faster, or why nothing can be said; null for `faster`."""
    control: Control
    """The MoD engine against itself in the same rounds."""


class PrecisionRow(EngineRow):
    """An engine of a narrower dtype beside the float32 engine that it can replace, interleaved."""

    bytes: int
    """Size of the files that it needs: engine and weights."""
    float32_bytes: int
    """Size of those that the float32 engine needs."""
    p50_ms: float
    """Its median latency."""
    float32_p50_ms: float
    """That of the float32 engine, in the same rounds."""
    measured: float
    """`float32_p50_ms` / `p50_ms`."""
    ci95: tuple[float, float]
    """95 % interval of `measured`."""
    verdict: SpeedVerdict
    """As that of a speed-up."""

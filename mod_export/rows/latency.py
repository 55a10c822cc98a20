"""Latency of engines, and the speed-up over the dense baseline and over float32 that follows from it."""

from __future__ import annotations

from typing import Literal

from mod_export.rows.base import EngineRow, PairRow, Result

SpeedVerdict = Literal["faster", "not faster", "inconclusive"]


class Conditions(Result):
    """System load and clock while the samples were taken, the same for all models of a setting.

    A field is null if the machine does not report the number, or if sampling was too short to know it.
    """

    threads_used: float | None
    """Number of busy threads of this process: (sum of their CPU times)^2 / sum of the squares. It is n if n threads
    share the work equally, however much CPU time each of them got."""
    frequency_mhz: tuple[float, float] | None
    """Clock of the CPU before and after sampling."""
    load: float | None
    """One-minute load average before the first sample."""
    other_load: float | None
    """Share of the machine's CPU time that others took, from 0 to 1. Neighbouring virtual machines count."""


class LatencyRow(EngineRow):
    """The latency of one model in one setting, with the conditions under which it was measured.

    The models of a setting are interleaved. Every round has two samples of each model, so samples 2 r and 2 r + 1 of
    both models belong to round r. A model without a dense baseline is sampled alone, also twice in a round.
    """

    providers: tuple[str, ...]
    """Providers that the engine really ran on."""
    threads: int
    """CPU threads that the engine was given; 0: the library chooses."""
    warmup: int
    """Number of rounds before the first sample."""
    samples_ms: tuple[float, ...]
    """Every sample in milliseconds, in the order in which they were measured."""
    p50_ms: float
    """Median."""
    p90_ms: float
    """90th percentile, interpolated linearly between samples."""
    p99_ms: float
    """99th percentile; with fewer than 100 samples it is close to the slowest sample."""
    mean_ms: float
    """Mean."""
    stdev_ms: float
    """Standard deviation of the sample (divisor n - 1)."""
    p50_ci95: tuple[float, float] | None
    """95 % interval of the median in milliseconds; null if the samples do not bound it."""
    p90_ci95: tuple[float, float] | None
    """95 % interval of the 90th percentile, which needs 36 independent samples."""
    p99_ci95: tuple[float, float] | None
    """95 % interval of the 99th percentile, which needs 368 independent samples."""
    cv: float
    """Coefficient of variation: standard deviation divided by mean."""
    iqr_ms: float
    """Interquartile range."""
    drift: float
    """Median of the last third of the samples divided by that of the first third, minus 1."""
    outliers: int
    """Number of samples more than 1.5 interquartile ranges beyond the quartiles."""
    flags: tuple[str, ...]
    """Warnings about these numbers, in words."""
    stable: bool
    """Whether the warm-up ended because the latency had become stable."""
    conditions: Conditions
    """System load and clock while sampling."""


class Control(Result):
    """The MoD engine compared with itself: the first samples of all rounds divided by the second ones. The ratio must
    be 1.
    """

    measured: float
    """Ratio of the medians."""
    ci99: tuple[float, float]
    """99 % interval of the ratio."""
    covers_one: bool
    """Whether the interval contains 1. If not, machine or method show differences that do not exist."""


class SpeedupRow(PairRow):
    """The speed-up of MoD over its dense baseline in one setting."""

    measured: float
    """Median latency of the dense baseline divided by that of MoD, from interleaved samples of one run."""
    ci95: tuple[float, float]
    """95 % interval of `measured`. It allows for sampling that stops as soon as the result is clear."""
    predicted_flops: float | None
    """FLOPs of the dense graph divided by FLOPs of the MoD graph. These are the graphs that the engines run, or the
    portable graphs if those were not fully counted. Null if neither were (`cost[].not_counted`)."""
    predicted_roofline: float | None
    """Ratio of the times that the roofline of this machine predicts. Null if the roofline was not measured, or if the
    work of a node is not known."""
    efficiency: float | None
    """`measured` / `predicted_flops`; null if there is no `predicted_flops`."""
    gate: float | None
    """Speed-up that the whole interval must reach; null if no gate applies."""
    passed: bool | None
    """Whether the whole interval reaches the gate; `false` also if the control does not cover 1. Null if no gate
    applies. If `measured` is not finite, always `false`."""
    verdict: SpeedVerdict
    """`faster` if the interval lies above 1; `not faster` if it ends below 1 + `latency.resolution`; otherwise
    `inconclusive`. If the control does not cover 1, always `inconclusive`."""
    reason: str | None
    """Why MoD is not faster, or why there is no clear verdict; null for `faster`."""
    control: Control
    """The MoD engine against itself in the same rounds."""


class PrecisionRow(EngineRow):
    """An engine of a narrower dtype compared with the float32 engine that it can replace, both interleaved."""

    bytes: int
    """Size of the files that the engine needs: engine and weights."""
    float32_bytes: int
    """Size of the files that the float32 engine needs."""
    p50_ms: float
    """Median latency of the engine."""
    float32_p50_ms: float
    """Median latency of the float32 engine in the same rounds."""
    measured: float
    """`float32_p50_ms` / `p50_ms`."""
    ci95: tuple[float, float]
    """95 % interval of `measured`."""
    verdict: SpeedVerdict
    """Verdict that follows from the interval, as for a speed-up."""

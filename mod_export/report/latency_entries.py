"""report.json: `latency`, `speedup` and `precision`."""

from __future__ import annotations

from typing import Literal

from mod_export.artifacts import DType, ModelKind
from mod_export.report.entry import Entry

__all__ = ["Conditions", "Control", "LatencyEntry", "PrecisionEntry", "SpeedupEntry"]


class Conditions(Entry):
    """The machine while the samples were taken; None where it does not say.

    `threads_used` is the number of threads that were seen busy during a run, `frequency_mhz` the CPU clock, before and
    after, `load` the one-minute load average before the first sample, and `other_load` the share of the machine's CPU
    time that other processes took while sampling, from 0 to 1.
    """

    threads_used: float | None
    frequency_mhz: tuple[float, float] | None
    load: float | None
    other_load: float | None


class LatencyEntry(Entry):
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
    p50_ci95: tuple[float, float] | None = None
    p90_ci95: tuple[float, float] | None = None
    p99_ci95: tuple[float, float] | None = None
    cv: float | None = None
    iqr_ms: float | None = None
    drift: float | None = None
    outliers: int = 0
    flags: tuple[str, ...] = ()
    stable: bool | None = None
    conditions: Conditions | None = None


class Control(Entry):
    """The MoD engine against itself in the same rounds: a ratio that must be 1, and its 99 % interval.

    `covers_one` False means that the machine, or the method, sees differences that are not there.
    """

    measured: float
    ci99: tuple[float, float]
    covers_one: bool


class SpeedupEntry(Entry):
    """`measure.statistics.SpeedupRow`. `gate` and `passed` are None where no gate applies.

    `verdict`: `faster` when the interval lies above 1; `not faster` when it does not reach the smallest speed-up that
    is worth a name (latency.resolution); `inconclusive` when the noise of the machine allows nothing else. `reason`
    says why a model is not faster, or why nothing can be said.
    """

    target: str
    bucket: str
    dtype: DType
    measured: float
    ci95: tuple[float, float]
    predicted_flops: float
    efficiency: float
    gate: float | None
    passed: bool | None
    predicted_roofline: float | None = None
    verdict: Literal["faster", "not faster", "inconclusive"] | None = None
    reason: str | None = None
    control: Control | None = None


class PrecisionEntry(Entry):
    """`measure.precision.PrecisionRow`: an engine of a narrower dtype beside the float32 one, sampled in turn."""

    target: str
    bucket: str
    dtype: DType
    model: ModelKind
    bytes: int
    float32_bytes: int
    p50_ms: float
    float32_p50_ms: float
    measured: float
    ci95: tuple[float, float]
    verdict: Literal["faster", "not faster", "inconclusive"]

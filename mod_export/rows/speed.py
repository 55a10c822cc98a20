"""Speed: latency of whole rows with the speed-ups that follow from it, steps and prompts of generated text, and the
engines that are served because they are the fastest.

The rows about generation include the texts themselves and their quality. Parity of prefill and decode engines is in the
rows of `parity` with that role.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, Self

from mod_export.rows.base import EngineRow, PairRow, Result
from mod_export.types import FLOAT_BYTES, DType, ModelKind, Role, TextKind, having, writes_text

SpeedVerdict = Literal["faster", "not faster", "inconclusive"]
ALONE = "the only one that was measured"


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
    """Every sample in milliseconds, round after round. Which of the two samples of a round ran first is random."""
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
    """The MoD engine compared with itself: one sample of each round divided by the other one, which ran before or after
    it at random. The ratio must be 1.
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


class RivalRow(Result):
    """A program that was to run a model of whole rows in `bench --rivals`: an engine of the folder, or a rival."""

    bucket: str
    """Static shape."""
    model: ModelKind
    """The model, or its dense baseline."""
    program: str
    """Name of the program."""
    version: str | None
    """Version of the rival's package; null for engines of the folder."""
    dtype: DType
    """Precision of the matrix products."""
    threads: int
    """CPU threads; 0: the library chooses."""
    other_load: float
    """Share of the machine's CPU time that other processes took while all programs waited, from 0 to 1."""
    reason: str | None = None
    """Why it has no times; null if it has."""
    samples_ms: tuple[float, ...] = ()
    """Every sample in milliseconds."""
    p50_ms: float | None = None
    """Median."""
    p50_ci95: tuple[float, float] | None = None
    """95 % interval of the median; null if the samples do not bound it."""
    against: str | None = None
    """For a rival, the engine that it is compared with: the fastest in these samples of its dtype, or else of float32;
    null if the folder has neither."""
    measured: float | None = None
    """Median of the rival divided by that of this engine, from the same rounds: above 1, the engine is faster."""
    ci95: tuple[float, float] | None = None
    """95 % interval of `measured`."""
    error: float | None = None
    """Root mean square of the difference from the first rival in float32 that ran, as a share of its output's."""


class TextsRow(EngineRow):
    """Greedy texts of an engine compared with those of the eager model, from the same prompts."""

    role: Role = "decode"
    """`decode`."""
    texts: int
    """Number of texts."""
    tokens: int
    """Number of new tokens in all texts together."""
    identical: int
    """Number of texts that are the same as those of the eager model, token for token."""
    first_difference: int | None
    """Smallest number, counted from 1, of a new token that differs in any text; null if no text differs."""
    same: int
    """Number of new tokens before the first difference in their text, out of `tokens`."""


class Compared(Result):
    """MoD compared with its dense baseline."""

    measured: float
    """`ms` of the dense baseline divided by `ms` of MoD."""
    ci95: tuple[float, float]
    """95 % interval of `measured`: for steps by a bootstrap over positions, for prompts like that of a speed-up."""
    verdict: SpeedVerdict
    """Verdict that follows from the interval, as for a speed-up; `inconclusive` for steps at fewer than 5 positions."""


class StepsCompared(Compared):
    """MoD compared with its dense baseline over decode steps, with the speed-up that the bytes of a step predict."""

    predicted_bytes: float
    """`least_bytes` of the dense baseline divided by those of MoD: the speed-up if only moving bytes took time."""
    efficiency: float
    """`measured` / `predicted_bytes`."""
    routed_kv_bytes: dict[ModelKind, int]
    """The part of `kv_bytes` in layers whose cache is smaller than that of the dense baseline."""


class DecodeRow(PairRow):
    """Time of a decode step at positions spread over texts, with the cache that the text left. The steps of MoD and
    dense baseline are interleaved; a model without a dense baseline is timed alone.
    """

    role: Role = "decode"
    """`decode`."""
    threads: int
    """CPU threads of one operator; 0: the library chooses."""
    positions: int
    """Number of positions at which a step was timed, over all texts."""
    texts: int | None = None
    """Number of texts, on which the positions are shared out; at least one for each row of the bucket. Null if it is
    not known."""
    text: TextKind | None = None
    """Where the texts come from. `named`: a file that the user named (`--text`). `held_out`: held-out text that comes
    with the model. `documentation`: the English documentation of the running Python, read with the model's tokenizer;
    the model may have been trained on it. `random`: random ids, in which other tokens may run than in text.
    Null if it is not known."""
    ms: dict[ModelKind, float]
    """Milliseconds of a step of each model: the mean over the positions, each with its fastest run."""
    tokens_per_second: dict[ModelKind, float]
    """Tokens per second of each model: rows of the bucket divided by the time of a step."""
    executed: dict[str, float]
    """Routing site -> share of the steps in which at least one row ran there."""
    selected: dict[str, float]
    """Routing site -> share of the tokens that were selected there."""
    least_bytes: dict[ModelKind, int]
    """Bytes that a step must at least read: the weights that it multiplies by, and of its cache, in the dtype of the
    cache, what the engine attends to. Engines of `ort-cpu` attend to the slots in use, the mean over the positions, and
    a routed layer's slots count as filled in proportion to the text. Other engines attend to all slots, and so do those
    of `ort-cpu` in routed layers if `slots` is `fair`."""
    predicted_ms: dict[ModelKind, float] | None
    """Milliseconds that memory takes to deliver `least_bytes` at the bandwidth in `roofline`; null if that was not
    measured."""
    kv_bytes: dict[ModelKind, int]
    """Bytes of keys and values in the caches of the bucket."""
    compared: StepsCompared | None
    """MoD compared with its dense baseline; null if there is none."""

    def predicted(self, bandwidth_gbs: float | None) -> Self:
        """Returns the row with `predicted_ms` for a memory of so many 1e9 bytes per second; None if that is unknown."""
        if bandwidth_gbs is None:
            return self.model_copy(update={"predicted_ms": None})
        times = {kind: size / bandwidth_gbs / 1e6 for kind, size in self.least_bytes.items()}
        return self.model_copy(update={"predicted_ms": times})


class FirstTokenRow(PairRow):
    """Time from a prompt that fills its bucket to the token after it."""

    role: Role = "prefill"
    """`prefill`."""
    tokens: int
    """Number of tokens in the prompt."""
    ms: dict[ModelKind, float]
    """Median milliseconds of each model."""
    compared: Compared | None
    """MoD compared with its dense baseline; null if there is none."""


class NamedText(Result):
    """A file of text that the user named. It is no part of the build folder."""

    name: str
    """Name of the file."""
    sha256: str
    """SHA-256 of what was read of the file: its first 4 MiB."""


class QualityRow(Result):
    """Perplexity of a text, once with tokens selected one at a time and once as the checkpoint was trained."""

    tokens: int
    """Number of predicted tokens."""
    window: int
    """Number of tokens in each text."""
    perplexity: float
    """Perplexity if tokens are selected one at a time."""
    own_perplexity: float
    """Perplexity with the checkpoint's own selection, which may look ahead."""
    wanted: dict[str, float]
    """Routing site -> share of the tokens that wanted a slot."""
    selected: dict[str, float]
    """Routing site -> share of the tokens that were selected."""
    overflow: dict[str, int]
    """Routing site -> number of tokens that wanted a slot and found none."""
    text: TextKind = "held_out"
    """Where the text comes from, as in `decode`; never `random`."""


class GenerationReport(Result):
    """Results about writing text, except parity."""

    reason: str = ""
    """Why the model cannot write text here. Every other field is then null or empty. Empty if it can."""
    window: int | None = None
    """Number of tokens of the longest text, prompt and answer together."""
    slots: str | None = None
    """How many rows of a step can run at a routing site: `generation.slots` of the configuration."""
    capacity: dict[str, int] | None = None
    """Routing site -> number of slots for the tokens of one text."""
    texts: tuple[TextsRow, ...] = ()
    """One row for each decode engine that ran here."""
    decode: tuple[DecodeRow, ...] = ()
    """One row for each target, dtype and decode bucket that ran here."""
    first_token: tuple[FirstTokenRow, ...] = ()
    """One row for each target, dtype and prefill bucket that ran here."""
    quality: QualityRow | None = None
    """Perplexity of text; null if there is no text for the model's vocabulary."""


class StepBytes(Result):
    """Bytes that a decode step must read: a constant part, and a part for each routing site at which some row runs."""

    always: int
    """Bytes of the weights that every step multiplies by."""
    sites: dict[str, int]
    """Routing site -> further bytes that a step reads if some row runs there."""
    cache: StepBytes | None = None
    """The same of the keys and values in a full cache, in float32. Null in folders of earlier releases, in which the
    other fields include them."""

    def of(self, executed: Mapping[str, float], always_cached: float = 1.0, routed_cached: float = 1.0) -> int:
        """Returns the mean over steps.

        Args:
            executed: the share of the steps in which each site runs.
            always_cached: what a step reads of the float32 bytes of a full cache, in layers that every token enters.
            routed_cached: the same in layers that only selected tokens enter.
        """
        total = self.always + self._routed(executed)
        if self.cache is not None:
            total += always_cached * self.cache.always + routed_cached * self.cache._routed(executed)
        return round(total)

    def _routed(self, executed: Mapping[str, float]) -> float:
        return sum(size * executed[site] for site, size in self.sites.items())

    def stored_in(self, dtype: DType) -> StepBytes:
        """Returns the bytes if weights are stored in this float dtype instead of float32."""
        share = FLOAT_BYTES[dtype] / FLOAT_BYTES["float32"]
        return StepBytes(
            always=round(self.always * share),
            sites={site: round(size * share) for site, size in self.sites.items()},
            cache=self.cache,
        )


class EngineSpeed(Result):
    """The speed of the engines of one model, role, target and dtype together."""

    model: ModelKind
    """`mod`, or its dense baseline `dense`."""
    role: Role
    """`forward` for whole rows; `decode` for steps, by which the engines that write text are chosen."""
    target: str
    """Engine family."""
    dtype: DType
    """Dtype in which the weights of the engines are stored."""
    ms: float
    """Geometric mean over all buckets, in milliseconds: of the median latency of whole rows, or of the mean time of
    steps."""


class ServedEngines(EngineSpeed):
    """The engines that are served if neither target nor dtype is named."""

    reason: str
    """Why these engines were chosen."""


def measured_from_rows(latency: Iterable[LatencyRow], decode: Iterable[DecodeRow]) -> tuple[EngineSpeed, ...]:
    """Returns the speed of everything that was timed, in the order of the rows. Leaves out engines that were timed in
    fewer buckets than others of their model and role.
    """
    ms_by_engines: dict[tuple[ModelKind, Role, str, DType], list[float]] = defaultdict(list)
    for row in latency:
        ms_by_engines[row.model, row.role, row.target, row.dtype].append(row.p50_ms)
    for step in decode:
        for kind, mean_ms in step.ms.items():
            ms_by_engines[kind, step.role, step.target, step.dtype].append(mean_ms)
    most_buckets: dict[tuple[ModelKind, Role], int] = defaultdict(int)
    for (model, role, _, _), ms in ms_by_engines.items():
        most_buckets[model, role] = max(most_buckets[model, role], len(ms))
    return tuple(
        EngineSpeed(model=model, role=role, target=target, dtype=dtype, ms=math.exp(sum(map(math.log, ms)) / len(ms)))
        for (model, role, target, dtype), ms in ms_by_engines.items()
        if len(ms) == most_buckets[model, role]
    )


def served_of(
    measured: Sequence[EngineSpeed], refused: Collection[tuple[ModelKind, bool, str, DType]]
) -> list[ServedEngines]:
    """Returns the fastest of each model and role; of equally fast ones the first.

    Args:
        measured: everything that was timed.
        refused: (model, whether it writes text, target, dtype) of engines that missed their gates.
    """
    allowed = [row for row in measured if (row.model, writes_text(row.role), row.target, row.dtype) not in refused]
    served = []
    for model, role in dict.fromkeys((row.model, row.role) for row in allowed):
        ranked = sorted(having(allowed, model=model, role=role), key=lambda row: row.ms)
        slower = ", ".join(f"{row.target} {row.dtype} {row.ms:.3g} ms" for row in ranked[1:])
        reason = f"the fastest of those that met their gates; {slower}" if slower else ALONE
        served.append(ServedEngines(**ranked[0].model_dump(), reason=reason))
    return served

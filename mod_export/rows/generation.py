"""Results about writing text token by token: speed of steps and prompts, the texts themselves, and their quality.

Parity of prefill and decode engines is in the rows of `parity` with that role.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from mod_export.rows.base import EngineRow, PairRow, Result
from mod_export.rows.latency import SpeedVerdict
from mod_export.types import FLOAT_BYTES, DType, ModelKind, Role


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
    """Verdict that follows from the interval, as for a speed-up."""


class StepsCompared(Compared):
    """MoD compared with its dense baseline over decode steps, with the speed-up that the bytes of a step predict."""

    predicted_bytes: float
    """`least_bytes` of the dense baseline divided by those of MoD: the speed-up if only moving bytes took time."""
    efficiency: float
    """`measured` / `predicted_bytes`."""
    routed_kv_bytes: dict[ModelKind, int]
    """The part of `kv_bytes` in layers whose cache is smaller than that of the dense baseline."""


class DecodeRow(PairRow):
    """Time of a decode step at positions spread over a text, with the cache that the text left. The steps of MoD and
    dense baseline are interleaved; a model without a dense baseline is timed alone.
    """

    role: Role = "decode"
    """`decode`."""
    threads: int
    """CPU threads of one operator; 0: the library chooses."""
    positions: int
    """Number of positions of a text at which a step was timed."""
    ms: dict[ModelKind, float]
    """Milliseconds of a step of each model: the mean over the positions, each with its fastest run."""
    tokens_per_second: dict[ModelKind, float]
    """Tokens per second of each model: rows of the bucket divided by the time of a step."""
    executed: dict[str, float]
    """Routing site -> share of the steps in which at least one row ran there."""
    selected: dict[str, float]
    """Routing site -> share of the tokens that were selected there."""
    least_bytes: dict[ModelKind, int]
    """Bytes that a step must at least read: the weights that it multiplies by, and its cache."""
    predicted_ms: dict[ModelKind, float] | None
    """Milliseconds that this machine's memory takes to deliver `least_bytes`; null if its bandwidth was not
    measured."""
    kv_bytes: dict[ModelKind, int]
    """Bytes of keys and values in the caches of the bucket."""
    compared: StepsCompared | None
    """MoD compared with its dense baseline; null if there is none."""


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
    text: Literal["held_out", "documentation"] = "held_out"
    """`held_out`: held-out text that comes with the model. `documentation`: the English documentation of the running
    Python, read with the model's tokenizer; the model may have been trained on it."""


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
    """Bytes of the weights that every step multiplies by, and of the cache in layers that every token goes through."""
    sites: dict[str, int]
    """Routing site -> further bytes that a step reads if some row runs there."""

    def of(self, executed: Mapping[str, float]) -> int:
        """Returns the mean over steps; `executed` is the share of the steps in which each site runs."""
        return round(self.always + sum(size * executed[site] for site, size in self.sites.items()))

    def stored_in(self, dtype: DType) -> StepBytes:
        """Returns the bytes if weights and cache are stored in this float dtype instead of float32."""
        share = FLOAT_BYTES[dtype] / FLOAT_BYTES["float32"]
        return StepBytes(
            always=round(self.always * share), sites={site: round(size * share) for site, size in self.sites.items()}
        )

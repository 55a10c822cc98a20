"""Writing text token by token: speed of steps and prompts, the texts themselves, and their quality.

Parity of prefill and decode engines is told by rows of `parity` with that role.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from mod_export.rows.base import EngineRow, PairRow, Result
from mod_export.rows.latency import SpeedVerdict
from mod_export.types import FLOAT_BYTES, DType, ModelKind, Role


class TextsRow(EngineRow):
    """Greedy texts of an engine beside those of the eager model, from the same prompts."""

    role: Role = "decode"
    """`decode`."""
    texts: int
    """How many."""
    tokens: int
    """New tokens of all of them."""
    identical: int
    """Texts that are the same, token for token."""
    first_difference: int | None
    """Number of the first new token that differs in any text; null where none does."""
    same: int
    """Of `tokens`, those before the first difference in their text."""


class Compared(Result):
    """The time of the dense baseline over that of MoD."""

    measured: float
    """`ms` of the dense baseline over that of MoD."""
    ci95: tuple[float, float]
    """95 % interval of `measured`: of steps by a bootstrap over positions, of prompts as that of a speed-up."""
    verdict: SpeedVerdict
    """What follows from the interval, as for a speed-up."""


class StepsCompared(Compared):
    """The same of steps, with what the bytes that they read predict."""

    predicted_bytes: float
    """`least_bytes` of the dense baseline over those of MoD: the speed-up of a machine that only moves bytes."""
    efficiency: float
    """`measured` / `predicted_bytes`."""
    routed_kv_bytes: dict[ModelKind, int]
    """Of `kv_bytes`, bytes in layers whose cache is shorter than that of the dense baseline."""


class DecodeRow(PairRow):
    """Time of a decode step at positions all over a text, with caches in place: of both models interleaved, or of the
    model alone where it has no dense baseline.
    """

    role: Role = "decode"
    """`decode`."""
    threads: int
    """CPU threads of one operator; 0 is the library's choice."""
    positions: int
    """Positions of a text that were timed."""
    ms: dict[ModelKind, float]
    """Mean milliseconds of a step, of each model."""
    tokens_per_second: dict[ModelKind, float]
    """Rows of the bucket over `ms`."""
    executed: dict[str, float]
    """Routing site -> share of the steps in which it ran for some row."""
    selected: dict[str, float]
    """Routing site -> share of the tokens that were selected there."""
    least_bytes: dict[ModelKind, int]
    """Bytes that a step has to read: the weights that it multiplies by, and its cache."""
    predicted_ms: dict[ModelKind, float] | None
    """Milliseconds that this machine's memory takes for `least_bytes`; null where its bandwidth was not measured."""
    kv_bytes: dict[ModelKind, int]
    """Bytes of keys and values of the bucket's caches."""
    compared: StepsCompared | None
    """MoD beside its dense baseline; null where there is none."""


class FirstTokenRow(PairRow):
    """Time from a prompt that fills its bucket to the token after it."""

    role: Role = "prefill"
    """`prefill`."""
    tokens: int
    """Tokens of the prompt."""
    ms: dict[ModelKind, float]
    """Median milliseconds of each model."""
    compared: Compared | None
    """MoD beside its dense baseline; null where there is none."""


class QualityRow(Result):
    """Perplexity on text when tokens are selected one at a time, and as the checkpoint was trained."""

    tokens: int
    """Predicted tokens."""
    window: int
    """Tokens of a text."""
    perplexity: float
    """Selecting one token at a time."""
    own_perplexity: float
    """By the checkpoint's own selection, which may look ahead."""
    wanted: dict[str, float]
    """Routing site -> share of the tokens that wanted a slot."""
    selected: dict[str, float]
    """Routing site -> share of the tokens that were selected."""
    overflow: dict[str, int]
    """Routing site -> tokens that wanted a slot and found none."""
    text: Literal["held_out", "documentation"] = "held_out"
    """Held-out text that comes with the model; or, read with its tokenizer, the English documentation of the running
    Python, which it may have been trained on."""


class GenerationReport(Result):
    """Everything about writing text but its parity."""

    reason: str = ""
    """Why no text can be written; then every other field is null or empty."""
    window: int | None = None
    """Tokens of the longest text, prompt and answer together."""
    slots: str | None = None
    """How many rows of a step can use a routing site, as `generation.slots` of the configuration says."""
    capacity: dict[str, int] | None = None
    """Routing site -> slots for the tokens of one text."""
    texts: tuple[TextsRow, ...] = ()
    """One for each decode engine that ran here."""
    decode: tuple[DecodeRow, ...] = ()
    """One for each decode bucket that ran here."""
    first_token: tuple[FirstTokenRow, ...] = ()
    """One for each prefill bucket that ran here."""
    quality: QualityRow | None = None
    """Null without text for the model's vocabulary."""


class StepBytes(Result):
    """Bytes that a decode step has to read: always, and at routing sites where some row is selected."""

    always: int
    """Weights that every step multiplies by, and slots of layers that every token goes through."""
    sites: dict[str, int]
    """Routing site -> what is added where some row runs there."""

    def of(self, executed: Mapping[str, float]) -> int:
        """Mean over steps in which each site is executed in this share of them."""
        return round(self.always + sum(size * executed[site] for site, size in self.sites.items()))

    def stored_in(self, dtype: DType) -> StepBytes:
        """The same where weights and cache are floats of this dtype, and not float32."""
        share = FLOAT_BYTES[dtype] / FLOAT_BYTES["float32"]
        return StepBytes(
            always=round(self.always * share), sites={site: round(size * share) for site, size in self.sites.items()}
        )

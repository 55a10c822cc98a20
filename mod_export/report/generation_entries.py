"""What report.json says about writing text token by token."""

from __future__ import annotations

from mod_export.artifacts import DType, ModelKind
from mod_export.report.entry import Entry
from mod_export.report.parity_entries import ParityEntry

__all__ = ["DecodeEntry", "FirstTokenEntry", "GenerationEntry", "QualityEntry", "TextsEntry"]


class TextsEntry(Entry):
    """Greedy texts of an engine beside those of the eager model, from the same prompts.

    `equal` of `texts` are the same token for token; `first_difference` is the number of the first new token that
    differs in any of the others.
    """

    target: str
    bucket: str
    dtype: DType
    model: ModelKind
    texts: int
    tokens: int
    equal: int
    first_difference: int | None


class DecodeEntry(Entry):
    """Steps of one decode bucket, in turns with those of the dense twin, both with their caches in place.

    `ms` is the mean of a step over `positions` positions of a text, of each model. `executed` says in which share of
    the steps a routed part ran for any row, `share` which share of the tokens ran there. `least_bytes` are weights and
    cache that a step has to read; `bound` their ratio dense / MoD, what a machine gives that only moves bytes;
    `efficiency` = speedup / bound. `bound_ms`: what this machine's memory takes for them. `routed_kv_bytes`: of the
    layers whose cache is shorter than the dense twin's.
    """

    target: str
    bucket: str
    dtype: DType
    threads: int
    positions: int
    ms: dict[ModelKind, float]
    tokens_per_second: dict[ModelKind, float]
    speedup: float
    ci95: tuple[float, float]
    executed: dict[str, float]
    share: dict[str, float]
    least_bytes: dict[ModelKind, int]
    bound: float
    efficiency: float
    bound_ms: dict[ModelKind, float] | None
    kv_bytes: dict[ModelKind, int]
    routed_kv_bytes: dict[ModelKind, int]


class FirstTokenEntry(Entry):
    """Median time from a prompt that fills its bucket to the token after it.

    `ci95`: the smallest and the largest dense / MoD of single runs in turn.
    """

    target: str
    tokens: int
    dtype: DType
    ms: dict[ModelKind, float]
    speedup: float
    ci95: tuple[float, float] | None = None


class QualityEntry(Entry):
    """Perplexity on held-out text when tokens are decided about one at a time, and as the checkpoint was trained.

    `wanted` and `ran`: share of the tokens that chose to run in a place of routing, and that ran; `overflow`: tokens
    that found no place there.
    """

    tokens: int
    window: int
    perplexity: float
    own_perplexity: float
    wanted: dict[str, float]
    ran: dict[str, float]
    overflow: dict[str, int]


class GenerationEntry(Entry):
    """Everything about writing text; `reason` says why there is nothing.

    `places`: how many rows of a step can run in a routed part, as the configuration says.
    `window`: the longest text in tokens. `capacity`: tokens of a text that a place of routing takes. `parity`: rows as
    in the report's own `parity`, of targets named `<target> prefill` and `<target> decode`.
    """

    reason: str = ""
    window: int | None = None
    places: str | None = None
    capacity: dict[str, int] | None = None
    parity: tuple[ParityEntry, ...] = ()
    texts: tuple[TextsEntry, ...] = ()
    decode: tuple[DecodeEntry, ...] = ()
    first_token: tuple[FirstTokenEntry, ...] = ()
    quality: QualityEntry | None = None

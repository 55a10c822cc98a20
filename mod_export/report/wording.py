"""Formats numbers for people. Nothing is rounded up to perfection: only 8,192 of 8,192 is `all`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pydantic import JsonValue

from mod_export.rows.correctness import InputAgreement, LayerAgreement, RoutingAgreement
from mod_export.rows.speed import (
    Compared,
    DecodeRow,
    NamedText,
    PrecisionRow,
    QualityRow,
    ServedEngines,
    SpeedupRow,
    SpeedVerdict,
)
from mod_export.types import TextKind, is_expert, writes_text

NO_SITES = (
    "no routing site was found, so no selection is judged by itself; if the model selects tokens, mark where: index, "
    "_ = mod_export.mark_selection(index, scores)"
)

TEXTS: Mapping[TextKind, str] = {
    "named": "the named text",
    "held_out": "held-out text of the model",
    "documentation": "Python's documentation, which the model may have been trained on",
    "random": "random ids",
}
"""Where a text comes from, in words."""


def ms_text(ms: float) -> str:
    """Formats milliseconds with three significant digits, from a hundred on as whole numbers: 0.123, 20.1, 4,563."""
    return f"{ms:,.0f}" if abs(ms) >= 100 else f"{ms:#.3g}".rstrip(".")


def ratio_text(ratio: float) -> str:
    """Formats a factor: 1.68x."""
    return f"{ratio:.2f}x"


def interval_text(row: SpeedupRow | Compared | PrecisionRow) -> str:
    """Formats a speed-up with its interval: 1.68x [1.66, 1.69]."""
    return ratio_and_interval(row.measured, row.ci95)


def ratio_and_interval(ratio: float, ci95: tuple[float, float]) -> str:
    """Formats a factor with its interval, like `interval_text`."""
    return f"{ratio_text(ratio)} [{ci95[0]:.2f}, {ci95[1]:.2f}]"


def ci_text(interval: tuple[float, float] | None) -> str:
    """Formats an interval of milliseconds: [112, 114]; empty if there is none."""
    return "" if interval is None else f"[{ms_text(interval[0])}, {ms_text(interval[1])}]"


def verdicts_text(verdicts: Iterable[SpeedVerdict]) -> str:
    """Counts the settings of each verdict: faster in 3 of 4 settings, inconclusive in 1."""
    count = Counter(verdicts)
    settings = f"{count.total()} setting{'' if count.total() == 1 else 's'}"
    named = [f"{verdict} in {count[verdict]}" for verdict in ("faster", "not faster", "inconclusive") if count[verdict]]
    return ", ".join([f"{named[0]} of {settings}", *named[1:]])


def error_text(error: float) -> str:
    """Formats an error with two significant digits: 2.1e-06."""
    return "0" if error == 0 else f"{error:.1e}"


def agreement_text(routing: RoutingAgreement | LayerAgreement | InputAgreement) -> str:
    """Formats the number of selected tokens that the reference selected too: all 8,192, or 8,189 of 8,192."""
    if routing.routed == 0:
        return "-"
    if routing.agreed == routing.routed:
        return f"all {routing.routed:,}"
    return f"{routing.agreed:,} of {routing.routed:,}"


def difference_text(differing: int, faults: int) -> str:
    """Says whether selected tokens differ, and whether all differences are near-ties."""
    if faults:
        return "1 difference is not a near-tie" if faults == 1 else f"{faults:,} differences are not near-ties"
    return "every difference is a near-tie" if differing else "no token is routed differently"


def served_text(row: ServedEngines) -> str:
    """Names the engines that are served if no target is named, and the reason."""
    task = "text" if writes_text(row.role) else "whole rows"
    return f"{row.model}, {task}: {row.target} {row.dtype}, {ms_text(row.ms)} ms: {row.reason}"


def causality_text(looks_ahead: Sequence[str]) -> str:
    """Says whether a model can generate text, given the parts of its spec that look at later tokens
    (`Model.looks_ahead`).
    """
    if not looks_ahead:
        return "causal: a token's logits depend on nothing after it, so texts can be generated token by token"
    return (
        f"not causal: {' and '.join(looks_ahead)} looks at the whole sequence, so it scores texts and does not "
        "generate them"
    )


def share_text(share: float) -> str:
    """Formats a share as a percentage, truncated instead of rounded, so that 100 % means all."""
    if math.isnan(share):
        return "nan"
    return "100 %" if share >= 1 else f"{math.floor(share * 10_000) / 100:.2f} %"


def percent_text(share: float | None) -> str:
    """Formats a share for which rounding is harmless, such as a coefficient of variation: 1.2 %; a dash if there is
    none.
    """
    return "-" if share is None else f"{100 * share:.1f} %"


def token_text(text: str) -> str:
    """Makes a token visible: a line feed gets a sign before it, and an empty token is replaced by a sign."""
    return text.replace("\n", "\N{RETURN SYMBOL}\n") or "\N{EMPTY SET}"


def count_text(count: float) -> str:
    """Formats a large number with a decimal prefix: 3.08 M, 1.27 G."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:,.0f}"


def flops_text(count: float) -> str:
    """Formats FLOPs: 29.77 GFLOP."""
    text = count_text(count)
    return f"{text}FLOP" if " " in text else f"{text} FLOP"


def bytes_text(count: int) -> str:
    """Formats bytes with a binary prefix: 12.3 MiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def range_text(share: Mapping[str, float]) -> str:
    """Formats the range of the shares of tokens that routed layers selected, without experts: 8.3 to 12.5 %; a dash
    without routing.
    """
    percentages = [100 * part for site, part in share.items() if not is_expert(site)]
    if not percentages:
        return "-"
    low, high = f"{min(percentages):.1f}", f"{max(percentages):.1f}"
    return f"{low} %" if low == high else f"{low} to {high} %"


def slots_text(capacity: Mapping[str, int]) -> str:
    """Lists how many tokens of a text each routed layer selects: 64 in layers 1, 3, 5, 7. Empty if nothing routes."""
    layers: dict[int, list[str]] = {}
    for site, k in capacity.items():
        if not is_expert(site):
            layers.setdefault(k, []).append(site)
    return "; ".join(f"{k:,} in layer{'s' if len(names) > 1 else ''} {', '.join(names)}" for k, names in layers.items())


def quality_text(quality: QualityRow | None) -> str:
    """Says how much perplexity is lost by selecting one token at a time, and how often a layer had no free slot. For a
    model that selects nothing, gives the perplexity alone.
    """
    if quality is None:
        return "quality: not measured, there is no text here for this model's vocabulary"
    read = f"tokens of {TEXTS[quality.text]}"
    if not quality.wanted:
        return f"quality: perplexity {quality.perplexity:.4f} on {quality.tokens:,} {read}"
    overflow = {site: count for site, count in quality.overflow.items() if count}
    layers = ", ".join(f"{count:,} in {'' if is_expert(site) else 'layer '}{site}" for site, count in overflow.items())
    return (
        f"quality: perplexity {quality.perplexity:.4f} selecting one token at a time, {quality.own_perplexity:.4f} by "
        f"the checkpoint's own selection, on {quality.tokens:,} {read}; "
        + (f"tokens that found no free slot: {layers}" if layers else "every token that wanted a slot found one")
    )


def timed_texts(rows: Sequence[DecodeRow]) -> str:
    """Says how many texts steps were timed on, and which: 4 or 8 texts (random ids)."""
    counts = sorted({row.texts for row in rows if row.texts is not None})
    if not counts:
        return "a text"
    kinds = " or ".join(dict.fromkeys(TEXTS[row.text] for row in rows if row.text is not None))
    texts = f"{' or '.join(f'{count:,}' for count in counts)} text{'' if counts == [1] else 's'}"
    return f"{texts} ({kinds})" if kinds else texts


def named_text(text: NamedText) -> str:
    """Names the file of the user that a model was judged and timed on."""
    return f"the named text {text.name}, SHA-256 {text.sha256[:12]}"


def threads_text(threads: int) -> str:
    """Says how many threads an engine was allowed."""
    return {0: "threads as the library chooses", 1: "1 thread"}.get(threads, f"{threads} threads")


def value_text(value: JsonValue) -> str:
    """Formats plain data of the environment: null as `none`, lists in one line."""
    if value is None:
        return "none"
    if isinstance(value, list):
        return ", ".join(value_text(item) for item in value)
    return str(value)


def printable(text: str, *, keep: str = "", encoding: str = "utf-8") -> str:
    """Replaces characters that cannot be printed safely by their escapes, because names come from elsewhere: terminal
    controls, text direction overrides, lone surrogates, and characters that the encoding lacks.
    """
    shown = "".join(char if char.isprintable() or char in keep else ascii(char)[1:-1] for char in text)
    return shown.encode(encoding, "backslashreplace").decode(encoding)

"""What was found about writing text, bucket by bucket: steps and prompts, each with its parity and its texts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mod_export.artifacts import is_expert
from mod_export.report.generation_entries import DecodeEntry, FirstTokenEntry, GenerationEntry, QualityEntry, TextsEntry
from mod_export.report.parity_entries import ParityEntry

__all__ = [
    "Prompts",
    "Steps",
    "TokenVerdict",
    "layers_text",
    "overflow_text",
    "prompts_of",
    "range_text",
    "steps_of",
    "verdict_of",
]

_Key = tuple[str, str, str]
"""Target, bucket, dtype."""
TokenVerdict = Literal["faster", "not faster", "inconclusive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    target: str
    bucket: str
    dtype: str
    parity: tuple[ParityEntry, ...]

    @property
    def parity_passed(self) -> bool | None:
        """Whether all parity rows passed, those of the dense twin included; None when there are none."""
        return all(row.passed for row in self.parity) if self.parity else None

    @property
    def batch(self) -> int:
        """Texts at once."""
        return _shape(self.bucket)[0]

    @property
    def tokens(self) -> int:
        """Of the cache of a text, or of a prompt."""
        return _shape(self.bucket)[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps(_Judged):
    """One decode bucket; `row` is None where nothing was timed."""

    row: DecodeEntry | None
    texts: tuple[TextsEntry, ...]

    @property
    def compared(self) -> int:
        """Texts that PyTorch continued too, of both models."""
        return sum(row.texts for row in self.texts)

    @property
    def equal(self) -> int:
        """Those that are the same."""
        return sum(row.equal for row in self.texts)

    @property
    def verdict(self) -> TokenVerdict | None:
        """Of the step's time."""
        return verdict_of(self.row.ci95) if self.row else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts(_Judged):
    """One prefill bucket; `row` is None where nothing was timed."""

    row: FirstTokenEntry | None

    @property
    def verdict(self) -> TokenVerdict | None:
        """Of the time to the first token; None without an interval."""
        return verdict_of(self.row.ci95) if self.row and self.row.ci95 else None


def verdict_of(ci95: tuple[float, float]) -> TokenVerdict:
    """What an interval of dense / MoD allows to say: nothing where it covers 1, or where it is no number."""
    low, high = ci95
    if low > 1 and high > 1:
        return "faster"
    return "not faster" if low < 1 and high < 1 else "inconclusive"


def steps_of(found: GenerationEntry) -> tuple[Steps, ...]:
    """Every decode bucket that has a row of any kind."""
    parity = _parity(found.parity, "decode")
    rows: dict[_Key, DecodeEntry] = {(row.target, row.bucket, row.dtype): row for row in found.decode}
    texts = [(row.target, row.bucket, row.dtype) for row in found.texts]
    return tuple(
        Steps(
            target=target,
            bucket=bucket,
            dtype=dtype,
            parity=parity.get((target, bucket, dtype), ()),
            row=rows.get((target, bucket, dtype)),
            texts=tuple(row for row in found.texts if (row.target, row.bucket, row.dtype) == (target, bucket, dtype)),
        )
        for target, bucket, dtype in dict.fromkeys([*parity, *rows, *texts])
    )


def prompts_of(found: GenerationEntry) -> tuple[Prompts, ...]:
    """Every prefill bucket that has a row of any kind."""
    parity = _parity(found.parity, "prefill")
    rows: dict[_Key, FirstTokenEntry] = {(row.target, f"b1s{row.tokens}", row.dtype): row for row in found.first_token}
    return tuple(
        Prompts(target=key[0], bucket=key[1], dtype=key[2], parity=parity.get(key, ()), row=rows.get(key))
        for key in dict.fromkeys([*parity, *rows])
    )


def range_text(share: Mapping[str, float]) -> str:
    """Shares of the tokens that ran in routed layers, experts left out: 8.3 to 12.5 %; a dash where nothing routes."""
    found = [100 * part for site, part in share.items() if not is_expert(site)]
    if not found:
        return "-"
    low, high = f"{min(found):.1f}", f"{max(found):.1f}"
    return f"{low} %" if low == high else f"{low} to {high} %"


def layers_text(found: GenerationEntry) -> str:
    """How many tokens of a text each routed layer takes: 64 in layers 1, 3, 5, 7; empty where nothing routes."""
    layers: dict[int, list[str]] = {}
    for site, k in (found.capacity or {}).items():
        if not is_expert(site):
            layers.setdefault(k, []).append(site)
    return "; ".join(f"{k:,} in layer{'s' if len(of) > 1 else ''} {', '.join(of)}" for k, of in layers.items())


def overflow_text(quality: QualityEntry) -> str:
    """Which layers had no place left, how often."""
    lost = {site: count for site, count in quality.overflow.items() if count}
    if not lost:
        return "every token that wanted to run found a place"
    layers = ", ".join(f"{count:,} in {'' if is_expert(site) else 'layer '}{site}" for site, count in lost.items())
    return f"tokens that found all places taken: {layers}"


def _parity(rows: Sequence[ParityEntry], role: str) -> dict[_Key, tuple[ParityEntry, ...]]:
    """Rows of one role by target, bucket and dtype; the role stands behind the target's name."""
    found: dict[_Key, tuple[ParityEntry, ...]] = {}
    for row in rows:
        target, _, of = row.target.rpartition(" ")
        if of == role:
            key: _Key = (target, row.bucket, row.dtype)
            found[key] = (*found.get(key, ()), row)
    return found


def _shape(bucket: str) -> tuple[int, int]:
    batch, seq = re.findall(r"\d+", bucket)
    return int(batch), int(seq)

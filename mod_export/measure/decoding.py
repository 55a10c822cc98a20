"""How fast text is written: steps and prompts of a model beside those of its dense twin, in turns on one machine.

A step is timed as a server runs it: token and position in, the engine, keys and values written into their slots, the
most probable token out. Both models do it in the same code, each with its cache in place. A step's time depends on what
is skipped in it, and that on the text, so steps are timed at positions all over a text, on the cache that the text left
there, and what is compared is their sum: tokens a second are one over the mean, and a median would leave out whichever
kind of step is the rarer. Every position is visited several times, each time with all others in between, so that the
weights of a part that is run seldom are as far away as they are when text is written; of the visits the fastest counts,
since a neighbour on the machine can only add to it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mod_export.artifacts import DType, ModelKind, Site, routed_output
from mod_export.generation.decoder import Decoder, Kept, Prompts, kept_from_prefill

__all__ = [
    "PROMPT_RUNS",
    "DecodeRow",
    "FirstTokenRow",
    "StepBytes",
    "Text",
    "decode_row",
    "first_token_row",
    "read_text",
]

RUNS = 5
"""Visits of each position."""
PROMPT_RUNS = 6
"""The range of so many ratios holds what half of them are below with a probability of 1 - 2 / 2 ** 6, 97 %."""
KINDS: tuple[ModelKind, ...] = ("mod", "dense")
RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRow:
    """Steps of one bucket, model against dense twin.

    Attributes:
        target: name of the engine family.
        bucket: of the decode engines: rows, and tokens that a cache holds.
        dtype: of the engines.
        threads: of one operator.
        positions: how many positions of a text were timed.
        ms: mean milliseconds of a step, of each model.
        tokens_per_second: rows of the bucket over `ms`.
        speedup: dense over MoD.
        ci95: interval of `speedup` by a bootstrap over positions.
        executed: place of routing -> share of the steps in which some row ran there.
        share: place of routing -> share of the tokens that ran there.
        least_bytes: bytes that a step of each model cannot do without: weights it multiplies by, and its cache.
        bound: dense over MoD of these bytes: what a machine gives that does nothing but move them.
        efficiency: speedup / bound.
        bound_ms: milliseconds that this machine's memory takes to move them; None where it was not measured.
        kv_bytes: of the keys and values of the bucket's caches, of each model.
        routed_kv_bytes: of those in routed layers, of MoD, and of the same layers in the dense twin.
    """

    target: str
    bucket: str
    dtype: DType
    threads: int
    positions: int
    ms: dict[str, float]
    tokens_per_second: dict[str, float]
    speedup: float
    ci95: tuple[float, float]
    executed: dict[str, float]
    share: dict[str, float]
    least_bytes: dict[str, int]
    bound: float
    efficiency: float
    bound_ms: dict[str, float] | None
    kv_bytes: dict[str, int]
    routed_kv_bytes: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenRow:
    """Time from a prompt to the token after it, model against dense twin.

    Attributes:
        target: name of the engine family.
        tokens: of the prompt, which fills its bucket.
        dtype: of the engines.
        ms: median milliseconds of each model.
        speedup: dense over MoD.
        ci95: the smallest and the largest of the ratios of single runs, which cover that of the medians.
    """

    target: str
    tokens: int
    dtype: DType
    ms: dict[str, float]
    speedup: float
    ci95: tuple[float, float]


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes that a step cannot do without, in steps of the routing: always, and where some row runs.

    Attributes:
        always: weights that every step multiplies by, and slots of layers that every token goes through.
        sites: place of routing -> what is added where some row runs there.
    """

    always: int
    sites: Mapping[str, int]

    def of(self, executed: Mapping[str, float]) -> int:
        """Mean over steps in which each place is executed so often."""
        return round(self.always + sum(size * executed[site] for site, size in self.sites.items()))


@dataclass(frozen=True, slots=True)
class Text:
    """A text of each row, and what both models remember of the whole of it.

    Attributes:
        ids_BS: int64.
        kept: of each model, one for each row.
        ran: of each model, place of routing -> bool (B, S), which tokens ran there. A dense twin has experts at most.
    """

    ids_BS: np.ndarray
    kept: Mapping[ModelKind, Sequence[Kept]]
    ran: Mapping[ModelKind, Mapping[Site, np.ndarray]]


def read_text(
    ids_BS: np.ndarray, prompts: Mapping[ModelKind, Prompts], sites: Mapping[ModelKind, Sequence[Site]]
) -> Text:
    """Reads whole texts at once. What a row remembers of a part of its text is the beginning of what it remembers of
    all of it, since slots are taken in order.
    """
    B, S = ids_BS.shape
    kept: dict[ModelKind, list[Kept]] = {kind: [] for kind in KINDS}
    ran = {kind: {site: np.zeros((B, S), dtype=bool) for site in sites[kind]} for kind in KINDS}
    for row, ids_S in enumerate(ids_BS):
        for kind in KINDS:
            found = prompts[kind].found(ids_S.tolist())
            kept[kind].append(kept_from_prefill(found, 0, S))
            for site, ran_BS in ran[kind].items():
                positions_K = found[routed_output(site)][0]
                ran_BS[row, positions_K[positions_K >= 0]] = True
    return Text(ids_BS, kept, ran)


def decode_row(
    decoders: Mapping[ModelKind, Decoder],
    text: Text,
    positions: int,
    *,
    target: str,
    bucket: str,
    dtype: DType,
    threads: int,
    seed: int,
    least: Mapping[ModelKind, StepBytes],
    bandwidth_gbs: float | None,
) -> DecodeRow:
    """Times steps at positions spread over the text.

    Args:
        decoders: of both models.
        text: as both have read it, one row for each row of the bucket.
        positions: how many.
        target: name of the engine family.
        bucket: name of the bucket.
        dtype: of the engines.
        threads: of one operator.
        seed: of the order of positions, and of the bootstrap.
        least: what a step of each model has to read.
        bandwidth_gbs: 1e9 bytes a second between this machine's processor and memory, if it is known.

    Raises:
        EngineError: an engine failed.
    """
    B, S = text.ids_BS.shape
    for kind in KINDS:
        for row, kept in enumerate(text.kept[kind]):
            decoders[kind].put(row, kept)
    chosen_P = np.unique(np.linspace(1, S - 1, positions).round().astype(np.int64))
    rng = np.random.default_rng(seed)
    taken = np.full((len(chosen_P), len(KINDS)), np.inf)
    ran_PBN: dict[int, np.ndarray] = {}
    for run in range(RUNS):
        for p in rng.permutation(len(chosen_P)).tolist():
            ms, ran_PBN[p] = _timed(decoders, text, int(chosen_P[p]), first=run % 2)
            taken[p] = np.minimum(taken[p], ms)
    mod_ms, dense_ms = (float(mean) for mean in taken.mean(axis=0))
    ran = np.stack(list(ran_PBN.values()))
    sites = [str(site) for site in text.ran["mod"]]
    executed = dict(zip(sites, ran.any(axis=1).mean(axis=0).tolist(), strict=True))
    moved = {"mod": least["mod"].of(executed), "dense": least["dense"].of({})}
    bound = moved["dense"] / moved["mod"]
    kv_bytes = {kind: decoders[kind].kv_bytes for kind in KINDS}
    routed = [layer for layer, size in kv_bytes["mod"].items() if size < kv_bytes["dense"][layer]]
    return DecodeRow(
        target=target,
        bucket=bucket,
        dtype=dtype,
        threads=threads,
        positions=len(chosen_P),
        ms={"mod": mod_ms, "dense": dense_ms},
        tokens_per_second={"mod": 1e3 * B / mod_ms, "dense": 1e3 * B / dense_ms},
        speedup=dense_ms / mod_ms,
        ci95=_interval(taken, seed),
        executed=executed,
        share=dict(zip(sites, ran.mean(axis=(0, 1)).tolist(), strict=True)),
        least_bytes=moved,
        bound=bound,
        efficiency=dense_ms / mod_ms / bound,
        bound_ms=None if bandwidth_gbs is None else {kind: size / bandwidth_gbs / 1e6 for kind, size in moved.items()},
        kv_bytes={kind: sum(sizes.values()) for kind, sizes in kv_bytes.items()},
        routed_kv_bytes={kind: sum(sizes[layer] for layer in routed) for kind, sizes in kv_bytes.items()},
    )


def _timed(
    decoders: Mapping[ModelKind, Decoder], text: Text, position: int, first: int
) -> tuple[list[float], np.ndarray]:
    """A step of each model at one position, in milliseconds; and who ran where, bool (B, N). `first` goes first."""
    B = len(text.ids_BS)
    before = {
        kind: np.stack([ran_BS[:, :position].sum(1) for ran_BS in ran.values()], 1) if ran else None
        for kind, ran in text.ran.items()
    }
    ids_B, position_B = text.ids_BS[:, position], np.full(B, position, dtype=np.int64)
    ms = dict.fromkeys(KINDS, 0.0)
    for kind in (KINDS[first], KINDS[1 - first]):
        decoder = decoders[kind]
        counts_BN = decoder.cache.get("counts")
        if counts_BN is not None:
            counts_BN[:] = before[kind]
        begin = time.perf_counter()
        decoder.step(ids_B, position_B).argmax(-1)
        ms[kind] = 1e3 * (time.perf_counter() - begin)
    ran_BN = decoders["mod"].ran_BN
    return [ms[kind] for kind in KINDS], np.zeros((B, 0), dtype=bool) if ran_BN is None else ran_BN.copy()


def _interval(taken: np.ndarray, seed: int) -> tuple[float, float]:
    rng = np.random.default_rng(seed)
    drawn = taken[rng.integers(0, len(taken), (RESAMPLES, len(taken)))].mean(axis=1)
    low, high = np.percentile(drawn[:, 1] / drawn[:, 0], [2.5, 97.5])
    return float(low), float(high)


def first_token_row(
    prompts: Mapping[ModelKind, Prompts], ids_S: np.ndarray, *, target: str, dtype: DType
) -> FirstTokenRow:
    """Times a prompt, in turns.

    Raises:
        EngineError: an engine failed.
    """
    taken: dict[ModelKind, list[float]] = {kind: [] for kind in KINDS}
    for run in range(1 + PROMPT_RUNS):
        for kind in KINDS if run % 2 else reversed(KINDS):
            begin = time.perf_counter()
            prompts[kind].read(ids_S.tolist()).logits_V.argmax()
            if run:  # The first one warms up.
                taken[kind].append(1e3 * (time.perf_counter() - begin))
    ms: dict[str, float] = {kind: float(np.median(samples)) for kind, samples in taken.items()}
    ratios = np.divide(taken["dense"], taken["mod"])
    return FirstTokenRow(
        target=target,
        tokens=len(ids_S),
        dtype=dtype,
        ms=ms,
        speedup=ms["dense"] / ms["mod"],
        ci95=(float(ratios.min()), float(ratios.max())),
    )

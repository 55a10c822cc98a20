"""Speed of writing text: steps and prompts of a model beside those of its dense baseline, interleaved on one machine.

A step is timed as a server runs it: token and position in, the engine, keys and values written into their slots, the
most probable token out. Both models do it in the same code, each with its cache in place. A step's time depends on what
is skipped in it, and that on the text, so steps are timed at positions all over a text, on the cache that the text left
there, and their sums are compared: tokens a second are one over the mean, and a median would leave out whichever kind
of step is rarer. Every position is visited several times, each time with all others in between, so that the weights of
a part that is run seldom are as far away as they are when text is written. Of the visits the fastest counts, since a
neighbour on the machine can only add to it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mod_export.results.generation import DecodeRow, FirstTokenRow, StepBytes
from mod_export.runtime.generate.decoder import Decoder, DecodingEngines, Kept, Prompts, kept_from_prefill
from mod_export.types import KINDS, DType, Engine, ModelKind, Site, routed_output

__all__ = [
    "PROMPT_RUNS",
    "Text",
    "decode_row",
    "first_token_of_pair",
    "first_token_row",
    "read_text",
    "steps_of_pair",
]

RUNS = 5
"""Visits of each position."""
PROMPT_RUNS = 6
"""The range of so many ratios holds what half of them are below with a probability of 1 - 2 / 2 ** 6, 97 %."""
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Text:
    """A text of each row, and what both models remember of the whole of it.

    Attributes:
        ids_BS: int64.
        kept: of each model, one for each row.
        ran: of each model, routing site -> bool (B, S), which tokens were selected there. A dense baseline has no sites
            but experts.
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
    predicted = moved["dense"] / moved["mod"]
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
        measured=dense_ms / mod_ms,
        ci95=_interval(taken, seed),
        executed=executed,
        selected=dict(zip(sites, ran.mean(axis=(0, 1)).tolist(), strict=True)),
        least_bytes=moved,
        predicted_bytes=predicted,
        efficiency=dense_ms / mod_ms / predicted,
        predicted_ms=None
        if bandwidth_gbs is None
        else {kind: size / bandwidth_gbs / 1e6 for kind, size in moved.items()},
        kv_bytes={kind: sum(sizes.values()) for kind, sizes in kv_bytes.items()},
        routed_kv_bytes={kind: sum(sizes[layer] for layer in routed) for kind, sizes in kv_bytes.items()},
    )


def _timed(
    decoders: Mapping[ModelKind, Decoder], text: Text, position: int, first: int
) -> tuple[list[float], np.ndarray]:
    """Milliseconds of a step of each model at one position, and which rows ran at which site, bool (B, N)."""
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
    prompts: Mapping[ModelKind, Prompts], ids_S: np.ndarray, *, target: str, bucket: str, dtype: DType
) -> FirstTokenRow:
    """Times a prompt, models interleaved.

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
    ms: dict[ModelKind, float] = {kind: float(np.median(samples)) for kind, samples in taken.items()}
    ratios = np.divide(taken["dense"], taken["mod"])
    return FirstTokenRow(
        target=target,
        tokens=len(ids_S),
        dtype=dtype,
        ms=ms,
        bucket=bucket,
        measured=ms["dense"] / ms["mod"],
        ci95=(float(ratios.min()), float(ratios.max())),
    )


def steps_of_pair(
    found: DecodingEngines,
    pair: Mapping[ModelKind, Engine],
    ids_BS: np.ndarray,
    sites: Mapping[ModelKind, Sequence[Site]],
    least: Mapping[ModelKind, StepBytes],
    bandwidth_gbs: float | None,
) -> DecodeRow:
    """Times the steps of a bucket at positions of the texts int64 (B, S), as much of them as a prompt bucket holds.

    `sites` are the routing sites of each model: a dense baseline has no sites but experts.

    Raises:
        EngineError: an engine failed.
    """
    mod, config = pair["mod"], found.config
    with (
        found.prompts("mod", mod.target, mod.dtype) as ours,
        found.prompts("dense", mod.target, mod.dtype) as theirs,
        found.decoder(mod) as mod_decoder,
        found.decoder(pair["dense"]) as dense_decoder,
    ):
        ids_BS = ids_BS[:, : min(mod.bucket.seq, ours.longest, theirs.longest)]
        text = read_text(ids_BS, {"mod": ours, "dense": theirs}, sites)
        return decode_row(
            {"mod": mod_decoder, "dense": dense_decoder},
            text,
            config.generation.measured_tokens,
            target=mod.target,
            bucket=mod.bucket.name,
            dtype=mod.dtype,
            threads=config.latency.threads,
            seed=config.seed,
            least=least,
            bandwidth_gbs=bandwidth_gbs,
        )


def first_token_of_pair(found: DecodingEngines, pair: Mapping[ModelKind, Engine], ids_S: np.ndarray) -> FirstTokenRow:
    """Times a prompt int64 (S,) that fills its bucket.

    Raises:
        EngineError: an engine failed.
    """
    mod = pair["mod"]
    with found.prompts("mod", mod.target, mod.dtype) as ours, found.prompts("dense", mod.target, mod.dtype) as theirs:
        return first_token_row(
            {"mod": ours, "dense": theirs}, ids_S, target=mod.target, bucket=mod.bucket.name, dtype=mod.dtype
        )

"""Speed of writing text: prompts and steps of a model, interleaved with those of its dense baseline if it has one.

A prompt is timed like whole rows. A step is timed as a server runs it: token and position in, the engine run, keys and
values written into their slots, the most probable token out. The time of a step depends on what it skips, hence on
the text. So steps are timed at positions all over several texts, on the cache that the text left there. Their mean
times are compared, because tokens per second are one over the mean; a median would ignore the rarer kind of step. Every
position is visited several times, with all other positions of its text in between, so that weights that are seldom used
are as likely to have left the processor's caches as when text is written. The fastest visit counts, because other load
on the machine can only make a step slower.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from mod_export.measure.sampling import interleaved
from mod_export.measure.statistics import compare, verdict_of
from mod_export.model.model import GeneratingModel
from mod_export.rows.base import pair_fields
from mod_export.rows.speed import Compared, DecodeRow, FirstTokenRow, SpeedVerdict, StepBytes, StepsCompared
from mod_export.runtime.cache import COUNTS, Kept
from mod_export.runtime.decoder import Decoder
from mod_export.runtime.decoding_engines import DecodingEngines
from mod_export.runtime.prompts import Prompts
from mod_export.types import FLOAT_BYTES, Bucket, Engine, ModelKind, Site, TargetLimits, routed_output

VISITS, LEAST_VISITS = 5, 2
"""Visits of each position, and the least number of visits for the slowest engines."""
ORDER: tuple[ModelKind, ...] = ("dense", "mod")
"""Order of the columns of samples; without a dense baseline, there is only the model's column."""
RESAMPLES = 2000
LEAST_POSITIONS = 5
"""Smallest number of positions whose spread says anything; a bootstrap over one is certain of everything."""


def measure_prompts(decoding: DecodingEngines, engines: Mapping[ModelKind, Engine], ids_S: np.ndarray) -> FirstTokenRow:
    """Times a prompt, int64 (S,), that fills its bucket, `latency.samples` times with the engine of each model.

    Raises:
        EngineError: an engine failed.
    """
    setting, options = engines["mod"].setting, decoding.config.latency
    with _prompts(decoding, engines) as prompts:
        runs = [partial(_first_token, reader, ids_S.tolist()) for reader in prompts.values()]
        rounds = interleaved(runs, options, decoding.config.seed)
    samples_ms = {kind: rounds.samples_ms(index) for index, kind in enumerate(prompts)}
    compared = None
    if "dense" in samples_ms:
        ratio = compare(samples_ms["dense"], samples_ms["mod"], options, looks=1, seed=decoding.config.seed)
        compared = Compared(measured=ratio.measured, ci95=ratio.ci95, verdict=ratio.verdict)
    return FirstTokenRow(
        **pair_fields(setting),
        tokens=len(ids_S),
        ms={kind: float(np.median(prompt_samples_ms)) for kind, prompt_samples_ms in samples_ms.items()},
        compared=compared,
    )


def _first_token(prompts: Prompts, ids: Sequence[int]) -> int:
    return int(prompts.read(ids).logits_V.argmax())


@contextlib.contextmanager
def _prompts(decoding: DecodingEngines, engines: Mapping[ModelKind, Engine]) -> Iterator[dict[ModelKind, Prompts]]:
    """Opens the readers of prompts of the models in `engines`, in ORDER."""
    target, dtype = engines["mod"].target, engines["mod"].dtype
    with contextlib.ExitStack() as opened:
        yield {kind: opened.enter_context(decoding.prompts(kind, target, dtype)) for kind in ORDER if kind in engines}


@dataclass(frozen=True, slots=True)
class ReadText:
    """A text for each row, and the cache of each model after reading all of it.

    Attributes:
        ids_BS: token ids, int64.
        kept: for each model, the cache of each row.
        ran: for each model, routing site -> bool (B, S), the tokens that were selected there. A dense baseline has no
            sites except experts.
    """

    ids_BS: np.ndarray
    kept: Mapping[ModelKind, Sequence[Kept]]
    ran: Mapping[ModelKind, Mapping[Site, np.ndarray]]


def read_text(
    ids_BS: np.ndarray, prompts: Mapping[ModelKind, Prompts], sites: Mapping[ModelKind, Sequence[Site]]
) -> ReadText:
    """Reads whole texts. Slots are filled in order, so the cache of a part of a text is the beginning of the
    cache of the whole text.
    """
    B, S = ids_BS.shape
    states: dict[ModelKind, list[Kept]] = {kind: [] for kind in prompts}
    ran = {kind: {site: np.zeros((B, S), dtype=bool) for site in sites[kind]} for kind in prompts}
    for row, ids_S in enumerate(ids_BS):
        for kind, reader in prompts.items():
            state, routed = reader.read_routed(ids_S.tolist())
            states[kind].append(state)
            for site, ran_BS in ran[kind].items():
                ran_BS[row, routed[routed_output(site)]] = True
    return ReadText(ids_BS, states, ran)


def measure_steps(
    decoding: DecodingEngines,
    engines: Mapping[ModelKind, Engine],
    ids_TBS: np.ndarray,
    sites: Mapping[ModelKind, Sequence[Site]],
    least: Mapping[ModelKind, StepBytes],
    limits: TargetLimits,
) -> DecodeRow:
    """Times steps at positions spread over texts. `DecodeRow.predicted` adds what memory alone would take.

    The texts take turns in filling the bucket. Each turn has its share of the positions, the first turn the earliest
    ones, so that texts are read only as far as they are timed.

    Args:
        decoding: all engines of the folder.
        engines: decode engines of the model and of its dense baseline if it has one.
        ids_TBS: the texts, int64, for T turns one for each of the B rows of the bucket.
        sites: routing sites of each model.
        least: bytes that a step of each model has to read if its cache is full, in float32.
        limits: the limits of the engines' target, which say how they attend to a cache.

    Raises:
        EngineError: an engine failed.
    """
    setting, config = engines["mod"].setting, decoding.config
    S = min(setting.bucket.seq, ids_TBS.shape[2])
    positions_P = np.unique(np.linspace(1, S - 1, config.generation.measured_tokens).round().astype(np.int64))
    timed = []
    with contextlib.ExitStack() as opened:
        prompts = opened.enter_context(_prompts(decoding, engines))
        decoders = {kind: opened.enter_context(decoding.decoder(engines[kind])) for kind in prompts}
        turns = min(len(ids_TBS), len(positions_P))
        max_seconds = config.latency.max_seconds / turns
        for ids_BS, its_positions in zip(ids_TBS, np.array_split(positions_P, turns), strict=False):
            text = read_text(ids_BS[:, : its_positions[-1] + 1], prompts, sites)
            timed.append(_steps(decoders, text, its_positions, config.seed, max_seconds))
        kv_bytes = {kind: decoder.kv_bytes for kind, decoder in decoders.items()}
        wide = {kind: _bytes_of_number(decoder) / FLOAT_BYTES["float32"] for kind, decoder in decoders.items()}
    ms_PK, ran_PBN = (np.concatenate(arrays) for arrays in zip(*timed, strict=True))
    ms: dict[ModelKind, float] = dict(zip(decoders, ms_PK.mean(axis=0).tolist(), strict=True))
    names = [str(site) for site in sites["mod"]]
    executed = dict(zip(names, ran_PBN.any(axis=1).mean(axis=0).tolist(), strict=True))
    in_use = float(positions_P.mean()) / setting.bucket.seq if limits.cached_attention else 1.0
    # If only some rows of a step can run in a layer, its attention is no operator that knows the slots in use.
    routed_in_use = 1.0 if config.generation.slots == "fair" else in_use
    least_bytes = {
        kind: least[kind].of(executed if kind == "mod" else {}, wide[kind] * in_use, wide[kind] * routed_in_use)
        for kind in decoders
    }
    compared = None
    if "dense" in decoders:
        measured, ci95 = ms["dense"] / ms["mod"], _interval(ms_PK, config.seed)
        predicted = least_bytes["dense"] / least_bytes["mod"]
        routed = [layer for layer, size in kv_bytes["mod"].items() if size < kv_bytes["dense"][layer]]
        compared = StepsCompared(
            measured=measured,
            ci95=ci95,
            verdict=_verdict(len(positions_P), ci95, config.latency.resolution),
            predicted_bytes=predicted,
            efficiency=measured / predicted,
            routed_kv_bytes={kind: sum(sizes[layer] for layer in routed) for kind, sizes in kv_bytes.items()},
        )
    return DecodeRow(
        **pair_fields(setting),
        threads=config.latency.threads,
        positions=len(positions_P),
        texts=turns * setting.bucket.batch,
        ms=ms,
        tokens_per_second={kind: 1e3 * setting.bucket.batch / step_ms for kind, step_ms in ms.items()},
        executed=executed,
        selected=dict(zip(names, ran_PBN.mean(axis=(0, 1)).tolist(), strict=True)),
        least_bytes=least_bytes,
        predicted_ms=None,
        kv_bytes={kind: sum(sizes.values()) for kind, sizes in kv_bytes.items()},
        compared=compared,
    )


def step_bytes(model: GeneratingModel, bucket: Bucket, stored: Mapping[str, int] | None = None) -> StepBytes:
    """Returns the bytes that a decode step must read: a constant part, and a part for each routing site.

    `stored` gives the bytes of weights that are not stored as float32.
    """
    nowhere = dict.fromkeys(model.sites, 0.0)

    def read(length: int) -> tuple[int, dict[str, int]]:
        always = model.least_bytes(bucket.batch, length, nowhere, stored)
        return always, {
            str(site): model.least_bytes(bucket.batch, length, nowhere | {site: 1.0}, stored) - always
            for site in model.sites
        }

    # A cache for texts of no tokens is empty, which leaves the weights.
    (always, sites), (always_cached, sites_cached) = read(0), read(bucket.seq)
    cache = {site: size - sites[site] for site, size in sites_cached.items()}
    # Experts add nothing, because every step reads as many of them as its rows can take.
    return StepBytes(
        always=always,
        sites={site: size for site, size in sites.items() if size},
        cache=StepBytes(always=always_cached - always, sites={site: size for site, size in cache.items() if size}),
    )


def _bytes_of_number(decoder: Decoder) -> float:
    """Returns the mean number of bytes of a number in the keys and values of a cache."""
    arrays = [array for name, array in decoder.cache.items() if name != COUNTS]
    return sum(array.nbytes for array in arrays) / max(1, sum(array.size for array in arrays))


def _steps(
    decoders: Mapping[ModelKind, Decoder], text: ReadText, positions_P: np.ndarray, seed: int, max_seconds: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns milliseconds of each model, (P, K) in the order of `decoders`, and bool (P, B, N), which rows of the MoD
    model ran at which site. After LEAST_VISITS visits, no visit begins after `max_seconds`.
    """
    for kind, decoder in decoders.items():
        for row, state in enumerate(text.kept[kind]):
            decoder.put(row, state)
    kinds = list(decoders)
    rng = np.random.default_rng(seed)
    ms_PK = np.full((len(positions_P), len(kinds)), np.inf)
    ran_PBN: dict[int, np.ndarray] = {}
    deadline = time.perf_counter() + max_seconds
    for visit in range(VISITS):
        if visit >= LEAST_VISITS and time.perf_counter() >= deadline:
            break
        for p in rng.permutation(len(positions_P)).tolist():
            # The models take turns in running first.
            for kind in kinds if visit % 2 == 0 else reversed(kinds):
                index, ms = kinds.index(kind), _step_ms(decoders[kind], text, kind, int(positions_P[p]))
                ms_PK[p, index] = min(ms_PK[p, index], ms)
            ran_BN = decoders["mod"].ran_BN
            ran_PBN[p] = np.zeros((len(text.ids_BS), 0), dtype=bool) if ran_BN is None else ran_BN.copy()
    return ms_PK, np.stack([ran_PBN[p] for p in range(len(positions_P))])


def _step_ms(decoder: Decoder, text: ReadText, kind: ModelKind, position: int) -> float:
    counts = [ran_BS[:, :position].sum(1) for ran_BS in text.ran[kind].values()]
    if COUNTS in decoder.cache:
        decoder.cache[COUNTS][:] = np.stack(counts, 1)
    ids_B, position_B = text.ids_BS[:, position], np.full(len(text.ids_BS), position, dtype=np.int64)
    begin = time.perf_counter()
    decoder.step(ids_B, position_B).argmax(-1)
    ms = 1e3 * (time.perf_counter() - begin)
    _restore(decoder, text.kept[kind], np.stack([position_B, *counts], 1))
    return ms


def _restore(decoder: Decoder, kept: Sequence[Kept], slot_BM: np.ndarray) -> None:
    """Writes the text's keys and values back into the slots that a step may have written, int64 (B, M). A row that
    keeps nothing writes to its next free slot, which here holds a later token of the text.
    """
    for row, (state, slot_M) in enumerate(zip(kept, slot_BM, strict=True)):
        for name, row_GLE in state.rows.items():
            slots = slot_M[slot_M < min(row_GLE.shape[1], decoder.cache[name].shape[2])]
            decoder.cache[name][row][:, slots] = row_GLE[:, slots]


def _verdict(positions: int, ci95: tuple[float, float], resolution: float) -> SpeedVerdict:
    return "inconclusive" if positions < LEAST_POSITIONS else verdict_of(ci95, resolution)


def _interval(ms_PK: np.ndarray, seed: int) -> tuple[float, float]:
    """Returns the 95 % interval of the ratio of the means of both models, by a bootstrap over positions."""
    rng = np.random.default_rng(seed)
    drawn = ms_PK[rng.integers(0, len(ms_PK), (RESAMPLES, len(ms_PK)))].mean(axis=1)
    low, high = np.percentile(drawn[:, 0] / drawn[:, 1], [2.5, 97.5])
    return float(low), float(high)

"""What engines write, beside what the eager model writes; and what it costs in quality to decide a token at a time."""

from __future__ import annotations

import math

import numpy as np

from mod_export.results.base import setting_fields
from mod_export.results.generation import QualityRow, TextsRow
from mod_export.runtime.generate.decoder import Decoder, Prompts
from mod_export.runtime.generate.logits import negative_log_likelihood
from mod_export.sources.protocol import GeneratingModel, LoadedModel
from mod_export.types import Setting
from mod_export.validate.inputs import Batch, affordable_tokens
from mod_export.validate.reference import Reference

__all__ = ["prompts_of", "quality_of", "texts_of"]


def prompts_of(loaded: LoadedModel, texts: int, length: int, seed: int) -> np.ndarray:
    """Beginnings of held-out text where the model's vocabulary has text here, else random ids: int64 (texts, S)."""
    ids_NS = loaded.sample_ids(texts, length, seed)
    if ids_NS is not None:
        return ids_NS
    return np.random.default_rng(seed).integers(0, loaded.vocab_size, (texts, length), dtype=np.int64)


def texts_of(
    model: GeneratingModel,
    prompts: Prompts,
    decoder: Decoder,
    prompt_NS: np.ndarray,
    max_new_tokens: int,
    rows: int,
    setting: Setting,
) -> TextsRow:
    """Has both continue the prompts, the engine `rows` of them at once.

    Raises:
        EngineError: the engine failed.
    """
    expected = [model.write(ids_S.tolist(), max_new_tokens) for ids_S in prompt_NS]
    found: list[list[int]] = []
    for start in range(0, len(prompt_NS), rows):
        found += _greedy(prompts, decoder, prompt_NS[start : start + rows], max_new_tokens)
    firsts = [
        next((i for i, (one, other) in enumerate(zip(ours, theirs, strict=True), 1) if one != other), None)
        for ours, theirs in zip(found, expected, strict=True)
    ]
    different = [first for first in firsts if first is not None]
    return TextsRow(
        **setting_fields(setting),
        texts=len(prompt_NS),
        tokens=sum(map(len, found)),
        identical=len(firsts) - len(different),
        first_difference=min(different, default=None),
    )


def _greedy(prompts: Prompts, decoder: Decoder, prompt_NS: np.ndarray, max_new_tokens: int) -> list[list[int]]:
    """Continuations of up to as many prompts as the decoder has rows."""
    N, S = prompt_NS.shape
    logits_NV = []
    for row, ids_S in enumerate(prompt_NS):
        kept = prompts.read(ids_S.tolist())
        decoder.put(row, kept)
        logits_NV.append(kept.logits_V)
    token_N = np.argmax(np.stack(logits_NV), axis=1)
    written = [token_N]
    ids_B, position_B = np.zeros(decoder.batch, dtype=np.int64), np.full(decoder.batch, -1, dtype=np.int64)
    for step in range(max_new_tokens - 1):
        ids_B[:N], position_B[:N] = token_N, S + step
        token_N = np.argmax(decoder.step(ids_B, position_B)[:N], axis=1)
        written.append(token_N)
    found: list[list[int]] = np.stack(written, axis=1).tolist()
    return found


def quality_of(model: GeneratingModel, causal: Reference, own: Reference, texts: int, seed: int) -> QualityRow | None:
    """Reads held-out text both ways.

    Args:
        model: as it decides one token at a time.
        causal: its reference.
        own: that of the checkpoint as it was trained.
        texts: how many texts of a window each, or fewer of a large model.
        seed: of their choice.

    Returns:
        None where the model's vocabulary has no text here.
    """
    affordable = max(1, min(texts, affordable_tokens(own.loaded) // model.window))
    ids_NS = own.loaded.sample_ids(affordable, model.window, seed)
    if ids_NS is None or model.window < 2:
        return None
    nll = own_nll = 0.0
    tokens = 0
    wanted, ran = dict.fromkeys(model.sites, 0), dict.fromkeys(model.sites, 0)
    for ids_S in ids_NS:
        batch = Batch("text", ids_S[None], np.array([model.window], dtype=np.int64))
        traced = causal.free(batch)
        found, count = negative_log_likelihood(traced.logits_BSV, batch.ids_BS)
        nll, tokens = nll + found, tokens + count
        own_nll += negative_log_likelihood(own.free(batch).logits_BSV, batch.ids_BS)[0]
        for site, judged in traced.judged.items():
            ran[site] += int((traced.routed[site] >= 0).sum())
            wanted[site] += int(((judged.score_BS > 0) & judged.open_BS).sum())
    read = ids_NS.size
    return QualityRow(
        tokens=tokens,
        window=model.window,
        perplexity=math.exp(nll / tokens),
        own_perplexity=math.exp(own_nll / tokens),
        wanted={str(site): count / read for site, count in wanted.items()},
        selected={str(site): count / read for site, count in ran.items()},
        overflow={str(site): max(0, wanted[site] - ran[site]) for site in wanted},
    )

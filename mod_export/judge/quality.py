"""The quality lost when a model decides one token at a time: perplexity of text in this mode and as trained."""

from __future__ import annotations

import math

import numpy as np

from mod_export.judge.inputs import Batch, TextOf, affordable_tokens, text_ids
from mod_export.judge.reference import Reference
from mod_export.model.model import GeneratingModel
from mod_export.rows.speed import QualityRow
from mod_export.runtime.logits import negative_log_likelihood


def quality_of(
    model: GeneratingModel,
    causal: Reference,
    own: Reference,
    texts: int,
    seed: int,
    text_of: TextOf | None = None,
) -> QualityRow | None:
    """Measures perplexity on the same texts, deciding one token at a time and as trained.

    Args:
        model: the model as it decides one token at a time.
        causal: its reference.
        own: the reference of the checkpoint as it was trained.
        texts: number of texts, each one window long; fewer for a large model.
        seed: seed for the choice of texts.
        text_of: source of text for a model that has none of its own.

    Returns:
        None if there is no text for the model, or if its window is a single token.
    """
    affordable = max(1, min(texts, affordable_tokens(own.model) // model.window))
    held_out = text_ids(own.model, affordable, model.window, seed) is not None
    ids_NS = text_ids(own.model, affordable, model.window, seed, text_of)
    if ids_NS is None or model.window < 2:
        return None
    nll = own_nll = 0.0
    tokens = 0
    wanted, ran = dict.fromkeys(model.sites, 0), dict.fromkeys(model.sites, 0)
    for ids_S in ids_NS:
        batch = Batch.of_tokens("text", ids_S[None], np.array([model.window], dtype=np.int64))
        traced = causal.free(batch)
        text_nll, count = negative_log_likelihood(traced.logits_BSV, batch.ids_BS)
        nll, tokens = nll + text_nll, tokens + count
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
        text="held_out" if held_out else "documentation",
    )

"""Measures a trained model of the study on held-out text.

It measures the loss as trained, the loss when the predictor decides instead of top-k, the accuracy of the predictor,
and for the figures router scores, the tokens that each layer selected, and the entropy of each next token.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.study.models import SEQ
from mod_models.checkpoint import Checkpoint, read_plain
from mod_models.routing import Decisions
from mod_models.spec import ModelSpec, is_expert
from mod_models.train.corpus import batch_at, read_corpus
from mod_models.train.losses import losses
from mod_models.transformer import Transformer

EVAL_SEED = 20_000_000
EVAL_BATCHES = 16
EVAL_ROWS = 8
MAP_SEED = 30_000_000
BINS = 10


def trained_model(folder: Path, spec: ModelSpec, selection: str | None = None) -> Transformer:
    """Returns the float32 model of a finished run in eval mode. `selection` replaces the selection of the training."""
    if selection is not None and spec.routing is not None:
        spec = replace(spec, routing=replace(spec.routing, selection=selection))
    return Checkpoint(spec=spec, weights=read_plain(folder / "state.pt")["model"]).module()


@torch.no_grad()
def measured(folder: Path, spec: ModelSpec) -> dict[str, Any]:
    """Returns all measurements as plain numbers for JSON."""
    text_N = read_corpus().held_out.id_N
    batches = [batch_at(text_N, EVAL_ROWS, SEQ + 1, EVAL_SEED + i) for i in range(EVAL_BATCHES)]
    model = trained_model(folder, spec)
    by_batch = [losses(model, ids_BS1) for ids_BS1 in batches]
    accuracies = [
        batch_losses.metrics[name]
        for batch_losses in by_batch
        for name in batch_losses.metrics
        if name.startswith("predictor_accuracy")
    ]
    result: dict[str, Any] = {
        "bits_per_byte": _bits([batch_losses.next_token for batch_losses in by_batch]),
        "predictor_accuracy": sum(accuracies) / len(accuracies) if accuracies else None,
        "overflow": _means(by_batch, "overflow"),
    }
    if accuracies:
        causal = trained_model(folder, spec, "predictor")
        again = [losses(causal, ids_BS1) for ids_BS1 in batches]
        result["predictor_bits_per_byte"] = _bits([batch_losses.next_token for batch_losses in again])
        result["predictor_overflow"] = _means(again, "overflow")
    if spec.routing is not None:
        result |= _routing(model, batches)
        result["map"] = _map(model, text_N)
    return result


def _bits(nats: list[Tensor]) -> float:
    return float(torch.stack(nats).mean()) / math.log(2)


def _means(by_batch: list[Any], prefix: str) -> dict[str, float]:
    names = [name for name in by_batch[0].metrics if name.startswith(f"{prefix}/")]
    return {
        name.partition("/")[2]: sum(batch_losses.metrics[name] for batch_losses in by_batch) / len(by_batch)
        for name in names
    }


def _routing(model: Transformer, batches: list[Tensor]) -> dict[str, Any]:
    """Scores of each routed layer, and the share of routed blocks that run a token by entropy of the next token."""
    scores: dict[str, list[Tensor]] = {}
    entropies, passes = [], []
    for ids_BS1 in batches:
        ids_BS = ids_BS1[:, :-1]
        decisions = Decisions()
        logits_BSV = model.logits(model.hidden(ids_BS, torch.full((len(ids_BS),), SEQ), decisions))
        p_BSV = torch.softmax(logits_BSV, -1)
        entropies.append(-(p_BSV * p_BSV.clamp(min=1e-12).log2()).sum(-1).flatten())
        depth = {site: decision for site, decision in decisions.made.items() if not is_expert(site)}
        for site, decision in depth.items():
            scores.setdefault(str(site), []).append(decision.score_BT.flatten())
        selected = [torch.zeros(ids_BS.shape).scatter(1, decision.position_BK, 1.0) for decision in depth.values()]
        passes.append(torch.stack(selected).mean(0).flatten())
    entropy, share = torch.cat(entropies), torch.cat(passes)
    edges = torch.quantile(entropy[:: max(1, len(entropy) // 100_000)], torch.linspace(0, 1, BINS + 1))
    inside = [(entropy >= low) & (entropy <= high) for low, high in pairwise(edges)]
    pairs = torch.stack([entropy, share])
    return {
        "scores": {site: torch.cat(many)[:20_000].tolist() for site, many in scores.items()},
        "entropy_bins": [float(entropy[mask].mean()) for mask in inside],
        "share_by_entropy": [float(share[mask].mean()) for mask in inside],
        "entropy_correlation": float(torch.corrcoef(pairs)[0, 1]) if share.std() > 0 else 0.0,
    }


def _map(model: Transformer, text_N: Tensor) -> dict[str, Any]:
    """One row of text, and the positions that each routed layer ran."""
    ids_1S = batch_at(text_N, 1, SEQ, MAP_SEED)
    decisions = Decisions()
    model.hidden(ids_1S, torch.tensor([SEQ]), decisions)
    layers = {
        str(site): decision.position_BK[0].tolist() for site, decision in decisions.made.items() if not is_expert(site)
    }
    return {"ids": ids_1S[0].tolist(), "layers": layers}

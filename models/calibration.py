"""Predictors that say what their routers say: the router's score over the threshold that as many tokens pass as top-k
takes, measured on text.

A predictor learns from top-k's choices by gradient (Raposo et al., arXiv 2404.02258, section 3.5), which takes some
thousands of steps. A short run, such as a retrofit, ends before that. But top-k of a row takes almost the tokens whose
score is above one number for all rows, and a predictor can compute that score exactly: silu(a) - silu(-a) = a.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mod_models.routing import Decisions, LinearRouter, MlpRouter
from mod_models.spec import Site, layer_of
from mod_models.transformer import RoutedBlock, Transformer

SPREAD = 4.0
"""Standard deviation of a predictor's logits afterwards: mostly sure, and not so sure that its loss has no slope."""
LEAST_HIDDEN = 2
"""Units of a predictor that it takes, one for each sign."""


@torch.no_grad()
def calibrate(model: Transformer, rows: Iterable[Tensor]) -> None:
    """Sets every predictor from its router, whose scores stay what they are, and from text.

    Args:
        model: with linear routers and predictors of at least two hidden units; left in the mode that it is in.
        rows: int64 (B, S) token ids, none of them padding.
    """
    training = model.training
    # Top-k selects, so that the scores are those of the streams that the routers were trained on.
    model.train()
    score_by_site: dict[Site, list[Tensor]] = {}
    passed: dict[Site, float] = {}
    for ids_BS in rows:
        decisions = Decisions()
        model.hidden(ids_BS, torch.full((len(ids_BS),), ids_BS.shape[1], device=ids_BS.device), decisions)
        for site, seen in decisions.seen.items():
            score_by_site.setdefault(site, []).append(seen.l_BT.float().flatten())
            passed[site] = seen.k / seen.l_BT.shape[1]
    model.train(training)
    for site, scores in score_by_site.items():
        score_N = torch.cat(scores)
        block = model.layers[layer_of(site)]
        assert isinstance(block, RoutedBlock)
        second = isinstance(site, str) and site.endswith(".mlp")
        router, predictor = (block.mlp_router, block.mlp_predictor) if second else (block.router, block.predictor)
        assert isinstance(router, LinearRouter)
        assert isinstance(predictor, MlpRouter)
        _set(predictor, router, score_N, passed[site])


def _set(predictor: MlpRouter, router: LinearRouter, score_N: Tensor, passed: float) -> None:
    """The first two hidden units give steepness * (score - threshold); the others add nothing until they learn."""
    if passed == 1:
        nn.init.zeros_(predictor.projection.weight)
        nn.init.ones_(predictor.projection.bias)
        return
    threshold = torch.quantile(score_N, 1 - passed)
    steepness = SPREAD / score_N.std().clamp(min=torch.finfo(torch.float32).tiny)
    bias = 0.0 if router.projection.bias is None else router.projection.bias[0]
    for unit, sign in enumerate((1.0, -1.0)):
        predictor.hidden.weight[unit] = sign * steepness * router.projection.weight[0]
        predictor.hidden.bias[unit] = sign * steepness * (bias - threshold)
    nn.init.zeros_(predictor.projection.weight)
    nn.init.zeros_(predictor.projection.bias)
    predictor.projection.weight[0, 0], predictor.projection.weight[0, 1] = 1.0, -1.0

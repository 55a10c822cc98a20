"""Sets each predictor to its router's score minus a threshold. On text, as many tokens exceed it as top-k selects.

A predictor learns from top-k's choices by gradient (Raposo et al., arXiv 2404.02258, section 3.5), which takes some
thousands of steps. A short run, such as a retrofit, ends before that. But top-k selects almost the same tokens as one
threshold for all rows, and a predictor can compute the router's score exactly: silu(a) - silu(-a) = a.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mod_models.routing import Decisions, LinearRouter, MlpRouter
from mod_models.spec import Site, layer_of
from mod_models.transformer import RoutedBlock, Transformer

SPREAD = 4.0
"""Standard deviation of a calibrated predictor's logits. Larger logits would leave the predictor loss no gradient."""
LEAST_HIDDEN = 2
"""Hidden units that calibration uses, one for each sign."""


@torch.no_grad()
def calibrate(model: Transformer, rows: Iterable[Tensor]) -> None:
    """Sets the weights of every predictor from its router and from text. Routers do not change.

    Args:
        model: has linear routers, and predictors of at least two hidden units; its training mode is restored.
        rows: int64 (B, S) token ids, without padding.
    """
    training = model.training
    # In training mode top-k selects. Routers then score the same residual streams as during training.
    model.train()
    score_by_site: dict[Site, list[Tensor]] = {}
    selected_share: dict[Site, float] = {}
    for ids_BS in rows:
        decisions = Decisions()
        model.hidden(ids_BS, torch.full((len(ids_BS),), ids_BS.shape[1], device=ids_BS.device), decisions)
        for site, seen in decisions.seen.items():
            score_by_site.setdefault(site, []).append(seen.l_BT.float().flatten())
            selected_share[site] = seen.k / seen.l_BT.shape[1]
    model.train(training)
    for site, scores in score_by_site.items():
        score_N = torch.cat(scores)
        block = model.layers[layer_of(site)]
        assert isinstance(block, RoutedBlock)
        second = isinstance(site, str) and site.endswith(".mlp")
        router, predictor = (block.mlp_router, block.mlp_predictor) if second else (block.router, block.predictor)
        assert isinstance(router, LinearRouter)
        assert isinstance(predictor, MlpRouter)
        _set(predictor, router, score_N, selected_share[site])


def _quantile(score_N: Tensor, share: float) -> Tensor:
    """Returns the value below which this share of the scores lies, linear between two scores.

    `torch.quantile` does the same, and refuses more than 2**24 numbers.
    """
    ordered_N, rank = score_N.sort().values, share * (len(score_N) - 1)
    below = int(rank)
    return torch.lerp(ordered_N[below], ordered_N[min(below + 1, len(score_N) - 1)], rank - below)


def _set(predictor: MlpRouter, router: LinearRouter, score_N: Tensor, passed: float) -> None:
    """Makes the first two hidden units compute steepness * (score - threshold); the output ignores the others."""
    if passed == 1:
        nn.init.zeros_(predictor.projection.weight)
        nn.init.ones_(predictor.projection.bias)
        return
    threshold = _quantile(score_N, 1 - passed)
    steepness = SPREAD / score_N.std().clamp(min=torch.finfo(torch.float32).tiny)
    bias = 0.0 if router.projection.bias is None else router.projection.bias[0]
    for unit, sign in enumerate((1.0, -1.0)):
        predictor.hidden.weight[unit] = sign * steepness * router.projection.weight[0]
        predictor.hidden.bias[unit] = sign * steepness * (bias - threshold)
    nn.init.zeros_(predictor.projection.weight)
    nn.init.zeros_(predictor.projection.bias)
    predictor.projection.weight[0, 0], predictor.projection.weight[0, 1] = 1.0, -1.0

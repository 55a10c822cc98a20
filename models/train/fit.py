"""Fits the adapters and routers of a retrofitted model to its dense model by linear regression, before any training.

Layers are fitted one after the other, from the first to the last. Each sees the stream that the layers before it leave
in the routed model, in which tokens have skipped parts. In a layer:

1. The adapter, which reads z, what the norm of the MLP returns, is fitted to y, what the part would add to the token: a
   linear map, or some neurons of the MLP (`train.approximate`).
2. The router learns which tokens are approximated worst: the ridge regression of |y - adapter(z)|^2 on what the router
   reads. Without an adapter, it is |y|^2.
3. The adapter is fitted again, to the tokens that the router now skips. The few tokens with very large values that
   every language model has (Sun et al., arXiv 2402.17762) run, and no longer decide about the adapter.

To approximate what a token skips, and to route by how well that works, is the idea of Informed Routing (arXiv
2510.13831), which trains small networks for both.

Shape legend: N tokens, B rows, S tokens of a row, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from mod_models.checkpoint import ROUTES, Checkpoint
from mod_models.layers import GatedMlp
from mod_models.routing import Decisions, LinearAdapter, LinearRouter
from mod_models.selection import Tokens
from mod_models.spec import Site
from mod_models.train import TrainConfig
from mod_models.train.approximate import linear_map, neurons, ridge
from mod_models.train.corpus import Corpus, batch_at
from mod_models.train.retrofit import quantile
from mod_models.transformer import Block, RoutedBlock, Transformer

FIT_TOKENS = 50_000
"""Number of tokens of a fit, rounded up to whole batches. A row of weights has only as many numbers to find as its
input is wide: the model, or the neurons that are kept."""
FIT_SEED = 13_000_000
"""Seed of the windows of training text on which adapters and routers are fitted."""
ROUTER_STRENGTH = 1e-2
"""lambda of a router."""
CLIPPED = 0.99
"""Larger errors count as much as this quantile. Otherwise a handful of tokens would decide the regression."""
ABOVE_ALL = 100.0
"""Bias of a router whose capacity is 1, in standard deviations of its scores."""


def rows_to_fit(corpus: Corpus, config: TrainConfig, tokens: int = FIT_TOKENS) -> list[Tensor]:
    """Returns batches of training text, int64 (B, S), of this many tokens together."""
    batches = -(-tokens // (config.batch * config.seq))
    return [batch_at(corpus.train.id_N, config.batch, config.seq, FIT_SEED + number) for number in range(batches)]


class Fitted(NamedTuple):
    """A checkpoint with fitted adapters and routers.

    Attributes:
        checkpoint: the given one with the weights of its adapters and routers replaced.
        explained: routed layer -> how much its adapter explains of what its skipped tokens miss, on the tokens of the
            fit (`train.approximate`); empty without adapters.
        foreseen: routing site -> share of the variance of the clipped squared errors that a router's score explains.
    """

    checkpoint: Checkpoint
    explained: dict[int, float]
    foreseen: dict[Site, float]


@torch.no_grad()
def fitted(retrofit: Checkpoint, rows: Sequence[Tensor]) -> Fitted:
    """Fits the routers, and the adapters if there are any, of a retrofitted model to what its dense model computes.

    Routers that learn by gradient stay as they are. Adapters are then fitted to all tokens of the dense model, because
    it is not known which of them will be skipped. The float32 stream of all rows is kept in memory, together with
    what one layer reads and adds.

    Args:
        retrofit: a result of `train.retrofit.retrofitted`.
        rows: batches of int64 (B, S) token ids, without padding.
    """
    routing = retrofit.spec.routing
    assert routing is not None
    fits_routers = routing.gate == "ones"
    dense, model = retrofit.dense().module(), _ranking(retrofit)
    streams = [dense.embedded(ids_BS) for ids_BS in rows]
    explained: dict[int, float] = {}
    foreseen: dict[Site, float] = {}
    for layer, (block, routed) in enumerate(zip(dense.layers, model.layers, strict=True)):
        assert isinstance(block, Block)
        if not isinstance(routed, RoutedBlock):
            streams = [block(row_tokens(dense, x_BSD), Decisions()) for x_BSD in streams]
            continue
        for part in ("attention", "mlp") if routing.parts == "separate" else (routing.parts,):
            part_inputs = [inputs_of_part(block, row_tokens(dense, x_BSD), part) for x_BSD in streams]
            if routed.adapter is not None:
                explained[layer] = _fit_adapter(routed, part_inputs)
            if not fits_routers:
                continue
            foreseen[routed.site(part)] = _fit_router(routed, part, part_inputs, _slots(model, layer, streams[0]))
            if routed.adapter is not None:
                skipped = [
                    of.at(~_selected(model, routed, part, x_BSD))
                    for of, x_BSD in zip(part_inputs, streams, strict=True)
                ]
                # Where every token runs, the adapter stays as it was fitted to all of them.
                if any(len(of.delta_ND) for of in skipped):
                    explained[layer] = _fit_adapter(routed, skipped)
        if fits_routers:
            streams = [_run(model, routed, x_BSD, Decisions()) for x_BSD in streams]
        else:
            streams = [block(row_tokens(dense, x_BSD), Decisions()) for x_BSD in streams]
    new = {name: tensor for name, tensor in model.state_dict().items() if ROUTES.match(name)}
    return Fitted(Checkpoint(spec=retrofit.spec, weights={**retrofit.weights, **new}), explained, foreseen)


def _ranking(retrofit: Checkpoint) -> Transformer:
    """Returns the model with router and adapter weights of its own, in which top-k selects."""
    assert retrofit.spec.routing is not None
    spec = replace(retrofit.spec, routing=replace(retrofit.spec.routing, selection="topk"))
    weights = {name: tensor.clone() if ROUTES.match(name) else tensor for name, tensor in retrofit.weights.items()}
    return Checkpoint(spec=spec, weights=weights).module()


def row_tokens(model: Transformer, x_BSD: Tensor) -> Tokens:
    """Returns the stream of whole rows, (B, S, D), as a block of the model takes it."""
    S = x_BSD.shape[1]
    live_BS = torch.ones(x_BSD.shape[:2], dtype=torch.bool)
    return Tokens(x_BSD, live_BS, model.rope_cos[:S], model.rope_sin[:S], None, S)


def _slots(model: Transformer, layer: int, x_BSD: Tensor) -> tuple[int, int]:
    """Returns k and S: the layer runs k of the S tokens of a row."""
    S = x_BSD.shape[1]
    return model.spec.k_of_layer(S)[layer], S


def _run(model: Transformer, routed: RoutedBlock, x_BSD: Tensor, decisions: Decisions) -> Tensor:
    """Returns the stream after a routed block, (B, S, D)."""
    k, _ = _slots(model, routed.layer, x_BSD)
    after_BSD: Tensor = routed(row_tokens(model, x_BSD), decisions, k)
    return after_BSD


def _selected(model: Transformer, routed: RoutedBlock, part: str, x_BSD: Tensor) -> Tensor:
    """Returns which tokens the part runs, bool (B, S)."""
    decisions = Decisions()
    _run(model, routed, x_BSD, decisions)
    position_BK = decisions.made[routed.site(part)].position_BK
    return torch.zeros(x_BSD.shape[:2], dtype=torch.bool).scatter(1, position_BK, True)


class PartInputs(NamedTuple):
    """What a routed part would read and add if these tokens ran, each (N, D).

    Attributes:
        router_ND: what its router reads.
        adapter_ND: what its adapter reads.
        delta_ND: what the part adds.
    """

    router_ND: Tensor
    adapter_ND: Tensor
    delta_ND: Tensor

    def at(self, mask_BS: Tensor) -> PartInputs:
        """Returns some of the tokens, those of a bool mask (B, S)."""
        return PartInputs(*(tensor_ND[mask_BS.flatten()] for tensor_ND in self))


def inputs_of_part(block: Block, tokens: Tokens, part: str) -> PartInputs:
    """Returns what a part of a dense block reads and adds."""
    x_BSD = tokens.x_BTD
    if part == "block":
        parts = block.attention_norm(x_BSD), block.mlp_norm(x_BSD), block(tokens, Decisions()) - x_BSD
    elif part == "attention":
        normed_BSD = block.attention_norm(x_BSD)
        parts = normed_BSD, normed_BSD, block.attended(tokens, Decisions())
    else:
        # Where attention has a router of its own, this is the stream of the tokens that run it.
        normed_BSD = block.mlp_norm(x_BSD + block.attended(tokens, Decisions()))
        parts = normed_BSD, normed_BSD, block.mlp(normed_BSD)
    return PartInputs(*(tensor_BSD.flatten(0, 1) for tensor_BSD in parts))


def _fit_adapter(routed: RoutedBlock, part_inputs: Sequence[PartInputs]) -> float:
    """Fits the adapter of a block to what the part adds to these tokens, and returns `Fitted.explained`."""
    adapter, pairs = routed.adapter, [(of.adapter_ND, of.delta_ND) for of in part_inputs]
    if isinstance(adapter, LinearAdapter):
        found = linear_map(pairs)
        adapter.down_proj.weight.copy_(found.weight_DD)
        return found.explained
    assert isinstance(adapter, GatedMlp)
    kept = neurons(routed.mlp, pairs, adapter.down_proj.in_features)
    adapter.gate_proj.weight.copy_(routed.mlp.gate_proj.weight[kept.kept_K])
    adapter.up_proj.weight.copy_(routed.mlp.up_proj.weight[kept.kept_K])
    adapter.down_proj.weight.copy_(kept.down_DK)
    return kept.explained


def _fit_router(routed: RoutedBlock, part: str, part_inputs: Sequence[PartInputs], slots: tuple[int, int]) -> float:
    """Fits the router of a part, so that its scores have a standard deviation of 1. Returns its `Fitted.foreseen`.

    A router with a bias selects by the sign of its score, so its bias leaves the share k / S of the scores above 0.
    """
    adapter = routed.adapter
    errors = [of.delta_ND if adapter is None else of.delta_ND - adapter(of.adapter_ND) for of in part_inputs]
    error_N = torch.cat([error_ND.square().sum(-1) for error_ND in errors]).double()
    error_N = error_N.clamp(max=quantile(error_N, CLIPPED))
    error_N -= error_N.mean()
    x_ND = torch.cat([of.router_ND for of in part_inputs])
    x_ND = x_ND - x_ND.mean(0)
    N = len(x_ND)
    xx_DD, xe_D1 = (x_ND.T @ x_ND).double(), (x_ND.T @ error_N[:, None].float()).double()
    weight_D1 = ridge(xx_DD, xe_D1, ROUTER_STRENGTH)
    squares = float(weight_D1.T @ xx_DD @ weight_D1)
    router = routed.mlp_router if part == "mlp" and routed.mlp_router is not None else routed.router
    assert isinstance(router, LinearRouter)
    router.projection.weight.copy_(weight_D1.T / (math.sqrt(squares / N) or 1.0))
    if router.projection.bias is not None:
        score_N = torch.cat([of.router_ND @ router.projection.weight[0] for of in part_inputs])
        k, S = slots
        router.projection.bias.fill_(-quantile(score_N, 1 - k / S) if k < S else ABOVE_ALL)
    total = float(error_N.square().sum())
    return (2 * float(weight_D1.T @ xe_D1) - squares) / total if total > 0 else 1.0

"""Fits linear adapters to a dense model: what a routed part adds to a token, approximated by W z.

A token that skips a part of a block then gets W z, z being what the norm of the MLP returns for it, in place of nothing
at all. W is a ridge regression (Hoerl and Kennard, Technometrics 12, 1970), (Z'Z + lambda I)^-1 Z'Y, so it needs one
forward pass of the dense model over some text and no training. To approximate what a token skips is the idea of
Informed Routing (arXiv 2510.13831), which trains a small network for it.

Shape legend: N tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mod_models.checkpoint import Checkpoint
from mod_models.routing import Decisions
from mod_models.selection import Tokens
from mod_models.train import TrainConfig
from mod_models.train.corpus import Corpus, batch_at
from mod_models.transformer import Block

FIT_TOKENS = 50_000
"""Number of tokens of a fit, rounded up to whole batches. Each row of W has only D numbers to find."""
FIT_SEED = 13_000_000
"""Seed of the windows of training text on which adapters are fitted."""
STRENGTH = 1e-3
"""lambda, as a share of the mean of the diagonal of Z'Z."""


def rows_to_fit(corpus: Corpus, config: TrainConfig, tokens: int = FIT_TOKENS) -> Iterator[Tensor]:
    """Yields batches of training text, int64 (B, S), of this many tokens together."""
    batches = -(-tokens // (config.batch * config.seq))
    return (batch_at(corpus.train.id_N, config.batch, config.seq, FIT_SEED + number) for number in range(batches))


class Fitted(NamedTuple):
    """A checkpoint with fitted adapters.

    Attributes:
        checkpoint: the given one with the weights of its adapters replaced.
        explained: for each routed layer, the share of the squared length of what the part adds that W z explains.
    """

    checkpoint: Checkpoint
    explained: dict[int, float]


class Sums:
    """Sums over the tokens of one layer: Z'Z and Z'Y, (D, D), and the squared length of Y.

    Products are computed in float32 for the tokens of one batch, and added up in float64.
    """

    def __init__(self, width: int) -> None:
        self.zz_DD = torch.zeros(width, width, dtype=torch.float64)
        self.zy_DD = torch.zeros(width, width, dtype=torch.float64)
        self.yy = 0.0

    def add(self, z_ND: Tensor, y_ND: Tensor) -> None:
        """Adds tokens."""
        self.zz_DD += z_ND.T @ z_ND
        self.zy_DD += z_ND.T @ y_ND
        self.yy += float(y_ND.double().square().sum())

    def solved(self, strength: float) -> Tensor:
        """Returns W, float64 (D, D), for adapters that compute W z."""
        ridge = strength * self.zz_DD.diagonal().mean()
        weight_DD: Tensor = torch.linalg.solve(self.zz_DD + ridge * torch.eye(len(self.zz_DD)), self.zy_DD).T
        return weight_DD

    def explained(self, weight_DD: Tensor) -> float:
        """Returns the share of the squared length of Y that W z explains."""
        rest = self.yy - 2 * (weight_DD.T * self.zy_DD).sum() + ((weight_DD @ self.zz_DD) * weight_DD).sum()
        return 1 - float(rest) / self.yy if self.yy > 0 else 1.0


@torch.no_grad()
def fitted(retrofit: Checkpoint, rows: Iterable[Tensor], strength: float = STRENGTH) -> Fitted:
    """Fits the linear adapters of a retrofitted model to what its dense baseline computes.

    Args:
        retrofit: is from `train.retrofit.retrofitted` and has linear adapters.
        rows: int64 (B, S) token ids, without padding.
        strength: see STRENGTH.
    """
    routing = retrofit.spec.routing
    assert routing is not None
    assert (routing.skipped_result, routing.adapter) == ("adapter", "linear")
    dense = retrofit.dense().module()
    sums = {layer: Sums(retrofit.spec.d_model) for layer in retrofit.spec.routed_layers}
    hooks = []
    for layer, of_layer in sums.items():
        block = dense.layers[layer]
        assert isinstance(block, Block)
        hooks.append(_watched_mlp(block.mlp, of_layer) if routing.parts == "mlp" else _watched_block(block, of_layer))
    try:
        for ids_BS in rows:
            dense.stream(ids_BS, torch.full((len(ids_BS),), ids_BS.shape[1]), Decisions())
    finally:
        for hook in hooks:
            hook.remove()
    weight_of = {layer: of_layer.solved(strength) for layer, of_layer in sums.items()}
    new = {f"layers.{layer}.adapter.down_proj.weight": weight_DD.float() for layer, weight_DD in weight_of.items()}
    checkpoint = Checkpoint(spec=retrofit.spec, weights={**retrofit.weights, **new})
    return Fitted(checkpoint, {layer: of_layer.explained(weight_of[layer]) for layer, of_layer in sums.items()})


def _watched_mlp(mlp: nn.Module, sums: Sums) -> Any:
    """Adds what the MLP gets and returns, and returns the hook to remove."""
    return mlp.register_forward_hook(lambda _, inputs, y_BSD: sums.add(inputs[0].flatten(0, 1), y_BSD.flatten(0, 1)))


def _watched_block(block: Block, sums: Sums) -> Any:
    """Adds the normed input of the block and what the block adds to it, and returns the hook to remove."""

    def seen(_: nn.Module, inputs: tuple[Tokens, Decisions], after_BSD: Tensor) -> None:
        x_BSD = inputs[0].x_BTD
        z_BSD: Tensor = block.mlp_norm(x_BSD)
        sums.add(z_BSD.flatten(0, 1), (after_BSD - x_BSD).flatten(0, 1))

    return block.register_forward_hook(seen)

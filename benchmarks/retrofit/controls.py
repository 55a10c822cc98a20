"""Smaller dense models, which a routed model has to beat at the same speed: without blocks, or with narrower MLPs.

Shape legend: N tokens, B rows, S tokens of a row, D model width, F width of an MLP, K kept width.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mod_models.checkpoint import Checkpoint
from mod_models.routing import Decisions
from mod_models.selection import Tokens
from mod_models.train.fit import STRENGTH, inputs_of_part, ridge, row_tokens
from mod_models.train.retrofit import quantile
from mod_models.transformer import Block

NEURONS = 16
"""A kept width is a multiple of this, because products run on tiles."""
SHORTENED = 0.99
"""Tokens with longer outputs than this quantile of a batch count as much as tokens with outputs of that length."""


def without(dense: Checkpoint, layers: Collection[int]) -> Checkpoint:
    """Removes these blocks from a dense model; later ones move up."""
    kept = [layer for layer in range(dense.spec.n_layers) if layer not in layers]
    new_of = {f"layers.{old}.": f"layers.{new}." for new, old in enumerate(kept)}
    weights = {}
    for name, tensor in dense.weights.items():
        prefix = re.match(r"layers\.\d+\.", name)
        if prefix is None:
            weights[name] = tensor
        elif prefix[0] in new_of:
            weights[new_of[prefix[0]] + name.removeprefix(prefix[0])] = tensor
    return Checkpoint(spec=replace(dense.spec, n_layers=len(kept)), weights=weights)


def kept_width(d_ff: int, share: float) -> int:
    """Returns the width of the MLPs of a narrowed model."""
    return d_ff if share >= 1 else max(NEURONS, round(d_ff * share / NEURONS) * NEURONS)


@torch.no_grad()
def narrowed(dense: Checkpoint, share: float, rows: Sequence[Tensor]) -> Checkpoint:
    """Keeps a share of the neurons of every MLP, and fits their outgoing weights to the output of the whole MLP.

    Neurons are ranked by the norm of their activations times that of their outgoing weights, as Wanda ranks single
    weights (Sun et al., arXiv 2306.11695). The fit is the ridge regression of what the removed neurons added on the
    activations of the others. Layers are narrowed from the first to the last, and each sees the stream that the
    narrowed layers before it leave, as `train.fit` fits a routed model.

    Args:
        dense: a dense model with gated MLPs.
        share: share of the neurons, of which `kept_width` makes a width.
        rows: batches of int64 (B, S) token ids, without padding.
    """
    width, model = kept_width(dense.spec.d_ff, share), dense.module()
    streams = [model.embedded(ids_BS) for ids_BS in rows]
    weights = dict(dense.weights)
    for layer, block in enumerate(model.layers):
        assert isinstance(block, Block)
        kept_K, down_DK = _narrowed_mlp(block, [row_tokens(model, x_BSD) for x_BSD in streams], width)
        prefix = f"layers.{layer}.mlp."
        for name in [name for name in weights if name.startswith((f"{prefix}gate_proj.", f"{prefix}up_proj."))]:
            weights[name] = weights[name][kept_K].clone()
        weights[f"{prefix}down_proj.weight"] = down_DK
        # The layers after it see an MLP whose other neurons add nothing. The given weights stay as they are.
        block.mlp.down_proj.weight = torch.nn.Parameter(
            torch.zeros_like(block.mlp.down_proj.weight).index_copy(1, kept_K, down_DK)
        )
        streams = [block(row_tokens(model, x_BSD), Decisions()) for x_BSD in streams]
    return Checkpoint(spec=replace(dense.spec, d_ff=width), weights=weights)


def _narrowed_mlp(block: Block, batches: Sequence[Tokens], width: int) -> tuple[Tensor, Tensor]:
    """Returns the kept neurons, int64 (K,) in ascending order, and their fitted outgoing weights (D, K)."""
    down_DF = block.mlp.down_proj.weight
    F = down_DF.shape[1]
    activations: list[Tensor] = []
    hook = block.mlp.down_proj.register_forward_pre_hook(lambda _, inputs: activations.append(inputs[0]))
    moments_FF = torch.zeros(F, F, dtype=torch.float64)
    for tokens in batches:
        length_N = inputs_of_part(block, tokens, "mlp").delta_ND.norm(dim=-1)
        # A few tokens of every language model have outputs a hundred times as long as others, and would decide the fit.
        scale_N1 = (quantile(length_N, SHORTENED) / length_N.clamp(min=1e-12)).clamp(max=1)[:, None]
        scaled_NF = activations.pop().flatten(0, 1) * scale_N1
        moments_FF += scaled_NF.T @ scaled_NF
    hook.remove()
    added_F = moments_FF.diagonal().sqrt() * down_DF.double().norm(dim=0)
    kept_K = added_F.topk(width).indices.sort().values
    removed_F = torch.ones(F, dtype=torch.bool).index_fill(0, kept_K, False)
    missed_KD = moments_FF[kept_K][:, removed_F] @ down_DF[:, removed_F].T.double()
    correction_KD = ridge(moments_FF[kept_K][:, kept_K], missed_KD, STRENGTH)
    return kept_K, (down_DF[:, kept_K] + correction_KD.T).to(down_DF.dtype)

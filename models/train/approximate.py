"""Approximates what a part of a block adds to its tokens, in closed form: by a linear map, or by neurons of its MLP.

Both are ridge regressions (Hoerl and Kennard, Technometrics 12, 1970) on tokens z of which it is known what the part
adds, y. A linear map W z costs D / 3F of an MLP with F neurons, and K neurons cost K / F of it.

Shape legend: N tokens, D model width, F neurons of an MLP, K neurons that are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mod_models.layers import GatedMlp
from mod_models.train.retrofit import quantile

STRENGTH = 1e-3
"""Strength of the regression, lambda, as a share of the mean of the diagonal of Z'Z."""
SHORTENED = 0.99
"""Tokens for which the part adds more than this quantile count as much as tokens at the quantile."""
Pairs = Sequence[tuple[Tensor, Tensor]]
"""Batches of z, what the approximation reads, and of y, what the part adds, each (N, D)."""


class LinearMap(NamedTuple):
    """The linear map W.

    Attributes:
        weight_DD: W, float64; y is about W z.
        explained: how much W z explains of y, as a share of the squared length of these tokens; 1 if y is 0.
    """

    weight_DD: Tensor
    explained: float


class Neurons(NamedTuple):
    """Neurons of an MLP that stand for all of them.

    Attributes:
        kept_K: their numbers in the MLP, int64, ascending.
        down_DK: their new outgoing weights, in the dtype of the MLP.
        explained: how much they explain of y, as a share of the squared length of these tokens after long ones are
            shortened; 1 if y is 0.
    """

    kept_K: Tensor
    down_DK: Tensor
    explained: float


@torch.no_grad()
def linear_map(pairs: Pairs) -> LinearMap:
    """Returns the linear map from z to y."""
    D = pairs[0][0].shape[-1]
    zz_DD, zy_DD = torch.zeros(2, D, D, dtype=torch.float64)
    yy = 0.0
    for z_ND, y_ND in pairs:
        # Products of a batch are in float32, and their sum in float64.
        zz_DD += z_ND.T @ z_ND
        zy_DD += z_ND.T @ y_ND
        yy += float(y_ND.double().square().sum())
    weight_DD = ridge(zz_DD, zy_DD, STRENGTH).T
    return LinearMap(weight_DD, _explained(weight_DD, zz_DD, zy_DD, yy))


@torch.no_grad()
def neurons(mlp: GatedMlp, pairs: Pairs, width: int) -> Neurons:
    """Keeps `width` neurons of an MLP, and fits their outgoing weights to y, without the MLP's outgoing bias.

    Neurons are ranked by the norm of their activations times that of their outgoing weights, as Wanda ranks single
    weights (Sun et al., arXiv 2306.11695). The regression starts from the weights that they have: its solution is the
    change of these. A few tokens of every language model have outputs a hundred times as long as others (Sun et al.,
    arXiv 2402.17762) and would decide it, so they are scaled down to the quantile SHORTENED. There must be tokens.
    """
    down_DF = mlp.down_proj.weight.double()
    D, F = down_DF.shape
    bias_D = 0.0 if mlp.down_proj.bias is None else mlp.down_proj.bias
    longest = quantile(torch.cat([(y_ND - bias_D).norm(dim=-1) for _, y_ND in pairs]), SHORTENED)
    hh_FF, hy_FD = torch.zeros(F, F, dtype=torch.float64), torch.zeros(F, D, dtype=torch.float64)
    yy = 0.0
    for z_ND, y_ND in pairs:
        left_ND = y_ND - bias_D
        length_N1 = left_ND.norm(dim=-1, keepdim=True)
        scale_N1 = torch.where(length_N1 > longest, longest / length_N1, 1.0)
        h_NF, scaled_ND = mlp.hidden(z_ND) * scale_N1, left_ND * scale_N1
        hh_FF += h_NF.T @ h_NF
        hy_FD += h_NF.T @ scaled_ND
        yy += float(scaled_ND.double().square().sum())
    added_F = hh_FF.diagonal().sqrt() * down_DF.norm(dim=0)
    kept_K = added_F.topk(width).indices.sort().values
    hh_KK, hy_KD, down_DK = hh_FF[kept_K][:, kept_K], hy_FD[kept_K], down_DF[:, kept_K]
    down_DK = down_DK + ridge(hh_KK, hy_KD - hh_KK @ down_DK.T, STRENGTH).T
    return Neurons(kept_K, down_DK.to(mlp.down_proj.weight.dtype), _explained(down_DK, hh_KK, hy_KD, yy))


def _explained(weight_DK: Tensor, hh_KK: Tensor, hy_KD: Tensor, yy: float) -> float:
    """Returns 1 - |y - W h|^2 / |y|^2, from the sums of products; 1 if y is 0."""
    rest = yy - 2 * (weight_DK.T * hy_KD).sum() + ((weight_DK @ hh_KK) * weight_DK).sum()
    return 1 - float(rest) / yy if yy else 1.0


def ridge(xx_DD: Tensor, xy_DE: Tensor, strength: float) -> Tensor:
    """Returns (X'X + lambda I)^-1 X'Y, float64 (D, E), with lambda as a share of the mean of the diagonal of X'X; zeros
    if X is 0.
    """
    if not xx_DD.any():
        return torch.zeros_like(xy_DE)
    ridge_DD = strength * xx_DD.diagonal().mean() * torch.eye(len(xx_DD), dtype=xx_DD.dtype)
    solved_DE: Tensor = torch.linalg.solve(xx_DD + ridge_DD, xy_DE)
    return solved_DE

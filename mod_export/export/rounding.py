"""Weights as whole numbers of 8 or 4 bits with scales.

int8   q (K, N) = round(w / scale), scale (N,) = largest |w_2i| + |w_2i+1| of the column / 127. Processors without VNNI
       multiply two neighbours by unsigned bytes and add the products in 16 bits, where they saturate beyond 32,767
       (Intel, vpmaddubsw). With this scale the two are at most 128 together, and 255 x 128 fits: the same artefact
       gives the same numbers everywhere, with a third of a bit more than the usual seven.
int4   q (N, K / 32, 16) two numbers to a byte, the first in the low half, of value q - 8; scale (N, K / 32) = the w of
       largest |w| in the block / -8, so that all sixteen numbers are used, times the one of SHARES that makes the
       block's squared error the least: most weights are far smaller than the largest. The layout of ONNX Runtime's
       MatMulNBits.
int8_blocks, int8_blocks64   q (N, K / 32, 32) or (N, K / 64, 64) of value q - 128; scale (N, K / 32) or (N, K / 64)
       likewise, the w of largest |w| / -128.

Of four bits the nearest number is not the best: rounding each weight by itself lets the errors of a product add up.
Where it is known what a weight is multiplied with, its columns are rounded one after the other, and what a column's
rounding changes in the products is made up for by the columns that are still to be rounded (GPTQ; Frantar, Ashkboos,
Hoefler and Alistarh, arXiv 2210.17323, algorithm 1; columns by falling second moment). No number ends further than
MOST_STEPS from the nearest, so that a file can still be held against the checkpoint.

Shape legend: N columns of the result, K what is summed over, M blocks, U numbers of a block.
"""

from __future__ import annotations

import torch

from mod_export.export.weights import BITS, BLOCKS, Form

LARGEST_INT8 = 127
MOST_STEPS = 1
DAMPING = 0.1
"""Of the mean second moment, added to each. The paper takes 0.01, and 32 times as much text: with less, products that
were not read lose what those that were read gain (docs/LOG.md)."""
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""Of a scale of four bits that are tried."""
COLUMNS = 128
"""Rounded between two updates of all that follow, as in the paper."""


def scales_of(weight_NK: torch.Tensor, form: Form) -> torch.Tensor:
    """Float32 (N,) or (N, M), none of them zero."""
    if form == "int8":
        even_NK = torch.nn.functional.pad(weight_NK.float(), (0, weight_NK.shape[1] % 2))
        scale = even_NK.reshape(len(weight_NK), -1, 2).abs().sum(-1).amax(-1) / LARGEST_INT8
    else:
        blocks_NMU = _blocks(weight_NK, form)
        largest_NM1 = blocks_NMU.gather(-1, blocks_NMU.abs().argmax(-1, keepdim=True))
        scale = largest_NM1[..., 0] / -(2 ** (BITS[form] - 1))
        if form == "int4":
            scale = _best_share(blocks_NMU, scale)
    return torch.where(scale != 0, scale, 1.0)  # Where all weights are zero nothing is divided by zero.


def _best_share(blocks_NMU: torch.Tensor, scale_NM: torch.Tensor) -> torch.Tensor:
    best_NM, found_NM = torch.full_like(scale_NM, float("inf")), scale_NM
    for share in SHARES:
        scale_NM1 = scale_NM[..., None] * share
        rounded_NMU = torch.round(blocks_NMU / scale_NM1).clamp(-8, 7) * scale_NM1
        error_NM = (rounded_NMU - blocks_NMU).square().sum(-1)
        found_NM = torch.where(error_NM < best_NM, scale_NM1[..., 0], found_NM)
        best_NM = torch.minimum(error_NM, best_NM)
    return found_NM


def whole_numbers(weight_NK: torch.Tensor, form: Form, moments_KK: torch.Tensor | None = None) -> torch.Tensor:
    """What stands in a file: int8 (K, N), or uint8 (N, M, U) of which `int4` packs two into a byte.

    Args:
        weight_NK: any float.
        form: of the file.
        moments_KK: sums of x_i x_j over rows x (K,) that the weight is multiplied with; for `int4`.
    """
    scale = scales_of(weight_NK, form)
    if form == "int8":
        return torch.round(weight_NK.float() / scale[:, None]).to(torch.int8).T.contiguous()
    whole_NMU = _nearest(weight_NK, scale, form)
    if moments_KK is not None:
        K = weight_NK.shape[1]
        scale_NK, whole_NK = scale.repeat_interleave(BLOCKS[form], 1)[:, :K], whole_NMU.flatten(1)[:, :K]
        whole_NK.copy_(_gptq(weight_NK.float(), scale_NK, whole_NK, moments_KK))
    whole_NMU = whole_NMU.to(torch.uint8)
    return whole_NMU if form != "int4" else whole_NMU[..., 0::2] | whole_NMU[..., 1::2] << 4


def is_rounded(whole: torch.Tensor, weight_NK: torch.Tensor, form: Form) -> bool:
    """Whether every number of a file in blocks is the nearest to the weight, or of `int4` MOST_STEPS from it."""
    nearest_NMU = _nearest(weight_NK, scales_of(weight_NK, form), form)
    if form == "int4":
        whole = torch.stack([whole & 15, whole >> 4], -1).flatten(-2)
    steps = MOST_STEPS if form == "int4" else 0
    return whole.shape == nearest_NMU.shape and bool(((whole.float() - nearest_NMU).abs() <= steps).all())


def _blocks(weight_NK: torch.Tensor, form: Form) -> torch.Tensor:
    padded_NK = torch.nn.functional.pad(weight_NK.float(), (0, -weight_NK.shape[1] % BLOCKS[form]))
    return padded_NK.reshape(len(weight_NK), -1, BLOCKS[form])


def _nearest(weight_NK: torch.Tensor, scale_NM: torch.Tensor, form: Form) -> torch.Tensor:
    """Float32 (N, M, U)."""
    zero: int = 2 ** (BITS[form] - 1)
    return (torch.round(_blocks(weight_NK, form) / scale_NM[..., None]) + zero).clamp(0, 2 * zero - 1)


def _gptq(
    weight_NK: torch.Tensor, scale_NK: torch.Tensor, nearest_NK: torch.Tensor, moments_KK: torch.Tensor
) -> torch.Tensor:
    """Float32 (N, K), whole numbers from 0 to 15."""
    zero, K = 8, weight_NK.shape[1]
    moments_KK = moments_KK.double()
    spread = moments_KK.diagonal().mean()
    # A column that nothing is ever multiplied with does not matter, and must not make the inverse meaningless.
    moments_KK = moments_KK + torch.eye(K, dtype=torch.float64) * (DAMPING * spread if spread > 0 else 1)
    order_K = moments_KK.diagonal().argsort(descending=True, stable=True)
    left_NK, scale_NK, nearest_NK = (each_NK[:, order_K] for each_NK in (weight_NK, scale_NK, nearest_NK))
    low_NK, high_NK = ((nearest_NK + step).clamp(0, 2 * zero - 1) for step in (-MOST_STEPS, MOST_STEPS))
    inverse_KK = torch.cholesky_inverse(torch.linalg.cholesky(moments_KK[order_K][:, order_K]))
    factor_KK = torch.linalg.cholesky(inverse_KK, upper=True).float()
    whole_NK = torch.empty_like(left_NK)
    for begin in range(0, K, COLUMNS):
        end = min(begin + COLUMNS, K)
        errors = torch.empty_like(left_NK[:, begin:end])
        for k in range(begin, end):
            near_N = torch.round(left_NK[:, k] / scale_NK[:, k]) + zero
            whole_NK[:, k] = torch.minimum(torch.maximum(near_N, low_NK[:, k]), high_NK[:, k])
            rest_N = left_NK[:, k] - (whole_NK[:, k] - zero) * scale_NK[:, k]
            errors[:, k - begin] = rest_N / factor_KK[k, k]
            left_NK[:, k:end] -= errors[:, k - begin, None] * factor_KK[k, k:end]
        left_NK[:, end:] -= errors @ factor_KK[begin:end, end:]
    return whole_NK[:, order_K.argsort()]

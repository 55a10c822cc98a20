"""Rounds weights to integers of 8 or 4 bits with scales.

int8   q (K, N) = round(w / scale), scale (N,) = largest |w_2i| + |w_2i+1| of the column / 127. Processors without VNNI
       multiply two neighbours by unsigned bytes and add the products in 16 bits, where they saturate beyond 32,767
       (Intel, vpmaddubsw). With this scale two neighbours add up to at most 128, and 255 x 128 fits. So the same
       file gives the same numbers everywhere, and keeps a third of a bit more than the usual seven bits.
int4   q (N, K / 32, 16), two numbers to a byte, the first in the low half; scale (N, K / 32) and zero point
       (N, K / 64), packed likewise; w = scale (q - zero). The range covers zero and all numbers of the block. It is
       then multiplied by the factor of SHARES with the least squared error: most weights are far smaller than the
       largest. This is the layout of ONNX Runtime's MatMulNBits.
int8_blocks, int8_blocks64   q (N, K / 32, 32) or (N, K / 64, 64) of value q - 128; scale (N, K / 32) or (N, K / 64) =
       the w of largest |w| in the block / -128, so that all integers are used.

With four bits the nearest integer is not the best: if each weight is rounded by itself, the errors of a product add up.
If the inputs of a weight are known, its columns are rounded one after the other, and the columns that are still to be
rounded compensate for the error of each column (GPTQ; Frantar, Ashkboos, Hoefler and Alistarh, arXiv 2210.17323,
algorithm 1; columns by falling second moment). No integer is further than MOST_STEPS from the nearest, so that a file
can still be compared with the checkpoint.

Shape legend: N columns of the result, K the summed dimension, M blocks, U numbers of a block.
"""

from __future__ import annotations

import torch

from mod_export.graph.weights import BITS, BLOCKS, Form

LARGEST_INT8, LARGEST_INT4 = 127, 15
MOST_STEPS = 1
DAMPING = 0.1
"""The share of the mean second moment that is added to each second moment. The paper uses 0.01, with sixteen times as
much text. Here a smaller share improves products of the calibration text, but worsens those of other texts as much
(docs/LOG.md).
"""
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
COLUMNS = 128
"""The number of columns that are rounded between two updates of all following ones, as in the paper."""


def range_of(weight_NK: torch.Tensor, form: Form) -> tuple[torch.Tensor, ...]:
    """The tensors that a file stores beside the integers: float32 scales (N,) or (N, M), none of them zero; and for
    `int4` the zero points, uint8 (N, M / 2).
    """
    if form == "int4":
        scale_NM, zero_NM = _range_of_four_bits(weight_NK)
        return scale_NM, _packed(torch.nn.functional.pad(zero_NM, (0, zero_NM.shape[1] % 2)))
    if form == "int8":
        even_NK = torch.nn.functional.pad(weight_NK.float(), (0, weight_NK.shape[1] % 2))
        scale = even_NK.reshape(len(weight_NK), -1, 2).abs().sum(-1).amax(-1) / LARGEST_INT8
    else:
        blocks_NMU = _blocks(weight_NK, form)
        scale = blocks_NMU.gather(-1, blocks_NMU.abs().argmax(-1, keepdim=True))[..., 0] / -(2 ** (BITS[form] - 1))
    return (torch.where(scale != 0, scale, 1.0),)  # If all weights are zero, nothing is divided by zero.


def _range_of_four_bits(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 scales and zero points, both (N, M)."""
    blocks_NMU = _blocks(weight_NK, "int4")
    low_NM, high_NM = blocks_NMU.amin(-1).clamp(max=0), blocks_NMU.amax(-1).clamp(min=0)
    widest_NM = torch.where(high_NM > low_NM, (high_NM - low_NM) / LARGEST_INT4, 1.0)
    zero_NM = torch.round(-low_NM / widest_NM)
    best_NM, scale_NM = torch.full_like(widest_NM, float("inf")), widest_NM
    for share in SHARES:
        shorter_NM1, zero_NM1 = (widest_NM * share)[..., None], zero_NM[..., None]
        whole_NMU = (torch.round(blocks_NMU / shorter_NM1) + zero_NM1).clamp(0, LARGEST_INT4)
        error_NM = ((whole_NMU - zero_NM1) * shorter_NM1 - blocks_NMU).square().sum(-1)
        scale_NM = torch.where(error_NM < best_NM, shorter_NM1[..., 0], scale_NM)
        best_NM = torch.minimum(error_NM, best_NM)
    return scale_NM, zero_NM


def whole_numbers(weight_NK: torch.Tensor, form: Form, moments_KK: torch.Tensor | None = None) -> torch.Tensor:
    """The integers that a file stores: int8 (K, N), or uint8 (N, M, U), which `int4` packs two to a byte.

    Args:
        weight_NK: the weight, of any float dtype.
        form: the form in which the file stores it.
        moments_KK: for `int4`, sums of x_i x_j over rows x (K,) that the weight is multiplied with; None if unknown.
    """
    if form == "int8":
        (scale_N,) = range_of(weight_NK, form)
        return torch.round(weight_NK.float() / scale_N[:, None]).to(torch.int8).T.contiguous()
    whole_NMU, scale_NM, zero_NM = _nearest(weight_NK, form)
    if moments_KK is not None:
        K, U = weight_NK.shape[1], BLOCKS[form]
        scale_NK, zero_NK = (each_NM.repeat_interleave(U, 1)[:, :K] for each_NM in (scale_NM, zero_NM))
        whole_NK = whole_NMU.flatten(1)[:, :K]
        whole_NK.copy_(_gptq(weight_NK.float(), scale_NK, zero_NK, whole_NK, moments_KK))
    return _packed(whole_NMU) if form == "int4" else whole_NMU.to(torch.uint8)


def _packed(numbers: torch.Tensor) -> torch.Tensor:
    """Packs an even number of integers, two to a byte, the first in the low half."""
    numbers = numbers.to(torch.uint8)
    return numbers[..., 0::2] | numbers[..., 1::2] << 4


def is_rounded(whole: torch.Tensor, weight_NK: torch.Tensor, form: Form) -> bool:
    """Whether each integer of a form in blocks is the nearest to its weight; for `int4`, at most MOST_STEPS from it."""
    nearest_NMU, _, _ = _nearest(weight_NK, form)
    if form == "int4":
        whole = torch.stack([whole & 15, whole >> 4], -1).flatten(-2)
    steps = MOST_STEPS if form == "int4" else 0
    return whole.shape == nearest_NMU.shape and bool(((whole.float() - nearest_NMU).abs() <= steps).all())


def _blocks(weight_NK: torch.Tensor, form: Form) -> torch.Tensor:
    padded_NK = torch.nn.functional.pad(weight_NK.float(), (0, -weight_NK.shape[1] % BLOCKS[form]))
    return padded_NK.reshape(len(weight_NK), -1, BLOCKS[form])


def _nearest(weight_NK: torch.Tensor, form: Form) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The nearest integers, as float32 (N, M, U), and their scales and zero points, float32 (N, M)."""
    if form == "int4":
        scale_NM, zero_NM = _range_of_four_bits(weight_NK)
    else:
        (scale_NM,) = range_of(weight_NK, form)
        zero_NM = torch.full_like(scale_NM, 2 ** (BITS[form] - 1))
    whole_NMU = torch.round(_blocks(weight_NK, form) / scale_NM[..., None]) + zero_NM[..., None]
    return whole_NMU.clamp(0, 2 ** BITS[form] - 1), scale_NM, zero_NM


def _gptq(
    weight_NK: torch.Tensor,
    scale_NK: torch.Tensor,
    zero_NK: torch.Tensor,
    nearest_NK: torch.Tensor,
    moments_KK: torch.Tensor,
) -> torch.Tensor:
    """Rounds by GPTQ, and returns integers from 0 to 15 as float32 (N, K)."""
    K = weight_NK.shape[1]
    moments_KK = moments_KK.double()
    spread = moments_KK.diagonal().mean()
    # A column whose inputs are all zero does not matter, but without damping the matrix would have no inverse.
    moments_KK = moments_KK + torch.eye(K, dtype=torch.float64) * (DAMPING * spread if spread > 0 else 1)
    order_K = moments_KK.diagonal().argsort(descending=True, stable=True)
    left_NK, scale_NK, zero_NK, nearest_NK = (
        each_NK[:, order_K] for each_NK in (weight_NK, scale_NK, zero_NK, nearest_NK)
    )
    low_NK, high_NK = ((nearest_NK + step).clamp(0, LARGEST_INT4) for step in (-MOST_STEPS, MOST_STEPS))
    inverse_KK = torch.cholesky_inverse(torch.linalg.cholesky(moments_KK[order_K][:, order_K]))
    factor_KK = torch.linalg.cholesky(inverse_KK, upper=True).float()
    whole_NK = torch.empty_like(left_NK)
    for begin in range(0, K, COLUMNS):
        end = min(begin + COLUMNS, K)
        errors = torch.empty_like(left_NK[:, begin:end])
        for k in range(begin, end):
            near_N = torch.round(left_NK[:, k] / scale_NK[:, k]) + zero_NK[:, k]
            whole_NK[:, k] = torch.minimum(torch.maximum(near_N, low_NK[:, k]), high_NK[:, k])
            rest_N = left_NK[:, k] - (whole_NK[:, k] - zero_NK[:, k]) * scale_NK[:, k]
            errors[:, k - begin] = rest_N / factor_KK[k, k]
            left_NK[:, k:end] -= errors[:, k - begin, None] * factor_KK[k, k:end]
        left_NK[:, end:] -= errors @ factor_KK[begin:end, end:]
    return whole_NK[:, order_K.argsort()]

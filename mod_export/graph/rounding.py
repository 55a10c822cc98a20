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

from collections.abc import Sequence
from dataclasses import dataclass

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
PIECE = 2**19
"""The most numbers that are rounded at a time: so many stay in a processor's cache, and need little memory."""
ROWS = 512
"""The least number of rows that are rounded by GPTQ at a time, because every column is a step of its own."""
COLUMNS = 128
"""The number of columns that are rounded between two updates of all following ones, as in the paper."""


def range_of(weight_NK: torch.Tensor, form: Form) -> tuple[torch.Tensor, ...]:
    """The tensors that a file stores beside the integers: float32 scales (N,) or (N, M), none of them zero; and for
    `int4` the zero points, uint8 (N, M / 2).
    """
    ranges = (_range_of(piece_NK, form) for piece_NK in _pieces(weight_NK))
    return tuple(torch.cat(each) for each in zip(*ranges, strict=True))


def _pieces(weight_NK: torch.Tensor, least_rows: int = 1) -> Sequence[torch.Tensor]:
    """Cuts a weight into groups of rows. No row depends on another, so a group is rounded like the whole weight."""
    return torch.split(weight_NK, max(least_rows, PIECE // max(1, weight_NK.shape[1])))


def _range_of(weight_NK: torch.Tensor, form: Form) -> tuple[torch.Tensor, ...]:
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
    compensation = None if moments_KK is None else Compensation.of(moments_KK)
    pieces = _pieces(weight_NK, 1 if compensation is None else ROWS)
    return torch.cat([_whole(piece_NK, form, compensation) for piece_NK in pieces], dim=1 if form == "int8" else 0)


def _whole(weight_NK: torch.Tensor, form: Form, compensation: Compensation | None) -> torch.Tensor:
    if form == "int8":
        (scale_N,) = _range_of(weight_NK, form)
        return torch.round(weight_NK.float() / scale_N[:, None]).to(torch.int8).T
    whole_NMU, scale_NM, zero_NM = _nearest(weight_NK, form)
    if compensation is not None:
        K, U = weight_NK.shape[1], BLOCKS[form]
        scale_NK, zero_NK = (each_NM.repeat_interleave(U, 1)[:, :K] for each_NM in (scale_NM, zero_NM))
        whole_NK = whole_NMU.flatten(1)[:, :K]
        whole_NK.copy_(compensation.rounded(weight_NK.float(), scale_NK, zero_NK, whole_NK))
    return _packed(whole_NMU) if form == "int4" else whole_NMU.to(torch.uint8)


def represented(whole: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """The weight, float32 (N, K), that the `int4` integers of a weight stand for."""
    pieces = _pieces(weight_NK)
    wholes = torch.split(whole, [len(piece_NK) for piece_NK in pieces])
    return torch.cat([_represented(*each) for each in zip(wholes, pieces, strict=True)])


def _represented(whole: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    scale_NM, zero_NM = _range_of_four_bits(weight_NK)
    numbers_NMU = (_unpacked(whole) - zero_NM[..., None]) * scale_NM[..., None]
    return numbers_NMU.flatten(1)[:, : weight_NK.shape[1]]


def _unpacked(whole: torch.Tensor) -> torch.Tensor:
    """The integers that `_packed` packed, as float32."""
    return torch.stack([whole & 15, whole >> 4], -1).flatten(-2).float()


def _packed(numbers: torch.Tensor) -> torch.Tensor:
    """Packs an even number of integers, two to a byte, the first in the low half."""
    numbers = numbers.to(torch.uint8)
    return numbers[..., 0::2] | numbers[..., 1::2] << 4


def is_rounded(whole: torch.Tensor, weight_NK: torch.Tensor, form: Form) -> bool:
    """Whether each integer of a form in blocks is the nearest to its weight; for `int4`, at most MOST_STEPS from it."""
    pieces = _pieces(weight_NK)
    return len(whole) == len(weight_NK) and all(
        _is_rounded(part, piece_NK, form)
        for part, piece_NK in zip(torch.split(whole, [len(piece_NK) for piece_NK in pieces]), pieces, strict=True)
    )


def _is_rounded(whole: torch.Tensor, weight_NK: torch.Tensor, form: Form) -> bool:
    nearest_NMU, _, _ = _nearest(weight_NK, form)
    numbers, steps = (_unpacked(whole), MOST_STEPS) if form == "int4" else (whole.float(), 0)
    return numbers.shape == nearest_NMU.shape and bool(((numbers - nearest_NMU).abs() <= steps).all())


def _blocks(weight_NK: torch.Tensor, form: Form) -> torch.Tensor:
    padded_NK = torch.nn.functional.pad(weight_NK.float(), (0, -weight_NK.shape[1] % BLOCKS[form]))
    return padded_NK.reshape(len(weight_NK), -1, BLOCKS[form])


def _nearest(weight_NK: torch.Tensor, form: Form) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The nearest integers, as float32 (N, M, U), and their scales and zero points, float32 (N, M)."""
    if form == "int4":
        scale_NM, zero_NM = _range_of_four_bits(weight_NK)
    else:
        (scale_NM,) = _range_of(weight_NK, form)
        zero_NM = torch.full_like(scale_NM, 2 ** (BITS[form] - 1))
    whole_NMU = torch.round(_blocks(weight_NK, form) / scale_NM[..., None]) + zero_NM[..., None]
    return whole_NMU.clamp(0, 2 ** BITS[form] - 1), scale_NM, zero_NM


@dataclass(frozen=True, slots=True)
class Compensation:
    """What GPTQ derives from the inputs of a weight.

    Attributes:
        order_K: the order in which columns are rounded, int64.
        factor_KK: how the error of a column spreads over the later ones, float32, upper triangular.
    """

    order_K: torch.Tensor
    factor_KK: torch.Tensor

    @classmethod
    def of(cls, moments_KK: torch.Tensor) -> Compensation:
        """Derives it from sums of x_i x_j over inputs x (K,).

        Float32 is exact enough: with the damping, no eigenvalue is smaller than 1 / (K / DAMPING + 1) of the largest.
        """
        spread = moments_KK.diagonal().mean()
        # A column whose inputs are all zero does not matter, but without damping the matrix would have no inverse.
        added = DAMPING * spread if spread > 0 else 1
        order_K = moments_KK.diagonal().argsort(descending=True, stable=True)
        # The paper's upper Cholesky factor of the inverse, from one factorization: with the columns in reverse order,
        # it is the inverse of the lower factor, in reverse order.
        backwards_K = order_K.flip(0)
        backwards_KK = moments_KK[backwards_K[:, None], backwards_K]
        backwards_KK.diagonal().add_(added)
        lower_KK = torch.linalg.cholesky(backwards_KK, out=backwards_KK)
        inverse_KK = torch.linalg.solve_triangular(lower_KK, torch.eye(len(lower_KK)), upper=False)
        return cls(order_K, inverse_KK.flip(0, 1))

    def rounded(
        self, weight_NK: torch.Tensor, scale_NK: torch.Tensor, zero_NK: torch.Tensor, nearest_NK: torch.Tensor
    ) -> torch.Tensor:
        """Rounds a weight, given the nearest integers, and returns integers from 0 to 15 as float32 (N, K)."""
        K = len(self.order_K)
        # A column is a row of these, so that its numbers lie side by side in memory.
        left_KN, scale_KN, zero_KN, nearest_KN = (
            each_NK.T[self.order_K] for each_NK in (weight_NK, scale_NK, zero_NK, nearest_NK)
        )
        low_KN, high_KN = ((nearest_KN + step).clamp(0, LARGEST_INT4) for step in (-MOST_STEPS, MOST_STEPS))
        whole_KN = torch.empty_like(left_KN)
        for begin in range(0, K, COLUMNS):
            end = min(begin + COLUMNS, K)
            errors_CN = torch.empty_like(left_KN[begin:end])
            for k in range(begin, end):
                near_N = torch.round(left_KN[k] / scale_KN[k]) + zero_KN[k]
                whole_KN[k] = torch.minimum(torch.maximum(near_N, low_KN[k]), high_KN[k])
                rest_N = left_KN[k] - (whole_KN[k] - zero_KN[k]) * scale_KN[k]
                errors_CN[k - begin] = rest_N / self.factor_KK[k, k]
                left_KN[k:end] -= self.factor_KK[k, k:end, None] * errors_CN[k - begin]
            left_KN[end:] -= self.factor_KK[begin:end, end:].T @ errors_CN
        return whole_KN[self.order_K.argsort()].T

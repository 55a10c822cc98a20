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
If the inputs of a weight are known, the factor of SHARES is chosen by errors that count as much as the second moment of
their column, and then a zero point one lower or higher if that has a smaller error. With these ranges, the columns are
rounded one after the other, and those that are still to be rounded compensate for the error of each column (GPTQ;
Frantar, Ashkboos, Hoefler and Alistarh, arXiv 2210.17323, algorithm 1; columns by falling second moment). No integer is
further than MOST_STEPS from the nearest, so that a file can still be compared with the checkpoint.

Shape legend: N columns of the result, K the summed dimension, M blocks, U numbers of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mod_export.graph.weights import BITS, BLOCKS, Form

LARGEST_INT8, LARGEST_INT4 = 127, 15
MOST_STEPS = 1
"""How far an integer may be from the nearest, and a zero point from the one with which the range covers all numbers."""
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


class Rounded(NamedTuple):
    """Holds a weight (N, K) as a file stores it, in one of the forms above.

    Attributes:
        whole: the integers, int8 (K, N) or uint8 (N, M, U), which `int4` packs two to a byte.
        scale: float32 (N,) or (N, M), none of them zero.
        zero: the zero points of `int4`, uint8 (N, M / 2), packed likewise; None in the other forms.
    """

    whole: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None


def rounded(weight_NK: torch.Tensor, form: Form, moments_KK: torch.Tensor | None = None) -> Rounded:
    """Rounds a weight of any float dtype.

    `moments_KK` are, for `int4`, sums of x_i x_j over rows x (K,) that the weight is multiplied with; None if unknown.
    """
    compensation = None if moments_KK is None else Compensation.of(moments_KK)
    pieces = _pieces(weight_NK, 1 if compensation is None else ROWS)
    parts = [_rounded(piece_NK, form, compensation) for piece_NK in pieces]
    whole = torch.cat([part.whole for part in parts], dim=1 if form == "int8" else 0)
    zero = None if form != "int4" else torch.cat([part.zero for part in parts if part.zero is not None])
    return Rounded(whole, torch.cat([part.scale for part in parts]), zero)


def _pieces(weight_NK: torch.Tensor, least_rows: int = 1) -> Sequence[torch.Tensor]:
    """Cuts a weight into groups of rows. No row depends on another, so a group is rounded like the whole weight."""
    return torch.split(weight_NK, max(least_rows, PIECE // max(1, weight_NK.shape[1])))


def _rounded(weight_NK: torch.Tensor, form: Form, compensation: Compensation | None) -> Rounded:
    if form == "int8":
        even_NK = torch.nn.functional.pad(weight_NK.float(), (0, weight_NK.shape[1] % 2))
        scale_N = _not_zero(even_NK.reshape(len(weight_NK), -1, 2).abs().sum(-1).amax(-1) / LARGEST_INT8)
        return Rounded(torch.round(weight_NK.float() / scale_N[:, None]).to(torch.int8).T, scale_N)
    blocks_NMU = _blocks(weight_NK, form)
    if form != "int4":
        scale_NM, zero = _range_of_eight_bits(blocks_NMU)
        return Rounded(_nearest(blocks_NMU, scale_NM, zero, form).to(torch.uint8), scale_NM)
    scale_NM, zero_NM = _range_of_four_bits(blocks_NMU, None if compensation is None else compensation.importance_K)
    whole_NMU = _nearest(blocks_NMU, scale_NM, zero_NM, form)
    if compensation is not None:
        K, U = weight_NK.shape[1], BLOCKS[form]
        scale_NK, zero_NK = (each_NM.repeat_interleave(U, 1)[:, :K] for each_NM in (scale_NM, zero_NM))
        whole_NK = whole_NMU.flatten(1)[:, :K]
        whole_NK.copy_(compensation.rounded(weight_NK.float(), scale_NK, zero_NK, whole_NK))
    return Rounded(_packed(whole_NMU), scale_NM, _packed(torch.nn.functional.pad(zero_NM, (0, zero_NM.shape[1] % 2))))


def _blocks(weight_NK: torch.Tensor, form: Form) -> torch.Tensor:
    padded_NK = torch.nn.functional.pad(weight_NK.float(), (0, -weight_NK.shape[1] % BLOCKS[form]))
    return padded_NK.reshape(len(weight_NK), -1, BLOCKS[form])


def _not_zero(scale: torch.Tensor) -> torch.Tensor:
    """Replaces zeros, so that nothing is divided by zero if all weights are zero."""
    return torch.where(scale != 0, scale, 1.0)


def _range_of_eight_bits(blocks_NMU: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns float32 scales (N, M), and the zero point of all blocks."""
    largest_NM = blocks_NMU.gather(-1, blocks_NMU.abs().argmax(-1, keepdim=True))[..., 0]
    return _not_zero(largest_NM / -(2**7)), torch.tensor(2.0**7)


def _range_of_four_bits(
    blocks_NMU: torch.Tensor, importance_K: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns float32 scales and zero points (N, M). The scales have the least squared error, in which the error of a
    column counts as much as its importance. None means that all count the same, and that zero points do not move.
    """
    widest_NM, zero_NM = _widest(blocks_NMU)
    M, U = blocks_NMU.shape[1:]
    importance_MU = torch.ones(M, U)
    if importance_K is not None:
        importance_MU = torch.nn.functional.pad(importance_K, (0, M * U - len(importance_K))).view(M, U)
    best_NM, scale_NM = torch.full_like(widest_NM, float("inf")), widest_NM
    for share in SHARES:
        error_NM = _error(blocks_NMU, widest_NM * share, zero_NM, importance_MU)
        scale_NM = torch.where(error_NM < best_NM, widest_NM * share, scale_NM)
        best_NM = torch.minimum(error_NM, best_NM)
    if importance_K is None:
        return scale_NM, zero_NM
    first_NM = zero_NM
    for step in range(-MOST_STEPS, MOST_STEPS + 1):
        other_NM = (first_NM + step).clamp(0, LARGEST_INT4)
        error_NM = _error(blocks_NMU, scale_NM, other_NM, importance_MU)
        zero_NM = torch.where(error_NM < best_NM, other_NM, zero_NM)
        best_NM = torch.minimum(error_NM, best_NM)
    return scale_NM, zero_NM


def _widest(blocks_NMU: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scales and zero points (N, M) with which the range covers zero and all numbers of a block."""
    low_NM, high_NM = blocks_NMU.amin(-1).clamp(max=0), blocks_NMU.amax(-1).clamp(min=0)
    scale_NM = torch.where(high_NM > low_NM, (high_NM - low_NM) / LARGEST_INT4, 1.0)
    return scale_NM, torch.round(-low_NM / scale_NM)


def _error(
    blocks_NMU: torch.Tensor, scale_NM: torch.Tensor, zero_NM: torch.Tensor, importance_MU: torch.Tensor
) -> torch.Tensor:
    whole_NMU = _nearest(blocks_NMU, scale_NM, zero_NM, "int4")
    rest_NMU = (whole_NMU - zero_NM[..., None]) * scale_NM[..., None] - blocks_NMU
    return (rest_NMU.square() * importance_MU).sum(-1)


def _nearest(blocks_NMU: torch.Tensor, scale_NM: torch.Tensor, zero: torch.Tensor, form: Form) -> torch.Tensor:
    """Returns the nearest integers, as float32 (N, M, U), for zero points (N, M) or one for all blocks."""
    whole_NMU = torch.round(blocks_NMU / scale_NM[..., None]) + zero[..., None]
    return whole_NMU.clamp(0, 2 ** BITS[form] - 1)


def represented(stored: Rounded, K: int) -> torch.Tensor:
    """Returns the weight, float32 (N, K), that a weight in `int4` stands for."""
    assert stored.zero is not None
    zero_NM1 = _unpacked(stored.zero)[:, : stored.scale.shape[1], None]
    return ((_unpacked(stored.whole) - zero_NM1) * stored.scale[..., None]).flatten(1)[:, :K]


def _unpacked(whole: torch.Tensor) -> torch.Tensor:
    """Returns the integers that `_packed` packed, as float32."""
    return torch.stack([whole & 15, whole >> 4], -1).flatten(-2).float()


def _packed(numbers: torch.Tensor) -> torch.Tensor:
    """Packs an even number of integers, two to a byte, the first in the low half."""
    numbers = numbers.to(torch.uint8)
    return numbers[..., 0::2] | numbers[..., 1::2] << 4


def is_rounded(stored: Rounded, weight_NK: torch.Tensor) -> bool:
    """Returns whether numbers in `int4` can come from a weight: each range is one that the search may choose, and each
    integer is at most MOST_STEPS from the nearest.
    """
    pieces = _pieces(weight_NK)
    sizes = [len(piece_NK) for piece_NK in pieces]
    parts = [torch.split(each, sizes) for each in stored if each is not None]
    return all(_is_rounded(Rounded(*part), piece_NK) for *part, piece_NK in zip(*parts, pieces, strict=True))


def _is_rounded(stored: Rounded, weight_NK: torch.Tensor) -> bool:
    assert stored.zero is not None
    blocks_NMU = _blocks(weight_NK, "int4")
    widest_NM, first_NM = _widest(blocks_NMU)
    zero_NM = _unpacked(stored.zero)[:, : widest_NM.shape[1]]
    scales_NMS = widest_NM[..., None] * torch.tensor(SHARES)
    nearest_NMU = _nearest(blocks_NMU, stored.scale, zero_NM, "int4")
    return bool(
        (stored.scale[..., None] == scales_NMS).any(-1).all()
        and ((zero_NM - first_NM).abs() <= MOST_STEPS).all()
        and ((_unpacked(stored.whole) - nearest_NMU).abs() <= MOST_STEPS).all()
    )


@dataclass(frozen=True, slots=True)
class Compensation:
    """What GPTQ derives from the inputs of a weight.

    Attributes:
        order_K: the order in which columns are rounded, int64.
        factor_KK: how the error of a column spreads over the later ones, float32, upper triangular.
        importance_K: the second moment of each column, with damping; None if all are zero.
    """

    order_K: torch.Tensor
    factor_KK: torch.Tensor
    importance_K: torch.Tensor | None

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
        return cls(order_K, inverse_KK.flip(0, 1), moments_KK.diagonal() + added if spread > 0 else None)

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

"""Weights in eight and four bits: how each number is rounded, and under which names the results are stored.

int8   q (K, N) = round(w / scale), scale (N,) = largest |w_2i| + |w_2i+1| of the column / 127. Processors without VNNI
       multiply two neighbours by unsigned bytes and add the products in 16 bits, where they saturate beyond 32,767
       (Intel, vpmaddubsw). With this scale the two are at most 128 together, and 255 x 128 fits: the same artefact
       gives the same numbers everywhere, with a third of a bit more than the usual seven.
int4   q (N, K / 32, 16) two numbers to a byte, the first in the low half, of value q - 8; scale (N, K / 32) = the w of
       largest |w| in the block / -8, so that all sixteen numbers are used. The layout of ONNX Runtime's MatMulNBits.

Shape legend: a weight is stored as (N, K); N columns of the result, K what is summed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import onnx_ir as ir

from mod_export.types import QUANTIZED, DType

if TYPE_CHECKING:
    import torch

__all__ = ["BLOCK", "quantize", "quantized_tensors", "source_of"]

BLOCK = 32
LARGEST_INT8 = 127
ZERO_INT4 = 8


def quantized_tensors(
    name: str, shape: tuple[int, ...], dtype: DType
) -> Mapping[str, tuple[ir.DataType, tuple[int, ...]]]:
    """Name -> (type, shape) of what a weight (N, K) becomes: the whole numbers, then their scales."""
    N, K = shape
    if dtype == "int8":
        return {f"{name}.int8": (ir.DataType.INT8, (K, N)), f"{name}.int8_scale": (ir.DataType.FLOAT, (N,))}
    blocks = -(-K // BLOCK)
    return {
        f"{name}.int4": (ir.DataType.UINT8, (N, blocks, BLOCK // 2)),
        f"{name}.int4_scale": (ir.DataType.FLOAT, (N, blocks)),
    }


def source_of(stored: str) -> str | None:
    """The weight that a stored tensor of whole numbers was made from; None for the name of anything else."""
    name, _, kind = stored.rpartition(".")
    return name if kind in QUANTIZED else None


def quantize(weight_NK: torch.Tensor, dtype: DType) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight as whole numbers and scales, of the types and shapes of `quantized_tensors`."""
    import torch

    N, K = weight_NK.shape
    if dtype == "int8":
        pairs_NPK = torch.nn.functional.pad(weight_NK.float(), (0, K % 2)).reshape(N, -1, 2)
        scale_N1 = _not_zero(pairs_NPK.abs().sum(-1).amax(-1, keepdim=True) / LARGEST_INT8)
        return torch.round(weight_NK.float() / scale_N1).to(torch.int8).T.contiguous(), scale_N1[:, 0].contiguous()
    padded_NK = torch.nn.functional.pad(weight_NK.float(), (0, -K % BLOCK))
    blocks_NMK = padded_NK.reshape(N, -1, BLOCK)
    largest_NM1 = blocks_NMK.gather(-1, blocks_NMK.abs().argmax(-1, keepdim=True))
    scale_NM1 = _not_zero(largest_NM1 / -ZERO_INT4)
    whole_NMK = (torch.round(blocks_NMK / scale_NM1) + ZERO_INT4).clamp(0, 2 * ZERO_INT4 - 1).to(torch.uint8)
    return whole_NMK[..., 0::2] | whole_NMK[..., 1::2] << 4, scale_NM1[..., 0].contiguous()


def _not_zero(scale: torch.Tensor) -> torch.Tensor:
    """Where all weights are zero the scale is 1, so that nothing is divided by zero."""
    import torch

    return torch.where(scale != 0, scale, 1.0)

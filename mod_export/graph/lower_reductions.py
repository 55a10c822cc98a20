"""Writes reductions that ONNX lacks, or that torch's exporter translates wrongly, with operators that ONNX has.

Median, cumprod, cdist and searchsorted have no translation. The one of embedding_bag has sizes that depend on the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mod_export.graph.program_nodes import argument_of, shape_of

ATEN = torch.ops.aten
Lowered = Callable[..., Any]


def lowered_embedding_bag(node: fx.Node) -> Lowered | None:
    """`embedding_bag` with bags of one size, as a 2-D input has; the sizes of other bags depend on the data."""
    offsets, indices = argument_of(node, "offsets"), argument_of(node, "indices")
    if not isinstance(offsets, fx.Node) or offsets.target not in (ATEN.arange.start_step, ATEN.arange.default):
        return None
    step, bags = argument_of(offsets, "step") or 1, shape_of(offsets)[0]
    total = math.prod(shape_of(indices))
    if argument_of(offsets, "start") not in (None, 0) or argument_of(node, "include_last_offset"):
        return None
    if bags * step != total:
        return None
    return _bags_of(bags)


def lowered_median(node: fx.Node) -> Lowered:
    """The lower of the two middle values along a dimension, and its index."""
    return _median


def lowered_median_of_all(node: fx.Node) -> Lowered:
    """The lower of the two middle values of a tensor."""
    return lambda x: _median(x.reshape(-1), 0)[0]


def lowered_cumprod(node: fx.Node) -> Lowered:
    """Cumulative products in steps that each double the length of the factors (Hillis and Steele, Communications of the
    ACM 29(12), 1986).
    """
    return _cumprod


def lowered_cdist(node: fx.Node) -> Lowered:
    """Distances computed from differences, as they are defined: matrix products would lose digits."""
    return _cdist


def lowered_searchsorted(node: fx.Node) -> Lowered | None:
    """The number of boundaries below each value, which is compared with all of them."""
    return None if argument_of(node, "sorter") is not None else _searchsorted


def lowered_bucketize(node: fx.Node) -> Lowered:
    """`searchsorted` with its first two arguments swapped."""
    return lambda x, boundaries, *, out_int32=False, right=False: _searchsorted(
        boundaries, x, out_int32=out_int32, right=right
    )


def _bags_of(bags: int) -> Lowered:
    def embedding_bag(
        weight: Tensor,
        indices: Tensor,
        offsets: Tensor,
        scale_grad_by_freq: bool = False,
        mode: int = 0,
        sparse: bool = False,
        per_sample_weights: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        indices_BN = indices.reshape(bags, -1)
        rows_BND = weight.index_select(0, indices_BN.reshape(-1)).reshape(*indices_BN.shape, -1)
        if per_sample_weights is not None:
            rows_BND = rows_BND * per_sample_weights.reshape(bags, -1, 1)
        live_BN1 = torch.ones_like(indices_BN[..., None], dtype=torch.bool)
        if padding_idx is not None and padding_idx >= 0:
            live_BN1 = (indices_BN != padding_idx)[..., None]
        count_B1 = live_BN1.sum(1)
        if mode == 2:
            result_BD = torch.where(live_BN1, rows_BND, -math.inf).amax(1)
            result_BD = torch.where(count_B1 > 0, result_BD, 0.0)
        else:
            result_BD = torch.where(live_BN1, rows_BND, 0.0).sum(1)
            if mode == 1:
                result_BD = result_BD / count_B1.clamp(min=1)
        # The other results serve the gradient only.
        return result_BD, indices, count_B1.reshape(-1), indices

    return embedding_bag


def _median(x: Tensor, dim: int, keepdim: bool = False) -> Sequence[Tensor]:
    if not x.dim():
        return x, torch.zeros_like(x, dtype=torch.int64)
    middle = (x.shape[dim] - 1) // 2
    values, indices = (part.narrow(dim, middle, 1) for part in x.sort(dim=dim, stable=True))
    if x.is_floating_point():
        # The median of a row with NaN is NaN, wherever a runtime sorts it.
        is_nan = x.isnan()
        in_row = is_nan.any(dim, keepdim=True)
        values = torch.where(in_row, math.nan, values)
        indices = torch.where(in_row, is_nan.to(torch.int64).argmax(dim, keepdim=True), indices)
    return (values, indices) if keepdim else (values.squeeze(dim), indices.squeeze(dim))


def _cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    if dtype is not None:
        x = x.to(dtype)
    elif not x.is_floating_point():
        x = x.to(torch.int64)
    if not x.dim():
        return x
    step, size = 1, x.shape[dim]
    while step < size:
        ones = torch.ones_like(x.narrow(dim, 0, step))
        x = x * torch.cat([ones, x.narrow(dim, 0, size - step)], dim)
        step *= 2
    return x


def _cdist(one: Tensor, other: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Tensor:
    difference = (one[..., :, None, :] - other[..., None, :, :]).abs()
    if p == 0:
        return (difference != 0).to(one.dtype).sum(-1)
    if p == math.inf:
        return difference.amax(-1)
    if p == 2:
        return (difference * difference).sum(-1).sqrt()
    return difference.sum(-1) if p == 1 else difference.pow(p).sum(-1).pow(1 / p)


def _searchsorted(
    boundaries: Tensor,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    queries = torch.as_tensor(values, dtype=boundaries.dtype) if not isinstance(values, Tensor) else values
    before = boundaries[None, :] if boundaries.dim() == 1 else boundaries[..., None, :]
    each = queries[..., None]
    below = before <= each if right or side == "right" else before < each
    return below.sum(-1).to(torch.int32 if out_int32 else torch.int64)

"""Writes reductions that ONNX has no operator for, or that torch's exporter translates wrongly, as others that it has.

`scatter_reduce(mean)` becomes a scatter without a reduction there, and what takes no part of the tensor itself
(`include_self=False`) becomes one that does; median, cumprod, searchsorted and index_reduce have no translation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mod_export.export.program_nodes import argument_of, shape_of

ATEN = torch.ops.aten
Lowered = Callable[..., Any]


def lowered_scatter_reduce(node: fx.Node) -> Lowered | None:
    """Sums, products, largest and smallest values that count the tensor itself are left to the exporter."""
    if argument_of(node, "reduce") != "mean" and argument_of(node, "include_self"):
        return None
    return _scatter_reduce


def lowered_index_reduce(node: fx.Node) -> Lowered:
    """As `scatter_reduce`, with an index for whole slices."""
    return _index_reduce


def lowered_embedding_bag(node: fx.Node) -> Lowered | None:
    """Bags of one size, as those of a 2-D input are; others have sizes that depend on the data."""
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
    """The lower one of the two middle values of a dimension, and where it is."""
    return _median


def lowered_median_of_all(node: fx.Node) -> Lowered:
    """The lower one of the two middle values of a tensor."""
    return lambda x: _median(x.reshape(-1), 0)[0]


def lowered_cumprod(node: fx.Node) -> Lowered:
    """Products of ever longer parts, each step twice as long as the one before (Hillis and Steele, Communications of
    the ACM 29(12), 1986).
    """
    return _cumprod


def lowered_cdist(node: fx.Node) -> Lowered:
    """Distances from differences, as their definition has it: products of matrices would lose digits."""
    return _cdist


def lowered_searchsorted(node: fx.Node) -> Lowered | None:
    """How many boundaries are below a value: each is compared with all."""
    return None if argument_of(node, "sorter") is not None else _searchsorted


def lowered_bucketize(node: fx.Node) -> Lowered:
    """As `searchsorted`, the other way round."""
    return lambda x, boundaries, *, out_int32=False, right=False: _searchsorted(
        boundaries, x, out_int32=out_int32, right=right
    )


_NEUTRAL = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "amax": -math.inf, "amin": math.inf}


def _scatter_reduce(
    x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    src = src[tuple(slice(size) for size in index.shape)]
    count = torch.zeros_like(x).scatter_add(dim, index, torch.ones_like(src))
    touched = count > 0
    neutral = _NEUTRAL[reduce] if x.is_floating_point() else _neutral_integer(reduce, x.dtype)
    base = x if include_self else torch.where(touched, neutral, x)
    if reduce not in ("sum", "mean"):
        return base.scatter_reduce(dim, index, src, reduce, include_self=True)
    total = base.scatter_add(dim, index, src)
    if reduce == "sum":
        return total
    parts = count + 1 if include_self else torch.where(touched, count, 1)
    return total / parts if x.is_floating_point() else total.div(parts, rounding_mode="floor")


def _neutral_integer(reduce: str, dtype: torch.dtype) -> int:
    limits = torch.iinfo(dtype)
    return {"amax": limits.min, "amin": limits.max}.get(reduce, int(_NEUTRAL[reduce]) if reduce == "prod" else 0)


def _index_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    shape = [1] * x.dim()
    shape[dim] = index.shape[0]
    wide = index.reshape(shape).expand(source.shape)
    return _scatter_reduce(x, dim, wide, source, reduce, include_self=include_self)


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
            found_BD = torch.where(live_BN1, rows_BND, -math.inf).amax(1)
            found_BD = torch.where(count_B1 > 0, found_BD, 0.0)
        else:
            found_BD = torch.where(live_BN1, rows_BND, 0.0).sum(1)
            if mode == 1:
                found_BD = found_BD / count_B1.clamp(min=1)
        # The others are for its gradient.
        return found_BD, indices, count_B1.reshape(-1), indices

    return embedding_bag


def _median(x: Tensor, dim: int, keepdim: bool = False) -> Sequence[Tensor]:
    values, indices = x.sort(dim=dim, stable=True)
    middle = (x.shape[dim] - 1) // 2 if x.dim() else 0
    if not x.dim():
        return x, torch.zeros_like(x, dtype=torch.int64)
    return tuple(one.narrow(dim, middle, 1) if keepdim else one.select(dim, middle) for one in (values, indices))


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
    one = torch.as_tensor(values, dtype=boundaries.dtype) if not isinstance(values, Tensor) else values
    before = boundaries[None, :] if boundaries.dim() == 1 else boundaries[..., None, :]
    each = one[..., None]
    below = before <= each if right or side == "right" else before < each
    return below.sum(-1).to(torch.int32 if out_int32 else torch.int64)

"""Expresses operators without a good ONNX form by operators that have one, for `lowering.py`.

* Masks: the number of true entries is unknown when a graph is exported, so a graph of fixed sizes cannot hold their
  indices. It needs no indices if only the masked entries change: `where` picks them, and a cumulative sum numbers them.
* Scatters: ONNX's ScatterElements needs an index for each element, has no mean, and always includes the old element in
  a reduction.
* Reductions: median, cumprod, cdist and searchsorted have no translation. That of embedding_bag has sizes that
  depend on the data.
* Numeric functions: torch.onnx writes textbook formulas. `log(1 + x)` is 0 if x is below half a unit in the last place
  of 1, and `log(exp(a) + exp(b))` is infinite from 89 on. PyTorch avoids both. The forms of log1p and expm1 are those
  of Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition, section 1.14.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

ATEN = torch.ops.aten
MEAN, SUM = 1, 2
"""ATEN's numbers for the reduction of a loss; 0 is no reduction."""
_NEUTRAL = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "amax": -math.inf, "amin": math.inf}


# Masks


def put_by_mask(x: Tensor, indices: Sequence[Tensor | None], value: Tensor, accumulate: bool = False) -> Tensor:
    """`x[mask] = value`, where one boolean mask is the only index of x."""
    before = next(n for n, index in enumerate(indices) if index is not None)
    mask = indices[before]
    assert mask is not None
    rest = x.dim() - before - mask.dim()
    wide = mask.reshape(*[1] * before, *mask.shape, *[1] * rest)
    # The value is (before, n true entries, rest), or has a single entry that is broadcast.
    entries = value.shape[value.dim() - rest - 1] if value.dim() > rest else 1
    if entries == 1:
        if value.dim() > rest:
            shape = value.shape
            at = value.dim() - rest - 1
            value = value.reshape(*shape[:at], *[1] * mask.dim(), *shape[at + 1 :])
        return torch.where(wide, value.to(x.dtype), x)
    number = _number(mask).clamp(0, entries - 1)
    value = value.expand(*x.shape[:before], entries, *x.shape[x.dim() - rest :])
    chosen = value.index_select(before, number.reshape(-1)).reshape(x.shape)
    return torch.where(wide, chosen.to(x.dtype), x)


def _number(mask: Tensor) -> Tensor:
    """The number of true entries before each true entry, in the shape of the mask."""
    return (mask.reshape(-1).to(torch.int64).cumsum(0) - 1).reshape(mask.shape)


def scatter_by_mask(copies: int) -> Callable[..., Tensor]:
    """Returns `masked_scatter` for a mask that holds this many `copies` of each entry: the n-th true entry takes the
    n-th row of `copies` elements of the source.
    """

    def scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        shape = torch.broadcast_shapes(x.shape, mask.shape)  # type: ignore[no-untyped-call]  # torch has no annotations there.
        mask = mask.expand(shape)
        first = mask.reshape(-1, copies)[:, 0]
        rows = source.reshape(-1, copies)
        number = (first.to(torch.int64).cumsum(0) - 1).clamp(0, rows.shape[0] - 1)
        return torch.where(mask, rows.index_select(0, number).reshape(shape).to(x.dtype), x)

    return scatter


def _nonzero_static(x: Tensor, *, size: int, fill_value: int = -1) -> Tensor:
    """The positions of the first `size` entries that are not 0."""
    flat = (x != 0).reshape(-1)
    count = flat.shape[0]
    # The values of a selection, because not every engine keeps equal entries in their order.
    place = torch.where(flat, torch.arange(count, device=x.device), count)
    place = place.topk(min(size, count), largest=False).values
    steps = [math.prod(x.shape[n + 1 :]) for n in range(x.dim())]
    # `//` stays in integers; the exporter writes `div` of integers as a division of floats.
    places = [place // step % extent for step, extent in zip(steps, x.shape, strict=True)]
    positions = torch.where((place < count)[:, None], torch.stack(places, 1), fill_value)
    missing = size - positions.shape[0]
    return torch.cat([positions, positions.new_full((missing, x.dim()), fill_value)]) if missing > 0 else positions


# Scatters


def with_indices(source: Tensor, index: Tensor) -> Tensor:
    """Drops the elements of `source` that have no index."""
    return source[tuple(map(slice, index.shape))]


def scatter_reduced(
    x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """`scatter_reduce` with any reduction; without `include_self`, the old elements do not count."""
    src = with_indices(src, index)
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


def _index_reduced(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """`index_reduce`: like `scatter_reduced`, but each index of (N,) applies to a whole slice of `source`."""
    shape = [1] * x.dim()
    shape[dim] = index.shape[0]
    wide = index.reshape(shape).expand(source.shape)
    return scatter_reduced(x, dim, wide, source, reduce, include_self=include_self)


def _scattered_by(x: Tensor, dim: int, index: Tensor, source: Tensor | float, *, reduce: str) -> Tensor:
    """`scatter` with the reduction `add` or `multiply`; `source` may be a number."""
    source = source if isinstance(source, Tensor) else torch.full_like(index, source, dtype=x.dtype)
    source = with_indices(source, index)
    return x.scatter_add(dim, index, source) if reduce == "add" else x.scatter_reduce(dim, index, source, "prod")


def _put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """`put`: an index counts the elements of the whole tensor, from its end if it is negative."""
    at = torch.where(index < 0, index + x.numel(), index).reshape(-1)
    flat, new = x.reshape(-1), source.reshape(-1)
    return (flat.scatter_add(0, at, new) if accumulate else flat.scatter(0, at, new)).reshape(x.shape)


def _diagonal_scattered(x: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Writes `source` (..., N) to the diagonal that dimensions dim1 and dim2 of x span."""
    x_RC = x.movedim((dim1, dim2), (-2, -1))
    row_R, column_C = (torch.arange(size, device=x.device) for size in x_RC.shape[-2:])
    place_R = (row_R + min(offset, 0)).clamp(0, source.shape[-1] - 1)
    result = torch.where(column_C - row_R[:, None] == offset, source.index_select(-1, place_R)[..., None], x_RC)
    return result.movedim((-2, -1), (dim1, dim2))


# Reductions


def bags_of(bags: int) -> Callable[..., Any]:
    """Returns `embedding_bag` for this number of bags, all of one size."""

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
    """The lower of the two middle values along a dimension, and its index."""
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
    """Cumulative products in steps that each double the length of the factors (Hillis and Steele, Communications of the
    ACM 29(12), 1986).
    """
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


def _cdist(x: Tensor, y: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Tensor:
    """Distances computed from differences, as they are defined: matrix products would lose digits."""
    difference = (x[..., :, None, :] - y[..., None, :, :]).abs()
    if p == 0:
        return (difference != 0).to(x.dtype).sum(-1)
    if p == math.inf:
        return difference.amax(-1)
    if p == 2:
        return (difference * difference).sum(-1).sqrt()
    return difference.sum(-1) if p == 1 else difference.pow(p).sum(-1).pow(1 / p)


def searchsorted(
    boundaries: Tensor,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """The number of boundaries below each value, or not above it with `right`; a value is compared with all of them."""
    if not isinstance(values, Tensor):
        # Not `as_tensor`, which would add a constant to the program. A float is compared with integers as a float.
        is_typed = boundaries.is_floating_point() or isinstance(values, int)
        dtype = boundaries.dtype if is_typed else torch.float32
        values = torch.full((), values, dtype=dtype, device=boundaries.device)
    before = boundaries if boundaries.dim() == 1 else boundaries[..., None, :]
    query_column: Tensor = values[..., None]
    # Negated, as in PyTorch, so that all boundaries are below NaN.
    above = before > query_column if right or side == "right" else before >= query_column
    return (~above).sum(-1).to(torch.int32 if out_int32 else torch.int64)


def _bucketize(x: Any, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    return searchsorted(boundaries, x, out_int32=out_int32, right=right)


def _aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    dims = list(range(x.dim())) if dim is None else [dim]
    return x.amin(dims, keepdim), x.amax(dims, keepdim)


# Numeric functions


def _log1p(x: Tensor) -> Tensor:
    x = x if x.is_floating_point() else x.float()
    sum_ = 1 + x
    result = x * (sum_.log() / torch.where(sum_ == 1, 1.0, sum_ - 1))
    return torch.where(sum_ == 1, x, torch.where(sum_.isinf(), sum_.log(), result))


def _expm1(x: Tensor) -> Tensor:
    x = x if x.is_floating_point() else x.float()
    power = x.exp()
    result = (power - 1) * (x / torch.where(power == 1, 1.0, power.log()))
    # If the power is infinite or vanishes beside 1, the difference itself is exact.
    is_extreme = power.isinf() | (power - 1 == -1)
    return torch.where(power == 1, x, torch.where(is_extreme, power - 1, result))


def _log_of_one_and(power: Tensor) -> Tensor:
    """log(1 + exp(power)), where power is -|x|. Unlike `log1p`, `softplus` is stable in every runtime."""
    return torch.nn.functional.softplus(power)


def _log_sigmoid(x: Tensor) -> Tensor:
    return -torch.relu(-x) - _log_of_one_and(-x.abs())


def _logaddexp(x: Tensor, y: Tensor) -> Tensor:
    largest = torch.maximum(x, y)
    # Equal numbers are treated apart, because the difference of equal infinities is NaN.
    return torch.where(x == y, largest + math.log(2), largest + _log_of_one_and(-(x - y).abs()))


def _logaddexp2(x: Tensor, y: Tensor) -> Tensor:
    largest, log_2 = torch.maximum(x, y), math.log(2)
    added = _log_of_one_and(-(x - y).abs() * log_2) / log_2
    return torch.where(x == y, largest + 1, largest + added)


def _logcumsumexp(x: Tensor, dim: int) -> Tensor:
    """The logsumexp of every prefix of a row, computed from N copies of the row under an N x N mask."""
    rows = x.movedim(dim, -1) if x.dim() else x.reshape(1)
    place = torch.arange(rows.shape[-1], device=x.device)
    prefixes = rows.unsqueeze(-2).masked_fill(place > place[:, None], -math.inf)
    result = prefixes.logsumexp(-1)
    return result.movedim(-1, dim) if x.dim() else result.reshape(())


def _bce_with_logits(
    x: Tensor, target: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None, reduction: int = MEAN
) -> Tensor:
    share = 1.0 if pos_weight is None else (pos_weight - 1) * target + 1
    loss = (1 - target) * x - share * _log_sigmoid(x)
    loss = loss if weight is None else loss * weight
    return loss.mean() if reduction == MEAN else loss.sum() if reduction == SUM else loss


def _hypot(x: Tensor, y: Tensor) -> Tensor:
    """Divides by the larger number, so that no square overflows. The length is infinite if one number is, even beside
    NaN.
    """
    x, y = x.abs(), y.abs()
    largest, smallest = torch.maximum(x, y), torch.minimum(x, y)
    share = smallest / torch.where(largest == 0, 1.0, largest)
    return torch.where(x.isinf() | y.isinf(), math.inf, largest * (share * share + 1).sqrt())


def _fmax(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x.isnan(), y, torch.where(y.isnan(), x, torch.maximum(x, y)))


def _fmin(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x.isnan(), y, torch.where(y.isnan(), x, torch.minimum(x, y)))


def _rrelu(x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, *_training: Any) -> Tensor:
    """`rrelu` outside of training, where the slope is the mean of its bounds."""
    result: Tensor = ATEN.leaky_relu.default(x, (lower + upper) / 2)
    return result


def _subtracted_from(x: Tensor, other: float, alpha: float = 1) -> Tensor:
    dtype = x.dtype if x.is_floating_point() or isinstance(other, int) else torch.float32
    return torch.sub(torch.full((), other, dtype=dtype, device=x.device), x, alpha=alpha)


def _copied(x: Tensor, source: Tensor, *_blocking: Any) -> Tensor:
    return source.to(x.dtype).expand(x.shape)


REPLACEMENTS: Mapping[Any, Callable[..., Any]] = {
    ATEN.nonzero_static.default: _nonzero_static,
    ATEN.index_reduce.default: _index_reduced,
    ATEN.scatter.reduce: _scattered_by,
    ATEN.scatter.value_reduce: _scattered_by,
    ATEN.put.default: _put,
    ATEN.diagonal_scatter.default: _diagonal_scattered,
    ATEN.median.dim: _median,
    ATEN.median.default: lambda x: _median(x.reshape(-1), 0)[0],
    ATEN.cumprod.default: _cumprod,
    ATEN.cdist.default: _cdist,
    ATEN.bucketize.Tensor: _bucketize,
    ATEN.bucketize.Scalar: _bucketize,
    ATEN.aminmax.default: _aminmax,
    ATEN.copy.default: _copied,
    ATEN.rrelu.default: _rrelu,
    ATEN.log1p.default: _log1p,
    ATEN.expm1.default: _expm1,
    ATEN.log_sigmoid.default: _log_sigmoid,
    ATEN.logaddexp.default: _logaddexp,
    ATEN.logaddexp2.default: _logaddexp2,
    ATEN.logcumsumexp.default: _logcumsumexp,
    ATEN.binary_cross_entropy_with_logits.default: _bce_with_logits,
    ATEN.hypot.default: _hypot,
    ATEN.fmax.default: _fmax,
    ATEN.fmin.default: _fmin,
    ATEN.rsub.Scalar: _subtracted_from,
    ATEN.__and__.Tensor: torch.bitwise_and,
    ATEN.__or__.Tensor: torch.bitwise_or,
    ATEN.__xor__.Tensor: torch.bitwise_xor,
}
"""Operator -> function that computes the same, for operators that are replaced wherever they stand."""

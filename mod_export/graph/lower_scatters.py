"""Writes operations that put elements at indices, or on a diagonal, with ONNX's ScatterElements and Where.

ScatterElements needs an index for each element, has no mean, and always includes the old element in a reduction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from mod_export.graph.program_nodes import argument_of, shape_of

Lowered = Callable[..., Any]
_NEUTRAL = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "amax": -math.inf, "amin": math.inf}


def lowered_scatter(node: fx.Node) -> Lowered | None:
    """Drops elements without an index: PyTorch ignores them, and ONNX needs an index for each element."""
    if _has_an_index_for_each(node):
        return None
    target: Any = node.target
    return lambda x, dim, index, source: target(x, dim, index, _as_many(source, index))


def lowered_scatter_reduce(node: fx.Node) -> Lowered | None:
    """Leaves to the exporter what it can translate: all reductions but the mean, if they include the old elements."""
    is_exported = argument_of(node, "reduce") != "mean" and argument_of(node, "include_self")
    return None if is_exported and _has_an_index_for_each(node) else scatter_reduced


def _has_an_index_for_each(node: fx.Node) -> bool:
    return shape_of(argument_of(node, "index")) == shape_of(argument_of(node, "src"))


def _as_many(source: Tensor, index: Tensor) -> Tensor:
    """Drops the elements of `source` that have no index."""
    return source[tuple(map(slice, index.shape))]


def scatter_reduced(
    x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """`scatter_reduce` with any reduction; without `include_self`, the old elements do not count."""
    src = _as_many(src, index)
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


def index_reduced(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """`index_reduce`: like `scatter_reduced`, but each index of (N,) applies to a whole slice of `source`."""
    shape = [1] * x.dim()
    shape[dim] = index.shape[0]
    wide = index.reshape(shape).expand(source.shape)
    return scatter_reduced(x, dim, wide, source, reduce, include_self=include_self)


def scattered_by(x: Tensor, dim: int, index: Tensor, source: Tensor | float, *, reduce: str) -> Tensor:
    """`scatter` with the reduction `add` or `multiply`; `source` may be a number."""
    source = source if isinstance(source, Tensor) else torch.full_like(index, source, dtype=x.dtype)
    source = _as_many(source, index)
    return x.scatter_add(dim, index, source) if reduce == "add" else x.scatter_reduce(dim, index, source, "prod")


def put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """`put`: an index counts the elements of the whole tensor, from its end if it is negative."""
    at = torch.where(index < 0, index + x.numel(), index).reshape(-1)
    flat, new = x.reshape(-1), source.reshape(-1)
    return (flat.scatter_add(0, at, new) if accumulate else flat.scatter(0, at, new)).reshape(x.shape)


def diagonal_scattered(x: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Writes `source` (..., N) to the diagonal that dimensions dim1 and dim2 of x span."""
    x_RC = x.movedim((dim1, dim2), (-2, -1))
    row_R, column_C = (torch.arange(size, device=x.device) for size in x_RC.shape[-2:])
    place_R = (row_R + min(offset, 0)).clamp(0, source.shape[-1] - 1)
    result = torch.where(column_C - row_R[:, None] == offset, source.index_select(-1, place_R)[..., None], x_RC)
    return result.movedim((-2, -1), (dim1, dim2))

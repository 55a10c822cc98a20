"""Fourier transforms of fixed length as products with matrices of cosines and sines.

The k-th result of n numbers is the sum of x_j exp(-2 pi i j k / n) (numpy.fft, "Implementation details"), which is a
product of x with the matrix of cos(2 pi j k / n), and another one with that of sin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mod_export.graph.program_nodes import argument_of, shape_of

ATEN = torch.ops.aten
TRANSFORMS: Mapping[Any, int] = {
    ATEN.fft_fft.default: -1, ATEN.fft_fft2.default: -1, ATEN.fft_fftn.default: -1,
    ATEN.fft_rfft.default: -1, ATEN.fft_rfft2.default: -1, ATEN.fft_rfftn.default: -1,
    ATEN.fft_ifft.default: 1, ATEN.fft_ifft2.default: 1, ATEN.fft_ifftn.default: 1,
    ATEN.fft_irfft.default: 1, ATEN.fft_irfft2.default: 1, ATEN.fft_irfftn.default: 1,
}  # fmt: skip
"""The transforms, and the sign of their exponent."""
HALVING = {ATEN.fft_rfft.default, ATEN.fft_rfft2.default, ATEN.fft_rfftn.default}
"""Of real numbers: the other half of the result along the last dimension follows from symmetry, and is left out."""
TO_REAL = {ATEN.fft_irfft.default, ATEN.fft_irfft2.default, ATEN.fft_irfftn.default}
"""They read such a half, and their result is real."""


def transformed(add: Callable[..., Any], node: fx.Node, real: Any, imaginary: Any | None) -> tuple[Any, Any | None]:
    """The real and the imaginary part of a transform's result; None is that of a real one.

    Args:
        add: adds a node to the graph.
        node: the transform.
        real: the node of the real part of what it reads.
        imaginary: that of the imaginary part; None of real numbers.
    """
    source: Any = node.args[0]
    shape, sign = shape_of(source), TRANSFORMS[node.target]
    dims, sizes = _dims_and_sizes(node, shape)
    for dim, size in zip(dims, sizes, strict=True):
        held = size // 2 + 1 if node.target in TO_REAL and dim == dims[-1] else size
        if held != shape[dim]:
            real, imaginary = (
                None if one is None else _resized(add, one, dim, held, shape) for one in (real, imaginary)
            )
    for dim, size in zip(dims, sizes, strict=True):
        if node.target in TO_REAL and dim == dims[-1]:
            break
        real, imaginary = _along(add, real, imaginary, dim, size, sign)
        if node.target in HALVING and dim == dims[-1]:
            real, imaginary = (add(ATEN.slice.Tensor, one, dim, 0, size // 2 + 1) for one in (real, imaginary))
    if node.target in TO_REAL:
        real, imaginary = _from_half(add, real, imaginary, dims[-1], sizes[-1]), None
    scale = _scale(argument_of(node, "norm"), math.prod(sizes), inverse=sign > 0)
    if scale != 1:
        real, imaginary = (None if one is None else add(ATEN.mul.Scalar, one, scale) for one in (real, imaginary))
    return real, imaginary


def _dims_and_sizes(node: fx.Node, shape: Sequence[int]) -> tuple[list[int], list[int]]:
    """Along which dimensions it goes, from 0, and how many numbers of each it transforms."""
    given, sizes = argument_of(node, "dim"), argument_of(node, "n", "s")
    sizes = [sizes] if isinstance(sizes, int) else sizes
    if given is None:
        given = range(len(shape)) if sizes is None else range(-len(sizes), 0)
    dims = [dim % len(shape) for dim in ([given] if isinstance(given, int) else given)]
    if sizes is None:
        sizes = [shape[dim] for dim in dims]
        if node.target in TO_REAL:
            sizes[-1] = 2 * (sizes[-1] - 1)
    return dims, [shape[dim] if size == -1 else size for dim, size in zip(dims, sizes, strict=True)]


def _resized(add: Callable[..., Any], part: Any, dim: int, size: int, shape: Sequence[int]) -> Any:
    """Cut, or with zeros behind it."""
    if size < shape[dim]:
        return add(ATEN.slice.Tensor, part, dim, 0, size)
    return add(ATEN.constant_pad_nd.default, part, [0, 0] * (len(shape) - 1 - dim) + [0, size - shape[dim]], 0.0)


def _angles(add: Callable[..., Any], rows: int, columns: int, n: int, sign: int) -> Any:
    """(rows, columns): of the exponent of each product of a row's and a column's number."""
    numbers = [add(ATEN.arange.default, one, dtype=torch.int64, device=torch.device("cpu")) for one in (rows, columns)]
    products = add(ATEN.mul.Tensor, add(ATEN.unsqueeze.default, numbers[0], 1), numbers[1])
    # A whole turn is none: small angles lose no digits.
    turns = add(ATEN._to_copy.default, add(ATEN.remainder.Scalar, products, n), dtype=torch.float32)
    return add(ATEN.mul.Scalar, turns, sign * 2 * math.pi / n)


def _product(add: Callable[..., Any], part: Any, dim: int, matrix: Any) -> Any:
    """With a matrix, along a dimension."""
    last = add(ATEN.matmul.default, add(ATEN.transpose.int, part, dim, -1), matrix)
    return add(ATEN.transpose.int, last, dim, -1)


def _along(add: Callable[..., Any], real: Any, imaginary: Any | None, dim: int, n: int, sign: int) -> tuple[Any, Any]:
    angles = _angles(add, n, n, n, sign)
    cos, sin = add(ATEN.cos.default, angles), add(ATEN.sin.default, angles)
    if imaginary is None:
        return _product(add, real, dim, cos), _product(add, real, dim, sin)
    return (
        add(ATEN.sub.Tensor, _product(add, real, dim, cos), _product(add, imaginary, dim, sin)),
        add(ATEN.add.Tensor, _product(add, real, dim, sin), _product(add, imaginary, dim, cos)),
    )


def _from_half(add: Callable[..., Any], real: Any, imaginary: Any | None, dim: int, n: int) -> Any:
    """N real numbers of the first n // 2 + 1 results. Each stands for two, but the first, and of an even n the last."""
    half = n // 2 + 1
    numbers = add(ATEN.arange.default, half, dtype=torch.int64, device=torch.device("cpu"))
    alone = add(ATEN.eq.Scalar, add(ATEN.remainder.Scalar, add(ATEN.mul.Scalar, numbers, 2), n), 0)
    twice = add(ATEN.full.default, [half], 2.0)
    weights = add(ATEN.sub.Tensor, twice, add(ATEN._to_copy.default, alone, dtype=torch.float32))
    weights, angles = add(ATEN.unsqueeze.default, weights, 1), _angles(add, half, n, n, 1)
    found = _product(add, real, dim, add(ATEN.mul.Tensor, add(ATEN.cos.default, angles), weights))
    if imaginary is None:
        return found
    sines = add(ATEN.mul.Tensor, add(ATEN.sin.default, angles), weights)
    return add(ATEN.sub.Tensor, found, _product(add, imaginary, dim, sines))


def _scale(norm: str | None, total: int, *, inverse: bool) -> float:
    if norm == "ortho":
        return 1 / math.sqrt(total)
    return 1 / total if inverse == (norm in (None, "backward")) else 1.0

"""Writes Fourier transforms of fixed length as products with matrices of cosines and sines.

The k-th result of n numbers is the sum of x_j exp(-2 pi i j k / n) (numpy.fft, "Implementation details"). It needs two
products: x with the matrix of cos(2 pi j k / n), and x with the matrix of sin(2 pi j k / n).
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
"""Transform -> the sign of its exponent."""
HALVING = {ATEN.fft_rfft.default, ATEN.fft_rfft2.default, ATEN.fft_rfftn.default}
"""Transforms of real numbers. Their result has half of the last dimension; the other half follows from symmetry."""
TO_REAL = {ATEN.fft_irfft.default, ATEN.fft_irfft2.default, ATEN.fft_irfftn.default}
"""Transforms that read such a half and return real numbers."""


def transformed(add: Callable[..., Any], node: fx.Node, real: Any, imaginary: Any | None) -> tuple[Any, Any | None]:
    """Returns the real and the imaginary part of a transform's result. The imaginary part of a real result is None.

    Args:
        add: adds a node to the graph.
        node: the transform.
        real: node of the real part of the transform's input.
        imaginary: node of the imaginary part of that input; None if the input is real.
    """
    source: Any = node.args[0]
    shape, sign = shape_of(source), TRANSFORMS[node.target]
    # float64 stays float64, and everything else, such as integers, becomes float32.
    dtype = torch.promote_types(node.meta["val"].dtype.to_real(), torch.float32)
    if source.meta["val"].dtype.to_real() != dtype:
        real = add(ATEN._to_copy.default, real, dtype=dtype)
    dims, sizes = _dims_and_sizes(node, shape)
    for dim, size in zip(dims, sizes, strict=True):
        length = size // 2 + 1 if node.target in TO_REAL and dim == dims[-1] else size
        if length != shape[dim]:
            real, imaginary = (
                None if part is None else _resized(add, part, dim, length, shape) for part in (real, imaginary)
            )
    for dim, size in zip(dims, sizes, strict=True):
        if node.target in TO_REAL and dim == dims[-1]:
            break
        real, imaginary = _along(add, real, imaginary, dim, size, sign, dtype)
        if node.target in HALVING and dim == dims[-1]:
            real, imaginary = (add(ATEN.slice.Tensor, part, dim, 0, size // 2 + 1) for part in (real, imaginary))
    if node.target in TO_REAL:
        real, imaginary = _from_half(add, real, imaginary, dims[-1], sizes[-1], dtype), None
    scale = _scale(argument_of(node, "norm"), math.prod(sizes), inverse=sign > 0)
    if scale != 1:
        real, imaginary = (None if part is None else add(ATEN.mul.Scalar, part, scale) for part in (real, imaginary))
    return real, imaginary


def _dims_and_sizes(node: fx.Node, shape: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns the transformed dimensions, as non-negative numbers, and the length of the transform along each."""
    axes, sizes = argument_of(node, "dim"), argument_of(node, "n", "s")
    sizes = [sizes] if isinstance(sizes, int) else sizes
    if axes is None:
        axes = range(len(shape)) if sizes is None else range(-len(sizes), 0)
    dims = [dim % len(shape) for dim in ([axes] if isinstance(axes, int) else axes)]
    if sizes is None:
        sizes = [shape[dim] for dim in dims]
        if node.target in TO_REAL:
            sizes[-1] = 2 * (sizes[-1] - 1)
    return dims, [shape[dim] if size == -1 else size for dim, size in zip(dims, sizes, strict=True)]


def _resized(add: Callable[..., Any], part: Any, dim: int, size: int, shape: Sequence[int]) -> Any:
    """Cuts a part to `size` along a dimension, or pads it with zeros at the end."""
    if size < shape[dim]:
        return add(ATEN.slice.Tensor, part, dim, 0, size)
    return add(ATEN.constant_pad_nd.default, part, [0, 0] * (len(shape) - 1 - dim) + [0, size - shape[dim]], 0.0)


def _angles(add: Callable[..., Any], rows: int, columns: int, n: int, sign: int, dtype: torch.dtype) -> Any:
    """Returns the angles (rows, columns): row number times column number, times sign * 2 pi / n."""
    numbers = [add(ATEN.arange.default, end, dtype=torch.int64, device=torch.device("cpu")) for end in (rows, columns)]
    products = add(ATEN.mul.Tensor, add(ATEN.unsqueeze.default, numbers[0], 1), numbers[1])
    # Whole turns are removed, because large angles lose digits.
    turns = add(ATEN._to_copy.default, add(ATEN.remainder.Scalar, products, n), dtype=dtype)
    return add(ATEN.mul.Scalar, turns, sign * 2 * math.pi / n)


def _product(add: Callable[..., Any], part: Any, dim: int, matrix: Any) -> Any:
    """Multiplies a part by a matrix along one dimension."""
    last = add(ATEN.matmul.default, add(ATEN.transpose.int, part, dim, -1), matrix)
    return add(ATEN.transpose.int, last, dim, -1)


def _along(
    add: Callable[..., Any], real: Any, imaginary: Any | None, dim: int, n: int, sign: int, dtype: torch.dtype
) -> tuple[Any, Any]:
    angles = _angles(add, n, n, n, sign, dtype)
    cos, sin = add(ATEN.cos.default, angles), add(ATEN.sin.default, angles)
    if imaginary is None:
        return _product(add, real, dim, cos), _product(add, real, dim, sin)
    return (
        add(ATEN.sub.Tensor, _product(add, real, dim, cos), _product(add, imaginary, dim, sin)),
        add(ATEN.add.Tensor, _product(add, real, dim, sin), _product(add, imaginary, dim, cos)),
    )


def _from_half(add: Callable[..., Any], real: Any, imaginary: Any | None, dim: int, n: int, dtype: torch.dtype) -> Any:
    """Returns n real numbers from n // 2 + 1 results. Each counts twice, except the first and, for even n, the last."""
    half = n // 2 + 1
    numbers = add(ATEN.arange.default, half, dtype=torch.int64, device=torch.device("cpu"))
    alone = add(ATEN.eq.Scalar, add(ATEN.remainder.Scalar, add(ATEN.mul.Scalar, numbers, 2), n), 0)
    twice = add(ATEN.full.default, [half], 2.0, dtype=dtype)
    weights = add(ATEN.sub.Tensor, twice, add(ATEN._to_copy.default, alone, dtype=dtype))
    weights, angles = add(ATEN.unsqueeze.default, weights, 1), _angles(add, half, n, n, 1, dtype)
    result = _product(add, real, dim, add(ATEN.mul.Tensor, add(ATEN.cos.default, angles), weights))
    if imaginary is None:
        return result
    sines = add(ATEN.mul.Tensor, add(ATEN.sin.default, angles), weights)
    return add(ATEN.sub.Tensor, result, _product(add, imaginary, dim, sines))


def _scale(norm: str | None, total: int, *, inverse: bool) -> float:
    if norm == "ortho":
        return 1 / math.sqrt(total)
    return 1 / total if inverse == (norm in (None, "backward")) else 1.0

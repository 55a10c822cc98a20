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

from mod_export.export.program_nodes import argument_of, shape_of

ATEN = torch.ops.aten
TRANSFORMS: Mapping[Any, int] = {
    ATEN.fft_fft.default: -1, ATEN.fft_fft2.default: -1, ATEN.fft_fftn.default: -1, ATEN.fft_rfft.default: -1,
    ATEN.fft_ifft.default: 1, ATEN.fft_ifft2.default: 1, ATEN.fft_ifftn.default: 1,
}  # fmt: skip
"""Transforms whose results are complex, and the sign of their exponent."""


def transformed(add: Callable[..., Any], node: fx.Node, real: Any, imaginary: Any | None) -> tuple[Any, Any] | None:
    """The real and the imaginary part of a transform's result; None of one that pads or cuts what it reads.

    Args:
        add: adds a node to the graph.
        node: the transform.
        real: the node of the real part of what it reads.
        imaginary: that of the imaginary part; None of real numbers.
    """
    source: Any = node.args[0]
    shape, sign = shape_of(source), TRANSFORMS[node.target]
    given = argument_of(node, "dim")
    dims: Sequence[int] = range(len(shape)) if given is None else [given] if isinstance(given, int) else given
    sizes = argument_of(node, "n", "s")
    wanted = [shape[dim] for dim in dims]
    if sizes is not None and (list(sizes) if isinstance(sizes, (list, tuple)) else [sizes]) != wanted:
        return None
    for dim in dims:
        real, imaginary = _along(add, real, imaginary, dim, shape[dim], sign)
    scale = _scale(argument_of(node, "norm"), math.prod(wanted), inverse=sign > 0)
    if scale != 1:
        real, imaginary = (add(ATEN.mul.Scalar, one, scale) for one in (real, imaginary))
    if node.target is ATEN.fft_rfft.default:
        half = shape[dims[0]] // 2 + 1
        real, imaginary = (add(ATEN.slice.Tensor, one, dims[0], 0, half) for one in (real, imaginary))
    return real, imaginary


def _along(add: Callable[..., Any], real: Any, imaginary: Any | None, dim: int, n: int, sign: int) -> tuple[Any, Any]:
    numbers = add(ATEN.arange.default, n, dtype=torch.int64, device=torch.device("cpu"))
    products = add(ATEN.mul.Tensor, add(ATEN.unsqueeze.default, numbers, 1), numbers)
    # A whole turn is none: small angles lose no digits.
    turns = add(ATEN._to_copy.default, add(ATEN.remainder.Scalar, products, n), dtype=torch.float32)
    angles = add(ATEN.mul.Scalar, turns, sign * 2 * math.pi / n)
    cos, sin = add(ATEN.cos.default, angles), add(ATEN.sin.default, angles)

    def product(part: Any, matrix: Any) -> Any:
        last = add(ATEN.matmul.default, add(ATEN.transpose.int, part, dim, -1), matrix)
        return add(ATEN.transpose.int, last, dim, -1)

    if imaginary is None:
        return product(real, cos), product(real, sin)
    return (
        add(ATEN.sub.Tensor, product(real, cos), product(imaginary, sin)),
        add(ATEN.add.Tensor, product(real, sin), product(imaginary, cos)),
    )


def _scale(norm: str | None, total: int, *, inverse: bool) -> float:
    if norm == "ortho":
        return 1 / math.sqrt(total)
    return 1 / total if inverse == (norm in (None, "backward")) else 1.0

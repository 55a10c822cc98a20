"""Rounding to eight and four bits: what comes back is near, what is stored is what ONNX Runtime's kernels read."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mod_export.export.quantize import BLOCK, quantize, quantized_tensors, source_of
from mod_export.types import QUANTIZED, QuantizedDType

SHAPES = [(1, 1), (3, 32), (48, 33), (40, 100), (64, 64)]


def restored(whole: torch.Tensor, scale: torch.Tensor, shape: tuple[int, int], dtype: QuantizedDType) -> torch.Tensor:
    """The weight (N, K) that the stored numbers stand for."""
    N, K = shape
    if dtype == "int8":
        return whole.float().T * scale[:, None]
    numbers = torch.stack((whole & 15, whole >> 4), -1).reshape(N, -1, BLOCK).float() - 8
    return (numbers * scale[..., None]).reshape(N, -1)[:, :K]


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_stored_stands_for_the_weight(shape: tuple[int, int], dtype: QuantizedDType) -> None:
    weight_NK = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    whole, scale = quantize(weight_NK, dtype)
    stored = quantized_tensors("w", shape, dtype)
    assert [tuple(whole.shape), tuple(scale.shape)] == [kind[1] for kind in stored.values()]
    assert whole.is_contiguous()
    assert scale.dtype == torch.float32
    assert scale.is_contiguous()
    # Half a step; of four bits a whole one at the end of the range that has one number less.
    steps = scale.abs()[:, None] if dtype == "int8" else scale.abs().repeat_interleave(BLOCK, 1)[:, : shape[1]]
    error = (restored(whole, scale, shape, dtype) - weight_NK).abs()
    assert bool((error <= (0.5 if dtype == "int8" else 1.0) * steps * 1.0001).all())


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_zeros_stay_zeros(dtype: QuantizedDType) -> None:
    whole, scale = quantize(torch.zeros(3, 64), dtype)
    assert bool((restored(whole, scale, (3, 64), dtype) == 0).all())
    assert bool(torch.isfinite(scale).all())


@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=40))
def test_no_two_neighbours_saturate_sixteen_bits(numbers: list[float]) -> None:
    """vpmaddubsw adds two products of an unsigned and a signed byte: 255 times both must fit into 16 bits."""
    whole_KN, _ = quantize(torch.tensor([numbers]), "int8")
    column = whole_KN[:, 0].int().abs().tolist()
    column += [0] * (len(column) % 2)
    assert max(first + second for first, second in zip(column[::2], column[1::2], strict=True)) * 255 <= 32_767


def test_finer_than_seven_bits_where_no_two_large_ones_meet() -> None:
    weight_NK = torch.tensor([[1.0, 0.0, 0.25, 0.0]])
    whole_KN, scale_N = quantize(weight_NK, "int8")
    assert whole_KN[:, 0].tolist() == [127, 0, 32, 0]
    assert math.isclose(scale_N.item(), 1 / 127, rel_tol=1e-6)


def test_the_largest_of_a_block_is_exact_in_four_bits() -> None:
    weight_NK = torch.zeros(2, 2 * BLOCK)
    weight_NK[0, 3], weight_NK[1, BLOCK] = -7.25, 3.5
    assert torch.equal(restored(*quantize(weight_NK, "int4"), (2, 2 * BLOCK), "int4"), weight_NK)


@pytest.mark.parametrize(
    ("stored", "source"),
    [
        ("layers.0.mlp.up_proj.weight.int8", "layers.0.mlp.up_proj.weight"),
        ("a.weight.int4", "a.weight"),
        ("a.weight.int8_scale", None),
        ("a.weight", None),
        ("int8", ""),
    ],
)
def test_the_weight_that_was_rounded(stored: str, source: str | None) -> None:
    assert source_of(stored) == source

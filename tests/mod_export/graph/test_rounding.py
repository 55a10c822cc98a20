"""Quantized weights represent the original weights, and four bits change products only a little."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mod_export.graph import rounding
from mod_export.graph.rounding import Rounded, is_rounded, represented, rounded
from mod_export.graph.weights import BLOCKS, Form, quantized_tensors


def restored(stored: Rounded, K: int) -> torch.Tensor:
    """The weight (N, K) that the stored numbers represent."""
    whole, scale, zero = stored
    if whole.dtype == torch.int8:
        return whole.float().T * scale[:, None]
    if zero is None:
        return ((whole.float() - 128) * scale[..., None]).flatten(1)[:, :K]
    numbers_NMU, zero_NM = unpacked(whole), unpacked(zero)
    weight_NK = ((numbers_NMU - zero_NM[:, : scale.shape[1], None]) * scale[..., None]).flatten(1)[:, :K]
    assert torch.equal(weight_NK, represented(stored, K))
    return weight_NK


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2).float()


@pytest.mark.parametrize("form", ["int8", "int8_blocks", "int8_blocks64", "int4"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 32), (48, 33), (40, 100)])
def test_what_is_stored_stands_for_the_weight(shape: tuple[int, int], form: Form) -> None:
    weight_NK = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight_NK[-1] = 0  # The largest number of this row is 0, and nothing may be divided by it.
    found = rounded(weight_NK, form)
    tensors = [each for each in found if each is not None]
    stored = quantized_tensors("w", shape, form)
    assert [tuple(each.shape) for each in tensors] == [kind[1] for kind in stored.values()]
    assert all(each.is_contiguous() for each in tensors)
    scale = found.scale
    assert [each.dtype for each in tensors[1:]] == [torch.float32, torch.uint8][: len(tensors) - 1]
    # The limit is half a step; in blocks a whole step, because one end of the range has one number less; in four bits
    # five steps more, because the search may have shortened a range of fifteen steps by so much.
    steps = scale.abs()[:, None] if form == "int8" else scale.abs().repeat_interleave(BLOCKS[form], 1)[:, : shape[1]]
    error = (restored(found, shape[1]) - weight_NK).abs()
    allowed = {"int8": 0.5, "int8_blocks": 1.0, "int8_blocks64": 1.0, "int4": 6.0}[form] * steps * 1.0001
    assert bool((error <= allowed).all())


def test_blocks_of_four_bits_have_the_range_of_the_least_error() -> None:
    """For one large weight among many small ones, the range is shorter than the large one needs."""
    weight_NK = torch.cat([torch.full((1, BLOCKS["int4"] - 1), 0.9), torch.tensor([[7.5]])], 1)
    _, scale_NM, zero = rounded(weight_NK, "int4")
    assert float(scale_NM) < 7.4 / 15
    assert zero is not None
    assert zero.tolist() == [[0]]
    weight_NK = torch.randn((64, 256), generator=torch.Generator().manual_seed(0)) + 0.5
    error = restored(rounded(weight_NK, "int4"), 256) - weight_NK
    blocks_NMU = weight_NK.reshape(64, -1, BLOCKS["int4"])
    low_NM1, high_NM1 = blocks_NMU.min(-1, True)[0], blocks_NMU.max(-1, True)[0]
    scale_NM1 = (high_NM1 - low_NM1) / 15
    zero_NM1 = (-low_NM1 / scale_NM1).round()
    whole_NMU = ((blocks_NMU / scale_NM1).round() + zero_NM1).clamp(0, 15)
    unshortened = ((whole_NMU - zero_NM1) * scale_NM1 - blocks_NMU).square().sum(-1)
    assert bool((error.reshape(blocks_NMU.shape).square().sum(-1) <= unshortened + 1e-6).all())
    assert error.square().sum() < 0.97 * unshortened.sum()


@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=40))
def test_no_two_neighbours_saturate_sixteen_bits(numbers: list[float]) -> None:
    """vpmaddubsw adds two products of an unsigned and a signed byte: 255 times their sum must fit into 16 bits."""
    whole_KN = rounded(torch.tensor([numbers]), "int8").whole
    column = whole_KN[:, 0].int().abs().tolist()
    column += [0] * (len(column) % 2)
    assert max(first + second for first, second in zip(column[::2], column[1::2], strict=True)) * 255 <= 32_767


def test_finer_than_seven_bits_where_no_two_large_ones_meet() -> None:
    weight_NK = torch.tensor([[1.0, 0.0, 0.25, 0.0]])
    whole_KN, scale_N, _ = rounded(weight_NK, "int8")
    assert whole_KN[:, 0].tolist() == [127, 0, 32, 0]
    assert math.isclose(scale_N.item(), 1 / 127, rel_tol=1e-6)


@pytest.mark.parametrize("form", ["int4", "int8_blocks"])
def test_the_largest_of_a_block_is_exact(form: Form) -> None:
    weight_NK = torch.zeros(2, 2 * BLOCKS[form])
    weight_NK[0, 3], weight_NK[1, BLOCKS[form]] = -7.25, 3.5
    torch.testing.assert_close(restored(rounded(weight_NK, form), 2 * BLOCKS[form]), weight_NK)


def correlated(rows: int, width: int) -> torch.Tensor:
    """Rows like those that layers get: a few directions make up most of each row."""
    directions = torch.randn(6, width, generator=torch.Generator().manual_seed(2))
    generator = torch.Generator().manual_seed(rows)
    mixed = torch.randn(rows, 6, generator=generator) @ directions
    return mixed + 0.3 * torch.randn(rows, width, generator=generator)


@pytest.mark.parametrize("shape", [(48, 64), (40, 100), (3, 300)])
def test_products_change_less_than_by_the_nearest_numbers(shape: tuple[int, int]) -> None:
    weight_NK = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x = correlated(200, shape[1])
    errors = []
    for moments_KK in (None, x.T @ x):
        found = rounded(weight_NK, "int4", moments_KK)
        assert is_rounded(found, weight_NK)
        rest_NK = restored(found, shape[1]) - weight_NK
        errors.append(float((correlated(400, shape[1]) @ rest_NK.T).square().mean()))
    assert errors[1] < 0.5 * errors[0]


def test_a_weight_that_nothing_is_multiplied_with_is_rounded_to_the_nearest() -> None:
    weight_NK = torch.randn(64, 40, generator=torch.Generator().manual_seed(0))
    found, nearest = rounded(weight_NK, "int4", torch.zeros(40, 40)), rounded(weight_NK, "int4")
    assert all(torch.equal(one, other) for one, other in zip(found, nearest, strict=True) if one is not None)


def test_columns_that_do_not_depend_on_each_other_are_rounded_to_the_nearest() -> None:
    """The first columns have no inputs at all."""
    weight_NK = torch.randn(64, 40, generator=torch.Generator().manual_seed(0))
    found = rounded(weight_NK, "int4", torch.diag((torch.arange(40.0) - 7).clamp(min=0)))
    scale_NK = found.scale.repeat_interleave(BLOCKS["int4"], 1)[:, :40]
    assert found.zero is not None
    zero_NK = unpacked(found.zero).repeat_interleave(BLOCKS["int4"], 1)[:, :40]
    assert torch.equal(
        unpacked(found.whole).flatten(1)[:, :40], (torch.round(weight_NK / scale_NK) + zero_NK).clamp(0, 15)
    )


def test_the_range_of_a_block_is_that_of_the_columns_with_large_inputs() -> None:
    """If the largest weight of a block has small inputs, it is cut, and the others are rounded more finely."""
    weight_NK = torch.rand((1, BLOCKS["int4"]), generator=torch.Generator().manual_seed(0)) - 0.5
    weight_NK[0, -1] = 0.63
    small, large = torch.ones(BLOCKS["int4"]), torch.ones(BLOCKS["int4"])
    small[-1], large[-1] = 1e-6, 1e3
    errors = {}
    for name, moments_K in (("small", small), ("large", large)):
        rest_K = (restored(rounded(weight_NK, "int4", torch.diag(moments_K)), BLOCKS["int4"]) - weight_NK)[0]
        errors[name] = (float(rest_K[:-1].square().sum()), float(rest_K[-1].square()))
    assert errors["small"][0] < errors["large"][0]
    assert errors["large"][1] < errors["small"][1]


def test_what_is_not_the_rounded_weight_is_seen() -> None:
    weight_NK = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    x = correlated(200, 64)
    for moments_KK in (None, x.T @ x):
        found = rounded(weight_NK, "int4", moments_KK)
        assert is_rounded(found, weight_NK)
        assert not is_rounded(found, weight_NK + weight_NK.roll(1))
        assert not is_rounded(found._replace(scale=found.scale * 1.01), weight_NK)


@pytest.mark.parametrize(("step", "allowed"), [(1, True), (2, False)])
def test_how_far_numbers_and_zero_points_may_be_from_the_nearest(step: int, allowed: bool) -> None:
    weight_NK = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    nearest = rounded(weight_NK, "int4")
    assert nearest.zero is not None
    numbers_NMU, zero_NM = unpacked(nearest.whole), unpacked(nearest.zero)

    def stepped(number: torch.Tensor) -> torch.Tensor:
        return number + (step if number < 8 else -step)

    one_number = numbers_NMU.clone()
    one_number[0, 0, 0] = stepped(numbers_NMU[0, 0, 0])
    assert is_rounded(nearest._replace(whole=rounding._packed(one_number)), weight_NK) == allowed
    # If a zero point moves, all numbers of its block move with it.
    one_zero, one_block = zero_NM.clone(), numbers_NMU.clone()
    one_zero[0, 0] = stepped(zero_NM[0, 0])
    one_block[0, 0] = (numbers_NMU[0, 0] + one_zero[0, 0] - zero_NM[0, 0]).clamp(0, 15)
    moved = nearest._replace(whole=rounding._packed(one_block), zero=rounding._packed(one_zero))
    assert is_rounded(moved, weight_NK) == allowed


@pytest.mark.parametrize("form", ["int8", "int8_blocks", "int8_blocks64", "int4"])
def test_a_weight_is_rounded_in_pieces_as_in_one(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    weight_NK = torch.randn(1200, 70, generator=torch.Generator().manual_seed(0))
    x = torch.randn(100, 70, generator=torch.Generator().manual_seed(1)) + 1
    for moments_KK in (None, x.T @ x) if form == "int4" else (None,):
        found = []
        for numbers in (2**19, 70 * 7):
            monkeypatch.setattr(rounding, "PIECE", numbers)
            each = rounded(weight_NK, form, moments_KK)
            found.append([tensor for tensor in each if tensor is not None])
            assert each.whole.is_contiguous()
            assert form != "int4" or is_rounded(each, weight_NK)
        assert all(torch.equal(one, piece) for one, piece in zip(*found, strict=True))

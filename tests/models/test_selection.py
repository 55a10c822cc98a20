"""The two rules of selection, noise, and the stream, each separately."""

from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mod_models.fixed_capacity import select_chosen
from mod_models.selection import NOISE_SIZE, Tokens, noise_of_tokens, noise_table, select_topk

SCORES = st.sampled_from([float("-inf"), -2.0, -1.0, -0.0, 0.0, 1.0, 1.0000001, 3e38, float("inf")])


@given(st.lists(SCORES, min_size=1, max_size=12), st.data())
def test_the_k_largest_by_a_stable_ranking(scores: list[float], data: st.DataObject) -> None:
    """The k best real tokens come first, the earlier among equals; then padding; -0.0 equals 0.0."""
    length, k = data.draw(st.integers(0, len(scores))), data.draw(st.integers(1, len(scores)))
    rows = (scores, scores[::-1])
    index_BK, live_BK = select_topk(torch.tensor(rows), (torch.arange(len(scores)) < length).expand(2, -1), k)
    for b, row in enumerate(rows):
        ranked = sorted(range(length), key=lambda t: (-row[t], t)) + list(range(length, len(row)))
        assert index_BK[b].tolist() == sorted(ranked[:k])
        assert live_BK[b].tolist() == [t < length for t in sorted(ranked[:k])]


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.data())
def test_the_first_k_that_chose(chosen: list[bool], data: st.DataObject) -> None:
    """Later tokens find no slot; empty slots hold the first other tokens, so all slots of a row differ."""
    k = data.draw(st.integers(1, len(chosen)))
    index_BK, live_BK = select_chosen(torch.tensor([chosen, [not chose for chose in chosen]]), k)
    for b, row in enumerate((chosen, [not chose for chose in chosen])):
        wanted = [t for t, chose in enumerate(row) if chose]
        others = [t for t, chose in enumerate(row) if not chose]
        assert index_BK[b].tolist() == (wanted + others)[:k]
        assert live_BK[b].tolist() == [i < len(wanted) for i in range(k)]


@pytest.mark.parametrize("seed", [0, 7])
def test_noise_is_standard_normal(seed: int) -> None:
    """Every quantile occurs once, in another order for every seed; changing one copy changes no other."""
    noise_N = noise_table(seed)
    assert noise_N.dtype == torch.float32
    assert noise_N.shape == (NOISE_SIZE,)
    assert len(noise_N.unique()) == NOISE_SIZE
    quantiles = torch.tensor([NormalDist().inv_cdf((i + 0.5) / NOISE_SIZE) for i in range(NOISE_SIZE)])
    torch.testing.assert_close(noise_N.sort().values, quantiles, rtol=1e-6, atol=1e-7)
    assert torch.equal(noise_N, noise_table(seed))
    assert not torch.equal(noise_N, noise_table(seed + 1))
    noise_N.zero_()
    assert bool((noise_table(seed) != 0).all())


def test_noise_is_the_same_in_every_process() -> None:
    """The numbers are fixed, so a checkpoint that was trained on noise computes the same everywhere."""
    assert noise_table(0)[:3].tolist() == pytest.approx([-0.508896768, 1.669971824, 1.496448755], abs=1e-8)
    assert noise_table(3)[:3].tolist() == pytest.approx([-0.151910916, 0.137455478, -0.222220212], abs=1e-8)
    ids_BS = torch.tensor([[5, 0, 9]])
    assert noise_of_tokens(noise_table(3), ids_BS, 0)[0].tolist() == pytest.approx([-0.0810, -0.9681, 1.0337], abs=1e-4)
    of_mlp = noise_of_tokens(noise_table(3), ids_BS, "2.mlp")[0].tolist()
    assert of_mlp == pytest.approx([1.0668, -1.1132, 0.9633], abs=1e-4)


def test_noise_depends_on_the_text_before_and_the_site() -> None:
    table_N = noise_table(0)
    noise_BS = noise_of_tokens(table_N, torch.tensor([[1, 2, 3], [1, 2, 4], [2, 2, 3], [0, 0, 0]]), 1)
    assert torch.equal(noise_BS[0, :2], noise_BS[1, :2])
    assert noise_BS[0, 2] != noise_BS[1, 2]
    assert bool((noise_BS[0] != noise_BS[2]).all())
    assert len(noise_BS[3].unique()) == 3, "the same token over and over is not selected together"
    assert not torch.equal(noise_BS, noise_of_tokens(table_N, torch.tensor([[1, 2, 3]] * 4), 2))


def whole_row() -> Tokens:
    """Two rows of five positions, the second with three real ones; token t of row b is 10 b + t."""
    x_BTD = (10 * torch.arange(2)[:, None] + torch.arange(5))[..., None].float()
    live_BT = torch.arange(5) < torch.tensor([5, 3])[:, None]
    return Tokens(x_BTD, live_BT, torch.arange(5.0)[:, None], -torch.arange(5.0)[:, None], None, 5)


def some(tokens: Tokens, index: list[list[int]], live: list[list[bool]], positions: str = "original") -> Tokens:
    index_BK = torch.tensor(index)
    return tokens.at(tokens.rows(index_BK), index_BK, torch.tensor(live), positions)


def inner() -> Tokens:
    return some(whole_row(), [[1, 2, 4], [0, 2, 3]], [[True] * 3, [True, True, False]])


def test_selected_and_put_back() -> None:
    chosen = inner()
    assert chosen.x_BTD[..., 0].tolist() == [[1, 2, 4], [10, 12, 13]]
    assert chosen.cos[:, 0, :, 0].tolist() == [[1, 2, 4], [0, 2, 3]]
    assert chosen.sin[:, 0, :, 0].tolist() == [[-1, -2, -4], [0, -2, -3]]
    # In a second selection, indices refer to the tokens selected before, but positions still to the row.
    again = some(chosen, [[0, 2], [1, 2]], [[True, True], [True, False]])
    assert again.index_BT.tolist() == [[1, 4], [2, 3]]
    assert again.cos[:, 0, :, 0].tolist() == [[1, 4], [2, 3]]
    back_BTD = chosen.put(chosen.rows(torch.tensor([[0, 2], [1, 2]])), -again.x_BTD)
    assert back_BTD[..., 0].tolist() == [[-1, 2, -4], [10, -12, -13]]
    assert chosen.x_BTD[..., 0].tolist() == [[1, 2, 4], [10, 12, 13]]


def test_compact_positions_are_the_numbers_of_the_slots() -> None:
    chosen = some(whole_row(), [[1, 4], [0, 2]], [[True] * 2] * 2, "compact")
    assert chosen.cos[:, 0].tolist() == [0, 1]
    assert chosen.index_BT.tolist() == [[1, 4], [0, 2]]

"""The functions with which users write routed blocks of other models, and how they import them."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

import mod_models
from mod_models import (
    fixed_capacity,
    forced_scores,
    gather_tokens,
    scatter_tokens,
    select_chosen,
    select_tokens,
    tokens_of,
)


def test_k_is_a_share_cut_off_and_at_least_one() -> None:
    assert [tokens_of(0.29, 100), tokens_of(0.125, 7), tokens_of(1.0, 5)] == [28, 1, 5]


def test_selection_of_the_best_in_order_of_position() -> None:
    scores_BS = torch.tensor([[0.5, 2.0, -1.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert select_tokens(scores_BS, 3).tolist() == [[1, 3, 4], [0, 1, 2]]


def test_forced_tokens_come_first_and_the_rest_by_score() -> None:
    scores_BS = torch.tensor([[0.5, 2.0, -1.0, -7.0, 1.0]])
    forced_BS = torch.tensor([[False, False, False, True, False]])
    assert select_tokens(forced_scores(scores_BS, forced_BS), 2).tolist() == [[1, 3]]
    first_S = torch.arange(5) < 2
    assert select_tokens(forced_scores(scores_BS, first_S), 1).tolist() == [[0]]


def test_what_is_gathered_is_put_back_where_it_was() -> None:
    x_BSD = torch.randn(3, 7, 4)
    index_BK = select_tokens(torch.randn(3, 7), 3)
    wide_BKD = index_BK[..., None].expand(-1, -1, 4)
    chosen_BKD = gather_tokens(x_BSD, index_BK)
    assert torch.equal(chosen_BKD, x_BSD.gather(1, wide_BKD))
    assert torch.equal(scatter_tokens(x_BSD, index_BK, chosen_BKD), x_BSD)
    assert torch.equal(scatter_tokens(x_BSD, index_BK, -chosen_BKD), x_BSD.scatter(1, wide_BKD, -chosen_BKD))


def test_gradients_flow_to_selected_tokens_and_to_what_is_put_back() -> None:
    x_BSD, update_BKD = torch.randn(2, 5, 4, requires_grad=True), torch.randn(2, 2, 4, requires_grad=True)
    index_BK = torch.tensor([[0, 3], [1, 4]])
    (gather_tokens(x_BSD, index_BK).sum() + scatter_tokens(x_BSD, index_BK, update_BKD).sum()).backward()
    # Each token of x is read once: where it was gathered, or where it stayed.
    assert x_BSD.grad is not None
    assert torch.equal(x_BSD.grad, torch.ones(2, 5, 4))
    assert update_BKD.grad is not None
    assert torch.equal(update_BKD.grad, torch.ones(2, 2, 4))


def test_the_functions_work_where_they_are_pasted() -> None:
    """They need only torch."""
    names = {"torch": torch, "Tensor": torch.Tensor}
    for name in ("select_tokens", "select_chosen", "forced_scores", "token_rows", "gather_tokens", "scatter_tokens"):
        exec(inspect.getsource(getattr(fixed_capacity, name)), names)
    exec(inspect.getsource(tokens_of), names)
    x_BSD, scores_BS = torch.randn(2, 8, 4), torch.randn(2, 8)
    for chosen, k in ((names, names["tokens_of"](0.25, 8)), (vars(fixed_capacity), 2)):
        index_BK = chosen["select_tokens"](chosen["forced_scores"](scores_BS, torch.arange(8) < 1), k)
        assert index_BK[:, 0].tolist() == [0, 0]
        assert torch.equal(chosen["gather_tokens"](x_BSD, index_BK)[:, 0], x_BSD[:, 0])
    index_BK, live_BK = names["select_chosen"](scores_BS > 0, 8)
    assert torch.equal(live_BK.sum(1), (scores_BS > 0).sum(1))
    assert torch.equal(names["scatter_tokens"](x_BSD, index_BK, gather_tokens(x_BSD, index_BK)), x_BSD)


def test_the_door_is_light_and_closed_to_other_names() -> None:
    code = "import mod_models, sys; assert 'torch' not in sys.modules; print(mod_models.tokens_of(0.5, 8))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "4"
    assert [getattr(mod_models, name).__name__ for name in mod_models.__all__] == mod_models.__all__
    assert mod_models.select_chosen is select_chosen
    with pytest.raises(AttributeError, match="module 'mod_models' has no attribute 'select_everything'"):
        _ = mod_models.select_everything

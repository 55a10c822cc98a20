"""Routing sites of models that do not mark them are found, named, observed and forced; results do not change."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from mod_dialects import DIALECTS, D, IndexPut, Model, OneHot, Routed, SortTail, V, capture_of, graph_of
from small_graphs import run
from torch import Tensor, nn
from torch.nn import functional as F

from mod_export.engines import ENGINES
from mod_export.graph.capture import exported
from mod_export.graph.rewrites import apply_rewrites
from mod_export.graph.sites import RoutingSite, SiteRun, routing_sites, run_sites
from mod_export.graph.target import check_limits
from mod_export.graph.weights import state_of
from mod_export.types import BY_POSITION, BY_SCORE

B, S, K = 2, 16, 4
Made = tuple[nn.Module, torch.export.ExportedProgram, Tensor]


@pytest.fixture(scope="module", params=DIALECTS)
def made(request: pytest.FixtureRequest) -> Made:
    torch.manual_seed(0)
    module, ids_BS = Model(DIALECTS[request.param]).eval(), torch.randint(0, V, (B, S))
    return module, exported(module, (ids_BS,), request.param), ids_BS


def run_of(made: Made, forced: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    module, program, ids_BS = made
    run = SiteRun(S, forced)
    (logits_BSV,) = run_sites(program, state_of(module), (ids_BS,), run)
    return logits_BSV, {site: selection.index_BK for site, selection in run.selections.items()}


def test_sites_have_the_names_of_their_blocks_and_change_no_bit(made: Made) -> None:
    module, program, ids_BS = made
    rule = BY_SCORE if type(module.blocks[1]) in (IndexPut, SortTail, OneHot) else BY_POSITION
    assert routing_sites(program) == [RoutingSite(name, K, rule) for name in ("blocks.1", "blocks.3")]
    with torch.no_grad():
        assert torch.equal(run_of(made)[0], module(ids_BS))


def test_the_selection_that_is_forced_decides(made: Made) -> None:
    logits_BSV, unforced = run_of(made)
    assert torch.equal(run_of(made, unforced)[0], logits_BSV)
    other_BK = torch.stack([torch.arange(S)[~torch.isin(torch.arange(S), row_K)][:K] for row_K in unforced["blocks.1"]])
    changed_BSV, selected = run_of(made, {"blocks.1": other_BK})
    assert torch.equal(selected["blocks.1"], other_BK)
    # Gate and tokens follow the forced selection, so tokens that no longer run get other logits.
    assert not torch.equal(changed_BSV, logits_BSV)
    gone = torch.zeros(B, S, dtype=torch.bool).scatter(1, unforced["blocks.1"], True)
    assert (changed_BSV != logits_BSV).any(-1)[gone].any()


def test_a_selected_token_is_one_that_the_scores_prefer(made: Made) -> None:
    module, program, ids_BS = made
    run = SiteRun(S)
    run_sites(program, state_of(module), (ids_BS,), run)
    for selection in run.selections.values():
        assert selection.open_BS.all()
        smallest_B = selection.score_BS.gather(1, selection.index_BK).amin(1)
        assert torch.equal(smallest_B, selection.score_BS.topk(K).values.amin(1))


def test_engines_get_the_indices_as_further_outputs(made: Made) -> None:
    _, program, ids_BS = made
    capture = capture_of(program)
    assert capture.routed == ["routed_blocks.1", "routed_blocks.3"]
    logits_BSV, *routed = capture.program.module()(ids_BS)
    expected_BSV, selected = run_of(made)
    assert torch.equal(logits_BSV, expected_BSV)
    assert all(torch.equal(index_BK, selected[name]) for index_BK, name in zip(routed, selected, strict=True))


@pytest.mark.fast(
    "scatter_add-ort-cpu", "one_hot-tensorrt-rtx", "index_put-ort-cpu", "smallest-tensorrt-rtx", "sort_tail-ort-cpu"
)
@pytest.mark.parametrize("target", ["ort-cpu", "tensorrt-rtx"])
def test_graphs_of_targets_compute_the_same(made: Made, target: str) -> None:
    module, program, ids_BS = made
    model, limits = graph_of(capture_of(program), module), ENGINES[target].limits
    apply_rewrites(model, limits, "float32")
    check_limits(model, limits, "float32")
    logits_BSV, *routed = run(model, {"x": ids_BS.numpy()})
    expected_BSV, selected = run_of(made)
    np.testing.assert_allclose(logits_BSV, expected_BSV.numpy(), rtol=0, atol=2e-5)
    for index_BK, expected_BK in zip(routed, selected.values(), strict=True):
        np.testing.assert_array_equal(np.sort(index_BK), expected_BK.sort().values.numpy())


class Masked(Routed):
    """Tokens that a mask hides cannot be selected."""

    def forward(self, x: Tensor) -> Tensor:
        score = self.router(x)[..., 0].masked_fill(torch.arange(S) >= 10, torch.finfo(x.dtype).min)
        index = torch.topk(score, K).indices
        wide = index[..., None].expand(-1, -1, D)
        return x.scatter(1, wide, self.block(x.gather(1, wide)))


def test_masked_tokens_cannot_be_selected() -> None:
    module, ids_BS = Model(Masked, pairs=1).eval(), torch.randint(0, V, (B, S))
    run = SiteRun(S)
    run_sites(exported(module, (ids_BS,), "test"), state_of(module), (ids_BS,), run)
    assert run.selections["blocks.1"].open_BS.tolist() == [[True] * 10 + [False] * 6] * B


class TwoInOne(Routed):
    """Two selections in one module."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            index = torch.topk(self.router(x), K, dim=1).indices.expand(-1, -1, D)
            x = x.scatter(1, index, self.block(x.gather(1, index)))
        return x


def test_sites_of_one_module_are_numbered() -> None:
    program = exported(Model(TwoInOne, pairs=1).eval(), (torch.randint(0, V, (B, S)),), "test")
    assert [site.name for site in routing_sites(program)] == ["blocks.1.0", "blocks.1.1"]


def experts_of_tokens(x: Tensor, score: Tensor) -> Tensor:
    """Each token chooses experts."""
    weight, index = torch.topk(score[..., :4], 2)
    return x + (F.one_hot(index, 4).to(x.dtype) * weight[..., None]).sum(-2) @ torch.ones(4, D)


def mask_alone(x: Tensor, score: Tensor) -> Tensor:
    """All tokens are computed, and a mask keeps some of the results."""
    mask = torch.zeros(B, S).scatter(1, torch.topk(score[..., 0], K).indices, 1.0)
    return x + mask[..., None] * x


def read_alone(x: Tensor, score: Tensor) -> Tensor:
    """The best tokens are pooled, and nothing is written back."""
    index = torch.topk(score[..., 0], K).indices[..., None].expand(-1, -1, D)
    return x + x.gather(1, index).mean(1, keepdim=True)


def whole_sort(x: Tensor, score: Tensor) -> Tensor:
    """A sort that keeps everything selects nothing."""
    index = torch.sort(score[..., 0]).indices[..., None].expand(-1, -1, D)
    return x.scatter(1, index, x.gather(1, index))


def normalised_experts(x: Tensor, score: Tensor) -> Tensor:
    """Each token chooses experts, whose weights come from other scores than those that decide."""
    rows = score.reshape(-1, 8)
    index = torch.topk(rows + 1.0, 2).indices
    weight = torch.zeros_like(rows).scatter(1, index, rows.softmax(-1).gather(1, index))
    return x + (weight @ torch.ones(8, D)).reshape(x.shape)


def tokens_of_experts(x: Tensor, score: Tensor) -> Tensor:
    """Every expert chooses tokens of the flattened batch."""
    rows = x.reshape(-1, D)
    index = torch.topk(score.reshape(-1, 8).t(), 3).indices.reshape(-1)
    return rows.index_add(0, index, rows[index] * 2).reshape(x.shape)


def nothing(x: Tensor, score: Tensor) -> Tensor:
    """A capacity of zero tokens."""
    index = torch.topk(score[..., 0], 0).indices[..., None].expand(-1, -1, D)
    return x.scatter(1, index, x.gather(1, index))


def unrelated(x: Tensor, score: Tensor) -> Tensor:
    """The gathered tokens are not the ones that are written back."""
    index = torch.topk(score[..., 0], K).indices[..., None].expand(-1, -1, D)
    return x.scatter(1, index, 0.0) + x.gather(1, index).mean(1, keepdim=True)


def changed_in_place(x: Tensor, score: Tensor) -> Tensor:
    """A slice of the sorted scores is changed in place, and so are the scores, which share its memory."""
    values, order = score[..., 0].sort(descending=True)
    gate, index = values[:, :K], order[:, :K, None].expand(-1, -1, D)
    gate.sigmoid_()
    return x.scatter(1, index, x.gather(1, index) * gate[..., None]) + values.sum()


def soft_mask(x: Tensor, score: Tensor) -> Tensor:
    """All tokens are computed, and those above the k-th score keep the result."""
    kept = score[..., :1] >= score[..., :1].topk(K, dim=1).values[:, -1:]
    return torch.where(kept, x @ torch.ones(D, D), x)


def soft_ranks(x: Tensor, score: Tensor) -> Tensor:
    """Like `soft_mask`, by the ranks of all tokens."""
    rank = score[..., 0].argsort(1, descending=True).argsort(1)
    return torch.where((rank < K)[..., None], x @ torch.ones(D, D), x)


def masked_scatter(x: Tensor, score: Tensor) -> Tensor:
    """Only the mask says where each result goes."""
    index = torch.topk(score[..., 0], K).indices
    mask = torch.zeros(B, S, dtype=torch.bool).scatter(1, index, True)[..., None]
    return x.masked_scatter(mask, torch.tanh(x[:, :K]))


def chosen_experts(x: Tensor, score: Tensor) -> Tensor:
    """All experts are computed for each token, and the results of two are combined."""
    rows, share = x.reshape(-1, D), score.reshape(-1, 8)
    weight, index = share.topk(2)
    made = torch.stack([rows * (n + 1) for n in range(8)], 1)
    chosen = made.gather(1, index[..., None].expand(-1, -1, D))
    return (x.reshape(-1, D) + (weight.softmax(-1)[..., None] * chosen).sum(1)).reshape(x.shape)


def weights_of_experts(x: Tensor, score: Tensor) -> Tensor:
    """The indices read the weight matrices of each token's experts."""
    rows = x.reshape(-1, D)
    weight, index = score.reshape(-1, 8).topk(2)
    table = torch.arange(8 * D * D).reshape(8, D, D).to(x.dtype).sin()
    return x + (weight[..., None] * torch.einsum("td,tkde->tke", rows, table[index])).sum(1).reshape(x.shape)


def experts_with_capacity(x: Tensor, score: Tensor) -> Tensor:
    """Dispatch and combination by one-hot products, as in GShard."""
    rows, share = x.reshape(-1, D), score.reshape(-1, 8).softmax(-1)
    weight, index = share.topk(1)
    chosen = F.one_hot(index[:, 0], 8).to(x.dtype)
    slot = F.one_hot((chosen.cumsum(0) * chosen).sum(-1).long().clamp(max=7), 8).to(x.dtype)
    dispatch = chosen[:, :, None] * slot[:, None, :]
    made = torch.einsum("tec,td->ecd", dispatch, rows) @ torch.ones(D, D)
    return x + torch.einsum("tec,ecd->td", dispatch * weight[..., None], made).reshape(x.shape)


def experts_that_choose(x: Tensor, score: Tensor) -> Tensor:
    """Each of the 8 experts takes its tokens out of the same row."""
    row = x.reshape(1, B * S, D).expand(8, -1, -1)
    index = score.reshape(1, B * S, 8).transpose(1, 2)[0].topk(3).indices[..., None].expand(-1, -1, D)
    made = row.gather(1, index) @ torch.ones(D, D)
    return x + torch.zeros(8, B * S, D).scatter(1, index, made).sum(0).reshape(x.shape)


def sampled_words(x: Tensor, score: Tensor) -> Tensor:
    """The words with the largest logits are embedded and multiplied."""
    words = (x[:, -1] @ torch.ones(D, V)).topk(5).indices
    table = torch.arange(V * D).reshape(V, D).to(x.dtype).cos()
    return x + (F.embedding(words, table) @ torch.ones(D, D)).mean(1, keepdim=True)


def kept_logits(x: Tensor, score: Tensor) -> Tensor:
    """All but the largest logits are hidden."""
    logits = x[:, -1] @ torch.ones(D, V)
    values, words = logits.topk(5)
    return x + torch.zeros_like(logits).scatter(1, words, values.softmax(-1)).sum(-1)[:, None, None]


def beams(x: Tensor, score: Tensor) -> Tensor:
    """The best continuations of several beams are chosen, and the states of their beams are gathered."""
    best = (x[:, :4] @ torch.ones(D, V)).reshape(B, -1).topk(4).indices
    return x + x[:, :4].gather(1, (best // V)[..., None].expand(-1, -1, D)).mean(1, keepdim=True)


def copied_for_experts(x: Tensor, score: Tensor) -> Tensor:
    """Each of the 8 experts takes copies of three tokens, and nothing is written back."""
    index = score.reshape(B * S, 8).t().topk(3).indices
    made = x.reshape(B * S, D)[index] @ torch.ones(D, D)
    return x + made.mean((0, 1))


def mask_by_identity(x: Tensor, score: Tensor) -> Tensor:
    """A mask made of one-hot rows is applied to results of all tokens."""
    mask = torch.eye(S)[score[..., 0].topk(K).indices].sum(1)
    return x + mask[..., None] * (x @ torch.ones(D, D))


def positions_alone(x: Tensor, score: Tensor) -> Tensor:
    """The indices read a table of positions, not the tokens."""
    index = score[..., 0].topk(K).indices.sort().values
    return x + torch.arange(S * D).reshape(S, D).to(x.dtype).cos()[index].mean(1, keepdim=True)


def best_token(x: Tensor, score: Tensor) -> Tensor:
    """One of the selected tokens is projected and added to all tokens."""
    index = score[..., 0].topk(K).indices[..., None].expand(-1, -1, D)
    return x + x.gather(1, index)[:, :1] @ torch.ones(D, D)


def sorted_windows(x: Tensor, score: Tensor) -> Tensor:
    """All tokens run, in windows of a sorted order, and return to their positions."""
    order = score[..., 0].argsort(1)
    packed = torch.take_along_dim(x, order[..., None], 1).view(B, 4, K, D) @ torch.ones(D, D)
    return torch.take_along_dim(packed.view(B, S, D), order.argsort(1)[..., None], 1)


def both_parts(x: Tensor, score: Tensor) -> Tensor:
    """Both parts of a sorted order run, in different ways."""
    order = score[..., 0].argsort(1)
    packed = torch.take_along_dim(x, order[..., None], 1)
    packed = torch.cat([packed[:, :K] @ torch.ones(D, D), packed[:, K:] @ torch.eye(D)], 1)
    return torch.take_along_dim(packed, order.argsort(1)[..., None], 1)


def top_of_features(x: Tensor, score: Tensor) -> Tensor:
    """The largest features of each token are kept."""
    values, index = x.topk(3, dim=-1)
    return torch.zeros_like(x).scatter(-1, index, values) @ torch.ones(D, D)


def sampled_from_the_top(x: Tensor, score: Tensor) -> Tensor:
    """Nucleus sampling: sorts words by probability, hides those beyond a cumulative share, and restores the order."""
    logits = x[:, -1] @ torch.ones(D, V)
    ordered, order = logits.sort(descending=True)
    ordered = ordered.masked_fill(ordered.softmax(-1).cumsum(-1) > 0.9, -1e4)
    return x + torch.empty_like(logits).scatter(1, order, ordered).softmax(-1).sum(-1)[:, None, None]


def pooled_and_masked(x: Tensor, score: Tensor) -> Tensor:
    """The mean of the selected tokens is added where their mask is true; no computation is only for them."""
    index = score[..., 0].topk(K).indices
    mask = torch.zeros(B, S, dtype=torch.bool).scatter(1, index, True)[..., None]
    mean = x.gather(1, index[..., None].expand(-1, -1, D)).mean(1, keepdim=True)
    return torch.where(mask, x + mean, x)


NO_SITES = [
    experts_of_tokens, normalised_experts, tokens_of_experts, mask_alone, read_alone, unrelated,
    whole_sort, nothing, changed_in_place, soft_mask, soft_ranks, masked_scatter, chosen_experts, weights_of_experts,
    experts_with_capacity, experts_that_choose, sampled_words, kept_logits, beams,
    copied_for_experts, mask_by_identity, positions_alone, best_token, sorted_windows, both_parts, top_of_features,
    sampled_from_the_top, pooled_and_masked,
]  # fmt: skip


@pytest.mark.parametrize("function", NO_SITES)
def test_what_is_no_routing_site(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(D, 8)

        def forward(self, x: Tensor) -> Tensor:
            return function(x, self.router(x))

    module, ids_BS = Model(Other, pairs=1).eval(), torch.randint(0, V, (B, S))
    program = exported(module, (ids_BS,), "test")
    assert routing_sites(program) == []
    with torch.no_grad():
        assert torch.equal(program.module()(ids_BS), module(ids_BS))


def test_a_forced_slot_without_a_token_ends_no_run(made: Made) -> None:
    logits_BSV, _ = run_of(made, {"blocks.1": torch.tensor([[-1, 0, 1, S]] * B)})
    assert torch.isfinite(logits_BSV).all()

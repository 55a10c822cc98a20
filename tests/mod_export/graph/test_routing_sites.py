"""Routing sites of a captured program are found, observed, forced and erased, in any model that marks them."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func
from small_graphs import run
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from mod_export import mark_selection
from mod_export.graph.capture import captured, exported
from mod_export.graph.sites import RoutingSite, SiteRun, routing_sites, run_sites
from mod_export.graph.weights import state_of
from mod_export.marker import MARKER

NONE = -math.inf


class TwoSites(nn.Module):
    """A block for two tokens of each row; inside it, two experts take one of these tokens each."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 1)
        self.experts = nn.Linear(4, 2)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor]:
        score_BT = self.router(x_BTD).squeeze(-1)
        index_BK, live_BK = mark_selection(_best(score_BT, 2), score_BT, name="3")
        inner_BKD = torch.gather(x_BTD, 1, index_BK[..., None].expand(-1, -1, 4))
        share_BNT = self.experts(inner_BKD).transpose(1, 2)
        index_BNK, _ = mark_selection(
            _best(share_BNT, 1), share_BNT, available=live_BK, positions=index_BK, name=["4.expert0", "4.expert1"]
        )
        taken_BNK = torch.gather(share_BNT, 2, index_BNK)
        added_BK = torch.zeros_like(inner_BKD[..., 0]).scatter_add(1, index_BNK[..., 0], taken_BNK[..., 0])
        return (x_BTD.sum(-1).scatter_add(1, index_BK, added_BK),)


def _best(score: Tensor, k: int) -> Tensor:
    rank = torch.sort(score, dim=-1, descending=True, stable=True).indices
    return torch.sort(rank[..., :k], dim=-1).values


@pytest.fixture
def model() -> TwoSites:
    torch.manual_seed(0)
    return TwoSites().eval().requires_grad_(False)


def example(model: nn.Module) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 5, 4).to(next(model.parameters()).dtype)


@pytest.mark.parametrize(
    ("strict", "dtype"), [(False, torch.float32), (True, torch.float64), (False, torch.float16)], ids=str
)
def test_sites_are_listed_and_erased(model: TwoSites, strict: bool, dtype: torch.dtype) -> None:
    x_BTD = example(model.to(dtype))
    program = exported(model, [x_BTD], "model", strict=strict)
    assert routing_sites(program) == [
        RoutingSite(3, 2, "rank"),
        RoutingSite("4.expert0", 1, "rank"),
        RoutingSite("4.expert1", 1, "rank"),
    ]
    capture = captured(model, [x_BTD], "model", strict=strict)
    assert capture.routed == ["routed_3", "routed_4.expert0", "routed_4.expert1"]
    assert not [node for node in capture.program.graph.nodes if "mark" in str(node.target)]
    run = SiteRun(5)
    outputs = run_sites(program, state_of(model), [x_BTD], run)
    assert torch.equal(outputs[0], model(x_BTD)[0])
    erased = capture.program.module()(x_BTD)
    for output, expected in zip(erased, [*outputs, *(one.index_BK for one in run.selections.values())], strict=True):
        assert torch.equal(output, expected)


class Unnamed(nn.Module):
    """A module with one or two markers, which have no names."""

    def __init__(self, markers: int) -> None:
        super().__init__()
        self.markers = markers

    def forward(self, x_BTD: Tensor) -> Tensor:
        for column in range(self.markers):
            score_BT = x_BTD[..., column]
            index_BK, _ = mark_selection(_best(score_BT, 2), score_BT)
            x_BTD = x_BTD.index_add(1, index_BK[0], torch.ones_like(x_BTD[:, :2]))
        return x_BTD


class WithoutNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity(), Unnamed(1), nn.Sequential(Unnamed(2))])

    def forward(self, x_BTD: Tensor) -> tuple[Tensor]:
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        score_BNT = x_BTD.transpose(1, 2)[:, :2]
        index_BNK, _ = mark_selection(_best(score_BNT, 1), score_BNT)
        return (x_BTD.sum((1, 2)) + index_BNK.sum((1, 2)),)


@pytest.mark.parametrize("strict", [False, True])
def test_a_site_without_a_name_is_called_after_its_module(strict: bool) -> None:
    model, x_BTD = WithoutNames().eval(), torch.randn(2, 5, 4)
    program = exported(model, [x_BTD], "model", strict=strict)
    names = ["layers.1", "layers.2.0.0", "layers.2.0.1", "model.0", "model.1"]
    assert [site.name for site in routing_sites(program)] == names
    run = SiteRun(5, {"layers.1": torch.tensor([[0, 3], [0, 3]])})
    run_sites(program, state_of(model), [x_BTD], run)
    assert list(run.selections) == names
    assert run.selections["layers.1"].index_BK.tolist() == [[0, 3]] * 2
    assert captured(model, [x_BTD], "model", strict=strict).routed == [f"routed_{name}" for name in names]


def test_a_forced_site_selects_what_it_is_told(model: TwoSites) -> None:
    x_BTD = example(model)
    program = exported(model, [x_BTD], "model")
    forced = {3: torch.tensor([[1, 4], [0, 3]]), "4.expert1": torch.tensor([[4], [2]])}
    run = SiteRun(5, forced)
    outputs = run_sites(program, state_of(model), [x_BTD], run)
    assert run.selections[3].index_BK.tolist() == [[1, 4], [0, 3]]
    # Position 2 of the second row has been skipped before, so it cannot be selected.
    assert run.selections["4.expert1"].index_BK.tolist() == [[4], [-1]]
    assert run.selections["4.expert1"].open_BS.tolist() == [[0, 1, 0, 0, 1], [1, 0, 0, 1, 0]]
    assert not torch.equal(outputs[0], model(x_BTD)[0])
    with torch.no_grad():
        for name in ("router.weight", "experts.weight"):
            model.get_parameter(name).zero_()
    zeros = SiteRun(5)
    run_sites(program, state_of(model), [x_BTD], zeros)
    assert zeros.selections[3].index_BK.tolist() == [[0, 1]] * 2


def test_a_marker_changes_nothing_in_training() -> None:
    model = TwoSites()
    model(torch.randn(2, 5, 4))[0].sum().backward()
    assert model.experts.weight.grad is not None
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    x_BTD = torch.randn(2, 5, 4)
    assert torch.equal(compiled(x_BTD)[0], model(x_BTD)[0])
    assert captured(model.to("meta"), [x_BTD.to("meta")], "model").routed[0] == "routed_3"


def test_torch_compile_compiles_a_model_with_markers_as_if_it_had_none() -> None:
    """If a marker were a fallback, compiled code would call Python, which Inductor refuses where CI is set."""
    graphs: list[torch.fx.Graph] = []

    def keep(module: torch.fx.GraphModule, _inputs: object) -> object:
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    model, x_BTD = TwoSites().requires_grad_(False), torch.randn(2, 5, 4)
    compiled = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    assert torch.equal(compiled(x_BTD)[0], model(x_BTD)[0])
    assert MARKER not in {node.target for node in graphs[0].nodes}


ROW = torch.tensor([[0, 1, 2, 3, 4]] * 2)
REAL = torch.tensor([[True] * 5, [True, True, True, False, False]])
INNER = torch.tensor([[1, 2, 4], [0, 2, 3]])
INNER_REAL = torch.tensor([[True, True, True], [True, True, False]])


def marked(forced: list[list[int]] | None, *, inner: bool, rule: str = "rank", name: str = "1") -> SiteRun:
    run = SiteRun(5, {} if forced is None else {1: torch.tensor(forced)})
    live_BK = torch.tensor([[True, True], [True, False]])
    index_BK = torch.tensor([[0, 1], [1 if inner else 2, 2 if inner else 3]])
    score_BT = torch.arange(10.0).reshape(2, 5)[:, : 3 if inner else 5]
    positions = INNER if inner else None
    run.mark(index_BK, live_BK, score_BT, INNER_REAL if inner else REAL, positions, name, rule)
    return run


@pytest.mark.parametrize(
    ("inner", "rule", "index"),
    [
        (False, "rank", [[0, 1], [2, 3]]),
        (False, "first_come", [[0, 1], [2, -1]]),
        (True, "rank", [[1, 2], [2, -1]]),
    ],
)
def test_what_is_observed(inner: bool, rule: str, index: list[list[int]]) -> None:
    """Indices are positions of the row. Empty slots hold -1, or padding positions in a top-k of the whole row."""
    selection = marked(None, inner=inner, rule=rule).selections[1]
    assert selection.index_BK.tolist() == index
    assert selection.rule == rule
    assert selection.live_BK.tolist() == [[True, True], [True, False]]
    scores = [[NONE, 0, 1, NONE, 2], [5, NONE, 6, 7, NONE]] if inner else [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert selection.score_BS.tolist() == scores
    assert selection.open_BS.sum(1).tolist() == ([3, 2] if inner else [5, 3])


@pytest.mark.parametrize(
    ("inner", "forced", "index", "live"),
    [
        (False, [[1, 3], [2, 4]], [[1, 3], [2, 0]], [[True, True], [True, False]]),
        # An empty slot holds the first token that is not forced; padding cannot be forced.
        (False, [[3, -1], [4, -1]], [[3, 0], [0, 1]], [[True, False], [False, False]]),
        # Positions of the row have other indices inside the block; 0 and 3 are not in it, or are padding.
        (True, [[0, 4], [2, 3]], [[2, 0], [1, 0]], [[True, False], [True, False]]),
        (True, [[-1, -1], [-1, -1]], [[0, 1], [0, 1]], [[False, False], [False, False]]),
    ],
)
def test_what_is_forced(inner: bool, forced: list[list[int]], index: list[list[int]], live: list[list[bool]]) -> None:
    run = SiteRun(5, {1: torch.tensor(forced)})
    score_BT = torch.zeros(2, 3 if inner else 5)
    unforced_BK = torch.tensor([[0, 1]] * 2)
    args = (unforced_BK, torch.ones_like(unforced_BK, dtype=torch.bool), score_BT, INNER_REAL if inner else REAL)
    index_BK, live_BK = run.mark(*args, INNER if inner else None, "1", "first_come")
    assert (index_BK.tolist(), live_BK.tolist()) == (index, live)


class Plain(nn.Module):
    """A selection as in public implementations."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        score_BT = x_BTD[..., 0]
        index_BK, live_BK = mark_selection(torch.topk(score_BT, 2).indices, score_BT)
        return torch.gather(x_BTD, 1, index_BK[..., None].expand(-1, -1, 4)) * live_BK[..., None]


def test_the_marker_is_an_identity_in_eager_mode_and_in_a_users_own_onnx_export() -> None:
    index_BK, score_BT = torch.tensor([[0, 2]]), torch.randn(1, 3)
    index, live = mark_selection(index_BK, score_BT)
    assert torch.equal(index, index_BK)
    assert live.tolist() == [[True, True]]
    assert "mark_selection" in str(MARKER)
    x_BTD = torch.randn(2, 5, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported_by_user = torch.onnx.export(Plain(), (x_BTD,), dynamo=True, verbose=False)
    assert exported_by_user is not None
    graph = exported_by_user.model.graph
    assert {node.domain for node in graph.all_nodes()} == {""}
    (output,) = run(exported_by_user.model, {str(graph.inputs[0].name): x_BTD.numpy()})
    np.testing.assert_array_equal(output, Plain()(x_BTD).numpy())

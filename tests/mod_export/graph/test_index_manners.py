"""However a block transforms its indices, the tokens that it selects are found and can be forced."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from index_manners import WAYS, Way, order_and_inverse, routed_by, scattered_rows, top
from mod_dialects import D, Model, V, capture_of, graph_of
from small_graphs import run
from torch import Tensor, nn

import mod_export
from mod_export.engines import ENGINES
from mod_export.graph.capture import captured, exported, with_found_sites
from mod_export.graph.rewrites import apply_rewrites
from mod_export.graph.sites import RoutingSite, SiteRun, routing_sites, run_sites
from mod_export.graph.weights import state_of
from mod_export.marker import REORDERED

B, S, K = 2, 16, 4
fast = pytest.mark.fast(*(way.written.__name__ for way in WAYS[::3]))
"""`make test` takes every third way, because neighbours resemble each other."""


class Made(NamedTuple):
    """A model whose last block is written in this way, and its exported program with its site."""

    way: Way
    module: nn.Module
    program: torch.export.ExportedProgram
    ids_BS: Tensor


def made_of(way: Way) -> Made:
    torch.manual_seed(0)
    module, ids_BS = Model(routed_by(way.written), pairs=1).eval(), torch.randint(0, V, (B, S))
    return Made(way, module, exported(module, (ids_BS,), way.written.__name__), ids_BS)


@pytest.fixture(scope="module", params=WAYS, ids=lambda way: way.written.__name__)
def made(request: pytest.FixtureRequest) -> Made:
    return made_of(request.param)


def run_of(made: Made, forced: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    run = SiteRun(S, forced)
    (logits_BSV,) = run_sites(made.program, state_of(made.module), (made.ids_BS,), run)
    return logits_BSV, {site: selection.index_BK for site, selection in run.selections.items()}


@fast
def test_sites_are_found_and_change_no_bit(made: Made) -> None:
    assert routing_sites(made.program) == [RoutingSite("blocks.1", K, made.way.rule)]
    with torch.no_grad():
        assert torch.equal(run_of(made)[0], made.module(made.ids_BS))


@fast
def test_the_tokens_that_are_told_run_and_no_others(made: Made) -> None:
    logits_BSV, unforced = run_of(made)
    assert torch.equal(run_of(made, unforced)[0], logits_BSV)
    left_BS = torch.ones(B, S, dtype=torch.bool).scatter(1, unforced["blocks.1"], False)
    other_BK = torch.arange(S).expand(B, S)[left_BS].view(B, S - K)[:, -K:]
    changed_BSV, selected = run_of(made, {"blocks.1": other_BK})
    assert torch.equal(selected["blocks.1"], other_BK)
    # After the last block no token sees another, so tokens that ran in neither case do not change.
    ran_BS = ~left_BS.scatter(1, other_BK, False)
    differs_BS = (changed_BSV != logits_BSV).any(-1)
    assert not differs_BS[~ran_BS].any()
    assert differs_BS[torch.zeros(B, S, dtype=torch.bool).scatter(1, other_BK, True)].any()


# Only ways whose operators ONNX has.
@pytest.mark.fast("every_index", "masked", "two_parts", "remainder")
@pytest.mark.parametrize(
    "name",
    ["broadcast_to", "matrix_transpose", "ravel", "argsort_then_gather", "remainder", "scattered_rows", "every_index",
     "heads_apart", "masked", "split", "order_and_inverse", "order_from_the_end", "two_parts"],
)  # fmt: skip
def test_onnx_runtime_computes_the_same(name: str) -> None:
    made = made_of(next(way for way in WAYS if way.written.__name__ == name))
    model, limits = graph_of(capture_of(made.program), made.module), ENGINES["ort-cpu"].limits
    apply_rewrites(model, limits, "float32")
    logits_BSV, *routed = run(model, {"x": made.ids_BS.numpy()})
    expected_BSV, expected = run_of(made)
    np.testing.assert_allclose(logits_BSV, expected_BSV.numpy(), rtol=0, atol=2e-5)
    for index_BK, expected_BK in zip(routed, expected.values(), strict=True):
        np.testing.assert_array_equal(np.sort(index_BK), expected_BK.sort().values.numpy())


def test_engines_have_nothing_of_a_reordered_order() -> None:
    """The operator that forced selections need is only in the program that the reference runs."""
    made = made_of(Way(order_and_inverse))
    targets = [node.target for node in made.program.graph.nodes]
    assert targets.count(REORDERED) == 1
    engine_program = captured(made.module, (made.ids_BS,), "test").program
    assert REORDERED not in [node.target for node in engine_program.graph.nodes]
    sorts = torch.ops.aten.argsort.default
    assert sum(node.target is sorts for node in engine_program.graph.nodes) == targets.count(sorts)


@pytest.mark.parametrize("first", [True, False])
def test_an_order_has_every_token_once_whatever_is_told(first: bool) -> None:
    order_BS = torch.tensor([[3, 0, 4, 1, 2], [2, 4, 0, 3, 1]])
    forced_BK = torch.tensor([[1, 3], [0, 2]])
    reordered_BS = REORDERED(order_BS, forced_BK, 1, first)
    rest_BS = torch.tensor([[0, 4, 2], [4, 3, 1]])
    assert torch.equal(reordered_BS, torch.cat([forced_BK, rest_BS] if first else [rest_BS, forced_BK], 1))
    unforced_BK = order_BS[:, :2] if first else order_BS[:, 3:]
    assert torch.equal(REORDERED(order_BS, unforced_BK, 1, first), order_BS)


def test_what_vmap_decomposes_to_is_followed() -> None:
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.block = nn.Linear(D, 1), nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            index = top(self.router(x)[..., 0])
            chosen = torch.func.vmap(lambda row, at: row[at])(x, index)
            return torch.func.vmap(lambda row, at, new: row.index_copy(0, at, new))(x, index, self.block(chosen))

    program = torch.export.export(Model(Mapped, pairs=1).eval(), (torch.randint(0, V, (B, S)),)).run_decompositions({})
    assert [site.name for site in routing_sites(with_found_sites(program))] == ["blocks.1"]


@pytest.mark.slow
@pytest.mark.parametrize("written", [pytest.param(order_and_inverse, marks=pytest.mark.slow), scattered_rows])
def test_a_whole_build_is_judged_by_its_selections(written: object, tmp_path: Path) -> None:
    made = made_of(next(way for way in WAYS if way.written is written))
    report = mod_export.build(
        made.module,
        inputs=lambda batch, seq: torch.randint(0, V, (batch, seq)),
        buckets=[(B, S)],
        out=tmp_path / "built",
        targets=["ort-cpu"],
    )
    assert {row.target for row in report.parity} == {"ort-cpu", "portable"}
    for row in report.parity:
        assert row.passed, row.reasons
        assert [(layer.layer, layer.k) for layer in row.routing.layers] == [("blocks.1", K)]

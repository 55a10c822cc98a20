"""Further styles of routing: sites are found and forced, no bit changes, and graphs of targets compute the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch
from mod_dialects import capture_of, graph_of
from mod_manners import MANNERS, Manner
from small_graphs import run
from torch import Tensor, nn

from mod_export.engines import ENGINES
from mod_export.graph.capture import Captured, exported
from mod_export.graph.rewrites import apply_rewrites
from mod_export.graph.sites import Selection, SiteRun, routing_sites, run_sites
from mod_export.graph.target import check_limits
from mod_export.graph.weights import state_of
from mod_export.judge.compare import Judged, routing_of_site

FAST = (
    "take_along_dim", "put_accumulate", "row_loop", "compared", "bool_order", "two_routers", "recursions",
    "sequence_first", "flat_batch", "shared_index", "top_level", "transformers", "region", "weighted_rows",
    "class_forced", "pruned",
)  # fmt: skip
"""The manners of `make test`: of those that resemble each other, one."""


class Made(NamedTuple):
    """A model, its program with the sites, the capture that engines are built from, and an input."""

    manner: Manner
    module: nn.Module
    program: torch.export.ExportedProgram
    capture: Captured
    x: Tensor


@pytest.fixture(autouse=True)
def written_out() -> Iterator[None]:
    """Turns off the fused operators of PyTorch's encoder layers and attention, which round differently."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


@pytest.fixture(scope="module", params=MANNERS)
def made(request: pytest.FixtureRequest) -> Made:
    torch.manual_seed(0)
    manner = MANNERS[request.param]
    module, inputs = manner.make().eval(), manner.inputs(0)
    program = exported(module, inputs, request.param)
    return Made(manner, module, program, capture_of(program), manner.inputs(1)[0])


def run_of(made: Made, forced: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Selection]]:
    manner, module, program, _, x = made
    run = SiteRun(manner.tokens, forced)
    (y,) = run_sites(program, state_of(module), (x,), run)
    return y, run.selections


@pytest.mark.fast(*FAST)
def test_sites_are_found_and_change_no_bit(made: Made) -> None:
    manner, module, program, _, x = made
    assert routing_sites(program) == manner.sites
    y, selections = run_of(made)
    with torch.no_grad():
        assert torch.equal(y, module(x))
    for site in manner.sites:
        selection = selections[site.name]
        assert selection.index_BK.shape == (manner.rows, site.k)
        assert selection.score_BS.shape == selection.open_BS.shape == (manner.rows, manner.tokens)
        # Indices are positions of the whole row, namely those with the highest scores.
        assert selection.open_BS.gather(1, selection.index_BK).all()
        lowest_B = selection.score_BS.gather(1, selection.index_BK).amin(1)
        assert torch.equal(lowest_B, selection.score_BS.topk(site.k).values.amin(1))
        assert all(len(set(row_K)) == site.k for row_K in selection.index_BK.tolist())


@pytest.mark.fast(*FAST)
def test_the_selection_that_is_forced_decides(made: Made) -> None:
    manner = made.manner
    y, unforced = run_of(made)
    assert torch.equal(run_of(made, {name: selection.index_BK for name, selection in unforced.items()})[0], y)
    for site in manner.sites:
        # Force other tokens that could have been selected.
        left_BS = unforced[site.name].open_BS.scatter(1, unforced[site.name].index_BK, False)
        count = min(site.k, int(left_BS.sum(1).min()))
        others_BK = unforced[site.name].index_BK.clone()
        others_BK[:, :count] = left_BS.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices[:, :count]
        changed, selected = run_of(made, {site.name: others_BK})
        assert torch.equal(selected[site.name].index_BK, others_BK)
        assert not torch.equal(changed, y)


@pytest.mark.fast(*FAST)
def test_engines_get_the_positions_as_further_outputs(made: Made) -> None:
    y, *routed = made.capture.program.module()(made.x)
    expected, own = run_of(made)
    assert torch.equal(y, expected)
    assert all(torch.equal(one, own[site.name].index_BK) for one, site in zip(routed, made.manner.sites, strict=True))


# The rewrites for TensorRT include all that those for ONNX Runtime do, and more.
@pytest.mark.fast(
    *(f"{name}-tensorrt-rtx" for name in ("take_along_dim", "transformers", "weighted_rows", "class_forced"))
)
@pytest.mark.parametrize(
    ("made", "target"),
    [(name, target) for name in MANNERS for target in ("ort-cpu", "tensorrt-rtx")],
    indirect=["made"],
)
def test_graphs_of_targets_compute_the_same(made: Made, target: str) -> None:
    model = graph_of(made.capture, made.module)
    limits = ENGINES[target].limits
    apply_rewrites(model, limits, "float32")
    check_limits(model, limits, "float32")
    y, *routed = run(model, {"x": made.x.numpy()})
    expected, selections = run_of(made)
    np.testing.assert_allclose(y, expected.numpy(), rtol=0, atol=2e-5)
    for index_BK, selection in zip(routed, selections.values(), strict=True):
        np.testing.assert_array_equal(np.sort(index_BK), selection.index_BK.sort().values.numpy())


@pytest.mark.parametrize("name", ["put_accumulate", "recursions", "flat_batch"])
def test_a_tie_between_equal_scores_is_no_fault(name: str) -> None:
    """With a router of zeros all tokens tie, and `torch.topk` may return any of them."""
    manner = MANNERS[name]
    module = manner.make().eval()
    for weight, tensor in module.named_parameters():
        if ".router" in weight:
            tensor.detach().zero_()
    x = manner.inputs(0)
    run = SiteRun(manner.tokens)
    run_sites(exported(module, x, name), state_of(module), x, run)
    for site, selection in run.selections.items():
        judged = Judged(selection.rule, selection.score_BS.numpy(), selection.open_BS.numpy())
        others_BK = np.stack([np.flatnonzero(open_S)[-selection.index_BK.shape[1] :] for open_S in judged.open_BS])
        for candidate_BK in (selection.index_BK.numpy(), others_BK):
            routing = routing_of_site(site, candidate_BK, judged)
            assert not routing.malformed
            assert set(routing.distances) <= {0.0}
            assert routing.min_margin == 0

"""`mod-export inspect model.pt2`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from manner_blocks import WeightedRows
from manner_models import Recursions
from mod_dialects import DIALECTS, D, Inner, Model, V
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mod_export import mark_selection
from mod_export.errors import UsageError
from mod_export.inspect.describe import describe


def saved(module: nn.Module, path: Path) -> torch.Tensor:
    ids_BS = torch.randint(0, V, (2, 16))
    torch.export.save(torch.export.export(module.eval(), (ids_BS,)), path)
    return ids_BS


@pytest.mark.parametrize(
    ("name", "order"), [("scatter_add", "order of position"), ("index_put", "order of score: not")]
)
def test_sites_and_flops_of_a_program(name: str, order: str, tmp_path: Path) -> None:
    module = Model(DIALECTS[name])
    ids_BS = saved(module, tmp_path / "mine.pt2")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(ids_BS)
    lines = describe(tmp_path / "mine.pt2").splitlines()
    parameters = sum(tensor.numel() for tensor in module.state_dict().values())
    assert lines[0] == f"mine.pt2  {len(module.state_dict())} weights, {parameters:,} parameters"
    assert lines[1:3] == ["in   ids int64 [2, 16]", f"out  float32 [2, 16, {V}]"]
    assert lines[3] == f"{counter.get_total_flops():,} FLOPs of matrix products"
    with FlopCounterMode(display=False) as routed, torch.no_grad():
        module.blocks[1].block(torch.zeros(2, 4, D))
    share = f"{routed.get_total_flops() / counter.get_total_flops():.1%}"
    assert [line.split()[:3] for line in lines[-2:]] == [["blocks.1", "4", share], ["blocks.3", "4", share]]
    assert order in lines[-1]


def test_selected_tokens_cost_something_in_every_form(tmp_path: Path) -> None:
    module, forms = Model(Inner), ("argsort", "sort_tail", "index_add")
    module.blocks = nn.ModuleList([*(DIALECTS[name]() for name in forms), WeightedRows(), Recursions()])
    saved(module, tmp_path / "mine.pt2")
    shares = re.findall(r"^blocks\.(\d)\S* +\d+ +([\d.]+)% ", describe(tmp_path / "mine.pt2"), re.MULTILINE)
    assert {block for block, _ in shares} == {"0", "1", "2", "3", "4"}
    assert all(0 < float(share) < 100 for _, share in shares)


def test_a_program_without_sites_says_how_to_mark_one(tmp_path: Path) -> None:
    saved(Model(Inner), tmp_path / "dense.pt2")
    assert "no routing site was found. Mark a selection of another form" in describe(tmp_path / "dense.pt2")
    with pytest.raises(UsageError, match=r"--html: .*dense\.pt2 is a graph; give the checkpoint of a model"):
        describe(tmp_path / "dense.pt2", html=tmp_path / "page.html")


class Marked(DIALECTS["one_hot"]):
    """Selects with a mask over all tokens, without indices."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        score = self.router(x)[..., 0]
        index = torch.topk(score, 4).indices.sort().values
        index, _ = mark_selection(index, score, name="mine")
        mask = torch.zeros_like(score).scatter(1, index, 1.0)
        return x + mask[..., None] * self.block(x)


def test_marked_sites_are_those_that_count(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Embedding(V, 16), Marked())
    saved(module, tmp_path / "marked.pt2")
    assert describe(tmp_path / "marked.pt2").splitlines()[-1].split()[:2] == ["mine", "4"]

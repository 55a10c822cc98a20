"""`mod-export inspect model.pt2`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from manner_blocks import WeightedRows
from manner_models import Recursions
from mod_dialects import DIALECTS, D, Inner, Model, Routed, V
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


class RouterOfTwo(Routed):
    """The probability of the second of two classes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.cat([self.router(x), x[..., :1]], -1).softmax(-1)[..., 1]
        gate, index = scores.topk(4)
        wide = index[..., None].expand(-1, -1, D)
        return x.scatter(1, wide, self.block(x.gather(1, wide)) * gate[..., None])


class RowSoftmax(Routed):
    """Weights of the whole row, scaled, and looked up by the indices of all features."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.router(x).softmax(1) * 0.5
        index = weight.topk(4, dim=1).indices.expand(-1, -1, D)
        return x.scatter(1, index, self.block(x.gather(1, index)) * weight.gather(1, index[..., :1]))


class Blended(Routed):
    """Between a token and its result, as far as the gate says."""

    def mixed(self, chosen_BKD: torch.Tensor, result_BKD: torch.Tensor, gate_BK: torch.Tensor) -> torch.Tensor:
        return torch.lerp(chosen_BKD, result_BKD, gate_BK[..., None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, index = self.router(x)[..., 0].topk(4)
        wide = index[..., None].expand(-1, -1, D)
        chosen = x.gather(1, wide)
        return x.scatter(1, wide, self.mixed(chosen, self.block(chosen), scores.sigmoid()))


class EinsumGate(Blended):
    def mixed(self, chosen_BKD: torch.Tensor, result_BKD: torch.Tensor, gate_BK: torch.Tensor) -> torch.Tensor:
        return chosen_BKD + torch.einsum("bk,bkd->bkd", gate_BK, result_BKD)


class EinsumOfThree(Blended):
    """The gate between others, with a scale of features."""

    def mixed(self, chosen_BKD: torch.Tensor, result_BKD: torch.Tensor, gate_BK: torch.Tensor) -> torch.Tensor:
        return chosen_BKD + torch.einsum("bkd,bk,d->bkd", result_BKD, gate_BK, torch.ones(D))


class MultiplyAdd(Blended):
    def mixed(self, chosen_BKD: torch.Tensor, result_BKD: torch.Tensor, gate_BK: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(chosen_BKD, gate_BK[..., None], result_BKD)


class Pooled(Blended):
    """The results of a row, added up with the gates as weights."""

    def mixed(self, chosen_BKD: torch.Tensor, result_BKD: torch.Tensor, gate_BK: torch.Tensor) -> torch.Tensor:
        return chosen_BKD + gate_BK[:, None] @ result_BKD


class NotBlended(Blended):
    """The gate is computed, and used for nothing that weighs."""

    def mixed(self, chosen_BKD: torch.Tensor, result_BKD: torch.Tensor, gate_BK: torch.Tensor) -> torch.Tensor:
        return torch.lerp(chosen_BKD, result_BKD, 0.5) + gate_BK[..., None]


@pytest.mark.parametrize(
    ("make", "gate"),
    [
        (Blended, "sigmoid"),
        (EinsumGate, "sigmoid"),
        (EinsumOfThree, "sigmoid"),
        (MultiplyAdd, "sigmoid"),
        (Pooled, "sigmoid"),
        (NotBlended, "none found"),
        (DIALECTS["scatter_add"], "the score itself"),
        (DIALECTS["index_put"], "none found"),
        (DIALECTS["argsort"], "sigmoid"),
        (DIALECTS["sort_tail"], "tanh"),
        (DIALECTS["index_add"], "softmax over the selected tokens"),
        (WeightedRows, "softmax over the selected tokens"),
        (Recursions, "sigmoid"),
        (RouterOfTwo, "softmax over the router's outputs"),
        (RowSoftmax, "softmax over the row"),
    ],
)
def test_the_gate_is_how_scores_weigh_results(make: type[nn.Module], gate: str, tmp_path: Path) -> None:
    saved(Model(make), tmp_path / "mine.pt2")
    sites = [line for line in describe(tmp_path / "mine.pt2").splitlines() if line.startswith("blocks.")]
    assert sites
    assert all(f" {gate} " in line for line in sites)


def test_a_program_without_sites_says_how_to_mark_one(tmp_path: Path) -> None:
    saved(Model(Inner), tmp_path / "dense.pt2")
    assert "no routing site was found. Mark a selection of another form" in describe(tmp_path / "dense.pt2")
    with pytest.raises(UsageError, match=r"--png: .*dense\.pt2 is a graph; give the checkpoint of a model"):
        describe(tmp_path / "dense.pt2", png=tmp_path / "picture.png")


class Marked(DIALECTS["one_hot"]):
    """A selection that no index tells of: a mask over all tokens."""

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

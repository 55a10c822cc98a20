"""Messages about selections that are no routing sites name their line and where their indices go."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import mod_export
from mod_export.graph.find_sites import NO_SELECTION, unfollowed_selections
from mod_export.measure.verdict import NO_SITE_TO_COMPARE

B, S, D, K = 2, 16, 8, 4


def said_of(function: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> list[str]:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(D, 4)

        def forward(self, x: Tensor) -> Tensor:
            return function(self, x, self.router(x))

    with torch.no_grad():
        return unfollowed_selections(torch.export.export(Model().eval(), (torch.rand(B, S, D),)))


def wide(index: Tensor) -> Tensor:
    return index[..., None].expand(-1, -1, D)


def changed_in_place(_self: nn.Module, x: Tensor, score: Tensor) -> Tensor:
    values, order = score[..., 0].sort(descending=True)
    values[:, :K].sigmoid_()
    return x.scatter(1, wide(order[:, :K]), x.gather(1, wide(order[:, :K]))) + values.sum()


def all_in_order(_self: nn.Module, x: Tensor, score: Tensor) -> Tensor:
    order = wide(score[..., 0].argsort(1))
    return torch.zeros_like(x).scatter(1, order, x.gather(1, order) @ torch.ones(D, D))


def twice(_self: nn.Module, x: Tensor, score: Tensor) -> Tensor:
    indices = [column.topk(K).indices + 1 for column in (score[..., 0], score[..., 1])]
    return torch.stack(indices)


def by_values(_self: nn.Module, x: Tensor, score: Tensor) -> Tensor:
    kept = score[..., 0] >= score[..., 0].topk(K).values[:, -1:]
    return torch.where(kept[..., None], x * 2, x)


SAID: dict[str, tuple[Callable[[nn.Module, Tensor, Tensor], Tensor], str]] = {
    "nothing": (lambda _self, x, score: x * score.sum(), NO_SELECTION),
    "experts": (
        lambda _self, x, score: x + score.topk(2).indices.sum(-1, keepdim=True),
        r"a top-k of 2 of 4 in \[2, 16, 4\] scores at \S+test_unfollowed.py:\d+, which is no choice of tokens for each "
        "row",
    ),
    "values": (by_values, r"a top-k of 4 of 16 in \[2, 16\] scores at \S+, of which no indices are used"),
    "a mask": (
        lambda _self, x, score: x + torch.zeros(B, S).scatter(1, score[..., 0].topk(K).indices, 1.0)[..., None] * x,
        r"a top-k of 4 of 16 in \[2, 16\] scores at \S+, whose indices go to aten.add at \S+, which runs for all",
    ),
    "an operator that does something else": (
        lambda _self, x, score: x.masked_scatter(
            torch.zeros(B, S, dtype=torch.bool).scatter(1, score[..., 0].topk(K).indices, True)[..., None], x[:, :K] * 2
        ),
        r"a top-k of 4 of 16 in \[2, 16\] scores at \S+, whose indices go to aten.masked_scatter at \S+, which is not "
        "followed",
    ),
    "read alone": (
        lambda _self, x, score: x + x.gather(1, wide(score[..., 0].topk(K).indices)).mean(1, keepdim=True),
        r"a top-k of 4 of 16 in \[2, 16\] scores at \S+, whose indices read at aten.gather at \S+, and nothing is put "
        "back at the same places",
    ),
    "numbers alone": (
        lambda _self, x, score: x + score[..., 1].gather(1, score[..., 0].topk(K).indices).sum(),
        r"a top-k of 4 of 16 in \[2, 16\] scores at \S+, whose indices read no more than one number for each "
        r"\(aten.gather at \S+\)",
    ),
    "numbers that are made of indices": (
        lambda _self, _x, score: score[..., 0].topk(K).indices + 1,
        r"a top-k of 4 of 16 in \[2, 16\] scores at \S+, whose indices read no tokens",
    ),
    "an order of all": (
        all_in_order,
        r"a sort of \[2, 16\] scores at \S+, by which tokens change places and run all alike",
    ),
    "the same twice": (
        twice,
        r"a top-k of 4 of 16 in \[2, 16\] scores at \S+, whose indices read no tokens \(2 times\)",
    ),
    "whole numbers": (
        lambda _self, x, score: x.gather(1, wide((score[..., 0] > 0).to(torch.uint8).argsort(1)[:, :K])) * 2,
        r"a sort of \[2, 16\] scores at \S+, which are whole numbers",
    ),
    "changed in place": (changed_in_place, r"a sort of \[2, 16\] scores at \S+, which is changed in place"),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_what_is_said(name: str) -> None:
    function, expected = SAID[name]
    (message,) = said_of(function)
    assert re.fullmatch(expected, message), message


def test_a_build_says_it_everywhere(tmp_path: Path) -> None:
    """The report claims neither that every token goes through every block nor that selections were forced."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.up = nn.Linear(D, 1), nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.zeros(B, S).scatter(1, self.router(x)[..., 0].topk(K).indices, 1.0)
            return x + mask[..., None] * self.up(x)

    report = mod_export.build(
        Masked().eval(),
        inputs=lambda batch, seq: torch.randn(batch, seq, D),
        buckets=[(B, S)],
        out=tmp_path,
        targets="ort-cpu",
    )
    (seen,) = report.unfollowed
    assert re.fullmatch(r"a top-k of 4 of 16 in \[2, 16\] scores at \S+test_unfollowed.py:\d+, whose indices .*", seen)
    assert report.not_compared == NO_SITE_TO_COMPARE
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert seen in page
    for false in ("every token goes through every block", "given the same routing"):
        assert false not in page
        assert false not in report.to_json()

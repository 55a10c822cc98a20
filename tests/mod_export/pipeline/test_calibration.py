"""Weights are rounded to four bits by what they are multiplied with, behind weights that are rounded already."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from mod_export.errors import GraphError
from mod_export.graph.capture import exported
from mod_export.graph.rounding import Rounded, represented, rounded
from mod_export.pipeline.calibration import rounded_over

D, F, S = 6, 40, 5


class Layers(nn.Module):
    """Two projections of the same rows, one layer that is used twice, and a weight without a product."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, F), nn.Linear(D, F, bias=False), nn.Linear(F, D)
        self.again, self.scale = nn.Linear(D, D), nn.Parameter(torch.ones(1, D))

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.again(self.before_second(self.first(x_BSD)))

    def hidden(self, x_BSD: Tensor) -> Tensor:
        return self.gate(x_BSD).relu() * self.up(x_BSD)

    def first(self, x_BSD: Tensor) -> Tensor:
        return self.down(self.hidden(x_BSD))

    def before_second(self, first_BSD: Tensor) -> Tensor:
        return self.again(first_BSD) * self.scale


def by_moments(weight_NK: Tensor, rows: list[Tensor]) -> Rounded:
    row_NK = torch.cat([x.flatten(0, -2) for x in rows])
    return rounded(weight_NK, "int4", row_NK.T @ row_NK)


def same(found: Rounded, expected: Rounded) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True) if one is not None)


@torch.no_grad()
def test_each_weight_is_rounded_behind_those_before_it() -> None:
    torch.manual_seed(0)
    module, inputs = Layers().eval(), [torch.randn(2, S, D) for _ in range(3)]
    program = exported(copy.deepcopy(module), (inputs[0],), "test")
    weights = {name: weight.clone() for name, weight in module.named_parameters() if weight.dim() == 2}
    found = dict(rounded_over(program, [(x_BSD,) for x_BSD in inputs], S, weights))
    # In the order of the last product; a weight that nothing is multiplied with comes last.
    assert list(found) == ["gate.weight", "up.weight", "down.weight", "again.weight", "scale"]
    assert same(found["scale"], rounded(weights["scale"], "int4"))
    rows_of = {"gate": lambda x: [x], "up": lambda x: [x], "down": lambda x: [module.hidden(x)]}
    rows_of["again"] = lambda x: [module.first(x), module.before_second(module.first(x))]
    for name, rows in rows_of.items():
        layer = module.get_submodule(name)
        expected = by_moments(layer.weight, [row for x_BSD in inputs for row in rows(x_BSD)])
        assert same(found[f"{name}.weight"], expected)
        layer.weight.copy_(represented(expected, layer.weight.shape[1]))
    # The program and its weights do not change.
    assert all(torch.equal(program.state_dict[name], weight) for name, weight in weights.items())
    only_down = {"down.weight": weights["down.weight"]}
    assert [name for name, _ in rounded_over(program, [(inputs[0],)], S, only_down)] == ["down.weight"]


def test_the_gradient_mode_of_the_caller_stays_while_runs_are_stopped() -> None:
    module, x_BSD = Layers().eval(), torch.randn(2, S, D)
    program = exported(module, (x_BSD,), "test")
    weights = rounded_over(program, [(x_BSD,)], S, {"gate.weight": module.gate.weight})
    next(weights)
    assert torch.is_grad_enabled()


def test_sums_that_are_not_finite() -> None:
    module = Layers().eval()
    program = exported(module, (torch.randn(2, S, D),), "test")
    with pytest.raises(
        GraphError, match=r"^int4: gate.weight is multiplied with numbers that are not finite, or too la"
    ):
        list(rounded_over(program, [(torch.full((2, S, D), 1e20),)], S, {"gate.weight": module.gate.weight}))

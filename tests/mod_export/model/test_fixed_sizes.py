"""Masks that pick a fixed number of elements are selections of fixed size; views by strides are selections too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mod_manners import graph_of
from small_graphs import run
from torch import Tensor, nn

from mod_export.errors import CaptureError
from mod_export.graph.capture import captured, exported
from mod_export.graph.sites import routing_sites
from mod_export.model.module import model_from_module
from mod_export.model.programs import ProgramModel
from mod_export.types import Bucket

B, S, D, K = 2, 16, 8, 4


class Made(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.function, self.linear, self.router = function, nn.Linear(D, D), nn.Linear(D, 1)
        self.register_buffer("even", torch.arange(S) % 2 == 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def mask_of_top_k(m: Any, x: Tensor) -> Tensor:
    index = m.router(x)[..., 0].topk(K).indices
    return torch.zeros(B, S, dtype=torch.bool).scatter_(1, index, True)


def routed_by_a_mask(m: Any, x: Tensor) -> Tensor:
    mask = mask_of_top_k(m, x)
    out = x.clone()
    out[mask] = m.linear(x[mask].view(B, K, D)).flatten(0, 1)
    return out


def every_second(m: Any, x: Tensor) -> Tensor:
    out = x.clone()
    out[:, ~m.even] = m.linear(x[:, m.even])
    return out


FIXED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a mask of positions": lambda m, x: m.linear(x[:, torch.arange(S) % 4 != 1]).mean(1),
    "a mask that is a buffer": every_second,
    "a triangle": lambda m, x: m.linear(x)[:, :, :4][:, torch.ones(S, 4).triu(1).bool()] * 2,
    "masked_select": lambda m, x: x.masked_select(m.even[:, None].expand_as(x)).view(B, S // 2, D) * 2,
    "where they are": lambda m, x: m.linear(x.index_select(1, m.even.nonzero()[:, 0])),
    "a mask of the selected": routed_by_a_mask,
}
STRIDED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "overlapping chunks": lambda m, x: m.linear(x).as_strided((B, 3, 8, D), (S * D, 4 * D, D, 1)),
    "of what is turned": lambda m, x: m.linear(x).transpose(1, 2).as_strided((B, S // 2, D), (S * D, 2 * D, 1), D),
    "of a part": lambda m, x: m.linear(x)[:, 2:].as_strided((B, 2, D), (S * D, 3 * D, 1)) * 2,
    "of a weight": lambda m, x: x @ m.linear.weight.as_strided((D, D), (1, D)),
}


def test_what_is_selected_is_of_a_fixed_size() -> None:
    """One module does everything of both tables, because most of the time is that of captures. The tokens that a mask
    selects are its only site.
    """
    cases = {**FIXED, **STRIDED}
    torch.manual_seed(0)
    module = Made(lambda m, x: torch.cat([case(m, x).flatten() for case in cases.values()]))
    module = module.eval().requires_grad_(False)
    model = model_from_module(module, lambda batch, seq: torch.randn(batch, seq, D), [Bucket(B, S)], "mine")
    assert isinstance(model, ProgramModel)
    x = torch.randn(B, S, D)
    sizes = [case(module, x).numel() for case in cases.values()]
    restored = model.module()
    graph = graph_of(captured(restored, (x,), "mine"), restored)
    computed = torch.from_numpy(run(graph, {"x": x.numpy()})[0])
    parts = [tensor.split(sizes) for tensor in (module(x), restored(x)[0], computed)]
    for name, expected, output, engine in zip(cases, *parts, strict=True):
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6, msg=f"{name}: {{}}".format)
        torch.testing.assert_close(engine, expected, rtol=1e-5, atol=1e-5, msg=f"{name}: {{}}".format)
    meta_input = torch.empty(B, S, D, device="meta")
    sites = routing_sites(exported(model.skeleton().to("meta"), (meta_input,), "mine"))
    assert [site.k for site in sites] == [K]


def test_how_many_are_true_depends_on_the_data() -> None:
    with pytest.raises(
        CaptureError, match=r"^mine at b2s16: no static graph because of .*\n +.*\nA boolean mask picks"
    ):
        model_from_module(
            Made(lambda m, x: m.linear(x[x[..., 0] > 0]).sum(0)), torch.randn(B, S, D), [Bucket(B, S)], "mine"
        )


def test_a_diagonal_of_a_part_is_written_to() -> None:
    def filled(m: Any, x: Tensor) -> Tensor:
        result: Tensor = m.linear(x)
        for row in result:
            row.fill_diagonal_(0)
        return result

    message = (
        r"^mine at b2s16: calls aten\.fill_diagonal_\.default, at .*\n.*\nwhich writes into a part of a tensor in a way"
    )
    with pytest.raises(CaptureError, match=message):
        model_from_module(Made(filled), torch.randn(B, S, D), [Bucket(B, S)], "mine")


def test_random_numbers_of_a_generator_are_refused() -> None:
    generator = torch.Generator()
    with pytest.raises(CaptureError, match=r"^mine at b2s16: draws random numbers \(aten\.rand\.generator\), at "):
        model_from_module(
            Made(lambda m, x: m.linear(x) + torch.rand(D, generator=generator)),
            torch.randn(B, S, D), [Bucket(B, S)], "mine",
        )  # fmt: skip

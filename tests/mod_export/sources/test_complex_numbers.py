"""Rotary positions in complex numbers are computed as pairs of real ones; what engines cannot have is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mod_manners import graph_of
from small_graphs import run
from torch import Tensor, nn
from torch.nn import functional as F

from mod_export.errors import CaptureError
from mod_export.export.capture import captured
from mod_export.sources.module import model_from_module
from mod_export.sources.programs import ProgramModel
from mod_export.types import Bucket

B, S, D, HEADS = 2, 8, 16, 2
WIDTH = D // HEADS // 2


def angles() -> Tensor:
    frequency_E = 1 / 10000 ** (torch.arange(WIDTH) / WIDTH)
    return torch.outer(torch.arange(32), frequency_E)


class Rotated(nn.Module):
    """Attention as in Llama 2, in a routed block whose tokens keep their own angles."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.router = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Linear(D, 1)
        self.register_buffer("table", torch.polar(torch.ones(32, WIDTH), angles()), persistent=False)

    def turned(self, x: Tensor, index: Tensor) -> Tensor:
        pair = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pair * self.turns(index)).flatten(3).type_as(x)

    def turns(self, index: Tensor) -> Tensor:
        return self.table[index][:, :, None]

    def forward(self, x: Tensor) -> Tensor:
        index = self.router(x).squeeze(-1).topk(S // 2).indices.sort().values
        wide = index[..., None].expand(-1, -1, D)
        q, k, v = self.qkv(x.gather(1, wide)).view(B, S // 2, 3, HEADS, -1).unbind(2)
        q, k, v = (one.transpose(1, 2) for one in (self.turned(q, index), self.turned(k, index), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, -1, D)
        return x.scatter_add(1, wide, self.out(y))


class Gathered(Rotated):
    """A table as an attribute, cut, made wide, and gathered; the other factor is conjugated twice."""

    def __init__(self) -> None:
        super().__init__()
        self.turning = self.table.clone()

    def turns(self, index: Tensor) -> Tensor:
        table = self.turning[:S].unsqueeze(0).expand(B, -1, -1)
        turns = torch.gather(table, 1, index.unsqueeze(-1).expand(-1, -1, WIDTH))
        return turns.conj().conj().view(B, -1, 1, WIDTH)


class Exponential(Rotated):
    """exp(i * angle), from parts that are put together and taken apart again."""

    def turns(self, index: Tensor) -> Tensor:
        turns = torch.exp(1j * angles()[index])
        turns = torch.complex(turns.real, turns.imag) * 2.0 - turns
        halves = torch.cat([turns[..., :1], turns[..., 1:]], dim=-1)
        return torch.stack([halves], dim=-2).transpose(-1, -2).permute(0, 1, -1, 2)


class Weighed(Rotated):
    """Scaled by a real tensor, in twice the precision."""

    def turns(self, index: Tensor) -> Tensor:
        turns = torch.polar(torch.ones(1, dtype=torch.float64), angles().double())
        scale = torch.linspace(1.0, 1.5, WIDTH)
        return (turns.to(torch.complex64) * scale).index_select(0, index.flatten()).view(B, -1, 1, WIDTH)


@pytest.mark.parametrize("kind", [Rotated, Gathered, Exponential, Weighed])
def test_what_is_captured_computes_what_the_module_does(kind: type[Rotated]) -> None:
    torch.manual_seed(0)
    module = kind().eval()
    model = model_from_module(module, lambda batch, seq: torch.randn(batch, seq, D), [Bucket(B, S)], "mine")
    assert isinstance(model.loaded, ProgramModel)
    restored = model.loaded.module()
    x = torch.randn(B, S, D)
    with torch.no_grad():
        expected = module(x)
        (found,) = restored(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    graph = graph_of(captured(restored, (x,), "mine"), restored)
    computed = run(graph, {"x": x.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(computed), expected, rtol=0, atol=1e-5)


class Calling(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def branches(x: Tensor) -> Tensor:
    def turned(x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x) * 2.0)

    found: Tensor = torch.cond(x.sum() > 0, turned, torch.clone, (x,))
    return found


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda x: torch.view_as_complex(x),
            r"mine at b2s2: returns complex numbers; return torch\.view_as_real",
        ),
        (
            lambda x: torch.view_as_complex(x).abs(),
            r"mine at b2s2: aten\.abs\.default of complex numbers, which no engine has, at .*_complex_numbers\.py:\d+\n"
            r"    return self\.function\(x\)\nWrite rotary positions with cos and sin, or .*\nSee \"Comp",
        ),
        (
            lambda x: torch.view_as_real(torch.view_as_complex(x) + 1.0),
            r"mine at b2s2: aten\.add\.Tensor of complex numbers, which no engine has, at ",
        ),
        (
            lambda x: torch.view_as_complex(x).to(torch.float32),
            r"mine at b2s2: aten\.\S+ of complex numbers, which no engine has, at ",
        ),
        (
            branches,
            r"mine at b2s2: computes with complex numbers in a branch of torch\.cond, which no engine has\nWrite",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_what_engines_cannot_have_is_refused(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        model_from_module(Calling(function), torch.rand(2, 2, 2), [Bucket(2, 2)], "mine")


def test_a_complex_input_is_refused() -> None:
    given = torch.rand(2, 2, dtype=torch.complex64)
    with pytest.raises(CaptureError, match="mine at b2s2: its input x is complex; give real and imaginary parts apart"):
        model_from_module(Calling(lambda x: torch.view_as_real(x)), given, [Bucket(2, 2)], "mine")

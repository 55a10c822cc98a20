"""Complex numbers of rotary positions are computed as pairs of real numbers; unsupported operators are refused."""

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
from mod_export.graph.capture import captured
from mod_export.model.module import model_from_module
from mod_export.model.programs import ProgramModel
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
        q, k, v = (part.transpose(1, 2) for part in (self.turned(q, index), self.turned(k, index), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, -1, D)
        return x.scatter_add(1, wide, self.out(y))


class Gathered(Rotated):
    """The table is an attribute that is sliced, expanded and gathered; the result is conjugated twice."""

    def __init__(self) -> None:
        super().__init__()
        self.turning = self.table.clone()

    def turns(self, index: Tensor) -> Tensor:
        table = self.turning[:S].unsqueeze(0).expand(B, -1, -1)
        turns = torch.gather(table, 1, index.unsqueeze(-1).expand(-1, -1, WIDTH))
        return turns.conj().conj().view(B, -1, 1, WIDTH)


class Exponential(Rotated):
    """Computes exp(i * angle), splits it into parts, and joins them again."""

    def turns(self, index: Tensor) -> Tensor:
        turns = torch.exp(1j * angles()[index])
        turns = torch.complex(turns.real, turns.imag) * 2.0 - turns
        halves = torch.cat([turns[..., :1], turns[..., 1:]], dim=-1)
        return torch.stack([halves], dim=-2).transpose(-1, -2).permute(0, 1, -1, 2)


class Weighed(Rotated):
    """Computes the table in complex128, casts it to complex64, and scales it by a real tensor."""

    def turns(self, index: Tensor) -> Tensor:
        turns = torch.polar(torch.ones(1, dtype=torch.float64), angles().double())
        scale = torch.linspace(1.0, 1.5, WIDTH)
        return (turns.to(torch.complex64) * scale).index_select(0, index.flatten()).view(B, -1, 1, WIDTH)


@pytest.mark.fast("Rotated")
@pytest.mark.parametrize("kind", [Rotated, Gathered, Exponential, Weighed])
def test_what_is_captured_computes_what_the_module_does(kind: type[Rotated]) -> None:
    torch.manual_seed(0)
    module = kind().eval()
    model = model_from_module(module, lambda batch, seq: torch.randn(batch, seq, D), [Bucket(B, S)], "mine")
    assert isinstance(model, ProgramModel)
    restored = model.module()
    x = torch.randn(B, S, D)
    with torch.no_grad():
        expected = module(x)
        (output,) = restored(x)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-6)
    graph = graph_of(captured(restored, (x,), "mine"), restored)
    computed = run(graph, {"x": x.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(computed), expected, rtol=0, atol=1e-5)


class Calling(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


TABLE = torch.polar(torch.ones(S, WIDTH), angles()[:S])
REAL = torch.linspace(0.5, 1.5, S * WIDTH).view(S, WIDTH)
KEPT = (torch.arange(S)[:, None] < 5).long()
MANNERS: dict[str, Callable[[Tensor], Tensor]] = {
    "to a device": lambda z: z.to(torch.device("cpu")) * TABLE.to("cpu"),
    "to a dtype": lambda z: z.to(torch.complex128).to(torch.complex64),
    "narrow": lambda z: z.narrow(1, 1, 4),
    "slices with steps": lambda z: z[:, 1::2, ::2],
    "flip, roll and rotate": lambda z: z.flip(1).roll(2, -1).rot90(1, [1, 2]),
    "split, chunk and unbind": lambda z: torch.cat([*z.split(3, 1), *z.chunk(2, 1), z.unbind(1)[0][:, None]], 1),
    "movedim and swapaxes": lambda z: z.movedim(1, 2).swapaxes(1, 2).mT.adjoint(),
    "tile, repeat and broadcast": lambda z: (
        z.tile(2, 1, 1).repeat_interleave(2, 1).broadcast_to(3, 2 * B, 2 * S, WIDTH)
    ),
    "unfold and diagonal": lambda z: z.unfold(1, 4, 2).diagonal(0, 1, 3),
    "take along a dimension": lambda z: torch.take_along_dim(z, torch.tensor([[[1], [0], [3]]]), 1),
    "index with a mask's positions": lambda z: z[:, torch.tensor([0, 2, 5])],
    "where": lambda z: torch.where(torch.arange(S)[:, None] > 3, z, z.conj()),
    "where, of a real number": lambda z: torch.where(torch.arange(S)[:, None] > 3, z, 0.0),
    "where, of an integer tensor": lambda z: torch.where(torch.arange(S)[:, None] > 3, z, torch.tensor(2)),
    "where, by a mask of one element": lambda z: (
        torch.where(torch.tensor([[True]]), 1.0, z) + torch.where(torch.tensor([[False]]), 2.0, z)
    ),
    "masked_fill": lambda z: z.masked_fill(torch.arange(S)[:, None] > 3, 0.5),
    "pad": lambda z: F.pad(z, (1, 2)),
    "scatter": lambda z: z.scatter(1, torch.zeros(B, 1, WIDTH, dtype=torch.int64), z[:, -1:]),
    "written in place": lambda z: torch.zeros_like(z).index_copy_(1, torch.tensor([1, 0]), z[:, :2]),
    "real numbers added": lambda z: z + REAL - 2.0 + torch.ones_like(z),
    "integer tensors added": lambda z: z * KEPT + (1 - KEPT) - torch.arange(WIDTH),
    "integer tensors joined": lambda z: (
        torch.cat([z, KEPT.expand(B, S, 1)], 2) + torch.stack([z[0, 0, 0], KEPT[1, 0]]).sum()
    ),
    "complex numbers added": lambda z: z + (1 + 2j),
    "times real numbers": lambda z: z * REAL / 3.0,
    "times complex numbers": lambda z: z * TABLE * (2 - 1j) * 1j,
    "quotient": lambda z: z / (TABLE + 2) / REAL / (1 + 1j),
    "quotient of a number": lambda z: 1.0 / (z + 4),
    "reciprocal and powers": lambda z: (z + 4).reciprocal() * z.pow(3) * z.square(),
    "sums": lambda z: z.sum(1) + z.mean(1) + z.cumsum(1)[:, -1],
    "matrix product": lambda z: z @ z.mH,
    "einsum": lambda z: torch.einsum("btw,bsw->bts", z, z),
    "exp": lambda z: z.exp(),
    "absolute value": lambda z: z.abs() * z,
    "angle": lambda z: torch.polar(z.abs(), z.angle()),
    "real part alone": lambda z: torch.complex(z.real, z.imag) + z.to(torch.float32),
    "Fourier transform of a complex number": lambda z: torch.fft.fftn(z, dim=(1, 2), norm="ortho"),
    "Fourier transforms with zeros behind, and cut": lambda z: (
        torch.fft.fft(z, n=S + 3, dim=1)[:, :S] + torch.fft.ifftn(z, s=(S - 1, WIDTH), dim=(1, 2)).sum()
    ),
    "Fourier transforms to real numbers": lambda z: (
        torch.fft.irfft(torch.fft.rfft(z.real, n=2 * S, dim=1) * torch.fft.rfft(z.imag, n=2 * S, dim=1), dim=1)[:, :S]
        * z
    ),
    "to an odd number of real numbers": lambda z: torch.fft.irfftn(z, s=(S, 2 * WIDTH - 1)).sum() + z,
    "to real numbers along two dimensions": lambda z: (
        torch.fft.irfft2(torch.fft.rfft2(z.real, dim=(1, 2), norm="ortho"), s=(S, WIDTH), dim=(1, 2), norm="ortho") + z
    ),
    "Fourier transforms of real numbers": lambda z: torch.fft.fft(torch.fft.fft2(z.real), dim=1).real + z,
    "Fourier transforms in float64": lambda z: (
        torch.fft.irfft(torch.fft.rfft(z.real.double(), dim=1) * 0.5, n=S, dim=1).float()
        * torch.fft.ifft(z.to(torch.complex128), dim=1).to(torch.complex64)
    ),
    "a Fourier transform of integers": lambda z: torch.fft.fft(KEPT[:, 0]).sum() * z,
    "half a Fourier transform": lambda z: (
        torch.fft.rfft(z.real, dim=1, norm="forward") * torch.fft.ifft(z, dim=1)[:, :5]
    ),
    "a new tensor": lambda z: torch.full((S, WIDTH), 1 + 2j) * z + torch.zeros(S, WIDTH, dtype=torch.complex64),
}
"""Functions of complex numbers (B, S, WIDTH)."""


TOGETHER = (
    "times complex numbers", "quotient", "matrix product", "slices with steps", "written in place",
    "half a Fourier transform", "a new tensor", "real part alone", "integer tensors added",
    "where, by a mask of one element",
)  # fmt: skip
"""The functions that differ most in kind, which are captured as one, because most of the time is that of captures."""


@pytest.mark.fast("together")
@pytest.mark.parametrize("manners", [TOGETHER, *((name,) for name in MANNERS)], ids=["together", *MANNERS])
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_whatever_moves_adds_or_multiplies_complex_numbers_is_captured(manners: tuple[str, ...]) -> None:
    def results(x: Tensor) -> list[Tensor]:
        outputs = [MANNERS[name](torch.view_as_complex(x)).resolve_conj() for name in manners]
        return [torch.view_as_real(output) if output.is_complex() else output for output in outputs]

    module = Calling(lambda x: torch.cat([output.flatten() for output in results(x)])).eval()
    x = torch.randn(B, S, WIDTH, 2, generator=torch.Generator().manual_seed(0))
    model = model_from_module(module, x, [Bucket(B, S)], "mine")
    assert isinstance(model, ProgramModel)
    restored = model.module()
    with torch.no_grad():
        (output,) = restored(x)
    computed = torch.from_numpy(run(graph_of(captured(restored, (x,), "mine"), restored), {"x": x.numpy()})[0])
    expected = results(x)
    sizes = [tensor.numel() for tensor in expected]
    for name, tensor, restored_N, computed_N in zip(
        manners, expected, output.split(sizes), computed.split(sizes), strict=True
    ):
        for result_N in (restored_N, computed_N):
            torch.testing.assert_close(result_N, tensor.flatten(), rtol=1e-5, atol=1e-5, msg=f"{name}: {{}}".format)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda x: torch.view_as_complex(x),
            r"mine at b2s2: returns complex numbers; return torch\.view_as_real",
        ),
        (
            lambda x: torch.view_as_real(torch.view_as_complex(x).sqrt()),
            r"mine at b2s2: aten\.sqrt\.default of complex numbers, which no engine has, at .*_numbers\.py:\d+\n"
            r"    lambda x: .*\nWrite rotary positions with cos and sin, or .*\nSee \"Comp",
        ),
        (
            lambda x: torch.view_as_real(torch.view_as_complex(x) ** 0.5),
            r"mine at b2s2: aten\.pow\.Tensor_Scalar of complex numbers, which no engine has, at ",
        ),
        (
            lambda x: torch.view_as_real(torch.view_as_complex(x).cumprod(0)),
            r"mine at b2s2: aten\.cumprod\.default of complex numbers, which no engine has, at ",
        ),
        (
            lambda x: torch.fft.hfft(torch.view_as_complex(x)),
            r"mine at b2s2: aten\.fft_hfft\.default of complex numbers, which no engine has, at .*\n.*\n"
            r"Write it with torch\.fft\.rfft and irfft",
        ),
    ],
)
def test_what_engines_cannot_have_is_refused(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        model_from_module(Calling(function), torch.rand(2, 2, 2), [Bucket(2, 2)], "mine")


def test_numbers_that_differ_in_real_form_are_refused() -> None:
    """The square of 1e-25 is 0 in float32. PyTorch's own division avoids it."""
    sample = torch.full((2, 2, 2), 1e-25)
    message = r"mine at b2s2: aten\.\w+\.\w+ of complex numbers, whose real form gives other numbers on a sample, at "
    with pytest.raises(CaptureError, match=message):
        model_from_module(
            Calling(lambda x: torch.view_as_real(1.0 / torch.view_as_complex(x))), sample, [Bucket(2, 2)], "mine"
        )


def test_a_complex_input_is_refused() -> None:
    complex_input = torch.rand(2, 2, dtype=torch.complex64)
    with pytest.raises(CaptureError, match="mine at b2s2: its input x is complex; give real and imaginary parts apart"):
        model_from_module(Calling(lambda x: torch.view_as_real(x)), complex_input, [Bucket(2, 2)], "mine")

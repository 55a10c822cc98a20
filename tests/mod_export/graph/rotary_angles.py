"""Rotary angles, positions times frequencies, in the forms in which published models write them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

D = 16


class _Llama(nn.Module):
    """The module of transformers, as it is installed."""

    def __init__(self) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        super().__init__()
        self.rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=2 * D, num_attention_heads=2))

    def forward(self, position_BS: Tensor) -> Tensor:
        cos_BSD, _ = self.rotary(torch.ones(1), position_BS)
        return cos_BSD


class _Cosines(nn.Module):
    def __init__(self, angles: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.angles = angles
        frequency_E = 1 / 10_000 ** (torch.arange(0, D, 2).float() / D)
        self.register_buffer("inv_freq", frequency_E, persistent=False)

    def forward(self, position_BS: Tensor) -> Tensor:
        angle_BSE = self.angles(position_BS.float(), self.inv_freq)
        return torch.cat([angle_BSE, angle_BSE], -1).cos()


def _product(position_BS: Tensor, frequency_E: Tensor) -> Tensor:
    frequency_BE1 = frequency_E[None, :, None].expand(position_BS.shape[0], -1, 1)
    return (frequency_BE1 @ position_BS[:, None]).transpose(1, 2)


COSINES: dict[str, Callable[[], nn.Module]] = {
    "transformers": _Llama,
    "product": lambda: _Cosines(_product),  # Earlier releases of transformers, and many copies of them.
    "einsum": lambda: _Cosines(lambda position_BS, frequency_E: torch.einsum("bs,e->bse", position_BS, frequency_E)),
    "outer": lambda: _Cosines(lambda position_BS, frequency_E: torch.outer(position_BS[0], frequency_E)[None]),
}
"""The name of a form -> a function that makes a module of it: positions (B, S) -> cosines (B, S, D)."""
FORMS = ["product", "einsum", "outer", pytest.param("transformers", marks=pytest.mark.slow)]


class Turned(nn.Module):
    """x (B, S, D) -> x times the cosines of its positions, which are given or counted, and a product with a weight."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.cosines, self.block = COSINES[form](), nn.Linear(D, D)

    def forward(self, x_BSD: Tensor, position_BS: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if position_BS is None:
            position_BS = torch.arange(x_BSD.shape[1])[None]
        return x_BSD * self.cosines(position_BS), self.block(x_BSD)


def turned(form: str, *, given: bool) -> tuple[Turned, tuple[Tensor, ...]]:
    """A module and its inputs; the positions are those of 600 tokens."""
    x_BSD = torch.ones(1, 600, D)
    return Turned(form).eval(), (x_BSD, torch.arange(600)[None]) if given else (x_BSD,)

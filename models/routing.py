"""Routing: score, select, gate, combine. One table for each declaration of the spec.

Shape legend: B batch, S sequence, K selected tokens, D model width. `_B1` and `_BK1` are kept for broadcasting.
Everything here has static shapes: k is a Python int, fixed by the spec and the sequence length before tracing, so the
graph holds no data-dependent size. Scores are computed, compared and gated in float32 whatever the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mod_models.spec import RoutingSpec

__all__ = ["COMBINES", "GATES", "ROUTERS", "Routing", "select_topk"]


class Routing(NamedTuple):
    """What one routed block decided.

    Attributes:
        index_BK: int64, positions that run, ascending and unique in each row. Surplus slots of a row with fewer
            than k real tokens hold padding positions, which come after all real ones.
        live_BK: bool, False in surplus slots.
        score_BS: float32 router score l of every token, padding included.
    """

    index_BK: Tensor
    live_BK: Tensor
    score_BS: Tensor


class LinearRouter(nn.Module):
    """l = w . x (+ b): the paper's router (arXiv 2404.02258, equation 1). (B, S, D) -> float32 (B, S)."""

    def __init__(self, d_model: int, *, bias: bool) -> None:
        super().__init__()
        self.projection = nn.Linear(d_model, 1, bias=bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return _linear_float32(self.projection, x_BSD).squeeze(-1)


class MlpRouter(nn.Module):
    """l = w2 . silu(W1 x + b1) + b2; also the form of the auxiliary causal predictor. (B, S, D) -> float32 (B, S)."""

    def __init__(self, d_model: int, d_hidden: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(d_model, d_hidden)
        self.projection = nn.Linear(d_hidden, 1)

    def forward(self, x_BSD: Tensor) -> Tensor:
        h_BSH = nn.functional.silu(_linear_float32(self.hidden, x_BSD))
        return _linear_float32(self.projection, h_BSH).squeeze(-1)


def _linear_float32(linear: nn.Linear, x: Tensor) -> Tensor:
    """In float32 for 16-bit streams; a float64 model, which measures what rounding does, keeps its own precision."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    bias = None if linear.bias is None else linear.bias.to(dtype)
    return nn.functional.linear(x.to(dtype), linear.weight.to(dtype), bias)


ROUTERS: dict[str, Callable[[int, RoutingSpec], nn.Module]] = {
    "linear": lambda d_model, spec: LinearRouter(d_model, bias=False),
    "linear_bias": lambda d_model, spec: LinearRouter(d_model, bias=True),
    "mlp": lambda d_model, spec: MlpRouter(d_model, spec.router_hidden),
}


def select_topk(score_BS: Tensor, real_BS: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest scores of each row's real tokens, ties to the earlier token, positions ascending.

    `torch.topk` promises nothing about ties and its CPU and CUDA kernels differ, so the order comes from a stable
    sort. Exporters turn "stable descending sort, first k" into one TopK, whose ONNX definition breaks ties likewise.

    Args:
        score_BS: float32 scores.
        real_BS: bool, False for padding. Padding is ranked behind every real token.
        k: how many positions to take, 1 <= k <= S.

    Returns:
        index_BK int64 ascending, live_BK bool.
    """
    masked_BS = torch.where(real_BS, score_BS, float("-inf"))
    rank_BS = torch.sort(masked_BS, dim=-1, descending=True, stable=True).indices
    index_BK = torch.sort(rank_BS[:, :k], dim=-1).values
    return index_BK, torch.gather(real_BS, 1, index_BK)


def _softmax_selected(l_BK: Tensor, live_BK: Tensor, spec: RoutingSpec) -> Tensor:
    # The finite floor keeps a row without any real token free of NaN; its gates are masked by the caller.
    return torch.softmax(torch.where(live_BK, l_BK, torch.finfo(torch.float32).min), dim=-1)


def _sigmoid(l_BK: Tensor) -> Tensor:
    """1 / (1 + exp(-l)), written out: the sigmoid kernels of some runtimes (ONNX Runtime's for CPUs) are exact to an
    absolute 1e-7 only, and a gate is a factor. Below -80 it is constant, so that training sees no infinity.
    """
    return 1 / (1 + torch.exp(-l_BK.clamp(min=-80.0)))


GATES: dict[str, Callable[[Tensor, Tensor, RoutingSpec], Tensor]] = {
    "identity": lambda l_BK, live_BK, spec: l_BK,
    "sigmoid": lambda l_BK, live_BK, spec: _sigmoid(l_BK),
    "scaled_sigmoid": lambda l_BK, live_BK, spec: spec.gate_scale * _sigmoid(l_BK),
    "tanh_affine": lambda l_BK, live_BK, spec: spec.gate_scale * torch.tanh(l_BK) + spec.gate_shift,
    "softmax_selected": _softmax_selected,
    "ones": lambda l_BK, live_BK, spec: torch.ones_like(l_BK),
}
"""Gate name -> (selected scores l_BK, live_BK, spec) -> float32 weight g_BK."""

COMBINES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "paper": lambda x, attention, mlp, g: x + g * (attention + mlp),
    "replace": lambda x, attention, mlp, g: g * (x + attention + mlp),
    "double_residual": lambda x, attention, mlp, g: x + g * (x + attention + mlp),
    "replace_ungated": lambda x, attention, mlp, g: x + attention + mlp,
    "ffn_gated": lambda x, attention, mlp, g: x + attention + g * mlp,
}
"""Combine name -> (x_BKD, attention delta_BKD, MLP delta_BKD, g_BK1) -> what replaces x at the selected positions."""

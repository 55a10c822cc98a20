"""Routing: what is decided, and the tables of routers, gates and combine rules. `selection.py` selects the tokens.

Shape legend: B batch, S sequence, T tokens that a block is given, K slots, D model width. `_BK1` is for broadcasting.
Everything here has static shapes: k is a Python int, fixed by the spec and the sequence length before tracing, so the
graph holds no data-dependent size. Scores are computed, compared and gated in float32 whatever the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mod_models.layers import RMSNorm
from mod_models.spec import ModelSpec, RoutingSpec, Site


class Routing(NamedTuple):
    """What one routing site selected.

    Attributes:
        position_BK: int64, where the selected tokens stand in their rows: ascending, then those of empty slots.
        live_BK: bool, False in empty slots.
        score_BT: float32, the scores that decided.
        open_BT: bool, the tokens that could be selected: real ones that no part before has skipped.
        rule: `selection.RANK` or `selection.FIRST_COME`.
    """

    position_BK: Tensor
    live_BK: Tensor
    score_BT: Tensor
    open_BT: Tensor
    rule: str

    @property
    def chosen_BT(self) -> Tensor:
        """Where tokens choose for themselves: those that did, with a slot or without (overflow)."""
        return (self.score_BT > 0) & self.open_BT


class Seen(NamedTuple):
    """What a router that decides was given, x_BTD and which tokens are live_BT; its scores l_BT; how many tokens it
    selects; and the predictor that learns to decide the same, if there is one.
    """

    x_BTD: Tensor
    live_BT: Tensor
    l_BT: Tensor
    k: int
    predictor: nn.Module | None


class SeenByExperts(NamedTuple):
    """Probabilities float32 (B, T, M) of all experts, each token's first choice int64 (B, T), which tokens are live."""

    probability_BTM: Tensor
    first_BT: Tensor
    live_BT: Tensor


class Decisions:
    """What one forward pass has decided: read by the losses, and by a prompt that fills a cache.

    Attributes:
        made: site -> Routing, in the order of the decisions.
        seen: site -> what the auxiliary losses need of a router that decides.
        experts: layer -> the same of the router of token-choice experts.
        keys_values: layer -> the rotated keys and the values (B, G, T, E) of the tokens that its attention was given;
            None, and nothing is kept, unless the caller puts a dictionary there.
    """

    def __init__(self) -> None:
        self.made: dict[Site, Routing] = {}
        self.seen: dict[Site, Seen] = {}
        self.experts: dict[int, SeenByExperts] = {}
        self.keys_values: dict[int, tuple[Tensor, Tensor]] | None = None


class LinearRouter(nn.Module):
    """l = w . x (+ b): the paper's router (arXiv 2404.02258, equation 1). (B, S, D) -> float32 (B, S)."""

    def __init__(self, d_model: int, *, bias: bool) -> None:
        super().__init__()
        self.projection = nn.Linear(d_model, 1, bias=bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return linear_float32(self.projection, x_BSD).squeeze(-1)


class MlpRouter(nn.Module):
    """l = w2 . silu(W1 x + b1) + b2; also the form of the auxiliary causal predictor. (B, S, D) -> float32 (B, S)."""

    def __init__(self, d_model: int, d_hidden: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(d_model, d_hidden)
        self.projection = nn.Linear(d_hidden, 1)

    def forward(self, x_BSD: Tensor) -> Tensor:
        h_BSH = nn.functional.silu(linear_float32(self.hidden, x_BSD))
        return linear_float32(self.projection, h_BSH).squeeze(-1)


class NormMlpRouter(MlpRouter):
    """l = w2 . silu(rms_norm(W1 x + b1)) + b2. (B, S, D) -> float32 (B, S)."""

    def __init__(self, d_model: int, d_hidden: int, eps: float) -> None:
        super().__init__(d_model, d_hidden)
        self.norm = RMSNorm(d_hidden, eps)

    def forward(self, x_BSD: Tensor) -> Tensor:
        h_BSH = linear_float32(self.hidden, x_BSD)
        weight_H = self.norm.weight.to(h_BSH.dtype)
        h_BSH = nn.functional.silu(nn.functional.rms_norm(h_BSH, weight_H.shape, weight_H, self.norm.eps))
        return linear_float32(self.projection, h_BSH).squeeze(-1)


def linear_float32(linear: nn.Linear, x: Tensor) -> Tensor:
    """In float32 for 16-bit streams and under autocast, because scores that differ become equal in 8 bits of mantissa.

    A float64 model, which measures rounding error, keeps its own precision.
    """
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return linear_float32(linear, x)
    dtype = torch.promote_types(x.dtype, torch.float32)
    bias = None if linear.bias is None else linear.bias.to(dtype)
    return nn.functional.linear(x.to(dtype), linear.weight.to(dtype), bias)


ROUTERS: dict[str, Callable[[ModelSpec, RoutingSpec], nn.Module]] = {
    "linear": lambda spec, routing: LinearRouter(spec.d_model, bias=False),
    "linear_bias": lambda spec, routing: LinearRouter(spec.d_model, bias=True),
    "mlp": lambda spec, routing: MlpRouter(spec.d_model, routing.router_hidden),
    "norm_mlp": lambda spec, routing: NormMlpRouter(spec.d_model, routing.router_hidden, spec.norm_eps),
    # Without weights, and never called: the block is given noise instead of scores.
    "noise": lambda spec, routing: nn.Identity(),
}


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
    "sigmoid_affine": lambda l_BK, live_BK, spec: spec.gate_scale * _sigmoid(l_BK) + spec.gate_shift,
    "tanh_affine": lambda l_BK, live_BK, spec: spec.gate_scale * torch.tanh(l_BK) + spec.gate_shift,
    "softmax_selected": _softmax_selected,
    "ones": lambda l_BK, live_BK, spec: torch.ones_like(l_BK),
}
"""Gate name -> (selected scores l_BK, live_BK, spec) -> float32 weight g_BK."""


def _sum(*terms: Tensor | None) -> Tensor:
    """Of the terms that there are, from left to right."""
    first, *others = (term for term in terms if term is not None)
    return sum(others, start=first)


def _paper(x: Tensor, attention: Tensor | None, mlp: Tensor | None, g: Tensor) -> Tensor:
    # Summed as in a block without routing, so that with g = 1 it is that block to the last bit.
    return _sum(x, *(None if delta is None else g * delta for delta in (attention, mlp)))


def _ffn_gated(x: Tensor, attention: Tensor | None, mlp: Tensor | None, g: Tensor) -> Tensor:
    assert mlp is not None
    return _sum(x, attention, g * mlp)


COMBINES: dict[str, Callable[[Tensor, Tensor | None, Tensor | None, Tensor], Tensor]] = {
    "paper": _paper,
    "replace": lambda x, attention, mlp, g: g * _sum(x, attention, mlp),
    "double_residual": lambda x, attention, mlp, g: x + g * _sum(x, attention, mlp),
    "replace_ungated": lambda x, attention, mlp, g: _sum(x, attention, mlp),
    "ffn_gated": _ffn_gated,
    "double_residual_ffn_gated": lambda x, attention, mlp, g: x + _ffn_gated(x, attention, mlp, g),
}
"""Combine name -> (x_BKD, attention delta_BKD, MLP delta_BKD, g_BK1) -> what replaces x at the selected positions. A
delta that is not routed here is None."""

"""Records of routing decisions, and the tables of routers, gates, combine rules and adapters.

`selection.py` selects the tokens.

Shape legend: B batch, S sequence, T tokens that a block is given, K slots, D model width, P positions that have rotary
tables, E head width (E / 2 in these tables). `_BK1` is for broadcasting.
All shapes are static: k is a Python int, fixed by the spec and the sequence length before tracing, so the graph has no
data-dependent size. Scores and gates are computed in float32, even in 16-bit models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mod_models.layers import ACTIVATIONS, GatedMlp, Past, RMSNorm
from mod_models.spec import ModelSpec, RoutingSpec, Site


class Routing(NamedTuple):
    """The selection of one routing site.

    Attributes:
        position_BK: int64, positions of the selected tokens in their rows, ascending, then those in empty slots.
        live_BK: bool, False in empty slots.
        score_BT: float32, the scores that decided.
        open_BT: bool, the tokens that can be selected: the live tokens that the site is given.
        rule: `selection.RANK` or `selection.FIRST_COME`.
    """

    position_BK: Tensor
    live_BK: Tensor
    score_BT: Tensor
    open_BT: Tensor
    rule: str

    @property
    def chosen_BT(self) -> Tensor:
        """For token choice, the tokens that want to run, with a slot or without one (overflow)."""
        return (self.score_BT > 0) & self.open_BT


class RouterInputs(NamedTuple):
    """Inputs of the auxiliary losses of a router.

    Attributes:
        x_BTD: the input of the router.
        live_BT: bool, the live tokens.
        l_BT: float32, the router's scores.
        index_BT: int64, positions in the row; None if the tokens are the whole row.
        always_first: how many tokens at the start of the row run whatever their scores are; they are among the k.
        k: number of tokens that it selects.
        predictor: learns its decisions; None if there is none.
    """

    x_BTD: Tensor
    live_BT: Tensor
    l_BT: Tensor
    index_BT: Tensor | None
    always_first: int
    k: int
    predictor: nn.Module | None


class ExpertRouterInputs(NamedTuple):
    """Probabilities float32 (B, T, M) of all experts, each token's first choice int64 (B, T), and the live tokens."""

    probability_BTM: Tensor
    first_BT: Tensor
    live_BT: Tensor


class Continuation(NamedTuple):
    """The state of the rows before a pass that continues texts instead of beginning them.

    Attributes:
        position_B: int64, how many tokens each row has read.
        past: layer -> its cache.
        count_B: routing site -> int64 (B,), its slots in use.
        capacity: routing site -> all of its slots.
        cos_PE: rotary cosines of all positions.
        sin_PE: rotary sines of all positions.
    """

    position_B: Tensor
    past: Mapping[int, Past]
    count_B: Mapping[Site, Tensor]
    capacity: Mapping[Site, int]
    cos_PE: Tensor
    sin_PE: Tensor

    def free_B(self, site: Site) -> Tensor:
        """Number of slots of a site that each row has left, int64 (B,)."""
        return self.capacity[site] - self.count_B[site]

    def angles(self, first_B: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines (B, 1, count, E / 2) of the positions from `first_B` on.

        Positions beyond the tables, which only padding and empty slots have, get the last ones.
        """
        P, E = self.cos_PE.shape
        position_BT = first_B[:, None] + torch.arange(count, device=first_B.device)
        position_N = position_BT.clamp(max=P - 1).reshape(-1)
        cos_NE, sin_NE = (torch.index_select(table, 0, position_N) for table in (self.cos_PE, self.sin_PE))
        return cos_NE.reshape(-1, 1, count, E), sin_NE.reshape(-1, 1, count, E)


class Decisions:
    """The decisions of one forward pass, for the losses and for a prefill that fills a cache.

    Attributes:
        made: site -> Routing, in the order of the decisions.
        seen: site -> inputs of the auxiliary losses of its router; absent for routing that draws noise.
        experts: layer -> inputs of the balance loss of its token-choice experts.
        keys_values: layer -> the rotated keys and the values (B, G, T, E) of the tokens in its attention. None by
            default; they are only recorded if the caller sets a dictionary.
        before: what the rows hold already; None if the pass begins its texts.
        ran_BT: layer with a router -> bool (B, T), the tokens that it selected; empty unless the spec declares
            `candidates="previous"`. It is a table because torch.export forgets an attribute that is set again after a
            condition.
    """

    def __init__(self) -> None:
        self.made: dict[Site, Routing] = {}
        self.seen: dict[Site, RouterInputs] = {}
        self.experts: dict[int, ExpertRouterInputs] = {}
        self.keys_values: dict[int, tuple[Tensor, Tensor]] | None = None
        self.before: Continuation | None = None
        self.ran_BT: dict[int, Tensor] = {}

    def past(self, layer: int) -> Past | None:
        """The cache of a layer, if the pass continues texts."""
        return None if self.before is None else self.before.past[layer]


class LinearRouter(nn.Module):
    """The paper's router, l = w . x (+ b) (arXiv 2404.02258, equation 1): (B, S, D) -> float32 (B, S)."""

    def __init__(self, d_model: int, *, bias: bool) -> None:
        super().__init__()
        self.projection = nn.Linear(d_model, 1, bias=bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return linear_float32(self.projection, x_BSD).squeeze(-1)


ROUTER_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu, "relu": torch.relu, "gelu": nn.functional.gelu, "tanh": torch.tanh,
}  # fmt: skip
"""Name -> activation of a router with a hidden layer."""


class MlpRouter(nn.Module):
    """Router, or auxiliary causal predictor, l = w2 . a(W1 x + b1) + b2: (B, S, D) -> float32 (B, S)."""

    def __init__(self, d_model: int, d_hidden: int, activation: str = "silu") -> None:
        super().__init__()
        self.activation = ROUTER_ACTIVATIONS[activation]
        self.hidden = nn.Linear(d_model, d_hidden)
        self.projection = nn.Linear(d_hidden, 1)

    def forward(self, x_BSD: Tensor) -> Tensor:
        h_BSH = self.activation(linear_float32(self.hidden, x_BSD))
        return linear_float32(self.projection, h_BSH).squeeze(-1)


class NormMlpRouter(MlpRouter):
    """Router l = w2 . a(rms_norm(W1 x + b1)) + b2: (B, S, D) -> float32 (B, S)."""

    def __init__(self, d_model: int, d_hidden: int, activation: str, eps: float) -> None:
        super().__init__(d_model, d_hidden, activation)
        self.norm = RMSNorm(d_hidden, eps)

    def forward(self, x_BSD: Tensor) -> Tensor:
        h_BSH = linear_float32(self.hidden, x_BSD)
        weight_H = self.norm.weight.to(h_BSH.dtype)
        h_BSH = self.activation(nn.functional.rms_norm(h_BSH, weight_H.shape, weight_H, self.norm.eps))
        return linear_float32(self.projection, h_BSH).squeeze(-1)


def linear_float32(linear: nn.Linear, x: Tensor) -> Tensor:
    """Applies a linear layer in float32, even to a 16-bit stream or under autocast: in bfloat16 many scores would tie.

    A float64 model, which measures rounding error, computes in float64.
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
    "mlp": lambda spec, routing: MlpRouter(spec.d_model, routing.router_hidden, routing.router_activation),
    "norm_mlp": lambda spec, routing: NormMlpRouter(
        spec.d_model, routing.router_hidden, routing.router_activation, spec.norm_eps
    ),
    # It has no weights and is never called: the block uses noise as scores.
    "noise": lambda spec, routing: nn.Identity(),
}


def _softmax_selected(l_BK: Tensor, live_BK: Tensor, spec: RoutingSpec) -> Tensor:
    # The minimum is finite, because -inf would give NaN in a row without live tokens. The caller masks those gates.
    return torch.softmax(torch.where(live_BK, l_BK, torch.finfo(torch.float32).min), dim=-1)


def _sigmoid(l_BK: Tensor) -> Tensor:
    """Computes 1 / (1 + exp(-l)) without the sigmoid operator: kernels of some runtimes (ONNX Runtime on CPUs) have an
    absolute error of 1e-7, and a gate is a factor. Below l = -80 the gate is constant, so that exp stays finite.
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
    """Sum of the terms that are not None, from left to right."""
    first, *others = (term for term in terms if term is not None)
    return sum(others, start=first)


def _paper(x: Tensor, attention: Tensor | None, mlp: Tensor | None, g: Tensor) -> Tensor:
    # The order of the sum is that of a block without routing, so that with g = 1 the result is equal bit for bit.
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
"""Combine name -> (x_BKD, attention delta_BKD, MLP delta_BKD, g_BK1) -> the new x at the selected positions. The delta
of a part that is not routed here is None."""


BLOCKS_COMBINES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "paper": lambda x, y, g: x + g * (y - x),
    "replace": lambda x, y, g: g * y,
    "double_residual": lambda x, y, g: x + g * y,
    "replace_ungated": lambda x, y, g: y,
}
"""The same rules for a router that decides about several blocks: combine name -> (x_BKD, their result y_BKD, g_BK1) ->
the new x."""


class LinearAdapter(nn.Module):
    """adapter(x) = W x: (..., D) -> (..., D)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.down_proj = nn.Linear(spec.d_model, spec.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(x)
        return y


class BottleneckAdapter(nn.Module):
    """adapter(x) = W2 a(W1 x) (Houlsby et al., arXiv 1902.00751): (..., D) -> (..., D)."""

    def __init__(self, spec: ModelSpec, width: int) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[spec.activation]
        self.up_proj = nn.Linear(spec.d_model, width, bias=False)
        self.down_proj = nn.Linear(width, spec.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.activation(self.up_proj(x)))
        return y


ADAPTERS: dict[str, Callable[[ModelSpec, RoutingSpec], nn.Module]] = {
    "linear": lambda spec, routing: LinearAdapter(spec),
    "bottleneck": lambda spec, routing: BottleneckAdapter(spec, routing.adapter_hidden),
    "gated": lambda spec, routing: GatedMlp(spec, routing.adapter_hidden, bias=False),
}
"""Adapter name -> module that maps normed tokens (..., D) to the delta (..., D) of skipped tokens."""

"""Components of a block: the norm, the rotary tables, attention, the gated MLP, the tables of their variants, and a
condition around a part of a block.

Shape legend: B batch, T tokens, K tokens of them that are selected, D model width, H query heads, G key/value heads,
E head width, F a projection of all heads, P positions that have rotary tables, L slots of a cache, U = L + T keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from mod_models.declarations import ATTENTION_BIASES, RopeScaling
from mod_models.spec import ModelSpec


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich, arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        # rms_norm stays one node in ONNX (opset 23); a norm of several operations would never be fused again.
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


def _llama3(angle_E: Tensor, scaling: RopeScaling) -> Tensor:
    """Keeps the angles of fast pairs, divides those of slow pairs by the factor, and mixes both in between."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns_E = scaling.original_positions * angle_E / (2 * math.pi)
    share_E = ((turns_E - low) / (high - low)).clamp(0, 1)
    return (1 - share_E) * angle_E / scaling.factor + share_E * angle_E


ROPE_SCALINGS: dict[str, Callable[[Tensor, RopeScaling], Tensor]] = {
    "linear": lambda angle_E, scaling: angle_E / scaling.factor,
    "llama3": _llama3,
}
"""Kind -> (angle of each pair for one position, float64 (E / 2,); spec) -> the scaled angles."""


def rope_tables(spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles (Su et al., arXiv 2104.09864), each float32 (max_positions, E / 2)."""
    # The explicit device gives a model that is built under `torch.device("meta")` real tables.
    pair_E = torch.arange(0, spec.d_head, 2, dtype=torch.float64, device="cpu")
    position_P = torch.arange(spec.max_positions, dtype=torch.float64, device="cpu")
    angle_E = spec.rope_theta ** (-pair_E / spec.d_head)
    if spec.rope_scaling is not None:
        angle_E = ROPE_SCALINGS[spec.rope_scaling.kind](angle_E, spec.rope_scaling)
    angle_PE = position_P[:, None] * angle_E
    return angle_PE.cos().float(), angle_PE.sin().float()


def rotate(x_BHTE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the two halves of each head by position; cos and sin broadcast against (B, H, T, E / 2)."""
    a, b = x_BHTE.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


QK_NORMS: dict[str, Callable[[ModelSpec], nn.Module]] = {
    "none": lambda spec: nn.Identity(),
    "head": lambda spec: RMSNorm(spec.d_head, spec.norm_eps),
}
"""Name -> spec -> norm of queries or keys (B, T, heads, E) before they are rotated."""


class Past(NamedTuple):
    """The cache of one layer, and the number of its slots in use in each row.

    Attributes:
        keys_BGLE: rotated keys.
        values_BGLE: values.
        count_B: int64, how many leading slots hold a token.
        key_BG1E: in a step, the rotated key of the token itself; None if it is not computed yet.
        value_BG1E: value of the token itself; None with the key.
    """

    keys_BGLE: Tensor
    values_BGLE: Tensor
    count_B: Tensor
    key_BG1E: Tensor | None = None
    value_BG1E: Tensor | None = None


class KeysValues(NamedTuple):
    """Keys and values for an attention of K queries: those of T tokens, after those of a cache if there is one.

    Attributes:
        k_BGUE: rotated keys.
        v_BGUE: values.
        seen_BKU: bool, the keys that each query sees.
    """

    k_BGUE: Tensor
    v_BGUE: Tensor
    seen_BKU: Tensor

    @classmethod
    def of(cls, keys_BGTE: Tensor, values_BGTE: Tensor, index_BK: Tensor, past: Past | None) -> KeysValues:
        """Returns what the queries of the tokens with these numbers see: the cache, and the T keys up to their own."""
        number_T = torch.arange(keys_BGTE.shape[2], device=keys_BGTE.device)
        own_BKT = number_T <= index_BK[..., None]
        if past is None:
            return cls(keys_BGTE, values_BGTE, own_BKT)
        slot_L = torch.arange(past.keys_BGLE.shape[2], device=keys_BGTE.device)
        used_BKL = (slot_L < past.count_B[:, None])[:, None].expand(-1, index_BK.shape[1], -1)
        return cls(
            torch.cat((past.keys_BGLE, keys_BGTE), 2),
            torch.cat((past.values_BGLE, values_BGTE), 2),
            torch.cat((used_BKL, own_BKT), 2),
        )


class Attention(nn.Module):
    """Causal grouped-query attention (Ainslie et al., arXiv 2305.13245) among T tokens."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.d_head = spec.d_head
        # ONNX export refuses grouped attention with one query head in each group.
        self.grouped = spec.n_heads > spec.n_kv_heads
        biased = ATTENTION_BIASES[spec.attention_bias]
        self.q_proj = nn.Linear(spec.d_model, spec.n_heads * spec.d_head, bias="q" in biased)
        self.k_proj = nn.Linear(spec.d_model, spec.n_kv_heads * spec.d_head, bias="k" in biased)
        self.v_proj = nn.Linear(spec.d_model, spec.n_kv_heads * spec.d_head, bias="v" in biased)
        self.o_proj = nn.Linear(spec.n_heads * spec.d_head, spec.d_model, bias="o" in biased)
        self.q_norm, self.k_norm = QK_NORMS[spec.qk_norm](spec), QK_NORMS[spec.qk_norm](spec)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the delta of attention (B, T, D), and the rotated keys and the values, each (B, G, T, E)."""
        q_BHTE = self.queries(x_BTD, cos, sin)
        k_BGTE, v_BGTE = self.keys_values(x_BTD, cos, sin)
        if _learns_in_short_rows(q_BHTE):
            y_BHTE = _attention_by_products(q_BHTE, k_BGTE, v_BGTE)
        else:
            y_BHTE = functional.scaled_dot_product_attention(
                q_BHTE, k_BGTE, v_BGTE, is_causal=True, enable_gqa=self.grouped
            )
        return self.o_proj(y_BHTE.transpose(1, 2).flatten(2)), k_BGTE, v_BGTE

    def among(self, x_BKD: Tensor, cos: Tensor, sin: Tensor, seen: KeysValues) -> Tensor:
        """Returns the delta of attention (B, K, D) of K tokens that see some of the given keys."""
        q_BHKE = self.queries(x_BKD, cos, sin)
        y_BHKE = functional.scaled_dot_product_attention(
            q_BHKE, seen.k_BGUE, seen.v_BGUE, attn_mask=seen.seen_BKU[:, None], enable_gqa=self.grouped
        )
        delta_BKD: Tensor = self.o_proj(y_BHKE.transpose(1, 2).flatten(2))
        return delta_BKD

    def queries(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns rotated queries (B, H, T, E)."""
        q_BTHE = self.q_norm(self._heads(self.q_proj(x_BTD)))
        return rotate(q_BTHE.transpose(1, 2), cos, sin)

    def keys_values(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Returns rotated keys and values, each (B, G, T, E)."""
        k_BTGE = self.k_norm(self._heads(self.k_proj(x_BTD)))
        v_BTGE = self._heads(self.v_proj(x_BTD))
        return rotate(k_BTGE.transpose(1, 2), cos, sin), v_BTGE.transpose(1, 2)

    def _heads(self, x_BTF: Tensor) -> Tensor:
        """Splits a projection (B, T, heads * E) into (B, T, heads, E)."""
        B, T, _ = x_BTF.shape
        return x_BTF.view(B, T, -1, self.d_head)


SHORT_ROW = 512
"""Number of tokens up to which batched products are faster than PyTorch's fused attention in a training step with
bfloat16 on a CPU: 1.2 to 3 times as fast at 128 to 512 tokens, slower at 1,024, where memory would grow as well.
"""


def _learns_in_short_rows(q_BHTE: Tensor) -> bool:
    if torch.compiler.is_compiling() or not q_BHTE.requires_grad or q_BHTE.shape[2] > SHORT_ROW:
        return False
    return q_BHTE.device.type == "cpu" and torch.is_autocast_enabled("cpu")


def _attention_by_products(q_BHTE: Tensor, k_BGTE: Tensor, v_BGTE: Tensor) -> Tensor:
    """Returns causal attention (B, H, T, E) from two batched products and a softmax, in the dtype of autocast."""
    B, H, T, E = q_BHTE.shape
    dtype = torch.get_autocast_dtype("cpu")
    keys_NTE, values_NTE = (
        tensor_BGTE.to(dtype).repeat_interleave(H // tensor_BGTE.shape[1], 1).flatten(0, 1)
        for tensor_BGTE in (k_BGTE, v_BGTE)
    )
    queries_NTE = (q_BHTE * E**-0.5).to(dtype).flatten(0, 1)
    # Autocast would copy the scores to float32 for the softmax, which sums in float32 anyway.
    with torch.autocast("cpu", enabled=False):
        later_TT = queries_NTE.new_full((T, T), float("-inf")).triu(1)
        score_NTT = torch.baddbmm(later_TT, queries_NTE, keys_NTE.transpose(1, 2))
        return torch.bmm(score_NTT.softmax(-1), values_NTE).view(B, H, T, E)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}
"""Name -> activation of the gate of an MLP; `gelu` uses the error function, `gelu_tanh` its tanh approximation."""


class GatedMlp(nn.Module):
    """down(activation(gate(x)) * up(x)) (Shazeer, arXiv 2002.05202), `width` wide inside."""

    def __init__(self, spec: ModelSpec, width: int, *, bias: bool) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[spec.activation]
        self.gate_proj = nn.Linear(spec.d_model, width, bias=bias)
        self.up_proj = nn.Linear(spec.d_model, width, bias=bias)
        self.down_proj = nn.Linear(width, spec.d_model, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD: Tensor = self.down_proj(self.hidden(x_BTD))
        return y_BTD

    def hidden(self, x_BTD: Tensor) -> Tensor:
        """Returns the activations of its neurons, activation(gate(x)) * up(x): (..., width)."""
        y: Tensor = self.activation(self.gate_proj(x_BTD)) * self.up_proj(x_BTD)
        return y


Branch = Callable[..., tuple[Tensor, ...]]


def either(mark: Tensor, run: Branch, otherwise: Branch, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Returns `run(*inputs)` if any row is marked, else `otherwise(*inputs)`: a condition on data in a static graph.

    A graph holds both branches (ONNX If) and executes one. In eager mode only that one is called. Both must return
    tensors of the same shapes, dtypes and strides, and must not return their inputs.
    """
    any_row = mark.reshape(()) if mark.numel() == 1 else mark.any()
    if torch.compiler.is_compiling():
        outputs: tuple[Tensor, ...] = torch.cond(any_row, run, otherwise, inputs)
        return outputs
    return run(*inputs) if bool(any_row) else otherwise(*inputs)

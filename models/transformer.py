"""A decoder-only transformer in the Llama manner, dense or Mixture-of-Depths, from top to bottom.

Shape legend
    B batch          S sequence        K tokens selected by a routed block
    D model width    H query heads     G key/value heads (H is a multiple of G)     E head width (E / 2 in RoPE tables)
    R = B * S rows of the flattened stream      N = B * K selected rows
    T tokens inside a block: S in a dense block, K in a routed one                   V vocabulary
    P positions that have RoPE tables                F = H * E or G * E, a projection of all heads

A block sees T tokens and does not know whether they are the whole sequence. A routed block chooses K of S tokens,
runs the same code on them with causal attention among themselves, and writes the result back; the others pass by on
the residual stream. Rows are padded on the right, so causal attention alone keeps padding away from real tokens, and
padding that fills surplus slots sits behind every real token of its row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from mod_models.routing import COMBINES, GATES, ROUTERS, MlpRouter, Routing, select_topk
from mod_models.spec import ModelSpec, RoutingSpec

__all__ = ["OUTPUTS", "Transformer"]


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich, arXiv 1910.07467)."""

    def __init__(self, d_model: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x_BTD: Tensor) -> Tensor:
        # rms_norm stays one node in ONNX (opset 23); a norm written out by hand is never fused again.
        return functional.rms_norm(x_BTD, self.weight.shape, self.weight, self.eps)


def rope_tables(spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """The cosine and sine of the rotary angles (Su et al., arXiv 2104.09864), each float32 (max_positions, E / 2)."""
    # The device is named so that a model built under `torch.device("meta")` still has real tables.
    pair_E = torch.arange(0, spec.d_head, 2, dtype=torch.float64, device="cpu")
    position_P = torch.arange(spec.max_positions, dtype=torch.float64, device="cpu")
    angle_PE = position_P[:, None] * spec.rope_theta ** (-pair_E / spec.d_head)
    return angle_PE.cos().float(), angle_PE.sin().float()


def rotate(x_BHTE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the two halves of each head by position; cos and sin broadcast against (B, H, T, E / 2)."""
    a, b = x_BHTE.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Causal grouped-query attention (Ainslie et al., arXiv 2305.13245) among the T tokens it is given."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.d_head = spec.d_head
        # ONNX export refuses grouped attention whose groups hold one head each.
        self.grouped = spec.n_heads > spec.n_kv_heads
        self.q_proj = nn.Linear(spec.d_model, spec.n_heads * spec.d_head, bias=False)
        self.k_proj = nn.Linear(spec.d_model, spec.n_kv_heads * spec.d_head, bias=False)
        self.v_proj = nn.Linear(spec.d_model, spec.n_kv_heads * spec.d_head, bias=False)
        self.o_proj = nn.Linear(spec.n_heads * spec.d_head, spec.d_model, bias=False)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q_BHTE = rotate(self._heads(self.q_proj(x_BTD)), cos, sin)
        k_BGTE = rotate(self._heads(self.k_proj(x_BTD)), cos, sin)
        v_BGTE = self._heads(self.v_proj(x_BTD))
        y_BHTE = functional.scaled_dot_product_attention(
            q_BHTE, k_BGTE, v_BGTE, is_causal=True, enable_gqa=self.grouped
        )
        y_BTD: Tensor = self.o_proj(y_BHTE.transpose(1, 2).flatten(2))
        return y_BTD

    def _heads(self, x_BTF: Tensor) -> Tensor:
        B, T, _ = x_BTF.shape
        return x_BTF.view(B, T, -1, self.d_head).transpose(1, 2)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer, arXiv 2002.05202)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.d_model, spec.d_ff, bias=False)
        self.up_proj = nn.Linear(spec.d_model, spec.d_ff, bias=False)
        self.down_proj = nn.Linear(spec.d_ff, spec.d_model, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD: Tensor = self.down_proj(functional.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
        return y_BTD


class Block(nn.Module):
    """A pre-norm block. `deltas` gives what attention and MLP add, so that a routed block can gate them."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.d_model, spec.norm_eps)
        self.attention = Attention(spec)
        self.mlp_norm = RMSNorm(spec.d_model, spec.norm_eps)
        self.mlp = SwiGLU(spec)

    def deltas(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        attention_BTD = self.attention(self.attention_norm(x_BTD), cos, sin)
        return attention_BTD, self.mlp(self.mlp_norm(x_BTD + attention_BTD))

    def forward(self, x_BSD: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
        attention_BSD, mlp_BSD = self.deltas(x_BSD, cos_SE, sin_SE)
        return x_BSD + attention_BSD + mlp_BSD


class RoutedBlock(Block):
    """A Mixture-of-Depths block (Raposo et al., arXiv 2404.02258, equation 1): k of S tokens run, the rest pass by."""

    def __init__(self, spec: ModelSpec, routing: RoutingSpec) -> None:
        super().__init__(spec)
        self.routing = routing
        self.router = ROUTERS[routing.router](spec.d_model, routing)
        # Trained beside the model on the router's decisions, and no part of this forward pass: top-k looks at future
        # tokens, the predictor does not, so it is what decides when tokens come one at a time.
        self.predictor = MlpRouter(spec.d_model, routing.predictor_hidden) if routing.predictor_hidden else None

    def score(self, x_BSD: Tensor) -> Tensor:
        """Float32 router scores l_BS."""
        score_BS: Tensor = self.router(self.attention_norm(x_BSD) if self.routing.router_input == "normed" else x_BSD)
        return score_BS

    def route(
        self, x_BSD: Tensor, real_BS: Tensor, k: int, cos_SE: Tensor, sin_SE: Tensor, forced_BK: Tensor | None = None
    ) -> tuple[Tensor, Routing]:
        """Runs k tokens of each row; `forced_BK` (ascending, unique in a row) replaces the router's choice."""
        B, S, D = x_BSD.shape
        score_BS = self.score(x_BSD)
        if forced_BK is None:
            index_BK, live_BK = select_topk(score_BS, real_BS, k)
        else:
            index_BK, live_BK = forced_BK, torch.gather(real_BS, 1, forced_BK)

        # Rows of the flattened (B * S, D) stream: one plain Gather and one plain Scatter with unique rows, the cheapest
        # form in every runtime and the only one that TensorRT takes without a plugin.
        row_N = (index_BK + S * torch.arange(B, device=x_BSD.device)[:, None]).reshape(-1)
        flat_RD = x_BSD.reshape(B * S, D)
        x_BKD = torch.index_select(flat_RD, 0, row_N).reshape(B, k, D)

        if self.routing.positions == "original":
            position_N = index_BK.reshape(-1)
            cos = torch.index_select(cos_SE, 0, position_N).reshape(B, 1, k, -1)
            sin = torch.index_select(sin_SE, 0, position_N).reshape(B, 1, k, -1)
        else:
            cos, sin = cos_SE[:k], sin_SE[:k]
        attention_BKD, mlp_BKD = self.deltas(x_BKD, cos, sin)

        l_BK = torch.gather(score_BS, 1, index_BK)
        g_BK1 = GATES[self.routing.gate](l_BK, live_BK, self.routing)[..., None].to(x_BSD.dtype)
        new_BKD = COMBINES[self.routing.combine](x_BKD, attention_BKD, mlp_BKD, g_BK1)
        new_BKD = torch.where(live_BK[..., None], new_BKD, x_BKD)
        y_RD = flat_RD.index_put((row_N,), new_BKD.reshape(-1, D))
        return y_RD.reshape(B, S, D), Routing(index_BK, live_BK, score_BS)


class Transformer(nn.Module):
    """The whole decoder; `init_weights` gives the weights that a training run starts from."""

    def __init__(self, spec: ModelSpec, outputs: str = "logits") -> None:
        """`outputs` is one of OUTPUTS: what `forward` returns first."""
        super().__init__()
        self.spec = spec
        self.outputs = outputs
        routed = set(spec.routed_layers)
        self.embedding = nn.Embedding(spec.vocab_size, spec.d_model)
        self.layers = nn.ModuleList(
            RoutedBlock(spec, spec.routing) if spec.routing and i in routed else Block(spec)
            for i in range(spec.n_layers)
        )
        self.norm = RMSNorm(spec.d_model, spec.norm_eps)
        self.head = None if spec.tie_embeddings else nn.Linear(spec.d_model, spec.vocab_size, bias=False)
        cos_PE, sin_PE = rope_tables(spec)
        self.register_buffer("rope_cos", cos_PE, persistent=False)
        self.register_buffer("rope_sin", sin_PE, persistent=False)
        self.rope_cos: Tensor
        self.rope_sin: Tensor

    def init_weights(self, generator: torch.Generator) -> None:
        """Normal(0, 0.02), output projections scaled by depth (GPT-2), the router small so that gates start near 0."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
                continue
            output = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.02 / (2 * self.spec.n_layers) ** 0.5 if output else 0.02
            nn.init.normal_(parameter, std=std, generator=generator)

    def trace(
        self, ids_BS: Tensor, lengths_B: Tensor, forced: dict[int, Tensor] | None = None
    ) -> tuple[Tensor, dict[int, Routing]]:
        """Logits and what every routed block decided.

        Args:
            ids_BS: int64 token ids.
            lengths_B: int64, how many leading tokens of each row are real.
            forced: for some routed layers, positions int64 (B, k) that replace the router's choice.

        Returns:
            logits_BSV in the model's dtype (rows past `lengths_B` are meaningless), and layer -> Routing. A layer
            whose k is 0 passes everything by and is absent.
        """
        hidden_BSD, decided = self.hidden(ids_BS, lengths_B, forced)
        return self.logits(hidden_BSD), decided

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (..., D) after the final norm to logits (..., V)."""
        return functional.linear(hidden, self.embedding.weight if self.head is None else self.head.weight)

    def hidden(
        self, ids_BS: Tensor, lengths_B: Tensor, forced: dict[int, Tensor] | None = None
    ) -> tuple[Tensor, dict[int, Routing]]:
        """Like `trace`, up to and with the final norm: hidden_BSD."""
        x_BSD, decided = self.stream(ids_BS, lengths_B, forced)
        return self.norm(x_BSD), decided

    def stream(
        self, ids_BS: Tensor, lengths_B: Tensor, forced: dict[int, Tensor] | None = None
    ) -> tuple[Tensor, dict[int, Routing]]:
        """Like `trace`, up to the final norm and without it: the residual stream x_BSD."""
        S = ids_BS.shape[1]
        real_BS = torch.arange(S, device=ids_BS.device) < lengths_B[:, None]
        cos_SE, sin_SE = self.rope_cos[:S], self.rope_sin[:S]
        k_by_layer = self.spec.k_by_layer(S)
        decided: dict[int, Routing] = {}
        x_BSD = self.embedding(ids_BS)
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, RoutedBlock):
                x_BSD = layer(x_BSD, cos_SE, sin_SE)
            elif k_by_layer[i] > 0:
                forced_BK = forced.get(i) if forced else None
                x_BSD, decided[i] = layer.route(x_BSD, real_BS, k_by_layer[i], cos_SE, sin_SE, forced_BK)
        return x_BSD, decided

    def forward(self, ids_BS: Tensor, lengths_B: Tensor) -> tuple[Tensor, ...]:
        """What is exported: what `outputs` says, then index_BK of every routed layer in order."""
        x_BSD, decided = self.stream(ids_BS, lengths_B)
        return OUTPUTS[self.outputs](self, x_BSD, lengths_B), *(decided[layer].index_BK for layer in decided)


def _last_tokens(x_BSD: Tensor, lengths_B: Tensor) -> Tensor:
    """Each row's last real token, (B, D): one plain Gather of rows, as in a routed block."""
    B, S, D = x_BSD.shape
    row_B = S * torch.arange(B, device=x_BSD.device) + lengths_B - 1
    return torch.index_select(x_BSD.reshape(B * S, D), 0, row_B)


OUTPUTS: dict[str, Callable[[Transformer, Tensor, Tensor], Tensor]] = {
    "logits": lambda model, x_BSD, lengths_B: model.logits(model.norm(x_BSD)),
    "last": lambda model, x_BSD, lengths_B: model.logits(model.norm(_last_tokens(x_BSD, lengths_B))),
    "none": lambda model, x_BSD, lengths_B: model.norm(x_BSD),
}
"""Name -> (model, stream after the last block (B, S, D), lengths (B,)) -> logits (B, S, V) of every token, logits
(B, V) of each row's last real token, or hidden states (B, S, D)."""

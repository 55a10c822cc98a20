"""A decoder-only transformer of the Llama type: dense, with Mixture-of-Depths routing, or with experts.

Shape legend
    B batch          S sequence        K tokens selected by a routed block
    D model width    G key/value heads     E head width (E / 2 in RoPE tables)     P positions that have RoPE tables
    N = B * K selected rows            V vocabulary
    T tokens inside a block: S in a dense block, K in a routed one

A block gets T tokens (`selection.Tokens`), the whole sequence or a part of it. A routed block selects K of them, runs
the same code on them, and writes the result back; skipped tokens stay on the residual stream, or get another value that
the spec declares. Selected tokens see each other, or the keys and values of all T tokens. Rows are padded on the right,
and empty slots come after every selected token of their row, so causal attention is enough to hide both from real
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from mod_models.experts import Experts
from mod_models.fixed_capacity import select_chosen
from mod_models.layers import Attention, GatedMlp, KeysValues, Past, RMSNorm, either, rope_tables
from mod_models.routing import (
    ADAPTERS,
    BLOCKS_COMBINES,
    COMBINES,
    GATES,
    ROUTERS,
    Decisions,
    MlpRouter,
    RouterInputs,
)
from mod_models.selection import (
    FIRST_COME,
    RANK,
    Rule,
    Tokens,
    always_first,
    noise_of_tokens,
    noise_table,
    select_topk,
    selected_at,
)
from mod_models.spec import ModelSpec, RoutingSpec, Site

Noise = Callable[[Site], Tensor]
"""Site -> Gaussian noise for every position, float32 (B, S)."""


class Block(nn.Module):
    """A pre-norm block, with an MLP or with experts."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.attention_norm = RMSNorm(spec.d_model, spec.norm_eps)
        self.attention = Attention(spec)
        self.mlp_norm = RMSNorm(spec.d_model, spec.norm_eps)
        if spec.experts is not None and layer in spec.expert_layers:
            self.experts = Experts(spec, layer, spec.experts)
        else:
            self.mlp = GatedMlp(spec, spec.d_ff, bias=spec.mlp_bias)

    def attended(self, tokens: Tokens, decisions: Decisions, seen: KeysValues | None = None) -> Tensor:
        """Returns the delta of attention, (B, T, D). Tokens see each other, or the tokens of `seen`."""
        normed_BTD = self.attention_norm(tokens.x_BTD)
        if seen is None and decisions.before is not None:
            B, T, _ = normed_BTD.shape
            number_BT = torch.arange(T, device=normed_BTD.device).expand(B, T)
            seen = self._keys_values(normed_BTD, tokens, decisions, number_BT)
        if seen is not None:
            return self.attention.among(normed_BTD, tokens.cos, tokens.sin, seen)
        delta_BTD: Tensor
        delta_BTD, k_BGTE, v_BGTE = self.attention(normed_BTD, tokens.cos, tokens.sin)
        if decisions.keys_values is not None:
            decisions.keys_values[self.layer] = k_BGTE, v_BGTE
        return delta_BTD

    def transformed(self, tokens: Tokens, decisions: Decisions) -> Tensor:
        """Returns the delta of the MLP or of the experts, (B, T, D)."""
        x_BTD = self.mlp_norm(tokens.x_BTD)
        delta_BTD: Tensor = self.mlp(x_BTD) if hasattr(self, "mlp") else self.experts(x_BTD, tokens, decisions)
        return delta_BTD

    def deltas(self, tokens: Tokens, decisions: Decisions, seen: KeysValues | None = None) -> tuple[Tensor, Tensor]:
        """Returns the deltas of attention and of the MLP separately, so that a routed block can gate them."""
        attention_BTD = self.attended(tokens, decisions, seen)
        after = tokens._replace(x_BTD=tokens.x_BTD + attention_BTD)
        return attention_BTD, self.transformed(after, decisions)

    def forward(self, tokens: Tokens, decisions: Decisions) -> Tensor:
        """Returns the stream after the block, (B, T, D)."""
        attention_BTD, mlp_BTD = self.deltas(tokens, decisions)
        return tokens.x_BTD + attention_BTD + mlp_BTD

    def last(self, tokens: Tokens, decisions: Decisions, index_B1: Tensor, k: int, noise: Noise | None) -> Tensor:
        """Returns the stream after the block, (B, 1, D), of one token of each row, whose number is `index_B1`.

        Other tokens have keys and values, but no queries and no MLP. `k` and `noise` are for a routed block. A block
        with experts has no such form, because a token's experts depend on the tokens before it.
        """
        token = tokens.at(tokens.rows(index_B1), index_B1, torch.ones_like(index_B1, dtype=torch.bool), "original")
        attention_B1D, mlp_B1D = self.deltas(token, decisions, self.keys_values(tokens, decisions, index_B1))
        return token.x_BTD + attention_B1D + mlp_B1D

    def keys_values(self, tokens: Tokens, decisions: Decisions, index_BK: Tensor) -> KeysValues:
        """Records the keys and values of all T tokens. Returns what queries of the tokens with these numbers see."""
        return self._keys_values(self.attention_norm(tokens.x_BTD), tokens, decisions, index_BK)

    def _keys_values(self, normed_BTD: Tensor, tokens: Tokens, decisions: Decisions, index_BK: Tensor) -> KeysValues:
        pair = self.attention.keys_values(normed_BTD, tokens.cos, tokens.sin)
        if decisions.keys_values is not None:
            decisions.keys_values[self.layer] = pair
        return KeysValues.of(*pair, index_BK, decisions.past(self.layer))


class Chosen(NamedTuple):
    """The selected tokens of a routed part.

    Attributes:
        index_BK: int64, their numbers among the T tokens.
        live_BK: bool, False in empty slots.
        row_N: int64, their rows in the flattened stream.
        g_BK1: their gates.
        g_BT1: the gates of all T tokens; None if a skipped token needs none.
        seen: keys and values of all T tokens; None if the selected tokens only see each other, or the part has no
            attention.
        after: the blocks behind this one that they run too, because its router decides about several blocks.
    """

    index_BK: Tensor
    live_BK: Tensor
    row_N: Tensor
    g_BK1: Tensor
    g_BT1: Tensor | None
    seen: KeysValues | None = None
    after: Sequence[Block] = ()


class RoutedBlock(Block):
    """A Mixture-of-Depths block (Raposo et al., arXiv 2404.02258, equation 1): k of T tokens run.

    Attributes:
        narrow: a smaller number of slots to compute instead of k if all tokens that run fit into it; 0 to compute all
            k. The result does not depend on it. It is not for a block with experts, because their number of slots
            depends on the number of tokens.
        previous: the layer of the router from whose tokens this one selects; None if it selects from all tokens.
    """

    def __init__(self, spec: ModelSpec, layer: int, routing: RoutingSpec) -> None:
        super().__init__(spec, layer)
        self.routing = routing
        before = [other for other in spec.routed_layers if other < layer]
        self.previous = before[-1] if before and routing.candidates == "previous" else None
        self.narrow = 0
        self.router = ROUTERS[routing.router](spec, routing)
        self.mlp_router = ROUTERS[routing.router](spec, routing) if routing.parts == "separate" else None
        # The predictor is trained beside the model on the router's decisions. Unlike top-k, it needs no later tokens.
        # So it decides for `selection="predictor"`, and in generation.
        width = routing.predictor_hidden
        self.predictor = MlpRouter(spec.d_model, width) if width else None
        self.mlp_predictor = MlpRouter(spec.d_model, width) if width and routing.parts == "separate" else None
        self.adapter = ADAPTERS[routing.adapter](spec, routing) if routing.skipped_result == "adapter" else None

    def forward(
        self,
        tokens: Tokens,
        decisions: Decisions,
        k: int = 0,
        noise: Noise | None = None,
        after: Sequence[Block] = (),
    ) -> Tensor:
        """Returns the stream after the block and those `after` it, about which its router decides too, (B, T, D).

        k = 0 selects no token. Routing that draws needs `noise`.
        """
        part, x_BTD = self.routing.parts, tokens.x_BTD
        if part == "block":
            return self._routed(tokens, decisions, k, noise, part, x_BTD, after)
        attended_BTD = (
            x_BTD + self.attended(tokens, decisions)
            if part == "mlp"
            else self._routed(tokens, decisions, k, noise, "attention", x_BTD)
        )
        attended = tokens._replace(x_BTD=attended_BTD)
        if part == "attention":
            return attended_BTD + self.transformed(attended, decisions)
        return self._routed(attended, decisions, k, noise, "mlp", x_BTD)

    def site(self, part: str) -> Site:
        """The routing site of a part: the layer's number, unless the layer has two routed parts."""
        return f"{self.layer}.{part}" if self.routing.parts == "separate" else self.layer

    def _routed(
        self,
        tokens: Tokens,
        decisions: Decisions,
        k: int,
        noise: Noise | None,
        part: str,
        block_BTD: Tensor,
        after: Sequence[Block] = (),
    ) -> Tensor:
        """Returns the stream after a routed part; `block_BTD` is the stream that the block got."""
        if k == 0:
            return self._all_skipped(tokens, noise, part, block_BTD)
        chosen = self.choose(tokens, decisions, k, noise, part, block_BTD)._replace(after=after)
        if part != "mlp" and self.routing.skipped_keys_values == "kept":
            chosen = chosen._replace(seen=self.keys_values(tokens, decisions, chosen.index_BK))
        inner = self._selected(tokens, decisions, chosen, part)
        left_BTD, left_BKD = tokens.x_BTD, inner.x_BTD
        if self.routing.skipped_result != "identity":
            B, T, D = left_BTD.shape
            left_BTD = self.left(left_BTD, chosen.g_BT1)
            left_BKD = torch.index_select(left_BTD.reshape(B * T, D), 0, chosen.row_N).reshape(B, k, D)
        run = self.run_few if 0 < self.narrow < k else self.run
        return tokens._replace(x_BTD=left_BTD).put(chosen.row_N, run(inner, decisions, chosen, part, left_BKD))

    def last(self, tokens: Tokens, decisions: Decisions, index_B1: Tensor, k: int, noise: Noise | None) -> Tensor:
        part, x_BTD = self.routing.parts, tokens.x_BTD
        if part == "block":
            return self._last(tokens, decisions, k, noise, part, x_BTD, index_B1)
        if part == "attention":
            attended_B1D = self._last(tokens, decisions, k, noise, part, x_BTD, index_B1)
            return attended_B1D + self.transformed(tokens._replace(x_BTD=attended_B1D), decisions)
        # The MLP's router scores every token, so attention has to finish for all of them first.
        attended_BTD = (
            x_BTD + self.attended(tokens, decisions)
            if part == "mlp"
            else self._routed(tokens, decisions, k, noise, "attention", x_BTD)
        )
        return self._last(tokens._replace(x_BTD=attended_BTD), decisions, k, noise, "mlp", x_BTD, index_B1)

    def _last(
        self,
        tokens: Tokens,
        decisions: Decisions,
        k: int,
        noise: Noise | None,
        part: str,
        block_BTD: Tensor,
        index_B1: Tensor,
    ) -> Tensor:
        """Like `_routed`, for one token of each row, (B, 1, D). No selected token may come after it."""
        B, T, D = tokens.x_BTD.shape
        row_B = tokens.rows(index_B1)
        if k == 0:
            left_BTD = self._all_skipped(tokens, noise, part, block_BTD)
            return torch.index_select(left_BTD.reshape(B * T, D), 0, row_B)[:, None]
        chosen = self.choose(tokens, decisions, k, noise, part, block_BTD)
        # Live slots come first, so if the token runs, it is in the last of them.
        slot_B1 = chosen.live_BK.sum(1, keepdim=True).clamp(min=1) - 1
        ran_B1 = (torch.gather(chosen.index_BK, 1, slot_B1) == index_B1) & torch.gather(chosen.live_BK, 1, slot_B1)
        token = tokens.at(row_B, index_B1, ran_B1, "original")
        seen = None
        if part != "mlp" and self.routing.skipped_keys_values == "kept":
            seen = self.keys_values(tokens, decisions, index_B1)
        elif part != "mlp":
            inner = self._selected(tokens, decisions, chosen, part)
            seen = self.keys_values(inner, decisions, slot_B1)
            if self.routing.positions == "compact":
                cos, sin = self._compact_angles(tokens, decisions, part, slot_B1[:, 0])
                token = token._replace(cos=cos, sin=sin)
        g_B11 = torch.gather(chosen.g_BK1, 1, slot_B1[..., None])
        g_left = None if chosen.g_BT1 is None else torch.gather(chosen.g_BT1, 1, index_B1[..., None])
        few = Chosen(index_B1, ran_B1, row_B, g_B11, None, seen)
        return self.run(token, decisions, few, part, self.left(token.x_BTD, g_left))

    def _selected(self, tokens: Tokens, decisions: Decisions, chosen: Chosen, part: str) -> Tokens:
        """Returns the selected tokens, with the angles of their positions."""
        before, positions = decisions.before, self.routing.positions
        if before is None or positions != "compact":
            return tokens.at(chosen.row_N, chosen.index_BK, chosen.live_BK, positions)
        inner = tokens.at(chosen.row_N, chosen.index_BK, chosen.live_BK, "original")
        cos, sin = before.angles(before.count_B[self.site(part)], chosen.index_BK.shape[1])
        return inner._replace(cos=cos, sin=sin)

    def _compact_angles(self, tokens: Tokens, decisions: Decisions, part: str, slot_B: Tensor) -> tuple[Tensor, ...]:
        """Returns cosines and sines (B, 1, 1, E / 2) of the token in one slot of each row."""
        before = decisions.before
        if before is not None:
            return before.angles(before.count_B[self.site(part)] + slot_B, 1)
        return tuple(torch.index_select(table, 0, slot_B)[:, None, None] for table in (tokens.cos, tokens.sin))

    def _all_skipped(self, tokens: Tokens, noise: Noise | None, part: str, block_BTD: Tensor) -> Tensor:
        """Returns the stream after a routed part that has no slot."""
        if not self.routing.gates_skipped:
            return self.left(tokens.x_BTD, None)
        routed_BTD, router, _ = self.scorers(tokens.x_BTD, block_BTD, part)
        l_BT = noise(self.site(part)) if noise is not None and self.routing.router == "noise" else router(routed_BTD)
        return self.left(tokens.x_BTD, self._gate(l_BT, tokens.live_BT, tokens.x_BTD.dtype))

    def left(self, x_BTD: Tensor, g_BT1: Tensor | None, normed_BTD: Tensor | None = None) -> Tensor:
        """Returns the values (B, T, D) of tokens that a routed part skips. Their gates are None if they need none, and
        `normed_BTD` is what `mlp_norm` makes of them, if that is known.
        """
        if self.routing.skipped_result == "scaled":
            assert g_BT1 is not None
            return g_BT1 * x_BTD
        if self.adapter is None:
            return x_BTD
        delta_BTD: Tensor = self.adapter(self.mlp_norm(x_BTD) if normed_BTD is None else normed_BTD)
        return x_BTD + (delta_BTD if g_BT1 is None else (1 - g_BT1) * delta_BTD)

    def narrowed(self, tokens: Tokens, decisions: Decisions, k: int) -> tuple[Tokens, Tensor]:
        """Returns the k tokens that stay, after this block, and their rows in the given stream. Other tokens exit."""
        chosen = self.choose(tokens, decisions, k, None, "block", tokens.x_BTD)
        inner = tokens.at(chosen.row_N, chosen.index_BK, chosen.live_BK, self.routing.positions)
        return inner._replace(x_BTD=self.run(inner, decisions, chosen, "block", inner.x_BTD)), chosen.row_N

    def scorers(self, x_BTD: Tensor, block_BTD: Tensor, part: str) -> tuple[Tensor, nn.Module, nn.Module | None]:
        """Returns the input (B, T, D) of a routed part's router and predictor, the router and the predictor.

        `x_BTD` is the stream that the part got, and `block_BTD` the stream that the block got.
        """
        second = part == "mlp" and self.mlp_router is not None
        router, predictor = (self.mlp_router, self.mlp_predictor) if second else (self.router, self.predictor)
        norm = self.mlp_norm if part == "mlp" else self.attention_norm
        if self.routing.router_stream == "block":
            x_BTD, norm = block_BTD, self.attention_norm
        assert router is not None
        return norm(x_BTD) if self.routing.router_input == "normed" else x_BTD, router, predictor

    def choose(
        self, tokens: Tokens, decisions: Decisions, k: int, noise: Noise | None, part: str, block_BTD: Tensor
    ) -> Chosen:
        """Scores the tokens and selects k of each row."""
        routed_BTD, router, predictor = self.scorers(tokens.x_BTD, block_BTD, part)
        site, declared = self.site(part), self.routing.selection
        drawn_BT = noise(site) if noise is not None else None
        l_BT: Tensor = drawn_BT if drawn_BT is not None and self.routing.router == "noise" else router(routed_BTD)
        score_BT = l_BT
        rule: Rule = FIRST_COME if declared in ("threshold", "predictor") else RANK
        if declared == "predictor" and self.training:
            # In training top-k selects, because the predictor learns its selection (paper, section 3.5).
            rule = RANK
        elif declared == "predictor":
            assert predictor is not None
            score_BT = predictor(routed_BTD)
        elif declared == "random":
            assert drawn_BT is not None
            score_BT = drawn_BT
        score_BT = always_first(score_BT, tokens.index_BT, self.routing.always_first)
        open_BT = tokens.live_BT if self.previous is None else decisions.ran_BT[self.previous]
        if rule == RANK:
            # If fewer than k tokens are open, all real tokens are, because the router before has at least k slots. So
            # the empty slots hold padding here too, which comes last.
            selection = select_topk(score_BT, open_BT, k)
        else:
            index_BK, live_BK = select_chosen((score_BT > 0) & open_BT, k)
            selection = index_BK, _with_room(live_BK, decisions, site)
        candidates = tokens._replace(live_BT=open_BT)
        index_BK, live_BK = selected_at([site], candidates, decisions, *selection, score_BT, rule)
        if self.routing.candidates == "previous":
            decisions.ran_BT[self.layer] = torch.zeros_like(open_BT).scatter(1, index_BK, live_BK)
        if not self.routing.draws:
            always = self.routing.always_first
            decisions.seen[site] = RouterInputs(routed_BTD, open_BT, l_BT, tokens.index_BT, always, k, predictor)
        dtype = tokens.x_BTD.dtype
        g_BK1 = self._gate(torch.gather(l_BT, 1, index_BK), live_BK, dtype)
        g_BT1 = self._gate(l_BT, tokens.live_BT, dtype) if self.routing.gates_skipped else None
        return Chosen(index_BK, live_BK, tokens.rows(index_BK), g_BK1, g_BT1)

    def _gate(self, l_BT: Tensor, live_BT: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the weights (B, T, 1) of tokens with these scores."""
        g_BT: Tensor = GATES[self.routing.gate](l_BT, live_BT, self.routing)
        return g_BT[..., None].to(dtype)

    def run(self, inner: Tokens, decisions: Decisions, chosen: Chosen, part: str, left_BKD: Tensor) -> Tensor:
        """Returns the selected tokens after this part of the block and the blocks `chosen.after`, (B, K, D), and
        `left_BKD` in empty slots.
        """
        if chosen.after:
            y_BKD = Block.forward(self, inner, decisions)
            for block in chosen.after:
                y_BKD = block(inner._replace(x_BTD=y_BKD), decisions)
            new_BKD = BLOCKS_COMBINES[self.routing.combine](inner.x_BTD, y_BKD, chosen.g_BK1)
            return torch.where(chosen.live_BK[..., None], new_BKD, left_BKD)
        if part == "block":
            deltas: tuple[Tensor | None, Tensor | None] = self.deltas(inner, decisions, chosen.seen)
        elif part == "attention":
            deltas = self.attended(inner, decisions, chosen.seen), None
        else:
            deltas = None, self.transformed(inner, decisions)
        new_BKD = COMBINES[self.routing.combine](inner.x_BTD, *deltas, chosen.g_BK1)
        return torch.where(chosen.live_BK[..., None], new_BKD, left_BKD)

    def run_few(self, inner: Tokens, decisions: Decisions, chosen: Chosen, part: str, left_BKD: Tensor) -> Tensor:
        """Runs only the first `narrow` slots if no other slot is live, else all slots."""
        identity = left_BKD is inner.x_BTD
        before = decisions.before
        layers = [] if part == "mlp" or chosen.seen else [self.layer, *(block.layer for block in chosen.after)]

        def of_first(
            n: int, x_BKD: Tensor, live_BK: Tensor, g_BK1: Tensor, cos: Tensor, sin: Tensor, *more: Tensor
        ) -> tuple[Tensor, ...]:
            left_BKD, more = (x_BKD, more) if identity else (more[0], more[1:])
            seen, pasts = (more, ()) if chosen.seen else ((), more)
            tokens = Tokens(x_BKD[:, :n], live_BK[:, :n], cos[..., :n, :], sin[..., :n, :], None, inner.seq)
            few = chosen._replace(
                live_BK=live_BK[:, :n],
                g_BK1=g_BK1[:, :n],
                seen=KeysValues(seen[0], seen[1], seen[2][:, :n]) if seen else None,
            )
            noted = Decisions()
            noted.keys_values = {}
            if before is not None:
                caches = (Past(*pasts[3 * number : 3 * number + 3]) for number in range(len(layers)))
                noted.before = before._replace(past=dict(zip(layers, caches, strict=True)))
            outputs = [torch.cat((self.run(tokens, noted, few, part, left_BKD[:, :n]), left_BKD[:, n:]), 1)]
            for part_BGnE in (part for layer in layers for part in noted.keys_values[layer]):
                B, G, _, E = part_BGnE.shape
                outputs.append(torch.cat((part_BGnE, part_BGnE.new_zeros(B, G, x_BKD.shape[1] - n, E)), 2))
            return tuple(outputs)

        inputs: tuple[Tensor, ...] = (inner.x_BTD, chosen.live_BK, chosen.g_BK1, inner.cos, inner.sin)
        inputs += (*(() if identity else (left_BKD,)), *(chosen.seen or ()))
        inputs += tuple(tensor for layer in layers if before for tensor in before.past[layer][:3])
        # Live slots come first, so this slot tells whether more than `narrow` slots are live.
        more_B, k = chosen.live_BK[:, self.narrow], chosen.live_BK.shape[1]
        new_BKD, *rows = either(more_B, partial(of_first, k), partial(of_first, self.narrow), inputs)
        if decisions.keys_values is not None:
            decisions.keys_values |= zip(layers, zip(rows[::2], rows[1::2], strict=True), strict=True)
        return new_BKD


class Transformer(nn.Module):
    """The whole decoder; `init_weights` sets the weights from which a training run starts."""

    def __init__(self, spec: ModelSpec, outputs: str = "logits") -> None:
        """`outputs` is a name in OUTPUTS and determines the result of `forward`."""
        super().__init__()
        self.spec = spec
        self.outputs = outputs
        routed = set(spec.routed_layers)
        self.embedding = nn.Embedding(spec.vocab_size, spec.d_model)
        self.layers = nn.ModuleList(
            RoutedBlock(spec, i, spec.routing) if spec.routing and i in routed else Block(spec, i)
            for i in range(spec.n_layers)
        )
        self.norm = RMSNorm(spec.d_model, spec.norm_eps)
        self.head = None if spec.tie_embeddings else nn.Linear(spec.d_model, spec.vocab_size, bias=False)
        cos_PE, sin_PE = rope_tables(spec)
        self.register_buffer("rope_cos", cos_PE, persistent=False)
        self.register_buffer("rope_sin", sin_PE, persistent=False)
        self.rope_cos: Tensor
        self.rope_sin: Tensor
        if spec.routing is not None and spec.routing.draws:
            self.register_buffer("noise", noise_table(spec.routing.noise_seed), persistent=False)
        self.noise: Tensor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Transformer:
        """Converts the module as torch does, but keeps noise in 32 bits: rounded to 16 bits, many values would tie."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # Untyped in torch.
        if self.spec.routing is not None and self.spec.routing.draws and self.noise.dtype.itemsize < 4:
            self.noise = noise_table(self.spec.routing.noise_seed).to(self.noise.device)
        return self

    def init_weights(self, generator: torch.Generator) -> None:
        """Draws matrices from Normal(0, 0.02), output projections divided by sqrt(2 * n_layers) as in GPT-2."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
                continue
            output = name.endswith(("o_proj.weight", "down_proj.weight", "down_proj"))
            std = 0.02 / (2 * self.spec.n_layers) ** 0.5 if output else 0.02
            nn.init.normal_(parameter, std=std, generator=generator)

    def sharing(self, source: Transformer) -> Self:
        """Makes this model share the weights and tables of another one of the same sizes, and returns this model."""
        self.load_state_dict(source.state_dict(), assign=True)
        for name, buffer in source.named_buffers():
            self.register_buffer(name, buffer, persistent=False)
        return self.eval().requires_grad_(False)

    def embedded(self, ids: Tensor) -> Tensor:
        """Embeds ids (...) for the residual stream, (..., D)."""
        x: Tensor = self.embedding(ids)
        return x if self.spec.embedding_scale == 1 else x * self.spec.embedding_scale

    def block(self, layer: int) -> Block:
        """Returns the block of this number."""
        block = self.layers[layer]
        assert isinstance(block, Block)
        return block

    @property
    def head_weight(self) -> Tensor:
        """Weight of the head, (V, D), which maps hidden states to logits."""
        return self.embedding.weight if self.head is None else self.head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Maps hidden states (..., D) after the final norm to logits (..., V)."""
        return functional.linear(hidden, self.head_weight)

    def hidden(self, ids_BS: Tensor, lengths_B: Tensor, decisions: Decisions) -> Tensor:
        """Returns the hidden states after the final norm, (B, S, D), and records the decisions in `decisions`."""
        hidden_BSD: Tensor = self.norm(self.stream(ids_BS, lengths_B, decisions))
        return hidden_BSD

    def stream(self, ids_BS: Tensor, lengths_B: Tensor, decisions: Decisions, last_B: Tensor | None = None) -> Tensor:
        """Returns the residual stream after the last block, before the final norm, (B, S, D).

        With `last_B`, the positions of each row's last real token, it returns only these, (B, 1, D), and the last block
        computes no others if it can.
        """
        S = ids_BS.shape[1]
        real_BS = torch.arange(S, device=ids_BS.device) < lengths_B[:, None]
        cos, sin, position_BS = self.rope_cos[:S], self.rope_sin[:S], None
        if decisions.before is not None:
            first_B = decisions.before.position_B
            cos, sin = decisions.before.angles(first_B, S)
            position_BS = first_B[:, None] + torch.arange(S, device=ids_BS.device)
        tokens = Tokens(self.embedded(ids_BS), real_BS, cos, sin, position_BS, S)
        k_of_layer, router_of_layer = self.spec.k_of_layer(S), self.spec.router_of_layer
        exits = self.spec.routing is not None and self.spec.routing.selection == "exit"
        left: list[tuple[Tokens, Tensor, Tokens]] = []
        for i, layer in enumerate(self.layers):
            if router_of_layer.get(i, i) != i:
                continue  # The block with the router has run it.
            noise = None
            if isinstance(layer, RoutedBlock) and layer.routing.draws:
                noise = partial(noise_of_tokens, self.noise, ids_BS)
            if last_B is not None and i == len(self.layers) - 1 and not exits and i not in self.spec.expert_layers:
                assert isinstance(layer, Block)
                return layer.last(tokens, decisions, last_B[:, None], k_of_layer.get(i, 0), noise)
            if not isinstance(layer, RoutedBlock):
                tokens = tokens._replace(x_BTD=layer(tokens, decisions))
            elif exits:
                outer = tokens
                tokens, row_N = layer.narrowed(outer, decisions, k_of_layer[i])
                left.append((outer, row_N, tokens))
            else:
                after = [self.block(i + n) for n in range(1, layer.routing.blocks_per_router)]
                tokens = tokens._replace(x_BTD=layer(tokens, decisions, k_of_layer[i], noise, after))
        x_BTD = tokens.x_BTD
        # A token that exits keeps its stream of that layer. Tokens that stayed are written back, the last exit first.
        for outer, row_N, inner in reversed(left):
            # The token in an empty slot has exited, and keeps its stream.
            x_BTD = outer.put(row_N, torch.where(inner.live_BT[..., None], x_BTD, inner.x_BTD))
        return x_BTD if last_B is None else _tokens_at(x_BTD, last_B)

    def last_logits(self, ids_BS: Tensor, lengths_B: Tensor, decisions: Decisions) -> Tensor:
        """Returns the logits (B, V) of each row's last real token."""
        return self.logits(self.norm(self.stream(ids_BS, lengths_B, decisions, lengths_B - 1)))[:, 0]

    def forward(self, ids_BS: Tensor, lengths_B: Tensor) -> tuple[Tensor, ...]:
        """Returns the output that `outputs` names, as a tuple of one; this is the forward pass that is exported."""
        return (OUTPUTS[self.outputs](self, ids_BS, lengths_B),)


def _with_room(live_BK: Tensor, decisions: Decisions, site: Site) -> Tensor:
    """Leaves out the selected tokens for which earlier tokens have left no slot."""
    if decisions.before is None:
        return live_BK
    slot_K = torch.arange(live_BK.shape[1], device=live_BK.device)
    return live_BK & (slot_K < decisions.before.free_B(site)[:, None])


def weight_shapes(spec: ModelSpec) -> dict[str, torch.Size]:
    """Returns state_dict name -> shape, for every weight of a model with this spec."""
    # One position is enough: no weight depends on it, and RoPE tables take memory even on the meta device.
    with torch.device("meta"):
        state = Transformer(replace(spec, max_positions=1)).state_dict()
    return {name: tensor.shape for name, tensor in state.items()}


def _tokens_at(x_BSD: Tensor, position_B: Tensor) -> Tensor:
    """Returns one token of each row, (B, 1, D), with one plain Gather of rows, as in a routed block."""
    B, S, D = x_BSD.shape
    row_B = S * torch.arange(B, device=x_BSD.device) + position_B
    return torch.index_select(x_BSD.reshape(B * S, D), 0, row_B)[:, None]


OUTPUTS: dict[str, Callable[[Transformer, Tensor, Tensor], Tensor]] = {
    "logits": lambda model, ids_BS, lengths_B: model.logits(model.hidden(ids_BS, lengths_B, Decisions())),
    "last": lambda model, ids_BS, lengths_B: model.last_logits(ids_BS, lengths_B, Decisions()),
    "none": lambda model, ids_BS, lengths_B: model.hidden(ids_BS, lengths_B, Decisions()),
}
"""Name -> (model, ids (B, S), lengths (B,)) -> logits (B, S, V) of every token, logits (B, V) of each row's last real
token, or hidden states (B, S, D)."""

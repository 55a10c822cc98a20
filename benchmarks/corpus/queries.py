"""Routers around attention that route only the queries. Keys and values come from all tokens, so no token is hidden."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from benchmarks.corpus.routers import Apart
from benchmarks.corpus.tokens import at_tokens

QUERIES = (-2,)
"""Dimension of the queries in a mask, counted from the end."""


class Queries(Apart):
    """Wraps attention that takes the tokens to attend to as an argument, which `context` names.

    The mask has a row for each query, so only that dimension is gathered.
    """

    around = "attention"
    context = "encoder_hidden_states"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        keyword_x = kwargs.pop(self.hidden) if self.hidden in kwargs else None
        x, args = (args[0], args[1:]) if keyword_x is None else (keyword_x, args)
        index_BK, gate_BK = self.select(x)
        chosen = self.taken(x, index_BK)
        returned = self.attend(chosen, x, index_BK, args, kwargs)
        result = returned[0] if isinstance(returned, tuple) else returned
        out = self.put_back(x, index_BK, gate_BK, chosen, result)
        return (out, *returned[1:]) if isinstance(returned, tuple) else out

    def attend(self, chosen: Tensor, x: Tensor, index_BK: Tensor, args: Any, kwargs: dict[str, Any]) -> Any:
        """Attention from the selected tokens to all of `x`; `args` and `kwargs` are for all tokens."""
        args, kwargs = at_tokens((args, kwargs), index_BK, x.shape[1], QUERIES)
        return self.block(chosen, *args, **kwargs | {self.context: x})


class QueriesOfKeyValueStates(Queries):
    """Attention of encoder-decoders of transformers, which takes `key_value_states`."""

    context = "key_value_states"


class QueriesOfContext(Queries):
    """Attention of x-transformers, which takes `context`."""

    context = "context"


class QueriesOfMultihead(Queries):
    """`nn.MultiheadAttention`, which is given query, key and value."""

    def attend(self, chosen: Tensor, x: Tensor, index_BK: Tensor, args: Any, kwargs: dict[str, Any]) -> Any:
        return self.block(chosen, x, x, **{name: kwargs[name] for name in ("key_padding_mask",) if name in kwargs})


class QueriesOfProjections(Queries):
    """Attention of transformers' decoders with `q_proj`, `k_proj`, `v_proj`, `o_proj` and rotary positions: runs the
    lines of its forward, with queries from the selected tokens only.
    """

    @property
    def computes(self) -> nn.Module:
        return self.block.q_proj

    def attend(self, chosen: Tensor, x: Tensor, index_BK: Tensor, args: Any, kwargs: dict[str, Any]) -> Any:
        attention, (cos, sin) = self.block, kwargs["position_embeddings"]
        # Tokens in the rotary tables and queries in the mask are both dimension -2.
        mask, cos_BKE, sin_BKE = at_tokens((kwargs["attention_mask"], cos, sin), index_BK, x.shape[1], QUERIES)
        heads = (-1, attention.head_dim)
        query = attention.q_proj(chosen).unflatten(-1, heads).transpose(1, 2)
        key = attention.k_proj(x).unflatten(-1, heads).transpose(1, 2)
        value = attention.v_proj(x).unflatten(-1, heads).transpose(1, 2)
        rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb
        query, _ = rotate(query, query, cos_BKE, sin_BKE)
        key, _ = rotate(key, key, cos, sin)
        seen = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=attention.scaling, enable_gqa=True
        )
        return attention.o_proj(seen.transpose(1, 2).flatten(2)), None

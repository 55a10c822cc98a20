"""Selection of the tokens of a block that get its k slots, by one of two rules.

Shape legend: B batch, S positions of a row, T tokens that the block is given, K slots, D model width, E head
width, R = B * T rows of the flattened stream, N = B * K rows of it. `...` is (B,) for tokens, and (B, N) for the N
experts of a block, which select at the same time.

Both rules return the slots of selected tokens first, in the order of the sequence, and then empty slots, which hold
skipped tokens. So with causal attention among the slots, a selected token sees no empty slot and no later token. All
slots of a row hold different tokens, so a plain scatter can write them back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from mod_export.marker import mark_selection
from mod_models.fixed_capacity import select_tokens, token_rows
from mod_models.routing import Decisions, Routing
from mod_models.spec import Site

Rule = Literal["rank", "first_come"]
RANK: Final = "rank"
"""The k largest scores of the whole row, ties to the earlier token."""
FIRST_COME: Final = "first_come"
"""The first k tokens whose score is above 0. The selection of a token does not depend on later tokens."""
NOISE_SIZE = 2**16
NOISE_STRIDE = 7919
"""A prime, so that the noise of two routing sites is read from different parts of the table."""


class Tokens(NamedTuple):
    """T tokens of each row: the live tokens first, in the order of the sequence.

    Attributes:
        x_BTD: the residual stream.
        live_BT: bool; False for padding, and for skipped tokens in empty slots.
        cos: rotary cosines, (T, E / 2) for a whole row or compact positions, else (B, 1, T, E / 2).
        sin: rotary sines, of the same shape.
        index_BT: int64 positions in the row; None if T is the whole row.
        seq: S.
    """

    x_BTD: Tensor
    live_BT: Tensor
    cos: Tensor
    sin: Tensor
    index_BT: Tensor | None
    seq: int

    def rows(self, index_BK: Tensor) -> Tensor:
        """Converts numbers among the T tokens to row numbers (N,) of the flattened (B * T, D) stream.

        One plain Gather and one plain Scatter of distinct rows are the cheapest form in every runtime, and the only
        form that TensorRT takes without a plugin.
        """
        return token_rows(index_BK, self.x_BTD.shape[1])

    def at(self, row_N: Tensor, index_BK: Tensor, live_BK: Tensor, positions: str) -> Tokens:
        """Returns the tokens with these numbers; `RoutingSpec.positions` determines their rotary angles."""
        B, T, D = self.x_BTD.shape
        k = index_BK.shape[1]
        x_BKD = torch.index_select(self.x_BTD.reshape(B * T, D), 0, row_N).reshape(B, k, D)
        if positions == "compact":
            cos, sin = self.cos[:k], self.sin[:k]
        elif self.index_BT is None:
            position_N = index_BK.reshape(-1)
            cos = torch.index_select(self.cos, 0, position_N).reshape(B, 1, k, -1)
            sin = torch.index_select(self.sin, 0, position_N).reshape(B, 1, k, -1)
        else:
            cos = torch.index_select(self.cos.reshape(B * T, -1), 0, row_N).reshape(B, 1, k, -1)
            sin = torch.index_select(self.sin.reshape(B * T, -1), 0, row_N).reshape(B, 1, k, -1)
        return Tokens(x_BKD, live_BK, cos, sin, self.positions(index_BK), self.seq)

    def put(self, row_N: Tensor, new_BKD: Tensor) -> Tensor:
        """Returns the stream x_BTD with new values in these rows."""
        B, T, D = self.x_BTD.shape
        return self.x_BTD.reshape(B * T, D).index_put((row_N,), new_BKD.reshape(-1, D)).reshape(B, T, D)

    def positions(self, index_BK: Tensor) -> Tensor:
        """Converts numbers among the T tokens to positions in the row."""
        return index_BK if self.index_BT is None else torch.gather(self.index_BT, 1, index_BK)


def select_topk(score: Tensor, real: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Applies `select_tokens` to the real tokens of each row.

    Args:
        score: float32 (..., T).
        real: bool (..., T), False for padding, which comes after the real tokens of its row and is ranked last.
        k: number of slots, 1 <= k <= T.

    Returns:
        index int64 (..., k) ascending; live bool (..., k), False in empty slots, which hold padding.
    """
    index = select_tokens(torch.where(real, score, float("-inf")), k)
    return index, torch.gather(real, -1, index)


def always_first(score_BT: Tensor, position_BT: Tensor | None, count: int) -> Tensor:
    """Sets the scores (B, T) of a row's first `count` positions to infinity, so that every rule selects them first.

    `position_BT` holds the positions of the T tokens; None if T is the whole row. Gates use the original scores.
    """
    if count == 0:
        return score_BT
    if position_BT is None:
        position_BT = torch.arange(score_BT.shape[1], device=score_BT.device)
    return torch.where(position_BT < count, torch.inf, score_BT)


def selected_at(
    sites: Sequence[Site], tokens: Tokens, decisions: Decisions, index: Tensor, live: Tensor, score: Tensor, rule: Rule
) -> tuple[Tensor, Tensor]:
    """Marks a selection as a routing site, so that an exporter can observe and replace it, and records the decision.

    Args:
        sites: the name of the site, or N names of sites that select at the same time.
        tokens: the tokens to select from.
        decisions: gets a Routing for each site.
        index: int64 (B, K), or (B, N, K), numbers among the T tokens.
        live: bool, of the shape of `index`.
        score: float32 (B, T), or (B, N, T).
        rule: `RANK` or `FIRST_COME`.

    Returns:
        New index and live, which the caller must use instead of its own.
    """
    index, live = mark_selection(
        index,
        score,
        live=live,
        available=tokens.live_BT,
        positions=tokens.index_BT,
        name=list(map(str, sites)),
        rule=rule,
    )
    for n, site in enumerate(sites):
        parts = (index, live, score) if index.dim() == 2 else (index[:, n], live[:, n], score[:, n])
        decisions.made[site] = Routing(tokens.positions(parts[0]), *parts[1:], tokens.live_BT, rule)
    return index, live


@cache
def _quantiles(seed: int) -> Tensor:
    # A hash gives the same order on every machine and in every version; no library's generator guarantees that.
    order = sorted(range(NOISE_SIZE), key=lambda i: hashlib.sha256(f"{seed}:{i}".encode()).digest())
    share = (torch.tensor(order, dtype=torch.float64, device="cpu") + 0.5) / NOISE_SIZE
    noise_N: Tensor = torch.special.ndtri(share).float()
    return noise_N


def noise_table(seed: int) -> Tensor:
    """Returns standard normal noise, float32 (NOISE_SIZE,): distinct quantiles in an order given by the seed."""
    return _quantiles(seed).clone()


def noise_of_tokens(table_N: Tensor, ids_BS: Tensor, site: Site) -> Tensor:
    """Returns noise for every token, float32 (B, S); it depends on the text up to that token and on the site.

    A graph has no random generator and must be deterministic, so the noise comes from a table, at the running sum of
    the token ids. Different texts get different noise. `table_N` is from `noise_table`, and ids are int64.
    """
    # The number comes from the bytes of the name, because Python's hash of a string differs between processes.
    offset = NOISE_STRIDE * (1 + int.from_bytes(str(site).encode(), "big") % NOISE_STRIDE)
    sum_BS = torch.cumsum(ids_BS + 1, dim=1)
    return torch.index_select(table_N, 0, ((sum_BS + offset) % NOISE_SIZE).reshape(-1)).reshape(ids_BS.shape)

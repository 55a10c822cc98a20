"""Selection: the tokens that a block is given, and which of them get the k slots, by one of two rules.

Shape legend: B batch, S positions of a row, T tokens given, K slots, D model width, E half a head's width, R = B * T
rows of the flattened stream, N = B * K rows of it. `...` is (B,) for tokens, and (B, N) for the N experts of a block,
whose selections are made at once.

Both rules return the slots of selected tokens first, in the order of the sequence, and then empty slots, which hold
skipped tokens. So causal attention among the slots shows no selected token an empty slot or a later token, and all
slots of a row hold different tokens, which lets them be written back by a plain scatter.
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
"""The k largest scores, ties to the earlier token. Looks at the whole row."""
FIRST_COME: Final = "first_come"
"""The first k tokens whose score is above 0. Whether a token is selected depends on nothing after it."""
NOISE_SIZE = 2**16
NOISE_STRIDE = 7919
"""A prime, so that the noise of two routing sites is read from different parts of the table."""


class Tokens(NamedTuple):
    """T tokens of each row, the live ones first and in the order of the sequence.

    Attributes:
        x_BTD: the residual stream.
        live_BT: bool; False for padding, and for skipped tokens in empty slots.
        cos: rotary cosines, (T, E) of a whole row, (B, 1, T, E) of selected tokens.
        sin: the sines.
        index_BT: int64 positions in the row; None when all S tokens are here.
        seq: S.
    """

    x_BTD: Tensor
    live_BT: Tensor
    cos: Tensor
    sin: Tensor
    index_BT: Tensor | None
    seq: int

    def rows(self, index_BK: Tensor) -> Tensor:
        """Numbers among the T tokens as rows (N,) of the flattened (B * T, D) stream.

        One plain Gather and one plain Scatter with unique rows are the cheapest form in every runtime and the only one
        that TensorRT takes without a plugin.
        """
        return token_rows(index_BK, self.x_BTD.shape[1])

    def at(self, row_N: Tensor, index_BK: Tensor, live_BK: Tensor, positions: str) -> Tokens:
        """The tokens with these numbers, with the rotary angles that `positions` (see RoutingSpec) says."""
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
        """The stream x_BTD with new values in these rows."""
        B, T, D = self.x_BTD.shape
        return self.x_BTD.reshape(B * T, D).index_put((row_N,), new_BKD.reshape(-1, D)).reshape(B, T, D)

    def positions(self, index_BK: Tensor) -> Tensor:
        """Numbers among the T tokens as positions in the row."""
        return index_BK if self.index_BT is None else torch.gather(self.index_BT, 1, index_BK)


def select_topk(score: Tensor, real: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`select_tokens` among each row's real tokens.

    Args:
        score: float32 (..., T).
        real: bool (..., T), False for padding. It comes after every real token of its row, and is ranked last.
        k: how many to take, 1 <= k <= T.

    Returns:
        index int64 (..., k) ascending, live bool (..., k): False in empty slots, which hold padding.
    """
    index = select_tokens(torch.where(real, score, float("-inf")), k)
    return index, torch.gather(real, -1, index)


def always_first(score_BT: Tensor, position_BT: Tensor | None, count: int) -> Tensor:
    """Scores (B, T) with those of the first `count` positions of a row at infinity, which every rule selects first.

    `position_BT` says where the T tokens stand in their rows; None where T is the whole row. Gates are made from the
    scores as they were.
    """
    if count == 0:
        return score_BT
    if position_BT is None:
        position_BT = torch.arange(score_BT.shape[1], device=score_BT.device)
    return torch.where(position_BT < count, torch.inf, score_BT)


def selected_at(
    sites: Sequence[Site], tokens: Tokens, decisions: Decisions, index: Tensor, live: Tensor, score: Tensor, rule: Rule
) -> tuple[Tensor, Tensor]:
    """Marks a selection as a routing site, where an exporter can observe and replace it, and notes it in `decisions`.

    Args:
        sites: the name of the site; or N names, of sites that select at once.
        tokens: that can be selected.
        decisions: gets a Routing for each site.
        index: int64 (B, K), or (B, N, K), numbers among the T tokens.
        live: bool, of the same shape.
        score: float32 (B, T), or (B, N, T).
        rule: `RANK` or `FIRST_COME`.

    Returns:
        Index and live, which must be used instead of those that were given.
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
        one = (index, live, score) if index.dim() == 2 else (index[:, n], live[:, n], score[:, n])
        decisions.made[site] = Routing(tokens.positions(one[0]), *one[1:], tokens.live_BT, rule)
    return index, live


@cache
def _quantiles(seed: int) -> Tensor:
    # Ordered by a hash: the same on every machine and in every version, which no library's generator promises.
    order = sorted(range(NOISE_SIZE), key=lambda i: hashlib.sha256(f"{seed}:{i}".encode()).digest())
    share = (torch.tensor(order, dtype=torch.float64, device="cpu") + 0.5) / NOISE_SIZE
    noise_N: Tensor = torch.special.ndtri(share).float()
    return noise_N


def noise_table(seed: int) -> Tensor:
    """Standard normal noise, float32 (NOISE_SIZE,): its quantiles, all different, in an order that the seed decides."""
    return _quantiles(seed).clone()


def noise_of_tokens(table_N: Tensor, ids_BS: Tensor, site: Site) -> Tensor:
    """Noise for every token, float32 (B, S), that depends on the text before it, the token itself, and the site.

    A graph has no generator and must give the same answer twice, so noise is read from a table, at the running sum of
    the token ids: other texts, other noise. `table_N` is from `noise_table`, and ids are int64.
    """
    # Plain arithmetic on the name: Python's own hash of a string is another one in every process.
    offset = NOISE_STRIDE * (1 + int.from_bytes(str(site).encode(), "big") % NOISE_STRIDE)
    sum_BS = torch.cumsum(ids_BS + 1, dim=1)
    return torch.index_select(table_N, 0, ((sum_BS + offset) % NOISE_SIZE).reshape(-1)).reshape(ids_BS.shape)
